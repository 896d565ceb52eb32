"""Artifacts of a run on Prefect's page: progress, newest steps, curves, link to the report.

A flow run creates each once, then replaces its data.
"""

import contextlib
import json
import re
from itertools import chain
from uuid import UUID

import httpx
import pyarrow as pa
from prefect import artifacts
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from flows.config import RunConfig
from flows.report.image import curves_url
from flows.report.text import duration, printable
from storage import ledger
from storage.errors import DamagedRecord, NotFound
from storage.ledger_files import counting_parts, parts_named
from storage.schema import TRAINING_STEP
from storage.store import RunStore, transfer_all

STEPS_SHOWN = 20  # steps in the table
FILES_READ = 500  # that one update reads: a resumed run may have many, and the flow must also restart Searchers
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
# The columns that are read: those shown, and those that an entry may not lack.
SHOWN = pa.schema([field for field in TRAINING_STEP if field.name in {*COLUMNS, *ledger.NEEDED["metrics/training"]}])


class Artifacts:
    """One run's artifacts. Use it inside the run's flow run."""

    def __init__(self, store: RunStore, config: RunConfig) -> None:
        self._store, self._config = store, config
        self._artifacts: dict[str, UUID] = {}
        self._steps: list[dict] = []  # rows of the training ledger that count, in order
        self._unread: list[str] = []  # files of the training ledger, listed already
        self._newest_entry: str | None = None  # the last of these

    def show_progress(self, beat: dict) -> None:
        step, steps = beat.get("step", 0), self._config.train.steps
        words = [_plain(beat.get("state") or "starting"), f"step {step} of {steps}"]
        if isinstance(beat.get("reward_mean"), int | float):
            words.append(f"reward {beat['reward_mean']:.2f}")
        if beat.get("seconds_left") is not None:
            words.append(f"{duration(beat['seconds_left'])} left")
        if beat.get("message"):
            words.append(_plain(beat["message"]))
        words += [f"ALARM: {_plain(message)}" for message in beat.get("alarms", {}).values()]
        description = f"Run {self._store.run}: {', '.join(words)}"
        self._show("progress", artifacts.create_progress_artifact, "progress", 100 * step / steps, description)
        self._show(
            "report", artifacts.create_link_artifact, "link", f"{self._store.url}/{self._store.run}/report.html",
            f"The report of run {self._store.run}; `{self._store.command(f'report {self._store.run}')}` writes it",
            link_text="report.html",
        )  # fmt: skip

    def show_steps(self) -> None:
        if not self._steps:
            return
        table = [
            {heading: _rounded(row.get(name)) for name, heading in COLUMNS.items()}
            for row in self._steps[-STEPS_SHOWN:][::-1]
        ]
        self._show("steps", artifacts.create_table_artifact, "table", table, "The newest training steps")
        for key, title, names in (
            ("reward-curve", "Reward by step", {"reward_mean": "batch", "fresh_reward_mean": "fresh"}),
            ("staleness-curve", "Staleness by step", {"staleness_mean": "mean", "staleness_max": "largest"}),
        ):
            lines = {label: [row.get(name) for row in self._steps] for name, label in names.items()}
            image = curves_url(title, [row["step"] for row in self._steps], lines)
            self._show(key, artifacts.create_image_artifact, "image_url", image, title)

    def _show(self, key: str, create, argument: str, data, description: str, **more) -> None:
        """Creates an artifact of the flow run, or replaces the data of the existing one."""
        if key not in self._artifacts:
            slug = re.sub("[^a-z0-9]+", "-", self._store.run.lower()).strip("-")
            self._artifacts[key] = create(key=f"{slug}-{key}", description=description, **{argument: data}, **more)
        elif key != "report":
            stored = json.dumps(data) if argument == "table" else data
            try:
                with get_client(sync_client=True) as client:
                    client.update_artifact(self._artifacts[key], ArtifactUpdate(data=stored, description=description))
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.NOT_FOUND:
                    raise
                del self._artifacts[key]  # it was deleted on Prefect's page; the next update creates another one

    def read_steps(self) -> None:
        if not self._unread:
            self._unread = self._list_steps()
        paths, self._unread = self._unread[:FILES_READ], self._unread[FILES_READ:]
        for row in chain.from_iterable(transfer_all(self._read_file, paths)):
            while self._steps and self._steps[-1]["step"] >= row["step"]:
                self._steps.pop()  # this row's attempt resumed before these steps, which undid them
            self._steps.append(row)

    def _list_steps(self) -> list[str]:
        """Paths of the files of the training ledger that are not read yet, in order."""
        paths = self._store.list("metrics/training", start_after=self._newest_entry)
        if self._newest_entry is None:
            parts = counting_parts(self._store, "metrics/training", paths)
        else:  # what upkeep compacted meanwhile was read before
            parts = [part for part in parts_named("metrics/training", paths) if not part.is_compacted]
        entries = [part.path for part in parts if not part.is_compacted]
        self._newest_entry = max(entries, default=self._newest_entry)
        return [part.path for part in parts]

    def _read_file(self, path: str) -> list[dict]:
        """The rows of an entry or a compacted file. There are none if it is damaged or was deleted."""
        with contextlib.suppress(DamagedRecord, NotFound):
            return ledger.read_entry(self._store, path, SHOWN, ledger.NEEDED["metrics/training"]).to_pylist()
        return []


def _plain(text: str) -> str:
    """The text with Markdown's characters escaped: descriptions are Markdown, and a heartbeat is from the store."""
    return re.sub(r"([\\`*_\[\]<>#|~&])", r"\\\1", printable(text))


def _rounded(value):
    return round(value, 3) if isinstance(value, float) else value
