"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168; Hugging Face dataset openai/gsm8k, MIT).

    question    Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many
                clips did Natalia sell altogether in April and May?
    answer      Natalia sold 48/2 = <<48/2=24>>24 clips in May.
                Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.
                #### 72
    prompt      [MATH_TASK] Problem:
                {question}

                Solution:
    reward      1 if the response's last number is the number behind ####, else 0 (TBA's grader; no credit for format)

The prompt is VinePPO's, which the paper's baselines use.
"""

import hashlib
import json
import re
from decimal import Decimal
from pathlib import Path

from tba.tasks.base import Problem

DATASET = "openai/gsm8k"
COLUMNS = ("question", "answer")
# Every tenth question of a file is held out, by a hash of its text: the same ones whatever else the file holds.
HELDOUT_ONE_IN = 10

# Digits with or without thousands separators, a decimal part, and a sign that is not a binary minus ("5-3" ends in 3).
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"(?:(?<![\w.,])[-−]?\$?[-−]?)?(?:{_DIGITS})")


class GSM8K:
    name = "gsm8k"
    version = "last-number-1"
    stop = ()
    max_response_tokens = 512

    def __init__(self, *, data: str | None) -> None:
        """`data`: a local JSONL file with question and answer, or a Hugging Face dataset with those columns.

        Raises: ValueError: the file is not there, a line is broken, a column is missing, an answer has no number.
        """
        rows = read_jsonl(Path(data)) if data and data.endswith(".jsonl") else read_hub(data or DATASET)
        problems = list({(problem := _problem(row, where)).prompt_id: problem for where, row in rows}.values())
        self.heldout = [problem for problem in problems if _is_heldout(problem)]
        self.train = [problem for problem in problems if not _is_heldout(problem)]
        if not self.train or not self.heldout:
            raise ValueError(
                f"task.data: {data} leaves {len(self.train)} problems to train on and {len(self.heldout)} held out "
                f"(one in {HELDOUT_ONE_IN}, by a hash of the question); give a file of at least 50 problems"
            )

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        """1 where the last number of the response equals the answer's."""
        return [
            float(last_number(response) == Decimal(problem.answer))
            for problem, response in zip(problems, responses, strict=True)
        ]


def last_number(text: str) -> Decimal | None:
    """The last number in a text; thousands separators, $ and % are ignored, and a full stop is no decimal point."""
    found = _NUMBER.findall(text)
    return Decimal(re.sub(r"[$,]", "", found[-1]).replace("−", "-")) if found else None


def read_jsonl(file: Path) -> list[tuple[str, dict]]:
    """Each line's object, with where it stands. Raises: ValueError: names file and line."""
    if not file.is_file():
        raise ValueError(f"task.data: there is no file {file}; give a JSONL file with {' and '.join(COLUMNS)}")
    rows = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"task.data: {where} is not JSON ({error}); each line is one object") from error
            if not isinstance(row, dict):
                raise ValueError(f"task.data: {where} is not an object, but {line.strip()[:40]!r}")
            rows.append((where, row))
    return rows


def read_hub(dataset: str) -> list[tuple[str, dict]]:
    """The training split of a Hugging Face dataset. Raises: ValueError: it cannot be loaded here."""
    try:
        from datasets import load_dataset

        rows = load_dataset(dataset, "main", split="train")
    except Exception as error:  # datasets raises its own, the hub's and the network's kinds
        raise ValueError(
            f"task.data: the dataset {dataset!r} cannot be loaded here ({type(error).__name__}: {error}); give a local "
            f"JSONL file with {' and '.join(COLUMNS)} instead (a path that ends in .jsonl)"
        ) from error
    return [(f"{dataset}, row {number}", row) for number, row in enumerate(rows)]


def _problem(row: dict, where: str) -> Problem:
    for column in COLUMNS:
        if not isinstance(row.get(column), str):
            raise ValueError(f"task.data: {where} has no text in {column!r}; it has {', '.join(row) or 'no columns'}")
    answer = last_number(row["answer"].rpartition("####")[2])
    if answer is None:
        raise ValueError(f"task.data: {where}: no number behind #### in its answer")
    question = row["question"].strip()
    prompt_id = hashlib.blake2b(question.encode(), digest_size=8).hexdigest()
    return Problem(prompt_id, f"[MATH_TASK] Problem:\n{question}\n\nSolution:", str(answer))


def _is_heldout(problem: Problem) -> bool:
    return int(problem.prompt_id, 16) % HELDOUT_ONE_IN == 0
