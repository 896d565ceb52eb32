"""Old trajectories leave the buffer, and nothing else does.

- By age and by count, whole shards, the oldest rounds of a searcher only; its last shard and `min_size` rows stay.
- An unfinished run keeps what a resume from its oldest checkpoint needs; one without a checkpoint keeps everything.
- Ages are by the store's clock, whatever the clocks of Searchers and of this machine say.
- Marked shards do not count for any reader though they are still there; they are deleted after the grace, not before.
  Of marks that old a searcher keeps its last one.
- Killed while it deletes, the next call goes on; the searcher's next round is numbered as before.
- A buffer rebuilt after that holds what is left, goes on with the next sync, and draws full batches.

pytest tests/storage/test_upkeep.py
"""

import json
import os
import time
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from storage import attempts, checkpoints, queries, reward_versions, shards, upkeep
from storage.new_shards import new_shards
from storage.shards import commit_shard, expired_through, next_round, shard_path
from tests.storage.buffer_runs import commit, distinct, new_buffer, new_store
from tests.storage.helpers import NOON, OWNER, make_shard

NOW = timedelta(0)


def finish(store) -> None:
    store.put("summary.json", b"{}")


@pytest.fixture
def run(store, monkeypatch):
    """A finished run: s0 with five shards of four, an hour apart; s1 with one as old as s0's first. It is five o'clock.

    The store's clock says so. Those of the Searchers say the contrary.
    """
    for number in range(5):
        commit_shard(store, make_shard("s0", number, created_at=NOON - timedelta(days=number)))
    commit_shard(store, make_shard("s1", 0, created_at=NOON))
    hours = {shard_path("s0", number): number for number in range(5)} | {shard_path("s1", 0): 0}

    def written_at(store, folder):
        return {path: NOON + timedelta(hours=hours.get(path, 5)) for path in store.list(folder)}

    monkeypatch.setattr(upkeep, "_written_at", written_at)
    finish(store)
    return store


def counted(store) -> dict[str, list[int]]:
    """What each reader counts; they agree."""
    rows = queries.query(store, "SELECT DISTINCT searcher, round FROM trajectories ORDER BY ALL").to_pylist()
    found = new_shards(store, {})
    assert [(row["searcher"], row["round"]) for row in rows] == [(name, n) for name in found for n in found[name]]
    return found


def test_old_shards_expire_but_a_searchers_last(run):
    assert upkeep.expire(run, timedelta(hours=3), None, min_size=1) == {"s0": 1}
    assert counted(run) == {"s0": [2, 3, 4], "s1": [0]}
    assert upkeep.expire(run, NOW, None, min_size=1) == {"s0": 3}
    assert counted(run) == {"s0": [4], "s1": [0]}
    assert expired_through(run) == {"s0": 3}
    assert upkeep.expire(run, NOW, None, min_size=1) == {}


@pytest.mark.parametrize(
    ("keep", "left"), [(12, [2, 3, 4]), (9, [2, 3, 4]), (8, [3, 4]), (0, [4]), (99, [0, 1, 2, 3, 4])]
)
def test_shards_beyond_the_newest_so_many_trajectories_expire(run, keep, left):
    upkeep.expire(run, None, keep, min_size=1)
    assert counted(run)["s0"] == left


def test_min_size_trajectories_stay_whatever_is_asked(run):
    upkeep.expire(run, NOW, 0, min_size=12)
    assert counted(run)["s0"] == [2, 3, 4]


def test_marked_shards_are_deleted_after_the_grace(run):
    reward_versions.begin_version(run, "v2", "f", source="")
    for number in range(5):
        reward_versions.record_rewards(run, "v2", make_shard("s0", number), [0.5] * 4)
    upkeep.expire(run, timedelta(hours=3), None, min_size=1)
    assert upkeep.delete_superseded(run, timedelta(hours=1)) == 0
    assert len(run.list("trajectories")) == 6
    assert upkeep.delete_superseded(run, NOW) == 2
    assert [path[-9:-8] for path in run.list("trajectories/searcher=s0")] == ["2", "3", "4"]
    assert len(run.list("rewards/v2")) == 3 + 1
    assert next_round(run, "s0") == 5


def test_a_mark_of_another_program_over_a_last_round_deletes_nothing(run):
    """Otherwise the Searcher's next round would be numbered as one before."""
    run.put("expired/searcher=s0/through=00000004.json", b"{}")
    before = run.list("trajectories")
    assert upkeep.delete_superseded(run, NOW) == 0
    assert run.list("trajectories") == before and next_round(run, "s0") == 5


def test_of_a_searchers_marks_the_last_stays(run):
    def marks() -> list[str]:
        return [path for path in run.list("expired/searcher=s0") if path.endswith(".json")]

    for hours in (3, 2):
        upkeep.expire(run, timedelta(hours=hours), None, min_size=1)
    both, through = marks(), shards.expired_through(run)
    assert len(both) == 2
    upkeep.delete_superseded(run, timedelta(hours=1))
    assert marks() == both, "a reader may have listed the shards of the first one"
    upkeep.delete_superseded(run, NOW)
    assert marks() == both[1:] and shards.expired_through(run) == through


def test_files_of_other_programs_beside_the_marks_change_nothing(run):
    upkeep.expire(run, timedelta(hours=3), None, min_size=1)
    through, (mark,) = shards.expired_through(run), run.list("expired/searcher=s0")
    run.put(f"{mark}.bak", b"{}")
    if folder := run.local_path("expired/searcher=s0"):
        (folder / "a\tb").write_text("")
    upkeep.delete_superseded(run, NOW)
    assert shards.expired_through(run) == through != {}


