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
from flows.trainer.meeting import KEY_VARIABLE
from storage import attempts
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


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_flow_that_was_superseded_knows_it(local_store, monkeypatch, is_taken_over):
    began, lost, over = threading.Event(), threading.Event(), threading.Event()
    started = []

    def end() -> None:
        if is_taken_over:
            attempts.start_attempt(local_store, 0, OWNER)

    monkeypatch.setattr(train, "POLL_S", 0.01)
    monkeypatch.setattr(train, "end_other_flow_runs", lambda config: None)
    monkeypatch.setenv(KEY_VARIABLE, "of an earlier attempt")
    monkeypatch.setattr(train.flow_runs, "start_machines", lambda config, attempt, key: started.append((attempt, key)))
    monkeypatch.setattr(train.subprocess, "Popen", lambda command: Trainer(local_store, began, end))
    with pytest.raises(RuntimeError, match="ended with status 1"):
        train.train_policy.fn(RunConfig(run=local_store.run, store=local_store.url), began, lost, over)
    assert (began.is_set(), lost.is_set()) == (not is_taken_over, is_taken_over)
    assert started == [(1, os.environ[KEY_VARIABLE])], "both sides of the Trainer's machines have the same key"
