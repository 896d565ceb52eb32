"""A study: configurations compared at each lag, by seeds. A file in studies/ describes it.

Its arms train the small policy of tba/testbed.py or, with `model`, a model by the real parts (flows/compare/lagged.py).
"""

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from flows.config import RunConfig, explanation
from storage.mop import SamplingSettings
from tba.config import SearchSettings, Settings, TrainSettings
from tba.evaluation import success_reward

_FOLDER = files("flows.compare") / "studies"
_LABEL = re.compile("[a-z][a-z0-9_]*")
OF_RUN = {"task", "searchers", "search", "sampling", "train"}  # sections of a run's settings that an arm has
# Settings of a run that would change the age of samples, or have the Trainer wait for samples that do not come.
KEPT = (
    ("train", "steps"), ("train", "sync_interval"), ("sampling", "max_age"), ("sampling", "samples_per_insert"),
    ("sampling", "min_size"),
)  # fmt: skip
# The settings of a run that the testbed has. A study with another one is refused, because it would have no effect.
_OF_TESTBED = {
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


@dataclass(frozen=True)
class Arm:
    """One configuration of a study."""

    label: str  # its name in the tables
    lag: int  # policy steps between sampling and learning, at least
    settings: dict  # of `Configuration`

    @property
    def name(self) -> str:
        return f"{self.label}-lag{self.lag}"


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


class Study(Settings):
    """The content of a study's file."""

    title: str
    model: str | None = Field(
        None,
        description="Model that is trained, as a run's; its arms have a run's settings. None: the testbed's policy.",
    )
    published: str = Field(description="Published result, with its source.")
    expected: str = Field(description="Expected result.")
    lags: tuple[int, ...] = Field(min_length=1)
    seeds: int = Field(10, ge=1)
    steps: int = Field(160, ge=2)
    compared_with: str = Field(description="Label of the arm that the others are compared with.")
    common: dict[str, Any] = Field({}, description="Settings of every arm, by section.")
    arms: dict[str, dict[str, Any]] = Field(min_length=1, description="By label, settings over those in common.")

    @model_validator(mode="after")
    def _arms_are_configurations(self) -> "Study":
        for label in self.arms:
            if not _LABEL.fullmatch(label):
                raise ValueError(f"arm {label!r}: a label has small letters, digits and '_', and begins with a letter")
            try:
                self.configuration(label)
            except ValidationError as error:
                of = Configuration if self.model is None else RunConfig
                raise ValueError(f"arm {label}: {explanation(error, of)}") from error
            except ValueError as error:
                raise ValueError(f"arm {label}: {error}") from error
        if len(self.arms) * len(self.lags) < 2:
            raise ValueError("arms: got one at one lag; a study compares several arms, or several lags")
        if min(self.lags) < 0:
            raise ValueError(f"lags: got {min(self.lags)}; samples are of this policy step, 0, or of an earlier one")
        if self.compared_with not in self.arms:
            raise ValueError(f"compared_with is {self.compared_with!r}, but the arms are {', '.join(self.arms)}")
        return self

    def configuration(self, label: str) -> Configuration | RunConfig:
        merged = dict(self.common)
        for section, changes in self.arms[label].items():
            merged[section] = merged.get(section, {}) | changes if isinstance(changes, dict) else changes
        if self.model is not None:
            return self._run(merged)
        for section, known in _OF_TESTBED.items():
            if not isinstance(merged.get(section, {}), dict):
                raise ValueError(f"{section}: got {merged[section]!r}; it is a table of settings, as in {{ … }}")
            if unknown := merged.get(section, {}).keys() - known:
                raise ValueError(
                    f"{section}.{min(unknown)} is no setting of the testbed; it has {', '.join(sorted(known))}"
                )
        merged["train"] = {"steps": self.steps} | merged.get("train", {})
        return Configuration(**merged)

    @property
    def measured(self) -> tuple[str, str, str]:
        """Names of three measures: accuracy, number of distinct responses, number of distinct right ones."""
        task = None if self.model is None else self.configuration(self.compared_with).task.name
        if task == "redteam":
            return "Share of 64 attacks that succeed", "Distinct attacks among them", "Distinct ones that succeed"
        responses = "Distinct responses among 8 to a held-out problem"
        right = "with the whole reward" if task is None else f"with a reward of at least {success_reward(task)}"
        return "Greedy accuracy on held-out problems", responses, f"Distinct responses {right} among these 8"

    def _run(self, settings: dict[str, Any]) -> RunConfig:
        if unknown := settings.keys() - OF_RUN:
            raise ValueError(f"{min(unknown)} is no setting of an arm; it has {', '.join(sorted(OF_RUN))}")
        for section in OF_RUN - {"searchers"}:
            if not isinstance(settings.get(section, {}), dict):
                raise ValueError(f"{section}: got {settings[section]!r}; it is a table of settings, as in {{ … }}")
        for section, name in KEPT:
            if name in settings.get(section, {}):
                raise ValueError(f"{section}.{name} cannot be an arm's: the study sets steps and age of samples")
        if settings.get("searchers", 1) < 1:
            raise ValueError("searchers is 0, so no samples would come")
        # A sync behind each step, so that the age of samples is exact.
        train = {"steps": self.steps, "sync_interval": 1, "checkpoint_interval": self.steps}
        sections = {name: settings.get(name, {}) for name in ("train", "sampling")}
        return RunConfig.model_validate(
            {"model": self.model, "trackers": ()}
            | settings
            | {"train": train | sections["train"], "sampling": {"min_size": 1} | sections["sampling"]}
        )

    @property
    def steps_by_arm(self) -> dict[str, int]:
        return {label: self.configuration(label).train.steps for label in self.arms}

    def arms_at_each_lag(self) -> list[Arm]:
        kept = None if self.model is None else OF_RUN | {"model"}
        settings = {label: self.configuration(label).model_dump(mode="json", include=kept) for label in self.arms}
        return [Arm(label, lag, settings[label]) for lag in self.lags for label in self.arms]


def study_names() -> list[str]:
    return sorted(file.name.removesuffix(".toml") for file in _FOLDER.iterdir() if file.name.endswith(".toml"))


def read_study(name: str, seeds: int | None = None, steps: int | None = None) -> Study:
    """A study of the project by its name, or another by its file (`folder/mine.toml`).

    seeds, steps: in place of the file's. Raises: ValueError: there is no such study, or its file breaks a rule.
    """
    file = Path(name) if name.endswith(".toml") else _FOLDER / f"{name}.toml"
    instead = {key: value for key, value in {"seeds": seeds, "steps": steps}.items() if value is not None}
    try:
        study = Study(**tomllib.loads(file.read_text()) | instead)
    except FileNotFoundError as error:
        known = f"sync, {', '.join(study_names())}"
        raise ValueError(f"there is no study {name!r}; known are {known}, or a .toml file of your own") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: {error}") from error
    except ValidationError as error:
        raise ValueError(f"{file}:\n{explanation(error, Study)}") from error
    if steps is not None and set(study.steps_by_arm.values()) != {steps}:
        raise ValueError(f"--steps: got {steps}, but the arms of {name} have their own numbers of steps")
    return study
