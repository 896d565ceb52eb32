"""Searchers and `tba train` watch their run's Trainer. If its machine dies, they have the run resumed on another one.

If the Trainer was only cut off, it finds a later attempt when it comes back, and ends (storage/attempts.py). So a wrong
guess costs time, and no trajectory.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException

from flows.config import RunConfig
from flows.run import takeover
from storage import attempts
from storage.errors import StoreError
from storage.store import RunStore

Log = logging.Logger | logging.LoggerAdapter

LOOK_S = 2.0
# Seven heartbeats. If the Trainer lives, the new flow run sees it and ends (flows/run/takeover.py).
SILENT_S = 15.0
ASK_S = 10.0  # between two requests to Prefect while the Trainer stays silent
ASKS_PER_S = 10  # of all Searchers of a run, in the mean: a thousand at once would keep Prefect's server from answering


class TrainerWatch:
    """Watches the Trainer in a thread of its own, until it is closed."""

    def __init__(
        self,
        store: RunStore,
        config: RunConfig,
        log: Log,
        ended_with: bytes | None = None,
        client: Callable[[], AbstractContextManager] | None = None,
    ) -> None:
        """ended_with: the last heartbeat of a Trainer that is known to have ended.

        client: makes a client of Prefect's server; None: of the server in this process's settings, as in a flow run.
        """
        self._store, self._config, self._log = store, config, log
        self._client = client or partial(get_client, sync_client=True)
        self._pulse = attempts.pulse(store)
        self._ended_with = ended_with
        turn_s = config.searchers / ASKS_PER_S
        self._silent_s = SILENT_S + random.uniform(0, turn_s)  # noqa: S311 - not all at once
        self._ask_s = max(ASK_S, turn_s)
        self._asked_at = float("-inf")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(LOOK_S)

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self.look()
            except StoreError:  # PolicyFeed tells that the store is away
                self._pulse = attempts.pulse(self._store)
            except (httpx.HTTPError, PrefectException, ValueError) as error:  # ValueError: the answer is not Prefect's
                self._log.warning("the Trainer is silent, and its run cannot be resumed yet: %r", error)

    def look(self) -> None:
        """Resumes the run if its Trainer is silent. Raises: StoreError; what Prefect's client raises."""
        if not self._pulse.is_silent(self._silent_s) or time.monotonic() - self._asked_at < self._ask_s:
            return
        if self._pulse.last == self._ended_with or not self._has_died_elsewhere():
            return
        self._asked_at = time.monotonic()
        with self._client() as client:
            resumed = takeover.resume_elsewhere(client, self._config, self._pulse.last)
        if resumed is not None:
            self._log.warning("the Trainer is silent for %.0f s: another flow run resumes the run", self._silent_s)

    def _has_died_elsewhere(self) -> bool:
        """Whether the silent Trainer was on another machine, and had not ended by itself."""
        newest, beat = attempts.newest_attempt(self._store), attempts.read_heartbeat(self._store)
        if newest is None or newest.owner.is_here() or beat is None:
            return False
        return beat.get("state") not in attempts.ENDED
