"""`tba sql` on a store on which nothing trains.

- It prints a table, JSON or CSV, each value under its own name.
- It refuses to write, and a query that cannot be answered, with the reason; it says when there is no such run.

Run: pytest tests/flows/cli/test_sql.py
"""

import json
import re

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from storage.store import RunStore


def tba(*arguments: str):
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.fixture
def stored_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TBA_STORE", raising=False)
    store = RunStore((tmp_path / ".tba").as_uri(), "some")
    store.create_run({"seed": 0})
    return store


ROWS = "SELECT unnest([1, 2]) AS number, unnest(['a, b', '[c]']) AS text"


def test_sql_prints_json(stored_run):
    result = tba("sql", "some", ROWS, "--format", "json")
    assert json.loads(result.stdout) == [{"number": 1, "text": "a, b"}, {"number": 2, "text": "[c]"}]


def test_what_is_no_number_is_null_in_json(stored_run):
    """As in a skipped step's loss. NaN is no JSON: jq and JavaScript refuse all of it."""
    rows = "SELECT 'nan'::FLOAT AS loss, [1.5, '-inf'::FLOAT] AS more"
    printed = tba("sql", "some", rows, "--format", "json").stdout
    assert json.loads(printed, parse_constant=pytest.fail) == [{"loss": None, "more": [1.5, None]}]


def test_sql_prints_csv(stored_run):
    assert tba("sql", "some", ROWS, "--format", "csv").stdout == 'number,text\n1,"a, b"\n2,[c]\n'


def test_two_columns_of_one_name_keep_their_values(stored_run):
    """As `SELECT * FROM trajectories JOIN batches` has them."""
    rows = "SELECT 1 AS reward, 2 AS reward_1, 3 AS reward, 4 AS step"
    assert tba("sql", "some", rows, "--format", "csv").stdout == "reward,reward_1,reward_2,step\n1,2,3,4\n"
    (row,) = json.loads(tba("sql", "some", rows, "--format", "json").stdout)
    assert row == {"reward": 1, "reward_1": 2, "reward_2": 3, "step": 4}
    assert re.findall(r"\d+", tba("sql", "some", rows).stdout.splitlines()[3]) == ["1", "2", "3", "4"]


def test_sql_prints_a_table(stored_run):
    lines = tba("sql", "some", ROWS).stdout.splitlines()
    assert "number" in lines[1] and "text" in lines[1]
    assert "[c]" in lines[4]  # not taken for markup
    assert lines[-1] == "2 rows"


def test_sql_has_views_before_anything_is_stored(stored_run):
    result = tba("sql", "some", "SELECT count(*) AS n FROM trajectories", "--format", "csv")
    assert result.stdout == "n\n0\n"


@pytest.mark.parametrize(
    ("run", "query", "message"),
    [
        ("some", "CREATE TABLE t (x INT)", "CREATE"),
        ("some", "SELECT nothing FROM trajectories", "nothing"),
        ("absent", "SELECT 1", "There is no run 'absent'"),
        ("../some", "SELECT 1", "run: got '../some'"),
    ],
)
def test_sql_refuses_with_the_reason(stored_run, run, query, message):
    result = tba("sql", run, query)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
