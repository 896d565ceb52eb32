"""How much longer does the default run take on S3 than in a folder? `make bench-store`: both in turns, by seed.

    SEEDS=0,1,2 make bench-store

Each run is `tba train` with its defaults. The S3 is infra/local_s3.py, Ceph's radosgw on the same processors; it is
started before each run on it and stopped afterwards, so that a run in a folder has nothing beside it. A line as each
run ends, then one JSON object with means over seeds and half the widths of their 95 % confidence intervals (Student's
t):

    wall_ratio           wall time on S3, divided by that of the same seed in a folder; by seed in wall_ratios
    accuracy             greedy, held-out, of the final policy, by store
    publish_stall_share  of the time of training steps: the Trainer hands over a policy; the largest of all runs
"""

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from flows.compare.results import confidence_interval
from infra.local_s3 import LocalS3
from tests.benchmarks.bench_stability import integers
from tests.benchmarks.default_run import default_run


@contextlib.contextmanager
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="bench-run-") as path:
        yield Path(path).as_uri()


@contextlib.contextmanager
def s3() -> Iterator[str]:
    """Its address and keys are in the environment until it is stopped."""
    with tempfile.TemporaryDirectory(prefix="bench-s3-") as path:
        server, before = LocalS3(Path(path)), dict(os.environ)
        try:
            os.environ |= server.start()
            yield os.environ["S3_URL"]
        finally:
            server.stop()
            os.environ.clear()
            os.environ |= before


STORES = {"folder": folder, "s3": s3}


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the run that is on, as Ctrl-C does
    seeds, runs = integers("SEEDS", "0,1,2"), []
    for seed, (kind, of_kind) in product(seeds, STORES.items()):
        with of_kind() as url, default_run(seed, url=url) as store:
            summary = json.loads(store.get("summary.json"))
        kept = {name: summary[name] for name in ("accuracy_after", "wall_s", "publish_stall_share")}
        runs.append({"seed": seed, "store": kind} | kept)
        print(json.dumps(runs[-1]), flush=True)
    print(json.dumps(compared(runs)))


def compared(runs: list[dict]) -> dict:
    """runs: of each seed one in each kind of store, in the order of the seeds."""
    wall = {kind: [run["wall_s"] for run in runs if run["store"] == kind] for kind in STORES}
    ratios = [on_s3 / in_folder for in_folder, on_s3 in zip(wall["folder"], wall["s3"], strict=True)]
    accuracy = {kind: [run["accuracy_after"] for run in runs if run["store"] == kind] for kind in STORES}
    return {
        "wall_ratio": str(confidence_interval(ratios)),
        "wall_ratios": ratios,
        "accuracy": {kind: str(confidence_interval(values)) for kind, values in accuracy.items()},
        "publish_stall_share": max(run["publish_stall_share"] for run in runs),
    }


if __name__ == "__main__":
    main()
