"""The Searcher: samples responses by a slightly old policy and scores them.

Before: flows/searcher/policy_feed.py delivers the policy; after: flows/search.py commits the round.

    produces      one shard of trajectories a round
    consumes      prompts of the task, and the newest policy
    waits for     the first policy, then nothing: Trajectory Balance learns from the responses of any policy. In a
                  synchronous run it waits for a new policy before each round
    unblocks      the Trainer's first batch; later ones only if the run limits rate or age of draws

The engine does not wait, either, unless the Searcher has one core only. A whole round of prompts waits in it, and they
begin where responses have ended. Meanwhile another thread scores and commits the round before, and loads policies: a
response may begin with one policy and end with a later one.

A Searcher keeps no state that a run needs: a round's prompts follow from (seed, searcher, round). It can be killed,
added or removed at any time. If it is killed, the rounds that it has not committed are sampled again.
"""

import random
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tba.config import SearchSettings
from tba.engine import Engine, Response, Sampling, ServedPolicy, WholeBatches
from tba.generator import Generator, SampledBatch
from tba.near_duplicates import NearDuplicates
from tba.reference_policy import ReferencePolicy
from tba.reference_process import ReferenceProcess
from tba.rewards import NoneJudged, RewardedTask, Scores, given
from tba.tasks.base import Problem, stop_tokens

POLL_S = 0.5  # between two looks for a policy while a round is sampled
# Rounds that are begun, at most, while a long response of an earlier one is sampled. The engine stays full if that
# response takes as long as seven rounds.
AHEAD = 8
UNSCORED = 3  # sampled rounds that wait to be scored: while there are so many, no round begins


@dataclass(frozen=True)
class SearcherIdentity:
    """The identity of a Searcher. Prompts follow from name and seed; trajectories have name and code version."""

    name: str
    seed: int
    code_version: str


@dataclass(frozen=True)
class Models:
    """The models of a Searcher."""

    tokenizer: PreTrainedTokenizerBase
    engine: Engine
    reference: ReferencePolicy | ReferenceProcess


@dataclass(frozen=True)
class SampledPrompt:
    """A problem of a round, with the settings by which its responses are sampled."""

    problem: Problem
    prompt_tokens: list[int]  # as trained on, without the system prompt
    sampling: Sampling
    system_prompt: str  # before the prompt in sampling; "": none


@dataclass(frozen=True)
class ScoredResponse:
    """A response to a prompt, with its reward and its reference log-probabilities."""

    prompt: SampledPrompt
    response: Response
    text: str
    reference_logprobs: list[float]
    reward: float
    components: dict[str, float]


@dataclass(frozen=True)
class PendingRound:
    """A round whose prompts are in the engine."""

    prompts: list[SampledPrompt]
    began_at: datetime
    batch: Future[SampledBatch]


@dataclass(frozen=True)
class SampledRound:
    """The responses of a round, before they are scored."""

    number: int
    prompts: list[SampledPrompt]
    responses: list[list[Response]]  # to each prompt
    times: dict  # storage's SEARCH_ROUND columns that are known by now

    @property
    def policies(self) -> set[ServedPolicy]:
        """The policies that sampled the round."""
        return {policy for of in self.responses for response in of for _, policy in response.policies}


@dataclass(frozen=True)
class Round:
    """The result of a round.

    trajectories: storage's TRAJECTORY columns without `trajectory_id` and `schema_version`, which are the shard's.
    metrics: storage's SEARCH_ROUND columns.
    """

    trajectories: list[dict]
    metrics: dict


