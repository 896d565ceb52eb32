"""Claims about what the replay buffer stores (storage/buffer.py); `pytest tests/storage/test_buffer.py`.

- of identical responses to a prompt the newest counts; of a prompt the newest `capacity_per_prompt` stay
- a buffer stands hundreds of syncs that bring what is there already
- words of trajectories that are not stored any more are freed, also in a rebuild, and no draw changes
- a drawn row carries the tokens and log-probabilities of its shard
- rows can be drawn from the sync after their commit on; a late shard of a slow Searcher is not missed
- an error while taking in (a lost race for the sync record, a store that does not answer) changes nothing
- every sync that took something in is recorded; one that did not is not
- from the shards and the sync records alone a new buffer draws the same batch of any step, to the last bit
- a shard that was moved away does not keep a run from resuming
- syncs of an attempt that was resumed from an earlier step do not count
- bad settings are refused; before `min_size` trajectories came in, NotEnoughExperience
"""

import pyarrow as pa
import pytest
from pydantic import ValidationError

from storage import attempts, ledger, word_file
from storage.buffer import NotEnoughExperience, ReplayBuffer
from storage.errors import AlreadyExists, StoreUnreachable
from storage.mop import SamplingSettings
from storage.schema import TRAJECTORY
from storage.shards import shard_path
from storage.store import RunStore
from tests.storage.buffer_runs import commit, distinct, new_buffer, new_store
from tests.storage.helpers import OWNER
from tests.storage.reference_draw import key_of


@pytest.fixture
def store(tmp_path) -> RunStore:
    return new_store(tmp_path)


def test_of_identical_responses_the_newest_counts(store):
    buffer = new_buffer(store, prompts_per_batch=2, responses_per_prompt=2, recent_probability=0)
    commit(store, "s0", 0, [("a", [1, 2], 0.0), ("a", [3], 0.0), ("b", [1, 2], 0.0), ("a", [1, 2], 0.25)])
    buffer.sync(step=1, attempt=1)
    assert buffer.num_trajectories == 3  # the same tokens answer b too: that is another response
    commit(store, "s0", 1, [("a", [1, 2], 1.0)], policy_step=5)
    buffer.sync(step=2, attempt=1)
    assert buffer.num_trajectories == 3
    drawn = {row["trajectory_id"]: row for row in buffer.draw(1).to_pylist()}
    assert drawn.keys() == {"s0-00000001-00000", "s0-00000000-00001", "s0-00000000-00002"}
    assert drawn["s0-00000001-00000"]["reward"] == 1.0
    assert drawn["s0-00000001-00000"]["policy_step"] == 5


def test_of_a_prompt_the_newest_capacity_stay(store):
    buffer = new_buffer(store, prompts_per_batch=1, responses_per_prompt=3, capacity_per_prompt=3, recent_probability=0)
    commit(store, "s0", 0, distinct("a", 2), policy_step=2)
    commit(store, "s1", 0, distinct("a", 2, start=10), policy_step=1)
    buffer.sync(step=3, attempt=1)
    # four came in at once: of the older policy's two the one goes whose id's md5 is smaller
    assert key_of("s1-00000000-00001") < key_of("s1-00000000-00000")
    assert set(buffer.draw(1)["trajectory_id"].to_pylist()) == {
        "s0-00000000-00000",
        "s0-00000000-00001",
        "s1-00000000-00000",
    }
    commit(store, "s1", 1, distinct("a", 2), policy_step=1)  # the responses of s0 again: older policy, newer sync
    buffer.sync(step=4, attempt=1)
    assert set(buffer.draw(1)["trajectory_id"].to_pylist()) == {
        "s1-00000000-00000",
        "s1-00000001-00000",
        "s1-00000001-00001",
    }
    assert (buffer.num_trajectories, buffer.num_prompts) == (3, 1)


@pytest.mark.slow
def test_hundreds_of_syncs_that_repeat_what_is_there(store):
    """Each deletes what the one before it brought: DuckDB 2.0 crashed at the 143rd when that went by rowid."""
    buffer = new_buffer(store)
    for number in range(160):
        for searcher in ("s0", "s1"):
            commit(store, searcher, number, distinct("ab", 2), policy_step=number)
        buffer.sync(number + 1, attempt=1)
        assert buffer.num_trajectories == 4
    assert set(buffer.draw(160)["policy_step"].to_pylist()) == {159}


