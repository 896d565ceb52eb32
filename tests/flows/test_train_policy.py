"""The task of tba/train that runs the Trainer's process, with a stand-in for the process.

- while the Trainer owns the run, `owns_run` is set; once another flow's Trainer has taken the run over, `superseded` is
  set, so that the flow leaves the Searchers, which the other flow has adopted
- the Trainer and the flow runs of its further machines get one key, a new one for each attempt
- a flow that gives its Searchers up says why in the heartbeat, unless another flow's Trainer writes it; what the
  Trainer said of itself stays
- the processes of a further machine share its cores, and get the environment of tensors, as the first machine's do
- a Trainer that fails is started again, unless it fails three times without a checkpoint between; one that another
  flow's Trainer keeps out is not
- the flow goes on while Prefect's server or the store gives no answer or a wrong one

Run: pytest tests/flows/test_train_policy.py
"""

import logging
import os
import threading
from dataclasses import asdict
from types import SimpleNamespace

import httpx
import pytest
from prefect.exceptions import ObjectNotFound
from prefect.states import Running

from flows import ranks, train
from flows.config import RunConfig
from flows.run.watcher import Watcher
from flows.trainer import ALREADY_TRAINING
from flows.trainer.meeting import KEY_VARIABLE
from infra.machine import cpu_threads
from infra.memory import tensor_environment
from storage import attempts
from storage.errors import AlreadyTraining, RunConfigMismatch, StoreUnreachable
from storage.process_identity import Identity
from storage.status import run_status
from storage.store import RunStore
from tests.storage.helpers import OWNER


class Trainer:
    """The process of a Trainer that begins an attempt. `end` is called before it ends with status 1."""

    pid = os.getpid()

    def __init__(self, store: RunStore, owns_run: threading.Event, end) -> None:
        attempts.start_attempt(store, 0, Identity.current())
        self._owns_run, self._end, self._status = owns_run, end, None

    def poll(self) -> int | None:
        if self._owns_run.is_set() and self._status is None:
            self._end()
            self._status = 1
        return self._status

    def terminate(self) -> None:
        pass

    def wait(self, timeout: float) -> int | None:
        return self._status


class Refused:
    """The process of a Trainer that found another one alive."""

    pid = os.getpid()

    def poll(self) -> int:
        return ALREADY_TRAINING

    def terminate(self) -> None:
        pass

    def wait(self, timeout: float) -> int:
        return ALREADY_TRAINING


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_superseded_flow_leaves_the_run_and_does_not_restart_its_trainer(local_store, monkeypatch, is_taken_over):
    owns_run, superseded, ending = threading.Event(), threading.Event(), threading.Event()
    started = []

    def end() -> None:
        keys.append(os.environ[KEY_VARIABLE])
        if is_taken_over:
            attempts.start_attempt(local_store, 0, OWNER)

    monkeypatch.setattr(train, "POLL_S", 0.01)
    monkeypatch.setattr(train, "end_others", lambda config, attempt: None)
    monkeypatch.setenv(KEY_VARIABLE, "of an earlier attempt")
    monkeypatch.setattr(train, "start_machines", lambda config, attempt, key: started.append((attempt, key)))
    keys = []
    monkeypatch.setattr(train.subprocess, "Popen", lambda command, env: Trainer(local_store, owns_run, end))
    error = AlreadyTraining if is_taken_over else RuntimeError
    with pytest.raises(error):
        train.run_trainer(RunConfig(run=local_store.run, store=local_store.url), owns_run, superseded, ending)
    assert (owns_run.is_set(), superseded.is_set()) == (not is_taken_over, is_taken_over)
    monkeypatch.setattr(train.subprocess, "Popen", lambda command, env: Refused())
    with pytest.raises(AlreadyTraining):  # it is not started again: another Trainer keeps it out
        train.train_policy.fn(RunConfig(run=local_store.run, store=local_store.url), owns_run, superseded, ending)
    assert superseded.is_set()
    assert started == [(1, keys[0])], "both sides of the Trainer's machines have the same key"


class Failed(Refused):
    """The process of a Trainer that ended with status 1."""

    def poll(self) -> int:
        return 1

    def wait(self, timeout: float) -> int:
        return 1


