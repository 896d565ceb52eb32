"""The Searcher: samples responses with a slightly old policy and scores them.

    produces      one shard of trajectories a round
    consumes      prompts of the task, and the newest policy when a round begins
    waits for     nothing: an old policy is good enough, Trajectory Balance learns from any
    unblocks      the Trainer's first batch; afterwards nobody waits for it

It keeps no state: a round's prompts follow from (seed, searcher, round). It can be killed, added or removed at any
time.
"""

import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tba.config import SearchSettings
from tba.engine import Engine, Response, Sampling
from tba.near_duplicates import NearDuplicates
from tba.reference_policy import ReferencePolicy
from tba.rewards import RewardedTask, Scores
from tba.tasks.base import Problem, stop_tokens


@dataclass(frozen=True)
class Round:
    """What a round brought: one dictionary a trajectory, and one about the round itself."""

    trajectories: list[dict]
    metrics: dict


@dataclass(frozen=True)
class SearcherSettings:
    """What the run says of how to search."""

    search: SearchSettings
    max_response_tokens: int
    temperature: float  # the objective's T, which the reference's logits are divided by
    seed: int
    code_version: str


@dataclass(frozen=True)
class _Sample:
    """A response, and how it came about."""

    problem: Problem
    prompt: list[int]  # tokens, without the system prompt
    sampling: Sampling
    system: str
    response: Response
    text: str


