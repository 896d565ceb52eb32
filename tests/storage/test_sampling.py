"""Claims about how the replay buffer draws (`ReplayBuffer.draw`); `pytest tests/storage/test_sampling.py`.

- the share of recent draws is m, and what is recent is what the newest sync took in
- rewards weigh as softmax(reward / tau) mixed with uniform, in the first draw and in the second without replacement
- prompts are drawn uniformly, all different within a batch where there are enough, otherwise each in turn
- prompts whose rewards differ are drawn before the others, from the newest sync by its rewards alone, and trajectories
  that are too old to be drawn, or are not stored any more, do not count
- a response's share of the slots is its share of the samples, whether K distinct ones are there or not
- no sample twice for a prompt where there are K, otherwise all in turn
- a temperature near zero draws in the order of rewards
- the whole draw equals a slow reference in plain Python, which computes the same random numbers with hashlib
"""

import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import chisquare

from storage.shards import trajectory_id
from storage.store import RunStore
from tests.storage.buffer_runs import commit, distinct, new_buffer, new_store
from tests.storage.reference_draw import reference_draw


@pytest.fixture
def store(tmp_path) -> RunStore:
    return new_store(tmp_path)


def groups(batch: pa.Table) -> dict[int, list[dict]]:
    """Rows of a batch by prompt_index."""
    rows = batch.to_pylist()
    return {place: [row for row in rows if row["prompt_index"] == place] for place in {r["prompt_index"] for r in rows}}


@pytest.mark.parametrize("m", [0.0, 0.3, 1.0])
def test_share_of_recent_draws_is_m(store, m):
    buffer = new_buffer(store, prompts_per_batch=16, responses_per_prompt=2, recent_probability=m)
    commit(store, "s0", 0, distinct("abcdefghijklmnopqrst", 3))
    buffer.sync(step=1, attempt=1)
    commit(store, "s0", 1, distinct("abcdefghijklmnop", 2, start=10))
    buffer.sync(step=2, attempt=1)

    first_slots = pa.concat_tables([buffer.draw(step).slice(0, 32) for step in range(60)]).filter(
        pa.array([True, False] * 960)
    )
    recent = np.array(first_slots["recent"].to_pylist())  # 60 steps x 16 places = 960 Bernoulli draws
    assert abs(recent.sum() - 960 * m) <= 4 * math.sqrt(960 * m * (1 - m))
    from_newest_sync = np.array([name.startswith("s0-00000001") for name in first_slots["trajectory_id"].to_pylist()])
    assert from_newest_sync[recent].all()
    if m < 1:
        assert not from_newest_sync[~recent].all(), "other draws come from everything stored"


def test_rewards_weigh_as_the_softmax_mixed_with_uniform(store):
    rewards = [0.0, 0.5, 1.0, -1.0, 1.0]
    tau, uniform_fraction = 0.7, 0.2
    prompts = "abcdefghijklmnop"
    commit(store, "s0", 0, [(name, [i], reward) for name in prompts for i, reward in enumerate(rewards)])
    buffer = new_buffer(
        store,
        prompts_per_batch=16,
        responses_per_prompt=2,
        recent_probability=0,
        reward_temperature=tau,
        uniform_fraction=uniform_fraction,
    )
    buffer.sync(step=1, attempt=1)
    batches = pa.concat_tables([buffer.draw(step) for step in range(200)])  # 3200 draws of 2 from 5

    softmax = np.exp(np.array(rewards) / tau)
    p = (1 - uniform_fraction) * softmax / softmax.sum() + uniform_fraction / 5
    response = np.array([tokens[0] for tokens in batches["response_tokens"].to_pylist()])
    np.testing.assert_allclose(batches["draw_probability"].to_numpy(), p[response], rtol=1e-12)

    first, second = response[0::2], response[1::2]
    assert chisquare(np.bincount(first, minlength=5), 3200 * p).pvalue > 0.01
    # without replacement: P(second = j) = sum over i != j of p_i * p_j / (1 - p_i)
    p_second = np.array([sum(p[i] * p[j] / (1 - p[i]) for i in range(5) if i != j) for j in range(5)])
    assert chisquare(np.bincount(second, minlength=5), 3200 * p_second).pvalue > 0.01
    assert (first != second).all()


def test_prompts_are_drawn_uniformly_and_all_differ_where_there_are_enough(store):
    commit(store, "s0", 0, distinct("abcdefghijklmnopqrst", 2))
    buffer = new_buffer(store, prompts_per_batch=8, responses_per_prompt=2, recent_probability=0)
    buffer.sync(step=1, attempt=1)
    counts = Counter()
    for step in range(200):
        drawn = [group[0]["prompt_id"] for group in groups(buffer.draw(step)).values()]
        assert len(set(drawn)) == 8
        counts.update(drawn)
    # 8 of 20 prompts, 200 times: 80 each. A prompt is drawn at most once a batch, so counts vary 1 - 8/20 as much as
    # those of independent draws (and the 20 counts, of given sum, have 19 degrees of freedom)
    statistic = sum((counts[name] - 80) ** 2 / 80 for name in "abcdefghijklmnopqrst") / (1 - 8 / 20) * 19 / 20
    assert statistic < 36.2  # 1 % point of chi-square with 19 degrees of freedom