def test_a_trainer_that_fails_is_started_again_while_it_makes_progress(local_store, monkeypatch, caplog):
    """Failures after 0, 20 and 20 steps, then none after 40: the third one without a checkpoint between is the last."""
    steps, started = [0, 0, 20, 20, 40, 40, 40, 60], []

    def start(command: list[str], env: dict[str, str]) -> Failed:
        assert env["GLIBC_TUNABLES"] == tensor_environment()["GLIBC_TUNABLES"] and env["PATH"] == os.environ["PATH"]
        started.append(steps[len(started)])
        return Failed()

    monkeypatch.setattr(train, "RESTART_S", 0)
    monkeypatch.setattr(train.subprocess, "Popen", start)
    monkeypatch.setattr(train, "get_run_logger", lambda: logging.getLogger("test"))
    newest = lambda store: [SimpleNamespace(step=step) for step in started if step]  # noqa: E731
    monkeypatch.setattr(train.checkpoints, "list_checkpoints", newest)
    events = [threading.Event() for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"the Trainer of run .* ended with status 1"):
        train.train_policy.fn(RunConfig(run=local_store.run, store=local_store.url), *events)
    assert started == steps[:7]


@pytest.mark.parametrize(
    ("state", "message", "seen"),
    [
        ("stopped", "", "failed: searcher s0 failed 4 times"),
        ("failed", "loss is NaN", "failed: loss is NaN"),
        ("finished", "", "trained, not evaluated; the same `tba train` evaluates it: searcher s0 failed 4 times"),
    ],
)
def test_the_reason_why_a_flow_ended_its_trainer_is_seen(local_store, state, message, seen):
    attempts.start_attempt(local_store, 0, Identity.current())
    attempts.write_heartbeat(local_store, {"state": state, "step": 3, "message": message})
    train.tell_failure(local_store, RuntimeError("searcher s0 failed 4 times"))
    with Watcher(local_store) as watcher:
        assert watcher.look().stage == seen


def test_the_reason_why_a_run_failed_before_its_first_trainer_is_seen(local_store):
    train.tell_failure(local_store, ValueError("warm_start: the sources have 160 trajectories"))
    with Watcher(local_store) as watcher:
        assert watcher.look().stage == "failed: warm_start: the sources have 160 trajectories"
    status = run_status(local_store)
    assert (status.state, status.step, status.message) == ("failed", 0, "warm_start: the sources have 160 trajectories")


def test_a_store_that_is_away_hides_neither_the_trainer_nor_its_failure(local_store, monkeypatch):
    """Otherwise the error would end the flow in place of a restart of the Trainer."""

    def away(*_: object) -> None:
        raise StoreUnreachable("no answer")

    monkeypatch.setattr(attempts, "newest_attempt", away)
    monkeypatch.setattr(attempts, "read_heartbeat", away)
    assert train.attempt_of(local_store, os.getpid()) is None
    assert "ended without a message" in train.failure_message(local_store, os.getpid())


def test_the_reason_of_a_failure_is_that_of_the_process_that_failed(local_store):
    attempts.start_attempt(local_store, 0, Identity.current())
    beat = {"step": 3, "message": "the disk is full", "owner": asdict(Identity.current())}
    attempts.write_heartbeat(local_store, beat | {"state": "failed"})
    assert train.failure_message(local_store, os.getpid()) == "the disk is full"
    assert "ended without a message" in train.failure_message(local_store, os.getpid() + 1)  # one before it
    attempts.write_heartbeat(local_store, beat | {"state": "waiting", "message": "64 of 192 have come in"})
    assert "ended without a message" in train.failure_message(local_store, os.getpid())  # it was killed


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_flow_whose_searchers_fail_too_often_says_so_once_its_trainer_has_ended(
    local_store, monkeypatch, is_taken_over
):
    """Not over the heartbeat of another flow's Trainer."""
    config, events = RunConfig(run=local_store.run, store=local_store.url), []

    def submit(config: RunConfig, owns_run: threading.Event, superseded: threading.Event, ending: threading.Event):
        attempts.start_attempt(local_store, 0, Identity.current())
        superseded.set() if is_taken_over else None

        def wait() -> None:
            assert ending.is_set()
            if not events:
                attempts.write_heartbeat(local_store, {"state": "stopped", "step": 3})
            events.append("trainer ended")

        return SimpleNamespace(state=Running(), wait=wait)

    def fail(*_: object) -> None:
        raise RuntimeError("searcher s0 failed 4 times")

    monkeypatch.setattr(train, "train_policy", SimpleNamespace(submit=submit))
    for name, stand_in in {
        "continued": lambda config: config,
        "prepare_task": lambda *_: local_store,
        "copy_sources_task": lambda *_: None,
        "Page": lambda *_: None,
        "look_after": fail,
        "end_searchers": lambda searchers: events.append("searchers ended"),
    }.items():
        monkeypatch.setattr(train, name, stand_in)
    with pytest.raises(RuntimeError, match="failed 4 times"):
        train.tba.fn(config)
    beat = attempts.read_heartbeat(local_store)
    expected = ("stopped", None) if is_taken_over else ("failed", "searcher s0 failed 4 times")
    assert (beat["state"], beat.get("message")) == expected
    assert ("searchers ended" in events) is not is_taken_over


