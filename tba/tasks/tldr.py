"""TL;DR: summaries of Reddit posts (Völske et al. 2017; Stiennon et al. 2020, arXiv 2009.01325, CC BY 4.0; Hugging Face
vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144).

    query                SUBREDDIT: r/cooking
                         TITLE: My bread does not rise
                         POST: I have baked every week for a year now and …
                         TL;DR:
    reference_response   " Bread stopped rising after I moved; is it the water or the oven?"
    prompt               {query}
    response             " My bread has not risen since I moved. Why?"
    reward               score of query and response by `task.reward_model`, any sequence classifier with one label

A response that is cut gets `task.missing_eos_reward` (published: -1). Without a reward model the reward is ROUGE-L
against the reference summary, which needs no download and is a poor judge.
"""

from collections.abc import Mapping

from tba.tasks.base import Problem
from tba.tasks.classifiers import ROUGE_L, SequenceClassifier, rouge_l
from tba.tasks.rows import digest, load_problems, text_of

DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
COLUMNS = ("query", "reference_response")


class TLDR:
    name = "tldr"
    stop = ()
    max_response_tokens = 128

    def __init__(self, *, data: str | None, reward_model: str | None) -> None:
        """Raises: ValueError: the data is not there, or a row is broken or lacks a column."""
        data = data or DATASET
        self.train, self.heldout = load_problems(data, COLUMNS, _problem)
        self.version = f"tldr-2-{reward_model}" if reward_model not in (None, ROUGE_L) else f"tldr-{ROUGE_L}"
        self._judge = judge(reward_model, "task.reward_model")

    def check(self) -> None:
        """Raises: ValueError: the reward model cannot be loaded."""
        self._judge.check()

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        return self._judge.rewards(problems, responses)


class Overlap:
    """ROUGE-L against the reference summary."""

    def check(self) -> None:
        """Does nothing: no model is needed."""

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        return [rouge_l(text, problem.answer) for problem, text in zip(problems, responses, strict=True)]


class Preference:
    """A reward model's score of prompt and response."""

    def __init__(self, model: SequenceClassifier) -> None:
        self._model = model

    def check(self) -> None:
        """Raises: ValueError: it cannot be loaded, or has several labels."""
        self._model.check(num_labels=1)

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        return self._model.rewards([p.prompt + text for p, text in zip(problems, responses, strict=True)])


def judge(name: str | None, field: str) -> Overlap | Preference:
    """The judge of summaries: the reward model of that name; None: ROUGE-L."""
    return Overlap() if name in (None, ROUGE_L) else Preference(SequenceClassifier(name, field))


def _problem(row: Mapping, where: str) -> Problem:
    query, reference = (text_of(row, column, where) for column in COLUMNS)
    return Problem(digest(query), query, reference.removesuffix("<|endoftext|>"))