def test_recent_and_other_prompts_of_a_batch_differ_where_there_are_enough(store):
    commit(store, "s0", 0, distinct("abcdefgh", 2))
    buffer = new_buffer(store, prompts_per_batch=8, responses_per_prompt=2, recent_probability=0.5)
    buffer.sync(step=1, attempt=1)
    for step in range(30):  # all eight are recent, and all are in the whole pool: a batch needs every one of them
        assert sorted(group[0]["prompt_id"] for group in groups(buffer.draw(step)).values()) == list("abcdefgh")


def drawn_prompts(buffer, step: int) -> set[str]:
    return {group[0]["prompt_id"] for group in groups(buffer.draw(step)).values()}


@pytest.mark.parametrize("m", [0, 1])
def test_prompts_whose_rewards_differ_are_drawn_before_the_others(store, m):
    same = [(name, [token], 1.0) for name in "efghijkl" for token in (1, 2)]
    commit(store, "s0", 0, distinct("abcd", 2) + same)
    settings = {"prompts_per_batch": 6, "responses_per_prompt": 2, "recent_probability": m}
    buffer = new_buffer(store, **settings)
    buffer.sync(step=1, attempt=1)
    batches = [drawn_prompts(buffer, step) for step in range(40)]
    assert all(set("abcd") < batch and len(batch) == 6 for batch in batches)
    assert set.union(*batches) == set("abcdefghijkl"), "the others fill the places that are left, all in the end"

    buffer = new_buffer(store, **settings, differing_rewards_first=False)
    buffer.rebuild(1)
    assert not all(set("abcd") < drawn_prompts(buffer, step) for step in range(40))


def test_recent_prompts_come_first_by_the_rewards_of_the_newest_sync(store):
    settings = {"prompts_per_batch": 1, "responses_per_prompt": 2}
    buffer = new_buffer(store, **settings, recent_probability=1)
    commit(store, "s0", 0, [("a", [1], 0.0), ("b", [1], 0.0)])
    buffer.sync(step=1, attempt=1)
    commit(store, "s0", 1, [("a", [2], 1.0), ("a", [3], 1.0), ("b", [2], 0.0), ("b", [3], 1.0)])
    buffer.sync(step=2, attempt=1)
    assert all(drawn_prompts(buffer, step) == {"b"} for step in range(20))

    replaying = new_buffer(store, **settings, recent_probability=0)
    replaying.rebuild(2)
    assert set.union(*(drawn_prompts(replaying, step) for step in range(20))) == {"a", "b"}


def test_rewards_of_trajectories_that_are_too_old_do_not_make_a_prompt_come_first(store):
    buffer = new_buffer(store, prompts_per_batch=2, responses_per_prompt=2, recent_probability=0, max_age=2)
    commit(store, "s0", 0, [(name, [1], 0.0) for name in "abcdefgh"], policy_step=0)
    buffer.sync(step=1, attempt=1)
    young = [(name, [2], 1.0) for name in "abcdefgh"] + [("a", [3], 0.5), ("b", [3], 0.5)]
    commit(store, "s0", 1, young, policy_step=1)
    buffer.sync(step=2, attempt=1)
    assert drawn_prompts(buffer, step=4) == {"a", "b"}, "the others' rewards of 0 are three steps old"


@pytest.mark.parametrize("m", [0, 1])
def test_rewards_of_trajectories_that_are_not_stored_any_more_do_not_make_a_prompt_come_first(store, m):
    settings = {"recent_probability": m, "capacity_per_prompt": 2}
    buffer = new_buffer(store, prompts_per_batch=1, responses_per_prompt=2, **settings)
    commit(store, "s0", 0, [(name, [1], 1.0) for name in "abcdefgh"])
    buffer.sync(step=1, attempt=1)
    commit(store, "s0", 1, [(name, [2], 1.0) for name in "bcdefgh"])  # sampled again by policy 1, with another reward
    evicting = [(name, [token], 0.0) for name in "bcdefgh" for token in (2, 3)]
    commit(store, "s0", 2, [*evicting, ("a", [2], 0.0), ("a", [3], 0.5)], policy_step=1)
    buffer.sync(step=2, attempt=1)
    assert all(drawn_prompts(buffer, step) == {"a"} for step in range(2, 20))


def test_fewer_prompts_than_places_are_used_in_turn(store):
    commit(store, "s0", 0, distinct("abc", 4))
    buffer = new_buffer(store, prompts_per_batch=8, responses_per_prompt=2, recent_probability=1)
    buffer.sync(step=1, attempt=1)
    counts = Counter(group[0]["prompt_id"] for group in groups(buffer.draw(1)).values())
    assert sorted(counts.values()) == [2, 3, 3]


