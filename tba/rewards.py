"""Rewards: checked wherever they come from, and functions of one's own in TRL's signature (GRPOTrainer, reward_funcs).

    # my_rewards.py
    def brief(prompts, completions, answer, **columns) -> list[float]:
        return [float(right in text) - len(text) / 100 for text, right in zip(completions, answer)]

is `my_rewards:brief`. The columns are `prompt_id` and `answer` (None where the task does not ask that prompt).
"""

import importlib
import math
from collections.abc import Callable
from numbers import Real
from typing import Protocol

from tba.tasks.base import Problem


class Rewarding(Protocol):
    """What can reward: a task, or a function of one's own."""

    name: str

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]: ...


class FunctionReward:
    """A function in TRL's signature as a Rewarding."""

    def __init__(self, name: str, function: Callable[..., list[float]]) -> None:
        self.name, self._function = name, function

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        return self._function(
            prompts=[problem.prompt for problem in problems],
            completions=responses,
            prompt_id=[problem.prompt_id for problem in problems],
            answer=[problem.answer for problem in problems],
        )


def load_reward(name: str) -> FunctionReward:
    """The reward called `module:function`; the module is any that Python can import here.

    Raises: ValueError: there is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"reward: got {name!r}; write module:function, such as my_rewards:brief, or task")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module's code is the user's: it may raise anything
        raise ValueError(f"reward {name}: cannot import {module_name} ({type(error).__name__}: {error})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ValueError(
            f"reward {name}: {module_name} has no function {function_name!r}; it has {', '.join(own) or 'none'}"
        )
    return FunctionReward(name, function)


def checked_rewards(reward: Rewarding, problems: list[Problem], responses: list[str]) -> list[float]:
    """The reward of each response.

    Raises: ValueError: the reward failed, returned too few or too many, or one that is not a finite number.
    """
    try:
        rewards = list(reward.rewards(problems, responses))
    except Exception as error:  # a user's code may raise anything
        raise ValueError(f"reward {reward.name} failed ({type(error).__name__}: {error})") from error
    if len(rewards) != len(responses):
        raise ValueError(
            f"reward {reward.name}: {len(rewards)} rewards for {len(responses)} responses; one each is expected"
        )
    for problem, response, value in zip(problems, responses, rewards, strict=True):
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(
                f"reward {reward.name}: that of {problem.prompt_id} for response {response!r} is {value!r}; "
                "a reward is a finite number"
            )
    return [float(value) for value in rewards]
