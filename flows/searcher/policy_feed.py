"""The policies that a Searcher serves: fetches and loads the newest one while a Trainer trains the run.

Before: storage/policies.py publishes a policy; after: tba/searcher.py serves it.
"""

import time
from typing import TYPE_CHECKING

from prefect import get_run_logger

from infra.machine import policy_cache
from storage import policies
from storage.attempts import read_heartbeat
from storage.errors import NotFound
from storage.patience import patience_s
from storage.store import RunStore

if TYPE_CHECKING:  # importing it takes torch's seconds
    from tba.searcher import Searcher, ServedPolicy

# A Searcher ends by itself this long after the Trainer's last sign of life, which may wait for the store.
TRAINER_SILENT_S = max(180, 60 + patience_s())
POLL_S = 0.5


class TrainerPulse:
    """Whether a Trainer trains the run: its heartbeat changes. Needs no common clock."""

    def __init__(self, store: RunStore) -> None:
        self._store, self._seen = store, time.monotonic()
        self._last: bytes | None = None

    def is_silent(self) -> bool:
        beat = read_heartbeat(self._store)
        if beat != self._last:
            self._last, self._seen = beat, time.monotonic()
        return time.monotonic() - self._seen > TRAINER_SILENT_S


def next_policy(
    store: RunStore, pulse: TrainerPulse, after: policies.PolicyRef | None = None
) -> policies.PolicyRef | None:
    """The newest policy; waits for the first one, or for one other than `after`.

    Returns None: the Trainer has been silent for `TRAINER_SILENT_S`.
    """
    while not pulse.is_silent():
        if (policy := policies.latest_policy(store)) and policy != after:
            return policy
        time.sleep(POLL_S)
    get_run_logger().warning("no sign of life from a Trainer for %d s: this Searcher ends", TRAINER_SILENT_S)
    return None


def deliver(store: RunStore, searcher: "Searcher", policy: policies.PolicyRef) -> "ServedPolicy | None":
    """Makes the engine serve the policy. Returns None: the policy was deleted for a newer one before the fetch.

    Raises: RuntimeError: the engine's weights differ from the published ones.
    """
    try:
        folder = policies.fetch_policy(store, policy, policy_cache(store.run))
        served = searcher.load(folder, policy.step)
    except (NotFound, FileNotFoundError):
        return None
    if served.fingerprint != policy.fingerprint:
        raise RuntimeError(
            f"searcher: the engine serves weights {served.fingerprint}, but policy step {policy.step} was published as "
            f"{policy.fingerprint}: {policy.path} is damaged or was changed after it was published"
        )
    return served