def test_a_further_machines_processes_get_the_environment_of_the_first_ones(local_store, monkeypatch):
    local_store.create_run(RunConfig(run=local_store.run, store=local_store.url).recorded())
    started = []
    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.setattr("tba.models.model_folder", lambda name: name)
    monkeypatch.setattr("tba.lora.base_fingerprint", lambda folder: "a1")
    follow = lambda store, config, load, *_: load() and not started.append(dict(os.environ))  # noqa: E731
    monkeypatch.setattr("flows.trainer.ranks.follow", follow)
    expected = {"OMP_NUM_THREADS": str(cpu_threads(2)), **tensor_environment()}
    ranks.ranks.fn(local_store.url, local_store.run, 1, "key", {"processes": 2})
    assert {name: started[0].get(name) for name in expected} == expected
    monkeypatch.setattr("tba.lora.base_fingerprint", lambda folder: "b2")
    with pytest.raises(RunConfigMismatch, match="have fingerprint b2"):
        ranks.ranks.fn(local_store.url, local_store.run, 1, "key", {"processes": 2})
    assert len(started) == 1


def test_a_further_machine_with_too_few_gpus_does_not_join(local_store, monkeypatch, caplog):
    local_store.create_run(RunConfig(run=local_store.run, store=local_store.url).recorded())
    monkeypatch.setattr(ranks, "num_gpus", lambda: 1)
    monkeypatch.setattr("flows.trainer.ranks.follow", lambda *_: pytest.fail("it joined"))
    monkeypatch.setattr(ranks, "get_run_logger", lambda: logging.getLogger("test"))
    ranks.ranks.fn(local_store.url, local_store.run, 1, "key", {"processes": 2})
    assert "this machine has 1 GPUs, and train.processes is 2: it does not join" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("the server is away"),
        ValueError("another program's page in place of an answer"),
        StoreUnreachable("the store is away"),
        ObjectNotFound(RuntimeError("the deployment was deleted")),
    ],
)
def test_training_goes_on_while_server_or_store_is_away(monkeypatch, error, caplog):
    def fail() -> None:
        raise error

    monkeypatch.setattr(train, "end_if_suspended", lambda: None)
    monkeypatch.setattr(train, "get_run_logger", lambda: logging.getLogger("test"))
    searchers = SimpleNamespace(keep_up=fail, is_away=False)
    for _ in range(3):
        train.look_after(searchers, owns_run=True)
    assert searchers.is_away and len(caplog.records) == 1, "one warning"
    assert str(getattr(error, "http_exc", error)) in caplog.text
    searchers.keep_up = lambda: None
    train.look_after(searchers, owns_run=True)
    assert not searchers.is_away


def test_a_flow_run_that_was_deleted_goes_on_training(monkeypatch):
    def deleted() -> None:
        raise ObjectNotFound(RuntimeError("404"))

    monkeypatch.setattr(train, "end_if_suspended", deleted)
    looked = []
    train.look_after(SimpleNamespace(keep_up=lambda: looked.append(1), is_away=False), owns_run=True)
    assert looked == [1]
