"""Follows a run by its store and, if a Prefect server answers, by the run's flow runs there."""

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.report.text import duration
from storage.attempts import read_heartbeat
from storage.errors import StoreError
from storage.status import stage_of
from storage.store import RunStore
from storage.summary import is_finished

if TYPE_CHECKING:
    from flows.config import RunConfig

QUIET_S = 15.0  # several heartbeats: a longer silence is shown
SERVER_POLL_S = 5.0
ANSWER_TIMEOUT_S = 2.0  # of the Prefect server; `tba watch` waits at its end for a request in progress

UNAWAITED = "unawaited"  # name of a thread that a command's end does not wait for (flows/cli/app.py)


@dataclass(frozen=True)
class Seen:
    """The state of a run at one moment."""

    stage: str
    heartbeat: dict | None
    server: str
    """States of the run's flow runs, by the Prefect server; empty if no server has answered."""
    is_over: bool
    """The run is finished: its summary exists."""


class Watcher:
    """Reads a run's state repeatedly. It compares no clocks: a Trainer is alive if its heartbeat changes."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._server = ServerView(store)
        self._beat: dict | None = None
        self._changed_at = time.monotonic()
        self._num_changes = -1  # the first heartbeat may be a dead Trainer's

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def look(self) -> Seen:
        """The run's state now. A store that does not answer is a stage, not an error."""
        try:
            beat, over = read_heartbeat(self._store), is_finished(self._store)
        except StoreError as error:
            return Seen(f"the store does not answer: {error}", self._beat, self._server.words, False)
        if beat != self._beat:
            self._beat, self._changed_at = beat, time.monotonic()
            self._num_changes += 1
        return Seen(self._stage(), beat, self._server.words, over)

    def _stage(self) -> str:
        beat, quiet_s = self._beat, time.monotonic() - self._changed_at
        if beat is None:
            return "waiting for the first Trainer: none has begun yet"
        if beat.get("state") == "stopped":
            return "stopped; the same `tba train` resumes it"
        if beat.get("state") == "finished":
            if beat.get("message"):
                return f"trained, not evaluated; the same `tba train` evaluates it: {beat['message']}"
            return "trained; the final policy is being evaluated"
        if beat.get("state") == "failed":
            return f"failed: {stage_of(beat)}"
        if quiet_s > QUIET_S:
            return f"no heartbeat from the Trainer for {duration(quiet_s)}"
        return stage_of(beat) if self._num_changes else "waiting for the Trainer's next heartbeat"


class ServerView:
    """States of a run's flow runs, by the Prefect server. A thread asks the server, so callers do not wait."""

    def __init__(self, store: RunStore) -> None:
        self.words = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, args=(store,), name=UNAWAITED, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, unless it is still importing: that takes seconds, and many on a busy machine."""
        self._closing.set()
        self._thread.join(2 * ANSWER_TIMEOUT_S)

    def _ask_on(self, store: RunStore) -> None:
        os.environ.setdefault("DO_NOT_TRACK", "1")  # or Prefect prints what it collects, into the live table
        with contextlib.suppress(Exception):  # any error: the store suffices to follow a run
            from flows.config import load_run
            from infra import prefect_server, stack

            config = load_run(store)
            named = prefect_server.candidates(stack.running_url(Path.cwd()))
            while named and not self._closing.is_set():
                self.words = self._ask(named[0].url, config)
                self._closing.wait(SERVER_POLL_S)

    def _ask(self, url: str, config: "RunConfig") -> str:
        """Asks the server; shows nothing until it has answered once."""
        from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES

        from flows.run import flow_runs
        from infra import prefect_server, stack

        quick = {PREFECT_API_REQUEST_TIMEOUT: ANSWER_TIMEOUT_S, PREFECT_CLIENT_MAX_RETRIES: 0}
        try:
            with prefect_server.api(url, {**stack.credentials(Path.cwd(), url), **quick}) as client:
                return _words(flow_runs.unfinished(client, config))
        except Exception:  # no server answers
            return "Prefect: no answer from the server" if self.words else ""


def _words(flow_runs: list) -> str:
    """flow_runs: the run's unfinished flow runs, the flow's own first."""
    names = [f"{Path(flow_run.name).name} {flow_run.state_name.lower()}" for flow_run in flow_runs]
    return f"Prefect: {', '.join(names)}" if names else "Prefect: no flow of this run is alive"
