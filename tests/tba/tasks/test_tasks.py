"""The tasks: problems, rewards, and what is said of data that cannot be used.

- Both tasks: training and held-out problems are disjoint, and the same on every machine.
- arithmetic asks every sum of two-digit numbers; a held-out sum is trained on in neither order; only the sum, alone on
  a line that is ended, is rewarded.
- gsm8k reads the last number of a text as a person would, and never fails on one; every answer of the dataset is
  graded correct against itself; two problems are enough to split.
- gsm8k holds out a dataset's own test split where there is one, and a problem in both splits is not trained on.
- A broken line, a missing column, an answer without a number, a missing file, no `datasets` package, an unknown task:
  the error says where and what.

python -m pytest tests/tba/tasks/test_tasks.py
"""

import json
import random
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest

from tba.config import TaskSettings
from tba.tasks import load_task
from tba.tasks.arithmetic import NOT_ASKED, Arithmetic
from tba.tasks.gsm8k import GSM8K, last_number

GSM8K_TRAIN = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "train.jsonl"

# Real problems (GSM8K, MIT licence), answers shortened to their last lines.
SAMPLE = [
    {"question": "How many clips did Natalia sell?", "answer": "48+24 = <<48+24=72>>72 clips.\n#### 72"},
    {"question": "How much did Weng earn?", "answer": "0.2 x 50 = $<<0.2*50=10>>10.\n#### 10"},
    {"question": "How much is the house worth?", "answer": "80,000*1.5=<<80000*1.5=120000>>120,000\n#### 120,000"},
    {"question": "How cold is it?", "answer": "It is 3 - 8 = -5 degrees.\n#### -5"},
]


def write_jsonl(folder: Path, rows: list[dict], extra_line: str = "") -> str:
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + extra_line)
    return str(file)


def prompts(problems) -> set[str]:
    return {problem.prompt for problem in problems}


# Both


@pytest.mark.parametrize("name", ["arithmetic", "gsm8k"])
def test_the_problems_are_disjoint_and_the_same_on_every_machine(name, tmp_path):
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
    data = write_jsonl(tmp_path, rows) if name == "gsm8k" else None
    one, other = (load_task(TaskSettings(name=name, data=data), seed=7) for _ in range(2))
    assert (one.train, one.heldout) == (other.train, other.heldout)
    assert not prompts(one.train) & prompts(one.heldout)
    ids = [problem.prompt_id for problem in one.train + one.heldout]
    assert len(ids) == len(set(ids))


def test_an_unknown_task_is_refused_by_name():
    with pytest.raises(ValueError, match=r"task\.name: got 'algebra'; known tasks are arithmetic, dataset, gsm8k"):
        load_task(TaskSettings(name="algebra"), seed=0)


# Arithmetic


def test_arithmetic_asks_every_sum_and_trains_on_a_heldout_one_in_neither_order():
    task = Arithmetic(seed=0)
    # 90 * 90 ordered pairs, less three that are not asked in both orders.
    assert len(task.train) + len(task.heldout) == 90 * 90 - 2 * len(NOT_ASKED)
    assert len(task.heldout) >= 1000
    terms = [{frozenset(problem.prompt_id.split(" + ")) for problem in part} for part in (task.train, task.heldout)]
    assert not terms[0] & terms[1]
    # Of 200 that an evaluation asks, few are one sum in two orders: 506 sums * (200 / 1012)^2 to have both in are 20.
    assert len({frozenset(problem.prompt_id.split(" + ")) for problem in task.heldout[:200]}) > 160


def test_the_split_of_seed_0_stays_as_it_is():
    # Written down once: had Python's shuffle or ours changed, a resumed run would train on what it had held out.
    task = Arithmetic(seed=0)
    assert [problem.prompt_id for problem in task.heldout[:3]] == ["94 + 73", "84 + 77", "12 + 40"]
    assert task.heldout[0].prompt == "Addition:\n24 + 17 = 41\n63 + 21 = 84\n94 + 73 ="


def test_another_seed_holds_out_other_sums():
    assert prompts(Arithmetic(seed=0).heldout) != prompts(Arithmetic(seed=1).heldout)


