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
from tba.tasks.numerals import without_separators
from tba.tasks.rows import digest, load_problems, text_of
from tba.tasks.verifier import Verifier

DATASET = "nlile/hendrycks-MATH-benchmark"
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
_BOXES = re.compile(r"\\boxed\s*\{"), re.compile(r"\\fbox\s*\{")  # the second where there is none of the first
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character, which is none
MAX_ANSWER_CHARS = 500  # a longer boxed text is no answer, but could take the algebra until its time limit
_SIGNS = {"−": "-", "⁄": "/", "·": r"\cdot ", "∞": r"\infty "}

_verifier = Verifier()


class Math:
    name = "math"
    version = "math-verify-4"
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

    The conclusion is the last boxed text; without a box, the answer that math-verify finds. False if that box is cut
    off, and after the time limit.
    """
    if any(box.search(response) for box in _BOXES):
        boxed = last_boxed(response)
        if boxed is None or len(boxed) > MAX_ANSWER_CHARS:
            return False
        response = _box(boxed)
    else:
        response = plain(response)
    return _verifier.is_same(_box(answer), response)


def _box(answer: str) -> str:
    r"""\boxed{answer}, as math-verify reads it. In a box a space separates thousands, or a number from its fraction."""
    # but 3 141/200 is a number and its fraction
    thousands = r"(?<![\d.])\d{1,3}(?:(?:[ ~]\d{3}){2,}|[ ~]0\d\d|[ ~]\d{3}(?!/))(?!\d)"
    answer = re.sub(thousands, lambda number: re.sub(r"\D", "", number[0]), plain(answer))
    answer = re.sub(r"(?<![\d.^_A-Za-z])(\d+)(?:\s|\\[ ,])+(\d+/\d+)", r"(\1+\2)", answer)
    return rf"\boxed{{{answer.removesuffix('.')}}}"


def plain(text: str) -> str:
    """The text without characters that math-verify misreads: full-width digits, 10², x₂, 2½, −, √2."""
    for mark, characters in (("^", "⁺⁻⁽⁾⁰¹²³⁴⁵⁶⁷⁸⁹ⁿⁱˣʸ"), ("_", "₀-₎ₐ-ₜ")):
        text = re.sub(rf"\{mark}?(?:\{{([{characters}]+)\}}|([{characters}]+))", rf"{mark}{{\1\2}}", text)
    text = re.sub(r"\^?(?:\{\s*°\s*\}|°)", r"^\\circ ", text)
    text = re.sub(r"(\d+)(?:\s|\\[ ,])*([¼½¾⅐-⅞])", r"(\1+\2)", without_separators(text))
    text = re.sub(r"(?<![\w)}\]])–(?=[\d.])", "-", text)  # an en dash as a sign
    text = re.sub(r"√(?:\(([^()]*)\)|(\d+|\w))", r"\\sqrt{\1\2}", text)
    return unicodedata.normalize("NFKC", text).translate(str.maketrans(_SIGNS))


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…}, braces inside it balanced; None: there is none, or it is cut off."""
    ends = next((found for box in _BOXES if (found := [match.end() for match in box.finditer(text)])), [len(text)])
    depth, begin = 1, ends[-1]
    for brace in _BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[begin : brace.start()]
    return None


def _problem(row: Mapping, where: str) -> Problem:
    problem = text_of(row, "problem", where).strip()
    # a table of rows with and without an answer has None in the latter
    has_answer = row.get("answer") not in (None, "")
    answer = text_of(row, "answer", where) if has_answer else last_boxed(str(row.get("solution")))
    if not answer:
        raise ValueError(rf"task.data: {where} has no 'answer', and its 'solution' boxes nothing (\boxed{{…}})")
    return Problem(digest(problem), f"{problem}\n\n{INSTRUCTION}\n", answer)
