"""The Trainer's loop: draw, step, and every k steps sync and publish. tba/trainer.py has the step.

The loop reads from Experience and writes to Outbox; flows/trainer/ implements both.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

from torch import Tensor

from tba.batch import Batch
from tba.trainer import Trainer

# A look for new trajectories costs a remote store requests, so a Trainer that has waited for long looks less often.
LATE_SHARE = 0.05  # largest share of a wait by which new trajectories may be seen late
LONGEST_PAUSE_S = 2.0  # a stop request is seen within it


class TooEarly(Exception):
    """The replay buffer has no batch for this step yet; the message has the reason."""


class Experience(Protocol):
    """The replay buffer's interface to the Trainer."""

    def sync(self, step: int) -> None:
        """Takes in the shards committed since the last sync; `step` or a later step is the first that can draw them."""

    def draw(self, step: int) -> Batch:
        """The batch for a step. Raises: TooEarly."""


class Stopped(Exception):
    """A stop request: training ends after this step, and the run can be resumed."""


class Outbox(Protocol):
    """Receives the Trainer's results, which are stored when `close` returns."""

    def status(self, state: str, step: int, metrics: Mapping[str, float | str | None]) -> None:
        """Tells state and metrics, between steps. Raises: Stopped: training is to end."""

    def record(self, step: int, batch: Batch, metrics: Mapping[str, float | datetime | None]) -> None:
        """Records the step's batch and its row of the training ledger."""

    def publish(self, step: int, weights: Future[dict[str, Tensor]], final: bool) -> None: ...

    def has_lost_policy(self) -> bool:
        """Whether the newest published policy is missing where Searchers fetch it."""

    def checkpoint(self, step: int, trainer: Trainer) -> None: ...


def train(trainer: Trainer, experience: Experience, outbox: Outbox, poll_s: float = 0.2) -> None:
    """The Trainer's loop: draw, step, and every k steps sync and publish; until `settings.steps` are done.

    After a stop request it saves a checkpoint and publishes the policy; the next `train` resumes from the checkpoint.
    The last step has no checkpoint, because no run resumes from it and its gigabytes would delay the final policy.
    """
    begun = trainer.step
    try:
        _train(trainer, experience, outbox, poll_s)
    except Stopped:
        if trainer.step > begun:
            final = trainer.step >= trainer.settings.steps
            if not final:
                outbox.checkpoint(trainer.step, trainer)
            _publish(trainer, outbox, final)


def _publish(trainer: Trainer, outbox: Outbox, final: bool) -> None:
    """Hands over the policy, which is copied while the next step computes its gradient."""
    # A policy by adapters is published as these alone, except the last one, which is whole.
    weights = trainer.start_copy(partial(trainer.weights, whole=final))
    outbox.publish(trainer.step, weights, final=final)


def _timed(work: Callable[..., None], *arguments) -> float:
    """Returns the seconds that a call took."""
    started = time.monotonic()
    work(*arguments)
    return time.monotonic() - started


def _train(trainer: Trainer, experience: Experience, outbox: Outbox, poll_s: float) -> None:
    settings = trainer.settings
    # Searchers wait for this policy.
    stall_s = _timed(_publish, trainer, outbox, trainer.step >= settings.steps)
    experience.sync(trainer.step + 1)
    while trainer.step < settings.steps:
        step = trainer.step + 1
        wait_started = time.monotonic()
        batch = _await_batch(trainer, experience, outbox, poll_s)
        wait_s, started_at = time.monotonic() - wait_started, datetime.now(UTC)
        metrics = trainer.train_step(batch.draws)
        times: dict[str, float | datetime] = {
            "wait_s": wait_s,
            "publish_stall_s": stall_s + metrics.pop("copy_wait_s"),
            "started_at": started_at,
            "ended_at": datetime.now(UTC),
        }
        stall_s = 0.0
        outbox.record(step, batch, {**metrics, **batch.facts, **times})
        outbox.status("training", step, metrics | batch.facts)
        last = step == settings.steps
        if last or step % settings.sync_interval == 0:
            experience.sync(step + 1)
            stall_s += _timed(_publish, trainer, outbox, last)
        if not last and step % settings.checkpoint_interval == 0:  # behind the policy, for which Searchers wait
            stall_s += _timed(outbox.checkpoint, step, trainer)


def _await_batch(trainer: Trainer, experience: Experience, outbox: Outbox, poll_s: float) -> Batch:
    """The batch for the next step, as soon as it can be drawn."""
    step, began = trainer.step + 1, time.monotonic()
    while True:
        try:
            return experience.draw(step)
        except TooEarly as reason:
            outbox.status("waiting", step - 1, {"message": str(reason)})
            if outbox.has_lost_policy():  # Searchers would wait for a policy, and this Trainer for their shards
                _publish(trainer, outbox, final=False)
        time.sleep(max(poll_s, min(LATE_SHARE * (time.monotonic() - began), LONGEST_PAUSE_S)))
        experience.sync(step)