def test_every_sum_is_right():
    for problem in Arithmetic(seed=0).train:
        heading, *lines = (problem.prompt + problem.answer).splitlines()
        assert heading == "Addition:"
        for line in lines:
            left, _, right = line.partition("=")
            assert sum(map(int, left.split(" + "))) == int(right)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (" 85\n", 1), ("85\n", 1), (" 85", 0), (" 86\n", 0), (" 085\n", 0), (" 85 85\n", 0), (" 8 5\n", 0),
        (" 85.\n", 0), ("\n", 0), ("", 0), (" 85\n\n46 + ", 0), ("-85\n", 0),
    ],
)  # fmt: skip
def test_only_the_sum_alone_on_an_ended_line_is_rewarded(response, reward):
    task = Arithmetic(seed=0)
    problem = next(problem for problem in task.train + task.heldout if problem.prompt_id == "46 + 39")
    assert task.rewards([problem], [response]) == [reward]


# GSM8K: the grader


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She sold 72 clips.", "72"),
        ("The total is 1,234.", "1234"),
        ("That makes 1,234,567.89 in all", "1234567.89"),
        ("not a separator: 1,2345", "2345"),
        ("12, 13", "13"),
        ("$5.50", "5.5"),
        ("It costs $1,200.50.", "1200.5"),
        ("10%", "10"),
        ("16 km/h", "16"),
        (r"\boxed{1{,}000}", "1000"),
        ("3.0", "3"),
        ("1.", "1"),
        (".5", "0.5"),
        ("-7", "-7"),
        ("−7 degrees", "-7"),
        ("-$4", "-4"),
        ("$-4", "-4"),
        ("-.5", "-0.5"),
        ("x=-3", "-3"),
        ("(-3)", "-3"),
        ("**-3**", "-3"),
        ("--3", "-3"),
        ("-$-3", "-3"),
        ("5-3", "3"),
        ("5 - 3", "3"),
        ("(2+3)-4", "4"),
        ("5 −3 = 2", "2"),
        ("48+24=<<48+24=72>>72", "72"),
        ("#### 42", "42"),
        ("3 apples and 4 pears", "4"),
        ("007", "7"),
        ("9" * 400, "9" * 400),
        ("-" + "9" * 400, "-" + "9" * 400),
        (r"so 10\,080 in all", "10080"),
        (r"1,\!234", "1234"),
        (r"1\ 234\ 567", "1234567"),
        ("1\u202f234", "1234"),
        ("12 345", "345"),
        (r"a loss of -\$5", "-5"),
        ("–5 degrees", "-5"),
        ("-€5", "-5"),
        ("£-5", "-5"),
        ("pages 5–7", "7"),
        ("5%–7%", "7"),
        ("$5$–$7$", "7"),
        ("5~100 dollars", "100"),
        ("x=–3", "-3"),
        (r"\boxed{–5}", "-5"),
        ("**–5**", "-5"),
        ("$–5$", "-5"),
    ],
)
def test_the_last_number_is_read_as_a_person_would(text, number):
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "-", "$", ".", "−", ",,", "--", "$-.", "½", "x²"])
def test_a_text_without_a_number_has_none(text):
    assert last_number(text) is None


def test_no_text_makes_the_grader_fail():
    rng = random.Random(0)
    for _ in range(20_000):
        last_number("".join(rng.choices("0123456789.,-−$% a", k=8)))


def test_the_reward_is_one_for_the_answers_number_and_zero_without_any(tmp_path):
    task = GSM8K(data=write_jsonl(tmp_path, SAMPLE))
    (house,) = (problem for problem in task.train + task.heldout if "house" in problem.prompt)
    responses = ["It is worth $120,000.00.", "It is worth 120000", "It is worth 120,001.", "A lot."]
    assert task.rewards([house] * 4, responses) == [1, 1, 0, 0]


def assert_every_answer_is_correct(task: GSM8K, rows: list[dict]) -> None:
    answers = {f"[MATH_TASK] Problem:\n{row['question'].strip()}\n\nSolution:": row["answer"] for row in rows}
    problems = task.train + task.heldout
    assert len(problems) == len(rows)
    rewards = task.rewards(problems, [answers[problem.prompt] for problem in problems])
    wrong = [problem for problem, reward in zip(problems, rewards, strict=True) if reward != 1]
    assert not wrong


def test_every_answer_of_the_sample_is_correct(tmp_path):
    assert_every_answer_is_correct(GSM8K(data=write_jsonl(tmp_path, SAMPLE)), SAMPLE)


