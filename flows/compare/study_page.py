"""Runs a study, and writes its results into one folder: tables, a plot and the numbers."""

import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from flows.compare.arm import Outcome
from flows.compare.bench import Bench
from flows.compare.results import (
    Interval,
    by_arm,
    confidence_interval,
    file_name,
    hardware,
    paired_differences,
    table_lines,
    write_numbers,
)
from flows.compare.study import Study
from infra.machine import processor_name

JOINT = "The {} intervals hold at once with 95 % (Student's t, Bonferroni)."


def run_study(name: str, study: Study, store: str, out: Path, say: Callable[[str], None]) -> tuple[Path, dict]:
    """Trains each arm at each lag, with the best step size for it. Returns the page's file and its numbers.

    If interrupted, the next call continues: finished runs are in the store.
    """
    runs = study.runs
    with Bench(store, name, runs, say) as bench:
        arms = study.arms_at_each_lag()
        arms = bench.tune(arms) if runs.tunes_step_size else arms
        outcomes = bench.run([(arm, seed) for seed in range(study.seeds) for arm in arms])
    about = runs.facts(study.configuration(study.compared_with)) | {
        "steps": _steps(study),
        "seeds": study.seeds,
        **runs.before(outcomes),
        "seconds a run": f"{statistics.median(outcome.seconds for outcome in outcomes):.1f} (median)",
        "commit": ", ".join(sorted({outcome.code_version for outcome in bench.outcomes})),
    }
    here = hardware(runs.trains_a_model)
    others = {outcome.processor for outcome in bench.outcomes} - {"", processor_name()}
    if others:  # begun there, and continued here
        here["hardware"] += f"; some runs on {', '.join(sorted(others))}"
    return write_study(out, name, study, outcomes, about | here)


def _steps(study: Study) -> int | str:
    num_steps = study.steps_by_arm
    if len(set(num_steps.values())) == 1:
        return num_steps[study.compared_with]
    return ", ".join(f"{label} {steps}" for label, steps in num_steps.items())


def write_study(out: Path, name: str, study: Study, outcomes: list[Outcome], about: dict) -> tuple[Path, dict]:
    """Writes .md with the tables, .png with the plot and .json with every run, named by `file_name`.

    Returns page and numbers.

    about: the facts above the tables, by name.
    """
    out.mkdir(parents=True, exist_ok=True)
    name = file_name(name, about)
    accuracies = {arm: confidence_interval(list(of_arm.values())) for arm, of_arm in by_arm(outcomes).items()}
    ahead, lost = _differences(study, outcomes)
    numbers = {
        "arms": {arm: asdict(interval) for arm, interval in accuracies.items()},
        "ahead": {pair: asdict(interval) for pair, interval in ahead.items()},
        "lost": {label: asdict(interval) for label, interval in lost.items()},
    }
    write_numbers(out / f"{name}.json", about, [asdict(outcome) for outcome in outcomes])
    plot_study(study, accuracies, out / f"{name}.png")
    lines = [
        f"# {study.title}",
        "",
        f"- published: {study.published}",
        f"- expected: {study.expected}",
        *(f"- {key}: {value}" for key, value in about.items()),
        "",
        *_tables(study, outcomes, accuracies, ahead, lost),
        "",
        f"![accuracy]({name}.png)",
    ]
    page = out / f"{name}.md"
    page.write_text("\n".join(lines) + "\n")
    return page, numbers


def _differences(study: Study, outcomes: list[Outcome]) -> tuple[dict[str, Interval], dict[str, Interval]]:
    """Differences paired by seed: `compared_with` minus each other arm; each arm's loss from first to last lag."""
    ahead = _ahead(study, outcomes, "accuracy_after")
    first, last = study.lags[0], study.lags[-1]
    falling = [label for label in study.arms if first != last and {first, last} <= set(study.lags_of(label))]
    falls = [(f"{label}-lag{first}", f"{label}-lag{last}") for label in falling]
    return ahead, dict(zip(falling, paired_differences(outcomes, falls), strict=True))


