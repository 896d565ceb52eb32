"""A replay buffer in memory, for runs on the testbed.

Each step the Searchers bring their rounds, which are then recent, and a batch is drawn as a run's buffer draws it
(storage/mop.py), without store and index. As in storage/buffer.py, of identical responses to a prompt the newest stays,
with the copies that its sync brought, and of each prompt the newest `capacity_per_prompt` responses stay.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from storage import mop
from storage.mop import SamplingSettings
from tba import testbed, testbed_task


@dataclass
class Stored:
    """One distinct response to a prompt."""

    row: int  # in the tensors of all responses
    sync: int
    num_copies: int
    reward: float


class Replay:
    """A testbed.Experience that draws B prompts, K responses to each, from all that Searchers brought."""

    def __init__(
        self, rounds: testbed.Experience, sampling: SamplingSettings, seed: int, by_distance: bool = False
    ) -> None:
        """`rounds`: what Searchers bring at a step. by_distance: see Configuration.replay_by_distance."""
        self._sample, self._sampling, self._seed, self._by_distance = rounds, sampling, seed, by_distance
        self._prompts: dict[int, dict[int, Stored]] = {}  # by the sum's number and the response's, oldest first
        self._rounds: list[testbed.Samples] = []  # of each step, equally many responses
        self._rewards_differ = np.zeros(testbed_task.NUM_SUMS, bool)  # among a prompt's stored responses

    def __call__(self, policy: testbed.Policy, step: int, generator: torch.Generator) -> testbed.Samples:
        samples = self._sample(policy, step, generator)
        self._take_in(samples, step)
        return self._draw(set(samples.numbers.tolist()), step)

    def _take_in(self, samples: testbed.Samples, step: int) -> None:
        num_rows = len(samples.responses)
        numbers = samples.numbers.repeat_interleave(num_rows // len(samples.numbers)).tolist()
        codes = (samples.responses * len(testbed_task.CHARACTERS) ** torch.arange(testbed_task.T)).sum(1).tolist()
        rows = range(len(self._rounds) * num_rows, (len(self._rounds) + 1) * num_rows)
        for row, number, code, reward in zip(rows, numbers, codes, samples.reward.tolist(), strict=True):
            of_prompt = self._prompts.setdefault(number, {})
            before = of_prompt.pop(code, None)
            copies = before.num_copies if before and before.sync == step else 0
            of_prompt[code] = Stored(row, step, copies + 1, reward)
            if len(of_prompt) > self._sampling.capacity_per_prompt:
                del of_prompt[next(iter(of_prompt))]
        self._rounds.append(samples)

    def _draw(self, newest: set[int], step: int) -> testbed.Samples:
        """newest: the numbers of the sums that the step's rounds were of."""
        sampling, numbers = self._sampling, np.array(sorted(self._prompts))
        recent = {number: self._of_sync(number, step) for number in newest}
        for number in recent:
            self._rewards_differ[number] = _differ(self._prompts[number].values())
        differ_recently = np.isin(numbers, [number for number, of_newest in recent.items() if _differ(of_newest)])
        prompts = mop.Prompts(
            numbers.astype(np.uint64),
            np.isin(numbers, list(recent)),
            preferred=self._rewards_differ[numbers] & sampling.differing_rewards_first,
            recent_preferred=differ_recently & sampling.differing_rewards_first,
        )
        chosen, is_recent = mop.choose_prompts(
            prompts, sampling.prompts_per_batch, sampling.recent_probability, self._seed, step
        )
        drawn: list[Stored] = []
        for place, (number, of_newest) in enumerate(zip(numbers[chosen].tolist(), is_recent, strict=True)):
            of_place = recent[number] if of_newest else list(self._prompts[number].values())
            drawn += self._draw_responses(of_place, of_newest, step, place)
        return self._samples(torch.from_numpy(numbers[chosen]), drawn)

    def _of_sync(self, number: int, step: int) -> list[Stored]:
        return [stored for stored in self._prompts[number].values() if stored.sync == step]

    def _draw_responses(self, stored: list[Stored], is_recent: bool, step: int, place: int) -> list[Stored]:
        sampling, reward = self._sampling, np.array([one.reward for one in stored])
        log_weights = np.zeros(len(stored))
        if sampling.reward_temperature is not None and not is_recent:
            log_weights += reward / sampling.reward_temperature
        if self._by_distance and not is_recent and len(stored) > 1:
            log_weights += np.log(_mean_distances(torch.stack([self._response(one) for one in stored])))
        candidates = mop.Candidates(
            np.array([one.row for one in stored], np.uint64),
            log_weights,
            np.array([one.num_copies for one in stored]),
        )
        slots, _ = mop.draw_responses(
            candidates, sampling.responses_per_prompt, sampling.uniform_fraction, self._seed, step, place
        )
        return [stored[slot] for slot in slots]

    def _samples(self, numbers: torch.Tensor, drawn: list[Stored]) -> testbed.Samples:
        return testbed.Samples(
            numbers,
            torch.stack([self._response(one) for one in drawn]),
            torch.stack([self._round_of(one).behavior[one.row % self._num_rows] for one in drawn]),
            torch.tensor([one.reward for one in drawn]),
        )

    def _response(self, stored: Stored) -> torch.Tensor:
        """[T]"""
        return self._round_of(stored).responses[stored.row % self._num_rows]

    def _round_of(self, stored: Stored) -> testbed.Samples:
        return self._rounds[stored.row // self._num_rows]

    @property
    def _num_rows(self) -> int:
        """Responses of each step's rounds."""
        return len(self._rounds[0].responses)


def _mean_distances(responses: torch.Tensor) -> np.ndarray:
    """Of each of n distinct responses [n, T], in how many tokens it differs from another one on average: [n]."""
    differing = (responses.unsqueeze(0) != responses.unsqueeze(1)).sum((1, 2))
    return (differing / (len(responses) - 1)).numpy()


def _differ(stored: Iterable[Stored]) -> bool:
    return len({one.reward for one in stored}) > 1
