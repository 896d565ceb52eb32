r"""MATH: competition mathematics (Hendrycks et al. 2021, arXiv 2103.03874, MIT; Hugging Face dataset
nlile/hendrycks-MATH-benchmark: 12,000 problems to train on, and the 500 of MATH-500).

    problem     What is the greatest common factor of 20 and 45?
    answer      5
    prompt      What is the greatest common factor of 20 and 45?

                Please reason step by step, and put your final answer within \boxed{}.
    response    any text: "… the common divisors are 1 and 5, so it is \boxed{5}."
    reward      1 if math-verify finds an equal answer in the response, else 0

The dataset's `answer` is the content of the last \boxed{} of its `solution`; without that column the answer is read
from `solution`.
"""

import re
import unicodedata
from collections.abc import Mapping
from importlib.util import find_spec

from tba.tasks.base import Problem
from tba.tasks.rows import digest, load_problems, text_of
from tba.tasks.verifier import Verifier

DATASET = "nlile/hendrycks-MATH-benchmark"
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
BOX = r"\boxed{"
MAX_ANSWER_CHARS = 500  # a longer boxed text is no answer, but could take the algebra until its time limit

_verifier = Verifier()


class Math:
    name = "math"
    version = "math-verify-3"
    stop = ()
    max_response_tokens = 2048

    def __init__(self, *, data: str | None) -> None:
        """`data`: problems with `problem` and `answer` or `solution`; None: MATH's.

        Raises: ValueError: the data is not there, a row is broken, lacks a column or boxes nothing; math-verify is not
        installed.
        """
        if find_spec("math_verify") is None:
            raise ValueError("task math: math-verify is not installed; install it, or tba's extra tasks")
        self.train, self.heldout = load_problems(data or DATASET, ["problem"], _problem)

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        """1 where the response's answer equals the problem's."""
        return [float(is_same(p.answer, response)) for p, response in zip(problems, responses, strict=True)]


def is_same(answer: str, response: str) -> bool:
    """Whether the response's conclusion equals the answer, as numbers or formulas.

    The conclusion is the last boxed text; without a box, the answer that math-verify finds. False after the time limit.
    """
    response = plain(response)
    if (boxed := last_boxed(response)) is not None:
        if len(boxed) > MAX_ANSWER_CHARS:
            return False
        response = f"{BOX}{boxed}}}"
    return _verifier.is_same(f"{BOX}{plain(answer)}}}", response)


def plain(text: str) -> str:
    """The text without characters that math-verify misreads: full-width digits, 10², 2½, −."""
    text = re.sub("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: f"^{{{match[0]}}}", text)
    text = re.sub(r"(\d+)([¼½¾⅐-⅞])", r"(\1+\2)", text)
    return unicodedata.normalize("NFKC", text).replace("−", "-").replace("⁄", "/")


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…}, braces inside it balanced; None: there is none."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth, begin = 1, start + len(BOX)
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin:place]
    return None  # never closed: the response was cut off


def _problem(row: Mapping, where: str) -> Problem:
    problem = text_of(row, "problem", where).strip()
    answer = text_of(row, "answer", where) if "answer" in row else last_boxed(str(row.get("solution")))
    if not answer:
        raise ValueError(rf"task.data: {where} has no column 'answer', and its 'solution' boxes nothing (\boxed{{…}})")
    return Problem(digest(problem), f"{problem}\n\n{INSTRUCTION}\n", answer)
