"""Claims about storage/fresh.py. Run: pytest tests/storage/test_fresh.py

- what a sync says of what it took in is what SQL computes from the same shards, of several Searchers and rounds
- repeated responses count, and those of other temperatures as they were sampled
- the next sync says nothing of the one before
- staleness is never negative, also of policies that a resume undid
"""

import pytest

from storage.fresh import FRESH_COLUMNS, Fresh
from storage.queries import query
from storage.shards import commit_shard
from tests.storage.buffer_runs import new_buffer, new_store
from tests.storage.helpers import make_shard

FROM_SHARDS = """
SELECT
    avg(reward) AS fresh_reward_mean,
    avg(list_sum(behavior_logprobs) - list_sum(reference_logprobs)) AS fresh_kl,
    -sum(list_sum(behavior_logprobs)) / sum(len(response_tokens)) AS fresh_entropy,
    avg((finish_reason = 'length')::INT) AS fresh_cut_share,
    avg(8 - policy_step) AS fresh_staleness
FROM trajectories WHERE round >= {round}
"""


def test_a_sync_says_what_sql_computes_from_its_shards(tmp_path):
    store = new_store(tmp_path)
    buffer = new_buffer(store)
    commit_shard(store, make_shard("s0", 0, 3, behavior_logprobs=[-9.0, -9.0], finish_reason="length"))
    assert buffer.sync(1, attempt=1).fresh.facts(1)["fresh_entropy"] == 9.0
    commit_shard(store, make_shard("s0", 1, 5))
    commit_shard(store, make_shard("s0", 2, 5, reward=0.25, temperature=0.7))
    long = {"response_tokens": [7] * 9, "behavior_logprobs": [-0.125] * 9, "reference_logprobs": [-0.5] * 9}
    commit_shard(store, make_shard("s1", 1, 3, finish_reason="length", **long))
    found = buffer.sync(9, attempt=1)
    (expected,) = query(store, FROM_SHARDS.format(round=1)).to_pylist()
    assert found.fresh.facts(9) == pytest.approx(expected)
    assert found.num_trajectories == 13 and tuple(expected) == FRESH_COLUMNS


def test_an_undone_policy_is_as_old_as_the_steps_since_the_checkpoint_it_left(tmp_path):
    """A resume from step 20 undid policy 25. In step 21 its responses are five steps old, not minus five."""
    store = new_store(tmp_path)
    commit_shard(store, make_shard("s0", 0, 3, policy_step=25))
    assert new_buffer(store).sync(21, attempt=1).fresh.facts(21)["fresh_staleness"] == 5


def test_sums_of_parts_are_those_of_the_whole():
    parts = [make_shard("s0", 0, 2), make_shard("s0", 3, 3, finish_reason="length")]
    sums = [Fresh.of(part, part["policy_step"].to_numpy()) for part in parts]
    assert sums[0] + sums[1] == Fresh(5, 10, 3, 2.0, 9, -0.75 * 5, -1.0 * 5)
