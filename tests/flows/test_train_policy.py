"""The task of tba/train that runs the Trainer's process, with a stand-in for the process.

- while the Trainer owns the run, `began` is set; once another flow's Trainer has taken the run over, `lost` is set, so
  that the flow leaves the Searchers, which the other flow has adopted
- the Trainer and the flow runs of its further machines get one key, a new one for each attempt

Run: pytest tests/flows/test_train_policy.py
"""

import os
import threading

import pytest

from flows import train
from flows.config import RunConfig
from flows.trainer import ALREADY_TRAINING
from flows.trainer.meeting import KEY_VARIABLE
from storage import attempts
from storage.errors import AlreadyTraining
from storage.store import RunStore
from tests.storage.helpers import OWNER


class Trainer:
    """The process of a Trainer that begins an attempt. `end` is called before it ends with status 1."""

    pid = os.getpid()

    def __init__(self, store: RunStore, began: threading.Event, end) -> None:
        attempts.start_attempt(store, 0, attempts.this_process())
        self._began, self._end, self._status = began, end, None

    def poll(self) -> int | None:
        if self._began.is_set() and self._status is None:
            self._end()
            self._status = 1
        return self._status

    def terminate(self) -> None:
        pass

    def wait(self, timeout: float) -> int | None:
        return self._status


class Refused:
    """The process of a Trainer that found another one alive."""

    def poll(self) -> int:
        return ALREADY_TRAINING

    def terminate(self) -> None:
        pass

    def wait(self, timeout: float) -> int:
        return ALREADY_TRAINING


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_flow_that_was_superseded_knows_it(local_store, monkeypatch, is_taken_over):
    began, lost, over = threading.Event(), threading.Event(), threading.Event()
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
    monkeypatch.setattr(train.subprocess, "Popen", lambda command: Trainer(local_store, began, end))
    error = AlreadyTraining if is_taken_over else RuntimeError  # Prefect does not retry after the first
    with pytest.raises(error):
        train.train_policy.fn(RunConfig(run=local_store.run, store=local_store.url), began, lost, over)
    assert (began.is_set(), lost.is_set()) == (not is_taken_over, is_taken_over)
    with pytest.raises(AlreadyTraining):  # a retry that another Trainer keeps out
        monkeypatch.setattr(train.subprocess, "Popen", lambda command: Refused())
        train.train_policy.fn(RunConfig(run=local_store.run, store=local_store.url), began, lost, over)
    assert lost.is_set()
    assert started == [(1, keys[0])], "both sides of the Trainer's machines have the same key"
