"""Prints a line for each change of a run that the store shows: time, the Trainer's host, attempt, state and step, the
rounds of each Searcher, and leases that a process renewed after it had lost the name.

python -m tests.hosts.observer STORE RUN        # until it is killed
"""

import json
import sys
import time

from storage import leases
from storage.attempts import read_heartbeat
from storage.errors import StoreError
from storage.shards import next_round
from storage.store import RunStore

LOOK_S = 0.25
SEARCHERS = ["s0", "s1"]


def main(store_url: str, run: str) -> None:
    store, last, lost = RunStore(store_url, run), None, {}
    while True:
        try:
            beat = read_heartbeat(store)
            rounds = {name: next_round(store, name) for name in SEARCHERS}
            twice = [path for name in SEARCHERS for path in renewed_by_two(store, name, lost)]
        except StoreError:
            beat = None
        if beat is not None and (beat, rounds, twice) != last:
            last = beat, rounds, twice
            seen = {key: beat.get(key) for key in ("attempt", "state", "step")} | {"rounds": rounds, "twice": twice}
            print(json.dumps({"time": time.time(), "host": (beat.get("owner") or {}).get("host")} | seen), flush=True)
        time.sleep(LOOK_S)


def renewed_by_two(store: RunStore, name: str, lost: dict[str, str]) -> list[str]:
    """The leases of a name that were renewed although there is a later one. lost: their last renewals, by path."""
    newest = leases.newest(store, name)
    superseded = [leases.read(store, name, number) for number in range(1, newest.number if newest else 1)]
    held = [lease for lease in superseded if not lease.is_released]  # giving a name back is no renewal
    return [lease.path for lease in held if lost.setdefault(lease.path, lease.renewed_at) != lease.renewed_at]


if __name__ == "__main__":
    main(*sys.argv[1:])
