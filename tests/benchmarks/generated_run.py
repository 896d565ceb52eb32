"""A whole run, generated: shards of generated text, syncs, batches, training steps, rounds, evaluations, policies.

It is what `tba verify` calls whole (weights apart), and it behaves as a run does: accuracy rises with the policy step
while its responses become more alike, which is what the report and the diversity measures are to show.
"""

import json
import re
from dataclasses import asdict
from datetime import timedelta

import numpy as np
import pyarrow as pa

from storage import attempts, kept_policies, ledger, policies
from storage.fresh import Fresh
from storage.ledger import Sync
from storage.schema import SCHEMA_VERSION, TRAJECTORY
from storage.shards import commit_shard, trajectory_id
from storage.store import RunStore
from tests.storage.helpers import NOON, OWNER, make_search_round, make_training_step

RESPONSES_PER_PROMPT = 16
NUM_PROMPTS = 5000
PROMPT_TOKENS = 40
SLOTS = 128  # of a batch
EVALUATIONS = 6
CONFIG = {"run": "generated", "model": "generated-text", "seed": 0, "search": {"samples_per_prompt": 16}}

_WORDS = re.findall(
    r"\w+",
    "first then so add subtract double half each pays gives takes keeps apples clips friends hours miles boxes total "
    "left more fewer twice three four seven twelve dozen week day costs dollars sells buys answer is therefore because",
)


def generate_run(
    store: RunStore,
    num_trajectories: int,
    *,
    rows_per_shard: int = 1024,
    num_searchers: int = 2,
    num_response_tokens: int = 48,
    num_steps: int | None = None,
    seed: int = 0,
) -> None:
    """Writes a run of `num_trajectories` (a multiple of rows_per_shard), a training step a shard where not said."""
    random = np.random.default_rng(seed)
    num_shards = num_trajectories // rows_per_shard
    steps = num_steps or num_shards
    store.create_run(CONFIG | {"run": store.run})
    attempts.start_attempt(store, resumed_from=0, owner=OWNER)
    _publish(store, steps)
    sentences = [" ".join(random.choice(_WORDS, 7)) for _ in range(400)]
    ids: list[str] = []
    rewards, spoken = [], []
    done = 0
    for number in range(num_shards):
        searcher, round_number = f"s{number % num_searchers}", number // num_searchers
        shard = _shard(random, searcher, round_number, rows_per_shard, num_response_tokens, done, steps, sentences)
        commit_shard(store, shard)
        began = NOON + timedelta(seconds=6 * number)
        ledger.record_search_round(
            store,
            make_search_round(searcher, round_number)
            | {
                "policy_step": done,
                "started_at": began,
                "sampling_started_at": began + timedelta(seconds=0.3),
                "sampling_ended_at": began + timedelta(seconds=8),
                "ended_at": began + timedelta(seconds=10.5),
                "num_trajectories": rows_per_shard,
                "num_response_tokens": rows_per_shard * num_response_tokens,
                "reward_mean": float(np.mean(shard["reward"])),
            },
        )
        ledger.record_sync(store, _sync(number + 1, done + 1, searcher, round_number, rows_per_shard))
        ids += shard["trajectory_id"].to_pylist()
        rewards += shard["reward"].to_pylist()
        spoken += [done] * rows_per_shard
        while done < steps and done < steps * (number + 1) // num_shards:
            done += 1
            _train(store, random, done, steps, number, ids, rewards, spoken, num_response_tokens, began)
    for step in sorted(set(np.linspace(0, steps, EVALUATIONS, dtype=int).tolist())):
        row = {
            "attempt": 1,
            "policy_step": step,
            "split": "heldout",
            "num_problems": 256,
            "accuracy": _skill(step, steps),
        }
        ledger.record_evaluation(store, row | {"mean_response_tokens": 40.0, "seconds": 2.0, "created_at": NOON})


def _skill(step: int, steps: int) -> float:
    return 0.25 + 0.55 * step / steps


