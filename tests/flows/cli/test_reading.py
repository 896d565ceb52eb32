"""Commands that read a run's store, on a run that a short training left (tests/flows/prepared_run.py).

Claims
- `tba runs` lists every run of a store with its state, and nothing else that lies there; a live Trainer is alive
- `tba watch` says the alarms that are on, and what to turn
- `tba show` tells of each drawn response reward, draw probability, age, weights; says which steps there are
- what a reward prints while `tba evaluate` measures is not on stdout, where the figures are
- `tba sql` takes its query from standard input; its prompt takes several lines, survives a mistake, ends by \\q
- `tba export` says which file cannot be written
- names of runs complete in a shell, from the store that the line names
- no command that only reads imports a heavy library, nor does --help
- every command's help has an example

Run: pytest tests/flows/cli/test_reading.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from flows.cli import sql
from flows.cli.app import app
from flows.cli.console import Progress
from storage import attempts, kept_policies, ledger, policies
from storage.process_identity import Identity
from storage.store import RunStore
from tests.flows.prepared_run import heartbeat, prepare_run
from tests.storage.helpers import make_batch

REPOSITORY = Path(__file__).parents[3]
HEAVY = ("torch", "prefect", "transformers", "great_expectations", "vllm", "s3fs")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """The working folder, whose .tba is a store with one run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TBA_STORE", raising=False)
    prepare_run((tmp_path / ".tba").as_uri())
    return tmp_path


def tba(*arguments: str, text: str | None = None):
    return CliRunner().invoke(app, arguments, input=text, catch_exceptions=False)


def test_watch_says_the_alarms(root, monkeypatch):
    store = prepare_run((root / ".tba").as_uri(), "peaked")
    attempts.write_heartbeat(
        store, heartbeat(3, alarms={"entropy_low": "entropy is near zero. Raise search.temperature"})
    )
    monkeypatch.setattr(Progress, "wait", lambda *_: store.put("summary.json", b'{"run": "peaked", "steps": 80}'))
    lines = tba("watch", "peaked").stdout.splitlines()
    assert "ALARM: entropy is near zero. Raise search.temperature" in lines
    assert any("alarms entropy low" in line for line in lines)


def test_runs_tells_the_state_of_each(root):
    url = (root / ".tba").as_uri()
    prepare_run(url, "done", finished=True)
    ours = prepare_run(url, "ours")
    attempts.start_attempt(ours, resumed_from=0, owner=Identity.current())
    attempts.write_heartbeat(ours, heartbeat(2))
    (root / "policy").mkdir()
    kept_policies.keep_if_best(
        ours, policies.publish_policy(ours, root / "policy", policies.policy_ref(2, "f" * 32, attempt=2)), 0.875, 8
    )
    lost = prepare_run(url, "lost")
    attempts.write_heartbeat(lost, heartbeat(1, state="failed", message="no room is left"))
    (root / ".tba" / ".local").mkdir()
    (root / ".tba" / "not-a-run").mkdir()
    found = {run["run"]: run for run in json.loads(tba("runs", "--json").stdout)}
    assert {name: run["state"] for name, run in found.items()} == {
        "arithmetic": "stopped", "done": "finished", "lost": "failed", "ours": "alive",
    }  # fmt: skip
    assert found["lost"]["message"] == "no room is left"
    assert (found["done"]["step"], found["done"]["trajectories"]) == (80, 640)
    assert (found["ours"]["step"], found["ours"]["steps"], found["ours"]["accuracy"]) == (2, 80, 0.25)
    assert (found["ours"]["best_accuracy"], found["done"]["best_accuracy"]) == (0.875, None)
    listed = tba("runs")
    assert listed.stderr == "lost: no room is left\n"
    table = listed.stdout
    assert "not-a-run" not in table and "3/80" in table and "0.250" in table and "0.875" in table


def test_runs_of_an_empty_store_says_so(tmp_path):
    result = tba("runs", "--store", str(tmp_path))
    assert (result.exit_code, result.stdout[:21]) == (0, "There are no runs in ")


def test_evaluates_figures_are_alone_on_stdout(root, monkeypatch):
    def measured(*_):
        print("a reward says hello")
        return {"accuracy": 0.5}

    monkeypatch.setattr("flows.evaluate.check", lambda *_: None)
    monkeypatch.setattr("flows.searcher.start.start_searcher", lambda *_: None)
    monkeypatch.setattr("flows.evaluate.measure_policy", measured)
    told = tba("evaluate", "arithmetic", "--json")
    assert json.loads(told.stdout) == {"accuracy": 0.5} and "a reward says hello" in told.stderr


def test_show_tells_what_trained_a_step(root):
    shown = json.loads(tba("show", "arithmetic", "2", "--json").stdout)
    assert (shown["facts"]["step"], shown["facts"]["learning_rate"]) == (2, 1e-5)
    first = shown["batch"][0]
    assert (first["prompt"], first["response"], first["prompt_index"]) == ("1 + 1 =", " 0\n", 0)
    assert (first["draw_probability"], first["weight"], first["times"]) == (0.25, 0.25, 1)
    assert (first["staleness"], first["recent"], first["policy_fingerprint"]) == (1, True, "f" * 32)
    text = tba("show", "arithmetic", "2").stdout
    assert "Prompt 0: p0" in text and "1 + 1 =" in text and " 0\\n" in text and "ffffff" in text


