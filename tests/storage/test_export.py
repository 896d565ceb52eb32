"""A run as a DuckDB database file.

Claims
- every view has the rows, columns and comments that `tba sql` has, of a folder and of S3
- a reader in another process sees what is committed after it opened the file read-only; neither waits for the other
- a run that has stored nothing yet has empty views, and rows once it has
- what has expired or was compacted counts as in `tba sql`, whatever files lie side by side; so do rewards of what has
  expired or was refused
- the store's path may have any character; files with other names than a run's, and symbolic links, are in
  nobody's way

Run: pytest tests/storage/test_export.py
"""

from datetime import timedelta
from urllib.parse import quote

import duckdb
import pytest

from storage import attempts, ledger, queries, shards
from storage.export import export
from storage.reward_versions import record_rewards
from storage.shards import commit_shard
from storage.store import RunStore
from storage.upkeep import compact, delete_superseded, expire
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
    attempts.start_attempt(store, 0, OWNER)
    for number in range(3):
        commit_shard(store, make_shard("s0", number))
        ledger.record_search_round(store, make_search_round("s0", number))
    for step in (1, 2):
        ledger.record_batch(store, 1, step, make_batch([0, step - 1]))
        ledger.record_training_step(store, make_training_step(1, step))
    attempts.start_attempt(store, 1, OWNER, previous=1)  # step 2 is undone


def test_every_view_is_as_in_tba_sql(store, tmp_path):
    fill(store)
    file = tmp_path / "run.duckdb"
    assert export(store, file) == (store.local_path("") is not None)
    comments = (
        "SELECT column_name, data_type, comment FROM duckdb_columns() WHERE table_name = '{}' ORDER BY column_index"
    )
    with duckdb.connect(file, read_only=True) as reader, queries.connect(store) as ours:
        for view in queries.VIEWS:
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
        for view in queries.VIEWS:
            assert reader.execute(f"SELECT * FROM {view}").fetchall() == [], view
        fill(local_store)
        assert reader.execute("SELECT count(*), min(created_at) FROM trajectories").fetchone() == (12, NOON)
        assert reader.execute("SELECT rewards['exact'] FROM trajectories WHERE reward = 1 LIMIT 1").fetchone() == (1.0,)
        assert reader.execute("SELECT count(*) FROM attempts").fetchone() == (2,)


def test_what_was_compacted_or_expired_counts_as_in_tba_sql(local_store, tmp_path, monkeypatch):
    """Through all that upkeep does, while the files of before and after lie side by side."""
    monkeypatch.setattr(shards, "ROUNDS_PER_BLOCK", 4)
    local_store.create_run({})
    local_store.put("summary.json", b"{}")  # a run that goes on keeps what a resume needs
    for number in range(10):
        commit_shard(local_store, shard := make_shard("s0", number))
        record_rewards(local_store, "v2", shard, [0.5] * 4)
    export(local_store, tmp_path / "run.duckdb")
    rounds = "SELECT round, count(*) FROM trajectories GROUP BY round ORDER BY round"
    rewards, num_rewards = "SELECT count(*) FROM rewards", []
    seen = []
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as reader:
        for upkeep_of in (
            lambda: expire(local_store, None, 32, 1),
            lambda: compact(local_store),
            lambda: expire(local_store, None, 12, 1),
            lambda: delete_superseded(local_store, timedelta(0)),
        ):
            assert upkeep_of()
            with queries.connect(local_store) as ours:
                seen.append(reader.execute(rounds).fetchall())
                assert seen[-1] == ours.execute(rounds).fetchall()
            num_rewards.append(reader.execute(rewards).fetchall())
            assert num_rewards[-1] == [tuple(row.values()) for row in queries.query(local_store, rewards).to_pylist()]
    assert seen[0] == seen[1] == [(number, 4) for number in range(2, 10)]
    assert seen[2] == seen[3] == [(number, 4) for number in range(4, 10)], "no compacted file is cut"
    assert num_rewards == [[(32,)], [(32,)], [(24,)], [(24,)]]
    local_store.put("quarantine/searcher=s0/round=00000009.json", b"{}")  # the Trainer refuses one
    assert queries.query(local_store, rewards).to_pylist() == [{"count_star()": 20}]


def test_a_torn_compacted_file_hides_no_shard(local_store, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "ROUNDS_PER_BLOCK", 4)
    local_store.create_run({})
    for number in range(5):
        commit_shard(local_store, make_shard("s0", number))
    compact(local_store)
    (compacted,) = local_store.list("trajectories/compacted")
    local_store.put(compacted, local_store.get(compacted)[:100])
    export(local_store, tmp_path / "run.duckdb")
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as reader:
        assert reader.execute("SELECT count(*) FROM trajectories").fetchone() == (20,)


FOLDERS = [
    "an 'apostrophe'", "with space", "a[1]", "a[!b]", "st*r", "wh?t", "{a,b}", "50%_", "compacted", "up/../down",
    "trajectories/compacted", "searcher=s9/round=00000007.parquet",
]  # fmt: skip


@pytest.mark.parametrize("folder", [*FOLDERS, "back\\slash"])
def test_the_stores_path_may_have_any_character(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(shards, "ROUNDS_PER_BLOCK", 2)
    fill(RunStore((tmp_path / "a1").as_uri(), "run"))  # a pattern a[1] finds this one
    store = RunStore("file://" + quote(str(tmp_path / folder)), "run")
    fill(store)
    assert compact(store) == 1  # the shards of its rounds are there, too
    assert export(store, tmp_path / "run.duckdb") == ("\\" not in folder), (
        "a copy where DuckDB's patterns cannot name it"
    )
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as reader:
        for view in ("trajectories", "all_batches", "attempts"):
            count = f"SELECT count(*) FROM {view}"
            assert reader.execute(count).fetchall() == [
                tuple(row.values()) for row in queries.query(store, count).to_pylist()
            ]
        assert reader.execute("SELECT count(*) FROM trajectories").fetchone() == (12,)


def test_files_with_other_names_are_in_nobodys_way(local_store, tmp_path):
    fill(local_store)
    for name in ("compacted/notes.parquet", "searcher=s0/other.parquet", "searcher=Foo/round=00000000.parquet"):
        local_store.put(f"trajectories/{name}", b"?")
    local_store.put("expired/searcher=s0/through=all.json", b"?")
    local_store.put("quarantine/searcher=s0/round=00000001-0123.json", b"?")  # a try of the round that the gate refused
    export(local_store, tmp_path / "run.duckdb")
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as reader:
        assert reader.execute("SELECT count(*) FROM trajectories").fetchone() == (12,)


def test_symbolic_links_to_files_are_left_out(local_store, tmp_path):
    commit_shard(local_store, make_shard("s0", 0))
    ledger.record_batch(local_store, 1, 1, make_batch([0, 0]))
    for name, (path, data) in {
        "shard": ("trajectories/searcher=s0/round=00000001.parquet", shards.parquet_bytes(make_shard("s0", 1))),
        "batch": ("batches/attempt=00000001/step=00000002.parquet", local_store.get(ledger.batch_path(1, 1))),
    }.items():
        (tmp_path / name).write_bytes(data)
        local_store.local_path(path).symlink_to(tmp_path / name)
    export(local_store, tmp_path / "run.duckdb")
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as database:
        for view, rows in {"trajectories": 4, "all_batches": 2}.items():
            assert database.execute(f"SELECT count(*) FROM {view}").fetchone() == (rows,)
            assert queries.query(local_store, f"SELECT count(*) AS n FROM {view}")["n"].to_pylist() == [rows]
