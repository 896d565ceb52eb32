"""Small runs for the tests of the replay buffer: a store, shards of chosen responses, a buffer."""

from pathlib import Path

from storage import attempts
from storage.buffer import ReplayBuffer
from storage.mop import SamplingSettings
from storage.schema import TRAJECTORY, to_table
from storage.shards import commit_shard
from storage.store import RunStore
from tests.storage.helpers import OWNER, make_shard

SEED = 7


def new_store(folder: Path) -> RunStore:
    """A run whose Trainer has begun its first attempt."""
    store = RunStore(f"file://{folder}", "run")
    attempts.start_attempt(store, resumed_from=0, owner=OWNER)
    return store


def commit(store: RunStore, searcher: str, round_number: int, responses: list[tuple], policy_step: int = 0) -> None:
    """One shard of (prompt_id, response_tokens, reward); prompt tokens and log-probabilities are made from these."""
    rows = [
        row
        | {
            "prompt_id": prompt_id,
            "prompt_tokens": list(prompt_id.encode()),
            "response_tokens": tokens,
            "behavior_logprobs": [-token / 8 for token in tokens],
            "reference_logprobs": [-token / 4 for token in tokens],
            "reward": reward,
            "policy_step": policy_step,
        }
        for row, (prompt_id, tokens, reward) in zip(
            make_shard(searcher, round_number, len(responses)).to_pylist(), responses, strict=True
        )
    ]
    commit_shard(store, to_table(rows, TRAJECTORY))


def distinct(prompt_ids: str, number: int, start: int = 0) -> list[tuple]:
    """`number` different responses to each of the prompts named by a letter; rewards go 0, 0.25, 0.5, 0.75, 0 ..."""
    return [(name, [start + i, 1], i % 4 / 4) for name in prompt_ids for i in range(number)]


def new_buffer(store: RunStore, **sampling) -> ReplayBuffer:
    return ReplayBuffer(store, SamplingSettings(**{"min_size": 1} | sampling), SEED)
