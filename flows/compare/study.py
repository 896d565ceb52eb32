"""A study: configurations compared at each lag, by seeds. A file in studies/ describes it.

Its arms train on the testbed (flows/compare/on_testbed.py) or, with `model`, a model (flows/compare/on_model.py).
"""

import re
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from flows.compare.arm import Arm
from flows.compare.on_model import OnModel
from flows.compare.on_testbed import Configuration, OnTestbed
from flows.config import RunConfig, explanation
from tba.config import Settings

_FOLDER = files("flows.compare") / "studies"
_LABEL = re.compile("[a-z][a-z0-9_]*")
SECTIONS = {"task", "search", "sampling", "train"}  # the other settings of an arm are values


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
    arms: dict[str, dict[str, Any]] = Field(
        min_length=1, description="By label, settings over those in common; `lags`: the lags of this arm; none: all."
    )

    @model_validator(mode="after")
    def _arms_are_configurations(self) -> "Study":
        for label in self.arms:
            lags = self.lags_of(label)
            if not isinstance(lags, list | tuple) or not all(type(lag) is int for lag in lags):
                raise ValueError(f"arm {label}: lags is {lags!r}; give a list of policy steps, such as [1, 4]")
            if not lags or len(set(lags)) < len(lags):
                raise ValueError(f"arm {label}: lags is {list(lags)}; give different policy steps, at least one")
            if not _LABEL.fullmatch(label):
                raise ValueError(f"arm {label!r}: a label has small letters, digits and '_', and begins with a letter")
            try:
                self.configuration(label)
            except ValidationError as error:
                raise ValueError(f"arm {label}: {explanation(error, self.runs.settings_class)}") from error
            except ValueError as error:
                raise ValueError(f"arm {label}: {error}") from error
            if others := sorted(set(self.lags_of(label)) - set(self.lags)):
                raise ValueError(f"arm {label}: lags has {others}, which the study has not; it has {list(self.lags)}")
        if len(self.arms) * len(self.lags) < 2:
            raise ValueError("arms: got one at one lag; a study compares several arms, or several lags")
        if min(self.lags) < 0:
            raise ValueError(f"lags: got {min(self.lags)}; samples are of this policy step, 0, or of an earlier one")
        if self.compared_with not in self.arms:
            raise ValueError(f"compared_with is {self.compared_with!r}, but the arms are {', '.join(self.arms)}")
        if "lags" in self.arms[self.compared_with]:
            raise ValueError(f"arm {self.compared_with}: others are compared with it, so it takes no lags of its own")
        return self

    @property
    def runs(self) -> OnTestbed | OnModel:
        """How its arms train."""
        return OnTestbed() if self.model is None else OnModel(self.model)

    def lags_of(self, label: str) -> Sequence[int]:
        return self.arms[label].get("lags", self.lags)

    def configuration(self, label: str) -> Configuration | RunConfig:
        merged: dict[str, Any] = {}
        of_arm = {section: changes for section, changes in self.arms[label].items() if section != "lags"}
        for section, changes in [*self.common.items(), *of_arm.items()]:
            if section in SECTIONS and not isinstance(changes, dict):
                raise ValueError(f"{section}: got {changes!r}; it is a table of settings, as in {{ … }}")
            merged[section] = merged.get(section, {}) | changes if section in SECTIONS else changes
        return self.runs.configuration(merged, self.steps)

    @property
    def steps_by_arm(self) -> dict[str, int]:
        return {label: self.configuration(label).train.steps for label in self.arms}

    def arms_at_each_lag(self) -> list[Arm]:
        settings = {label: self.runs.settings(self.configuration(label)) for label in self.arms}
        pairs = [(label, lag) for lag in self.lags for label in self.arms if lag in self.lags_of(label)]
        return [Arm(label, lag, settings[label]) for label, lag in pairs]


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