def num_bytes(buffer: ReplayBuffer) -> int:
    return sum(segment.num_bytes for segment in buffer._index.words._segments)


def test_words_that_are_not_stored_any_more_are_freed(store, monkeypatch):
    """Prompt "old" is sampled once and stays; the others are sampled again and again."""
    settings = {"prompts_per_batch": 3, "responses_per_prompt": 2, "recent_probability": 0.2, "capacity_per_prompt": 4}
    sizes, draws = [], {}
    with monkeypatch.context() as small:
        small.setattr(word_file, "SEGMENT_BYTES", 1000)
        small.setattr("storage.buffer.ROUNDS_PER_SETTLE", 10)
        buffer, resumed = new_buffer(store, **settings), new_buffer(store, **settings)
        commit(store, "s0", 0, [("old", [5, 6, 7], 1.0), ("old", [8], 0.0)])
        for number in range(1, 150):
            commit(store, "s0", number, distinct("ab", 3, start=number))
            buffer.sync(number, attempt=1)
            draws[number] = buffer.draw(number)
            sizes.append(num_bytes(buffer))
        resumed.rebuild(149)
    assert max(sizes) < 4000 and num_bytes(resumed) < 6000
    assert resumed.draw(149).equals(draws[149])
    whole = new_buffer(store, **settings)  # in one segment, of which nothing is freed
    for step in (1, 70, 149):
        whole.rebuild(step)
        assert whole.draw(step).equals(draws[step])
    assert num_bytes(whole) > 20_000


def test_a_drawn_row_carries_the_tokens_and_logprobs_of_its_shard(store):
    responses = {("a", 0): [1, 2, 3], ("a", 1): [4], ("long prompt", 2): [5, 6], ("long prompt", 3): [7] * 50}
    commit(store, "s0", 0, [(prompt_id, tokens, 0.5) for (prompt_id, _), tokens in responses.items()])
    buffer = new_buffer(store, prompts_per_batch=2, responses_per_prompt=2)
    buffer.sync(step=1, attempt=1)
    batch = buffer.draw(1)
    for field in batch.schema:
        if field.name in TRAJECTORY.names:
            assert field.type == TRAJECTORY.field(field.name).type
    for row in batch.to_pylist():
        tokens = responses[row["prompt_id"], int(row["trajectory_id"][-1])]
        assert row["prompt_tokens"] == list(row["prompt_id"].encode())
        assert row["response_tokens"] == tokens
        assert row["behavior_logprobs"] == [-token / 8 for token in tokens]
        assert row["reference_logprobs"] == [-token / 4 for token in tokens]


def test_rows_are_drawn_and_recent_from_the_sync_after_their_commit_on(store):
    buffer = new_buffer(store, prompts_per_batch=1, responses_per_prompt=2, recent_probability=1)

    def drawn() -> set[str]:
        return {name[:11] for step in range(5) for name in buffer.draw(step)["trajectory_id"].to_pylist()}

    commit(store, "s0", 0, distinct("a", 2))
    buffer.sync(step=1, attempt=1)
    commit(store, "s0", 1, distinct("a", 2, start=10))
    assert drawn() == {"s0-00000000"}
    assert buffer.sync(step=2, attempt=1).num_trajectories == 2
    assert drawn() == {"s0-00000001"}
    assert buffer.sync(step=3, attempt=1) is None
    assert (drawn(), buffer.newest_sync) == ({"s0-00000001"}, 2), "recent stays what the last sync took in"


def test_a_late_shard_of_a_slow_searcher_is_not_missed(store):
    buffer = new_buffer(store, prompts_per_batch=1, responses_per_prompt=2)
    commit(store, "fast", 0, distinct("a", 1), policy_step=3)
    commit(store, "fast", 1, distinct("a", 1, start=10), policy_step=3)
    buffer.sync(step=4, attempt=1)
    commit(store, "slow", 0, distinct("a", 1, start=20), policy_step=0)  # older in every respect but its commit
    sync = buffer.sync(step=5, attempt=1)
    assert (sync.rounds, sync.num_trajectories, buffer.num_trajectories) == ({"slow": [0]}, 1, 3)


