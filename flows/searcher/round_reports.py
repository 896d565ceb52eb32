"""Which rounds Prefect hears of: a server notes down some eight a second, and many Searchers end more."""

import contextlib
import random
import time
from collections.abc import Callable

from storage import requests
from storage.errors import StoreError
from storage.store import RunStore

REPORT_S = 1.0  # between two reported rounds of a run, on average


class RoundReports:
    """Says when a round of this Searcher is due to be reported: its share of the run's one a second."""

    def __init__(self, store: RunStore, configured: int, clock: Callable[[], float] = time.monotonic) -> None:
        """configured: the number of Searchers, unless a request has changed it."""
        self._store, self._num_searchers, self._clock = store, configured, clock
        self._next = clock() + REPORT_S * random.uniform(0, configured - 1)  # noqa: S311 - not all at once

    def is_due(self) -> bool:
        if self._clock() < self._next:
            return False
        with contextlib.suppress(StoreError):  # the store is unreachable: keep the last number
            self._num_searchers = requests.wanted_searchers(self._store, self._num_searchers)
        self._next = self._clock() + REPORT_S * max(1, self._num_searchers)
        return True
