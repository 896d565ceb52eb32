"""Claims about storage/shards.py, on a local folder and on S3. Run: pytest tests/storage/test_shards.py

- a committed shard reads back as it was, and is never replaced: a retried round cannot count twice
- a writer that is killed while it writes leaves no visible shard, whenever it is killed, and nothing in the way
- what is new is what follows the last round seen of each searcher; a late shard and a new searcher are not missed
- finding what is new lists nothing that was seen
- a torn shard, and one of another version, is named
- a quarantined shard is kept with its reasons, and does not use up its round
- files with other names are ignored
- searcher ids are checked: no tool may take the folder's name for a number or a date
- a round's trajectories get their ids as they become a shard; an id tells searcher and round
- plain DuckDB reads all shards with one glob, searcher stays text
"""

import json
import signal

import duckdb
import pyarrow as pa
import pytest

from storage.errors import AlreadyExists, NotFound, TornShard
from storage.new_shards import new_shards
from storage.schema import TRAJECTORY
from storage.shard_files import read_shards
from storage.shards import (
    check_searcher_id,
    commit_shard,
    next_round,
    parquet_bytes,
    quarantine_shard,
    round_of,
    shard_of,
    shard_path,
    trajectory_id,
)
from tests.storage.helpers import make_shard, start_python


def test_a_committed_shard_reads_back_as_it_was(store):
    shard = make_shard("s0", 3)
    path = commit_shard(store, shard)
    assert path == "trajectories/searcher=s0/round=00000003.parquet"
    back = read_shards(store, "s0", [3])
    assert back.schema.equals(TRAJECTORY)
    assert back.equals(shard)
    assert back["trajectory_id"].to_pylist() == [f"s0-00000003-0000{index}" for index in range(4)]


def test_a_retried_round_is_not_committed_twice(store):
    commit_shard(store, make_shard("s0", 0, num_rows=4))
    with pytest.raises(AlreadyExists, match=r"searcher=s0/round=00000000\.parquet"):
        commit_shard(store, make_shard("s0", 0, num_rows=5))
    assert read_shards(store, "s0", [0]).num_rows == 4


def test_a_shard_of_two_rounds_is_refused(local_store):
    both = pa.concat_tables([make_shard("s0", 0), make_shard("s0", 1)])
    with pytest.raises(ValueError, match=r"one searcher and round, got \[\('s0', 0\), \('s0', 1\)\]"):
        commit_shard(local_store, both)


KILLED = """
import os, sys, time
from storage import shards
from storage.store import RunStore
from tests.storage.helpers import make_shard
def pause(*arguments, **keywords):
    print("here", flush=True)
    time.sleep(60)
setattr(os, sys.argv[2], pause)  # the file is written, but not yet synced (fsync) or linked (link)
shards.commit_shard(RunStore(sys.argv[1], "run"), make_shard("s0", 0))
"""


@pytest.mark.parametrize("at", ["fsync", "link"])
def test_a_writer_killed_just_before_the_end_leaves_no_visible_shard(local_store, at):
    writer = start_python(KILLED, local_store.url, at)
    assert writer.stdout.readline() == "here\n"
    writer.kill()
    assert writer.wait() == -signal.SIGKILL
    assert new_shards(local_store, {}) == {}
    assert next_round(local_store, "s0") == 0
    folder = local_store.local_path("trajectories/searcher=s0")
    assert list(folder.glob("*.parquet")) == [] and len(list(folder.iterdir())) == 1  # the unfinished file
    commit_shard(local_store, make_shard("s0", 0))
    assert read_shards(local_store, "s0", [0]).equals(make_shard("s0", 0))


WRITES_ON = """
import itertools, sys
from storage import shards
from storage.store import RunStore
from tests.storage.helpers import make_shard
store = RunStore(sys.argv[1], "run")
for number in itertools.count(shards.next_round(store, "s0")):
    shards.commit_shard(store, make_shard("s0", number, num_rows=500))
    print(number, flush=True)
"""


def test_killed_at_any_moment_every_visible_shard_is_whole_and_none_is_lost(local_store):
    for lives in range(1, 4):
        writer = start_python(WRITES_ON, local_store.url)
        committed = [int(writer.stdout.readline()) for _ in range(3 * lives)]  # a different moment in each life
        writer.kill()
        committed += [int(line) for line in writer.communicate()[0].splitlines()]
        rounds = new_shards(local_store, {})["s0"]
        assert rounds == list(range(len(rounds)))  # no gap
        assert committed[-1] in rounds
        assert read_shards(local_store, "s0", rounds).num_rows == 500 * len(rounds)


def test_what_is_new_follows_the_last_round_seen(store):
    assert new_shards(store, {}) == {}
    for number in range(3):
        commit_shard(store, make_shard("fast", number))
    commit_shard(store, make_shard("slow", 0))
    assert new_shards(store, {}) == {"fast": [0, 1, 2], "slow": [0]}
    seen = {"fast": 2, "slow": 0}
    assert new_shards(store, seen) == {}
    commit_shard(store, make_shard("slow", 1))  # late: others are rounds ahead
    commit_shard(store, make_shard("newcomer", 0))
    assert new_shards(store, seen) == {"slow": [1], "newcomer": [0]}
    assert new_shards(store, {"fast": 0, "slow": 1, "newcomer": 0}) == {"fast": [1, 2]}


