"""The runs of a study, one at a time on each core.

Each outcome is stored when its run ends, so an interrupted study continues. On the testbed each arm has its best step
size, which is found first with a seed that no other run has. The grid of step sizes grows until the best one is not at
its edge.
"""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context

from flows.compare.arm import Arm, Outcome
from flows.compare.on_model import OnModel
from flows.compare.on_testbed import OnTestbed
from infra.gpus import gpu_bytes
from infra.machine import code_version, cpu_threads, processor_name
from infra.memory import memory_bytes
from storage.store import RunStore, check_run_name

RATE_FACTOR = 10**0.5  # from one step size of the grid to the next
FIRST_RATES = (1e-3, 10**-2.5, 1e-2)
SMALLEST_RATE, LARGEST_RATE = 1e-5, 1.0  # limits of the grid; an objective with a best step size outside does not learn
TUNING_SEED = 1000
BYTES_OF_RUN = 8 * 1024**3  # of a model: the embedded one takes 6 GB


class Bench:
    """Runs arms on all cores; outcomes of finished runs are read from the store."""

    def __init__(self, store: str, study: str, runs: OnTestbed | OnModel, say: Callable[[str], None]) -> None:
        """`study`: its name, in the names of its runs. `runs`: how its arms train."""
        self._store, self._study, self._runs, self._say = store, study, runs, say
        self.outcomes: list[Outcome] = []  # of all runs so far, those that choose a step size included
        workers = cpu_threads(1)
        if runs.trains_a_model:  # an engine takes a part of a GPU's memory
            workers = 1 if gpu_bytes() else max(1, min(workers, memory_bytes() // BYTES_OF_RUN))
        self._pool = ProcessPoolExecutor(  # an engine needs a process of its own
            workers, mp_context=get_context("spawn"), max_tasks_per_child=1 if runs.trains_a_model else None
        )

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, jobs: list[tuple[Arm, int]]) -> list[Outcome]:
        """The outcome of each arm with a seed, in the order of the jobs."""
        stores = [self._run_store(arm, seed) for arm, seed in jobs]  # all names are tried before a run begins
        futures = {
            self._pool.submit(run_arm, self._runs, arm, seed, store): place
            for place, ((arm, seed), store) in enumerate(zip(jobs, stores, strict=True))
        }
        outcomes: dict[int, Outcome] = {}
        for future in as_completed(futures):
            outcome = outcomes[futures[future]] = future.result()
            before = "" if outcome.accuracy_before is None else f"{outcome.accuracy_before:.3f} -> "
            self._say(
                f"{outcome.arm}, step size {outcome.learning_rate:.2g}, seed {outcome.seed}: "
                f"{before}{outcome.accuracy_after:.3f}, {outcome.seconds:.1f} s"
            )
        self.outcomes += outcomes.values()
        return [outcomes[place] for place in range(len(jobs))]

    def _run_store(self, arm: Arm, seed: int) -> RunStore:
        """Raises: ValueError: the names of study and arm are too long for a run's, or the study's has other letters."""
        rate = f"{arm.settings['train']['learning_rate']:.2e}".replace("+", "")  # which a run's name may not have
        name = f"{self._study}-{arm.name}-rate{rate}-seed{seed}"
        try:
            check_run_name(name)
        except ValueError as error:
            raise ValueError(
                f"study {self._study!r}, arm {arm.label!r}: a run's name begins with both. {error}"
            ) from error
        return RunStore(self._store, name)

    def tune(self, arms: list[Arm]) -> list[Arm]:
        """Each arm with its best step size, by one run for each arm and step size."""
        found: dict[str, dict[float, float]] = {arm.name: {} for arm in arms}  # by arm: step size, accuracy
        while wanted := [(arm, rate) for arm in arms for rate in rates_to_try(found[arm.name])]:
            trials = [with_rate(arm, rate) for arm, rate in wanted]
            for outcome in self.run([(trial, TUNING_SEED) for trial in trials]):
                found[outcome.arm][outcome.learning_rate] = outcome.accuracy_after
        return [with_rate(arm, max(found[arm.name], key=found[arm.name].get)) for arm in arms]


def with_rate(arm: Arm, rate: float) -> Arm:
    return replace(arm, settings=arm.settings | {"train": arm.settings["train"] | {"learning_rate": rate}})


def rates_to_try(found: dict[float, float]) -> list[float]:
    """The next step sizes to try, given the accuracies so far; none once the best is between two others."""
    if not found:
        return list(FIRST_RATES)
    best = max(found, key=found.get)
    if best == min(found) and best > SMALLEST_RATE * RATE_FACTOR**0.5:  # half a step: powers are rounded
        return [best / RATE_FACTOR]
    if best == max(found) and best < LARGEST_RATE / RATE_FACTOR**0.5:
        return [best * RATE_FACTOR]
    return []


def run_arm(runs: OnTestbed | OnModel, arm: Arm, seed: int, store: RunStore) -> Outcome:
    """Runs one arm in this process, on one thread, unless the store has its outcome.

    Raises: RunConfigMismatch: the store has a run of this name with other settings; the message names them.
    """
    store.create_run({"arm": asdict(arm), "seed": seed, **runs.recorded()})
    if (stored := store.read_json("outcome.json", Outcome)) is not None:
        return stored
    started = time.monotonic()
    found = runs.run(arm, seed)
    outcome = Outcome(
        arm=arm.name,
        seed=seed,
        learning_rate=arm.settings["train"]["learning_rate"],
        seconds=time.monotonic() - started,
        code_version=code_version(),
        processor=processor_name(),
        **found,
    )
    store.put_json("outcome.json", outcome)
    return outcome
