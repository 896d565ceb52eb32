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

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path

from tba.tasks.base import Problem

DATASET = "openai/gsm8k"
COLUMNS = ("question", "answer")
# Share of the problems held out where a dataset comes without a test split.
HELDOUT_ONE_IN = 10

_NUMBER = re.compile(
    r"""
    (?: (?<![\w)]) [-−] \$? | \$ [-−] )?    # a sign, but not the minus of a difference: "5-3" ends in 3, not -3
    (?: (?: \d{1,3}(?:,\d{3})+ (?!\d) | \d+ ) (?:\.\d+)? | \.\d+ )
    """,
    re.VERBOSE,
)

Rows = Iterable[tuple[str, Mapping]]  # a dataset's rows, each with where it stands, for error messages


class GSM8K:
    name = "gsm8k"
    version = "last-number-1"
    stop = ()
    max_response_tokens = 512

    def __init__(self, *, data: str | None) -> None:
        """`data`: a JSONL file with question and answer, or a Hugging Face dataset with those columns; None: GSM8K's.

        A dataset's own test split is held out; without one, a tenth of the problems, chosen by a hash of the question.
        Raises: ValueError: the data is not there, a line is broken, a column is missing, an answer has no number.
        """
        data = data or DATASET
        is_file = data.endswith(".jsonl") or Path(data).is_file()
        train_rows, test_rows = (read_jsonl(Path(data)), None) if is_file else read_hub(data)
        problems = _problems(train_rows)
        heldout = _some(problems) if test_rows is None else _problems(test_rows)
        self.train = [problem for prompt_id, problem in problems.items() if prompt_id not in heldout]
        self.heldout = list(heldout.values())
        if not self.train or not self.heldout:
            raise ValueError(
                f"task.data: {data} gives {len(self.train)} problems to train on and {len(self.heldout)} to hold out; "
                "each needs at least one, so give at least two different questions"
            )

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        """1 where the last number of the response equals the answer's."""
        return [
            float(last_number(response) == Decimal(problem.answer))
            for problem, response in zip(problems, responses, strict=True)
        ]


def last_number(text: str) -> Decimal | None:
    """The last number in a text; None: there is none. Thousands separators, units and a final full stop are ignored."""
    numbers = _NUMBER.findall(text)
    return Decimal(re.sub(r"[$,]", "", numbers[-1]).replace("−", "-")) if numbers else None


def read_jsonl(file: Path) -> Rows:
    """Each line's object. Raises: ValueError: there is no such file, or a line is not an object in JSON."""
    if not file.is_file():
        raise ValueError(f"task.data: there is no file {file}; give a JSONL file with {' and '.join(COLUMNS)}")
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"task.data: {where} is not JSON ({error}); each line is one object") from error
            if not isinstance(row, dict):
                raise ValueError(f"task.data: {where} is not an object, but {line[:40]!r}; each line is one object")
            yield where, row


def read_hub(dataset: str) -> tuple[Rows, Rows | None]:
    """Training and test split (None: it has none) of a Hugging Face dataset. Raises: ValueError: it does not load."""
    try:
        from datasets import load_dataset

        splits = load_dataset(dataset, "main" if dataset == DATASET else None)
        train, test = splits["train"], splits.get("test")
    except Exception as error:  # datasets raises its own, the hub's and the network's kinds
        raise ValueError(
            f"task.data: the dataset {dataset!r} cannot be loaded here ({type(error).__name__}: {error}); give a local "
            f"JSONL file with {' and '.join(COLUMNS)} instead"
        ) from error

    def located(split: str, rows: Iterable[Mapping]) -> Rows:
        return ((f"{dataset}, {split} row {number}", row) for number, row in enumerate(rows))

    return located("train", train), None if test is None else located("test", test)


def _problems(rows: Rows) -> dict[str, Problem]:
    """Problems by prompt_id; of a question that comes twice, the last."""
    problems = (_problem(row, where) for where, row in rows)
    return {problem.prompt_id: problem for problem in problems}


def _some(problems: dict[str, Problem]) -> dict[str, Problem]:
    """One in `HELDOUT_ONE_IN`, rounded up: those of the smallest prompt_ids, which are hashes of the questions."""
    return {
        prompt_id: problems[prompt_id] for prompt_id in sorted(problems)[: math.ceil(len(problems) / HELDOUT_ONE_IN)]
    }


def _problem(row: Mapping, where: str) -> Problem:
    for column in COLUMNS:
        if column not in row:
            raise ValueError(f"task.data: {where} has no column {column!r}, only {', '.join(row) or 'none at all'}")
        if not isinstance(row[column], str):
            raise ValueError(f"task.data: {where}: {column} is {row[column]!r}; it must be text")
    answer = last_number(row["answer"].rpartition("####")[2])
    if answer is None:
        raise ValueError(
            f"task.data: {where}: the answer ends in {row['answer'][-40:]!r}, which has no number behind ####"
        )
    question = row["question"].strip()
    prompt_id = hashlib.blake2b(question.encode(), digest_size=8).hexdigest()
    return Problem(prompt_id, f"[MATH_TASK] Problem:\n{question}\n\nSolution:", str(answer))
