"""Two-digit addition: the task that a model of 135 M parameters learns in minutes. Generated, no source.

    prompt      Addition:
                24 + 17 = 41
                63 + 21 = 84
                46 + 39 =
    response     85
    reward      1 if the response is the sum and ends with its line, else 0

The worked lines are the same in every prompt: with such lines the untrained model answers more than a third correctly,
with randomly drawn ones 20 %. A prompt is 33 tokens of SmolLM2. vLLM shares blocks of 32 tokens on a CPU, so it
computes all of a prompt but the last token once for all samples. A SmolLM2 response is a space, two or three digits and
the newline: one token each. The newline stops it.

Two numbers are asked in both orders, both in training or both held out: 39 + 46 gives away 46 + 39.
"""

import random

from tba.tasks.base import Problem

WORKED = ((24, 17), (63, 21))
NOT_ASKED = (*WORKED, (58, 36))  # the last was a worked line once; with it the split of held-out sums would change
NUM_HELDOUT_SUMS = 512  # of 4,092, so about 1,000 problems held out and 7,000 to train on


class Arithmetic:
    name = "arithmetic"
    version = "sum-1"
    stop = ("\n",)
    max_response_tokens = 8  # a sum takes five tokens; longer responses get reward 0

    def __init__(self, *, seed: int) -> None:
        """`seed` decides which sums are held out."""
        rng = random.Random(f"arithmetic/{seed}")  # noqa: S311 - repeatable
        sums = [(a, b) for a in range(10, 100) for b in range(10, a + 1) if (a, b) not in NOT_ASKED]
        rng.shuffle(sums)
        self.heldout = _both_orders(sums[:NUM_HELDOUT_SUMS])
        self.train = _both_orders(sums[NUM_HELDOUT_SUMS:])
        # An evaluation takes the first `num_heldout`, which should not be both orders of half as many sums.
        rng.shuffle(self.heldout)

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        """1 for the sum alone on its line; a response cut off at the length limit has no line's end and gets 0."""
        return [
            float(response.endswith("\n") and response.strip() == problem.answer)
            for problem, response in zip(problems, responses, strict=True)
        ]


def _both_orders(sums: list[tuple[int, int]]) -> list[Problem]:
    """a + b and b + a for each sum; one problem where a is b."""
    return [_problem(*pair) for a, b in sums for pair in dict.fromkeys([(a, b), (b, a)])]


def _problem(a: int, b: int) -> Problem:
    worked = "".join(f"{x} + {y} = {x + y}\n" for x, y in WORKED)
    return Problem(f"{a} + {b}", f"Addition:\n{worked}{a} + {b} =", str(a + b))
