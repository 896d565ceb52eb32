"""Small shards become one file, and nobody who reads can tell.

- Every reader (SQL, new rounds, shards, rebuild, verify) sees each trajectory once before, between and after the steps.
- Killed between any two writes or deletions, the same; the next call goes on.
- Shards are deleted only after the grace, and only where the file that stands for them is whole.
- What stays as it is: a searcher's newest block, one with a gap or a broken shard, large shards, what has expired.
- A Trainer that has not taken the rounds in yet finds them; a round committed late again counts for nothing.
- A compacted file keeps the ages of its shards; while it is broken, its shards count as long as they are there.
- verify names a copy that differs, a broken compacted file, and a file named as none is.
- Plain DuckDB sees all trajectories with one glob, each once with DISTINCT ON.

pytest tests/storage/test_compaction.py
"""

from datetime import timedelta

import duckdb
import pyarrow as pa
import pytest

from storage import queries, shards, upkeep
from storage.errors import TornShard
from storage.new_shards import new_shards
from storage.shard_files import each_shard, read_shards
from storage.shards import block_path, commit_shard, next_round, parquet_bytes
from storage.shards import shard_path as path_of
from storage.verify import verify
from tests.storage.buffer_runs import commit, distinct, new_buffer, new_store
from tests.storage.helpers import NOON, make_shard

NOW, LATER = timedelta(0), timedelta(hours=1)


@pytest.fixture(autouse=True)
def blocks_of_two(monkeypatch):
    monkeypatch.setattr(shards, "ROUNDS_PER_BLOCK", 2)


@pytest.fixture
def run(store):
    """s0 has two blocks and a round, s1 one block and no round after it."""
    for number in range(5):
        commit_shard(store, make_shard("s0", number))
    for number in range(2):
        commit_shard(store, make_shard("s1", number))
    return store


def seen(store) -> list[str]:
    """Ids of all that counts; every reader says the same."""
    in_sql = queries.query(store, "SELECT trajectory_id FROM trajectories ORDER BY 1").column(0).to_pylist()
    by_round = {
        name: [table for _, table in each_shard(store, name, rounds)] for name, rounds in new_shards(store, {}).items()
    }
    for name, tables in by_round.items():
        assert pa.concat_tables(tables).equals(read_shards(store, name, new_shards(store, {})[name]))
    read = [row for tables in by_round.values() for table in tables for row in table["trajectory_id"].to_pylist()]
    assert sorted(read) == in_sql and len(set(read)) == len(read)
    return in_sql


def files(store) -> list[str]:
    return [path.removeprefix("trajectories/") for path in store.list("trajectories")]


def test_blocks_become_files_and_every_reader_sees_the_same(run):
    before = seen(run)
    assert upkeep.compact(run) == 2
    assert seen(run) == before and len(files(run)) == 9
    assert upkeep.delete_superseded(run, LATER) == 0 and len(files(run)) == 9
    assert upkeep.delete_superseded(run, NOW) == 4
    assert files(run) == [
        "compacted/s0-00000000-00000001.parquet",
        "compacted/s0-00000002-00000003.parquet",
        "searcher=s0/round=00000004.parquet",
        "searcher=s1/round=00000000.parquet",
        "searcher=s1/round=00000001.parquet",
    ]
    assert seen(run) == before and next_round(run, "s0") == 5
    assert read_shards(run, "s0", [3, 0])["round"].to_pylist() == [3] * 4 + [0] * 4
    assert upkeep.compact(run) == upkeep.delete_superseded(run, NOW) == 0


class Killed(BaseException):
    """Nobody handles it."""


@pytest.mark.parametrize("num_done", range(6))
def test_killed_between_any_two_writes_each_round_counts_once(local_store, monkeypatch, num_done):
    """Two files are written, four shards deleted: the process dies when it has done so many of the six."""
    for number in range(5):
        commit_shard(local_store, make_shard("s0", number))
    before, left = seen(local_store), [num_done]

    def dying(operation):
        def do(*arguments):
            if not left[0]:
                raise Killed
            left[0] -= 1
            operation(*arguments)

        return do

    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "transfer_all", lambda delete, paths: [delete(path) for path in paths])
        for name in ("put_new", "delete"):
            patch.setattr(local_store, name, dying(getattr(local_store, name)))
        with pytest.raises(Killed):
            upkeep.compact(local_store)
            upkeep.delete_superseded(local_store, NOW)
    assert seen(local_store) == before
    assert len(files(local_store)) == (5 + num_done if num_done < 2 else 7 - (num_done - 2))
    upkeep.compact(local_store)
    assert seen(local_store) == before
    upkeep.delete_superseded(local_store, NOW)
    assert seen(local_store) == before and len(files(local_store)) == 3


def test_a_run_in_training_is_not_disturbed(tmp_path):
    store = new_store(tmp_path)
    live = new_buffer(store, prompts_per_batch=2, responses_per_prompt=4, recent_probability=0.5)
    batches = []
    for number in range(6):
        commit(store, "s0", number, distinct("ab", 4, start=2 * number), policy_step=number)
        if number < 3:
            live.sync(number + 1, attempt=1)
            batches.append(live.draw(number + 1))
    upkeep.compact(store)
    upkeep.delete_superseded(store, NOW)
    rebuilt = new_buffer(store, prompts_per_batch=2, responses_per_prompt=4, recent_probability=0.5)
    for step in (3, 1, 2):
        rebuilt.rebuild(step)
        assert rebuilt.draw(step).equals(batches[step - 1])
    assert live.sync(4, attempt=1).rounds == {"s0": [3, 4, 5]}  # rounds 3 to 5 were compacted before they were seen
    rebuilt.rebuild(4)
    assert rebuilt.draw(4).equals(live.draw(4))