def test_show_counts_a_trajectory_that_fills_several_slots(root):
    store = RunStore((root / ".tba").as_uri(), "arithmetic")
    batch = make_batch([0, 0, 0, 0]).to_pydict()
    batch["trajectory_id"] = [batch["trajectory_id"][i] for i in (0, 1, 0, 0)]
    ledger.record_batch(store, 1, 9, pa.table(batch, schema=make_batch([0]).schema))
    rows = json.loads(tba("show", "arithmetic", "9", "--json").stdout)["batch"]
    assert [(row["times"], row["weight"]) for row in rows] == [(3, 0.75), (1, 0.25)]


def test_show_says_which_steps_there_are(root):
    result = tba("show", "arithmetic", "4")
    assert (result.exit_code, result.stderr) == (2, "Run 'arithmetic' has no step 4: steps 1 to 3 were trained.\n")


def test_an_absent_run_is_told_with_those_there_are(root):
    result = tba("show", "absent", "1")
    assert result.exit_code == 2
    assert "There is no run 'absent'" in result.stderr and "Runs there: arithmetic." in result.stderr


def test_a_database_that_cannot_be_written_is_named(root):
    result = tba("export", "arithmetic", "absent/run.duckdb")
    assert result.exit_code == 2 and result.stderr.startswith("absent/run.duckdb cannot be written: ")


def test_sql_takes_its_query_from_standard_input(root):
    assert (
        tba("sql", "arithmetic", "--json", text="SELECT count(*) AS n\nFROM batches").stdout
        == '[\n  {\n    "n": 12\n  }\n]\n'
    )


def test_sql_has_a_prompt(root, monkeypatch):
    typed = iter(
        ["SELECT count(*)", "AS rounds FROM search_rounds;", "", "DROP TABLE x;", "SELECT 41 + 1 AS n;", " \\q"]
    )
    prompts = []
    monkeypatch.setattr("builtins.input", lambda prompt: prompts.append(prompt) or next(typed))
    monkeypatch.setattr(sql.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    command = sql.app.registered_commands[0].callback
    command("arithmetic", None, (root / ".tba").as_uri(), sql.Format.csv)
    assert prompts == ["tba> ", "  ...> ", "tba> ", "tba> ", "tba> ", "tba> "]


def test_the_prompt_prints_answers_and_goes_on_after_a_mistake(root, monkeypatch, capsys):
    test_sql_has_a_prompt(root, monkeypatch)
    printed = capsys.readouterr()
    assert "rounds\n2\n" in printed.out and "n\n42\n" in printed.out
    assert "DROP" in printed.err


def test_ctrl_c_stops_a_query_and_the_prompt_goes_on(root, monkeypatch, capsys):
    errors = iter([KeyboardInterrupt(), RuntimeError("Query interrupted")])

    def query(store, statement):
        raise next(errors)

    monkeypatch.setattr("storage.queries.query", query)
    monkeypatch.setattr(sql, "statements", lambda: ["SELECT 1;", "SELECT 2;"])
    monkeypatch.setattr(sql.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    sql.app.registered_commands[0].callback("arithmetic", None, (root / ".tba").as_uri(), sql.Format.csv)
    assert capsys.readouterr().err == "The query was interrupted.\nQuery interrupted\n"


def test_ctrl_d_leaves_the_prompt_and_ctrl_c_drops_the_line(monkeypatch, capsys):
    typed = iter(["SELECT 1", KeyboardInterrupt, "SELECT 2;", EOFError])

    def read(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    assert list(sql.statements()) == ["SELECT 2;"]


def test_names_of_runs_complete(root, tmp_path):
    prepare_run((tmp_path / "other").as_uri(), "digits")

    def complete(words: str) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "_TBA_COMPLETE": "complete_bash",
                       "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}  # fmt: skip
        code = "from flows.cli.app import app; app(prog_name='tba')"
        done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
        return done.stdout.split()

    assert complete("tba show ar") == ["arithmetic"]
    assert complete("tba show --store other ") == ["digits"]


LIGHT = {
    "help": ["--help"],
    "sql": ["sql", "arithmetic", "SELECT count(*) FROM trajectories"],
    "runs": ["runs"],
    "show": ["show", "arithmetic", "2"],
    "searchers": ["searchers", "arithmetic", "+1"],
    "stop": ["stop", "arithmetic"],
}


def test_light_commands_import_nothing_heavy(root):
    """In one process: what one of them brings in, the next would see."""
    code = f"""
import sys
from typer.testing import CliRunner
from flows.cli.app import app
for name, arguments in {LIGHT!r}.items():
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, SystemExit | None), result.exception
    print(name, result.exit_code, [heavy for heavy in {HEAVY!r} if heavy in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    status = dict.fromkeys(LIGHT, 0) | {"stop": 2}  # nobody trains it
    assert done.stdout.splitlines() == [f"{name} {status[name]} []" for name in LIGHT], done.stderr


def commands() -> dict:
    return get_command(app).commands


@pytest.mark.parametrize("name", commands())
def test_every_help_has_an_example(name):
    assert f"Example: tba {name}" in commands()[name].help
