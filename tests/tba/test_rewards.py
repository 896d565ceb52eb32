"""Rewards: functions in TRL's signature, their weighted sum, and what is said of one that cannot be used.

- A function gets prompts, completions, tokens and the dataset's columns as TRL's GRPOTrainer hands them over.
- Three of TRL's own run unchanged, one of them made by a call.
- The sum is weighted, components are kept before weights; None leaves a component out; a cut-off response is worth what
  is set.
- The version changes with weights, functions and what made them.
- Lambdas, names that are not there, arguments that are code: refused.

python -m pytest tests/tba/test_rewards.py
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tba.config import TaskSettings
from tba.rewards import FunctionReward, RewardedTask, load_reward
from tba.tasks import load_task
from tba.tasks.base import Problem, canonical, problems_fingerprint

CHAT = Problem(
    "p1", "user: 1/2?", "0.5", ({"role": "user", "content": "1/2?"},), {"solution": r"$\frac{1}{2}$", "answer": "0.5"}
)
TEXT = Problem("p2", "1 + 1 =", "2", None, {"solution": "2"})
needs_trl = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="trl is not installed: extra dev")


class Counting:
    name, version, stop, max_response_tokens = "counting", "letters-1", (), 4
    train = heldout = (TEXT,)

    def rewards(self, problems, responses):
        return [float(len(response)) for response in responses]


def half(prompts, completions, **columns):
    return [0.5] * len(completions)


def longer(n) -> Callable:
    def longer_than(completions, **columns):
        return [float(len(text) > n) for text in completions]

    return longer_than


def only_long(completions, **columns):
    return [1.0 if len(text) > 2 else None for text in completions]


def score(rewards, responses, problems=None, missing_eos=None, reasons=None):
    problems = problems or [TEXT] * len(responses)
    tokens = [list(range(len(response))) for response in responses]
    task = RewardedTask(Counting(), rewards, missing_eos)
    return task.score(problems, responses, tokens, reasons or ["stop"] * len(responses))


def test_a_function_gets_what_trl_hands_over():
    seen = {}

    def look(**columns):
        seen.update(columns)
        return [0, 1]

    FunctionReward(look).values([CHAT, TEXT], ["a", "bc"], [[1], [2, 3]])
    assert seen == {
        "prompts": [[{"role": "user", "content": "1/2?"}], "1 + 1 ="],
        "completions": [[{"role": "assistant", "content": "a"}], "bc"],
        "completion_ids": [[1], [2, 3]],
        "solution": [r"$\frac{1}{2}$", "2"],
        "answer": ["0.5", "2"],
        "prompt_id": ["p1", "p2"],
    }


def test_a_column_prompt_id_of_the_dataset_reaches_the_function_as_it_is():
    seen = []
    problems = [Problem("p3", "6 * 7 =", None, None, {"prompt_id": "row 12"}), Problem("p4", "1 + 1 =", None)]
    FunctionReward(lambda prompt_id, **_: seen.extend(prompt_id) or [1.0, 1.0]).values(problems, ["42", "2"], [[1]] * 2)
    assert seen == ["row 12", "p4"]


def test_an_answer_that_is_no_text_reaches_the_function_as_it_is():
    seen = []
    problem = Problem("p3", "6 * 7 =", None, None, {"answer": 42})
    FunctionReward(lambda answer, **_: seen.extend(answer) or [1.0]).values([problem], ["42"], [[1]])
    assert seen == [42]


def test_a_column_that_only_some_rows_have_is_always_passed():
    """Of another row it is None, also where no row of the call has it."""
    rows = [Problem(f"p{n}", "?", None, None, {"hint": "x"} if n == 3 else {}) for n in range(4)]
    seen = []

    def hinted(completions, hint, **columns):
        seen.extend(hint)
        return [1.0] * len(completions)

    class Some(Counting):
        train, heldout = rows[:2], rows[2:]

    task = RewardedTask(Some(), [(FunctionReward(hinted), 1.0)])
    for row in rows:
        task.score([row], ["a"], [[1]], ["stop"])
    assert seen == [None, None, None, "x"]


def test_the_sum_is_weighted_and_components_are_not():
    scores = score([(Counting(), 2.0), (FunctionReward(half), -1.0)], ["ab", ""])
    assert scores.rewards == [2 * 2 - 0.5, 0 - 0.5]
    assert scores.components == [{"counting": 2.0, "half": 0.5}, {"counting": 0.0, "half": 0.5}]


def test_what_does_not_apply_is_left_out():
    scores = score([(FunctionReward(half), 1.0), (FunctionReward(only_long), 1.0)], ["ab", "abc"])
    assert scores.rewards == [0.5, 1.5]
    assert scores.components == [{"half": 0.5}, {"half": 0.5, "only_long": 1.0}]
    with pytest.raises(
        ValueError, match="got None for a response to prompt p2; rescoring and demonstrations need a number"
    ):
        score([(FunctionReward(only_long), 1.0)], ["ab"])


def test_a_response_cut_at_the_limit_is_worth_what_is_set():
    scores = score([], ["abc", "abc"], missing_eos=-1.0, reasons=["length", "stop"])
    assert scores.rewards == [-1.0, 3.0]
    assert scores.components == [{"counting": 3.0, "missing_eos": -1.0}, {"counting": 3.0}]


def test_the_version_tells_what_counts():
    def version(*rewards, missing_eos=None):
        return RewardedTask(Counting(), rewards, missing_eos).version

    assert version() == "letters-1"
    versions = [
        version(missing_eos=-1.0), version((FunctionReward(half), 1.0)), version((FunctionReward(half), 0.5)),
        version((FunctionReward(only_long, "half"), 1.0)), version((Counting(), 1.0), (FunctionReward(half), 1.0)),
    ]  # fmt: skip
    assert len({"letters-1", *versions}) == 6
    assert version((FunctionReward(half), 1.0)) == versions[1]
    made = [
        version((load_reward(f"{__name__}:{name}"), 1.0)) for name in ("longer(n=3)", "longer(n=300)", "longer(n=3)")
    ]
    assert made[0] == made[2] != made[1]


def scaled(completions, by, **columns):
    return [by for _ in completions]


class Scaled:
    def __call__(self, completions, **columns):
        return [0.5 for _ in completions]


def test_the_version_tells_what_a_partial_and_an_object_compute():
    def version(function):
        return RewardedTask(Counting(), [(FunctionReward(function, "it"), 1.0)]).version

    assert version(partial(scaled, by=1.0)) == version(partial(scaled, by=1.0)) != version(partial(scaled, by=2.0))
    assert "return [0.5 for _ in completions]" in FunctionReward(Scaled(), "it").source


@pytest.mark.parametrize("value", [np.bool_(True), np.float32(1), torch.tensor(1.0)])
def test_scalars_of_numpy_and_torch_are_numbers(value):
    scores = score([(FunctionReward(lambda completions, **_: [value] * len(completions), "it"), 1.0)], ["a"])
    assert scores.rewards == [1.0]


def test_a_reward_that_fails_is_told_with_its_line():
    def broken(completions, **columns):
        raise KeyError("unit")

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf"reward it failed \(KeyError: 'unit'; test_rewards.py, line {line}\)"):
        score([(FunctionReward(broken, "it"), 1.0)], ["a"])


def test_a_reward_that_cannot_be_called_is_told_with_the_names_that_it_is_given():
    def narrow(completions, answer):
        return [0.0] * len(completions)

    given = (
        r"it is called with answer, completion_ids, completions, prompt_id, prompts, solution, by name; .*\*\*others"
    )
    with pytest.raises(ValueError, match=rf"reward narrow failed \(TypeError: .*; {given}"):
        score([(FunctionReward(narrow, "narrow"), 1.0)], ["a"])


def test_weights_and_the_reward_of_a_cut_response_reach_the_task():
    rewards = [f"{__name__}:half", "task"]
    settings = TaskSettings(rewards=rewards, reward_weights=[3.0, 2.0], missing_eos_reward=-1.0)
    task = load_task(settings, seed=0)
    problem = task.train[0]
    scores = task.score([problem] * 2, [f" {problem.answer}\n"] * 2, [[1]] * 2, ["stop", "length"])
    assert scores.rewards == [3.0 * 0.5 + 2.0 * 1.0, -1.0]


def test_the_fingerprint_of_problems_tells_which_are_held_out():
    def fingerprint(train, heldout):
        task = Counting()
        task.train, task.heldout = train, heldout
        return problems_fingerprint(task)

    others = [replace(TEXT, answer="3"), replace(TEXT, prompt_id="p3"), replace(TEXT, columns={"answer": 4})]
    others.append(replace(TEXT, columns={"solution": "3"}))  # a reward may read it
    assert fingerprint([CHAT, TEXT], others) == fingerprint([TEXT, CHAT], others[::-1])
    different = [([CHAT], [TEXT]), ([TEXT], [CHAT]), *(([CHAT], [other]) for other in others)]
    assert len({fingerprint(*problems) for problems in different}) == 6


def test_text_of_a_value_is_the_same_in_every_process():
    """The order of a set and an object's address are not."""
    assert canonical({"b": [1.5, None, "é"], "a": True}) == canonical({"a": True, "b": (1.5, None, "é")})
    assert canonical([{"Paris", "paris"}, Scaled()]) == '["set", "Scaled"]'
    assert canonical({("a", 1): 2}) == "dict"


