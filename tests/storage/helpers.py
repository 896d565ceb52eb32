"""Valid stored things for tests to begin from, and processes to race or kill."""

import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from storage.process_identity import Identity
from storage.schema import SCHEMA_VERSION, TRAJECTORY, to_table
from storage.shards import trajectory_id
from storage.store import RunStore

PROJECT = Path(__file__).parents[2]
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
OWNER = Identity(pid=1, started=0.0, host="elsewhere")  # a process of another machine


def make_shard(searcher: str = "s0", round_number: int = 0, num_rows: int = 4, **columns) -> pa.Table:
    """A valid shard. columns: values that every row has instead of the usual ones."""
    return to_table(
        [
            {
                "trajectory_id": trajectory_id(searcher, round_number, index),
                "prompt_id": f"p{index % 2}",
                "prompt": "1 + 1 =",
                "response": f" {index}\n",
                "prompt_tokens": [1, 2, 3],
                "response_tokens": [4 + index, 2],
                "behavior_logprobs": [-0.5, -0.25],
                "reference_logprobs": [-1.0, 0.0],
                "reward": float(index % 2),
                "rewards": {"exact": float(index % 2)},
                "finish_reason": "stop",
                "policy_step": round_number,
                "policy_fingerprint": "f" * 32,
                "last_policy_step": columns.get("policy_step", round_number),
                "last_policy_fingerprint": columns.get("policy_fingerprint", "f" * 32),
                "searcher": searcher,
                "round": round_number,
                "temperature": 1.0,
                "top_p": 1.0,
                "system_prompt": "",
                "reward_version": "1",
                "code_version": "test",
                "schema_version": SCHEMA_VERSION,
                "created_at": NOON,
            }
            | columns
            for index in range(num_rows)
        ],
        TRAJECTORY,
    )


def start_python(code: str, *arguments: str) -> subprocess.Popen:
    """A process that runs `code` from the project's folder; its standard input and output are pipes."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def make_batch(policy_steps: list[int], sync: int = 1) -> pa.Table:
    """What ReplayBuffer.draw returns: one prompt, a slot for each given policy step."""
    num_rows = len(policy_steps)
    return pa.table(
        {
            "prompt_index": pa.array([0] * num_rows, pa.int32()),
            "slot": pa.array(range(num_rows), pa.int32()),
            "trajectory_id": [trajectory_id("s0", 0, index) for index in range(num_rows)],
            "prompt_id": ["p0"] * num_rows,
            "recent": [True] * num_rows,
            "draw_probability": [1 / num_rows] * num_rows,
            "reward": pa.array([1.0] * num_rows, pa.float32()),
            "policy_step": policy_steps,
            "ages_from": policy_steps,
            "sync": [sync] * num_rows,
            "prompt_tokens": [[1, 2, 3]] * num_rows,
            "response_tokens": [[4, 2]] * num_rows,
            "behavior_logprobs": [[-0.5, -0.25]] * num_rows,
            "reference_logprobs": [[-1.0, 0.0]] * num_rows,
        }
    )


def make_training_step(attempt: int, step: int) -> dict:
    """A row of the training ledger."""
    return {
        "attempt": attempt,
        "step": step,
        "started_at": NOON,
        "ended_at": NOON,
        "wait_s": 0.0,
        "step_s": 2.0,
        "publish_stall_s": 0.0,
        "loss": 0.5,
        "reward_mean": 0.25,
        "fresh_reward_mean": 0.25,
        "fresh_kl": 0.5,
        "fresh_entropy": 0.25,
        "fresh_cut_share": 0.0,
        "fresh_staleness": 1.0,
        "reward_recent_mean": None,
        "log_z_mean": 0.0,
        "residual_abs_mean": 1.0,
        "logprob_gap_mean": 0.0,
        "effective_sample_size": 0.75,
        "tapered_share": 0.125,
        "logprob_mismatch": 0.01,
        "gradient_norm": 1.0,
        "learning_rate": 1e-5,
        "beta": 0.5,
        "staleness_mean": 1.0,
        "staleness_max": 2,
        "num_trajectories": 100,
        "num_prompts": 10,
        "num_inserted": 100,
        "samples_per_insert": 0.5,
        "num_too_old": 0,
        "searchers_silent_s": 0.0,
        "num_response_tokens": 32,
        "num_unique": 16,
        "skipped": False,
    }


def make_search_round(searcher: str, round_number: int) -> dict:
    """A row of the search ledger."""
    return {
        "searcher": searcher,
        "round": round_number,
        "policy_step": 0,
        "started_at": NOON,
        "sampling_started_at": NOON,
        "sampling_ended_at": NOON,
        "ended_at": NOON,
        "num_trajectories": 4,
        "num_response_tokens": 8,
        "reward_mean": 0.5,
    }


@dataclass
class Sync:
    """What ledger.record_sync reads of ledger.Sync."""

    number: int
    step: int
    attempt: int
    rounds: dict[str, list[int]]
    num_trajectories: int = 8


def has_weights(store: RunStore, name: str) -> bool:
    return store.exists(f"policies/{name}/model.safetensors")
