"""Claims about the buffer's flow control; `pytest tests/storage/test_flow_control.py`.

- samples_per_insert holds a step back exactly until enough was taken in, and depends on step and syncs alone
- max_age is a hard bound: no draw is older, in recent places and others; what is left is drawn as if it were all
- a sync that is too old as a whole is dropped by a later one; a resume does not read its shards, and draws the same
- what a policy sampled that a resume undid ages from the checkpoint, by the undone steps, too; it is never negative
- without anything young enough there is no batch, and the message has every number of the rule
- where all of the newest sync is too old, its places draw among the rest
"""

import pytest

from storage import ledger
from storage.buffer import NotEnoughExperience
from storage.errors import NotFound
from storage.mop import SamplingSettings
from storage.shards import shard_path
from storage.store import RunStore
from tests.storage.buffer_runs import commit, distinct, new_buffer, new_store
from tests.storage.reference_draw import reference_draw


@pytest.fixture
def store(tmp_path) -> RunStore:
    return new_store(tmp_path)


def test_samples_per_insert_holds_a_step_back_until_enough_came_in(store):
    # 2 x 4 = 8 slots a step, at most 2 draws of each: 4 trajectories a step
    buffer = new_buffer(store, prompts_per_batch=2, responses_per_prompt=4, samples_per_insert=2)
    commit(store, "s0", 0, distinct("ab", 4))
    buffer.sync(step=1, attempt=1)
    assert buffer.draw(1).num_rows == buffer.draw(2).num_rows == 8
    assert buffer.samples_per_insert(2) == 2
    with pytest.raises(
        NotEnoughExperience,
        match=r"each of 8 would have been drawn 3\.00 times .* sampling\.samples_per_insert is 2",
    ):
        buffer.draw(3)
    commit(store, "s0", 1, distinct("ab", 2))  # repeats count: they were sampled
    buffer.sync(step=3, attempt=1)
    assert buffer.draw(3).num_rows == 8
    resumed = new_buffer(store, prompts_per_batch=2, responses_per_prompt=4, samples_per_insert=2)
    resumed.rebuild(2)
    with pytest.raises(NotEnoughExperience):
        resumed.draw(3)


def run_of_three_policies(store: RunStore, **sampling):
    """Policy steps 0, 4 and 8 sampled prompts a-d, a-d and c-f, taken in by syncs 1, 2 and 3."""
    buffer = new_buffer(store, prompts_per_batch=4, responses_per_prompt=3, recent_probability=0.5, **sampling)
    for sync, (prompts, policy_step) in enumerate((("abcd", 0), ("abcd", 4), ("cdef", 8))):
        commit(store, "s0", sync, distinct(prompts, 4, start=10 * sync), policy_step)
        buffer.sync(step=policy_step + 1, attempt=1)
    return buffer


@pytest.mark.parametrize(("step", "oldest", "num_too_old"), [(9, 4, 0), (14, 9, 32), (10, 5, 16), (5, 0, 0)])
def test_no_draw_is_older_than_max_age(store, step, oldest, num_too_old):
    buffer = run_of_three_policies(store, max_age=4)
    assert buffer.num_too_old(step) == num_too_old
    if oldest > 8:
        message = r"max_age is 4, but all 32 stored trajectories are older: their policies are before step 9"
        with pytest.raises(NotEnoughExperience, match=message):
            buffer.draw(step)
        return
    assert min(buffer.draw(step)["policy_step"].to_pylist()) >= oldest
    assert step - 1 - oldest <= 4


def test_a_sync_that_is_too_old_is_dropped_and_not_read_again(store):
    buffer = run_of_three_policies(store, max_age=4)
    assert buffer.num_trajectories == 32 and buffer.num_inserted == 48
    store.delete(shard_path("s0", 0))
    resumed = new_buffer(store, prompts_per_batch=4, responses_per_prompt=3, recent_probability=0.5, max_age=4)
    resumed.rebuild(9)
    assert resumed.num_trajectories == 32 and resumed.num_inserted == 48
    commit(store, "s0", 3, distinct("ae", 4, start=30), 9)
    for attempt, each in enumerate((buffer, resumed), 1):
        each.sync(step=10, attempt=attempt)
        assert each.num_trajectories == 24  # of policies 8 and 9: the sync of policy 4 is too old for step 10
    assert buffer.draw(10).equals(resumed.draw(10))
    with pytest.raises(NotFound):
        new_buffer(store, prompts_per_batch=4, responses_per_prompt=3).rebuild(9)


def test_what_is_young_enough_is_drawn_as_if_it_were_all(store):
    buffer = run_of_three_policies(store, max_age=4)
    rows = [
        {
            "trajectory_id": f"s0-{sync:08d}-{index:05d}",
            "prompt_id": prompt_id,
            "reward": reward,
            "sync": sync + 1,
        }
        for sync, prompts in ((1, "abcd"), (2, "cdef"))
        for index, (prompt_id, _, reward) in enumerate(distinct(prompts, 4))
    ]
    drawn = buffer.draw(9).select(["prompt_index", "slot", "trajectory_id", "recent", "draw_probability"])
    assert [tuple(row.values()) for row in drawn.to_pylist()] == reference_draw(rows, 3, buffer._sampling, 9)


def test_staleness_after_a_resume_counts_the_undone_steps_and_those_since(store):
    """A Trainer came to policy 9 and resumed from policy 4, which a Searcher's policies 4, 6 and 9 have in common."""
    buffer = new_buffer(store, prompts_per_batch=1, responses_per_prompt=3, recent_probability=0, max_age=8)
    for number, policy_step in enumerate((4, 6, 9)):
        commit(store, "s0", number, distinct("a", 1, start=10 * number), policy_step)
    buffer.sync(step=5, attempt=1)

    def staleness(step: int) -> dict[int, int]:
        rows = buffer.draw(step)
        return dict(zip(rows["policy_step"].to_pylist(), ledger.staleness(rows, step).to_pylist(), strict=True))

    assert staleness(5) == {4: 0, 6: 2, 9: 5}
    assert staleness(8) == {4: 3, 6: 5, 9: 8}
    assert staleness(9) == {4: 4, 6: 6}  # of policy 9 it is 9, more than max_age
    assert buffer.num_too_old(9) == 1
    unbounded = new_buffer(store, prompts_per_batch=1, responses_per_prompt=3, recent_probability=0)
    unbounded.rebuild(9)
    assert set(unbounded.draw(9)["policy_step"].to_pylist()) == {4, 6, 9}


def test_places_of_a_newest_sync_that_is_too_old_draw_among_the_rest(store):
    buffer = new_buffer(store, prompts_per_batch=2, responses_per_prompt=2, recent_probability=1, max_age=2)
    commit(store, "fast", 0, distinct("ab", 2), policy_step=8)
    buffer.sync(step=9, attempt=1)
    commit(store, "slow", 0, distinct("cd", 2), policy_step=0)  # a straggler's
    buffer.sync(step=10, attempt=1)
    batch = buffer.draw(10)
    assert batch.num_rows == 4
    assert set(batch["prompt_id"].to_pylist()) == {"a", "b"} and not any(batch["recent"].to_pylist())


@pytest.mark.parametrize("bad", [{"samples_per_insert": 0}, {"samples_per_insert": float("inf")}, {"max_age": -1}])
def test_bounds_that_would_stop_everything_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingSettings(**bad)
