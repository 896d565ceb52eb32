"""Prints a line for each change of a run that the store shows: time, the Trainer's host, attempt, state and step, and
the rounds of each Searcher.

python -m tests.hosts.observer STORE RUN        # until it is killed
"""

import json
import sys
import time

from storage.attempts import read_heartbeat
from storage.errors import StoreError
from storage.shards import next_round
from storage.store import RunStore

LOOK_S = 0.25
SEARCHERS = ["s0", "s1"]


def main(store_url: str, run: str) -> None:
    store, last = RunStore(store_url, run), None
    while True:
        try:
            beat = read_heartbeat(store)
            rounds = {name: next_round(store, name) for name in SEARCHERS}
        except StoreError:
            beat = None
        if beat is not None and (beat, rounds) != last:
            last = beat, rounds
            seen = {key: beat.get(key) for key in ("attempt", "state", "step")} | {"rounds": rounds}
            print(json.dumps({"time": time.time(), "host": (beat.get("owner") or {}).get("host")} | seen), flush=True)
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
