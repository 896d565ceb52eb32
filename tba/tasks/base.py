"""A task: problems to train on, held-out problems, and the reward of a response."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Protocol

from tba.model_files import end_tokens

TODAY = date(2026, 1, 1)


@dataclass(frozen=True)
class Problem:
    """One prompt, with the facts that its reward needs."""

    prompt_id: str  # the same on every machine: the buffer and the ledger identify prompts by it
    prompt: str  # text; of a chat: as the policy's template renders it, once `load_task` was given the tokenizer
    answer: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None  # of a chat; None: the prompt is plain text
    columns: Mapping[str, object] = field(default_factory=dict, hash=False)  # the dataset's others, for rewards

    @property
    def given_answer(self) -> object:
        """The dataset's, which may be no text, else the task's."""
        return self.columns.get("answer", self.answer)

    def encode(self, tokenizer, system_prompt: str = "") -> list[int]:
        """The prompt's tokens, after `system_prompt` if there is one. In a chat it replaces the chat's own.

        A chat template adds its own special tokens.
        """
        text = self.prompt
        if system_prompt and self.messages is None:
            text = f"{system_prompt}\n\n{text}"
        elif system_prompt:
            others = [message for message in self.messages if message["role"] != "system"]
            text = render_chat(tokenizer, [{"role": "system", "content": system_prompt}, *others])
        return encode_prompt(tokenizer, text, is_rendered=self.messages is not None)


def encode_prompt(tokenizer, text: str, *, is_rendered: bool = False) -> list[int]:
    """The tokens of a prompt. A text that has its beginning-of-sequence token already gets no second one.

    is_rendered: by a chat template, which adds its own special tokens.
    """
    begins = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return tokenizer.encode(text, add_special_tokens=not (is_rendered or begins))


def render_chat(tokenizer, messages: Sequence[Mapping[str, str]]) -> str:
    """The chat as text, up to where the assistant answers, by the tokenizer's own template.

    A template that writes the date writes `TODAY`: the buffer compares responses to one prompt, which stays the same.
    Raises: ValueError: the template refuses the messages, as some do a system message, or two of one role in a row.
    """
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, strftime_now=TODAY.strftime
        )
    except Exception as error:  # the template's own code: it may raise anything
        raise ValueError(
            f"task.data: the model's chat template refuses a prompt ({type(error).__name__}: {error}), whose messages "
            f"are {list(messages)!r:.400}; change the prompt, or leave search.system_prompts out"
        ) from error


class Task(Protocol):
    """The interface of a task's class. `train` and `heldout` share no problem.

    Before a run starts, `rewards` is tried on one problem, with its answer and with an empty response. A task whose
    rewards need models may have a `check()`, which is called instead and raises ValueError where one does not load.
    """

    name: str
    version: str  # of the reward; change it when the same response gets another reward
    train: list[Problem]
    heldout: list[Problem]
    stop: tuple[str, ...]  # strings that end a response; each is one token of the policy's tokenizer
    max_response_tokens: int

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        """The reward of each response to the problem at its index: finite numbers."""


def problems_fingerprint(task: Task) -> str:
    """Of prompts, answers, other columns, and which problems are held out, in any order. The same in every process."""
    facts = [
        sorted(" ".join([problem.prompt_id, *map(canonical, _facts(problem))]) for problem in part)
        for part in (task.train, task.heldout)
    ]
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _facts(problem: Problem) -> list[object]:
    """A problem's answer, and the dataset's other columns if there are any."""
    others = {name: value for name, value in problem.columns.items() if name != "answer"}
    return [problem.given_answer, *([others] if others else [])]


def canonical(value: object) -> str:
    """A value as text that is the same in every process; of what JSON has no form for, only the type's name."""
    try:
        return json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    except (TypeError, ValueError):  # keys that JSON has not; a value that contains itself
        return type(value).__name__


def stop_tokens(task: Task, tokenizer) -> list[int]:
    """Ids of the tokens that end a response: the tokenizer's end of sequence, the model's, which vLLM takes from its
    folder, too, and each that ends with a stop string.

    Llama 3's and Qwen2's tokenizers have one token for a full stop with the newline after it.
    Raises: ValueError: a stop string is not a single token of this tokenizer; nothing ends a response.
    """
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = own + end_tokens(Path(tokenizer.name_or_path))
    for text in task.stop:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) != 1:
            raise ValueError(
                f"task {task.name}: stop {text!r} is {len(tokens)} tokens of this tokenizer, and must be one"
            )
        (end,) = tokenizer.convert_ids_to_tokens(tokens)  # as the vocabulary spells it
        ids += sorted(token for spelled, token in tokenizer.get_vocab().items() if spelled.endswith(end))
    if not ids:
        raise ValueError(
            f"model {tokenizer.name_or_path}: nothing ends a response: its tokenizer has no eos_token, and its "
            "generation_config.json no eos_token_id; give one of them"
        )
    return list(dict.fromkeys(ids))
