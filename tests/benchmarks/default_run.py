"""A run of `tba train` with its defaults, and measures of how it learned."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from flows.compare.turns import run_to_its_end
from storage.queries import query
from storage.store import RunStore

TARGET = 0.6
NEWEST = 640  # responses that a mean is of: as many as ten of TRL's steps sample in bench_accuracy
ROUNDS = 3  # of 24 prompts each: the mean reward of one round scatters
LEARNED = 0.55
INTERRUPTED = 130


@dataclass(frozen=True)
class Sample:
    """Responses that were sampled together, from one policy."""

    seconds: float  # since sampling first began
    num_responses: int
    reward: float  # their mean


@contextlib.contextmanager
def default_run(
    seed: int,
    arguments: list[str] = (),
    enough: Callable[[RunStore], bool] = lambda store: False,
    url: str | None = None,
) -> Iterator[RunStore]:
    """The store of a run that has ended, or was stopped once `enough` was true of it.

    arguments: further ones of `tba train`. url: of an empty store; None: a folder that is removed. Exits with the end
    of its output where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-run-") as folder:
        store = RunStore(url or Path(folder).as_uri(), "bench")
        command = [sys.executable, "-m", "flows.cli", "train", store.run, "--store", store.url, "--seed", str(seed)]
        status, output = run_to_its_end([*command, *arguments], lambda: enough(store))
        if status not in (0, INTERRUPTED):
            sys.exit(f"tba train failed:\n{output[-3000:]}")
        yield store


def sampled(store: RunStore) -> list[Sample]:
    """Each search round, in order; seconds are from the start of the first one."""
    rounds = query(
        store,
        "SELECT epoch(ended_at - (SELECT min(started_at) FROM search_rounds)) AS seconds, "
        "num_trajectories, reward_mean FROM search_rounds ORDER BY ended_at",
    ).to_pylist()
    return [Sample(row["seconds"], row["num_trajectories"], row["reward_mean"]) for row in rounds]


def reached(samples: list[Sample]) -> dict:
    """Seconds, and responses sampled, until the mean reward of the newest `NEWEST` responses is `TARGET`.

    Whole samples are counted, as few as have that many responses. `seconds` None: never. `best`: the highest mean.
    """
    best = None
    for end in range(1, len(samples) + 1):
        first, responses = end, 0
        while responses < NEWEST and first > 0:
            first -= 1
            responses += samples[first].num_responses
        if responses < NEWEST:
            continue
        mean = sum(sample.num_responses * sample.reward for sample in samples[first:end]) / responses
        best = mean if best is None else max(best, mean)
        if mean >= TARGET:
            total = sum(sample.num_responses for sample in samples[:end])
            return {"seconds": round(samples[end - 1].seconds, 1), "responses": total, "best": best}
    return {"seconds": None, "responses": sum(sample.num_responses for sample in samples), "best": best}


def worst_fall(rewards: list[float]) -> float:
    """The most that the mean of `ROUNDS` rounds' rewards falls below its best so far, once it has passed `LEARNED`.

    0 where it never passes.
    """
    best = fall = 0.0
    for end in range(ROUNDS, len(rewards) + 1):
        mean = fmean(rewards[end - ROUNDS : end])
        best = max(best, mean)
        if best > LEARNED:
            fall = max(fall, best - mean)
    return fall
