"""Rewards: a task's own, functions in TRL's signature (GRPOTrainer, reward_funcs), and their weighted sum.

    # my_rewards.py
    def brief(prompts, completions, answer, **columns) -> list[float]:
        return [float(right in text) - len(text) / 100 for text, right in zip(completions, answer)]

is `my_rewards:brief`. A function that returns a reward function is called with the literals in its name:
`trl.rewards:get_soft_overlong_punishment(max_completion_len=256, soft_punish_cache=64)`. The columns are
`completion_ids` (tokens), `prompt_id`, `answer` (None if the task has no such prompt) and the dataset's own columns.
For a chat, prompts are lists of messages, and completions are lists of one message. None: the reward does not apply; a
response to which none applies is left out.
"""

import ast
import functools
import hashlib
import inspect
import math
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Protocol

from tba.imports import is_users_own, load_function
from tba.tasks.base import Problem, Task, canonical, stop_tokens

TASK = "task"  # in place of module:function: the task's own reward
COLUMNS = ("completions", "completion_ids", "prompts")  # a reward function takes at least one of them


class Rewarding(Protocol):
    """A source of rewards: a task, or a user's function."""

    name: str

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]: ...


class FunctionReward:
    """A function in TRL's signature."""

    def __init__(
        self, function: Callable[..., list[float | None]], path: str | None = None, arguments: str = ""
    ) -> None:
        """`path`: module:function; the function is the reward's name.

        `arguments`: if that function returns the reward function, the text of its arguments.
        """
        self.path = path or getattr(function, "__name__", type(function).__name__)
        self.name = self.path.rpartition(":")[2]
        self._function, self._arguments = function, arguments

    @property
    def source(self) -> str:
        """Text that changes with the function's source and arguments, but not with the functions that it calls."""
        try:
            return self._arguments + _source(self._function)
        except (OSError, TypeError):  # made at a prompt
            return self._arguments + repr(type(self._function))

    def values(
        self,
        problems: list[Problem],
        responses: list[str],
        tokens: Sequence[Sequence[int]],
        names: Collection[str] = (),
    ) -> list[float | None]:
        """`names`: of columns that are passed although none of these problems has them."""
        names = dict.fromkeys([*names, *(name for problem in problems for name in problem.columns)])
        columns = {name: [problem.columns.get(name) for problem in problems] for name in names}
        return self._function(
            **columns
            | {
                "prompts": [list(p.messages) if p.messages else p.prompt for p in problems],
                "completions": [
                    [{"role": "assistant", "content": text}] if problem.messages else text
                    for problem, text in zip(problems, responses, strict=True)
                ],
                "completion_ids": [list(of_response) for of_response in tokens],
                "prompt_id": [problem.columns.get("prompt_id", problem.prompt_id) for problem in problems],
                "answer": [problem.given_answer for problem in problems],
            }
        )


@dataclass(frozen=True)
class Scores:
    """Rewards of responses: `rewards` are trained on, `components` are their parts before weighting.

    None, where it is allowed: no reward applies to the response.
    """

    rewards: list[float | None]
    components: list[dict[str, float]]


class RewardedTask:
    """A task with the rewards that a run counts: the task's own, or a weighted sum that takes its place."""

    def __init__(
        self,
        task: Task,
        rewards: Sequence[tuple[Rewarding | FunctionReward, float]] = (),
        missing_eos_reward: float | None = None,
        num_left_out: int = 0,
        fingerprint: str = "",
    ) -> None:
        """`missing_eos_reward`: reward of a response that was cut at the length limit; None: as of a finished one.
        `num_left_out`: problems that the task does not have any more, because their prompts are too long.
        `fingerprint`: of all problems (tba.tasks.base).

        Raises: ValueError: two rewards have one name.
        """
        self.task = task
        self.name, self.train, self.heldout = task.name, task.train, task.heldout
        self.stop, self.max_response_tokens = task.stop, task.max_response_tokens
        self.num_left_out, self.fingerprint = num_left_out, fingerprint
        self._parts = list(rewards) or [(task, 1.0)]
        self._missing_eos_reward = missing_eos_reward
        self._columns = dict.fromkeys(name for problem in [*self.train, *self.heldout] for name in problem.columns)
        names = [part.name for part, _ in self._parts]
        if len(set(names)) < len(names):
            raise ValueError(f"task.rewards: {', '.join(names)} has a name twice, but rewards are stored by name")
        self.version = self._version()

    def check(self, tokenizer) -> None:
        """Tries each reward on one problem, with its answer and with an empty response, as models give them, too.

        Raises: ValueError: a reward fails. Rewards with models have own checks.
        """
        problem = self.train[0]
        responses = [problem.answer or "none", ""]
        tokens = [tokenizer.encode(responses[0], add_special_tokens=False), stop_tokens(self.task, tokenizer)[:1]]
        for part, _ in self._parts:
            if hasattr(part, "check"):
                part.check()
            else:
                _checked(part, [problem] * 2, responses, tokens, self._columns)

    def score(
        self,
        problems: list[Problem],
        responses: list[str],
        tokens: Sequence[Sequence[int]],
        finish_reasons: Sequence[str],
        *,
        allows_none: bool = False,
    ) -> Scores:
        """The scores of each response to the problem at its index. `tokens`, `finish_reasons`: of the responses.

        allows_none: of a response to which no reward applies; otherwise that is an error.
        Raises: ValueError: a reward failed, or returned a wrong number of values, or one that is not a finite number.
        """
        by_part = [_checked(part, problems, responses, tokens, self._columns) for part, _ in self._parts]
        rewards, components = [], []
        for index, (problem, reason) in enumerate(zip(problems, finish_reasons, strict=True)):
            of_parts = zip(self._parts, by_part, strict=True)
            applying = [
                (part.name, weight, float(of[index])) for (part, weight), of in of_parts if of[index] is not None
            ]
            if not applying and not allows_none:
                raise ValueError(
                    f"reward {', '.join(part.name for part, _ in self._parts)}: got None for a response to prompt "
                    f"{problem.prompt_id}; rescoring and demonstrations need a number for each response"
                )
            of_response = {name: value for name, _, value in applying}
            total = sum(weight * value for _, weight, value in applying) if applying else None
            if applying and self._missing_eos_reward is not None and reason == "length":
                total = of_response["missing_eos"] = self._missing_eos_reward
            rewards.append(total)
            components.append(of_response)
        return Scores(rewards, components)

    def _version(self) -> str:
        """The task's version, if only its own reward counts; else the name with a digest of all rewards and weights."""
        if self._parts == [(self.task, 1.0)] and self._missing_eos_reward is None:
            return self.task.version
        parts = [
            f"{weight} {part.name} {part.source if isinstance(part, FunctionReward) else self.task.version}"
            for part, weight in self._parts
        ]
        text = "\n".join([*parts, str(self._missing_eos_reward)])
        return f"{self.name}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


