"""Attempts of a run's Trainer, of which one trains at a time, and its heartbeat.

trainer/attempt=00000001.json    one attempt of the Trainer, and its checkpoint
trainer/heartbeat.json           the live Trainer's newest heartbeat

A later attempt takes the run over. The superseded Trainer may not notice at once: its machine froze, or it uploads for
minutes. Two checks keep its writes from counting:

- before the write that makes an object visible, a Trainer calls check_not_superseded, and ends if it was superseded
- a reader calls `counts`: an object that an attempt stored after a later one took over does not count

The second check covers writes between the first check and its write, except for two files that all attempts share:
trainer/heartbeat.json and policies/latest.json. The live Trainer's next write replaces them, and storage/policies.py
does not follow a pointer of a superseded attempt.
"""

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from storage.errors import AlreadyExists, AlreadyTraining, DamagedRecord, NotFound, Superseded
from storage.paths import LARGEST_NUMBER, newest_number
from storage.process_identity import Identity, Pulse
from storage.store import RESTORE, RunStore, transfer_all

HEARTBEAT = "trainer/heartbeat.json"
ENDED = ("finished", "stopped", "failed")  # states in the last heartbeat of a Trainer
_NAME = re.compile(r"trainer/attempt=(?P<number>[0-9]{8})\.json")


