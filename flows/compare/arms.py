"""The runs of tba compare staleness: objectives at enforced lags, by seeds, on tba.testbed.

One run at a time on each core. Each outcome is stored when its run ends, so an interrupted command continues. Each arm
trains with its best step size, which is found first with a seed that no other run has. The grid of step sizes grows
until the best one is not at its edge.
"""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from infra.machine import code_version
from storage.store import RunStore

RATE_FACTOR = 10**0.5  # from one step size of the grid to the next
FIRST_RATES = (1e-3, 10**-2.5, 1e-2)
SMALLEST_RATE, LARGEST_RATE = 1e-5, 1.0  # limits of the grid; an objective with a best step size outside does not learn
TUNING_SEED = 1000


@dataclass(frozen=True)
class Arm:
    """One configuration of a comparison."""

    objective: str  # its name in the table
    lag: int
    settings: dict  # of TrainSettings

    @property
    def name(self) -> str:
        return f"{self.objective}-lag{self.lag}"


@dataclass(frozen=True)
class Outcome:
    """The result of one run."""

    arm: str
    seed: int
    learning_rate: float
    accuracy_before: float
    accuracy_after: float
    seconds: float
    code_version: str
    curve: list[float]  # mean reward of each step's batch


class Bench:
    """Runs arms on all cores; outcomes of finished runs are read from the store."""

    def __init__(self, store: str, first_policy: Path, say: Callable[[str], None]) -> None:
        self._store, self._first_policy, self._say = store, first_policy, say
        self._pool = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, jobs: list[tuple[Arm, int]]) -> list[Outcome]:
        """The outcome of each arm with a seed, in the order of the jobs."""
        futures = {
            self._pool.submit(run_arm, arm, seed, self._store, self._first_policy): place
            for place, (arm, seed) in enumerate(jobs)
        }
        outcomes: dict[int, Outcome] = {}
        for future in as_completed(futures):
            outcome = outcomes[futures[future]] = future.result()
            self._say(
                f"{outcome.arm}, step size {outcome.learning_rate:.2g}, seed {outcome.seed}: "
                f"{outcome.accuracy_before:.3f} -> {outcome.accuracy_after:.3f}, {outcome.seconds:.1f} s"
            )
        return [outcomes[place] for place in range(len(jobs))]

    def tune(self, arms: list[Arm]) -> list[Arm]:
        """Each arm with its best step size, by one run for each arm and step size."""
        found: dict[str, dict[float, float]] = {arm.name: {} for arm in arms}  # by arm: step size, accuracy
        while wanted := [(arm, rate) for arm in arms for rate in rates_to_try(found[arm.name])]:
            trials = [replace(arm, settings=arm.settings | {"learning_rate": rate}) for arm, rate in wanted]
            for outcome in self.run([(trial, TUNING_SEED) for trial in trials]):
                found[outcome.arm][outcome.learning_rate] = outcome.accuracy_after
        return [
            replace(arm, settings=arm.settings | {"learning_rate": max(found[arm.name], key=found[arm.name].get)})
            for arm in arms
        ]


def rates_to_try(found: dict[float, float]) -> list[float]:
    """The next step sizes to try, given the accuracies so far; none once the best is between two others."""
    if not found:
        return list(FIRST_RATES)
    best = max(found, key=found.get)
    if best == min(found) and best > SMALLEST_RATE:
        return [best / RATE_FACTOR]
    if best == max(found) and best < LARGEST_RATE:
        return [best * RATE_FACTOR]
    return []


def run_arm(arm: Arm, seed: int, store: str, first_policy: Path) -> Outcome:
    """Runs one arm in this process, on one thread, unless the store has its outcome.

    Raises: RunConfigMismatch: the store has a run of this name with other settings; the message names them.
    """
    rate = arm.settings["learning_rate"]
    run_store = RunStore(store, f"{arm.name}-rate{rate:.2e}-seed{seed}")
    run_store.create_run({"arm": asdict(arm), "seed": seed})
    if (stored := run_store.read_json("outcome.json", Outcome)) is not None:
        return stored
    import torch

    from tba import testbed
    from tba.config import TrainSettings

    torch.set_num_threads(1)
    started = time.monotonic()
    first = testbed.first_policy(first_policy)
    trained = testbed.train(first, TrainSettings(**arm.settings), arm.lag, seed)
    outcome = Outcome(
        arm.name, seed, rate, testbed.accuracy(first), trained.accuracy, time.monotonic() - started, code_version(),
        trained.curve,
    )  # fmt: skip
    run_store.put("outcome.json", json.dumps(asdict(outcome)).encode())
    return outcome
