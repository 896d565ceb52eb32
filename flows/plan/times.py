"""How long the parts of a run took, from its ledger."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import median

from storage.queries import query
from storage.store import RunStore

EVALUATOR = "s0"  # the Searcher that evaluates: the first one that a run's flow starts
POLL_S = 0.2  # of a Trainer that waits for a batch, in the first seconds (tba/training_loop.py)
SHORTEST_S = 1e-3  # of a duration: a clock may have been set back


class TooFewTimes(ValueError):
    """A run has too few steps or rounds to measure their times; the message names what is missing."""


@dataclass(frozen=True)
class Times:
    """Seconds. A list has one entry for each time that was measured."""

    steps: list[float]  # from a training step's start to the next one's, less the wait for a batch; with its draw
    rounds: list[float]  # from a Searcher's turn to a round until it is scored; the engine may have begun it before
    pauses: list[float]  # between two rounds of a Searcher: it commits a shard and looks for a policy
    loads: list[float]  # further seconds where it found a new policy
    evaluations: list[float]  # of policies after the first one; none: they were not evaluated
    publish: float  # from a step's end until Searchers find its policy


@dataclass(frozen=True)
class Outcome:
    """The result of a run, measured or simulated."""

    searchers: int
    seconds: float  # from the first round's start to the last step's end
    trainer_wait_share: float  # share of these in which the Trainer waited for a batch
    num_trajectories: int  # taken in by the last step
    fresh_staleness: float | None  # mean over steps: age of the newest sync's trajectories; None: not measured


def measured_outcome(store: RunStore) -> Outcome:
    """The result of a run that has trained. The time between two attempts counts, too."""
    (row,) = query(
        store,
        "SELECT epoch(max(ended_at)) - (SELECT epoch(min(started_at)) FROM search_rounds) AS seconds, "
        "epoch(min(started_at)) - (SELECT epoch(min(started_at)) FROM search_rounds) AS first_wait_s, "
        "sum(wait_s) FILTER (step > 1) AS wait_s, max(num_inserted) AS num_trajectories, "
        "avg(fresh_staleness) AS fresh_staleness, "
        "(SELECT count(DISTINCT searcher) FROM search_rounds) AS searchers FROM training_steps",
    ).to_pylist()
    wait_share = (row["first_wait_s"] + row["wait_s"]) / row["seconds"]
    return Outcome(row["searchers"], row["seconds"], wait_share, row["num_trajectories"], row["fresh_staleness"])


def measured_times(store: RunStore) -> Times:
    """The times of a run that has trained, without those across a resume. Raises: TooFewTimes."""
    steps = query(
        store, "SELECT attempt, step, started_at, ended_at, wait_s FROM training_steps ORDER BY attempt, step"
    ).to_pylist()
    rounds = query(
        store, "SELECT searcher, round, policy_step, started_at, ended_at FROM search_rounds ORDER BY searcher, round"
    ).to_pylist()
    evaluations = query(store, "SELECT policy_step, created_at, seconds FROM evaluations WHERE seconds > 0").to_pylist()
    resumed = resumes(store)
    between = [
        (a, b)
        for a, b in pairwise(rounds)
        if (a["searcher"], a["round"] + 1) == (b["searcher"], b["round"])
        and not any(a["ended_at"] < at < b["started_at"] for at in resumed)
    ]
    swapping = [(a, b) for a, b in between if a["policy_step"] != b["policy_step"]]
    draw_s = _draw_s([row["wait_s"] for row in steps])
    of_steps = [
        max(SHORTEST_S, _seconds(a["started_at"], b["started_at"]) - b["wait_s"] + draw_s)
        for a, b in pairwise(steps)
        if (a["attempt"], a["step"] + 1) == (b["attempt"], b["step"])
    ]
    if not of_steps or not swapping:
        raise TooFewTimes(
            f"run {store.run} has {len(steps)} training steps and {len(rounds)} search rounds; a plan needs two steps, "
            "and a Searcher that has changed its policy between two rounds. Wait, or plan with another run."
        )
    keeping = [(a, b) for a, b in between if a["policy_step"] == b["policy_step"]]
    swaps = [_pause_s(evaluations, a, b) for a, b in swapping]
    pauses = [_pause_s(evaluations, a, b) for a, b in keeping] or [min(swaps)]
    loads = [max(0.0, seconds - median(pauses)) for seconds in swaps]
    # The shortest time from a policy's step to the moment when a Searcher found it. It loads and evaluates it then.
    ended = {row["step"]: row["ended_at"] for row in steps}  # of the last attempt; an earlier one's policy is older
    found = [
        _seconds(ended[b["policy_step"]], b["started_at"]) - load_s - _evaluating_s(evaluations, a, b)
        for (a, b), load_s in zip(swapping, loads, strict=True)
        if b["policy_step"] in ended and ended[b["policy_step"]] < b["started_at"]
    ]
    return Times(
        steps=of_steps,
        rounds=[_seconds(row["started_at"], row["ended_at"]) for row in rounds],
        pauses=pauses,
        loads=loads,
        evaluations=[row["seconds"] for row in evaluations if row["policy_step"] > 0],
        publish=max(0.0, min(found, default=0.0)),
    )


def _draw_s(waits: Sequence[float]) -> float:
    """Median of the waits in which the Trainer did not poll, so that they are draws alone; 0 without any."""
    return median([wait for wait in waits if wait < POLL_S] or [0.0])


def round_size(store: RunStore) -> int:
    """Median trajectories of a round: near duplicates are dropped, and a task may have fewer prompts than asked for."""
    found = query(store, "SELECT median(num_trajectories) AS num_trajectories FROM search_rounds").to_pylist()
    return max(1, round(found[0]["num_trajectories"] or 1))


def resumes(store: RunStore) -> list[datetime]:
    """When each attempt after the first one began."""
    found = query(store, "SELECT created_at FROM attempts WHERE attempt > 1 ORDER BY attempt")
    return found["created_at"].to_pylist()


def _pause_s(evaluations: list[dict], before: dict, after: dict) -> float:
    """Seconds between two rounds of a Searcher, less those in which it evaluated."""
    pause = _seconds(before["ended_at"], after["started_at"])
    return max(SHORTEST_S, pause - _evaluating_s(evaluations, before, after))


def _evaluating_s(evaluations: list[dict], before: dict, after: dict) -> float:
    """Seconds between two rounds of a Searcher in which it evaluated."""
    if before["searcher"] != EVALUATOR:
        return 0.0
    begin, end = before["ended_at"], after["started_at"]
    return sum(row["seconds"] for row in evaluations if begin <= row["created_at"] <= end)


def _seconds(begin: datetime, end: datetime) -> float:
    return max(SHORTEST_S, (end - begin) / timedelta(seconds=1))