class Searcher:
    """Samples S responses to each prompt of a round, and adds reward and reference log-probabilities."""

    def __init__(
        self,
        identity: SearcherIdentity,
        task: RewardedTask,
        models: Models,
        settings: SearchSettings,
        *,
        max_response_tokens: int,
        temperature: float,
    ) -> None:
        """`temperature`: the objective's T; the reference's logits are divided by it."""
        self._identity, self.task, self._settings = identity, task, settings
        self._tokenizer, self._reference = models.tokenizer, models.reference
        self._generator = Generator(models.engine)
        # An engine of whole batches would hold each round back until the next one is sampled, too.
        self._may_sample_ahead = not isinstance(models.engine, WholeBatches)
        self._max_response_tokens, self._temperature = max_response_tokens, temperature
        self._pending: dict[int, PendingRound] = {}  # by number
        self._redrawn: dict[int, int] = {}  # by number: how often other prompts were drawn, as no reward applied
        self._served: ServedPolicy | None = None
        self._sampled_until = datetime.min.replace(tzinfo=UTC)  # when the last round's sampling ended
        self._stop_tokens = stop_tokens(task, models.tokenizer)
        self.vocabulary_size = models.reference.vocabulary_size  # loads it
        distance = settings.near_duplicate_distance
        self._near_duplicates = NearDuplicates(distance) if distance else None

    def load(self, folder: Path, policy_step: int) -> ServedPolicy:
        """Loads the policy in `folder` into the engine. See tba/engine.py for responses in flight."""
        self._served = self._generator.load(folder, policy_step)
        return self._served

    def sample(
        self, number: int, *, ahead: bool = False, while_waiting: Callable[[], object] = lambda: None
    ) -> SampledRound:
        """Waits for the responses of a round. `while_waiting` is called every `POLL_S`; it may load a policy.

        `ahead`: meanwhile, and until they are asked for, the engine samples the next rounds, too, if it can.
        """
        ahead = ahead and self._may_sample_ahead
        started, policy = datetime.now(UTC), self._served
        while not wait([self._begin(number).batch], POLL_S).done or self._pending[number].batch.cancelled():
            if ahead:
                self._feed(number)
            while_waiting()
        pending = self._pending.pop(number)
        responses, ended = pending.batch.result()
        if ahead:
            self._feed(number + 1)
        # Prompts begin in order, so the engine has worked on this round since the last one was sampled, unless that one
        # had a response that took longer than this whole round.
        began = min(max(pending.began_at, self._sampled_until), ended)
        self._sampled_until = max(self._sampled_until, ended)
        times = {"policy_step": policy.step, "started_at": started, "sampling_started_at": began}
        return SampledRound(number, pending.prompts, responses, times | {"sampling_ended_at": ended})

    def has_sampled(self, number: int) -> bool:
        """Whether a round that was begun ahead is whole."""
        return self._is_begun(number) and self._pending[number].batch.done()

    def drop_rounds(self) -> None:
        """Ends the rounds in flight without their responses."""
        self._generator.cancel()
        self._pending.clear()

    def _feed(self, first: int) -> None:
        """Begins rounds from `first` on until a whole round waits in the engine, which lasts while one is scored.

        A waiting prompt does not age: it begins with the policy of that time. No round begins while `UNSCORED` ones
        wait to be scored: further responses would only grow old.
        """
        while self._generator.num_waiting() < min(self._settings.prompts_per_round, len(self.task.train)):
            rounds = range(first, first + 1 + AHEAD)
            num_sampled = sum(1 for _ in takewhile(self.has_sampled, rounds))
            not_begun = [number for number in rounds if not self._is_begun(number)]
            if num_sampled >= UNSCORED or not not_begun:
                return
            self._begin(not_begun[0])

    def _is_begun(self, number: int) -> bool:
        """Whether a round's prompts are in the engine, or were sampled. A load that fails ends them."""
        return number in self._pending and not self._pending[number].batch.cancelled()

    def _begin(self, number: int) -> PendingRound:
        """Puts a round's prompts into the engine, unless they are in it."""
        if not self._is_begun(number):
            prompts = self._prompts_of_round(number)
            asked = [prompt.problem.encode(self._tokenizer, prompt.system_prompt) for prompt in prompts]
            batch = self._generator.start(asked, [prompt.sampling for prompt in prompts])
            self._pending[number] = PendingRound(prompts, datetime.now(UTC), batch)
        return self._pending[number]

    def score(self, sampled: SampledRound) -> Round:
        """Adds rewards and reference log-probabilities.

        Raises: NoneJudged: no reward applies to any response; the round's next sample has other prompts. ValueError: a
        reward failed, or is not finite. RuntimeError: the reference policy's process was killed; the next call starts
        another.
        """
        try:
            scored = self._scored_responses(sampled.prompts, sampled.responses)
        except NoneJudged:
            self._redrawn[sampled.number] = self._redrawn.get(sampled.number, 0) + 1
            raise
        kept = self._without_near_duplicates(sampled.number, scored)
        return Round(
            [self._trajectory(sampled.number, response) for response in kept],
            sampled.times
            | {
                "searcher": self._identity.name,
                "round": sampled.number,
                "ended_at": datetime.now(UTC),
                "num_trajectories": len(kept),
                "num_response_tokens": sum(len(each.response.tokens) for each in scored),
                "reward_mean": sum(each.reward for each in scored) / len(scored),
            },
        )

    def _prompts_of_round(self, number: int) -> list[SampledPrompt]:
        """The same ones for a repeated round, unless no reward applied to them."""
        again = f"/{self._redrawn[number]}" if number in self._redrawn else ""
        chance = random.Random(f"{self._identity.seed}/{self._identity.name}/{number}{again}")  # noqa: S311 - repeatable
        problems = chance.sample(self.task.train, min(self._settings.prompts_per_round, len(self.task.train)))
        return [
            SampledPrompt(problem, problem.encode(self._tokenizer), *self._explored(chance)) for problem in problems
        ]

    def _scored_responses(self, prompts: list[SampledPrompt], responses: list[list[Response]]) -> list[ScoredResponse]:
        """The responses of a round to which a reward applies. responses: to each prompt."""
        pairs = [(asked, response) for asked, of in zip(prompts, responses, strict=True) for response in of]
        problems, flat = [asked.problem for asked, _ in pairs], [response for _, response in pairs]
        references = self._reference.logprobs(
            [asked.prompt_tokens for asked, _ in pairs], [response.tokens for response in flat], self._temperature
        )
        texts = [self.text(response) for response in flat]
        scores = self._score(problems, texts, flat)
        given(scores.rewards)  # raises where no reward applies to any: a shard has at least one row
        columns = zip(pairs, texts, references, scores.rewards, scores.components, strict=True)
        return [
            ScoredResponse(asked, response, text, reference, reward, components)
            for (asked, response), text, reference, reward, components in columns
            if reward is not None
        ]

    def _without_near_duplicates(self, number: int, scored: list[ScoredResponse]) -> list[ScoredResponse]:
        """The responses without near-duplicates, if the settings drop these; at least one, so a round is not empty."""
        if not self._near_duplicates:
            return scored
        prompt_ids = [each.prompt.problem.prompt_id for each in scored]
        texts, rewards = [each.text for each in scored], [each.reward for each in scored]
        keeps = self._near_duplicates.keep(number, prompt_ids, texts, rewards)
        return [each for each, is_kept in zip(scored, keeps, strict=True) if is_kept] or scored[:1]

    def _explored(self, chance: random.Random) -> tuple[Sampling, str]:
        """Sampling settings and system prompt for a prompt: as configured, or drawn at random for exploration.

        TBA's code explores each with probability 0.3.
        """
        settings = self._settings
        temperature, top_p = settings.temperature, settings.top_p
        if chance.random() < settings.exploration_probability:
            temperature = chance.uniform(*settings.exploration_temperature)
        if chance.random() < settings.exploration_probability:
            top_p = chance.uniform(*settings.exploration_top_p)
        explores = settings.system_prompts and chance.random() < settings.exploration_probability
        system = chance.choice(settings.system_prompts) if explores else ""
        number, limit = settings.samples_per_prompt, self._max_response_tokens
        return Sampling(number, temperature, top_p, limit, self._stop_tokens), system

    def evaluate(self, num_problems: int) -> dict:
        """Greedy accuracy (mean reward) on held-out problems of the policy that was loaded last.

        Problems to whose response no reward applies are left out of the mean.

        Returns storage's EVALUATION columns without those that name the policy.
        """
        began = time.monotonic()
        problems = self.task.heldout[:num_problems]
        responses = [only for (only,) in self.sample_responses(problems)]
        if any(policy != self._served for response in responses for _, policy in response.policies):
            self.drop_rounds()  # beside the adapters in flight the engine had no room for this policy's
            responses = [only for (only,) in self.sample_responses(problems)]
        rewards = given(self.rewards(problems, responses))
        return {
            "split": "heldout",
            "num_problems": len(problems),
            "accuracy": sum(rewards) / len(rewards),
            "mean_response_tokens": sum(len(response.tokens) for response in responses) / len(responses),
            "seconds": time.monotonic() - began,
            "created_at": datetime.now(UTC),
        }

    def sample_responses(
        self, problems: list[Problem], num_samples: int = 1, temperature: float = 0.0
    ) -> list[list[Response]]:
        """`num_samples` responses of the policy that was loaded last to each problem; greedy at temperature 0."""
        prompts = [problem.encode(self._tokenizer) for problem in problems]
        sampling = Sampling(num_samples, temperature, 1.0, self._max_response_tokens, self._stop_tokens)
        return self._generator.sample(prompts, [sampling] * len(prompts))

    def rewards(self, problems: list[Problem], responses: list[Response]) -> list[float | None]:
        """The run's reward of each response to the problem at its place; None: no reward applies."""
        return self._score(problems, [self.text(response) for response in responses], responses).rewards

    def reference_logprobs(self, problems: list[Problem], responses: list[Response]) -> list[list[float]]:
        """Log-probability of each response token under the reference policy, at temperature 1."""
        prompts = [problem.encode(self._tokenizer) for problem in problems]
        return self._reference.logprobs(prompts, [response.tokens for response in responses], 1.0)

    def _trajectory(self, number: int, scored: ScoredResponse) -> dict:
        prompt, response = scored.prompt, scored.response
        first, last = (response.policies[place][1] for place in (0, -1))
        return {
            "prompt_id": prompt.problem.prompt_id,
            "prompt": prompt.problem.prompt,
            "response": scored.text,
            "prompt_tokens": prompt.prompt_tokens,
            "response_tokens": response.tokens,
            "behavior_logprobs": response.logprobs,
            "reference_logprobs": scored.reference_logprobs,
            "reward": scored.reward,
            "rewards": scored.components,
            "finish_reason": response.finish_reason,
            "policy_step": first.step,
            "policy_fingerprint": first.fingerprint,
            "last_policy_step": last.step,
            "last_policy_fingerprint": last.fingerprint,
            "searcher": self._identity.name,
            "round": number,
            "temperature": prompt.sampling.temperature,
            "top_p": prompt.sampling.top_p,
            "system_prompt": prompt.system_prompt,
            "reward_version": self.task.version,
            "code_version": self._identity.code_version,
            "created_at": datetime.now(UTC),
        }

    def _score(self, problems: list[Problem], texts: list[str], responses: list[Response]) -> Scores:
        tokens, reasons = ([getattr(r, name) for r in responses] for name in ("tokens", "finish_reason"))
        return self.task.score(problems, texts, tokens, reasons, allows_none=True)

    def text(self, response: Response) -> str:
        """The text of a response, without special tokens."""
        return self._tokenizer.decode(response.tokens, skip_special_tokens=True)
