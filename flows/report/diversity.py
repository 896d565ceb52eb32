"""tba diversity: measures the diversity of a run's responses, by policy, by Searcher and as a whole."""

import math
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from flows.config import load_run
from storage import measurements as stored
from storage.store import RunStore
from tba import evaluation

if TYPE_CHECKING:
    from rich.table import Table

NUM_BINS = 10  # spans of policies
SAMPLE = 40_000  # responses to measure: takes seconds; standard errors are about 1 % of most values
EMBEDDED = 4_000  # of these, responses to embed: takes about a minute on two cores
# Responses to a prompt that each value is computed from; fewer if a round samples fewer.
RESPONSES_PER_PROMPT = 8
SEED = 0


def measure_runs(
    stores: list[RunStore], *, sample: int = SAMPLE, embedded: int = EMBEDDED, success_reward: float | None = None
) -> dict[str, list[dict]]:
    """Measures the runs with equal numbers of responses to a prompt. Returns each run's rows by its name."""
    m, found = min(map(usual_responses_per_prompt, stores)), {}
    for store in stores:
        found[store.run] = measure_diversity(
            store, sample=sample, embedded=embedded, responses_per_prompt=m, success_reward=success_reward
        )
    return found


def store_runs(stores: list[RunStore], found: dict[str, list[dict]]) -> None:
    """Stores each run's rows with it."""
    for store in stores:
        stored.record_diversity(store, found[store.run])


