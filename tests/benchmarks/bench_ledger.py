"""What does a question over a long run's training steps cost on a remote S3? `make bench-ledger`: one JSON object.

A run of 100,000 training steps (STEPS=… chooses): upkeep has compacted its ledger, and deleted what that replaced.
S3 is Ceph's radosgw behind the proxy of bench_scale.py: each answer takes 30 ms longer. Files are written and compacted
in a local folder, from blocks of 64 steps as upkeep leaves them day by day, and what is left is copied to S3.

    files            of the training ledger, after compaction
    mean_s           `SELECT avg(reward_mean) FROM training_steps`, median of 5
    scattered_s      the same for a run of 1,000 steps, one file each: before compaction, median of 3
    compact_s        upkeep's compaction, in the local folder
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from infra.local_s3 import LocalS3
from storage import attempts, ledger, ledger_files, queries
from storage.ledger_files import compacted_path
from storage.ledger_upkeep import compact_ledger, delete_compacted
from storage.schema import TRAINING_STEP, to_table
from storage.shards import parquet_bytes
from storage.store import RunStore, transfer_all
from tests.benchmarks.bench_scale import Latency
from tests.storage.helpers import OWNER, make_training_step

STEPS = int(os.environ.get("STEPS", "100000"))
SCATTERED = 1_000
MEAN = "SELECT count(*) AS steps, avg(reward_mean) AS mean FROM training_steps"


def timed_s(action: Callable[[], object], times: int = 1) -> float:
    """Median seconds."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def ask(store: RunStore, steps: int) -> None:
    (row,) = queries.query(store, MEAN).to_pylist()
    if row["steps"] != steps:
        raise RuntimeError(f"{row} instead of {steps} steps")


def make_local(folder: Path) -> tuple[RunStore, float]:
    """The compacted run, and the seconds of its compaction."""
    store = RunStore(folder.as_uri(), "long")
    attempts.start_attempt(store, resumed_from=0, owner=OWNER)
    width = ledger_files.WIDTHS[0]
    for first in range(0, STEPS + 1, width):
        steps = range(max(first, 1), min(first + width, STEPS + 1))
        rows = [make_training_step(1, step) | {"reward_mean": step / STEPS} for step in steps]
        if first + 2 * width <= STEPS:
            path = compacted_path("metrics/training", "attempt=00000001", range(first, first + width))
            store.put_new(path, parquet_bytes(to_table(rows, TRAINING_STEP)))
        else:
            for row in rows:
                ledger.record_training_step(store, row)
    compact_s = timed_s(lambda: compact_ledger(store))
    delete_compacted(store, timedelta(0))
    return store, compact_s


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-ledger-") as folder:
        local, compact_s = make_local(Path(folder) / "local")
        server = LocalS3(Path(folder) / "s3")
        environment = server.start()
        try:
            os.environ |= environment
            direct = RunStore(environment["S3_URL"], "long")
            transfer_all(lambda path: direct.put(path, local.get(path)), local.list(""))
            scattered = RunStore(environment["S3_URL"], "scattered")
            attempts.start_attempt(scattered, resumed_from=0, owner=OWNER)
            steps = range(1, SCATTERED + 1)
            transfer_all(lambda step: ledger.record_training_step(scattered, make_training_step(1, step)), steps)
            proxy = Latency(environment["AWS_ENDPOINT_URL"], Path(folder) / "requests")
            os.environ["AWS_ENDPOINT_URL"] = proxy.url
            far, far_scattered = (RunStore(environment["S3_URL"], run) for run in ("long", "scattered"))
            figures = {
                "steps": STEPS,
                "files": len(far.list("metrics/training")),
                "mean_s": timed_s(lambda: ask(far, STEPS), 5),
                "scattered_s": timed_s(lambda: ask(far_scattered, SCATTERED), 3),
                "compact_s": compact_s,
            }
            print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