def test_a_lost_race_for_the_sync_record_changes_nothing(store):
    ours, theirs = (new_buffer(store, prompts_per_batch=1, responses_per_prompt=2) for _ in range(2))
    commit(store, "s0", 0, distinct("a", 3))
    theirs.sync(step=1, attempt=1)
    with pytest.raises(AlreadyExists):
        ours.sync(step=1, attempt=1)
    assert (ours.num_trajectories, ours.num_prompts, ours.newest_sync) == (0, 0, 0)
    with pytest.raises(NotEnoughExperience):
        ours.draw(1)
    assert ours.sync(step=1, attempt=attempts.start_attempt(store, owner=OWNER, resumed_from=0)).num_trajectories == 3


def test_a_store_that_stops_answering_changes_nothing_and_no_shard_is_refused(store, monkeypatch):
    buffer = new_buffer(store, prompts_per_batch=1, responses_per_prompt=2)
    commit(store, "s0", 0, distinct("a", 3))
    commit(store, "s1", 0, distinct("b", 3))
    store.put(shard_path("s0", 1), b"torn")
    real = store.get

    def away(path):
        if path == shard_path("s1", 0):
            raise StoreUnreachable("no answer")
        return real(path)

    with monkeypatch.context() as patch, pytest.raises(StoreUnreachable):
        patch.setattr(store, "get", away)
        buffer.sync(step=1, attempt=1)
    assert buffer.num_trajectories == 0 and store.list("quarantine") == store.list("syncs") == []
    assert buffer.sync(step=1, attempt=1).num_trajectories == 6


def run_of_three_syncs(store: RunStore, buffer: ReplayBuffer) -> list[pa.Table]:
    """Two Searchers, repeats across syncs and shards, prompts over capacity. The batches of steps 1 to 6."""
    batches = []
    for sync in range(3):
        commit(store, "s0", sync, distinct("hgfedcba"[: 8 - sync], 6, start=4 * sync), policy_step=sync)
        commit(store, "s1", 2 * sync, distinct("cdefghij", 3, start=2 * sync), policy_step=sync)
        commit(store, "s1", 2 * sync + 1, distinct("z", 3, start=2 * sync), policy_step=sync)
        buffer.sync(step=2 * sync + 1, attempt=1)
        batches += [buffer.draw(2 * sync + 1), buffer.draw(2 * sync + 2)]
    return batches


SAMPLING = {
    "prompts_per_batch": 5,
    "responses_per_prompt": 4,
    "capacity_per_prompt": 8,
    "recent_probability": 0.5,
    "reward_temperature": 0.5,
    "uniform_fraction": 0.1,
}


@pytest.mark.parametrize("rounds_per_settle", [1, 64])
def test_a_rebuilt_buffer_draws_the_same_batch_of_any_step(store, monkeypatch, rounds_per_settle):
    batches = run_of_three_syncs(store, new_buffer(store, **SAMPLING))
    monkeypatch.setattr("storage.buffer.ROUNDS_PER_SETTLE", rounds_per_settle)
    rebuilt = new_buffer(store, **SAMPLING)
    for step in (6, 1, 4, 3, 5, 2):
        rebuilt.rebuild(step)
        assert rebuilt.draw(step).equals(batches[step - 1])


def test_after_a_rebuild_the_next_sync_takes_in_the_rest(store):
    straight = new_buffer(store, **SAMPLING)
    run_of_three_syncs(store, straight)
    resumed = new_buffer(store, **SAMPLING)
    resumed.rebuild(4)
    assert resumed.newest_sync == 2
    assert resumed.sync(step=5, attempt=attempts.start_attempt(store, owner=OWNER, resumed_from=4)).rounds == {
        "s0": [2],
        "s1": [4, 5],
    }
    assert resumed.draw(9).equals(straight.draw(9))