def test_deleting_that_was_interrupted_goes_on(run, monkeypatch):
    upkeep.expire(run, None, 4, min_size=1)
    real = run.delete

    def fails_on_round_2(path):
        if path.endswith("2.parquet"):
            raise KeyboardInterrupt
        real(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "delete", fails_on_round_2)
        upkeep.delete_superseded(run, NOW)
    assert counted(run)["s0"] == [4]
    upkeep.delete_superseded(run, NOW)
    assert len(run.list("trajectories")) == 2


def test_a_searcher_whose_clock_is_a_day_behind_loses_nothing_fresh(store):
    for number in range(3):
        commit_shard(store, make_shard("s0", number, created_at=datetime.now(UTC)))
        commit_shard(store, make_shard("slow", number, created_at=datetime.now(UTC) - timedelta(days=1)))
    finish(store)
    assert upkeep.expire(store, timedelta(hours=1), None, min_size=1) == {}


def test_files_age_by_when_the_store_wrote_them(local_store):
    for number in range(3):
        path = local_store.local_path(commit_shard(local_store, make_shard("s0", number)))
        os.utime(path, times=(time.time() - 7200 + 3600 * number,) * 2)
    finish(local_store)
    assert upkeep.expire(local_store, timedelta(minutes=90), None, min_size=1) == {"s0": 0}
    assert upkeep.expire(local_store, None, 4, min_size=1) == {"s0": 1}


def test_a_mark_or_a_compacted_file_of_a_clock_behind_has_its_whole_grace(store, monkeypatch):
    monkeypatch.setattr(shards, "ROUNDS_PER_BLOCK", 2)
    for number in range(5):
        commit_shard(store, make_shard("s0", number))
    finish(store)
    upkeep.expire(store, None, 4, min_size=1)
    (mark,) = (path for path in store.list("expired") if path.endswith(".json"))
    store.put(mark, json.dumps({"at": "2020-01-01T00:00:00+00:00"}).encode())
    yesterday = {b"compacted_at": b"2020-01-01T00:00:00+00:00"}  # as an older version wrote it
    for number in range(2):
        commit_shard(store, make_shard("s1", number))
    both = pa.concat_tables([make_shard("s1", number) for number in range(2)])
    store.put_new(shards.block_path("s1", 0), shards.parquet_bytes(both.replace_schema_metadata(yesterday)))
    assert upkeep.delete_superseded(store, timedelta(hours=1)) == 0
    assert upkeep.delete_superseded(store, NOW) == 4 + 2


def test_a_compacted_file_that_a_listing_lacks_is_not_due(store, monkeypatch):
    """Another process wrote it between two listings."""
    monkeypatch.setattr(shards, "ROUNDS_PER_BLOCK", 2)
    for number in range(3):
        commit_shard(store, make_shard("s0", number))
    assert upkeep.compact(store) == 1
    written_at = upkeep._written_at

    def before_it(store, folder: str) -> dict:
        return {path: at for path, at in written_at(store, folder).items() if path != shards.block_path("s0", 0)}

    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "_written_at", before_it)
        assert upkeep.delete_superseded(store, timedelta(hours=1)) == 0
    assert upkeep.delete_superseded(store, NOW) == 2


@pytest.fixture
def trained(tmp_path):
    """An unfinished run: five syncs of one shard each, before steps 1, 3, 5, 7, 9."""
    store = new_store(tmp_path)
    buffer = new_buffer(store, prompts_per_batch=4, responses_per_prompt=4)
    for number in range(5):
        commit(store, "s0", number, distinct("ab", 4, start=4 * number))
        buffer.sync(2 * number + 1, attempt=1)
    return store


def checkpoint(store, step: int, tmp_path) -> None:
    (tmp_path / "local").mkdir(exist_ok=True)
    (tmp_path / "local" / "state.json").write_text("{}")
    checkpoints.save_checkpoint(store, step, tmp_path / "local", attempt=1)


def test_an_unfinished_run_keeps_what_a_resume_needs(trained, tmp_path):
    assert upkeep.expire(trained, None, 0, min_size=1) == {}
    for step in (6, 8):
        checkpoint(trained, step, tmp_path)
    # a resume from step 6 begins with sync 3, the one before step 5: its shard is round 2
    assert upkeep.expire(trained, None, 0, min_size=1) == {"s0": 1}
    finish(trained)
    assert upkeep.expire(trained, None, 0, min_size=1) == {"s0": 3}


def test_a_rebuilt_buffer_goes_on_with_what_is_left(trained, tmp_path):
    checkpoint(trained, 6, tmp_path)
    upkeep.expire(trained, None, 0, min_size=1)
    for delete in (False, True):
        if delete:
            upkeep.delete_superseded(trained, NOW)
        buffer = new_buffer(trained, prompts_per_batch=4, responses_per_prompt=4)
        buffer.rebuild(6)
        assert (buffer.num_trajectories, buffer.newest_sync) == (8, 3)
        batch = buffer.draw(7)
        assert batch.num_rows == 16 and {name[:11] for name in batch["trajectory_id"].to_pylist()} == {"s0-00000002"}
    assert buffer.num_inserted == 24  # what has expired was drawn, too: samples_per_insert counts it
    attempts.start_attempt(trained, resumed_from=6, owner=OWNER)
    assert buffer.sync(7, attempt=2).rounds == {"s0": [3, 4]}
    assert buffer.newest_sync == 4


def test_a_buffer_whose_recorded_rounds_have_all_expired_still_takes_in_what_follows(trained, tmp_path):
    finish(trained)
    upkeep.expire(trained, None, 0, min_size=1)
    buffer = new_buffer(trained)
    buffer.rebuild(2)
    assert (buffer.num_trajectories, buffer.newest_sync) == (0, 1)
    attempts.start_attempt(trained, resumed_from=2, owner=OWNER)
    assert buffer.sync(3, attempt=2).rounds == {"s0": [4]}
