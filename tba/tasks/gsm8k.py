"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168; Hugging Face dataset openai/gsm8k, MIT).

    question    Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many
                clips did Natalia sell altogether in April and May?
    answer      Natalia sold 48/2 = <<48/2=24>>24 clips in May.
                Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.
                #### 72
    prompt      [MATH_TASK] Problem:
                {question}

                Solution:
    response    any text that ends in a number: "… so she sold 72 clips in all."
    reward      1 if the response's last number is the number behind ####, else 0 (TBA's grader; no credit for format)

The prompt is VinePPO's, which the paper's baselines use.
"""

import re
from collections.abc import Mapping
from decimal import Decimal

from tba.tasks.base import Problem
from tba.tasks.numerals import without_separators
from tba.tasks.rows import digest, load_problems, text_of

DATASET = "openai/gsm8k"
COLUMNS = ("question", "answer")

_NUMBER = re.compile(
    r"""
    # a sign, but not the minus of a difference: "5-3" ends in 3, not -3; nor the en dash of a range: "5%–7%"
    (?:
        (?: (?<![\w)]) [-−] | (?<![\w)}\]%$€£°]) – | (?<=\$) – (?=[\d.]) ) (?: \\?\$ | [€£] )?
        | (?: \\?\$ | [€£] ) [-−]
    )?
    (?: (?: \d{1,3}(?:,\d{3})+ (?!\d) | \d+ ) (?:\.\d+)? | \.\d+ )
    """,
    re.VERBOSE,
)


class GSM8K:
    name = "gsm8k"
    version = "last-number-3"
    stop = ()
    max_response_tokens = 512

    def __init__(self, *, data: str | None) -> None:
        """`data`: a JSONL file with question and answer, or a Hugging Face dataset with those columns; None: GSM8K's.

        A dataset's own test split is held out; without one, a tenth of the problems, chosen by a hash of the question.
        Raises: ValueError: the data is not there, a line is broken, a column is missing, or an answer has not exactly
        one number behind ####.
        """
        data = data or DATASET
        config = "main" if data == DATASET else None
        self.train, self.heldout = load_problems(data, COLUMNS, _problem, config)

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        """1 where the last number of the response equals the answer's."""
        return [
            float(last_number(response) == Decimal(problem.answer))
            for problem, response in zip(problems, responses, strict=True)
        ]


def last_number(text: str) -> Decimal | None:
    """The last number in a text; None: there is none. Thousands separators, units and a final full stop are ignored."""
    numbers = _numbers(text)
    if not numbers:
        return None
    number = Decimal(re.sub(r"[^\d.]", "", numbers[-1]))
    return number.copy_negate() if re.search("[-−–]", numbers[-1]) else number


def _numbers(text: str) -> list[str]:
    return _NUMBER.findall(without_separators(text.replace("{,}", ",")))


def _problem(row: Mapping, where: str) -> Problem:
    question, solution = (text_of(row, column, where) for column in COLUMNS)
    final = solution.rpartition("####")[2]
    if len(_numbers(final)) != 1:
        raise ValueError(
            f"task.data: {where}: the answer ends in {solution[-40:]!r}; give one number behind ####, or the task "
            "math, which compares formulas, too"
        )
    question = question.strip()
    return Problem(digest(question), f"[MATH_TASK] Problem:\n{question}\n\nSolution:", str(last_number(final)))
