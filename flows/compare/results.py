"""Results of a comparison: means over seeds with intervals, hardware and code version, the numbers as a file."""

import json
import os
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flows.compare.arm import Outcome
from infra.machine import processor_name
from storage.queries import query
from storage.store import RunStore
from tba.intervals import half_width


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and half the width of its 95 % confidence interval by Student's t; None for one seed."""

    mean: float
    half_width: float | None
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.half_width is None else f" ± {self.half_width:.3f}")


def confidence_interval(values: list[float], num_intervals: int = 1) -> Interval:
    """Mean and interval of values, one for each seed. num_intervals: how many hold together (Bonferroni)."""
    width = half_width(values, 1 - 0.05 / num_intervals) if len(values) > 1 else None
    return Interval(statistics.fmean(values), width, len(values))


def by_arm(outcomes: list[Outcome], measure: str = "accuracy_after") -> dict[str, dict[int, float]]:
    """A measure by arm and seed, in the order in which the arms first appear."""
    values: dict[str, dict[int, float]] = {}
    for outcome in outcomes:
        values.setdefault(outcome.arm, {})[outcome.seed] = getattr(outcome, measure)
    return values


def paired_differences(
    outcomes: list[Outcome], pairs: list[tuple[str, str]], measure: str = "accuracy_after"
) -> list[Interval]:
    """For each pair of arms, the measure of the first minus that of the second, seed by seed; joint intervals."""
    values = by_arm(outcomes, measure)
    return [
        confidence_interval([values[one][seed] - values[other][seed] for seed in values[one]], len(pairs))
        for one, other in pairs
    ]


def table_lines(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """A table in Markdown."""
    headings = list(headings)
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def results_about(stores: list[RunStore]) -> dict:
    """Hardware, date and code version of results; the code version is that of the runs, which may be older."""
    versions = set()
    for store in stores:
        versions.update(query(store, "SELECT DISTINCT code_version FROM trajectories").column(0).to_pylist())
    return {"commit": ", ".join(sorted(versions))} | hardware(of_model=True)


def hardware(of_model: bool) -> dict:
    """Processor, date, and the GPUs if runs of a model used them. The testbed computes on the processor."""
    import torch

    gpus = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()) if of_model)
    return {
        "hardware": f"{processor_name()}, {os.cpu_count()} cores",
        **({"gpus": ", ".join(f"{number} x {name}" for name, number in gpus.items())} if gpus else {}),
        "date": datetime.now(UTC).date().isoformat(),
    }


def file_name(name: str, about: dict) -> str:
    """Of a comparison's results: `<name>_<cpu or gpu>_<date>`. about: as `hardware` gives it."""
    return f"{name}_{'gpu' if 'gpus' in about else 'cpu'}_{about['date']}"


def write_numbers(file: Path, about: dict, runs: list[dict]) -> None:
    """Writes one JSON object, with one line for each run."""
    lines = ",\n".join(json.dumps(run, default=str) for run in runs)
    file.write_text(f'{{"about": {json.dumps(about)},\n"runs": [\n{lines}\n]}}\n')
