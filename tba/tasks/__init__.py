"""Tasks by name, one file each."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tba.config import TaskSettings
from tba.tasks.base import Problem, Task, problems_fingerprint, render_chat
from tba.tasks.classifiers import ROUGE_L, WORD_LIST

if TYPE_CHECKING:
    from tba.rewards import RewardedTask

__all__ = ["Problem", "Task", "load_task", "scorers_fingerprint"]

# By name, which is its module's, too: a task's class, and what it is made from: settings of `task`, and the run's seed.
_CLASSES = {
    "arithmetic": ("Arithmetic", ("seed",)),
    "dataset": ("Dataset", ("data",)),
    "gsm8k": ("GSM8K", ("data",)),
    "math": ("Math", ("data",)),
    "reasoning_gym": ("ReasoningGym", ("generator", "seed")),
    "redteam": ("RedTeam", ("victim", "classifier")),
    "tldr": ("TLDR", ("data", "reward_model")),
}
TASKS = tuple(_CLASSES)
SCORERS = ("reward_model", "victim", "classifier")  # settings that name models which score responses
# Settings that only some tasks read.
READ_BY = {
    setting: tuple(task for task, (_, made_from) in _CLASSES.items() if setting in made_from)
    for setting in ("data", "generator", *SCORERS)
} | {"gold_reward_model": ("tldr",)}  # flows/evaluate.py does


def load_task(settings: TaskSettings, *, seed: int, tokenizer=None) -> "RewardedTask":
    """The task of a run: its problems and its rewards.

    tokenizer: the policy's, which renders chat prompts; None: they are not rendered.
    Raises: ValueError: no such task or reward, or its data cannot be read, or all prompts are too long; the message
    names the remedy.
    """
    from tba.rewards import TASK, RewardedTask, load_reward  # they know what a Problem is: not at the top

    task, num_left_out = _task(settings, seed), 0
    fingerprint = problems_fingerprint(task)  # before any is left out, as tokenizers of two versions may differ
    if tokenizer is not None:
        task.train, task.heldout = ([_rendered(p, tokenizer) for p in part] for part in (task.train, task.heldout))
        if settings.max_prompt_tokens is not None:
            num_left_out = _leave_out_long_prompts(task, tokenizer, settings.max_prompt_tokens)
    weights = settings.reward_weights or (1.0,) * len(settings.rewards)
    rewards = [
        (task if name == TASK else load_reward(name), weight)
        for name, weight in zip(settings.rewards, weights, strict=True)
    ]
    return RewardedTask(task, rewards, settings.missing_eos_reward, num_left_out, fingerprint)


def scorers_fingerprint(settings: TaskSettings) -> str | None:
    """The settings that name models which score responses, each with its model's fingerprint.

    That of a folder is its weights', which are all read; that of a model of the Hugging Face Hub is its commit.
    None: no model scores responses, or only the embedded one. Raises: FileNotFoundError: a folder has no safetensors.
    """
    from tba.models import EMBEDDED_MODEL, hub_commit
    from tba.weights import fingerprint, read_weights

    named = {name: getattr(settings, name) for name in SCORERS if settings.name in READ_BY[name]}
    found = [
        f"{name} {fingerprint(read_weights(model)) if Path(model).is_dir() else hub_commit(model)}"
        for name, model in named.items()
        if model not in (None, EMBEDDED_MODEL, ROUGE_L, WORD_LIST)
    ]
    return ", ".join(found) or None


def _task(settings: TaskSettings, seed: int) -> Task:
    if settings.name not in TASKS:
        raise ValueError(f"task.name: got {settings.name!r}; known tasks are {', '.join(TASKS)}")
    class_name, made_from = _CLASSES[settings.name]
    make = getattr(import_module(f"tba.tasks.{settings.name}"), class_name)
    return make(**{name: seed if name == "seed" else getattr(settings, name) for name in made_from})


def _rendered(problem: Problem, tokenizer) -> Problem:
    if problem.messages is None:
        return problem
    if not tokenizer.chat_template:
        raise ValueError(
            f"task.data: prompt {problem.prompt_id} is a chat, and the model's tokenizer has no chat template; give "
            "prompts as text, or a model with a chat template"
        )
    return replace(problem, prompt=render_chat(tokenizer, problem.messages))


def _leave_out_long_prompts(task: Task, tokenizer, max_tokens: int) -> int:
    """Returns how many have more than `max_tokens` tokens. Raises: ValueError: all training or held-out prompts do."""
    num_before = len(task.train) + len(task.heldout)
    for part, name in (("train", "training"), ("heldout", "held-out")):
        lengths = [len(problem.encode(tokenizer)) for problem in getattr(task, part)]
        kept = [problem for problem, n in zip(getattr(task, part), lengths, strict=True) if n <= max_tokens]
        if lengths and not kept:
            raise ValueError(
                f"task.max_prompt_tokens is {max_tokens}, and all {len(lengths)} {name} prompts are longer; the "
                f"shortest has {min(lengths)} tokens. Give at least that."
            )
        setattr(task, part, kept)
    return num_before - len(task.train) - len(task.heldout)
