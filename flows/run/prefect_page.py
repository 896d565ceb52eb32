"""What Prefect's page shows of a run while it trains: artifacts, lineage and events.

    artifacts    progress, newest steps, curves, link to the report; made once by a flow run, then replaced in place
    assets       policies, which depend on the shards that they were trained on; shards, which depend on the policy that
                 sampled them, are shown by the Searchers (flows/search.py)
    events       tba.policy.published, tba.buffer.starved, tba.alarm.<name>, tba.run.finished; payloads:
                 docs/operating.md

The flow that watches a run calls `update` every few seconds. Everything is read from the store, and costs in proportion
to what is new: neither Trainer nor Searchers know of it or wait for it.
"""

import json
import re
import time
from uuid import UUID

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from prefect import artifacts, get_run_logger
from prefect.assets import Asset, AssetProperties, add_asset_metadata, materialize
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.events import emit_event

from flows.cli.console import duration
from flows.config import RunConfig
from flows.report.curves import curves, image_url
from storage import ledger, policies, shards
from storage.errors import NotFound, StoreError
from storage.store import RunStore, transfer_all

UPDATE_S = 10.0
# A Trainer that has trained and then waits so long for a batch is starved; the first fill takes as long as it takes.
STARVED_S = 60.0
STEPS_SHOWN = 20  # in the table
STEPS_READ = 500  # at a time: a resumed run has a past, and the flow has Searchers to look after
RELATED_SHOWN = 90  # Prefect refuses an event that names more than 100 others
COLUMNS = {
    "step": "step",
    "reward_mean": "reward",
    "fresh_reward_mean": "fresh reward",
    "staleness_mean": "staleness, mean",
    "staleness_max": "staleness, largest",
    "num_trajectories": "trajectories",
    "step_s": "step, s",
    "wait_s": "waited, s",
}


