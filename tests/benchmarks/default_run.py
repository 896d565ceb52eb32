"""A run of `tba train` with its defaults, in a store that is removed afterwards, and measures of how it learned."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

from flows.compare.turns import run_to_its_end
from storage.queries import query
from storage.store import RunStore

TARGET, STEPS = 0.6, 10
ROUNDS = 3  # of 12 prompts each: the mean reward of one round scatters
LEARNED = 0.55
INTERRUPTED = 130


@contextlib.contextmanager
def default_run(
    seed: int, arguments: list[str] = (), enough: Callable[[RunStore], bool] = lambda store: False
) -> Iterator[RunStore]:
    """The store of a run that has ended, or was stopped once `enough` was true of it.

    arguments: further ones of `tba train`. Exits with the end of its output where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-run-") as folder:
        store = RunStore(Path(folder).as_uri(), "bench")
        command = [sys.executable, "-m", "flows.cli", "train", store.run, "--store", store.url, "--seed", str(seed)]
        status, output = run_to_its_end([*command, *arguments], lambda: enough(store))
        if status not in (0, INTERRUPTED):
            sys.exit(f"tba train failed:\n{output[-3000:]}")
        yield store


def reward_curve(store: RunStore) -> list[tuple[float, float]]:
    """For each step with recent draws: seconds since the first round began, and the mean reward of those draws."""
    steps = query(
        store,
        "SELECT avg(batches.reward) AS reward, "
        "any_value(epoch(ended_at - (SELECT min(started_at) FROM search_rounds))) AS seconds "
        "FROM batches JOIN training_steps USING (step) WHERE recent GROUP BY step ORDER BY step",
    ).to_pylist()
    return [(step["seconds"], step["reward"]) for step in steps]


def reached(curve: list[tuple[float, float]]) -> dict:
    """When the mean of the newest `STEPS` rewards first is `TARGET`: seconds and step; None: never, and its best."""
    means = [fmean(reward for _, reward in curve[max(0, end - STEPS) : end]) for end in range(1, len(curve) + 1)]
    for step in range(STEPS, len(curve) + 1):
        if means[step - 1] >= TARGET:
            return {"seconds": round(curve[step - 1][0], 1), "step": step, "best": means[step - 1]}
    return {"seconds": None, "step": len(curve), "best": max(means[STEPS - 1 :], default=None)}


def round_rewards(store: RunStore) -> list[float]:
    """The mean reward of each search round, in order."""
    return query(store, "SELECT reward_mean FROM search_rounds ORDER BY ended_at").column(0).to_pylist()


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
