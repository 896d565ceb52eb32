"""A study's runs on the testbed: the small policy of tba/testbed.py, which trains in seconds."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from flows.compare.arm import Arm, Outcome
from storage.mop import SamplingSettings
from tba.config import SearchSettings, Settings, TrainSettings

if TYPE_CHECKING:  # importing them takes torch's seconds
    import torch

    from tba import testbed

# The settings of a run that the testbed has. A study with another one is refused, because it would have no effect.
_KNOWN = {
    "train": {
        "objective", "residual_weight", "beta", "beta_final", "beta_steps", "reference_reset_interval", "warmup_steps",
        "steps", "learning_rate_schedule", "decay_steps", "adam_beta1", "adam_beta2", "weight_decay", "gradient_clip",
    },
    "search": {"prompts_per_round", "samples_per_prompt"},
    "sampling": {
        "prompts_per_batch", "responses_per_prompt", "recent_probability", "differing_rewards_first",
        "reward_temperature", "uniform_fraction", "capacity_per_prompt",
    },
}  # fmt: skip


class Configuration(Settings):
    """An arm's settings: those of a run that the testbed has, and four of the testbed's own."""

    train: TrainSettings
    search: SearchSettings = SearchSettings()
    sampling: SamplingSettings | None = Field(
        None, description="Settings of the replay buffer; None: each step trains on its rounds."
    )
    replay_by_distance: bool = Field(
        False,
        description="Whether a stored response's weight is multiplied by its mean distance to the prompt's others.",
    )
    log_z_rate: float | None = Field(
        None,
        gt=0,
        description="Step size of a learned log Z, as a multiple of the policy's; None: log Z is estimated.",
    )
    searchers: int = Field(1, ge=1, description="Number of rounds that come in at each step.")
    reward: Literal["exact", "dense", "sparse"] = Field(
        "exact",
        description="exact: 1 for the sum; dense: the share of its tokens; sparse: 1 for a number 1 to 9 above it.",
    )

    @model_validator(mode="after")
    def _log_z_is_of_trajectory_balance(self) -> "Configuration":
        if self.log_z_rate is not None and not self.train.is_trajectory_balance:
            raise ValueError(f"log_z_rate: {self.train.objective} has no log Z; leave it out, or take tb")
        return self


@dataclass(frozen=True)
class OnTestbed:
    """Each arm has the step size that is best for it."""

    first_policies: Path = Path(".tba/.local/testbed")  # folder of the pretrained policies, one for each seed

    settings_class: ClassVar = Configuration
    trains_a_model: ClassVar = False
    tunes_step_size: ClassVar = True
    step_size: ClassVar = (
        "Step size: the best of a grid by factors of 3.16, not at its edge, by one run each with another seed:"
    )
    more_measures: ClassVar[dict[str, str]] = {}

    def configuration(self, settings: dict[str, Any], steps: int) -> Configuration:
        """Raises: ValueError, which pydantic's ValidationError is, too."""
        for section, known in _KNOWN.items():
            if unknown := settings.get(section, {}).keys() - known:
                raise ValueError(
                    f"{section}.{min(unknown)} is no setting of the testbed; it has {', '.join(sorted(known))}"
                )
        return Configuration(**settings | {"train": {"steps": steps} | settings.get("train", {})})

    def settings(self, configuration: Configuration) -> dict[str, Any]:
        return configuration.model_dump(mode="json")

    def recorded(self) -> dict[str, str]:
        """What a run depends on besides its arm and seed."""
        from tba import testbed

        return {"pretraining": testbed.pretraining_version()}

    def run(self, arm: Arm, seed: int) -> dict[str, Any]:
        """Fields of an Outcome, by one run in this process, on one thread."""
        import torch

        from tba import testbed

        torch.set_num_threads(1)
        first, configuration = testbed.first_policy(self.first_policies, seed), Configuration(**arm.settings)
        variant = testbed.Variant(configuration.reward, configuration.log_z_rate)
        trained = testbed.train(first, configuration.train, arm.lag, seed, experience(configuration, seed), variant)
        return {
            "accuracy_before": testbed.accuracy(first, reward=configuration.reward),
            "accuracy_after": trained.accuracy,
            "num_distinct": trained.num_distinct,
            "num_distinct_right": trained.num_distinct_right,
            "curve": trained.curve,
        }

    def measures(self, configuration: Configuration) -> tuple[str, str, str]:
        """Names of three measures: accuracy, number of distinct responses, number of distinct right ones."""
        return (
            "Greedy accuracy on held-out problems",
            "Distinct responses among 8 to a held-out problem",
            "Distinct responses with the whole reward among these 8",
        )

    def facts(self, configuration: Configuration) -> dict[str, object]:
        from tba import testbed, testbed_task

        return {
            "policy": f"{sum(p.numel() for p in testbed.Policy().parameters()):,} parameters (tba/testbed.py)",
            "task": "two-digit addition",
            "held-out problems": testbed_task.NUM_SUMS - testbed_task.NUM_TRAIN,
        }

    def before(self, outcomes: list[Outcome]) -> dict[str, str]:
        mean = statistics.fmean(outcome.accuracy_before for outcome in outcomes)
        return {"accuracy before training": f"{mean:.3f}"}


def experience(configuration: Configuration, seed: int) -> "testbed.Experience":
    """The samples of each step of one run: its newest rounds, or with `sampling` draws of a Replay."""
    from flows.compare.replay import Replay
    from tba import testbed

    def rounds(policy: testbed.Policy, step: int, generator: "torch.Generator") -> testbed.Samples:
        search = configuration.search
        num_prompts = configuration.searchers * search.prompts_per_round
        return testbed.sample_sums(policy, num_prompts, search.samples_per_prompt, generator, configuration.reward)

    if configuration.sampling is None:
        return rounds
    return Replay(rounds, configuration.sampling, seed, configuration.replay_by_distance)
