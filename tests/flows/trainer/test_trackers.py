"""What trackers are given, by their own readers.

Claims
- docs/metrics.md has exactly the metrics that TensorBoard receives, each with the column that it comes from
- every measure of the training ledger is among them
- a resumed run's steps are in TensorBoard once, with the values of the life that counts
- MLflow and Weights & Biases are one setting away and get the same metrics, a run for each attempt of the Trainer
- a tracker that fails is left out and told of once; the others go on
- one that is not installed is refused before a run begins

Run: pytest tests/flows/trainer/test_trackers.py
"""

import logging
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from flows.config import RunConfig
from flows.trainer import trackers
from storage import attempts
from storage.schema import TRAINING_STEP
from storage.store import RunStore
from tests.storage.helpers import OWNER, make_batch, make_training_step

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


@pytest.fixture
def store(tmp_path, monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "")  # so that they are put back
        monkeypatch.delenv(name)
    return RunStore(tmp_path.as_uri(), "run")


def log(store: RunStore, resumed_from: int, steps: range, *names: str, reward: float = 0.25) -> trackers.Trackers:
    """One attempt of the Trainer, as far as trackers see it."""
    attempt = attempts.start_attempt(store, resumed_from, OWNER, previous=attempts.latest_attempt(store))
    opened = trackers.Trackers(store, RunConfig(run="run", trackers=names), attempt)
    for step in steps:
        row = make_training_step(attempt, step) | {"reward_mean": reward, "reward_recent_mean": reward}
        opened.log(
            step, {name: value for name, value in row.items() if name not in ("attempt", "step")}, make_batch([0, 0])
        )
    opened.finish()
    return opened


def in_tensorboard(store: RunStore) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(store.local_path("tensorboard")), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_the_page_has_exactly_the_metrics_that_are_recorded(store):
    log(store, 0, range(1, 2), "tensorboard")
    documented = dict(re.findall(r"^\| `(\S+)` \| (?:`(\w+)`)? ?\|", PAGE, re.MULTILINE))
    assert documented.keys() == in_tensorboard(store).keys()
    columns = {name: column for name, column in documented.items() if column}
    assert set(columns.values()) == set(TRAINING_STEP.names) - trackers.NOT_MEASURED
    assert {trackers.NAMES.get(column, column): column for column in columns.values()} == columns


def test_a_resumed_run_has_each_step_once_with_what_counts(store):
    log(store, 0, range(1, 6), "tensorboard", reward=0.25)
    log(store, 3, range(4, 7), "tensorboard", reward=0.75)
    expected = [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.75), (5, 0.75), (6, 0.75)]
    assert in_tensorboard(store)["reward"] == expected


def test_what_is_computed_from_the_batch(store):
    batch = pa.table({"prompt_index": [0, 0, 1, 1], "reward": [0.0, 1.0, 1.0, 1.0]})
    row = make_training_step(1, 1) | {"num_response_tokens": 30, "num_unique": 3, "reward_recent_mean": None}
    measured = trackers.metrics(row, batch)
    assert measured["reward_std"] == pytest.approx(math.sqrt(3) / 4)
    assert measured["frac_reward_zero_std"] == 0.5
    assert measured["completions/mean_length"] == 10
    assert "rewards/recent" not in measured, "a batch without a recent trajectory has none"


def test_mlflow_gets_the_same_in_a_run_for_each_life(store):
    import mlflow

    log(store, 0, range(1, 4), "tensorboard", "mlflow")
    log(store, 2, range(3, 4), "mlflow", reward=0.75)
    client = mlflow.MlflowClient()
    (experiment,) = [found for found in client.search_experiments() if found.name == "run"]
    first, second = sorted(client.search_runs([experiment.experiment_id]), key=lambda run: run.info.run_name)
    assert (first.info.run_name, second.info.run_name) == ("run-1", "run-2")
    assert [(point.step, point.value) for point in client.get_metric_history(first.info.run_id, "reward")] == [
        (1, 0.25), (2, 0.25), (3, 0.25),
    ]  # fmt: skip
    assert second.data.metrics["reward"] == 0.75
    assert first.data.metrics.keys() == in_tensorboard(store).keys()
    assert first.data.params["seed"] == "0"


def test_wandb_gets_the_same_in_a_run_for_each_life_of_one_group(store, monkeypatch):
    """By Accelerate's tracker, which is given a stand-in: the real one wants an account or a service of its own."""
    begun, logged, config = [], [], {}
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append("end"))
    stand_in = SimpleNamespace(
        init=lambda **given: begun.append(given) or run,
        config=SimpleNamespace(update=lambda values, allow_val_change: config.update(values)),
    )
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    log(store, 0, range(1, 3), "wandb")
    log(store, 1, range(2, 3), "wandb", "tensorboard")
    assert [(given["project"], given["group"], given["name"]) for given in begun] == [
        ("tba", "run", "run-1"), ("tba", "run", "run-2"),
    ]  # fmt: skip
    assert [entry if entry == "end" else entry[0] for entry in logged] == [1, 2, "end", 2, "end"]
    assert logged[0][1].keys() == in_tensorboard(store).keys()
    assert config["seed"] == 0


def test_a_tracker_that_fails_is_left_out_once(store, monkeypatch, caplog):
    def fail(self, values, step=None):
        raise ConnectionError("no network")

    monkeypatch.setattr("accelerate.tracking.MLflowTracker.log", fail)
    with caplog.at_level(logging.WARNING, logger="tba.trackers"):
        log(store, 0, range(1, 4), "mlflow", "tensorboard")
    assert [record.message for record in caplog.records] == [
        "tracker mlflow failed and gets no more metrics; training goes on: ConnectionError('no network')"
    ]
    assert len(in_tensorboard(store)["reward"]) == 3


def test_a_link_out_of_the_run_gets_no_metrics(store, tmp_path, caplog):
    """Another writer of the store may have put it there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = store.local_path("tensorboard")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(elsewhere)
    log(store, 0, range(1, 3), "tensorboard")
    assert list(elsewhere.iterdir()) == [] and "by a symbolic link out of" in caplog.text


def test_one_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="got 'wandb', but wandb is not installed: pip install wandb"):
        trackers.check_trackers(("wandb",))


def test_trackers_are_one_word_on_the_command_line():
    assert RunConfig(trackers="tensorboard,mlflow").trackers == ("tensorboard", "mlflow")
    assert RunConfig(trackers="").trackers == ()
    with pytest.raises(ValueError, match="'tensorboard', 'wandb' or 'mlflow'"):
        RunConfig(trackers="excel")
