"""Whether a run's Trainer is silent, as a Searcher sees it."""

import time

from storage import attempts
from storage.store import RunStore


class TrainerPulse:
    """Tells whether a Trainer trains the run: whether its heartbeat changes. Needs no common clock."""

    def __init__(self, store: RunStore) -> None:
        self._store, self._seen_at = store, time.monotonic()
        self.last: bytes | None = None
        """The newest heartbeat."""

    def is_silent(self, limit_s: float) -> bool:
        """Reads the heartbeat. Returns whether it has not changed for `limit_s`.

        Time that the store takes to answer does not count: the Trainer may wait for it, too. Raises: StoreError.
        """
        asked_at = time.monotonic()
        beat = attempts.raw_heartbeat(self._store)
        now = time.monotonic()
        self._seen_at += now - asked_at
        if beat != self.last:
            self.last, self._seen_at = beat, now
        return now - self._seen_at > limit_s
