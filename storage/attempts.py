"""Attempts: the lives of a run's Trainer, of which one trains at a time, and its sign of life.

trainer/attempt=00000001.json    one attempt of the Trainer, and its checkpoint
trainer/heartbeat.json           the live Trainer's newest heartbeat
"""

import json
import socket
import time
from dataclasses import asdict
from datetime import UTC, datetime

from storage.errors import AlreadyExists, AlreadyTraining, Superseded
from storage.process_identity import Process
from storage.store import RunStore

HEARTBEAT = "trainer/heartbeat.json"
_POLL_S = 0.2


def start_attempt(store: RunStore, resumed_from: int, owner: dict, *, previous: int | None = None) -> int:
    """Begin an attempt of the Trainer at a checkpoint's step (0: from scratch). Returns its number, counted from 1.

    owner: the process, as this_process returns it. previous: the attempt that refuse_live_trainer found to be over;
    None: the latest. AlreadyTraining if another Trainer has begun since. The number fences: a later attempt takes the
    run over, and entries that an earlier one writes after that do not count.
    """
    attempt = (latest_attempt(store) if previous is None else previous) + 1
    record = {
        "attempt": attempt,
        "resumed_from": resumed_from,
        "owner": owner,
        "created_at": datetime.now(UTC).isoformat(),
    }
    try:
        store.put_new(_attempt_path(attempt), json.dumps(record, indent=2).encode())
    except AlreadyExists:
        raise _already_training(store, json.loads(store.get(_attempt_path(attempt)))) from None
    return attempt


def refuse_live_trainer(store: RunStore, watch_s: float) -> int:
    """The latest attempt's number, 0 if there is none. AlreadyTraining if its Trainer is alive (run_is_alive)."""
    latest = list_attempts(store)[-1:]
    if run_is_alive(store, watch_s):
        raise _already_training(store, list_attempts(store)[-1])
    return latest[0]["attempt"] if latest else 0


def _already_training(store: RunStore, record: dict) -> AlreadyTraining:
    owner = record["owner"]
    return AlreadyTraining(
        f"run {store.run} in {store.url} has a live Trainer: attempt {record['attempt']}, host {owner['host']}, pid "
        f"{owner['pid']}. Nothing was written. Follow that Trainer, or stop it and start again: the run resumes."
    )


def check_not_superseded(store: RunStore, attempt: int) -> None:
    """Superseded if a later attempt has begun. One look-up, cheap enough to make before each write."""
    if store.exists(_attempt_path(attempt + 1)):
        raise Superseded(
            f"attempt {attempt} at run {store.run} writes no more: attempt {latest_attempt(store)} has begun, so "
            "another Trainer has taken over."
        )


def latest_attempt(store: RunStore) -> int:
    """The newest attempt's number; 0 before the first."""
    return max((record["attempt"] for record in list_attempts(store)), default=0)


def list_attempts(store: RunStore) -> list[dict]:
    """Every attempt's record (attempt, resumed_from, owner, created_at), oldest first."""
    paths = [path for path in store.list("trainer") if path.startswith("trainer/attempt=")]
    return [json.loads(store.get(path)) for path in paths]


def trainer(store: RunStore) -> tuple[str, int] | None:
    """Host and pid of the latest attempt's Trainer; None before the first."""
    latest = list_attempts(store)[-1:]
    return (latest[0]["owner"]["host"], latest[0]["owner"]["pid"]) if latest else None


def first_attempt_at(store: RunStore) -> datetime:
    """When training began. NotFound before that."""
    return datetime.fromisoformat(json.loads(store.get(_attempt_path(1)))["created_at"])


def _attempt_path(attempt: int) -> str:
    return f"trainer/attempt={attempt:08d}.json"


def heartbeat(store: RunStore, beat: dict) -> None:
    """Replace the heartbeat. beat: JSON values, different each time."""
    store.put(HEARTBEAT, json.dumps(beat).encode())


def read_heartbeat(store: RunStore) -> dict | None:
    """The newest sign of life; None before the first."""
    return store.read_json(HEARTBEAT)


def run_is_alive(store: RunStore, watch_s: float) -> bool:
    """Whether a Trainer works on the run.

    On this machine: whether its process exists. On another machine: whether its heartbeat changes within `watch_s`.
    Compares no clocks. Takes up to `watch_s`, and no time if the process is known to be dead.
    """
    records = list_attempts(store)
    if not records:
        return False
    owner = records[-1]["owner"]
    beats = [read_heartbeat(store)]
    deadline = time.monotonic() + watch_s
    while not _is_gone(owner):
        if (beat := read_heartbeat(store)) not in beats:
            beats.append(beat)
        if len(beats) > 2:  # one change may be the last heartbeat of a Trainer that lost its flow
            return True
        if time.monotonic() > deadline:
            return owner["host"] == socket.gethostname()  # the process exists, but is silent: it starts, or hangs
        time.sleep(_POLL_S)
    return False


def this_process() -> dict:
    """This process, described so that another process of the machine can tell whether it still runs."""
    return {"host": socket.gethostname()} | asdict(Process.current())


def _is_gone(owner: dict) -> bool:
    """Whether the process is known to be dead. On another machine this cannot be known."""
    return owner["host"] == socket.gethostname() and Process(owner["pid"], owner["started"]).find() is None