def test_two_rewards_of_one_name_are_refused():
    with pytest.raises(ValueError, match="half, half has a name twice"):
        RewardedTask(Counting(), [(FunctionReward(half), 1.0), (FunctionReward(only_long, "half"), 1.0)])


# TRL's own


def values(name: str, texts: list[str], problem=CHAT, tokens=None) -> list:
    return load_reward(name).values([problem] * len(texts), texts, tokens or [[0]] * len(texts))


@needs_trl
def test_trls_accuracy_reward_runs():
    texts = [r"It is \boxed{\frac{1}{2}}.", r"\boxed{0.5}", r"\boxed{\frac{1}{3}}"]
    assert values("trl.rewards:accuracy_reward", texts) == [1, 1, 0]


@needs_trl
def test_trls_think_format_reward_runs():
    assert values("trl.rewards:think_format_reward", ["<think>two</think>2", "2"]) == [1, 0]


@needs_trl
def test_trls_length_penalty_is_made_by_a_call():
    # From its source: no penalty to 20 - 8 tokens, then a line down to -1 at 20: 16 tokens are -(16 - 12) / 8.
    name = "trl.rewards:get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)"
    tokens = [[0] * 12, [0] * 16, [0] * 21]
    assert values(name, ["", "", ""], tokens=tokens) == [0, -0.5, -1]
    assert load_reward(name).name == "get_soft_overlong_punishment"