def _shard(random, searcher, round_number, num_rows, length, step, steps, sentences) -> pa.Table:
    rows = np.arange(num_rows)
    prompts = np.repeat(random.permutation(NUM_PROMPTS)[: num_rows // RESPONSES_PER_PROMPT], RESPONSES_PER_PROMPT)
    reward = (random.random(num_rows) < _skill(step, steps)).astype(np.float32)
    known = max(20, int(len(sentences) * (1 - 0.8 * step / steps)))  # a trained policy says fewer different things
    chosen = random.integers(0, known, (num_rows, 4))
    answers = np.where(reward > 0, prompts % 90, random.integers(0, 90, num_rows))
    reference = -random.exponential(1.0, (num_rows, length)).astype(np.float32)
    columns = {
        "trajectory_id": [trajectory_id(searcher, round_number, row) for row in rows],
        "prompt_id": [f"generated-{prompt:05d}" for prompt in prompts],
        "prompt": [f"Problem {prompt}: what is {prompt % 90} + 0?" for prompt in prompts],
        "response": [
            f"{'. '.join(sentences[place] for place in places)}. So {answer}"
            for places, answer in zip(chosen.tolist(), answers.tolist(), strict=True)
        ],
        "prompt_tokens": _lists(np.tile(rows[:, None].astype(np.int32) % 1000, PROMPT_TOKENS)),
        "response_tokens": _lists(random.integers(0, 49152, (num_rows, length), dtype=np.int32)),
        "behavior_logprobs": _lists((reference * (1 - 0.6 * step / steps)).astype(np.float32)),
        "reference_logprobs": _lists(reference),
        "reward": reward,
        "rewards": [[("correct", value)] for value in reward.tolist()],
    }
    constants = {
        "finish_reason": "stop",
        "policy_step": step,
        "policy_fingerprint": _fingerprint(step),
        "last_policy_step": step,
        "last_policy_fingerprint": _fingerprint(step),
        "searcher": searcher,
        "round": round_number,
        "temperature": 1.0,
        "top_p": 1.0,
        "system_prompt": "",
        "reward_version": "1",
        "code_version": "generated",
        "schema_version": SCHEMA_VERSION,
        "created_at": NOON,
    }
    return pa.table(columns | {name: [value] * num_rows for name, value in constants.items()}, TRAJECTORY)


def _lists(values: np.ndarray) -> pa.ListArray:
    """values: [rows, length]."""
    ends = np.arange(values.shape[0] + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(ends, pa.array(values.ravel()))


def _sync(number, step, searcher, round_number, num_trajectories):
    return Sync(number, step, 1, {searcher: [round_number]}, Fresh(num_trajectories))


def _train(store, random, step, steps, num_syncs, ids, rewards, spoken, num_response_tokens, began) -> None:
    recent = random.random(SLOTS) < 0.7
    newest = len(ids) - 1 - random.integers(0, min(SLOTS, len(ids)), SLOTS)
    places = np.where(recent, newest, (len(ids) * random.random(SLOTS)).astype(int)).tolist()
    policy_steps = [spoken[place] for place in places]
    drawn = [rewards[place] for place in places]
    columns = {
        "sync": [num_syncs + 1] * SLOTS,
        "prompt_index": [slot // 8 for slot in range(SLOTS)],
        "slot": [slot % 8 for slot in range(SLOTS)],
        "trajectory_id": [ids[place] for place in places],
        "prompt_id": ["generated"] * SLOTS,
        "recent": recent.tolist(),
        "draw_probability": [0.1] * SLOTS,
        "reward": drawn,
        "policy_step": policy_steps,
        "ages_from": policy_steps,
    }
    ledger.record_batch(store, 1, step, pa.table(columns))
    began += timedelta(seconds=2)
    row = make_training_step(1, step) | {
        "started_at": began,
        "ended_at": began + timedelta(seconds=2),
        "wait_s": 0.4,
        "reward_mean": float(np.mean(drawn)),
        "fresh_reward_mean": _skill(step, steps) + 0.04 * random.standard_normal(),
        "loss": 0.4 * 0.5 ** (3 * step / steps) + 0.02 * random.random(),
        "logprob_gap_mean": 0.6 * num_response_tokens * step / steps + random.standard_normal(),
        "num_response_tokens": SLOTS * num_response_tokens,
        "num_trajectories": len(ids),
    }
    ledger.record_training_step(store, row)


def _fingerprint(step: int) -> str:
    return f"{step:032x}"


def _publish(store: RunStore, steps: int) -> None:
    """Manifests of policies whose weights are pruned, but for the last, which has none to begin with."""
    for step in range(steps + 1):
        folder = f"policies/step={step:08d}"
        manifest = {"step": step, "fingerprint": _fingerprint(step), "attempt": 1, "files": {}, "pruned": step < steps}
        store.put_new(f"{folder}/{policies.MANIFEST}", json.dumps(manifest).encode())
    final = policies.PolicyRef(steps, folder, _fingerprint(steps), True, 1, NOON.isoformat())
    store.put(policies.LATEST, json.dumps(asdict(final)).encode())
    kept_policies.keep_if_best(store, final, _skill(steps, steps), 256)
