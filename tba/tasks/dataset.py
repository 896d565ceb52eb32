"""The user's own task: a dataset in TRL's prompt-only form, rewarded by functions in TRL's signature (`task.rewards`).

    prompt      text, or messages: [{"role": "user", "content": "Name the capital of France."}]
    response    any
    reward      from the functions in `task.rewards`, which get the row's other columns by name

`task.data` is a .jsonl or .parquet file, a Hugging Face dataset, or module:function that returns rows. A text is
continued as it is; messages are rendered by the policy's chat template.
"""

from collections.abc import Iterable, Mapping

from tba.tasks.base import Problem
from tba.tasks.rows import digest, load_problems

ROLES = ("system", "user", "assistant", "tool")


class Dataset:
    name = "dataset"
    version = "none"
    stop = ()
    max_response_tokens = 256

    def __init__(self, *, data: str | None) -> None:
        """Raises: ValueError: no data, or a row without a prompt of either form."""
        if data is None:
            raise ValueError(
                "task.data: the task dataset has no data of its own; give a .jsonl or .parquet file, a Hugging Face "
                "dataset, or module:function"
            )
        self.train, self.heldout = load_problems(data, ["prompt"], _problem)

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        raise ValueError("the task dataset has no reward of its own; name functions in task.rewards")


def _problem(row: Mapping, where: str) -> Problem:
    columns = {name: value for name, value in row.items() if name != "prompt"}
    answer = columns.get("answer")
    prompt, messages = row["prompt"], None
    if not isinstance(prompt, str):
        messages = _messages(prompt, where)
        prompt = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    if not prompt:
        raise ValueError(f"task.data: {where}: the prompt is empty; a response needs something to follow")
    return Problem(digest(prompt), prompt, answer if isinstance(answer, str) else None, messages, columns)


def _messages(prompt: object, where: str) -> tuple[Mapping[str, str], ...]:
    is_list = isinstance(prompt, Iterable) and not isinstance(prompt, str | bytes | Mapping)  # pandas has arrays
    messages = list(prompt) if is_list else []
    known = all(
        isinstance(message, Mapping) and message.get("role") in ROLES and isinstance(message.get("content"), str)
        for message in messages
    )
    if not messages or not known or messages[-1]["role"] == "assistant":
        raise ValueError(
            f"task.data: {where}: prompt is {str(prompt)[:80]!r}; it must be text, or a list of messages with role "
            f"({', '.join(ROLES)}) and content, of which the last is not the assistant's"
        )
    # Parquet has every key in every message; where one is absent, its value is None
    return tuple({key: value for key, value in message.items() if value is not None} for message in messages)
