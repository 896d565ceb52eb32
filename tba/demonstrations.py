"""Demonstrations: prompts with responses of any origin, completed to trajectories.

Trajectory Balance learns from responses of any policy, also from those of a person. Its loss compares the responses to
one prompt, so a single response to a prompt, without others from Searchers, teaches nothing.
"""

from tba.reference_policy import ReferencePolicy
from tba.rewards import RewardedTask
from tba.tasks.base import encode_prompt, stop_tokens
from tba.tasks.rows import digest


class Demonstrations:
    """Adds the missing columns of a trajectory to rows of prompt and response."""

    def __init__(self, task: RewardedTask, tokenizer, reference: ReferencePolicy, temperature: float) -> None:
        """`temperature`: the objective's T; the reference's logits are divided by it."""
        self._task, self._tokenizer, self._reference, self._temperature = task, tokenizer, reference, temperature
        self._stop_tokens = stop_tokens(task, tokenizer)
        self._problems = {problem.prompt: problem for problem in [*task.train, *task.heldout]}

    def reference_logprobs(self, prompts: list[list[int]], responses: list[list[int]]) -> list[list[float]]:
        """The reference policy's log-probability of each response token."""
        return self._reference.logprobs(prompts, responses, self._temperature)

    def complete(self, rows: list[dict]) -> list[dict]:
        """The rows with prompt_id, tokens, log-probabilities, reward and finish_reason; a row's own values stay.

        rows: prompt and response, and any other columns of a trajectory; all rows have the same columns.
        Raises: ValueError: the reward is missing, and the task has no such prompt; or the tokens are another model's.
        """
        rows = [self._with_tokens(row) for row in rows]
        if "reference_logprobs" not in rows[0]:
            tokens = ([row[name] for row in rows] for name in ("prompt_tokens", "response_tokens"))
            for row, logprobs in zip(rows, self.reference_logprobs(*tokens), strict=True):
                row["reference_logprobs"] = logprobs
        # No policy sampled a demonstration. It counts as sampled by the reference policy, so the taper lowers its
        # weight once the response is less probable under the policy than under the reference.
        rows = [{"behavior_logprobs": row["reference_logprobs"]} | row for row in rows]
        if "reward" not in rows[0]:
            for row in rows:
                if row["prompt"] not in self._problems:
                    raise ValueError(
                        f"task {self._task.name} has no prompt {row['prompt'][-80:]!r}, so it cannot reward a response "
                        f"to it. Its prompts are such as {next(iter(self._problems))!r}; or add a column `reward`"
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
            if ends and tokens[-1] in self._tokenizer.all_special_ids:  # rewards see no such token of a Searcher either
                row = row | {"response": response.removesuffix(self._tokenizer.decode(tokens[-1:]))}
            row = row | {
                "prompt_tokens": known.encode(self._tokenizer) if known else encode_prompt(self._tokenizer, prompt),
                "response_tokens": tokens if ends else [*tokens, self._stop_tokens[0]],
            }
        elif (text := self._tokenizer.decode(row["response_tokens"], skip_special_tokens=True)) != response:
            raise ValueError(
                f"warm_start: to this model's tokenizer the response_tokens of {response[:80]!r} are {text[:80]!r}. If "
                "they are another model's, leave out prompt_tokens, response_tokens and all log-probabilities"
            )
        defaults = {
            "prompt_id": known.prompt_id if known else digest(prompt),
            "finish_reason": "stop" if set(row["response_tokens"][-1:]) & set(self._stop_tokens) else "length",
        }
        return defaults | row