@pytest.mark.skipif(not GSM8K_TRAIN.exists(), reason=f"GSM8K's training problems are not at {GSM8K_TRAIN}")
def test_every_answer_of_gsm8k_is_correct():
    rows = [json.loads(line) for line in GSM8K_TRAIN.read_text().splitlines()]
    assert len(rows) == 7473
    task = GSM8K(data=str(GSM8K_TRAIN))
    assert_every_answer_is_correct(task, rows)
    assert len(task.heldout) == 748  # a tenth, rounded up


# GSM8K: the data


def test_the_split_does_not_depend_on_the_order_of_the_file(tmp_path):
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
    forwards = GSM8K(data=write_jsonl(tmp_path, rows))
    backwards = GSM8K(data=write_jsonl(tmp_path, rows[::-1]))
    assert forwards.heldout == backwards.heldout and len(forwards.heldout) == 4


def test_two_problems_are_enough_and_one_is_not(tmp_path):
    task = GSM8K(data=write_jsonl(tmp_path, SAMPLE[:2]))
    assert len(task.train) == len(task.heldout) == 1
    with pytest.raises(ValueError, match="gives 0 problems to train on and 1 to hold out"):
        GSM8K(data=write_jsonl(tmp_path, SAMPLE[:1] * 3))


@pytest.mark.parametrize("split", ["test", "validation"])
def test_a_datasets_own_test_split_is_held_out_and_not_trained_on(monkeypatch, split):
    asked = []

    def load_dataset(*arguments):
        asked.append(arguments)
        return {"train": SAMPLE, split: SAMPLE[3:]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = load_task(TaskSettings(name="gsm8k"), seed=0)
    assert asked == [("openai/gsm8k", "main")]
    assert [problem.answer for problem in task.train] == ["72", "10", "120000"]
    assert [problem.answer for problem in task.heldout] == ["-5"]


def test_without_the_datasets_package_a_file_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # import datasets -> ModuleNotFoundError
    with pytest.raises(
        ValueError, match=r"'openai/gsm8k' is no \.jsonl or \.parquet file, .*needs the package datasets"
    ):
        load_task(TaskSettings(name="gsm8k"), seed=0)


def test_a_dataset_that_cannot_be_loaded_or_has_no_split_train_is_named(monkeypatch):
    def load_dataset(*arguments):
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"'openai/gsm8k' cannot be loaded here .*give a local JSONL file"):
        load_task(TaskSettings(name="gsm8k"), seed=0)
    only_sft = SimpleNamespace(load_dataset=lambda *_: {"train_sft": SAMPLE})
    monkeypatch.setitem(sys.modules, "datasets", only_sft)
    with pytest.raises(ValueError, match=r"'openai/gsm8k' has no split train, but train_sft"):
        load_task(TaskSettings(name="gsm8k"), seed=0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "cut o', r"problems\.jsonl, line 5 is not JSON"),
        ("\n", r"problems\.jsonl, line 5 is not JSON"),
        (r'{"question": "\ud800", "answer": "#### 2"}', r"problems\.jsonl, line 5 is not JSON .*surrogates"),
        ("[1, 2]", r"line 5 is not an object, but b'\[1, 2\]'"),
        ('{"question": "q", "solution": "s"}', "line 5 has no column 'answer', only question, solution"),
        ("{}", "line 5 has no column 'question', only none at all"),
        ('{"question": "q", "answer": 3}', "line 5: answer is 3; it must be text"),
        (
            '{"question": "q", "answer": "3 or #### many"}',
            "line 5: the answer ends in '3 or #### many'; give one number",
        ),
        ('{"question": "q", "answer": "#### 3/4"}', r"line 5: the answer ends in '#### 3/4'; .* or the task math"),
        ('{"question": "q", "answer": "3 and 4 are 7"}', "line 5: .*; give one number behind ####"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        load_task(TaskSettings(name="gsm8k", data=write_jsonl(tmp_path, SAMPLE, line)), seed=0)


def test_bytes_that_are_no_text_are_named(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_bytes(json.dumps(SAMPLE[0]).encode() + b'\n{"question": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        load_task(TaskSettings(name="gsm8k", data=str(file)), seed=0)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"there is no file .*nowhere\.jsonl; give a JSONL file with question and answer"
    ):
        load_task(TaskSettings(name="gsm8k", data=str(tmp_path / "nowhere.jsonl")), seed=0)
