"""Alarms: signs that a run goes wrong, and the setting to change for each.

Alarms follow from the rows of training_steps, in order. The Trainer computes them after each step, and a report from
the stored rows; both get the same alarms. While it waits, the Trainer alone sees that Searchers are silent.
docs/metrics.md, "Alarms", has the thresholds.

A change of `num_inserted` shows that a sync took in trajectories. The `fresh_` columns describe that sync.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Number of syncs in a mean. One sync has a dozen prompts, and its mean reward varies by 0.1.
RECENT_SYNCS = 3
# Fall of the mean reward below its best, as a share of the reward's range; an untapered loss on stale samples lost 0.4.
REWARD_FALL = 0.20
# A fall must also exceed this many standard deviations of the difference between two such means, estimated from the
# newest syncs. In simulated healthy runs of 30 syncs of 12 peaked prompts, 0.20 alone raised the alarm in 16 %, both in
# 0.3 %.
REWARD_FALL_DEVIATIONS = 4.5
MEDIAN_TO_DEVIATION = 0.954  # median of |a - b| of two normal numbers, in standard deviations of one
# Nats a token. At 0.005 and 6 tokens 97 % of the responses to a prompt are identical.
LOW_ENTROPY = 0.005
# Of a reward in 0..1: the task is solved, and low entropy is no fault.
SOLVED_REWARD = 0.95
# Nats a token. Rounding to bfloat16 and another kernel's order of sums cause some 0.02; another temperature or model
# several times 0.1. Each policy step of staleness adds up to 0.12 in a healthy run of the defaults.
MISMATCH = 0.1
MISMATCH_PER_POLICY_STEP = 0.15
MISMATCH_STEPS = 5
# In policy steps, and as a multiple of the largest value of the first syncs. Runs on busy machines trained well at 8 to
# 17.
STALE = 16.0
STALENESS_GROWTH = 2.0
FIRST_SYNCS = 6  # in these the buffer fills and the length of rounds settles
# Differences between the rewards of successive syncs from which the deviation is estimated: the newest ones.
MOST_DIFFERENCES = 200
# After so many seconds without a new shard, the Searchers have stopped, or a round takes far too long.
SEARCHERS_SILENT_S = 300.0


class Alarms:
    """The alarms that are on. An alarm ends by itself; none is acknowledged."""

    def __init__(self) -> None:
        self.on: dict[str, str] = {}
        """Messages of the alarms that are on, by name: the observation, and the setting to change."""
        self._num_inserted = None
        self._is_first_sync = True
        # One value for each of the newest syncs, and how many syncs there were.
        self._rewards: list[float] = []
        self._num_rewards = 0
        self._entropies: list[float] = []
        self._staleness: list[float] = []
        self._num_staleness = 0
        self._reward_range: list[float] = []  # the lowest and the highest of all syncs
        self._mean_range: list[float] = []  # the same of the means of RECENT_SYNCS syncs each
        self._settled_staleness = 0.0  # the largest of the first syncs
        self._num_mismatches = 0  # consecutive steps above the threshold

    def state(self) -> dict:
        """What later alarms depend on, as JSON values."""
        return dict(vars(self))

    def restore(self, state: object) -> None:
        """Goes on from another one's `state`. Raises: ValueError: it is not one."""
        own = vars(self)
        if not isinstance(state, dict) or state.keys() != own.keys():
            raise ValueError(f"this is no state of alarms: {state!r:.200}")
        for name, value in state.items():
            if own[name] is not None and type(value) is not type(own[name]):
                raise ValueError(f"{name} of a state of alarms is {value!r:.200}")
            if isinstance(value, list) and not all(isinstance(number, int | float) for number in value):
                raise ValueError(f"{name} of a state of alarms has values that are no numbers: {value!r:.200}")
        own.update(state)

    def see(self, row: Mapping) -> dict[str, str]:
        """The alarms after one more step. row: of training_steps; a value that is None or missing was not measured."""
        inserted = row.get("num_inserted")
        if inserted != self._num_inserted and row.get("fresh_reward_mean") is not None:
            self._num_inserted = inserted
            self._see_sync(row)
        self._see_mismatch(row)
        self.see_silence(row.get("searchers_silent_s") or 0.0)
        return self.on

    def see_silence(self, silent_s: float) -> dict[str, str]:
        """The alarms while the Trainer waits. silent_s: seconds since the last sync that took in trajectories."""
        self._set(
            "searchers_silent",
            silent_s >= SEARCHERS_SILENT_S,
            f"no new shard for {silent_s:.0f} s. If the Searchers have stopped, their flow runs' logs in Prefect have "
            "the reason; if their rounds take long, lower search.prompts_per_round; if evaluations do, "
            "task.num_heldout",
        )
        return self.on

    def _set(self, name: str, is_on: bool, message: str) -> None:
        others = {other: text for other, text in self.on.items() if other != name}
        self.on = others | ({name: message} if is_on else {})

    def _see_sync(self, row: Mapping) -> None:
        if self._is_first_sync:  # the first sync takes in a warm start, whose trajectories are other policies'
            self._is_first_sync = False
            return
        self._rewards = [*self._rewards, row["fresh_reward_mean"]][-MOST_DIFFERENCES - 1 :]
        self._num_rewards += 1
        self._reward_range = _widened(self._reward_range, self._rewards[-1])
        if self._num_rewards >= RECENT_SYNCS:
            self._mean_range = _widened(self._mean_range, _recent(self._rewards))
            self._judge_reward()
        if row.get("fresh_entropy") is not None:
            self._entropies = [*self._entropies, row["fresh_entropy"]][-RECENT_SYNCS:]
            self._judge_entropy()
        if row.get("fresh_staleness") is not None:
            self._staleness = [*self._staleness, row["fresh_staleness"]][-RECENT_SYNCS:]
            self._num_staleness += 1
            if self._num_staleness <= FIRST_SYNCS:
                self._settled_staleness = max(self._settled_staleness, self._staleness[-1])
            self._judge_staleness()

    def _judge_reward(self) -> None:
        now, (worst, best) = _recent(self._rewards), self._mean_range
        span = 1.0 if self._is_share() else best - worst
        steps = [abs(after - before) for before, after in zip(self._rewards, self._rewards[1:], strict=False)]
        deviation = statistics.median(steps) / MEDIAN_TO_DEVIATION * math.sqrt(2 / RECENT_SYNCS)  # of a difference
        least = max(REWARD_FALL * span, REWARD_FALL_DEVIATIONS * deviation)
        self._set(
            "reward_fell",
            self._num_rewards >= 2 * RECENT_SYNCS and best - now > least,
            f"fresh reward fell: mean {now:.3g} of the last {RECENT_SYNCS} syncs, {best:.3g} of the best "
            f"{RECENT_SYNCS}. Lower train.learning_rate; where samples are stale, lower sampling.max_age or "
            "sampling.samples_per_insert and keep train.residual_weight tapered",
        )

    def _is_share(self) -> bool:
        lowest, highest = self._reward_range
        return lowest >= 0 and highest <= 1

    def _judge_entropy(self) -> None:
        now = _recent(self._entropies)
        is_solved = self._is_share() and _recent(self._rewards) >= SOLVED_REWARD
        self._set(
            "entropy_low",
            len(self._entropies) >= RECENT_SYNCS and now < LOW_ENTROPY and not is_solved,
            f"entropy is near zero: {now:.2g} nats a token in the last {RECENT_SYNCS} syncs, so the responses to a "
            "prompt are all the same. Raise search.temperature or train.beta, or lower train.learning_rate",
        )

    def _judge_staleness(self) -> None:
        now, settled = _recent(self._staleness), self._settled_staleness
        self._set(
            "staleness_grows",
            self._num_staleness >= FIRST_SYNCS + RECENT_SYNCS and now > max(STALE, STALENESS_GROWTH * settled),
            f"staleness grows: the last {RECENT_SYNCS} syncs came in {now:.0f} policy steps after sampling, the "
            f"first {FIRST_SYNCS} at most {settled:.0f}. Start more searchers, lower sampling.samples_per_insert so "
            "that the Trainer waits, or set sampling.max_age",
        )

    def _see_mismatch(self, row: Mapping) -> None:
        seen = row.get("logprob_mismatch")
        if seen is None or not math.isfinite(seen):  # a batch without such rows, or a step that was skipped
            return
        least = MISMATCH + MISMATCH_PER_POLICY_STEP * max(0.0, row.get("fresh_staleness") or 0.0)
        self._num_mismatches = self._num_mismatches + 1 if seen > least else 0
        self._set(
            "logprobs_disagree",
            self._num_mismatches >= MISMATCH_STEPS,
            f"log-probabilities disagree: Trainer and engine differ by {seen:.2g} nats a token on rows of the newest "
            f"policy, for {self._num_mismatches} steps. Set search.temperature to train.temperature, search.top_p to 1 "
            "and search.exploration_probability to 0. If they are so already, lower train.learning_rate or "
            "train.sync_interval",
        )


def _recent(values: Sequence[float]) -> float:
    return statistics.fmean(values[-RECENT_SYNCS:])


def _widened(span: Sequence[float], value: float) -> list[float]:
    """The range [lowest, highest] with `value` in it. span: such a range, or empty."""
    return [min([value, *span]), max([value, *span])]


@dataclass(frozen=True)
class Span:
    """A span of steps in which an alarm was on."""

    name: str
    first_step: int
    last_step: int
    message: str  # the alarm's message when it went on


def spans(rows: Iterable[Mapping]) -> list[Span]:
    """All spans of all alarms, by their first step. rows: of training_steps, in order of steps."""
    alarms, begun, ended, step = Alarms(), {}, [], 0
    for row in rows:
        before, on = step, alarms.see(row)
        step = row["step"]
        for name in begun.keys() - on.keys():
            first, message = begun.pop(name)
            ended.append(Span(name, first, before, message))
        begun = {name: (step, message) for name, message in on.items()} | begun
    ended += [Span(name, first, step, message) for name, (first, message) in begun.items()]
    return sorted(ended, key=lambda span: (span.first_step, span.name))
