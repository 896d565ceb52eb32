"""Generation: the interface of engines. Both that exist replace the policy's weights or adapters.

Before: tba/generator.py asks for responses; after: tba/vllm_engine.py or tba/transformers_engine.py samples them.

vLLM samples several batches of prompts at once, a token a step, and takes in a policy between two steps: a response in
flight goes on with the new weights and the keys and values that it has, or with the adapters that it began with. (If
memory is short, vLLM drops keys and values of a response, and the new weights compute them again.) Each
token's log-probability is that of the weights that sampled it. Such a mixture of policies is a behavior policy like any
other to the Trajectory Balance loss.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol, TypedDict


@dataclass(frozen=True)
class ServedPolicy:
    """A policy that the engine serves or has served."""

    step: int
    fingerprint: str  # of the weights that the engine took in


@dataclass(frozen=True)
class Response:
    """One sampled continuation of a prompt."""

    tokens: list[int]  # including the stop token
    logprobs: list[float]  # of each token as it was sampled: after temperature and top-p
    finish_reason: str  # "stop" or "length"
    policies: list[tuple[int, ServedPolicy]]  # in order: place of the first token that each policy sampled


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. Temperature 0 is greedy."""

    num_samples: int
    temperature: float
    top_p: float
    max_tokens: int
    stop_tokens: list[int]


class Engine(Protocol):
    """Holds one policy and samples from it. One thread at a time may call it."""

    def load(self, folder: Path, policy_step: int) -> ServedPolicy:
        """Serves the policy in `folder` from now on. Responses in flight go on with it, or with their own adapters."""

    def start(self, prompts: list[list[int]], sampling: Sequence[Sampling], *, first: bool) -> int:
        """Begins a batch: `num_samples` responses to each prompt. Returns its number.

        `first`: before the prompts of other batches that have not begun.
        """

    def step(self) -> dict[int, list[list[Response]]]:
        """Samples on. Returns the batches that are whole now: by number, each prompt's responses, in order."""

    def num_waiting(self) -> int:
        """Number of prompts that wait and have not begun."""

    def abort(self) -> None:
        """Ends all batches without their responses."""


class WholeBatches:
    """An engine's batches if it samples each in one step, by `sample`."""

    def __init__(self) -> None:
        self._numbers, self._waiting = count(), deque()

    def start(self, prompts: list[list[int]], sampling: Sequence[Sampling], *, first: bool) -> int:
        number = next(self._numbers)
        self._waiting.insert(0 if first else len(self._waiting), (number, prompts, sampling))
        return number

    def step(self) -> dict[int, list[list[Response]]]:
        number, *asked = self._waiting.popleft()
        return {number: self.sample(*asked)}

    def num_waiting(self) -> int:
        return sum(len(prompts) for _, prompts, _ in self._waiting)

    def abort(self) -> None:
        self._waiting.clear()


class EngineOptions(TypedDict):
    """Options that every engine takes."""

    max_tokens: int  # of prompt and response together
    max_sequences: int  # responses in flight at once
    seed: int
    threads: int  # of the CPU
