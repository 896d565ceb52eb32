"""A run on Prefect's page while it trains: artifacts, lineage and events.

    artifacts    progress, newest steps, curves, link to the report; each is created once, then its data are replaced
    assets       policies, which depend on the shards that they were trained on. Searchers add the shards, which depend
                 on the policy that sampled them (flows/search.py)
    events       tba.policy.published, tba.buffer.starved, tba.alarm.<name>, tba.run.finished; payloads:
                 docs/operating.md

The run's flow calls `update` every few seconds. `update` reads the store, at a cost in proportion to the new entries.
Neither the Trainer nor the Searchers wait for it.
"""

import time

import httpx
from prefect import get_run_logger
from prefect.events import emit_event

from flows.config import RunConfig
from flows.run.prefect_page_artifacts import Artifacts
from flows.run.prefect_page_lineage import PublishedPolicies, run_resource
from storage import attempts
from storage.errors import StoreError
from storage.store import RunStore

UPDATE_S = 10.0
# A Trainer that waits this long for a batch after its first step is starved. Waiting for the first batch does not
# count.
STARVED_S = 60.0


class Page:
    """One run on Prefect's page. Use it inside the run's flow run."""

    def __init__(self, store: RunStore, config: RunConfig) -> None:
        self._store = store
        self._artifacts, self._policies = Artifacts(store, config), PublishedPolicies(store)
        self._waiting: tuple[int, float] | None = None  # the step that the Trainer waits for, and since when
        self._attempt, self._begun_at = None, 0  # the Trainer's, and the step behind which it waits for its first batch
        self._starved = False
        self._alarms: set[str] = set()  # alarms that were on at the last look
        self._updated_at = float("-inf")
        self._behind = False

    def update(self, *, now: bool = False) -> None:
        """Shows new entries, if the last update is `UPDATE_S` ago or `now` is set."""
        if not now and time.monotonic() - self._updated_at < UPDATE_S:
            return
        self._updated_at = time.monotonic()
        try:
            self._update()
            self._behind = False
        except (httpx.HTTPError, StoreError, ValueError, TypeError, OverflowError) as error:  # training needs no page
            if not self._behind:
                get_run_logger().warning("Prefect's page of the run is not up to date: %r", error)
            self._behind = True

    def _update(self) -> None:
        beat = attempts.read_heartbeat(self._store) or {}
        self._tell_if_starved(beat)  # first: a part of the page that fails must not silence what automations wait for
        self._tell_alarms(beat)
        self._artifacts.read_steps()
        self._policies.show()
        self._artifacts.show_progress(beat)
        self._artifacts.show_steps()

    def finish(self, summary: dict) -> None:
        """Shows the newest state and emits tba.run.finished with the summary."""
        self.update(now=True)
        emit_event("tba.run.finished", resource=run_resource(self._store), payload=summary)

    def _tell_if_starved(self, beat: dict) -> None:
        if beat.get("state") in ("waiting", "training") and beat.get("attempt") != self._attempt:
            is_waiting = beat["state"] == "waiting"
            self._attempt, self._begun_at = beat.get("attempt"), beat["step"] if is_waiting else None
        # for its first batch, also of an attempt that resumed, it waits until engines are loaded
        if beat.get("state") != "waiting" or beat["step"] == self._begun_at:
            self._waiting, self._starved = None, False
            return
        if self._waiting is None or self._waiting[0] != beat["step"]:
            self._waiting = (beat["step"], time.monotonic())
        waited_s = time.monotonic() - self._waiting[1]
        if waited_s >= STARVED_S and not self._starved:
            self._starved = True
            emit_event(
                "tba.buffer.starved",
                resource=run_resource(self._store),
                payload={
                    "run": self._store.run,
                    "store": self._store.url,
                    "step": beat["step"],
                    "waited_s": round(waited_s),
                    "reason": beat.get("message", ""),
                },
            )

    def _tell_alarms(self, beat: dict) -> None:
        """An event and a warning for each alarm that has gone on since the last look."""
        # a starting Trainer's heartbeat has no alarms: keep the last ones
        alarms = beat.get("alarms", dict.fromkeys(self._alarms))
        for name in alarms.keys() - self._alarms:
            get_run_logger().warning(alarms[name])
            emit_event(
                f"tba.alarm.{name}",
                resource=run_resource(self._store),
                payload={
                    "run": self._store.run,
                    "store": self._store.url,
                    "step": beat["step"],
                    "alarm": name,
                    "message": alarms[name],
                },
            )
        self._alarms = set(alarms)
