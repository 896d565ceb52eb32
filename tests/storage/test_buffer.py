"""Claims about the replay buffer (storage/buffer.py); `pytest tests/storage/test_buffer.py`.

Sampling (MOP)
- the share of recent draws is m, and what is recent is what the newest sync took in
- rewards weigh as softmax(reward / tau) mixed with uniform, in the first draw and in the second without replacement
- prompts are drawn uniformly, all different within a batch where there are enough, otherwise each in turn
- no response twice for a prompt where there are enough, otherwise each in turn
- the whole draw equals a slow reference in plain Python, which computes the same random numbers with hashlib
Storage
- of identical responses to a prompt the newest counts; of a prompt the newest `capacity_per_prompt` stay
- a drawn row carries the tokens and log-probabilities of its shard
- rows can be drawn from the sync after their commit on; a late shard of a slow Searcher is not missed
- an error while taking in (a lost race for the sync record, a torn shard) changes nothing
- every sync that took something in is recorded; one that did not is not
- from the shards and the sync records alone a new buffer draws the same batch of any step, to the last bit
- syncs of an attempt that was resumed from an earlier step do not count
- bad settings are refused; before `min_size` trajectories came in, NotEnoughExperience
"""

import hashlib
import math
from collections import Counter
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError
from scipy.stats import chisquare

from storage import ledger
from storage.buffer import NotEnoughExperience, ReplayBuffer, Sampling
from storage.errors import AlreadyExists, TornShard
from storage.schema import SCHEMA_VERSION, TRAJECTORY, to_table
from storage.shards import commit_shard, shard_path, trajectory_id
from storage.store import RunStore

SEED = 7


@pytest.fixture
def store(tmp_path) -> RunStore:
    store = RunStore(f"file://{tmp_path}", "run")
    start_attempt(store, resumed_from=0)
    return store


def start_attempt(store: RunStore, resumed_from: int) -> int:
    return ledger.start_attempt(store, resumed_from, {"host": "here", "pid": 1, "started": "now"})


def commit(store: RunStore, searcher: str, round_number: int, responses: list[tuple], policy_step: int = 0) -> None:
    """One shard of (prompt_id, response_tokens, reward); log-probabilities are made from the tokens."""
    rows = [
        {
            "trajectory_id": trajectory_id(searcher, round_number, index),
            "prompt_id": prompt_id,
            "prompt": prompt_id,
            "response": str(tokens),
            "prompt_tokens": list(prompt_id.encode()),
            "response_tokens": tokens,
            "behavior_logprobs": [-token / 8 for token in tokens],
            "reference_logprobs": [-token / 4 for token in tokens],
            "reward": reward,
            "rewards": [("reward", reward)],
            "finish_reason": "stop",
            "policy_step": policy_step,
            "policy_fingerprint": "",
            "searcher": searcher,
            "round": round_number,
            "temperature": 1.0,
            "top_p": 1.0,
            "reward_version": "1",
            "code_version": "1",
            "schema_version": SCHEMA_VERSION,
            "created_at": datetime(2026, 11, 21, tzinfo=UTC),
        }
        for index, (prompt_id, tokens, reward) in enumerate(responses)
    ]
    commit_shard(store, to_table(rows, TRAJECTORY))


def distinct(prompt_ids: str, number: int, start: int = 0) -> list[tuple]:
    """`number` different responses to each of the prompts named by a letter; rewards go 0, 0.25, 0.5, 0.75, 0 ..."""
    return [(name, [start + i, 1], i % 4 / 4) for name in prompt_ids for i in range(number)]


def new_buffer(store: RunStore, **sampling) -> ReplayBuffer:
    return ReplayBuffer(store, Sampling(**{"min_size": 1} | sampling), SEED)


def groups(batch: pa.Table) -> dict[int, list[dict]]:
    """Rows of a batch by prompt_index."""
    rows = batch.to_pylist()
    return {place: [row for row in rows if row["prompt_index"] == place] for place in {r["prompt_index"] for r in rows}}


# Sampling


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


def test_fewer_responses_than_k_are_used_in_turn(store):
    commit(store, "s0", 0, distinct("a", 3))
    buffer = new_buffer(store, prompts_per_batch=1, responses_per_prompt=8)
    buffer.sync(step=1, attempt=1)
    drawn = buffer.draw(1)["trajectory_id"].to_pylist()
    assert sorted(Counter(drawn).values()) == [2, 3, 3]
    assert drawn[:3] == drawn[3:6] and drawn[:2] == drawn[6:], "in turn"


def test_a_reward_temperature_near_zero_draws_the_best_responses_first(store):
    """exp(-0.25 / 0.0001) is 0 in floating point: the order of rewards must survive that."""
    commit(store, "s0", 0, distinct("a", 4))
    buffer = new_buffer(
        store, prompts_per_batch=1, responses_per_prompt=4, recent_probability=0, reward_temperature=1e-4
    )
    buffer.sync(step=1, attempt=1)
    assert buffer.draw(1)["reward"].to_pylist() == [0.75, 0.5, 0.25, 0.0]


def uniform_number(step: int, purpose: str, name: object) -> float:
    """What storage/sql/create_index.sql promises: the high 52 bits of a little-endian md5."""
    digest = hashlib.md5(f"{SEED}/{step}/{purpose}/{name}".encode()).digest()
    return ((int.from_bytes(digest, "little") >> 76) + 0.5) / 2**52


