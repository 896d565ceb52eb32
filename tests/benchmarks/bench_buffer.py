"""How fast is the replay buffer, beside one of Python dictionaries? `make bench-buffer`: a table, then one JSON object.

Shards of 1000 trajectories: 50 prompts x 20 responses of 128 tokens, prompts of 40. Every prompt is at its capacity of
100, so each sync also evicts. A draw is 7 prompts x 20 with tokens and log-probabilities. Times are p50 of 30. Both
sides read the same shards in the same way, each in a process of its own, where its resident memory is measured. Where
wall time exceeds processor time (`_cpu_`) in a draw, other programs had the machine.

`SIZE=10m make bench-buffer` measures ten million trajectories, of 32 tokens because of the disk, and `tba verify` of
them; Python's dictionaries would not fit into memory. It takes 16 GB of the folder for temporary files.

write_per_s_s3 is on Ceph's radosgw, which is started for it (infra/local_s3.py); null where it cannot be installed.
Both rates are of one writer, one shard after the other, as a Searcher commits. The benchmark's store takes 4 GB of the
folder for temporary files (TMPDIR).
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa

from infra.local_s3 import LocalS3, LocalS3Error
from storage import attempts, ledger
from storage.buffer import ReplayBuffer
from storage.fresh import Fresh
from storage.ledger import Sync
from storage.mop import SamplingSettings
from storage.schema import SCHEMA_VERSION, TRAJECTORY
from storage.shards import commit_shard, trajectory_id
from storage.store import RunStore
from storage.verify import verify
from tests.benchmarks.memory_buffer import MemoryBuffer
from tests.storage.helpers import OWNER

SHARD_ROWS, RESPONSES_PER_PROMPT, PROMPT_TOKENS, CAPACITY = 1000, 20, 40, 100
SIZES = {"10k": 10_000, "1m": 1_000_000}
LARGEST = ("10m", 10_000_000)
RESPONSE_TOKENS = 32 if os.environ.get("SIZE") == LARGEST[0] else 128
SAMPLING = SamplingSettings(
    prompts_per_batch=7,
    responses_per_prompt=20,
    recent_probability=0.75,
    reward_temperature=1.0,
    capacity_per_prompt=CAPACITY,
)
REPEATS = 30
TEXT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. " * 12


def make_shard(searcher: str, round_number: int, num_prompts: int) -> pa.Table:
    """A shard of random tokens for the next 50 of `num_prompts` prompts."""
    random = np.random.default_rng([round_number, num_prompts, *searcher.encode()])
    rows = np.arange(SHARD_ROWS)
    prompts = (round_number * SHARD_ROWS // RESPONSES_PER_PROMPT + rows // RESPONSES_PER_PROMPT) % num_prompts

    def lists(values: np.ndarray) -> pa.ListArray:  # [rows, length]
        ends = np.arange(SHARD_ROWS + 1, dtype=np.int32) * values.shape[1]
        return pa.ListArray.from_arrays(ends, pa.array(values.ravel()))

    rewards = random.integers(0, 2, SHARD_ROWS).astype(np.float32)
    columns = {
        "trajectory_id": [trajectory_id(searcher, round_number, row) for row in rows],
        "prompt_id": [f"gsm8k-train-{prompt:06d}" for prompt in prompts],
        "prompt": [TEXT[: 4 * PROMPT_TOKENS]] * SHARD_ROWS,
        "response": [TEXT[start : start + 4 * RESPONSE_TOKENS] for start in random.integers(0, 400, SHARD_ROWS)],
        "prompt_tokens": lists(np.tile(prompts[:, None].astype(np.int32), PROMPT_TOKENS)),
        "response_tokens": lists(random.integers(0, 49152, (SHARD_ROWS, RESPONSE_TOKENS), dtype=np.int32)),
        "behavior_logprobs": lists(-random.exponential(size=(SHARD_ROWS, RESPONSE_TOKENS)).astype(np.float32)),
        "reference_logprobs": lists(-random.exponential(size=(SHARD_ROWS, RESPONSE_TOKENS)).astype(np.float32)),
        "reward": rewards,
        "rewards": [[("correct", reward)] for reward in rewards.tolist()],
    }
    constants = {
        "finish_reason": "stop",
        "policy_step": round_number,
        "policy_fingerprint": "0" * 16,
        "last_policy_step": round_number,
        "last_policy_fingerprint": "0" * 16,
        "searcher": searcher,
        "round": round_number,
        "temperature": 1.0,
        "top_p": 1.0,
        "system_prompt": "",
        "reward_version": "1",
        "code_version": "0" * 40,
        "schema_version": SCHEMA_VERSION,
        "created_at": datetime.now(UTC),
    }
    return pa.table(columns | {name: [value] * SHARD_ROWS for name, value in constants.items()}, TRAJECTORY)


def make_run(store: RunStore, num_rows: int) -> None:
    """A run of `num_rows` trajectories, one sync a shard, every prompt at capacity."""
    attempts.start_attempt(store, resumed_from=0, owner=OWNER)
    rounds = range(num_rows // SHARD_ROWS)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_commit, store.url, store.run, num_rows // CAPACITY), rounds, chunksize=64))
    for number in rounds:
        ledger.record_sync(store, Sync(number + 1, number + 1, 1, {"s0": [number]}, Fresh(SHARD_ROWS)))


def _commit(url: str, run: str, num_prompts: int, round_number: int) -> None:
    commit_shard(RunStore(url, run), make_shard("s0", round_number, num_prompts))


def write_per_s(store: RunStore) -> float:
    """Trajectories committed a second, by one writer."""
    shards = [make_shard("writer", round_number, 10_000) for round_number in range(REPEATS)]
    start = time.perf_counter()
    paths = [commit_shard(store, shard) for shard in shards]
    rate = REPEATS * SHARD_ROWS / (time.perf_counter() - start)
    for path in paths:
        store.delete(path)
    return rate


def write_per_s_s3(folder: Path) -> float | None:
    """The same on radosgw; None where there is none."""
    server = LocalS3(folder)
    try:
        environment = server.start()
        os.environ.update(environment)
        return write_per_s(RunStore(environment["S3_URL"], "writes"))
    except LocalS3Error as error:
        print(f"write_per_s_s3 is not measured: {error}", file=sys.stderr)
        return None
    finally:
        server.stop()


def timed_ms(action: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor time of one call."""
    start, cpu_start = time.perf_counter(), time.process_time()
    action()
    return 1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - cpu_start)