@pytest.mark.s3
def test_finding_what_is_new_lists_nothing_that_was_seen(moto_store, monkeypatch):
    for number in range(12):
        moto_store.put(shard_path("s0", number), b"")
    requests = []
    call_s3 = moto_store._files._fs.call_s3
    monkeypatch.setattr(moto_store._files._fs, "call_s3", lambda *a, **k: (requests.append(a), call_s3(*a, **k))[1])
    assert new_shards(moto_store, {"s0": 9}) == {"s0": [10, 11]}
    assert len(requests) == 5  # expired rounds, the searchers' folders, compacted files, one page, refused rounds
    requests.clear()
    assert new_shards(moto_store, {"s0": 11}) == {}
    assert len(requests) == 4  # without new rounds it does not matter which were refused


def test_the_next_round_follows_the_last_committed(store):
    assert next_round(store, "s0") == 0
    commit_shard(store, make_shard("s0", 0))
    commit_shard(store, make_shard("s0", 1))
    commit_shard(store, make_shard("s00", 7))  # another searcher, though its name begins alike
    assert next_round(store, "s0") == 2


def test_files_with_other_names_are_ignored(store):
    commit_shard(store, make_shard("s0", 0))
    names = [
        "notes.txt",
        "searcher=s0/round=00000001.parquet.bad",
        "searcher=s0/zz",
        "searcher=Foo/round=00000000.parquet",
    ]
    for name in names:
        store.put(f"trajectories/{name}", b"?")
    store.put("expired/searcher=s0/through=all.json", b"?")
    assert new_shards(store, {}) == {"s0": [0]} and new_shards(store, {"s0": 0}) == {}
    assert next_round(store, "s0") == 1 and next_round(store, "s1") == 0


def test_rounds_are_read_in_the_order_asked(store):
    for number in range(3):
        commit_shard(store, make_shard("s0", number, num_rows=1))
    assert read_shards(store, "s0", [2, 0])["round"].to_pylist() == [2, 0]
    assert read_shards(store, "s0", []).schema.equals(TRAJECTORY)
    with pytest.raises(NotFound, match=r"round=00000003\.parquet"):
        read_shards(store, "s0", [2, 3])


def test_a_torn_shard_is_named(store):
    whole = parquet_bytes(make_shard())
    for number, torn in enumerate([b"", whole[:-1], whole[: len(whole) // 2], b"PAR1" + bytes(100) + b"PAR1"]):
        store.put(shard_path("s0", number), torn)
        with pytest.raises(TornShard, match=rf"searcher=s0/round=0000000{number}\.parquet .*not a whole Parquet file"):
            read_shards(store, "s0", [number])


def test_a_shard_of_another_version_is_named(local_store):
    old = make_shard().drop_columns(["top_p"])
    local_store.put(shard_path("s0", 0), parquet_bytes(old))
    with pytest.raises(TornShard, match=r"round=00000000\.parquet .*other columns.*top_p"):
        read_shards(local_store, "s0", [0])


def test_a_quarantined_shard_keeps_its_reasons_and_does_not_use_up_its_round(store):
    bad = make_shard("s0", 0, reward=float("nan"))
    paths = [quarantine_shard(store, bad, ["reward is finite: broken by 4 of 4"]) for _ in range(2)]
    assert len(set(paths)) == 2 and all(path.startswith("quarantine/searcher=s0/round=00000000-") for path in paths)
    reasons = json.loads(store.get(paths[0].replace(".parquet", ".json")))
    assert reasons == {"reasons": ["reward is finite: broken by 4 of 4"]}
    assert new_shards(store, {}) == {}
    assert next_round(store, "s0") == 0


@pytest.mark.parametrize("searcher", ["", "7", "0x1f", "2026-11-21", "epoch", "infinity", "S0", "a_b", "a/b", "a" * 33])
def test_a_searcher_id_that_could_read_as_something_else_is_refused(searcher):
    with pytest.raises(ValueError, match="searcher: got"):
        check_searcher_id(searcher)


def test_ids_tell_searcher_round_and_index():
    assert trajectory_id("s0", 42, 7) == "s0-00000042-00007"
    assert round_of(trajectory_id("a-1", 42, 7)) == ("a-1", 42)


@pytest.mark.parametrize("name", ["", "s0", "s0-00000042", "s0-first-00000"])
def test_what_is_no_id_has_no_round(name):
    with pytest.raises(ValueError):
        round_of(name)


def test_a_round_becomes_a_shard_with_ids_in_its_order():
    whole = make_shard("s0", 3)
    assert shard_of(whole.drop_columns(["trajectory_id", "schema_version"]).to_pylist()).equals(whole)


@pytest.mark.parametrize("searchers", [["s0", "s1"], ["e1"], ["true"], ["a-1", "null"]])
def test_plain_duckdb_reads_all_shards_with_one_glob(local_store, searchers):
    for searcher in searchers:
        commit_shard(local_store, make_shard(searcher, 0))
        commit_shard(local_store, make_shard(searcher, 1))
    glob = local_store.local_path("trajectories") / "*/*.parquet"
    with duckdb.connect() as connection:
        rows = connection.execute(
            f"SELECT searcher, typeof(searcher), round, typeof(round), count(*), avg(reward) FROM '{glob}' GROUP BY ALL"
        ).fetchall()
    assert sorted(rows) == sorted((s, "VARCHAR", n, "BIGINT", 4, 0.5) for s in searchers for n in (0, 1))