def test_no_response_twice_for_a_prompt_where_there_are_enough(store):
    commit(store, "s0", 0, distinct("abcd", 6))
    buffer = new_buffer(store, prompts_per_batch=4, responses_per_prompt=6, reward_temperature=0.1)
    buffer.sync(step=1, attempt=1)
    for step in range(20):
        for group in groups(buffer.draw(step)).values():
            assert len({row["trajectory_id"] for row in group}) == 6


def test_fewer_responses_than_k_are_used_as_often_as_they_were_sampled(store):
    def counts(buffer, step: int) -> Counter:
        return Counter(tokens[0] for tokens in buffer.draw(step)["response_tokens"].to_pylist())

    # Two were sampled once, and one six times, by two Searchers.
    commit(store, "s0", 0, [("a", [1], 0.0), ("a", [2], 1.0), *[("a", [3], 0.5)] * 4])
    commit(store, "s1", 0, [("a", [3], 0.5)] * 2)
    buffer = new_buffer(store, prompts_per_batch=1, responses_per_prompt=8, recent_probability=1)
    buffer.sync(step=1, attempt=1)
    for step in range(20):
        assert counts(buffer, step) == {1: 1, 2: 1, 3: 6}

    # How often an older sync brought it does not count: the newest brought both once.
    commit(store, "s0", 1, [("a", [1], 0.0), ("a", [3], 0.5)])
    buffer.sync(step=2, attempt=1)
    assert counts(buffer, 2) == {1: 4, 3: 4}


@pytest.mark.parametrize("num_distinct", [2, 15, 16, 17, 40])
def test_the_share_of_a_frequent_response_does_not_jump_where_k_distinct_ones_are_there(store, num_distinct):
    """It was sampled thirty times, the others once each; K is 16."""
    buffer = new_buffer(store, prompts_per_batch=8, responses_per_prompt=16, recent_probability=0)
    others = num_distinct - 1
    of_prompt = [([0], 1.0)] * 30 + [([1 + other], 0.0) for other in range(others)]
    commit(store, "s0", 0, [(name, *response) for name in "abcdefgh" for response in of_prompt])
    buffer.sync(step=1, attempt=1)
    draws = [row for step in range(50) for row in buffer.draw(step).to_pylist()]
    num_groups, share = 50 * 8, 30 / (30 + others)
    slots = sum(row["response_tokens"] == [0] for row in draws) / num_groups
    # 16 of 30 + others samples without replacement, 30 of them marked: hypergeometric
    variance = 16 * share * (1 - share) * (30 + others - 16) / (30 + others - 1)
    assert abs(slots - 16 * share) < 4 * math.sqrt(variance / num_groups)
    first = [row for row in draws if row["slot"] == 0]
    frequent = [row["draw_probability"] for row in first if row["response_tokens"] == [0]]
    assert frequent == [pytest.approx(share)] * len(frequent)
    assert abs(len(frequent) - num_groups * share) < 4 * math.sqrt(num_groups * share * (1 - share))


def test_a_reward_temperature_near_zero_draws_the_best_responses_first(store):
    """exp(-0.25 / 0.0001) is 0 in floating point: the order of rewards must survive that."""
    commit(store, "s0", 0, distinct("a", 4))
    buffer = new_buffer(
        store, prompts_per_batch=1, responses_per_prompt=4, recent_probability=0, reward_temperature=1e-4
    )
    buffer.sync(step=1, attempt=1)
    assert buffer.draw(1)["reward"].to_pylist() == [0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize("tau", [None, 0.3])
def test_a_draw_equals_the_slow_reference(store, tau):
    buffer = new_buffer(
        store,
        prompts_per_batch=6,
        responses_per_prompt=4,
        recent_probability=0.5,
        reward_temperature=tau,
        uniform_fraction=0.1,
    )
    commit(store, "s0", 0, distinct("abcdefghij", 5))
    buffer.sync(step=1, attempt=1)
    commit(store, "s1", 0, distinct("ab", 7, start=20) + distinct("k", 2))
    buffer.sync(step=2, attempt=1)
    stored = [
        {"trajectory_id": trajectory_id(searcher, 0, index), "prompt_id": prompt_id, "reward": reward, "sync": sync}
        for searcher, sync, responses in [
            ("s0", 1, distinct("abcdefghij", 5)),
            ("s1", 2, distinct("ab", 7, start=20) + distinct("k", 2)),
        ]
        for index, (prompt_id, _, reward) in enumerate(responses)
    ]
    for step in range(20):
        rows = buffer.draw(step).select(["prompt_index", "slot", "trajectory_id", "recent", "draw_probability"])
        drawn = [tuple(row.values()) for row in rows.to_pylist()]
        assert drawn == reference_draw(stored, 2, buffer._sampling, step)
