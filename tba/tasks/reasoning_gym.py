"""Reasoning Gym: procedural problems of about a hundred kinds (Stojanovski et al. 2025, arXiv 2505.24760, Apache-2.0;
PyPI reasoning-gym). `task.generator` names the kind; the package generates and grades.

    generator   chain_sum
    question    State the final answer to the following arithmetic problem: 4 - 1 - 7 =
    prompt      {question}
                Answer:
    response    " -4", or a text that ends in <answer>-4</answer>
    reward      the generator's own score of the answer, 0 to 1: here 1 for -4

The answer is the text in the last <answer> tag; without a tag, the response's last line. The seed decides the problems.
"""

from tba.tasks.base import Problem
from tba.tasks.rows import digest, split

NUM_PROBLEMS = 1200  # some generators take milliseconds a problem; a tenth is held out


class ReasoningGym:
    stop = ()
    max_response_tokens = 256

    def __init__(self, *, generator: str | None, seed: int) -> None:
        """Raises: ValueError: no such generator, or the package is not installed."""
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ValueError(f"task reasoning_gym: the package is not installed ({error}): extra tasks") from error
        if generator not in DATASETS:
            raise ValueError(f"task.generator: got {generator!r}; reasoning-gym has {', '.join(sorted(DATASETS))}")
        self.name = f"reasoning_gym.{generator}"
        self.version = f"reasoning-gym-{generator}-1"
        self._dataset = reasoning_gym.create_dataset(generator, size=NUM_PROBLEMS, seed=seed)
        self._entries = {digest(entry["question"]): entry for entry in self._dataset}
        problems = {
            prompt_id: Problem(prompt_id, f"{entry['question']}\nAnswer:", str(entry["answer"]))
            for prompt_id, entry in self._entries.items()
        }
        self.train, self.heldout = split(problems, None, f"reasoning-gym's {generator}")

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        return [
            float(self._dataset.score_answer(answer=answer_of(response), entry=self._entries[problem.prompt_id]))
            for problem, response in zip(problems, responses, strict=True)
        ]


def answer_of(response: str) -> str | None:
    """The response's answer; None: there is none."""
    from reasoning_gym.utils import extract_answer

    lines = response.strip().splitlines()
    return extract_answer(response) or (lines[-1].strip() if lines else None)
