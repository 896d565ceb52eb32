"""A run as a DuckDB database file.

Claims
- every view has the rows, columns and comments that `tba sql` has, of a folder and of S3
- a reader in another process sees what is committed after it opened the file read-only; neither waits for the other
- a run that has stored nothing yet has empty views, and rows once it has
- expired shards are not shown; a quote in the store's path is one

Run: pytest tests/storage/test_export.py
"""

import json

import duckdb
import pytest

from storage import inspect, ledger
from storage.expiry import expire
from storage.export import export
from storage.shards import commit_shard
from storage.store import RunStore
from tests.storage.helpers import (
    NOON,
    OWNER,
    make_batch,
    make_search_round,
    make_shard,
    make_training_step,
    start_python,
)

READER = """
import sys, duckdb
with duckdb.connect(sys.argv[1], read_only=True) as reader:
    for _ in sys.stdin:
        print(reader.execute("SELECT count(*), max(round) FROM trajectories").fetchone(), flush=True)
"""


def fill(store: RunStore) -> None:
    store.create_run({})
    ledger.start_attempt(store, 0, OWNER)
    for number in range(3):
        commit_shard(store, make_shard("s0", number))
        ledger.record_search_round(store, make_search_round("s0", number))
    for step in (1, 2):
        ledger.record_batch(store, 1, step, make_batch([0, step - 1]))
        ledger.record_training_step(store, make_training_step(1, step))
    ledger.start_attempt(store, 1, OWNER, previous=1)  # step 2 is undone


def test_every_view_is_as_in_tba_sql(store, tmp_path):
    fill(store)
    file = tmp_path / "run.duckdb"
    assert export(store, file) == (store.local_path("") is not None)
    comments = (
        "SELECT column_name, data_type, comment FROM duckdb_columns() WHERE table_name = '{}' ORDER BY column_index"
    )
    with duckdb.connect(file, read_only=True) as reader, inspect.connect(store) as ours:
        for view in inspect.VIEWS:
            rows = f"SELECT * FROM {view} ORDER BY ALL"
            assert reader.execute(rows).fetchall() == ours.execute(rows).fetchall(), view
            assert reader.execute(comments.format(view)).fetchall() == ours.execute(comments.format(view)).fetchall()
        assert reader.execute("SELECT step FROM training_steps").fetchall() == [(1,)]


def test_a_reader_follows_a_run_that_goes_on(local_store, tmp_path):
    fill(local_store)
    file = tmp_path / "run.duckdb"
    export(local_store, file)
    reader = start_python(READER, str(file))

    def read() -> str:
        reader.stdin.write("\n")
        reader.stdin.flush()
        return reader.stdout.readline().strip()

    try:
        assert read() == "(12, 2)"
        commit_shard(local_store, make_shard("s0", 3))
        assert read() == "(16, 3)"
        export(local_store, file)  # replaced while it is open
        assert read() == "(16, 3)"
    finally:
        reader.kill()
        reader.communicate()


def test_a_run_with_nothing_yet_fills(local_store, tmp_path):
    local_store.create_run({})
    export(local_store, tmp_path / "run.duckdb")
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as reader:
        for view in inspect.VIEWS:
            assert reader.execute(f"SELECT * FROM {view}").fetchall() == [], view
        fill(local_store)
        assert reader.execute("SELECT count(*), min(created_at) FROM trajectories").fetchone() == (12, NOON)
        assert reader.execute("SELECT rewards['exact'] FROM trajectories WHERE reward = 1 LIMIT 1").fetchone() == (1.0,)
        assert reader.execute("SELECT count(*) FROM attempts").fetchone() == (2,)


def test_expired_shards_are_not_shown(local_store, tmp_path):
    fill(local_store)
    local_store.put("summary.json", json.dumps({}).encode())  # a run that goes on keeps what a resume needs
    export(local_store, tmp_path / "run.duckdb")
    assert expire(local_store, None, 4, 1)
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as reader:
        left = reader.execute("SELECT DISTINCT round FROM trajectories").fetchall()
    assert left == [(2,)]


@pytest.mark.parametrize("folder", ["an 'apostrophe'", "with space"])
def test_the_stores_path_may_have_quotes(tmp_path, folder):
    store = RunStore((tmp_path / folder).as_uri(), "run")
    fill(store)
    export(store, tmp_path / "run.duckdb")
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as reader:
        assert reader.execute("SELECT count(*) FROM trajectories").fetchone() == (12,)