def reference_draw(trajectories: list[dict], newest_sync: int, sampling: Sampling, step: int) -> list[tuple]:
    """MOP written the slow way. Rows of (prompt_index, slot, trajectory_id, recent, draw_probability)."""
    recent_pool = {t["prompt_id"] for t in trajectories if t["sync"] == newest_sync}
    whole_pool = {t["prompt_id"] for t in trajectories}
    places = range(sampling.prompts_per_batch)
    is_recent = [uniform_number(step, "recent", place) < sampling.recent_probability for place in places]
    recents = sorted(recent_pool, key=lambda name: uniform_number(step, "recent prompt", name))
    num_recent = sum(is_recent)
    prompts = {True: [recents[turn % len(recents)] for turn in range(num_recent)]}
    taken = set(prompts[True])
    others = sorted(whole_pool, key=lambda name: (name in taken, uniform_number(step, "prompt", name)))
    prompts[False] = [others[turn % len(others)] for turn in range(len(places) - num_recent)]
    rows = []
    for place in places:
        recent, prompt_id = is_recent[place], prompts[is_recent[place]].pop(0)
        candidates = [
            t for t in trajectories if t["prompt_id"] == prompt_id and (not recent or t["sync"] == newest_sync)
        ]
        softmax = sampling.reward_temperature is not None and not recent
        weights = [math.exp(t["reward"] / sampling.reward_temperature) if softmax else 1.0 for t in candidates]
        uniform = sampling.uniform_fraction / len(candidates)
        race = []
        for t, weight in zip(candidates, weights, strict=True):
            p = (1 - sampling.uniform_fraction) * weight / sum(weights) + uniform
            u = uniform_number(step, "trajectory", f"{place}/{t['trajectory_id']}")
            race.append((-math.log(u) / p, t["trajectory_id"], p))
        race.sort()
        for slot in range(sampling.responses_per_prompt):
            _, name, p = race[slot % len(race)]
            rows.append((place, slot, name, recent, pytest.approx(p, rel=1e-12)))
    return rows


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


# Storage


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
    # four came in at once: of the older policy's two the one with the smaller id goes
    assert set(buffer.draw(1)["trajectory_id"].to_pylist()) == {
        "s0-00000000-00000",
        "s0-00000000-00001",
        "s1-00000000-00001",
    }
    commit(store, "s1", 1, distinct("a", 2), policy_step=1)  # the responses of s0 again: older policy, newer sync
    buffer.sync(step=4, attempt=1)
    assert set(buffer.draw(1)["trajectory_id"].to_pylist()) == {
        "s1-00000000-00001",
        "s1-00000001-00000",
        "s1-00000001-00001",
    }
    assert (buffer.num_trajectories, buffer.num_prompts) == (3, 1)


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
    assert ours.sync(step=1, attempt=start_attempt(store, resumed_from=0)).num_trajectories == 3


def test_a_torn_shard_changes_nothing_and_is_named(store):
    buffer = new_buffer(store, prompts_per_batch=1, responses_per_prompt=2)
    commit(store, "s0", 0, distinct("a", 3))
    commit(store, "s1", 0, distinct("b", 3))
    path = shard_path("s1", 0)
    whole = store.get(path)
    store.put(path, whole[:100])
    with pytest.raises(TornShard, match=path):
        buffer.sync(step=1, attempt=1)
    assert buffer.num_trajectories == 0
    store.put(path, whole)
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


@pytest.mark.parametrize("shards_per_read", [1, 64])
def test_a_rebuilt_buffer_draws_the_same_batch_of_any_step(store, monkeypatch, shards_per_read):
    batches = run_of_three_syncs(store, new_buffer(store, **SAMPLING))
    monkeypatch.setattr("storage.buffer.SHARDS_PER_READ", shards_per_read)
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
    assert resumed.sync(step=5, attempt=start_attempt(store, resumed_from=4)).rounds == {"s0": [2], "s1": [4, 5]}
    assert resumed.draw(9).equals(straight.draw(9))


def test_syncs_after_the_step_a_later_attempt_resumed_from_do_not_count(store):
    run_of_three_syncs(store, new_buffer(store, **SAMPLING))  # syncs before steps 1, 3 and 5; then the Trainer dies
    resumed = new_buffer(store, **SAMPLING)
    resumed.rebuild(2)
    commit(store, "s1", 6, distinct("c", 4, start=50))
    sync = resumed.sync(step=3, attempt=start_attempt(store, resumed_from=2))
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
    assert ledger.effective_syncs(store, step=4) == [
        {"attempt": 1, "sync": 1, "step": 2, "searcher": "s0", "first_round": 0, "last_round": 1},
        {"attempt": 1, "sync": 1, "step": 2, "searcher": "s1", "first_round": 0, "last_round": 0},
        {"attempt": 1, "sync": 2, "step": 4, "searcher": "s0", "first_round": 2, "last_round": 2},
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
            Sampling(**settings)
    with pytest.raises(ValidationError, match="capacity_per_prompt=8 must be at least responses_per_prompt=16"):
        Sampling(capacity_per_prompt=8)


def test_before_min_size_trajectories_came_in_there_is_not_enough_experience(store):
    buffer = new_buffer(store, min_size=4, prompts_per_batch=1, responses_per_prompt=2)
    with pytest.raises(NotEnoughExperience, match=r"min_size=4.* 0 syncs .* 0 trajectories"):
        buffer.draw(1)
    commit(store, "s0", 0, distinct("a", 3))
    buffer.sync(step=1, attempt=1)
    with pytest.raises(NotEnoughExperience, match="3 trajectories"):
        buffer.draw(1)
    commit(store, "s0", 1, distinct("a", 1))  # a repeat: still 3 stored, but a small dataset must not wait for ever
    buffer.sync(step=2, attempt=1)
    assert buffer.num_trajectories == 3
    assert buffer.draw(1).num_rows == 2