class Searcher:
    """Samples S responses to each prompt of a round, and adds reward and reference log-probabilities."""

    def __init__(
        self,
        name: str,
        task: RewardedTask,
        tokenizer,
        engine: Engine,
        reference: str | Path,
        settings: SearcherSettings,
    ) -> None:
        self._name, self.task, self._tokenizer, self._engine = name, task, tokenizer, engine
        self._told, self._settings = settings, settings.search
        self._reference = ReferencePolicy(reference)
        self._stop_tokens = stop_tokens(task, tokenizer)
        self.vocabulary_size = self._reference.vocabulary_size  # loads it
        distance = settings.search.near_duplicate_distance
        self._near_duplicates = NearDuplicates(distance) if distance else None
        self._policy_step = self._fingerprint = None

    def load(self, folder: Path, policy_step: int) -> str:
        """Serves the policy in `folder` from the next round on; returns the fingerprint of what the engine took in."""
        self._fingerprint = self._engine.load(folder)
        self._policy_step = policy_step
        return self._fingerprint

    def round(self, number: int) -> Round:
        """One round: sample, reward, score under the reference policy.

        Raises: ValueError: the reward function returned something that is not a finite number.
        """
        started = datetime.now(UTC)
        order = random.Random(f"{self._told.seed}/{self._name}/{number}")
        problems = order.sample(self.task.train, min(self._settings.prompts_per_round, len(self.task.train)))
        prompts = [problem.encode(self._tokenizer) for problem in problems]
        sampling_started = datetime.now(UTC)
        samplings, systems = zip(*(self._explored(order) for _ in problems), strict=True)
        asked = [problem.encode(self._tokenizer, system) for problem, system in zip(problems, systems, strict=True)]
        responses = self._engine.sample(asked, samplings)
        sampling_ended = datetime.now(UTC)
        samples = [
            _Sample(problem, prompt, sampling, system, response, self.text(response))
            for problem, prompt, sampling, system, of_prompt in zip(
                problems, prompts, samplings, systems, responses, strict=True
            )
            for response in of_prompt
        ]
        texts, answers = [sample.text for sample in samples], [sample.response for sample in samples]
        prompts, tokens = [sample.prompt for sample in samples], [response.tokens for response in answers]
        references = self._reference.logprobs(prompts, tokens, self._told.temperature)
        scores = self._score([sample.problem for sample in samples], texts, answers)
        rows = list(zip(samples, references, scores.rewards, scores.components, strict=True))
        if self._near_duplicates:
            prompt_ids = [sample.problem.prompt_id for sample in samples]
            keeps = self._near_duplicates.keep(number, prompt_ids, texts, scores.rewards)
            kept = [row for row, is_kept in zip(rows, keeps, strict=True) if is_kept]
            rows = kept or rows[:1]  # a round is not empty
        trajectories = [self._trajectory(number, index, *parts) for index, parts in enumerate(rows)]
        metrics = {
            "searcher": self._name,
            "round": number,
            "policy_step": self._policy_step,
            "started_at": started,
            "sampling_started_at": sampling_started,
            "sampling_ended_at": sampling_ended,
            "ended_at": datetime.now(UTC),
            "num_trajectories": len(trajectories),
            "num_response_tokens": sum(len(trajectory["response_tokens"]) for trajectory in trajectories),
            "reward_mean": sum(scores.rewards) / len(scores.rewards),
        }
        return Round(trajectories, metrics)

    def _explored(self, rng: random.Random) -> tuple[Sampling, str]:
        """How the responses to a prompt are drawn, and behind which system prompt: as set, or explored.

        TBA's code explores each with probability 0.3.
        """
        settings = self._settings
        temperature, top_p = settings.temperature, settings.top_p
        if rng.random() < settings.exploration_probability:
            temperature = rng.uniform(*settings.exploration_temperature)
        if rng.random() < settings.exploration_probability:
            top_p = rng.uniform(*settings.exploration_top_p)
        explores = settings.system_prompts and rng.random() < settings.exploration_probability
        system = rng.choice(settings.system_prompts) if explores else ""
        number, limit = settings.samples_per_prompt, self._told.max_response_tokens
        return Sampling(number, temperature, top_p, limit, self._stop_tokens), system

    def evaluate(self, num_problems: int) -> dict:
        """Greedy accuracy (mean reward) of the served policy on held-out problems."""
        began = time.monotonic()
        problems = self.task.heldout[:num_problems]
        responses = [only for (only,) in self.answers(problems)]
        rewards = self.rewards(problems, responses)
        return {
            "policy_step": self._policy_step,
            "split": "heldout",
            "num_problems": len(problems),
            "accuracy": sum(rewards) / len(rewards),
            "mean_response_tokens": sum(len(response.tokens) for response in responses) / len(responses),
            "seconds": time.monotonic() - began,
            "created_at": datetime.now(UTC),
        }

    def answers(self, problems: list[Problem], num_samples: int = 1, temperature: float = 0.0) -> list[list[Response]]:
        """So many responses to each problem; greedy at temperature 0."""
        prompts = [problem.encode(self._tokenizer) for problem in problems]
        sampling = Sampling(num_samples, temperature, 1.0, self._told.max_response_tokens, self._stop_tokens)
        return self._engine.sample(prompts, sampling)

    def rewards(self, problems: list[Problem], responses: list[Response]) -> list[float]:
        """The run's reward of each response to the problem at its place."""
        return self._score(problems, [self.text(response) for response in responses], responses).rewards

    def reference_logprobs(self, problems: list[Problem], responses: list[Response]) -> list[list[float]]:
        """Log-probability of each response token under the reference policy, at temperature 1."""
        prompts = [problem.encode(self._tokenizer) for problem in problems]
        return self._reference.logprobs(prompts, [response.tokens for response in responses], 1.0)

    def _trajectory(
        self,
        number: int,
        index: int,
        sample: _Sample,
        reference: list[float],
        reward: float,
        components: dict[str, float],
    ) -> dict:
        return {
            "trajectory_id": f"{self._name}-{number:08d}-{index:05d}",
            "prompt_id": sample.problem.prompt_id,
            "prompt": sample.problem.prompt,
            "response": sample.text,
            "prompt_tokens": sample.prompt,
            "response_tokens": sample.response.tokens,
            "behavior_logprobs": sample.response.logprobs,
            "reference_logprobs": reference,
            "reward": reward,
            "rewards": components,
            "finish_reason": sample.response.finish_reason,
            "policy_step": self._policy_step,
            "policy_fingerprint": self._fingerprint,
            "searcher": self._name,
            "round": number,
            "temperature": sample.sampling.temperature,
            "top_p": sample.sampling.top_p,
            "system_prompt": sample.system,
            "reward_version": self.task.version,
            "code_version": self._told.code_version,
            "created_at": datetime.now(UTC),
        }

    def _score(self, problems: list[Problem], texts: list[str], responses: list[Response]) -> Scores:
        tokens, reasons = ([getattr(r, name) for r in responses] for name in ("tokens", "finish_reason"))
        return self.task.score(problems, texts, tokens, reasons)

    def text(self, response: Response) -> str:
        """What a response says, without special tokens."""
        return self._tokenizer.decode(response.tokens, skip_special_tokens=True)
