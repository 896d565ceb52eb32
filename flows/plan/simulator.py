"""Simulates Searchers and Trainer by the clock alone: no policy, no samples, only the times at which things happen.

Time begins with the first rounds, when every part is loaded and the first policy is published. Each Searcher and the
Trainer have hardware of their own: a further Searcher slows nobody down. A duration is drawn at random from the
measured ones (flows/plan/times.py).
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from flows.config import RunConfig
from flows.plan.times import POLL_S, Outcome, Times


@dataclass(frozen=True)
class Loop:
    """The settings that decide who waits for whom."""

    searchers: int
    steps: int
    sync_interval: int
    round_size: int  # trajectories
    batch_size: int  # trajectories
    min_size: int
    samples_per_insert: float | None
    evaluate_share: float = 0.0

    @staticmethod
    def of(config: RunConfig, round_size: int) -> "Loop":
        """round_size: trajectories of a round, as measured.

        Raises: ValueError: the run's Trainer or Searchers wait by a rule that the simulation does not have."""
        others = {
            "synchronous": config.synchronous,
            "sampling.max_age": config.sampling.max_age is not None,
            "warm_start": bool(config.warm_start),
        }
        if unknown := [name for name, is_set in others.items() if is_set]:
            raise ValueError(
                f"tba plan does not simulate {', '.join(unknown)}, which run {config.run} has; plan with a run without"
            )
        sampling, train = config.sampling, config.train
        return Loop(
            searchers=config.searchers,
            steps=train.steps,
            sync_interval=train.sync_interval,
            round_size=round_size,
            batch_size=sampling.prompts_per_batch * sampling.responses_per_prompt,
            min_size=sampling.min_size,
            samples_per_insert=sampling.samples_per_insert,
            evaluate_share=config.evaluate_share,
        )


def simulate(times: Times, loop: Loop, seed: int = 0) -> Outcome:
    """Simulates one run. Returns its outcome; the same seed gives the same one."""
    return _Simulation(times, loop, random.Random(seed)).run()  # noqa: S311 - no secret


def synchronous_seconds(times: Times, loop: Loop) -> float:
    """The same steps where Searchers and Trainer take turns: a batch is sampled, trained on, and its policy loaded."""
    rounds_per_step = loop.batch_size / loop.round_size / loop.searchers
    turn_s = rounds_per_step * fmean(times.rounds) + fmean(times.steps) + times.publish + fmean(times.loads)
    return loop.steps * turn_s


class _Simulation:
    def __init__(self, times: Times, loop: Loop, chance: random.Random) -> None:
        self._times, self._loop, self._chance = times, loop, chance
        self._published = [(0.0, 0)]  # when Searchers find it, and policy step; in order
        self._committed: list[tuple[float, int]] = []  # rounds not taken in, begun ones included: end, policy step
        # Of each Searcher: when it looks for a policy, and the policy step that it serves.
        self._searchers = [(self._begin_round(0.0, 0), 0) for _ in range(loop.searchers)]
        self._num_rounds = 0  # taken in
        self._newest: list[int] = []  # policy steps of the newest sync's rounds
        # The first policy's evaluation came before time 0 (flows/search.py).
        self._first_s = self._evaluated_s = fmean(times.evaluations) if times.evaluations else 0.0

    def run(self) -> Outcome:
        loop, now, waited_s, staleness = self._loop, 0.0, 0.0, []
        for step in range(1, loop.steps + 1):
            began = now
            while not self._may_draw(step):
                now = max(now + POLL_S, min((at for at, _ in self._committed), default=now))
                self._sync(now)
            waited_s += now - began
            staleness.append(step - 1 - fmean(self._newest))
            now += self._draw(self._times.steps)
            if step % loop.sync_interval == 0 and step < loop.steps:
                self._published.append((now + self._times.publish, step))
                self._sync(now)
        return Outcome(loop.searchers, now, waited_s / now, self._num_rounds * loop.round_size, fmean(staleness))

    def _draw(self, seconds: Sequence[float]) -> float:
        return self._chance.choice(seconds)

    def _may_draw(self, step: int) -> bool:
        loop, taken_in = self._loop, self._num_rounds * self._loop.round_size
        if taken_in < loop.min_size:
            return False
        return loop.samples_per_insert is None or step * loop.batch_size <= loop.samples_per_insert * taken_in

    def _sync(self, now: float) -> None:
        """Takes in the rounds that have ended by now."""
        self._begin_rounds(now)
        new = [policy for at, policy in self._committed if at <= now]
        self._committed = [(at, policy) for at, policy in self._committed if at > now]
        self._num_rounds += len(new)
        self._newest = new or self._newest

    def _begin_rounds(self, now: float) -> None:
        """Begins the rounds for which Searchers look for a policy by now."""
        for number, (looks_at, served) in enumerate(self._searchers):
            while looks_at <= now:
                _, newest = self._published[bisect_right(self._published, (looks_at, math.inf)) - 1]
                if newest > served:
                    looks_at += self._draw(self._times.loads)
                    looks_at += self._evaluate(looks_at) if number == 0 else 0.0
                looks_at, served = self._begin_round(looks_at, newest), newest
            self._searchers[number] = (looks_at, served)

    def _evaluate(self, now: float) -> float:
        """Seconds that the first Searcher evaluates its new policy, if `evaluate_share` allows it (flows/search.py)."""
        seconds = self._draw(self._times.evaluations) if self._times.evaluations else 0.0
        if self._evaluated_s + seconds > self._loop.evaluate_share * (now + self._first_s + seconds):
            return 0.0
        self._evaluated_s += seconds
        return seconds

    def _begin_round(self, at: float, policy_step: int) -> float:
        """Returns when its Searcher looks for the next policy."""
        ended = at + self._draw(self._times.rounds)
        self._committed.append((ended, policy_step))
        return ended + self._draw(self._times.pauses)
