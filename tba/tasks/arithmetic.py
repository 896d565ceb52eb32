"""Two-digit addition: the task that a model of 135 M parameters learns in minutes. Generated, no source.

    prompt      24 + 17 = 41
                63 + 21 = 84
                58 + 36 = 94
                46 + 39 =
    response     85
    reward      1 if the response is the sum and ends with its line, else 0

All 8,100 ordered pairs but the worked ones are asked, in training or held out, never both.
"""

import random

from tba.tasks.base import Problem

WORKED = ((24, 17), (63, 21), (58, 36))
NUM_HELDOUT = 1000


class Arithmetic:
    name = "arithmetic"
    version = "sum-1"
    stop = ("\n",)
    max_response_tokens = 8  # a space, three digits and the line's end are five

    def __init__(self, *, data: str | None, seed: int) -> None:
        """`seed` decides which pairs are held out. Raises: ValueError: `data` is given."""
        if data is not None:
            raise ValueError(f"task.data: got {data!r}; arithmetic is generated and reads no data: leave it out")
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if (a, b) not in WORKED]
        random.Random(f"arithmetic/{seed}").shuffle(pairs)
        problems = [_problem(a, b) for a, b in pairs]
        self.heldout, self.train = problems[:NUM_HELDOUT], problems[NUM_HELDOUT:]

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        """1 for the sum alone on its line; a response cut off at the length limit has no line's end and gets 0."""
        return [
            float(response.endswith("\n") and response.strip() == problem.answer)
            for problem, response in zip(problems, responses, strict=True)
        ]


def _problem(a: int, b: int) -> Problem:
    worked = "".join(f"{x} + {y} = {x + y}\n" for x, y in WORKED)
    return Problem(f"{a}+{b}", f"{worked}{a} + {b} =", str(a + b))
