"""A run in a store, as after a short training, for tests of commands that only read."""

import json
from dataclasses import asdict

from flows.config import RunConfig
from storage import attempts, ledger
from storage.shards import commit_shard
from storage.store import RunStore
from tests.storage.helpers import (
    NOON,
    OWNER,
    make_batch,
    make_search_round,
    make_shard,
    make_training_step,
)


def prepare_run(url: str, run: str = "arithmetic", *, steps: int = 3, finished: bool = False) -> RunStore:
    """The first steps of 80 were trained on two rounds of one Searcher, by a machine that is elsewhere."""
    store = RunStore(url, run)
    store.create_run(RunConfig(run=run, searchers=1, train={"steps": 80}).recorded())
    attempts.start_attempt(store, resumed_from=0, owner=OWNER)
    for number in range(2):
        commit_shard(store, make_shard("s0", number))
        ledger.record_search_round(store, make_search_round("s0", number))
    for step in range(1, steps + 1):
        ledger.record_batch(store, 1, step, make_batch([0, 0, 0, 0]))
        ledger.record_training_step(store, make_training_step(1, step))
    evaluation = {
        "attempt": 1,
        "policy_step": 0,
        "split": "heldout",
        "num_problems": 8,
        "accuracy": 0.25,
        "created_at": NOON,
    }
    ledger.record_evaluation(store, evaluation | {"mean_response_tokens": 4.0, "seconds": 2.0})
    attempts.write_heartbeat(store, heartbeat(steps))
    if finished:
        store.put("summary.json", json.dumps({"run": run, "steps": 80, "trajectories": 640}).encode())
    return store


def heartbeat(step: int, **more) -> dict:
    """The Trainer's sign of life after a step."""
    return {
        "state": "training", "step": step, "steps": 80, "message": "", "attempt": 1, "at": f"{NOON.isoformat()}",
        "owner": asdict(OWNER), "reward_mean": 0.5 + step / 1000, "fresh_reward_mean": 0.25, "num_trajectories": 12_345,
        "num_prompts": 678, "num_inserted": 8, "staleness_mean": 1.5, "seconds_left": 3661.0,
    } | more  # fmt: skip
