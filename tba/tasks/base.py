"""What a task is: problems to train on, problems held out, and how a response is rewarded."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """One prompt and its answer."""

    prompt_id: str  # the same on every machine: the buffer and the ledger go by it
    prompt: str
    answer: str


class Task(Protocol):
    """What the class in a task's file offers. `train` and `heldout` share no problem."""

    name: str
    version: str  # of the reward: changes when the same response would be rewarded otherwise
    train: list[Problem]
    heldout: list[Problem]
    stop: tuple[str, ...]  # strings that end a response; each is one token of the policy's tokenizer
    max_response_tokens: int

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        """The reward of each response to the problem at its place: finite numbers."""
