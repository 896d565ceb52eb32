"""A Searcher's watch over the Trainer of another machine, without a server.

- a Trainer elsewhere that is silent has its run resumed
- one on this machine is left to its flow; one that stopped, finished or failed is left, too
- a store that is away, or slow, is no silence
- a server that does not answer is asked again
- many Searchers ask one after the other

Run: pytest tests/flows/run/test_trainer_watch.py
"""

import contextlib
import logging
import random
import time
from collections import Counter

import httpx
import pytest
from prefect.exceptions import ObjectNotFound

from flows.config import RunConfig
from flows.run import takeover, trainer_watch
from flows.run.trainer_watch import TrainerWatch
from storage import attempts
from storage.errors import StoreUnreachable
from storage.process_identity import Identity
from storage.store import RunStore
from tests.storage.helpers import OWNER

ELSEWHERE, LOG = OWNER, logging.getLogger("test")


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))  # a pulse confirms
    return now


@pytest.fixture
def watch(local_store, clock, monkeypatch):
    """A watch that looks when it is told, and the last heartbeats after which it had the run resumed."""
    resumed = []
    monkeypatch.setattr(trainer_watch, "LOOK_S", 3600)
    monkeypatch.setattr(trainer_watch, "get_client", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(takeover, "resume_elsewhere", lambda client, config, beat: resumed.append(beat))
    monkeypatch.setattr(random, "uniform", lambda low, high: low)
    config = RunConfig(run=local_store.run, store=local_store.url)
    with contextlib.closing(TrainerWatch(local_store, config, LOG)) as watch:
        watch.resumed = resumed
        yield watch


def beat(store: RunStore, number: int, state: str = "training") -> None:
    attempts.write_heartbeat(store, {"state": state, "step": number})


def look(watch: TrainerWatch, clock: list[float], *seconds: float) -> int:
    """Looks at these times; returns how often the run was resumed so far."""
    for each in seconds:
        clock[0] = each
        watch.look()
    return len(watch.resumed)


def test_a_silent_trainer_elsewhere_has_its_run_resumed(watch, clock, local_store):
    """Prefect is asked every ten seconds; flows/run/takeover.py sees to it that there is one flow run."""
    attempts.start_attempt(local_store, 0, ELSEWHERE)
    beat(local_store, 1)
    assert look(watch, clock, 1, 10, 16) == 0
    assert look(watch, clock, 17, 19, 26) == 1
    assert look(watch, clock, 28) == 2
    beat(local_store, 2)  # it was cut off, and is back
    assert look(watch, clock, 60, 70) == 2
    assert look(watch, clock, 76) == 3
    assert watch.resumed[0] == watch.resumed[1] != watch.resumed[2]


def test_the_last_heartbeat_of_a_trainer_that_has_ended_is_no_silence(local_store, watch, clock):
    """`tba train` resumes a run: until the new Trainer begins, the heartbeat is the old one's."""
    attempts.start_attempt(local_store, 0, ELSEWHERE)
    beat(local_store, 1)
    watch._ended_with = attempts.raw_heartbeat(local_store)
    assert look(watch, clock, 1, 100, 1000) == 0
    beat(local_store, 2)
    assert look(watch, clock, 1001, 1020) == 1


@pytest.mark.parametrize("state", ["stopped", "finished", "failed"])
def test_a_trainer_that_ended_by_itself_is_left(watch, clock, local_store, state):
    attempts.start_attempt(local_store, 0, ELSEWHERE)
    beat(local_store, 1, state)
    assert look(watch, clock, 1, 100, 1000) == 0


def test_a_trainer_on_this_machine_is_left_to_its_flow(watch, clock, local_store):
    attempts.start_attempt(local_store, 0, Identity.current())
    beat(local_store, 1)
    assert look(watch, clock, 1, 100, 1000) == 0


def test_a_run_without_a_trainer_waits_for_its_first(watch, clock):
    assert look(watch, clock, 1, 100, 1000) == 0


def test_a_slow_store_is_no_silence(local_store, clock, monkeypatch):
    beat(local_store, 1)
    pulse, get = attempts.pulse(local_store), local_store.get

    def slowly(path: str) -> bytes:
        clock[0] += 60
        return get(path)

    monkeypatch.setattr(local_store, "get", slowly)
    for _ in range(5):
        clock[0] += 1
        assert not pulse.is_silent(10)
    clock[0] += 7
    assert pulse.is_silent(10)


def test_the_thread_goes_on_after_a_store_and_a_server_were_away(local_store, monkeypatch):
    attempts.start_attempt(local_store, 0, ELSEWHERE)
    beat(local_store, 1)
    faults = [StoreUnreachable("away"), httpx.ConnectError("away"), ObjectNotFound(None), ValueError("a page of HTML")]
    resumed = []

    def resume(client, config, last):
        if faults:
            raise faults.pop()
        resumed.append(last)

    monkeypatch.setattr(trainer_watch, "LOOK_S", 0.02)
    monkeypatch.setattr(trainer_watch, "SILENT_S", 0.2)
    monkeypatch.setattr(trainer_watch, "ASK_S", 0.0)
    monkeypatch.setattr(trainer_watch, "get_client", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(takeover, "resume_elsewhere", resume)
    config = RunConfig(run=local_store.run, store=local_store.url)
    with contextlib.closing(TrainerWatch(local_store, config, LOG)):
        deadline = time.monotonic() + 60
        while not resumed:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert not faults


def test_many_searchers_ask_one_after_the_other(local_store, clock, monkeypatch):
    """The first of them asks as soon as one alone would."""
    asked, pulse = Counter(), attempts.pulse(local_store)  # asked: by second
    monkeypatch.setattr(trainer_watch, "LOOK_S", 3600)
    monkeypatch.setattr(trainer_watch, "get_client", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(takeover, "resume_elsewhere", lambda *_: asked.update([clock[0]]))
    monkeypatch.setattr(attempts, "pulse", lambda store: pulse)
    attempts.start_attempt(local_store, 0, ELSEWHERE)
    beat(local_store, 1)
    config = RunConfig(run=local_store.run, store=local_store.url, searchers=200)
    random.seed(0)
    with contextlib.ExitStack() as stack:
        watches = [stack.enter_context(contextlib.closing(TrainerWatch(local_store, config, LOG))) for _ in range(200)]
        for second in range(80):
            clock[0] = second
            for watch in watches:
                watch.look()
    assert min(asked) <= trainer_watch.SILENT_S + 2
    assert max(asked.values()) <= 3 * trainer_watch.ASKS_PER_S
    assert sum(asked[second] for second in range(40, 60)) == pytest.approx(200, abs=20)