def measure_diversity(
    store: RunStore,
    *,
    sample: int = SAMPLE,
    embedded: int = EMBEDDED,
    responses_per_prompt: int | None = None,
    success_reward: float | None = None,
    seed: int = SEED,
) -> list[dict]:
    """One run's values as storage.schema.DIVERSITY rows, in the order of groups.

    sample, embedded: numbers of responses to measure and, of these, to embed; embedded=0: no measures by embeddings.
    responses_per_prompt: None: 8, or the number that a round of this run samples if that is smaller.
    success_reward: smallest reward of a success; None: that of the run's task.
    Raises: ValueError: no prompt has so many responses. ModuleNotFoundError: the sentence encoder is not installed.
    """
    m = responses_per_prompt or usual_responses_per_prompt(store)
    if success_reward is None:
        success_reward = evaluation.success_reward(load_run(store).task.name)
    chosen = stored.choose_diversity_sample(
        store, num_bins=NUM_BINS, responses_per_prompt=m, num_responses=sample, seed=seed
    )
    if not chosen.num_rows:
        raise ValueError(f"diversity: no prompt of run {store.run} has {m} responses, so nothing can be compared yet")
    groups = [
        (key, list(rows)) for key, rows in groupby(chosen.to_pylist(), key=lambda row: (row["grouping"], row["part"]))
    ]
    num_embedded = max(2, embedded // (m * len(groups))) if embedded else 0
    vectors = _embed(groups, num_embedded, m) if num_embedded else {}
    now = datetime.now(UTC)
    rows = []
    for _, group in groups:
        rows += _measure_group(group, m, num_embedded, vectors, success_reward, now)
    return rows


def usual_responses_per_prompt(store: RunStore) -> int:
    """Responses to a prompt that a round of the run samples, at most `RESPONSES_PER_PROMPT`."""
    return min(RESPONSES_PER_PROMPT, load_run(store).search.samples_per_prompt)


def _embed(groups: list[tuple], num_draws: int, m: int) -> dict[str, np.ndarray]:
    """Embeddings of the responses of `num_draws` draws of each group, by text."""
    from tba.diversity import embed

    texts = set()
    for _, group in groups:
        for number in _embedded(group, m, num_draws):
            texts.update(row["response"] for row in group[number * m : (number + 1) * m])
    return dict(zip(sorted(texts), embed(sorted(texts)), strict=True))


def _embedded(group: list[dict], m: int, num_draws: int) -> set[int]:
    """Numbers of the draws of m responses that are embedded: each prompt's first draw, then the second ones."""
    nth, seen = [], Counter()
    for row in group[::m]:  # each prompt has a multiple of m rows
        nth.append(seen[row["place"]])
        seen[row["place"]] += 1
    return set(sorted(range(len(nth)), key=nth.__getitem__)[:num_draws])


def _measure_group(
    group: list[dict], m: int, num_embedded: int, vectors: dict, success_reward: float, now: datetime
) -> list[dict]:
    from tba.diversity import estimate

    first = group[0]
    exhausted = first["num_trajectories"] == first["num_prompts"] * m
    result = []
    for metric, of_prompts in _values(group, m, num_embedded, vectors, success_reward).items():
        whole = exhausted and len(of_prompts) == first["num_prompts"]
        if (found := estimate(of_prompts, whole)) is None:
            continue
        result.append(
            {
                "measured_at": now,
                "grouping": first["grouping"],
                "searcher": first["part"] if first["grouping"] == "searcher" else None,
                "first_policy_step": first["first_policy_step"],
                "last_policy_step": first["last_policy_step"],
                "metric": metric,
                "value": found.value,
                "standard_error": found.standard_error,
                "low": found.low,
                "high": found.high,
                "responses_per_prompt": m,
                "num_measured_prompts": min(found.num_prompts, first["num_prompts"]),
                "num_prompts": first["num_prompts"],
                "num_trajectories": first["num_trajectories"],
            }
        )
    return result


def _values(
    group: list[dict], m: int, num_embedded: int, vectors: dict, success_reward: float
) -> dict[str, list[float]]:
    """By metric the value of each prompt, the mean over its draws of m responses; of a single prompt, that of each
    draw."""
    from tba.diversity import Response, measure

    values: dict[str, list[float]] = {}
    # by number, not by known texts: repeated texts would bias the sample
    embedded, number = _embedded(group, m, num_embedded), 0
    for _, of_prompt in groupby(group, key=lambda row: row["place"]):
        rows, of_draws = list(of_prompt), {}
        for start in range(0, len(rows), m):
            draw = rows[start : start + m]
            responses = [
                Response(row["response"], row["behavior_logprob"], row["reward"] >= success_reward) for row in draw
            ]
            embeddings = np.stack([vectors[row["response"]] for row in draw]) if number in embedded else None
            number += 1
            for metric, value in measure(responses, embeddings).items():
                of_draws.setdefault(metric, []).append(value)
        for metric, each in of_draws.items():
            known = [value for value in each if not math.isnan(value)]
            mean = fmean(known) if known else math.nan
            values.setdefault(metric, []).extend(each if group[0]["num_prompts"] == 1 else [mean])
    return values


def tables(found: dict[str, list[dict]]) -> list["Table"]:
    """Tables for a terminal: each run by policy and by Searcher, then all runs."""
    result = []
    for run, rows in found.items():
        for grouping, title in (("policy", "by policy step"), ("searcher", "by Searcher")):
            result.append(_table(f"{run}, {title}", [row for row in rows if row["grouping"] == grouping], _part))
    whole = [row | {"run": run} for run, rows in found.items() for row in rows if row["grouping"] == "run"]
    result.append(_table("between runs" if len(found) > 1 else "the whole run", whole, lambda row: row["run"]))
    return result


def shown(row: dict) -> str:
    """`0.412 ± 0.006`: value and standard error."""
    return f"{row['value']:.3g}" + ("" if row["standard_error"] is None else f" ± {row['standard_error']:.1g}")


def _part(row: dict) -> str:
    return row["searcher"] or f"{row['first_policy_step']} to {row['last_policy_step']}"


def _table(title: str, rows: list[dict], name: Callable[[dict], str]) -> "Table":
    """One line for each group by `name`. Headings and values break into lines, to keep the table within 80 columns."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = list(dict.fromkeys(name(row) for row in rows))
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    table.add_column("", overflow="fold")
    for metric in metrics:
        heading = metric.replace(" ", "\n").replace("-", "-\n")
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    by_place = {(name(row), row["metric"]): shown(row).replace(" ± ", "\n± ") for row in rows}
    for column in columns:
        table.add_row(column, *(by_place.get((column, metric), "") for metric in metrics))
    return table