def _ahead(study: Study, outcomes: list[Outcome], measure: str) -> dict[str, Interval]:
    """A measure of `compared_with` minus that of each other arm, by the other's name."""
    others = [label for label in study.arms if label != study.compared_with]
    pairs = [
        (f"{study.compared_with}-lag{lag}", f"{other}-lag{lag}")
        for lag in study.lags
        for other in others
        if lag in study.lags_of(other)
    ]
    return dict(zip([other for _, other in pairs], paired_differences(outcomes, pairs, measure), strict=True))


def _measures(study: Study) -> tuple[str, str, str]:
    return study.runs.measures(study.configuration(study.compared_with))


def _tables(
    study: Study,
    outcomes: list[Outcome],
    accuracies: dict[str, Interval],
    ahead: dict[str, Interval],
    lost: dict[str, Interval],
) -> list[str]:
    labels, others = list(study.arms), [label for label in study.arms if label != study.compared_with]
    accuracy_by_seed = by_arm(outcomes)
    rates = {outcome.arm: f"{outcome.learning_rate:.2g}" for outcome in outcomes}
    runs, (greedy, distinct, right) = study.runs, _measures(study)

    def by_lag(heading: str, labels: list[str], values: dict[str, object], more: list[list] = ()) -> list[str]:
        rows = [[lag, *(values.get(f"{label}-lag{lag}", "–") for label in labels)] for lag in study.lags]
        return [heading, "", *table_lines(["Lag", *labels], [*rows, *more]), ""] if labels else []

    def means(heading: str, measure: str) -> list[str]:
        values = {arm: confidence_interval(list(of.values())) for arm, of in by_arm(outcomes, measure).items()}
        return by_lag(f"{heading}, {each}:", labels, values)

    def differences(of: str, values: dict[str, Interval]) -> list[str]:
        minus = f"{of} of {study.compared_with} minus that of each other arm, by seed."
        joint = JOINT.format(len(ahead)) if len(ahead) > 1 else "The interval holds with 95 % (Student's t)."
        return by_lag(f"{minus} {joint}", others, values)

    fall = f"loss from lag {study.lags[0]} to {study.lags[-1]}, paired by seed"
    joint = "; these intervals hold at once" if len(lost) > 1 else ""
    lost_row = [[fall + joint, *(lost.get(label, "–") for label in labels)]] if lost else []
    spread = {
        arm: f"{statistics.stdev(of_arm.values()):.3f}" for arm, of_arm in accuracy_by_seed.items() if len(of_arm) > 1
    }
    each = "mean over seeds with its 95 % confidence interval (Student's t)"
    return [
        *by_lag(f"{greedy}, {each}:", labels, accuracies, lost_row),
        *differences("Accuracy", ahead),
        *(by_lag("Standard deviation of the accuracy over seeds:", labels, spread) if spread else []),
        *means(distinct, "num_distinct"),
        *means(right, "num_distinct_right"),
        *differences(f"{right}: that", _ahead(study, outcomes, "num_distinct_right")),
        *(line for measure, heading in runs.more_measures.items() for line in means(heading, measure)),
        *by_lag(runs.step_size, labels, rates)[:-1],
    ]


def plot_study(study: Study, accuracies: dict[str, Interval], file: Path) -> None:
    """Accuracy with confidence intervals: by lag, a line for each arm; with one lag, a point for each arm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for offset, label in enumerate(study.arms):
        lags = study.lags_of(label)
        points = [accuracies[f"{label}-lag{lag}"] for lag in lags]
        half_widths = [point.half_width or 0.0 for point in points]
        places = [lag * 1.04**offset for lag in lags] if len(study.lags) > 1 else [offset]
        axes.errorbar(places, [p.mean for p in points], yerr=half_widths, marker="o", capsize=3, label=label)
    if len(study.lags) > 1:
        axes.set_xscale("log" if min(study.lags) > 0 else "symlog", base=2)
        axes.set_xticks(study.lags, [str(lag) for lag in study.lags])
        axes.set_xlabel("policy steps between sampling and learning")
        axes.legend()
    else:
        axes.set_xticks(range(len(study.arms)), list(study.arms))
    axes.set_ylabel(_measures(study)[0].lower())
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