def test_what_is_not_a_whole_block_of_small_shards_stays(store, monkeypatch):
    for searcher in ("gap", "torn", "large", "moved"):
        for number in range(3):
            commit_shard(store, make_shard(searcher, number))
    store.delete(path_of("gap", 0))
    store.put(path_of("torn", 1), b"PAR1")
    store.put(path_of("moved", 1), parquet_bytes(make_shard("other", 1)))
    store.put(path_of("large", 1), parquet_bytes(make_shard("large", 1, prompt="x" * 2000)))
    monkeypatch.setattr(upkeep, "MAX_BLOCK_BYTES", 4000)
    assert upkeep.compact(store) == 0


def test_expired_files_leave_whole_and_a_mark_inside_one_counts_up_to_it(run, monkeypatch):
    monkeypatch.setattr(upkeep, "_written_at", lambda store, folder: dict.fromkeys(store.list(folder), NOON))
    upkeep.compact(run)
    run.put("summary.json", b"{}")
    # the newest 5 lie in s0's rounds 3 and 4; round 2 is in one file with 3
    assert upkeep.expire(run, None, 5, min_size=1) == {"s0": 1, "s1": 0}
    left = ["s0-00000002", "s0-00000003", "s0-00000004", "s1-00000001"]
    assert sorted({name[:11] for name in seen(run)}) == left
    run.put("expired/searcher=s0/through=00000002.json", run.get("expired/searcher=s0/through=00000001.json"))
    assert sorted({name[:11] for name in seen(run)}) == left, "a mark that came while a file was written cuts it"
    upkeep.delete_superseded(run, NOW)
    assert files(run) == [
        "compacted/s0-00000002-00000003.parquet",
        "searcher=s0/round=00000004.parquet",
        "searcher=s1/round=00000001.parquet",
    ]
    assert sorted({name[:11] for name in seen(run)}) == left
    assert upkeep.expire(run, None, 5, min_size=1) == {}


def test_a_round_that_is_committed_again_after_its_deletion_counts_for_nothing(run):
    upkeep.compact(run)
    upkeep.delete_superseded(run, NOW)
    before = seen(run)
    commit_shard(run, make_shard("s0", 1, reward=9.0))  # a searcher that was frozen for hours
    assert seen(run) == before
    assert [fault.kind for fault in faults(run)] == ["changed copy"]


def faults(store) -> list:
    """Of the shards alone."""
    store.put("run.json", b"{}")
    named = {"broken pointer", "unpublished policy"}  # nobody trained here
    return [fault for fault in verify(store, lambda folder: "").faults if fault.kind not in named]


def test_verify_finds_a_compacted_run_whole_and_names_what_is_not(run):
    assert faults(run) == []
    upkeep.compact(run)
    assert faults(run) == []
    other = block_path("s0", 1)
    run.put("trajectories/compacted/s0-00000001-00000002.parquet", run.get(other))
    run.put(other, run.get(block_path("s0", 0)))
    named = [(fault.kind, fault.path) for fault in faults(run)]
    assert ("stray file", "trajectories/compacted/s0-00000001-00000002.parquet") in named
    assert ("torn shard", other) in named
    upkeep.delete_superseded(run, NOW)
    assert run.exists(path_of("s0", 2)), "shards are deleted though the file that stands for them is broken"
    assert read_shards(run, "s0", [2]).equals(make_shard("s0", 2))
    run.delete(path_of("s0", 2))
    with pytest.raises(TornShard, match="other rounds than its name"):
        read_shards(run, "s0", [2])


def test_a_compacted_file_keeps_the_ages_of_its_shards(run, monkeypatch):
    hours = {path_of("s0", number): number for number in range(5)} | {path_of("s1", number): 4 for number in range(2)}

    def written_at(store, folder):
        return {path: NOON + timedelta(hours=hours.get(path, 5)) for path in store.list(folder)}

    monkeypatch.setattr(upkeep, "_written_at", written_at)
    run.put("summary.json", b"{}")
    assert upkeep.compact(run) == 2 and upkeep.delete_superseded(run, NOW) == 4
    assert upkeep.expire(run, timedelta(hours=4, minutes=1), None, min_size=1) == {}  # round 1 is younger by a minute
    assert upkeep.expire(run, timedelta(hours=3), None, min_size=1) == {"s0": 1}


def test_plain_duckdb_reads_all_with_one_glob(local_store):
    for number in range(3):
        commit_shard(local_store, make_shard("s0", number))
    glob = local_store.local_path("trajectories") / "*/*.parquet"
    for step in (lambda: None, lambda: upkeep.compact(local_store), lambda: upkeep.delete_superseded(local_store, NOW)):
        step()
        with duckdb.connect() as connection:
            rows = connection.execute(f"SELECT DISTINCT ON (trajectory_id) round FROM '{glob}'").fetchall()
        assert sorted(rows) == [(0,)] * 4 + [(1,)] * 4 + [(2,)] * 4