def _is_time(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("the time has no zone")
    return text


@dataclass(frozen=True)
class Attempt:
    """The content of trainer/attempt=….json."""

    attempt: Annotated[int, Field(ge=1, le=LARGEST_NUMBER)]
    resumed_from: Annotated[int, Field(ge=0, le=LARGEST_NUMBER)]
    owner: Identity
    created_at: Annotated[str, AfterValidator(_is_time)]  # UTC, ISO 8601
    checkpoint: str | None = None  # its folder; "": from scratch; None: an older version did not record it
    processes: int = 1  # of the Trainer, one device each

    @property
    def began_at(self) -> datetime:
        """UTC."""
        return datetime.fromisoformat(self.created_at)


class _Heartbeat(BaseModel, extra="allow"):
    """The fields of trainer/heartbeat.json that this project computes with; the others are metrics."""

    state: str | None = None
    step: int = 0
    steps: int | None = None
    message: str | None = None
    alarms: dict[str, str] = {}
    num_inserted: int | None = None
    seconds_left: float | None = None


def start_attempt(
    store: RunStore,
    resumed_from: int,
    owner: Identity,
    *,
    previous: int | None = None,
    checkpoint: str = "",
    processes: int = 1,
) -> int:
    """Begin an attempt of the Trainer at a checkpoint's step (0: from scratch). Returns its number, counted from 1.

    previous: the attempt that refuse_live_trainer returned; None: the latest. checkpoint: its folder. processes: of the
    Trainer, one device each. From then on, entries that earlier attempts write for later steps do not count.
    Raises: AlreadyTraining: another Trainer has begun since.
    """
    attempt = (latest_attempt(store) if previous is None else previous) + 1
    record = Attempt(attempt, resumed_from, owner, datetime.now(UTC).isoformat(), checkpoint, processes)
    try:
        store.put_new_json(_path(attempt), record)
    except AlreadyExists:
        raise _already_training(store, read_attempt(store, attempt)) from None
    return attempt


def resume_from(store: RunStore, attempt: int, step: int, checkpoint: str) -> None:
    """Corrects an attempt's record before the attempt has written anything else."""
    record = read_attempt(store, attempt)
    store.put_json(_path(attempt), replace(record, resumed_from=step, checkpoint=checkpoint))


def refuse_live_trainer(store: RunStore, watch_s: float) -> int:
    """The newest attempt's number; 0: there is none. Raises: AlreadyTraining: its Trainer is alive (is_alive)."""
    newest = newest_attempt(store)
    if is_alive(store, newest, watch_s):
        raise _already_training(store, newest)
    return newest.attempt if newest else 0


def _already_training(store: RunStore, record: Attempt) -> AlreadyTraining:
    return AlreadyTraining(
        f"run {store.run} in {store.url} has a live Trainer: attempt {record.attempt}, host {record.owner.host}, pid "
        f"{record.owner.pid}. Nothing was written. Follow that Trainer, or stop it and repeat the command to resume."
    )


def check_not_superseded(store: RunStore, attempt: int) -> None:
    """Raises: Superseded: a later attempt has begun. Takes one look-up, so it can precede each write."""
    if is_superseded(store, attempt):
        raise Superseded(
            f"attempt {attempt} at run {store.run} writes no more: attempt {latest_attempt(store)} has begun, so "
            "another Trainer has taken over."
        )


def is_superseded(store: RunStore, attempt: int) -> bool:
    """Whether a later attempt has begun. Takes one look-up."""
    return store.exists(_path(attempt + 1))


def counts(attempt: int, step: int, records: list[Attempt]) -> bool:
    """Whether an object that an attempt stored for a step counts: no later attempt resumed from before that step.

    records: of these later attempts at least.
    """
    return all(step <= later.resumed_from for later in records if later.attempt > attempt)


def latest_attempt(store: RunStore) -> int:
    """The newest attempt's number; 0 before the first."""
    return newest_number(store.list("trainer"), _NAME, lambda number: store.exists(_path(number)))


def newest_attempt(store: RunStore) -> Attempt | None:
    """The newest attempt; None before the first. Raises: DamagedRecord: its record cannot be read."""
    return read_attempt(store, latest_attempt(store))


def list_attempts(store: RunStore) -> list[Attempt]:
    """Every attempt, oldest first. Raises: DamagedRecord: a record cannot be read."""
    numbers = range(1, latest_attempt(store) + 1)
    return [record for record in transfer_all(lambda number: read_attempt(store, number), numbers) if record]


def later_attempts(store: RunStore, attempt: int) -> list[Attempt]:
    """The attempts after this one, oldest first; a look-up each and one more. Raises: DamagedRecord."""
    found = []
    while record := read_attempt(store, attempt + len(found) + 1):
        found.append(record)
    return found


def read_attempt(store: RunStore, attempt: int) -> Attempt | None:
    """An attempt; None: there is none. Raises: as `read_record`."""
    return read_record(store, _path(attempt))


def read_record(store: RunStore, path: str) -> Attempt | None:
    """An attempt by its path; None: there is none. Raises: DamagedRecord: it cannot be read, or is of another one."""
    found = store.read_json(path, Attempt)
    if found is not None and _path(found.attempt) != path:
        raise DamagedRecord(
            f"{path} (run {store.run} in {store.url}) is the record of attempt {found.attempt}. {RESTORE}"
        )
    return found


def first_attempt_at(store: RunStore) -> datetime:
    """When training began, UTC. Raises: NotFound: it has not begun."""
    if (first := read_attempt(store, 1)) is None:
        raise NotFound(f"run {store.run} in {store.url} has not begun to train: {_path(1)} does not exist")
    return first.began_at


def _path(attempt: int) -> str:
    return f"trainer/attempt={attempt:08d}.json"


def write_heartbeat(store: RunStore, beat: dict) -> None:
    """Replaces the heartbeat. beat: JSON values, which differ each time."""
    store.put_json(HEARTBEAT, beat)


def read_heartbeat(store: RunStore) -> dict | None:
    """The newest heartbeat, with state and step; None before the first. Raises: DamagedRecord: it cannot be read."""
    remedy = "A live Trainer replaces it within seconds; if there is none, delete it."
    found = store.read_json(HEARTBEAT, _Heartbeat, remedy=remedy)
    return found and {"state": found.state, "step": found.step} | found.model_dump(exclude_unset=True)


def raw_heartbeat(store: RunStore) -> bytes | None:
    """The newest heartbeat's bytes, for comparison with a later one; None before the first."""
    return store.get_or_none(HEARTBEAT)


def pulse(store: RunStore) -> Pulse:
    """Of whichever Trainer trains the run: `is_silent` reads the heartbeat."""
    return Pulse(lambda: raw_heartbeat(store))


def is_alive(store: RunStore, attempt: Attempt | None, watch_s: float) -> bool:
    """Whether the newest attempt's Trainer works, by its process or its heartbeat: see Identity.is_alive.

    Host names do not decide, because clones and pods share them; an attempt of an older version has only a host name.
    Takes up to twice `watch_s`; no time if there is none, or the process is known to be dead.
    """
    return attempt is not None and attempt.owner.is_alive(lambda: raw_heartbeat(store), watch_s)
