"""Reasoning Gym: procedural problems of about a hundred kinds (Stojanovski et al. 2025, arXiv 2505.24760, Apache-2.0;
PyPI reasoning-gym). `task.generator` names the kind; the package generates and grades.

    generator   chain_sum
    question    State the final answer to the following arithmetic problem: 4 - 1 - 7 =
    prompt      {question}
                Answer:
    response    " -4", or a text that ends in <answer>-4</answer>
    reward      the generator's own score of the answer, 0 to 1: here 1 for -4

The answer is the text in the last <answer> tag; without a tag, the response's last line, its last paragraph where the
right answer has several lines, or as many lines as that has behind a line that ends in a colon, and where blank lines
divide it. The seed decides the problems.
Generators that run an answer as Python code are refused, and those that make other problems in another process or take
any answer for right.
"""

import inspect
import logging
import re

from tba.tasks.base import Problem
from tba.tasks.rows import digest, split

NUM_PROBLEMS = 1200  # some generators take milliseconds a problem; a tenth is held out
# Their problems or answers depend on the order of sets, or of files, which differs between processes.
VARYING = {"codeio", "isomorphic_strings", "knight_swap", "list_functions", "ransom_note", "word_ladder"}
TAKE_ANY_ANSWER = {"game_of_life_halting"}  # its grader compares the truth values of two texts
_REPEAT_MOVES = {"rubiks_cube", "rush_hour"}  # their graders repeat a move as often as the answer says
_RUNS_THE_ANSWER = re.compile(r"\b(eval|exec|parse_expr|sympify)\(\s*answer\b")  # SymPy's functions call eval, too
_HUGE = re.compile(r"\d\.?[eE][+-]?\d[\d_]{4}")  # as an exact number it would take minutes
_MANY = re.compile(r"\d{3}")
_NAN = re.compile(r"\bnan\b", re.IGNORECASE)  # equal to every number, for some graders

log = logging.getLogger("tba.reasoning_gym")


class ReasoningGym:
    stop = ()
    max_response_tokens = 256

    def __init__(self, *, generator: str | None, seed: int) -> None:
        """Raises: ValueError: no such generator, it is refused, or the package is not installed."""
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ValueError(
                f"task reasoning_gym: reasoning-gym is not installed ({error}); install it, or tba's extra tasks"
            ) from error
        if generator not in DATASETS or generator == "composite":  # which needs further generators' settings
            known = sorted(DATASETS.keys() - VARYING - TAKE_ANY_ANSWER - {"composite"})
            raise ValueError(f"task.generator: got {generator!r}; take one of {', '.join(known)}")
        if runs_the_answer(DATASETS[generator][0]):
            raise ValueError(
                f"task.generator: {generator} grades a response by running it as Python code, so a policy could run "
                "anything here; take another generator"
            )
        if generator in TAKE_ANY_ANSWER:
            raise ValueError(f"task.generator: {generator} grades any answer as right; take another generator")
        if generator in VARYING:
            raise ValueError(
                f"task.generator: {generator} makes other problems in each process, so Searchers and resumes would not "
                "have the same; take another generator"
            )
        self.name = f"reasoning_gym.{generator}"
        self.version = f"reasoning-gym-{generator}-4"
        self._repeats_moves = generator in _REPEAT_MOVES
        self._dataset = reasoning_gym.create_dataset(generator, size=NUM_PROBLEMS, seed=seed)
        self._entries = {digest(entry["question"]): entry for entry in self._dataset}
        problems = {
            prompt_id: Problem(prompt_id, f"{entry['question']}\nAnswer:", str(entry["answer"]))
            for prompt_id, entry in self._entries.items()
        }
        self.train, self.heldout = split(problems, None, f"reasoning-gym's {generator}")

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        return [
            self._score(answer_of(response, problem.answer), problem)
            for problem, response in zip(problems, responses, strict=True)
        ]

    def _score(self, answer: str | None, problem: Problem) -> float:
        if answer and not self._can_be_graded(answer, problem.answer):
            return 0.0
        try:
            return float(self._dataset.score_answer(answer=answer, entry=self._entries[problem.prompt_id]))
        except Exception as error:  # a grader may fail on an answer of another form
            log.warning("%s failed on the answer %.200r, which gets reward 0: %r", self.name, answer, error)
            return 0.0

    def _can_be_graded(self, answer: str, right: str) -> bool:
        """Whether the grader neither works on the answer for minutes nor takes a number that is none for any."""
        is_long = _HUGE.search(answer) or (self._repeats_moves and _MANY.search(answer))
        return not is_long and (not _NAN.search(answer) or bool(_NAN.search(right)))


def runs_the_answer(dataset: type) -> bool:
    """Whether a generator's grader gives the answer to `eval`, or to a function of SymPy that does."""
    return bool(_RUNS_THE_ANSWER.search(inspect.getsource(dataset.score_answer)))


def answer_of(response: str, right: str) -> str | None:
    """The response's answer; None: there is none. right: the right answer, in whose form it is."""
    from reasoning_gym.utils import extract_answer

    lines, right = response.strip().split("\n"), right.strip()
    num = right.count("\n") + 1
    has_heading = len(lines) > num > 1 and lines[-num - 1].rstrip().endswith(":")
    if has_heading or re.search(r"\n\s*\n", right):  # a paragraph would be too much, or a part of it
        last = lines[-num:]
    else:
        last = re.split(r"\n\s*\n" if "\n" in right else r"\n", response.strip())[-1:]
    return extract_answer(response) or "\n".join(last).strip() or None
