"""Reasoning Gym's generators as tasks.

- Generators grade their own answers as right and others as wrong, also answers of several lines.
- Refused: an unknown generator, those that run a response as Python code or take any, and those that make other
  problems in another process. The accepted ones make the same ones.
- A response on which a grader fails, or that would keep it busy for minutes, or is no number, gets no reward.

python -m pytest tests/tba/tasks/test_reasoning_gym.py
"""

import contextlib
import os
import subprocess
import sys

import pytest

from tba.config import TaskSettings
from tba.tasks import load_task
from tba.tasks.reasoning_gym import answer_of, runs_the_answer

pytest.importorskip("reasoning_gym", reason="extra tasks")


@pytest.mark.parametrize("generator", ["chain_sum", "spell_backward", "leg_counting"])
def test_reasoning_gym_grades_its_own_answers(generator):
    task = load_task(TaskSettings(name="reasoning_gym", generator=generator), seed=1)
    problems = task.train[:20]
    assert not {p.prompt_id for p in task.train} & {p.prompt_id for p in task.heldout}
    right = [f"Let me see.\n<answer>{problem.answer}</answer> That is it." for problem in problems]
    assert task.task.rewards(problems, right) == [1] * 20
    assert task.task.rewards(problems, [f" {problem.answer}" for problem in problems]) == [1] * 20
    assert max(task.task.rewards(problems, ["a wrong answer"] * 20)) < 1
    assert max(task.task.rewards(problems, [""] * 20)) < 1


def test_reasoning_gyms_answer_is_the_last_tag_or_line():
    assert answer_of("<answer>1</answer> or <answer> 2 </answer>\nyes", "2") == "2"
    assert answer_of("so\n 7 \n", "7") == "7"
    assert answer_of(" \n", "7") is None
    assert answer_of("Turned:\n\n3 1\n4 2\n", "3 1\n4 2") == "3 1\n4 2"
    futoshiki = "3   4\n     \n4   1"  # a line of spaces between rows
    assert answer_of(f"It is\n\n{futoshiki}\n", futoshiki) == futoshiki
    assert answer_of("The answer is:\n3 1\n4 2", "3 1\n4 2") == "3 1\n4 2"
    assert answer_of("Moves:\n\na\nb\nc\nd", "c\nd") == "a\nb\nc\nd", "a longer solution stays whole"


@pytest.mark.parametrize("generator", ["rotate_matrix", "mini_sudoku"])
def test_reasoning_gyms_answers_of_several_lines_are_graded_whole(generator):
    task = load_task(TaskSettings(name="reasoning_gym", generator=generator), seed=1)
    problems = [problem for problem in task.train if "\n" in problem.answer][:20]
    assert len(problems) == 20
    assert task.task.rewards(problems, [problem.answer for problem in problems]) == [1] * 20
    assert task.task.rewards(problems, [f"It is\n\n{problem.answer}\n" for problem in problems]) == [1] * 20


def test_a_number_that_would_keep_a_grader_busy_gets_no_reward():
    task = load_task(TaskSettings(name="reasoning_gym", generator="coin_flip"), seed=1)
    assert task.task.rewards(task.train[:1] * 2, ["1e99999999", "1.e9_999_999"]) == [0, 0]


@pytest.mark.parametrize(("generator", "answer"), [("rush_hour", "F+1 K+99999999999"), ("rubiks_cube", "U2 L99999999")])
def test_a_move_that_would_be_repeated_for_hours_gets_no_reward(generator, answer, monkeypatch):
    task = load_task(TaskSettings(name="reasoning_gym", generator=generator), seed=1)
    monkeypatch.setattr(task.task._dataset, "score_answer", lambda **_: 0.5)
    assert task.task.rewards(task.train[:1] * 2, [answer, "F+1 K-10"]) == [0, 0.5]


@pytest.mark.parametrize("generator", ["complex_arithmetic", "number_sorting"])
def test_what_is_no_number_is_no_answer(generator):
    task = load_task(TaskSettings(name="reasoning_gym", generator=generator), seed=1)
    problems = task.train[:10]
    num_numbers = [problem.answer.count(",") + 1 for problem in problems]
    for answers in ["nan"] * 10, [str(["NaN"] * num) for num in num_numbers]:
        assert max(task.task.rewards(problems, answers)) < 0.1
    assert task.task.rewards(problems, [problem.answer for problem in problems]) == [1] * 10


def test_a_generator_that_takes_any_answer_is_refused():
    with pytest.raises(ValueError, match=r"task\.generator: game_of_life_halting grades any answer as right"):
        load_task(TaskSettings(name="reasoning_gym", generator="game_of_life_halting"), seed=1)


PROBLEMS = """
from reasoning_gym.factory import DATASETS
from tba.tasks.reasoning_gym import VARYING, runs_the_answer
for name in sorted(DATASETS.keys() - VARYING - {"composite"}):
    if not runs_the_answer(DATASETS[name][0]):
        dataset = DATASETS[name][0](DATASETS[name][1](size=3, seed=1))
        print(name, *((each["question"], each["answer"]) for each in dataset))
"""


def test_generators_make_the_same_problems_in_each_process():
    seen = [
        subprocess.run(
            [sys.executable, "-c", PROBLEMS], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert seen[0] == seen[1] and seen[0].count(b"\n") > 80
    with pytest.raises(ValueError, match=r"task\.generator: codeio makes other problems in each process"):
        load_task(TaskSettings(name="reasoning_gym", generator="codeio"), seed=1)


@pytest.mark.parametrize("response", ["5", "null", "[1]", '{"a": "b"}'])
def test_a_response_on_which_a_grader_fails_gets_no_reward(response):
    task = load_task(TaskSettings(name="reasoning_gym", generator="boxnet"), seed=1)
    assert task.task.rewards(task.train[:1], [response]) == [0]


def test_generators_that_run_a_response_as_code_are_refused(tmp_path):
    from reasoning_gym.factory import DATASETS

    refused = {name for name, (dataset, _) in DATASETS.items() if runs_the_answer(dataset)}
    assert refused == {
        "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
        "simple_integration", "spiral_matrix", "string_insertion",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"task\.generator: n_queens grades a response by running it as Python code"):
        load_task(TaskSettings(name="reasoning_gym", generator="n_queens"), seed=1)
    file = tmp_path / "written"
    attack = f"__import__('pathlib').Path({str(file)!r}).touch()"
    for generator in sorted(DATASETS.keys() - refused - {"composite"}):
        dataset = DATASETS[generator][0](DATASETS[generator][1](size=1, seed=1))
        with contextlib.suppress(Exception):
            dataset.score_answer(answer=attack, entry=dataset[0])
    assert not file.exists()


def test_an_unknown_generator_is_refused():
    with pytest.raises(ValueError, match=r"task\.generator: got 'chess'; take one of .*chain_sum"):
        load_task(TaskSettings(name="reasoning_gym", generator="chess"), seed=1)
