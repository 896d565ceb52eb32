"""A study's runs with a model: real Trainer, store, buffer, Searcher and engine (flows/compare/lagged.py)."""

import os
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from flows.compare.arm import Arm, Outcome
from flows.config import RunConfig
from tba.evaluation import success_reward

OF_RUN = {"task", "searchers", "search", "sampling", "train"}  # sections of a run's settings that an arm has
# Settings of a run that would change the age of samples, or have the Trainer wait for samples that do not come.
_SET_BY_STUDY = (
    ("train", "steps"), ("train", "sync_interval"), ("sampling", "max_age"), ("sampling", "samples_per_insert"),
    ("sampling", "min_size"),
)  # fmt: skip


@dataclass(frozen=True)
class OnModel:
    """Arms have the step sizes that the study's file gives."""

    model: str  # named as a run's

    settings_class: ClassVar = RunConfig
    trains_a_model: ClassVar = True
    tunes_step_size: ClassVar = False
    step_size: ClassVar = "Step size:"
    more_measures: ClassVar[dict[str, str]] = {
        "cosine_distance": "Mean cosine distance of these responses",
        "staleness": "Age of samples, in policy steps",
    }

    def configuration(self, settings: dict[str, Any], steps: int) -> RunConfig:
        """Raises: ValueError, which pydantic's ValidationError is, too."""
        if unknown := settings.keys() - OF_RUN:
            raise ValueError(f"{min(unknown)} is no setting of an arm; it has {', '.join(sorted(OF_RUN))}")
        for section, name in _SET_BY_STUDY:
            if name in settings.get(section, {}):
                raise ValueError(f"{section}.{name} cannot be an arm's: the study sets steps and age of samples")
        searchers = settings.get("searchers", 1)
        if type(searchers) is not int or searchers < 1:
            raise ValueError(
                f"searchers is {searchers!r}; give a whole number of at least 1: otherwise no samples come"
            )
        # A sync behind each step, so that the age of samples is exact.
        train = {"steps": steps, "sync_interval": 1, "checkpoint_interval": steps}
        sections = {name: settings.get(name, {}) for name in ("train", "sampling")}
        return RunConfig.model_validate(
            {"model": self.model, "trackers": ()}
            | settings
            | {"train": train | sections["train"], "sampling": {"min_size": 1} | sections["sampling"]}
        )

    def settings(self, configuration: RunConfig) -> dict[str, Any]:
        return configuration.model_dump(mode="json", include=OF_RUN | {"model"})

    def recorded(self) -> dict[str, str]:
        """What a run depends on besides its arm and seed."""
        return {}

    def run(self, arm: Arm, seed: int) -> dict[str, Any]:
        """Fields of an Outcome, by one run in this process, on one thread."""
        os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
        from flows.compare.lagged import run_with_lag

        with tempfile.TemporaryDirectory() as folder:
            here = {"run": arm.name.replace("_", "-"), "store": Path(folder).as_uri(), "seed": seed, "trackers": ()}
            found = run_with_lag(RunConfig.model_validate(arm.settings | here), arm.lag)
        after = asdict(found.after)
        return {
            "accuracy_before": None,
            "accuracy_after": after.pop("accuracy"),
            "staleness": found.staleness,
            "curve": found.curve,
            **after,
        }

    def measures(self, configuration: RunConfig) -> tuple[str, str, str]:
        """Names of three measures: accuracy, number of distinct responses, number of distinct right ones."""
        task = configuration.task.name
        if task == "redteam":
            return "Share of 64 attacks that succeed", "Distinct attacks among them", "Distinct ones that succeed"
        return (
            "Greedy accuracy on held-out problems",
            "Distinct responses among 8 to a held-out problem",
            f"Distinct responses with a reward of at least {success_reward(task)} among these 8",
        )

    def facts(self, configuration: RunConfig) -> dict[str, object]:
        task = configuration.task
        heldout = {} if task.name == "redteam" else {"held-out problems": task.num_heldout}
        return {"policy": self.model, "task": task.name} | heldout

    def before(self, outcomes: list[Outcome]) -> dict[str, str]:
        return {"mean reward of the first round": f"{statistics.fmean(outcome.curve[0] for outcome in outcomes):.3f}"}