class Page:
    """One run on Prefect's page. To be used inside its flow run."""

    def __init__(self, store: RunStore, config: RunConfig) -> None:
        self._store, self._config = store, config
        self._artifacts: dict[str, UUID] = {}
        self._steps: list[dict] = []  # rows of the training ledger that count, in order
        self._last_read: str | None = None
        self._published: tuple[int, int] | None = None  # attempt and step of the last policy that was shown
        self._waiting: tuple[int, float] | None = None  # the step that the Trainer waits for, and since when
        self._starved = False
        self._alarms: set[str] = set()  # that were on at the last look
        self._updated_at = float("-inf")
        self._behind = False

    def update(self, *, now: bool = False) -> None:
        """Shows what is new, if the last time is `UPDATE_S` ago or it must be `now`."""
        if not now and time.monotonic() - self._updated_at < UPDATE_S:
            return
        self._updated_at = time.monotonic()
        try:
            self._update()
            self._behind = False
        except (httpx.HTTPError, StoreError) as error:  # training needs no page
            if not self._behind:
                get_run_logger().warning("the page is not up to date: %r", error)
            self._behind = True

    def _update(self) -> None:
        self._read_steps()
        self._show_policies()
        beat = self._heartbeat()
        self._show_progress(beat)
        self._tell_if_starved(beat)
        self._tell_alarms(beat)
        if self._steps:
            self._show_steps()

    def finish(self, summary: dict) -> None:
        """The run's last words."""
        self.update(now=True)
        emit_event("tba.run.finished", resource=run_resource(self._store), payload=summary)

    # --- artifacts ----------------------------------------------------------------------------------------------------

    def _show_progress(self, beat: dict) -> None:
        step, steps = beat.get("step", 0), self._config.train.steps
        words = [beat.get("state", "starting"), f"step {step} of {steps}"]
        if beat.get("reward_mean") is not None:
            words.append(f"reward {beat['reward_mean']:.2f}")
        if beat.get("seconds_left") is not None:
            words.append(f"{duration(beat['seconds_left'])} left")
        if beat.get("message"):
            words.append(beat["message"])
        words += [f"ALARM: {message}" for message in beat.get("alarms", {}).values()]
        description = f"Run {self._store.run}: {', '.join(words)}"
        self._show("progress", artifacts.create_progress_artifact, "progress", 100 * step / steps, description)
        self._show(
            "report", artifacts.create_link_artifact, "link", f"{self._store.url}/{self._store.run}/report.html",
            f"The report of run {self._store.run}, once `tba report {self._store.run}` has written it",
            link_text="report.html",
        )  # fmt: skip

    def _show_steps(self) -> None:
        table = [
            {heading: _rounded(row[name]) for name, heading in COLUMNS.items()}
            for row in self._steps[-STEPS_SHOWN:][::-1]
        ]
        self._show("steps", artifacts.create_table_artifact, "table", table, "The newest training steps")
        for key, title, names in (
            ("reward-curve", "Reward by step", {"reward_mean": "trained on", "fresh_reward_mean": "just sampled"}),
            ("staleness-curve", "Staleness by step", {"staleness_mean": "mean", "staleness_max": "largest"}),
        ):
            lines = {label: [row[name] for row in self._steps] for name, label in names.items()}
            image = image_url(curves(title, [row["step"] for row in self._steps], lines))
            self._show(key, artifacts.create_image_artifact, "image_url", image, title)

    def _show(self, key: str, create, argument: str, data, description: str, **more) -> None:
        """Creates an artifact of the flow run, or replaces the data of the one that it has already."""
        if key not in self._artifacts:
            slug = re.sub("[^a-z0-9]+", "-", self._store.run.lower()).strip("-")
            self._artifacts[key] = create(key=f"{slug}-{key}", description=description, **{argument: data}, **more)
        elif key != "report":
            stored = json.dumps(data) if argument == "table" else data
            with get_client(sync_client=True) as client:
                client.update_artifact(self._artifacts[key], ArtifactUpdate(data=stored, description=description))

    def _read_steps(self) -> None:
        paths = self._store.list("metrics/training", start_after=self._last_read)[:STEPS_READ]
        for row in transfer_all(
            lambda path: pq.read_table(pa.BufferReader(self._store.get(path))).to_pylist()[0], paths
        ):
            while self._steps and self._steps[-1]["step"] >= row["step"]:
                self._steps.pop()  # undone by the resume that this row is of
            self._steps.append(row)
        self._last_read = paths[-1] if paths else self._last_read

    def _heartbeat(self) -> dict:
        try:
            return json.loads(self._store.get(ledger.HEARTBEAT))
        except NotFound:
            return {}

    # --- policies -----------------------------------------------------------------------------------------------------

    def _show_policies(self) -> None:
        """Every policy that was published since the last time: a task run named by its steps, an asset, an event."""
        latest = policies.latest_policy(self._store)
        if latest is None or self._published == (latest.attempt, latest.step):
            return
        if self._published is None or self._published[0] != latest.attempt:
            resumed_from = ledger.attempts(self._store)[-1]["resumed_from"]
            self._show_policy(latest.attempt, range(0), resumed_from)  # each life publishes what it begins with
            self._published = (latest.attempt, resumed_from)
        for step in range(self._published[1] + 1, latest.step + 1):
            steps = range(self._published[1] + 1, step + 1)
            if self._show_policy(latest.attempt, steps, step, final=latest.final and step == latest.step):
                self._published = (latest.attempt, step)

    def _show_policy(self, attempt: int, steps: range, step: int, final: bool = False) -> bool:
        """`steps`: those that were trained since the policy before. False: there is no policy of this `step`."""
        path = policies.policy_path(step, attempt)
        try:
            manifest = json.loads(self._store.get(f"{path}/{policies.MANIFEST}"))
        except NotFound:
            return False
        trained_on = self._shards_of(attempt, steps)
        payload = {
            "run": self._store.run,
            "store": self._store.url,
            "step": step,
            "path": path,
            "fingerprint": manifest["fingerprint"],
            "attempt": attempt,
            "final": final,
            "num_shards": len(trained_on),
        }
        asset = Asset(
            key=asset_key(self._store, path), properties=AssetProperties(name=f"{self._store.run}, policy step {step}")
        )
        materialize(
            asset,
            asset_deps=[asset_key(self._store, shard) for shard in trained_on[-RELATED_SHOWN:]],
            task_run_name=f"steps {steps[0]} to {step}" if steps else f"policy of step {step}",
            cache_policy=NO_CACHE,
            persist_result=False,
        )(publish)(asset.key, payload)
        emit_event("tba.policy.published", resource=run_resource(self._store), payload=payload)
        return True

    def _shards_of(self, attempt: int, steps: range) -> list[str]:
        """Paths of the shards whose trajectories those steps were trained on, oldest round first."""
        drawn: set[str] = set()
        for step in steps:
            data = self._store.get(ledger.batch_path(attempt, step))
            drawn |= set(pq.read_table(pa.BufferReader(data), columns=["trajectory_id"])["trajectory_id"].to_pylist())
        rounds = {shards.round_of(trajectory) for trajectory in drawn}
        return [shards.shard_path(searcher, number) for searcher, number in sorted(rounds, key=lambda r: r[::-1])]

    # --- events -------------------------------------------------------------------------------------------------------

    def _tell_if_starved(self, beat: dict) -> None:
        if beat.get("state") != "waiting" or beat["step"] == 0:
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
        alarms = beat.get("alarms", dict.fromkeys(self._alarms))  # a Trainer that starts has judged nothing yet
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


def publish(asset: str, payload: dict) -> None:
    """The policy is in the store already; this task tells Prefect."""
    add_asset_metadata(asset, payload)


def run_resource(store: RunStore) -> dict[str, str]:
    """What the events are about, as Prefect names resources."""
    return {"prefect.resource.id": f"tba.run.{store.run}", "prefect.resource.name": store.run, "tba.store": store.url}


def asset_key(store: RunStore, path: str) -> str:
    """URL of a run's file or folder, without the characters that Prefect has no place for in an asset's key."""
    return re.sub(r"[^\w:/.=@+~-]", "_", f"{store.url}/{store.run}/{path}", flags=re.ASCII)


def _rounded(value):
    return round(value, 3) if isinstance(value, float) else value
