"""What a soak injects, and when: a schedule that one number seeds. tests/faults/soak.py carries it out.

A fault of the store hits the next requests of its target, `times` of them; what it has not hit half a minute later, it
spares. tests/faults/s3_proxy.py does that. A fault of the machine or of another writer happens at its time.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

# Targets: requests by method and key inside the run. A listing is a GET of the bucket: its key is the listed folder,
# with ** behind it where files at any depth are listed.
TARGETS = {
    "listing": re.compile(r"LIST .*"),
    "checkpoint listing": re.compile(r"LIST trainer/"),
    "shard put": re.compile(r"PUT trajectories/.*"),
    "shard get": re.compile(r"GET trajectories/.*"),
    "ledger put": re.compile(r"PUT (batches|metrics|syncs)/.*"),
    "pointer put": re.compile(r"PUT policies/[a-z]+\.json"),
    "pointer get": re.compile(r"GET policies/[a-z]+\.json"),
    "policy put": re.compile(r"PUT policies/step=.*"),
    "checkpoint put": re.compile(r"PUT trainer/step=.*"),
    "checkpoint get": re.compile(r"GET trainer/step=.*"),
    "heartbeat put": re.compile(r"PUT trainer/heartbeat\.json"),
    "heartbeat get": re.compile(r"GET trainer/heartbeat\.json"),
    "look-up": re.compile(r"HEAD .*"),
    "deletion": re.compile(r"DELETE .*"),
}
_NEW = ("shard put", "ledger put")  # conditional: created only if absent
_PUTS = (*_NEW, "pointer put", "policy put", "checkpoint put", "heartbeat put")
# Without checkpoint gets: they come once a resume, and a fault that waits for one hits nothing for minutes.
_GETS = ("shard get", "pointer get", "heartbeat get")
_ALL = (*_PUTS, *_GETS, "listing", "look-up", "deletion")

STORE_FAULTS: dict[str, tuple[str, ...]] = {
    "delay": _ALL,
    "cut before the request": _ALL,
    "cut after the store did it": (*_PUTS, "listing", "deletion"),
    "body cut short": (*_GETS, "listing"),
    "500": _ALL,
    "503 SlowDown": _ALL,
    "429": _ALL,
    "409 conflict, nothing stored": _NEW,
    "412 after it was stored": _NEW,
    "412, and metadata dropped": _NEW,
    "duplicated request": (*_PUTS, "deletion"),
    "held back behind later ones": _ALL,
    "listing is HTML": ("listing",),
    "listing is empty": ("listing",),
    "listing lags behind a put": ("shard put",),
    "skewed clock": _ALL,
    "403 ExpiredToken": _ALL,
}
# The part that it befalls.
MACHINE_FAULTS: dict[str, tuple[str, ...]] = {
    "Trainer killed": ("trainer",),
    "Trainer killed, then a wrong listing": ("trainer",),
    "Searcher killed": ("s0", "s1"),
    "Trainer frozen": ("trainer",),
    "Searcher frozen": ("s0", "s1"),
    "temporary folder full": ("trainer",),
}
# Put into the bucket by another writer.
SPOILED_FILES = ("torn shard", "empty shard", "shard of another schema", "shard with a NaN reward", "foreign file")
KINDS = (*STORE_FAULTS, *MACHINE_FAULTS, *SPOILED_FILES)

STORE_GAP_S = 2.0  # mean time between faults of the store
MACHINE_GAP_S = 25.0
SPOILED_GAP_S = 120.0
_FIRST = {"machine": 10.0, "spoiled": 15.0}  # so that the subset of CI has some of each
_TIMES = (1, 1, 1, 1, 2, 3, 6, 12)  # 12: longer than s3fs and botocore repeat a request by themselves


@dataclass(frozen=True)
class Event:
    """A fault to inject."""

    number: int
    at_s: float  # since the run's first step
    kind: str
    target: str  # of TARGETS, a part, or "" for a file
    times: int  # requests that it hits
    amount: float  # in [0, 1): how long, or how much, in the kind's own terms


def schedule(seed: int, seconds: float, kinds: tuple[str, ...] = KINDS) -> list[Event]:
    """The faults of a soak, in order of time: a longer one of the same seed begins with the same faults."""
    streams = [
        _stream(random.Random(f"{seed}/store"), STORE_GAP_S, 0.0, [kind for kind in STORE_FAULTS if kind in kinds]),
        _stream(
            random.Random(f"{seed}/machine"),
            MACHINE_GAP_S,
            _FIRST["machine"],
            [kind for kind in MACHINE_FAULTS if kind in kinds],
        ),
        _stream(
            random.Random(f"{seed}/spoiled"),
            SPOILED_GAP_S,
            _FIRST["spoiled"],
            [kind for kind in SPOILED_FILES if kind in kinds],
        ),
    ]
    found = sorted((row for stream in streams for row in _until(seconds, stream)), key=lambda row: row[0])
    return [Event(number, *row) for number, row in enumerate(found)]


def _until(seconds: float, stream: Iterator[tuple]) -> Iterator[tuple]:
    for row in stream:
        if row[0] >= seconds:
            return
        yield row


def _stream(chance: random.Random, gap_s: float, first_s: float, kinds: list[str]) -> Iterator[tuple]:
    """Rows of an Event without its number. Each kind once, shuffled, then all again: none is rare."""
    at, targets = first_s, STORE_FAULTS | MACHINE_FAULTS
    for _ in count() if kinds else ():
        for kind in chance.sample(kinds, len(kinds)):
            yield at, kind, chance.choice(targets.get(kind, ("",))), chance.choice(_TIMES), chance.random()
            at += gap_s * chance.uniform(0.5, 1.5)
