"""docs/results/README.md says what the numbers beside it say.

- Every mean with an interval on the page is the mean of some arm's runs in a JSON file of docs/results, or the mean
  difference of two arms with its joint interval, or the mean ratio of two modes' times, rounded as printed.
- Every page and file of results is linked from it.

python -m pytest tests/test_results.py
"""

import json
import re
from itertools import permutations
from pathlib import Path

import pytest

from flows.compare.results import confidence_interval
from flows.compare.turns import TIMES

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PAGE = (RESULTS / "README.md").read_text()
MEASURES = (
    "accuracy_after",
    "reward_mean",
    "num_distinct",
    "num_distinct_right",
    "cosine_distance",
    "wall_s",
    "seconds_to_common",
    "seconds_a_step",
    "searcher_idle_share",
    "staleness_mean",
)

DIFFERENCES = ("accuracy_after", "reward_mean", "num_distinct_right")  # of two arms


def values_by_arm(runs: list[dict], measure: str) -> list[list[float]]:
    """Of each arm, in the order of seeds."""
    arms: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        if run.get(measure) is not None:
            arms.setdefault(run.get("arm") or run["mode"], []).append(run[measure])
    return list(arms.values())


def printed_forms(values: list[float], num_intervals: int = 1) -> set[str]:
    interval = confidence_interval(values, num_intervals)
    return {f"{interval.mean:.{digits}f} ± {interval.half_width:.{digits}f}" for digits in (0, 2, 3)}


def num_differences(runs: list[dict]) -> int:
    """How many of a study's intervals are joint: at each lag, one arm against each other."""
    names = {run.get("arm", "").rpartition("-lag")[::2] for run in runs}
    return max(1, len(names) - len({lag for _, lag in names}))  # that arm has all lags


@pytest.fixture(scope="module")
def known() -> set[str]:
    found: set[str] = set()
    for file in RESULTS.glob("*.json"):
        runs = json.loads(file.read_text())["runs"]
        for measure in MEASURES:
            arms = values_by_arm(runs, measure)
            for values in arms:
                found |= printed_forms(values)
            for one, other in permutations(arms, 2) if measure in DIFFERENCES else ():
                found |= printed_forms([a - b for a, b in zip(one, other, strict=True)], num_differences(runs))
            if measure in TIMES and len(arms) == 2:  # of tba compare sync and make bench-turns
                found |= printed_forms([a / b for a, b in zip(*arms, strict=True)])
    return found


def test_every_interval_is_in_the_numbers(known):
    printed = re.findall(r"-?\d+(?:\.\d+)? ± \d+(?:\.\d+)?", PAGE)
    assert len(printed) >= 10
    assert [interval for interval in printed if interval not in known] == []
    assert "0.963 ± 0.008" not in known  # a digit off is found


@pytest.mark.parametrize("page", sorted(path.name for path in RESULTS.glob("*.md") if path.name != "README.md"))
def test_every_page_is_linked(page):
    assert f"]({page})" in PAGE and (RESULTS / page).with_suffix(".json").exists()
