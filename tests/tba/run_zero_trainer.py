"""Trains the addition task, on one device or many: `python -m tests.tba.run_zero_trainer JSON`.

The last line of its output is JSON: the steps' metrics, and the fingerprints of the policies as published. After a
checkpoint the Trainer's loop goes on (tba/training_loop.py).
"""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa

from flows.trainer.meeting import Meeting
from flows.trainer.ranks import trainer_of
from storage.store import RunStore
from tba import saved_state
from tba.batch import Batch, Draw
from tba.config import TrainSettings
from tba.saved_state import SavedState
from tba.trainer import Trainer
from tba.training_loop import train
from tba.weights import fingerprint
from tests.tba.addition import batch

# Of each step. One prompt leaves a process without work; the ninth step's reward is not a number.
PROMPTS = [4, 1, 3, 2, 5, 1, 1, 4, 3, 2] * 2
POISONED, HALF = 8, 10


def draws_of(step: int) -> list[Draw]:
    """The batch that follows `step` steps."""
    draws = batch(step, PROMPTS[step])
    if step == POISONED:
        draws[0].reward[0] = float("nan")
    return draws


def run(model: str, settings: dict, save: str, load: list[str], meeting: list[str] | None = None) -> dict:
    """Trains all steps, with a checkpoint in the folder `save` half-way; then goes on from each one of `load`.

    meeting: store and run whose first attempt's machines take part; None: this machine alone.
    """
    others = Meeting(RunStore(*meeting), 1, settings["machines"], "key") if meeting else None
    with trainer_of(Path(model), TrainSettings(steps=len(PROMPTS), **settings), seed=0, meeting=others) as trainer:
        # One process makes adapters in the type of the matrices under them, several in float32.
        published = [
            fingerprint((name, tensor.bfloat16()) for name, tensor in trainer.weights(is_whole).items())
            for is_whole in (True, False)
        ]
        curves = [list(_steps(trainer, HALF))]
        Path(save).mkdir()
        with patch.multiple(saved_state, FILE_BYTES=1 << 12, save_file=_full_disk), suppress(OSError):
            trainer.save(Path(save))  # of the others, none waits for the first one
        trainer.save(Path(save))
        kept = SavedState(Path(save)).items()
        assert trainer.checkpoint_bytes == sum(t.nbytes for name, t in kept if not name.startswith("step."))
        curves[0] += _steps(trainer, len(PROMPTS))
        for checkpoint in load:
            trainer.load(Path(checkpoint))
            loop = Loop()
            train(trainer, loop, loop)
            curves.append(loop.steps)
            published += loop.published
        return {"published": published, "curves": curves}


class Loop:
    """Gives the Trainer's loop its batches, and keeps the metrics of its steps and the fingerprints of its policies."""

    def __init__(self) -> None:
        self.steps, self.published = [], []

    def sync(self, step: int) -> None: ...

    def draw(self, step: int) -> Batch:
        return Batch(draws_of(step - 1), {}, pa.table({}))

    def status(self, state: str, step: int, metrics: dict) -> None: ...

    def record(self, step: int, batch: Batch, metrics: dict) -> None:
        self.steps.append({name: value for name, value in metrics.items() if not isinstance(value, datetime)})

    def publish(self, step: int, weights: Future, final: bool) -> None:
        self.published.append(fingerprint(weights.result().items()))

    def has_lost_policy(self) -> bool:
        return False

    def checkpoint(self, step: int, trainer: Trainer) -> None: ...


def _full_disk(*_: object) -> None:
    raise OSError("no room is left")


def _steps(trainer: Trainer, until: int) -> Iterator[dict]:
    while trainer.step < until:
        yield trainer.train_step(draws_of(trainer.step))


if __name__ == "__main__":
    print("\n" + json.dumps(run(**json.loads(sys.argv[1]))))
