"""Demonstrations: prompts with responses of any origin, made into what the Trainer learns from.

Trajectory Balance learns from responses of whatever policy, so also from a person's. It compares the responses to one
prompt: a prompt with one response alone, and no Searcher that adds to it, teaches nothing.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from tba.policy import Group, load_policy, response_logprobs
from tba.rewards import RewardedTask
from tba.tasks.base import stop_tokens

GROUPS_PER_PASS = 8  # prompts in a forward pass; 20 responses of 512 tokens to each are 80,000 tokens


class ReferencePolicy:
    """Log-probabilities of given responses under the reference policy. The model loads when first asked."""

    def __init__(self, folder: Path, temperature: float) -> None:
        """`temperature` is the objective's T, which the logits are divided by."""
        self._folder, self._temperature, self._model = folder, temperature, None

    def logprobs(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[list[float]]:
        """Of each response to the prompt at its place: the log-probability of each token."""
        self._model = self._model or load_policy(self._folder)
        by_prompt: dict[tuple, dict[tuple, list[float]]] = {}
        keys = [(tuple(prompt), tuple(response)) for prompt, response in zip(prompts, responses, strict=True)]
        for prompt, response in keys:
            by_prompt.setdefault(prompt, {})[response] = []
        distinct = list(by_prompt.items())
        for start in range(0, len(distinct), GROUPS_PER_PASS):
            part = distinct[start : start + GROUPS_PER_PASS]
            with torch.inference_mode():
                scored = response_logprobs(self._model, [Group(p, list(of)) for p, of in part], self._temperature)
            for (_, of_prompt), tensors in zip(part, scored, strict=True):
                # rounding can leave +1e-8
                of_prompt |= zip(list(of_prompt), (tensor.clamp(max=0).tolist() for tensor in tensors), strict=True)
        return [by_prompt[prompt][response] for prompt, response in keys]


class Demonstrations:
    """Adds to rows of prompt and response what they lack to be trajectories."""

    def __init__(self, task: RewardedTask, tokenizer, reference: ReferencePolicy) -> None:
        self._task, self._tokenizer, self._reference = task, tokenizer, reference
        self._stop_tokens = stop_tokens(task, tokenizer)
        self._problems = {problem.prompt: problem for problem in [*task.train, *task.heldout]}

    def complete(self, rows: list[dict]) -> list[dict]:
        """The rows with prompt_id, tokens, log-probabilities, reward and how they ended; what a row has, stays.

        rows: prompt and response, and any other columns of a trajectory; all rows have the same.
        Raises: ValueError: the reward is missing, and the task does not ask that prompt.
        """
        rows = [self._with_tokens(row) for row in rows]
        if "reference_logprobs" not in rows[0]:
            tokens = ([row[name] for row in rows] for name in ("prompt_tokens", "response_tokens"))
            for row, logprobs in zip(rows, self._reference.logprobs(*tokens), strict=True):
                row["reference_logprobs"] = logprobs
        if "reward" not in rows[0]:
            for row in rows:
                if row["prompt"] not in self._problems:
                    raise ValueError(
                        f"task {self._task.name} does not ask {row['prompt'][-80:]!r}, so it cannot reward a response "
                        "to it; add a column `reward`"
                    )
            problems = [self._problems[row["prompt"]] for row in rows]
            of_rows = ([row[name] for row in rows] for name in ("response", "response_tokens", "finish_reason"))
            scores = self._task.score(problems, *of_rows)
            for row, reward, components in zip(rows, scores.rewards, scores.components, strict=True):
                row |= {"reward": reward, "rewards": components, "reward_version": self._task.version}
        return rows

    def _with_tokens(self, row: dict) -> dict:
        prompt, response = row["prompt"], row["response"]
        known = self._problems.get(prompt)
        if "response_tokens" not in row:
            tokens = self._tokenizer.encode(response, add_special_tokens=False)
            ends = bool(tokens) and tokens[-1] in self._stop_tokens
            row = row | {
                "prompt_tokens": known.encode(self._tokenizer) if known else self._tokenizer.encode(prompt),
                "response_tokens": tokens if ends else [*tokens, self._tokenizer.eos_token_id],
            }
        defaults = {
            "prompt_id": known.prompt_id if known else hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest(),
            # whoever demonstrates gives this response and no other: probability one
            "behavior_logprobs": [0.0] * len(row["response_tokens"]),
            "finish_reason": "stop" if row["response_tokens"][-1] in self._stop_tokens else "length",
        }
        return defaults | row
