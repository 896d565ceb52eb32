"""Trackers: logs each training step's metrics to TensorBoard, Weights & Biases or MLflow.

Accelerate's trackers write them. A metric that TRL measures too has TRL's name; docs/metrics.md explains each. The
outbox's thread writes them, so the Trainer does not wait. A tracker that fails is dropped; the run goes on.

A resumed Trainer repeats some steps. TensorBoard purges the earlier ones (purge_step). The other trackers cannot: each
attempt of the Trainer gets a tracker run of its own, grouped by the run's name.
"""

import contextlib
import importlib.util
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from flows.config import RunConfig
from infra.machine import local_folder
from storage import attempts
from storage.paths import inside
from storage.store import RunStore

# Trackers' names of the training ledger's columns; columns that are not listed keep their names.
NAMES = {
    "reward_mean": "reward",
    "fresh_reward_mean": "rewards/fresh",
    "fresh_kl": "fresh/kl",
    "fresh_entropy": "fresh/entropy",
    "fresh_cut_share": "fresh/cut_share",
    "fresh_staleness": "fresh/staleness",
    "reward_recent_mean": "rewards/recent",
    "gradient_norm": "grad_norm",
    "step_s": "step_time",
    "wait_s": "wait_time",
    "publish_stall_s": "publish_time",
    "log_z_mean": "log_z",
    "residual_abs_mean": "residual_abs",
    "logprob_gap_mean": "logprob_gap",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "num_trajectories": "buffer/trajectories",
    "num_prompts": "buffer/prompts",
    "num_inserted": "buffer/inserted",
    "num_too_old": "buffer/too_old",
    "samples_per_insert": "buffer/samples_per_insert",
    "searchers_silent_s": "buffer/searchers_silent_s",
    "num_response_tokens": "completions/num_tokens",
    "num_unique": "completions/num_unique",
}
NOT_MEASURED = {"attempt", "step", "started_at", "ended_at"}
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}

log = logging.getLogger("tba.trackers")


def check_trackers(names: tuple[str, ...]) -> None:
    """Raises: ValueError: the package of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"trackers: got {name!r}, but {PACKAGES[name]} is not installed: pip install {PACKAGES[name]}"
            )


def metrics(row: Mapping, batch: pa.Table) -> dict[str, float]:
    """A step's metrics by the trackers' names, from its row of the training ledger and its batch."""
    measured = {
        NAMES.get(name, name): float(value)
        for name, value in row.items()
        if name not in NOT_MEASURED and value is not None
    }
    rewards = np.asarray(batch["reward"], dtype=float)
    of_prompts = [
        rewards[np.asarray(batch["prompt_index"]) == prompt] for prompt in set(batch["prompt_index"].to_pylist())
    ]
    return measured | {
        "reward_std": float(rewards.std()),
        "frac_reward_zero_std": float(np.mean([of_prompt.std() == 0 for of_prompt in of_prompts])),
        "completions/mean_length": row["num_response_tokens"] / max(1, row["num_unique"]),
    }


class Trackers:
    """The trackers of one attempt of the Trainer. The first step opens them, on the thread that logs it."""

    def __init__(self, store: RunStore, config: RunConfig, attempt: int) -> None:
        self._store, self._config, self._attempt = store, config, attempt
        self._open: dict[str, object] | None = None

    def log(self, step: int, row: Mapping, batch: pa.Table) -> None:
        if self._open is None:
            self._open = {}
            for name in self._config.trackers:
                self._try(name, lambda name=name: self._open.update({name: self._start(name)}))
        values = metrics(row, batch)
        for name, tracker in list(self._open.items()):
            self._try(name, lambda tracker=tracker: tracker.log(values, step=step))

    def finish(self) -> None:
        for name, tracker in list((self._open or {}).items()):
            self._try(name, tracker.finish)

    def _try(self, name: str, action) -> None:
        try:
            action()
        except Exception as error:  # third-party code, which often needs a network: its failure does not stop training
            log.warning("tracker %s failed and gets no more metrics; training goes on: %r", name, error)
            if tracker := self._open.pop(name, None):
                with contextlib.suppress(Exception):
                    tracker.finish()

    def _start(self, name: str):
        from accelerate import PartialState, tracking

        PartialState()  # the loggers of Accelerate's trackers need this state
        folder, run = tracking_folder(self._store), self._config.run
        place = inside(folder, name)  # a link of another writer of the store may lead out of it
        if name == "tensorboard":
            begun = attempts.read_attempt(self._store, self._attempt).resumed_from
            tracker = tracking.TensorBoardTracker("", place, purge_step=begun + 1)
        elif name == "wandb":
            tracker = tracking.WandBTracker("tba", name=f"{run}-{self._attempt}", group=run, dir=folder)
        else:
            if "MLFLOW_TRACKING_URI" not in os.environ:  # MLflow's own default is a database in the working folder
                os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
                importlib.import_module("mlflow").set_tracking_uri(place.as_uri())
            tracker = tracking.MLflowTracker(run, run_name=f"{run}-{self._attempt}")
        tracker.start()
        if name != "tensorboard":  # TensorBoard would show the settings as a second run
            tracker.store_init_configuration(self._config.recorded())
        return tracker


def tracking_folder(store: RunStore) -> Path:
    """The run's folder if the store is on this machine; else the folder with the run's name in .tba/ here."""
    folder = store.local_path("") or local_folder().parent / store.run
    folder.mkdir(parents=True, exist_ok=True)
    return folder
