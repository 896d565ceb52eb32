"""The Trainer's heartbeat: its step and remaining time, written every two seconds by a thread beside training.

The thread also looks for a stop request, which stays until it is obeyed: a Trainer that is started again obeys it. If
the flow's process has died, the thread ends the Trainer's process at once, unless it is stopping: after Ctrl-C, which
reaches the worker, too, the worker kills the flow.
"""

import contextlib
import logging
import os
import threading
import time
from dataclasses import asdict
from datetime import UTC, datetime

from flows.config import RunConfig
from storage import attempts, requests
from storage.errors import StoreError, Superseded
from storage.process_identity import Identity
from storage.store import RunStore

HEARTBEAT_S = 2.0

log = logging.getLogger("tba.trainer")


class Heartbeat:
    """Writes trainer/heartbeat.json in a thread of its own."""

    def __init__(self, store: RunStore, config: RunConfig, attempt: int, parent: int, step: int = 0) -> None:
        """`parent`: pid of the flow's process; if that process ends, the Trainer ends. `step`: of the checkpoint."""
        self._store, self._config, self._attempt, self._parent = store, config, attempt, parent
        self._started, self._first_step = time.monotonic(), None
        self._beat = {"state": "starting", "step": step}
        self.stop = threading.Event()  # set: training ends after the current step
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, daemon=True)
        self._thread.start()

    def tell(self, state: str, step: int, facts: dict) -> None:
        """Sets state, step and facts of the next heartbeats; other facts keep their values."""
        if state == "training" and self._first_step is None:
            self._first_step, self._started = step, time.monotonic()
        self._beat = self._beat | {"state": state, "step": step} | facts

    def end(self, state: str, message: str = "") -> None:
        """Ends the thread and writes the last heartbeat."""
        self._closing.set()
        self._thread.join()
        self._beat = self._beat | {"state": state, "message": message}
        with contextlib.suppress(Superseded):  # another Trainer writes the heartbeat now
            self.write()
            if state in ("stopped", "finished"):
                requests.take_back_stop(self._store)

    def _beat_on(self) -> None:
        """The first heartbeat is written at once: another Trainer that starts now must see that the run has one."""
        while True:
            if os.getppid() != self._parent and not self.stop.is_set():
                os._exit(1)  # the flow was killed: no process would end the run
            try:
                self.write()
                if requests.is_to_stop(self._store):
                    self.stop.set()
            except Superseded as error:
                log.error(error)
                os._exit(1)  # at once, without waiting for the other threads
            except StoreError as error:
                log.warning("the heartbeat could not be written: %s", error)
            if self._closing.wait(HEARTBEAT_S):
                return

    def write(self) -> None:
        """Writes one heartbeat. Raises: Superseded: another Trainer has taken over."""
        attempts.check_not_superseded(self._store, self._attempt)
        steps, step = self._config.train.steps, self._beat["step"]
        since_first = step - self._first_step if self._first_step is not None else 0
        seconds_left = (time.monotonic() - self._started) / since_first * (steps - step) if since_first else None
        attempts.write_heartbeat(
            self._store,
            self._beat
            | {
                "attempt": self._attempt,
                "steps": steps,
                "seconds_left": seconds_left,
                "owner": asdict(Identity.current()),
                "at": datetime.now(UTC).isoformat(),
            },
        )