def measure(side: str, url: str, size: str) -> dict[str, float]:
    """Load a run into one side's buffer, then sync and draw. Runs in a process of its own."""
    store, num_rows = RunStore(url, size), dict([*SIZES.items(), LARGEST])[size]
    num_syncs = num_rows // SHARD_ROWS
    if side == "ours":
        buffer = ReplayBuffer(store, SAMPLING, seed=0)
        load_ms, _ = timed_ms(lambda: buffer.rebuild(num_syncs))
    else:
        buffer = MemoryBuffer(store, SAMPLING, seed=0)
        load_ms, _ = timed_ms(buffer.sync)
    assert buffer.num_trajectories == num_rows
    os.sync()  # the first syncs must not wait for what loading wrote
    sync_ms, draw_ms = [], []  # [(wall, processor)]
    for repeat in range(REPEATS):
        commit_shard(store, make_shard("s0", num_syncs + repeat, num_rows // CAPACITY))
        step = num_syncs + repeat + 1
        if side == "ours":
            sync_ms.append(timed_ms(lambda: buffer.sync(step, attempt=1)))  # noqa: B023, called at once
            draw_ms.append(timed_ms(lambda: buffer.draw(step)))  # noqa: B023
        else:
            sync_ms.append(timed_ms(buffer.sync))
            draw_ms.append(timed_ms(buffer.draw))
    assert buffer.num_trajectories == num_rows
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rebuild_s": load_ms / 1e3,
        "sync_1000_ms": statistics.median(wall for wall, _ in sync_ms),
        "sync_1000_cpu_ms": statistics.median(cpu for _, cpu in sync_ms),
        "draw_ms": statistics.median(wall for wall, _ in draw_ms),
        "draw_cpu_ms": statistics.median(cpu for _, cpu in draw_ms),
        "rss_mb": resident_pages * resource.getpagesize() / 1e6,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def measure_verify(url: str, run: str) -> dict[str, float]:
    """`tba verify` without the policies, of which there are none."""
    verify_ms, _ = timed_ms(lambda: print(len(verify(RunStore(url, run), fingerprint=str).faults), "faults"))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"verify_s": verify_ms / 1e3, "verify_peak_rss_mb": peak_mb}


def in_process(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_buffer", *arguments]
    child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(child.stdout.splitlines()[-1])


def measure_largest() -> None:
    size, num_rows = LARGEST
    with tempfile.TemporaryDirectory(prefix="bench-buffer-") as folder:
        store = RunStore(f"file://{folder}", size)
        store.create_run({})
        make_run(store, num_rows)
        results = in_process("verify", store.url, size) | in_process("ours", store.url, size)
    print(json.dumps({f"{name}_at_{size}": round(value, 2) for name, value in results.items()}))


def main() -> None:
    results: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="bench-buffer-") as folder:
        results["write_per_s_local"] = write_per_s(RunStore(f"file://{folder}", "writes"))
        results["write_per_s_s3"] = write_per_s_s3(Path(folder) / "s3")
        for size, num_rows in SIZES.items():
            make_run(RunStore(f"file://{folder}/made", size), num_rows)
            for side, prefix in (("ours", ""), ("memory", "memory_baseline_")):
                # what one side commits, the other must not find: each its own folder, of hard links
                shutil.copytree(f"{folder}/made/{size}", f"{folder}/{side}/{size}", copy_function=os.link)
                for name, value in in_process(side, f"file://{folder}/{side}", size).items():
                    results[f"{prefix}{name}_at_{size}"] = value
    results = {name: value if value is None else round(value, 2) for name, value in results.items()}
    print(f"{'':24}{'10k ours':>12}{'10k memory':>12}{'1m ours':>12}{'1m memory':>12}")
    for name in ("rebuild_s", "sync_1000_ms", "sync_1000_cpu_ms", "draw_ms", "draw_cpu_ms", "rss_mb", "peak_rss_mb"):
        row = [results[f"{prefix}{name}_at_{size}"] for size in SIZES for prefix in ("", "memory_baseline_")]
        print(f"{name:24}" + "".join(f"{value:12.2f}" for value in row))
    for name in ("write_per_s_local", "write_per_s_s3"):
        print(f"{name:24}{results[name] or '-':>12}")
    print(json.dumps(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["verify"]:
        print(json.dumps(measure_verify(*sys.argv[2:])))
    elif len(sys.argv) == 4:
        print(json.dumps(measure(*sys.argv[1:])))
    elif os.environ.get("SIZE") == LARGEST[0]:
        measure_largest()
    else:
        main()
