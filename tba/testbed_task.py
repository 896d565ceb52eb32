"""The task of the testbed (tba/testbed.py): sums of two numbers below 100, written with the last digit first.

A random 3,000 of the 10,000 sums are held out. Of some 70 % of these the sum in the other order is trained on.

Dimensions: P prompt tokens, T response tokens at most, N responses of any prompts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

P, T = 6, 4
CHARACTERS = "0123456789+=\n"
END = CHARACTERS.index("\n")
NUM_SUMS, NUM_TRAIN = 10_000, 7_000


@dataclass(frozen=True)
class Sums:
    """All sums of two numbers below 100; number 100 * a + b is a + b."""

    prompts: Tensor  # [10,000, P]
    answers: Tensor  # [13, 10,000, T]: right; three that forget a carry; nine that are 1 to 9 above the right
    train: Tensor  # numbers of the sums to learn from
    heldout: Tensor


@cache
def sums() -> Sums:
    pairs = [divmod(number, 100) for number in range(NUM_SUMS)]
    order = torch.randperm(NUM_SUMS, generator=torch.Generator().manual_seed(7))
    kinds = zip(*map(_answers, pairs), strict=True)
    answers = torch.stack([tokens_of([_last_first(answer) for answer in of_kind]) for of_kind in kinds])
    return Sums(tokens_of([f"{a:02d}+{b:02d}=" for a, b in pairs]), answers, order[:NUM_TRAIN], order[NUM_TRAIN:])


def _answers(pair: tuple[int, int]) -> list[int]:
    a, b = pair
    no_carry = 10 * (a // 10 + b // 10) + (a % 10 + b % 10) % 10
    return [a + b, no_carry, (a + b) % 100, no_carry % 100, *range(a + b + 1, a + b + 10)]


def _last_first(answer: int) -> str:
    return (str(answer)[::-1] + "\n").ljust(T, "\n")


def tokens_of(texts: list[str]) -> Tensor:
    return torch.tensor([[CHARACTERS.index(character) for character in text] for text in texts])


def is_token(responses: Tensor) -> Tensor:
    """Whether each token belongs to its response, the end included: [..., T]."""
    ended = (responses == END).cumsum(-1) - (responses == END).long()
    return ended == 0


def rewards(responses: Tensor, numbers: Tensor) -> Tensor:
    """1 for the correct digits and an end after them, else 0: [N]."""
    right = sums().answers[0, numbers]
    return ((responses == right) | ~is_token(right)).all(1).float()


def dense_rewards(responses: Tensor, numbers: Tensor) -> Tensor:
    """The share of the right response's tokens that are in place, its end included: [N]."""
    right = sums().answers[0, numbers]
    counts = is_token(right)
    return ((responses == right) & counts).sum(1) / counts.sum(1)


def sparse_rewards(responses: Tensor, numbers: Tensor) -> Tensor:
    """1 for a number that is 1 to 9 above the sum and for an end after it, else 0: [N].

    So a prompt has nine solutions. The first policy gives one of them in 0.2 % of its responses.
    """
    solutions = sums().answers[4:, numbers]  # [9, N, T]
    return ((responses == solutions) | ~is_token(solutions)).all(2).any(0).float()


REWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exact": rewards,
    "dense": dense_rewards,
    "sparse": sparse_rewards,
}
