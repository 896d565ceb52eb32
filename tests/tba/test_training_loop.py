"""The Trainer's loop.

- The loop syncs and publishes every k steps, checkpoints, and marks the last policy final.
- The longer it waits for a batch, the more seldom it looks for new trajectories, and it sees them hardly later.
- Told to stop, it saves and publishes the step that it is at.

python -m pytest tests/tba/test_training_loop.py
"""

from types import SimpleNamespace

import pytest

from tba import training_loop
from tba.batch import Batch
from tba.training_loop import Stopped, TooEarly, train
from tests.tba.small_trainer import DRAWS, make_trainer


class Recorder:
    """Experience and Outbox that write down what the loop does; the buffer is empty for the first two draws."""

    def __init__(self) -> None:
        self.calls, self.draws_refused = [], 2
        self.stalls = (1, 3, 5)  # steps after a policy or a checkpoint

    def sync(self, step):
        self.calls.append(("sync", step))

    def draw(self, step):
        if self.draws_refused:
            self.draws_refused -= 1
            raise TooEarly("too early")
        return Batch(DRAWS, {"staleness_mean": 0.0}, f"rows of step {step}")

    def status(self, state, step, metrics):
        if state == "waiting":
            assert metrics == {"message": "too early"}
            self.calls.append(("waiting", step))

    def record(self, step, batch, metrics):
        assert batch.record == f"rows of step {step}" and metrics["wait_s"] >= 0
        assert (metrics["publish_stall_s"] > 0) == (step in self.stalls)
        self.calls.append(("record", step))

    def has_lost_policy(self):
        return False

    def publish(self, step, weights, final):
        self.calls.append(("final" if final else "publish", step))

    def checkpoint(self, step, trainer):
        assert trainer.step == step
        self.calls.append(("checkpoint", step))


def test_the_loop_publishes_checkpoints_and_syncs_in_order(model_folder):
    trainer, recorder = make_trainer(model_folder, steps=5, sync_interval=2, checkpoint_interval=3), Recorder()
    recorder.stalls = (1, 3, 4, 5)
    train(trainer, recorder, recorder, poll_s=0)
    assert recorder.calls == [
        ("publish", 0), ("sync", 1),
        ("waiting", 0), ("sync", 1), ("waiting", 0), ("sync", 1),
        ("record", 1),
        ("record", 2), ("sync", 3), ("publish", 2),
        ("record", 3), ("checkpoint", 3),
        ("record", 4), ("sync", 5), ("publish", 4),
        ("record", 5), ("sync", 6), ("final", 5),
    ]  # fmt: skip


def test_a_policy_does_not_wait_for_the_checkpoint_of_its_step(model_folder):
    trainer, recorder = make_trainer(model_folder, steps=3, sync_interval=2, checkpoint_interval=2), Recorder()
    train(trainer, recorder, recorder, poll_s=0)
    calls = [call for call in recorder.calls if call[0] in ("publish", "checkpoint", "final")]
    assert calls == [("publish", 0), ("publish", 2), ("checkpoint", 2), ("final", 3)]


@pytest.mark.parametrize(("arrive_s", "most_looks", "late_s"), [(3, 16, 0.2), (60, 90, 2.1), (3600, 1900, 2.1)])
def test_a_long_wait_costs_few_looks(model_folder, monkeypatch, arrive_s, most_looks, late_s):
    """A look costs a remote store some requests, and these cost money."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    class Late(Recorder):
        def draw(self, step):
            self.draws_refused = now[0] < arrive_s
            return super().draw(step)

    monkeypatch.setattr(training_loop, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    recorder = Late()
    train(make_trainer(model_folder, steps=1), recorder, recorder)
    assert arrive_s <= now[0] <= arrive_s + late_s
    assert recorder.calls.count(("waiting", 0)) <= most_looks


def test_a_policy_that_was_removed_while_the_loop_waits_is_published_again(model_folder):
    """Otherwise Searchers would wait for a policy, and the Trainer for their shards."""

    class Removed(Recorder):
        def has_lost_policy(self):
            return self.calls.count(("publish", 0)) < 2

    recorder = Removed()
    train(make_trainer(model_folder, steps=1), recorder, recorder, poll_s=0)
    assert recorder.calls == [
        ("publish", 0), ("sync", 1),
        ("waiting", 0), ("publish", 0), ("sync", 1), ("waiting", 0), ("sync", 1),
        ("record", 1), ("sync", 2), ("final", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("steps", "last"), [(5, [("checkpoint", 3), ("publish", 3)]), (3, [("final", 3)])])
def test_a_run_that_is_told_to_stop_saves_and_publishes_the_step_that_it_is_at(model_folder, steps, last):
    class ToldInStep3(Recorder):
        def status(self, state, step, metrics):
            super().status(state, step, metrics)
            if step == 3:
                raise Stopped

    trainer, recorder = make_trainer(model_folder, steps=steps, sync_interval=2), ToldInStep3()
    train(trainer, recorder, recorder, poll_s=0)
    after = recorder.calls.index(("record", 3)) + 1
    assert recorder.calls[after:] == last


def test_a_run_that_is_told_to_stop_before_it_trained_saves_nothing(model_folder):
    class ToldAtOnce(Recorder):
        def status(self, state, step, metrics):
            raise Stopped

    recorder = ToldAtOnce()
    train(make_trainer(model_folder, steps=5), recorder, recorder, poll_s=0)
    assert recorder.calls == [("publish", 0), ("sync", 1)]


def test_a_run_with_a_checkpoint_of_its_last_step_publishes_its_policy_on_resume(model_folder):
    """Versions that had one could be killed between the two."""
    trainer, recorder = make_trainer(model_folder, steps=5), Recorder()
    trainer.step = 5
    train(trainer, recorder, recorder, poll_s=0)
    assert recorder.calls[0] == ("final", 5)
    assert not [call for call in recorder.calls if call[0] == "record"]