# Names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half", "write module:function"),
        ("no_such_module:half", r"cannot import no_such_module \(ModuleNotFoundError"),
        ("scipy.special:half", r"scipy\.special has no function 'half'"),
        ("scipy.special:logit", "of an installed package, only a function that takes one of completions"),
        ("psutil:Popen(['true'])", "only a function that is annotated to return a Callable"),
        ("torch.hub:load('somebody/repository')", "only a function that is annotated to return a Callable"),
        ("pandas:read_pickle('file.pkl')", "only a function that is annotated to return a Callable"),
        ("tests.storage.helpers:start_python('1')", "only a function that is annotated to return a Callable"),
        (
            "sqlalchemy.util.langhelpers:exec_code_in_env('import os; os.abort()', {}, 'f')",
            "a package's function takes numbers only",
        ),
        (f"{__name__}:longer(__import__('os'))", "the call failed .*malformed node"),
        (f"{__name__}:longer(4", "the call failed .*SyntaxError"),
    ],
)
def test_a_name_that_gives_no_function_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        load_reward(name)


@pytest.mark.parametrize(
    ("file", "module", "name"),
    [
        ("train.py", None, "train"),
        ("scripts/train.py", None, "scripts.train"),
        ("package/train.py", "package.train", "package.train"),  # python -m package.train
        ("../train.py", None, None),
        (None, None, None),  # a notebook
    ],
)
def test_a_function_of_the_program_is_named_as_other_processes_import_it(file, module, name, tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    main = ModuleType("__main__")
    main.__spec__ = module and ModuleSpec(module, None)
    if file:
        main.__file__ = str(Path.cwd() / file)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec("def brief(**columns): return []", vars(main))
    if name:
        assert TaskSettings(rewards=[main.brief]).rewards == (f"{name}:brief",)
    else:
        with pytest.raises(ValueError, match=r"cannot be imported by other processes.*in the working folder"):
            TaskSettings(rewards=[main.brief])


def test_settings_take_names_and_python_objects():
    settings = TaskSettings(rewards="task, a:f, b:g(x=1, y=2)", reward_weights="1,0.5,2")
    assert settings.rewards == ("task", "a:f", "b:g(x=1, y=2)") and settings.reward_weights == (1.0, 0.5, 2.0)
    assert TaskSettings(rewards=[half, "task"]).rewards == (f"{__name__}:half", "task")
    assert TaskSettings(rewards=half, reward_weights=2) == TaskSettings(rewards=[half], reward_weights=[2.0])
    assert TaskSettings.model_validate(settings.model_dump(mode="json")) == settings
    with pytest.raises(ValueError, match="cannot be imported by other processes"):
        TaskSettings(rewards=[lambda **columns: [0]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rewards": "a:f,b:g", "reward_weights": "1"}, "1 weights for 2 task.rewards"),
        ({"name": "dataset"}, "has no reward of its own: name functions"),
        ({"name": "dataset", "rewards": "task"}, "has no reward of its own: name functions"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TaskSettings(**settings)
