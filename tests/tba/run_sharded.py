"""Trains the addition task, on one device or many: `python -m tests.tba.run_sharded JSON`, for test_sharded.py.

The last line of its output is JSON: each step's metrics, and the fingerprint of the weights as published.
"""

import json
import sys
from pathlib import Path

from flows.devices import trainer_of
from tba.config import TrainSettings
from tba.trainer import Draw
from tba.weights import fingerprint
from tests.tba.addition import batch

# Of each step. One prompt leaves a process without work; the ninth step's reward is not a number.
PROMPTS = [4, 1, 3, 2, 5, 1, 1, 4, 3, 2] * 2
POISONED = 8


def draws_of(step: int) -> list[Draw]:
    """The batch that follows `step` steps."""
    draws = batch(step, PROMPTS[step])
    if step == POISONED:
        draws[0].reward[0] = float("nan")
    return draws


def run(model: str, settings: dict, until: int, load: str | None = None, save: dict | None = None) -> dict:
    """Trains from the beginning, or from the checkpoint `load`; `save` names a folder for a step's checkpoint."""
    with trainer_of(Path(model), TrainSettings(steps=len(PROMPTS), **settings)) as trainer:
        if load:
            trainer.load(Path(load))
        steps = []
        while trainer.step < until:
            steps.append(trainer.train_step(draws_of(trainer.step)))
            if folder := (save or {}).get(str(trainer.step)):
                Path(folder).mkdir()
                trainer.save(Path(folder))
        return {"steps": steps, "fingerprint": fingerprint(trainer.weights().items())}


if __name__ == "__main__":
    print("\n" + json.dumps(run(**json.loads(sys.argv[1]))))
