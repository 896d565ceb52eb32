"""A run that an older version began goes on.

`as_older_versions_wrote` turns today's files into those of 4c6d578, the last commit before the code moved into folders:
a run.json without newer settings, a checkpoint named by its step alone, records whose owner is a host name and a pid.

Claims
- today's Searcher and Trainer take such a run to its end, from its checkpoint, with the settings that it was begun with
- every step counts once; the whole run is without fault; SQL and the report read both versions' files

Run: pytest tests/flows/trainer/test_old_run.py
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

import tba.engines
from flows.config import RunConfig, continued, read_recorded
from flows.report.render import render
from flows.search import finish_round
from flows.searcher.policy_feed import load
from flows.searcher.start import start_searcher
from storage import attempts, policies, requests
from storage.queries import query
from storage.store import RunStore
from storage.verify import verify
from tba.transformers_engine import TransformersEngine
from tba.weights import fingerprint, read_weights
from tests.character_model import save_character_model
from tests.storage.helpers import OWNER, start_python

SETTINGS = {
    "searchers": 1,
    "trackers": (),
    "task": {"num_heldout": 4},
    "search": {"prompts_per_round": 4, "samples_per_prompt": 4},
    "sampling": {"prompts_per_batch": 2, "responses_per_prompt": 4, "min_size": 16, "samples_per_insert": 2.0},
    "train": {"steps": 8, "checkpoint_interval": 3, "adam_beta1": 0.9},
}


# The real process; the heartbeat of an old run is from another machine, and would be watched for 15 s.
TRAINER = """
import sys
from flows.trainer import __main__

__main__.TAKEOVER_WATCH_S = 0.1
sys.exit(__main__.main(*sys.argv[1:]))
"""
WAIT_S = 240  # on a busy machine


def train(config: RunConfig, store: RunStore, attempt: int, rounds: range, last_step: int) -> None:
    """Trains to `last_step`, as attempt `attempt`, with a Searcher that commits `rounds`, and is then asked to stop.

    The Trainer is a process of its own: for as long as it loads a model, transformers sets the default type of the
    whole process. The Searcher begins when the Trainer waits for it: a resumed Trainer waits for a shard that is
    committed after its first sync.
    """
    trainer = start_python(TRAINER, store.url, store.run, str(os.getpid()))
    try:
        wait_for(lambda: (at := beat(store)).get("attempt") == attempt and at["state"] == "waiting", trainer)
        searcher, policy = start_searcher(config, "s0", 1), policies.latest_policy(store)
        load(searcher, Path(store.local_path(policy.path)), policy)
        with disable_run_logger():
            for number in rounds:
                assert finish_round(store, searcher, searcher.sample(number)) == "committed"
        wait_for(lambda: beat(store)["step"] == last_step, trainer)
        requests.ask_to_stop(store)
        assert trainer.wait(WAIT_S) == 0
    finally:
        trainer.kill()
    requests.take_back_stop(store)


def beat(store: RunStore) -> dict:
    return attempts.read_heartbeat(store) or {}


def wait_for(condition: Callable[[], object], trainer: subprocess.Popen) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        assert not trainer.poll(), "the Trainer failed: its standard error has the reason"
        time.sleep(0.1)


def as_older_versions_wrote(run: Path) -> None:
    """As if the Trainer had been killed after step 4: its newest checkpoint is of step 3."""
    settings = json.loads((run / "run.json").read_text())
    del settings["sampling"]["differing_rewards_first"], settings["train"]["adam_beta1"]
    (run / "run.json").write_text(json.dumps(settings))
    shutil.rmtree(run / "trainer" / "step=00000004-a0001")
    (run / "trainer" / "step=00000003-a0001").rename(run / "trainer" / "step=00000003")
    for file in (run / "trainer" / "attempt=00000001.json", run / "trainer" / "heartbeat.json"):
        record = json.loads(file.read_text()) | {"owner": asdict(OWNER)}
        file.write_text(json.dumps({name: value for name, value in record.items() if name != "checkpoint"}))
    for file in run.glob("policies/*/policy.json"):
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "final"}))


def faults(store: RunStore) -> list:
    return verify(store, lambda folder: fingerprint(read_weights(folder))).faults


@pytest.fixture
def store(tmp_path, monkeypatch) -> RunStore:
    """An old run, of four steps of eight and one round."""
    monkeypatch.setattr(
        tba.engines, "make_engine", lambda folder, arguments, lora_rank, **limits: TransformersEngine(folder, **limits)
    )
    monkeypatch.chdir(tmp_path)
    store = RunStore((tmp_path / "store").as_uri(), "old")
    model = save_character_model(tmp_path / "model")
    config = RunConfig.model_validate({"run": store.run, "store": store.url, "model": str(model)} | SETTINGS)
    store.create_run(config.recorded())
    train(config, store, attempt=1, rounds=range(1), last_step=4)
    as_older_versions_wrote(tmp_path / "store" / "old")
    return store


@pytest.mark.slow
def test_a_run_of_an_older_version_is_trained_to_its_end(store):
    assert faults(store) == []
    config = continued(RunConfig(run=store.run, store=store.url))
    store.check_config(config.recorded(), read_recorded)
    assert (config.train.steps, config.sampling.prompts_per_batch, config.train.adam_beta1) == (8, 2, 0.9)
    assert not config.sampling.differing_rewards_first
    train(config, store, attempt=2, rounds=range(1, 3), last_step=8)

    assert policies.latest_policy(store).final and policies.latest_policy(store).step == 8
    steps = query(store, "SELECT step, attempt FROM training_steps ORDER BY step").to_pylist()
    assert [(row["step"], row["attempt"]) for row in steps] == [(n, 1 if n <= 3 else 2) for n in range(1, 9)]
    drawn = query(store, "SELECT step, count(*) AS slots FROM batches GROUP BY 1").to_pylist()
    assert sorted(row["step"] for row in drawn) == list(range(1, 9)) and {row["slots"] for row in drawn} == {8}
    assert query(store, "SELECT count(*) FROM trajectories").column(0).to_pylist() == [48]
    assert faults(store) == [] and "attempt" in render(store)
