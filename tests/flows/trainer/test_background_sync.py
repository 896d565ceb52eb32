"""Syncs beside training (flows/trainer/background_sync.py), over a store whose answers are delayed.

Claims
- a Trainer that trains does not wait for a store that does not answer; what it has is drawn some steps later, none lost
- a Trainer that waits for experience draws what the sync brings at once, also if it began to wait while it is recorded
- a draw sees a sync from the step on that its record names: every draw can be repeated from the store
- no sync is admitted while a draw is in progress
- what the thread raises stops the Trainer, in training and while it waits; Superseded, too

Run: pytest tests/flows/trainer/test_background_sync.py
"""

import math
import random
import threading
import time
from contextlib import closing, suppress

import pytest

from flows.trainer import experience as module
from flows.trainer.alarms import RunAlarms
from flows.trainer.experience import StoredExperience
from storage import attempts, ledger
from storage.errors import StoreUnreachable, Superseded
from storage.new_shards import new_shards
from tests.futures import wait_until
from tests.storage.buffer_runs import commit, distinct, new_buffer, new_store
from tests.storage.helpers import OWNER


class SlowStore:
    """Delays or holds some of a store's operations, by name."""

    def __init__(self, store, monkeypatch):
        self.seconds: dict[str, float] = {}
        self.held: dict[str, threading.Event] = {}  # until the event is set
        for name in ("files", "get", "put_new", "exists"):
            monkeypatch.setattr(store._files, name, self._delayed(name, getattr(store._files, name)))

    def _delayed(self, name, operation):
        def delayed(*given):
            time.sleep(self.seconds.get(name, 0.0))
            assert name not in self.held or self.held[name].wait(60)
            return operation(*given)

        return delayed

    def hold(self, name) -> threading.Event:
        self.held = {name: threading.Event()}
        return self.held[name]


@pytest.fixture
def store(tmp_path):
    return new_store(tmp_path)


@pytest.fixture
def slow(store, monkeypatch):
    return SlowStore(store, monkeypatch)


@pytest.fixture
def experience(store):
    buffer = new_buffer(store, prompts_per_batch=2, responses_per_prompt=4)
    experience = StoredExperience(store, buffer, 1, RunAlarms())
    yield experience
    experience.close()


def train_one_step(store, experience) -> None:
    """The first step, and then another shard that is new."""
    commit(store, "s0", 0, distinct("ab", 4))
    experience.sync(1)
    experience.draw(1)
    commit(store, "s0", 1, distinct("cd", 4))


def test_training_goes_on_while_the_store_does_not_answer(store, slow, experience):
    train_one_step(store, experience)
    answers, num_inserted = slow.hold("exists"), experience.buffer.num_inserted
    experience.sync(2)
    assert experience.draw(2).facts["num_prompts"] == 2
    answers.set()
    wait_until(lambda: experience.buffer.num_inserted > num_inserted)
    assert experience.draw(3).facts["num_prompts"] == 4
    assert ledger.effective_syncs(store, 9)[-1]["step"] == 3


def test_no_draw_waits_for_a_slow_record(store, slow, experience):
    slow.seconds = {"put_new": 0.1}  # so long that the next record names a later step
    train_one_step(store, experience)
    answers = slow.hold("put_new")
    experience.sync(2)
    wait_until(lambda: experience._background._admitted_at == 3)  # it is being recorded
    assert experience.draw(2).facts["num_prompts"] == 2
    answers.set()
    experience.sync(3)
    assert experience.draw(3).facts["num_prompts"] == 4  # it is the step that the record names
    assert ledger.effective_syncs(store, 9)[-1]["step"] == 3


def test_a_step_that_cannot_draw_otherwise_draws_what_is_being_recorded(store, slow):
    buffer = new_buffer(store, prompts_per_batch=2, responses_per_prompt=4, samples_per_insert=1)
    with closing(StoredExperience(store, buffer, 1, RunAlarms())) as experience:
        slow.seconds = {"put_new": 0.1}
        train_one_step(store, experience)
        experience.sync(2)
        wait_until(lambda: experience._background._is_busy)
        with suppress(module.TooEarly):
            experience.draw(2)
        experience.sync(2)
        assert experience.draw(2).draws and ledger.effective_syncs(store, 9)[-1]["step"] == 2


