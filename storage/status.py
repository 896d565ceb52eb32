"""State and progress of a run, from its store alone: asks no server and imports no model."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from storage import attempts, kept_policies, ledger
from storage.errors import StoreError
from storage.store import RunStore, list_runs, transfer_all
from storage.summary import read_summary

# A Trainer of another machine is alive if its heartbeat changes, which it does every two seconds.
WATCH_S = 8.0
# A heartbeat older than this is not watched: no two machines' clocks differ by so much.
OLD = timedelta(hours=1)
# What a run waits for in states of the Trainer that come without a message.
STAGES = {"starting": "starting: the Trainer imports torch and loads the model (10 to 30 s)"}


@dataclass(frozen=True)
class _Settings:
    """The part of run.json that is read here."""

    train: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunStatus:
    """State and progress of one run. None: not known yet."""

    run: str
    state: str
    """finished; alive: a Trainer works on it; trained: its final policy is not evaluated yet; failed; stopped;
    unreadable: the message has the fault, and nothing else is known."""
    step: int
    steps: int | None
    """Policy steps done, and policy steps of the whole run."""
    accuracy: float | None
    """Greedy accuracy on held-out problems of the newest policy that was evaluated."""
    best_accuracy: float | None
    """Greedy accuracy on held-out problems of the policy that best.json names."""
    trajectories: int
    """Trajectories that the Trainer has ever taken in; of a finished run, those that are stored."""
    began_at: datetime | None
    message: str
    """The Trainer's newest message: why it waits, or how it ended."""


def run_status(store: RunStore) -> RunStatus:
    """State and progress of a run. Takes up to twice `WATCH_S` if its Trainer is, or was in the last hour, elsewhere.

    Raises: StoreError: a file of the run cannot be read.
    """
    beat = attempts.read_heartbeat(store) or {}
    summary = read_summary(store)
    records = attempts.list_attempts(store)
    evaluated = list(ledger.evaluations(store).items())
    best = kept_policies.best_policy(store)
    known = beat | (summary or {})
    if summary:
        state = "finished"
    elif has_live_trainer(store, beat):
        state = "alive"
    else:
        state = {"failed": "failed", "finished": "trained"}.get(beat.get("state"), "stopped")
    return RunStatus(
        run=store.run,
        state=state,
        step=(known.get("steps") if summary else beat.get("step")) or 0,
        steps=(store.read_json("run.json", _Settings) or _Settings()).train.get("steps"),  # None: deleted meanwhile
        accuracy=ledger.accuracy(store, path=evaluated[-1][1], policy_step=evaluated[-1][0]) if evaluated else None,
        best_accuracy=best.accuracy if best else None,
        trajectories=known.get("trajectories") or known.get("num_inserted") or 0,
        began_at=records[0].began_at if records else None,
        message=beat.get("message") or "",
    )


def all_runs(url: str) -> list[RunStatus]:
    """Every run of a store, the newest first; the waits for other machines' heartbeats overlap.

    A run that cannot be read has the fault as its message.
    """
    statuses = transfer_all(lambda run: _status_or_fault(RunStore(url, run)), list_runs(url))
    never = datetime.min.replace(tzinfo=UTC)
    return sorted(statuses, key=lambda status: (status.began_at or never, status.run), reverse=True)


def _status_or_fault(store: RunStore) -> RunStatus:
    try:
        return run_status(store)
    except StoreError as error:
        return RunStatus(store.run, "unreadable", 0, None, None, None, 0, None, str(error))


def has_live_trainer(store: RunStore, beat: dict) -> bool:
    """Whether a Trainer works on the run. beat: its newest heartbeat; {} before the first."""
    newest = attempts.newest_attempt(store)
    if newest is None or beat.get("state") in attempts.ENDED:
        return False
    if newest.owner.is_running() is not None:
        return attempts.is_alive(store, newest, watch_s=0)
    return not _is_old(beat) and attempts.is_alive(store, newest, WATCH_S)


def _is_old(beat: dict) -> bool:
    try:
        return datetime.now(UTC) - datetime.fromisoformat(beat["at"]) > OLD
    except (KeyError, TypeError, ValueError):  # no heartbeat, or another program's
        return True


def stage_of(heartbeat: dict) -> str:
    """Why the Trainer waits or how it ended, in words; otherwise its state."""
    state = heartbeat.get("state")
    return heartbeat.get("message") or STAGES.get(state, state) or "the heartbeat has no state"
