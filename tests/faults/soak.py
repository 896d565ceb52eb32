"""The soak: the real loop under a seeded schedule of faults, and the account of it.

    make soak HOURS=1 SEED=1        on radosgw; prints a table and a line of JSON, exit status 1 on a fault
    make soak HOURS=0.02 STORE=moto SEED=1          what CI runs
    python -m tests.faults.soak --kinds 429 500     some kinds only

The Trainer is the process that a flow starts (`flows.trainer`), a Searcher is the flow `search` in a process without
Prefect (tests/faults/searcher.py), with a model so small that a step takes milliseconds. Upkeep compacts shards beside
them (tests/faults/upkeep.py). All see the store through tests/faults/s3_proxy.py only. A part that is killed, or ends
by itself, is started again, as the flow does. The harness itself writes and reads behind the proxy.
tests/faults/schedule.py has the faults and their times.

At the end: every acknowledged trajectory is stored once, every draw in the ledger is of valid rows, no attempt resumed
before its newest checkpoint, no pause between steps or after a kill was longer than STALL_LIMIT_S, and `tba verify`
names each file that another writer put in spoiled, and nothing else. `longest_stall_across_kills_s` is the longest
pause where a kill does not begin a new one; it has no limit.
"""

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from infra.local_s3 import LocalS3
from tests.faults.faulted_run import FaultedRun
from tests.faults.schedule import KINDS, Event, schedule
from tests.moto_server import moto_server


@contextlib.contextmanager
def store_of(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """The environment variables that reach a new S3."""
    if kind == "radosgw":
        gateway = LocalS3(folder / "s3")
        try:
            yield gateway.start()
        finally:
            gateway.stop()
        return
    with moto_server() as environment:
        yield environment


def report(run: FaultedRun, events: list[Event]) -> None:
    planned, done, hits = Counter(event.kind for event in events), run.events_done(), run.hits()
    print(f"{'kind':32} {'scheduled':>9} {'injected':>9} {'requests hit':>13}")
    for kind in KINDS:
        if planned[kind]:
            print(f"{kind:32} {planned[kind]:9} {done[kind]:9} {hits[kind] or '':>13}")
    for said, times in Counter((row["part"], row["said"]) for row in run.ended).most_common():
        print(f"{said[0]} ended by itself {times} times: {said[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=["moto", "radosgw"], default="radosgw")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--folder", type=Path, help="for logs; default: a temporary one, removed unless there is a fault"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seconds, folder = arguments.hours * 3600, arguments.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(exist_ok=True)
    events = schedule(arguments.seed, seconds, tuple(arguments.kinds))
    with store_of(arguments.store, folder) as environment:
        run = FaultedRun(folder, environment)
        faults = []
        try:
            try:
                run.run(events, seconds)
            except TimeoutError as error:
                faults.append(str(error))
            ended_at = time.time()
            faults += run.stop()
            found = run.account(ended_at)
        finally:
            run.close()
    done = run.events_done()
    found["faults"] = faults + found["faults"]
    report(run, events)
    print("\n".join(found["faults"]) or "nothing is wrong")
    said = {"seed": arguments.seed, "hours": arguments.hours, "injected": done.total(), "kinds": len(+done)}
    print(json.dumps(said | found | {"faults": len(found["faults"])}))
    if not found["faults"] and not arguments.folder:
        shutil.rmtree(folder)
    sys.exit(bool(found["faults"]))


if __name__ == "__main__":
    main()
