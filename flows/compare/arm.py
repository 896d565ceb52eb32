"""An arm of a study, and the outcome of one of its runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """One configuration of a study."""

    label: str  # its name in the tables
    lag: int  # policy steps between sampling and learning, at least
    settings: dict  # of the testbed's Configuration, or of a run

    @property
    def name(self) -> str:
        return f"{self.label}-lag{self.lag}"


@dataclass(frozen=True)
class Outcome:
    """The result of one run."""

    arm: str
    seed: int
    learning_rate: float
    # Greedy, on held-out problems; red-teaming: share of sampled attacks that succeed. None: not measured, because all
    # runs with a model begin with the same one.
    accuracy_before: float | None
    accuracy_after: float
    # Of the responses that the last policy samples to a problem: 8; red-teaming: 64.
    num_distinct: float
    num_distinct_right: float  # with the whole reward; with a model from success_reward on
    seconds: float
    code_version: str
    curve: list[float]  # mean reward of each step's batch; with a model, of each round
    # With a model: of the responses' embeddings, and policy steps.
    cosine_distance: float | None = None
    staleness: float | None = None
    processor: str = ""  # of the machine; older versions did not record it