def test_a_trainer_without_experience_draws_it_as_soon_as_it_is_there(store, slow, experience):
    with pytest.raises(module.TooEarly):
        experience.draw(1)
    commit(store, "s0", 0, distinct("ab", 4))
    slow.seconds = {"files": 0.3, "put_new": 0.3}
    experience.sync(1)
    assert experience.draw(1).draws and ledger.effective_syncs(store, 9)[-1]["step"] == 1


def test_every_draw_can_be_repeated_whatever_the_store_takes(store, slow, experience):
    chance, drawn, committed = random.Random(5), {}, 0
    commit(store, "s0", 0, distinct("abcd", 4))
    experience.sync(1)
    for step in range(1, 60):
        drawn[step] = experience.draw(step).record["trajectory_id"].to_pylist()
        slow.seconds = {name: chance.choice([0, 0, 0.01, 0.06]) for name in ("files", "get", "put_new", "exists")}
        if chance.random() < 0.5:
            committed += 1
            slow.seconds["put_new"], kept = 0, slow.seconds["put_new"]
            commit(store, "s0", committed, distinct("abcdef", 2, start=4 * committed), policy_step=step - 1)
            slow.seconds["put_new"] = kept
        time.sleep(chance.choice([0, 0.02, 0.1]))
        experience.sync(step + 1)
    slow.seconds = {}
    while new_shards(store, experience.buffer._seen):
        step += 1
        drawn[step] = experience.draw(step).record["trajectory_id"].to_pylist()
        experience.sync(step + 1)
        time.sleep(0.1)
    again = new_buffer(store, prompts_per_batch=2, responses_per_prompt=4)
    for step, ids in drawn.items():
        again.rebuild(step)
        assert again.draw(step)["trajectory_id"].to_pylist() == ids, step
    steps = [sync["step"] for sync in ledger.effective_syncs(store, 999)]
    assert len(set(steps)) > 5 and steps == sorted(steps)


def test_no_sync_is_admitted_during_a_draw(store, slow, experience, monkeypatch):
    train_one_step(store, experience)
    found, find, draw = threading.Event(), experience.buffer.find, experience.buffer.draw
    answers, num_inserted = slow.hold("exists"), experience.buffer.num_inserted

    def slow_draw(step):
        answers.set()
        assert found.wait(60)
        time.sleep(0.3)
        assert experience.buffer.num_prompts == 2 and len(store.list("syncs")) == 1
        return draw(step)

    # a slow record would be for the step after next
    monkeypatch.setattr("flows.trainer.background_sync.SHORT_S", math.inf)
    monkeypatch.setattr(experience.buffer, "find", lambda step: (find(step), found.set())[0])
    monkeypatch.setattr(experience.buffer, "draw", slow_draw)
    experience.sync(2)
    wait_until(lambda: experience._background._is_busy)
    experience.draw(2)
    wait_until(lambda: experience.buffer.num_inserted > num_inserted)
    assert experience.buffer.num_prompts == 4


@pytest.mark.parametrize("is_training", [True, False])
def test_what_the_thread_raises_stops_the_trainer(store, experience, monkeypatch, is_training):
    commit(store, "s0", 0, distinct("ab", 4))
    experience.sync(1)
    if is_training:
        experience.draw(1)

    def away(*_):
        raise StoreUnreachable("the store is away")

    monkeypatch.setattr(experience.buffer, "find", away)
    with pytest.raises(StoreUnreachable, match="is away"):
        for step in (2, 3):
            experience.sync(step)
            experience.draw(step)
            time.sleep(0.2)


def test_a_superseded_trainer_ends_and_records_no_sync(store, experience):
    commit(store, "s0", 0, distinct("ab", 4))
    experience.sync(1)
    attempts.start_attempt(store, 0, OWNER)
    commit(store, "s0", 1, distinct("ab", 4))
    with pytest.raises(Superseded):
        experience.sync(1)
    assert len(store.list("syncs")) == 1