def test_a_run_resumes_though_a_shard_was_moved_away(store):
    buffer = new_buffer(store, **SAMPLING)
    for number in range(4):
        commit(store, "s0", number, distinct("ab", 4, start=4 * number))
    store.delete(shard_path("s0", 1))
    assert buffer.sync(step=1, attempt=1).rounds == {"s0": [0, 2, 3]}
    resumed = new_buffer(store, **SAMPLING)
    resumed.rebuild(1)
    assert resumed.draw(1).equals(buffer.draw(1))
    assert resumed.sync(step=2, attempt=1) is None


def test_syncs_after_the_step_a_later_attempt_resumed_from_do_not_count(store):
    run_of_three_syncs(store, new_buffer(store, **SAMPLING))  # syncs before steps 1, 3 and 5; then the Trainer dies
    resumed = new_buffer(store, **SAMPLING)
    resumed.rebuild(2)
    commit(store, "s1", 6, distinct("c", 4, start=50))
    sync = resumed.sync(step=3, attempt=attempts.start_attempt(store, owner=OWNER, resumed_from=2))
    assert (sync.number, sync.rounds) == (2, {"s0": [1, 2], "s1": [2, 3, 4, 5, 6]})
    batch = resumed.draw(4)
    again = new_buffer(store, **SAMPLING)
    again.rebuild(4)  # attempt 1 took rounds 2 and 3 of s1 in as sync 2 too, and 4 and 5 as sync 3: undone
    assert again.newest_sync == 2
    assert again.draw(4).equals(batch)


def test_a_sync_is_recorded_if_it_took_something_in(store):
    buffer = new_buffer(store, **SAMPLING)
    assert buffer.sync(step=1, attempt=1) is None
    commit(store, "s0", 0, distinct("a", 2))
    commit(store, "s0", 1, distinct("b", 2))
    commit(store, "s1", 0, distinct("c", 2))
    buffer.sync(step=2, attempt=1)
    assert buffer.sync(step=3, attempt=1) is None
    commit(store, "s0", 2, distinct("a", 2))
    buffer.sync(step=4, attempt=1)
    names = ("sync", "step", "searcher", "first_round", "last_round", "num_trajectories")
    assert [tuple(row[name] for name in names) for row in ledger.effective_syncs(store, step=4)] == [
        (1, 2, "s0", 0, 1, 6),
        (1, 2, "s1", 0, 0, 6),
        (2, 4, "s0", 2, 2, 2),
    ]


def test_a_rebuild_without_records_is_an_empty_buffer(store):
    commit(store, "s0", 0, distinct("a", 3))
    buffer = new_buffer(store)
    buffer.rebuild(10)
    assert (buffer.num_trajectories, buffer.newest_sync) == (0, 0)


def test_bad_settings_are_refused():
    bad = [
        {"recent_probability": 1.5},
        {"recent_probability": float("nan")},
        {"reward_temperature": 0},
        {"reward_temperature": float("inf")},
        {"responses_per_prompt": 1},
        {"uniform_fraction": -0.1},
        {"min_size": 0},
        {"replay": True},
    ]
    for settings in bad:
        with pytest.raises(ValidationError, match=next(iter(settings))):
            SamplingSettings(**settings)
    with pytest.raises(
        ValidationError, match=r"capacity_per_prompt=8 must be at least sampling\.responses_per_prompt=16"
    ):
        SamplingSettings(capacity_per_prompt=8, responses_per_prompt=16)


def test_before_min_size_trajectories_came_in_there_is_not_enough_experience(store):
    buffer = new_buffer(store, min_size=4, prompts_per_batch=1, responses_per_prompt=2)
    with pytest.raises(NotEnoughExperience, match=r"0 of the first 4 trajectories"):
        buffer.draw(1)
    commit(store, "s0", 0, distinct("a", 3))
    buffer.sync(step=1, attempt=1)
    with pytest.raises(NotEnoughExperience, match="3 of the first 4"):
        buffer.draw(1)
    commit(store, "s0", 1, distinct("a", 1))  # a repeat: still 3 stored, but a small dataset must not wait for ever
    buffer.sync(step=2, attempt=1)
    assert buffer.num_trajectories == 3
    assert buffer.draw(1).num_rows == 2
