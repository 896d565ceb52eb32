"""The Trainer's side of a run, for the tests of this folder."""

import contextlib
import os
import time

import pytest

from flows.config import RunConfig
from flows.trainer.alarms import RunAlarms
from flows.trainer.heartbeat import Heartbeat
from flows.trainer.outbox import StoreOutbox
from storage import attempts
from tests.storage.buffer_runs import new_store


@pytest.fixture
def store(tmp_path):
    return new_store(tmp_path)


@pytest.fixture
def alarms(store):
    return RunAlarms()


@pytest.fixture
def heart(store):
    heart = Heartbeat(store, RunConfig(), attempt=1, parent=os.getppid())
    while not store.exists(attempts.HEARTBEAT):  # the first beat of its thread; later it would replace a test's own
        time.sleep(0.01)
    yield heart
    heart.end("finished")


@pytest.fixture
def outbox(store, heart, alarms, tmp_path):
    template = tmp_path / "template"
    template.mkdir()
    (template / "config.json").write_text("{}")
    with contextlib.closing(StoreOutbox(store, RunConfig(), 1, template, heart, alarms)) as outbox:
        yield outbox
