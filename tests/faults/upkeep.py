"""Upkeep of a soak's run: `python -m tests.faults.upkeep STORE RUN`.

Compacts small shards every `PAUSE_S`, as the flow `maintain` does on a schedule, until SIGTERM. Shards stay beside
their compacted files.
"""

import logging
import signal
import sys
import threading

from storage import upkeep
from storage.store import RunStore

PAUSE_S = 20.0


def main(store: str, run: str) -> None:
    run_store, over = RunStore(store, run), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    while not over.wait(PAUSE_S):
        logging.info("%d blocks compacted", upkeep.compact(run_store))


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    main(*sys.argv[1:])
