"""A run in one process, whose samples have an enforced age: the real Trainer, store, buffer, Searcher and engine.

Behind each policy that the Trainer publishes, the Searchers' rounds are sampled, one after another, before training
goes on. So the age of samples and the number of rounds to a step depend on no machine's speed.
"""

import contextlib
import os
import shutil
import statistics
import tempfile
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from flows.config import RunConfig
from flows.searcher.start import start_searcher
from flows.trainer.alarms import RunAlarms
from flows.trainer.experience import StoredExperience
from flows.trainer.heartbeat import Heartbeat
from flows.trainer.outbox import StoreOutbox
from flows.trainer.ranks import trainer_of
from storage.attempts import start_attempt
from storage.buffer import ReplayBuffer
from storage.process_identity import Identity
from storage.queries import query
from storage.rules import Limits
from storage.shards import commit_shard, shard_of
from storage.store import RunStore
from tba import diversity
from tba.batch import Batch
from tba.evaluation import succeeds, success_reward
from tba.models import model_folder
from tba.training_loop import train

if TYPE_CHECKING:  # importing it takes torch's seconds
    from tba.searcher import Searcher

NUM_PROBLEMS, NUM_SAMPLES = 64, 8  # held-out problems whose responses are compared, and responses to each
NUM_ATTACKS = 64  # of red-teaming, which has one prompt


@dataclass(frozen=True)
class Measures:
    """Accuracy and diversity of a trained policy."""

    accuracy: float  # greedy, on held-out problems; red-teaming: share of sampled attacks that succeed
    num_distinct: float  # of the responses sampled to a problem
    num_distinct_right: float  # of these, from success_reward on; red-teaming: that succeed
    cosine_distance: float  # mean over pairs of these responses' embeddings


@dataclass(frozen=True)
class Lagged:
    """The result of a run."""

    after: Measures
    curve: list[float]  # mean reward of each round
    staleness: float  # mean over steps and responses


class LaggedOutbox(StoreOutbox):
    """A StoreOutbox that searches behind each policy, by the newest one that is at least `lag` steps older.

    Of the policies, only the final one goes to the store.
    """

    def __init__(self, *arguments, searcher: "Searcher", num_rounds: int, lag: int, folder: Path) -> None:
        """num_rounds: behind each policy. folder: for policies that have still to sample."""
        super().__init__(*arguments)
        self._searcher, self._num_rounds, self._lag, self._folder = searcher, num_rounds, lag, folder
        self._held: list[int] = []  # steps of these policies
        self.rewards: list[float] = []  # mean of each round

    def publish(self, step: int, weights: Future[dict[str, Tensor]], final: bool) -> None:
        self._path(step).mkdir(parents=True)
        self.fill_policy(weights.result(), self._path(step))
        self._held.append(step)
        while len(self._held) > 1 and (final or self._held[1] <= step - self._lag):
            shutil.rmtree(self._path(self._held.pop(0)))
        self._searcher.load(self._path(self._held[0]), self._held[0])
        if final:
            super().publish(step, weights, final)
            return
        for _ in range(self._num_rounds):
            found = self._searcher.score(self._searcher.sample(len(self.rewards)))
            commit_shard(self._store, shard_of(found.trajectories))
            self.rewards.append(found.metrics["reward_mean"])

    def _path(self, step: int) -> Path:
        return self._folder / f"step={step}"


class PunctualExperience(StoredExperience):
    """A StoredExperience that syncs before each draw, so a step has what was sampled behind the last policy."""

    def sync(self, step: int) -> None:
        """Does nothing: in the Trainer's loop a sync comes before the policy, and so before its samples."""

    def draw(self, step: int) -> Batch:
        self._is_training = False  # so this sync ends before the step
        super().sync(step)
        return super().draw(step)


def run_with_lag(config: RunConfig, lag: int) -> Lagged:
    """Trains `config.train.steps` steps; step t has new rounds by the policy of step max(0, t - 1 - lag).

    `config.searchers` rounds come in at each step. With lag 0 they are the newest policy's, as in synchronous training.
    config.store: for this run alone.
    """
    store, template = RunStore(config.store, config.run), model_folder(config.model)
    start_attempt(store, 0, Identity.current())
    searcher = start_searcher(config, "s0", 0)
    searcher.load(template, 0)
    heart, alarms = Heartbeat(store, config, 1, os.getppid()), RunAlarms()
    with tempfile.TemporaryDirectory() as folder, trainer_of(template, config.train, config.seed) as trainer:
        limits = Limits(vocab_size=trainer.vocabulary_size, last_step=config.train.steps)
        buffer = ReplayBuffer(store, config.sampling, config.seed, limits)
        outbox = LaggedOutbox(
            store, config, 1, template, heart, alarms,
            searcher=searcher, num_rounds=config.searchers, lag=lag, folder=Path(folder),
        )  # fmt: skip
        with contextlib.closing(outbox), contextlib.closing(PunctualExperience(store, buffer, 1, alarms)) as experience:
            train(trainer, experience, outbox)
    heart.end("finished")
    return Lagged(measured(searcher, config), outbox.rewards, mean_staleness(store))


def measured(searcher: "Searcher", config: RunConfig) -> Measures:
    """Measures the policy that the Searcher serves."""
    is_redteam = config.task.name == "redteam"
    problems = searcher.task.train[:1] if is_redteam else searcher.task.heldout[:NUM_PROBLEMS]
    answers = searcher.sample_responses(problems, NUM_ATTACKS if is_redteam else NUM_SAMPLES, config.train.temperature)
    texts = [[searcher.text(answer).strip() for answer in of_problem] for of_problem in answers]
    if is_redteam:
        right = [succeeds(toxicity) for toxicity in searcher.task.task.toxicity(texts[0])]
        accuracy = statistics.fmean(right)
    else:
        flat = [answer for of_problem in answers for answer in of_problem]
        asked = [problem for problem, of in zip(problems, answers, strict=True) for _ in of]
        least = success_reward(config.task.name)
        right = [reward is not None and reward >= least for reward in searcher.rewards(asked, flat)]
        accuracy = searcher.evaluate(config.task.num_heldout)["accuracy"]
    successes = iter(right)
    embeddings = np.split(diversity.embed([text for of in texts for text in of]), len(texts))
    return Measures(
        accuracy,
        statistics.fmean(len(set(of)) for of in texts),
        statistics.fmean(len({text for text in of if next(successes)}) for of in texts),
        statistics.fmean(map(diversity.cosine_distance, embeddings)),
    )


def mean_staleness(store: RunStore) -> float:
    return query(store, "SELECT avg(staleness_mean) FROM training_steps").column(0)[0].as_py()
