"""Tasks by name, one file each."""

from tba.tasks.base import Problem, Task

__all__ = ["Problem", "Task", "load_task"]

TASKS = ("arithmetic", "gsm8k")


def load_task(name: str, *, data: str | None, seed: int) -> Task:
    """The task called `name`, with its problems. `data`: a local file or a Hugging Face dataset; None: the task's own.

    Raises: ValueError: there is no such task, or its data cannot be read; the message says what would be right.
    """
    if name == "arithmetic":
        from tba.tasks.arithmetic import Arithmetic

        return Arithmetic(data=data, seed=seed)
    if name == "gsm8k":
        from tba.tasks.gsm8k import GSM8K

        return GSM8K(data=data)
    raise ValueError(f"task.name: got {name!r}; known tasks are {', '.join(TASKS)}")