class NoneJudged(ValueError):
    """No reward applies to any of some responses."""


def given(rewards: Sequence[float | None]) -> list[float]:
    """The rewards without None. Raises: NoneJudged: all are None."""
    found = [reward for reward in rewards if reward is not None]
    if not found:
        raise NoneJudged(f"task.rewards: all are None for each of {len(rewards)} responses; no reward applies")
    return found


NUMBERS = (bool, int, float, type(None))


def load_reward(name: str) -> FunctionReward:
    """The reward called `module:function`, or `module:function(…)` for one that a function returns.

    Raises: ValueError: there is no such function, it may not be imported or called, or its arguments are not literals.
    """
    path, parenthesis, arguments = name.partition("(")
    function = load_function(path, "reward")
    if not is_users_own(path):
        _check_looks_like_reward(function, name, is_called=bool(parenthesis))
    if not parenthesis:
        return FunctionReward(function, path)
    try:
        call = ast.parse(f"f({arguments}", mode="eval").body
        positional = [ast.literal_eval(value) for value in call.args]
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if not is_users_own(path) and not all(isinstance(v, NUMBERS) for v in [*positional, *named.values()]):
            raise ValueError("a package's function takes numbers only here: text could be code that it runs")
        made = function(*positional, **named)
    except Exception as error:  # not Python, not literals, or refused by the function
        raise ValueError(f"reward {name}: the call failed ({type(error).__name__}: {error})") from error
    return FunctionReward(made, path, parenthesis + arguments)


def _source(function: Callable) -> str:
    """Of a function; of a functools.partial, its arguments, too; of an object with __call__, its class's.

    Raises: OSError, TypeError: it is in no file.
    """
    if isinstance(function, functools.partial):
        return f"{canonical([*function.args, function.keywords])} {_source(function.func)}"
    return inspect.getsource(function if inspect.isroutine(function) else type(function))


def _check_looks_like_reward(function: Callable, name: str, is_called: bool) -> None:
    """Checks a package's function before any call, because packages have functions that start processes or run code.

    Raises: ValueError: it is not of TRL's signature, or, if `is_called`, not annotated to return a function.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        signature = inspect.Signature()
    if isinstance(function, type) or (
        "Callable" not in str(signature.return_annotation)
        if is_called
        else not set(COLUMNS) & set(signature.parameters)
    ):
        rule = "is annotated to return a Callable" if is_called else f"takes one of {', '.join(COLUMNS)}"
        raise ValueError(
            f"reward {name}: of an installed package, only a function that {rule} may be a reward. Write one in a file "
            "of the working folder that calls it"
        )


def _checked(
    part: Rewarding | FunctionReward,
    problems: list[Problem],
    responses: list[str],
    tokens: Sequence[Sequence[int]],
    columns: Collection[str],
) -> list[float | None]:
    """The part's value for each response; None only if a function returns it (does not apply). columns: the data's."""
    is_function = isinstance(part, FunctionReward)
    name = part.path if is_function else part.name
    try:
        values = list(
            part.values(problems, responses, tokens, columns) if is_function else part.rewards(problems, responses)
        )
        values = [value.item() if hasattr(value, "item") else value for value in values]  # NumPy's and torch's scalars
    except Exception as error:  # a user's code may raise anything
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}, line {at.lineno}"
        if at.filename == __file__:  # the call itself
            named = sorted({*COLUMNS, "prompt_id", "answer", *columns})
            where = f"it is called with {', '.join(named)}, by name; a last parameter **others takes the rest"
        raise ValueError(f"reward {name} failed ({type(error).__name__}: {error}; {where})") from error
    if len(values) != len(responses):
        raise ValueError(
            f"reward {name}: got {len(values)} rewards for {len(responses)} responses; return one for each"
        )
    for problem, response, value in zip(problems, responses, values, strict=True):
        if is_function and value is None:
            continue
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(
                f"reward {name}: got {value!r} for prompt {problem.prompt_id} and response {response!r}; "
                "a reward is a finite number"
            )
    return values
