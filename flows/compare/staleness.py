"""tba compare staleness: objectives at each lag; writes a table, a plot and the numbers into one folder."""

import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from flows.compare.arms import Arm, Bench, Outcome
from flows.compare.results import (
    Interval,
    by_arm,
    confidence_interval,
    hardware,
    paired_differences,
    table_lines,
    write_numbers,
)

LAGS = (1, 4, 16, 64, 128)
ADAM_BETA1 = 0.9  # torch's default, which the baselines' authors use; the default of a run is lower
# Published values of beta: TBA 0.004 to 0.014, Dr. GRPO 0. RLOO has TBA's here, because both have the KL in the reward.
OBJECTIVES = {
    "tb": {"objective": "tb", "beta": 0.05},
    "tb_plain": {"objective": "tb", "beta": 0.05, "residual_weight": "plain"},
    "dr_grpo": {"objective": "dr_grpo", "beta": 0.0},
    "prox_rloo": {"objective": "prox_rloo", "beta": 0.05},
}


def staleness(store: str, out: Path, seeds: int, steps: int, say: Callable[[str], None]) -> tuple[Path, dict]:
    """Trains each objective at each lag, with the best step size for it. Returns the table's file and its numbers.

    If interrupted, the next call continues: finished runs are in the store.
    """
    from tba import testbed

    first_policy = Path.cwd() / ".tba" / ".local" / "testbed.safetensors"
    testbed.first_policy(first_policy)
    common = {"steps": steps, "adam_beta1": ADAM_BETA1}
    arms = [Arm(name, lag, settings | common) for lag in LAGS for name, settings in OBJECTIVES.items()]
    with Bench(store, first_policy, say) as bench:
        arms = bench.tune(arms)
        outcomes = bench.run([(arm, seed) for seed in range(seeds) for arm in arms])
    about = {
        "policy": f"{sum(p.numel() for p in testbed.Policy().parameters()):,} parameters (tba/testbed.py)",
        "task": "two-digit addition",
        "batch": f"{testbed.B} prompts x {testbed.K} responses, no replay",
        "steps": steps,
        "seeds": seeds,
        "held-out sums": testbed.NUM_SUMS - testbed.NUM_TRAIN,
        "accuracy before training": f"{outcomes[0].accuracy_before:.3f}",
        "seconds a run": f"{statistics.median(outcome.seconds for outcome in outcomes):.1f} (median)",
        "commit": ", ".join(sorted({outcome.code_version for outcome in outcomes})),
    }
    return write_staleness(out, outcomes, about | hardware())


def write_staleness(out: Path, outcomes: list[Outcome], about: dict) -> tuple[Path, dict]:
    """`staleness_cpu_<date>`: .md with the table, .png with the plot, .json with every run. Returns table and numbers.

    about: the facts above the table, by name; "date" is part of the files' names.
    """
    out.mkdir(parents=True, exist_ok=True)
    name = f"staleness_cpu_{about['date']}"
    accuracies = {arm: confidence_interval(list(of_arm.values())) for arm, of_arm in by_arm(outcomes).items()}
    rates = {outcome.arm: outcome.learning_rate for outcome in outcomes}
    first, last = LAGS[0], LAGS[-1]
    lost_pairs = [(f"{objective}-lag{first}", f"{objective}-lag{last}") for objective in OBJECTIVES]
    lost = dict(zip(OBJECTIVES, paired_differences(outcomes, lost_pairs), strict=True))
    others = [objective for objective in OBJECTIVES if objective != "tb"]
    ahead = {
        lag: list(paired_differences(outcomes, [(f"tb-lag{lag}", f"{other}-lag{lag}") for other in others]))
        for lag in LAGS
    }
    write_numbers(out / f"{name}.json", about, [asdict(outcome) for outcome in outcomes])
    plot_staleness(accuracies, out / f"{name}.png")
    rows_by_lag = [[lag, *(accuracies[f"{objective}-lag{lag}"] for objective in OBJECTIVES)] for lag in LAGS]
    rates_by_lag = [[lag, *(f"{rates[f'{objective}-lag{lag}']:.2g}" for objective in OBJECTIVES)] for lag in LAGS]
    lines = [
        "# Staleness: accuracy by the age of the samples",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
        "",
        "Greedy accuracy on held-out sums, mean over seeds with its 95 % confidence interval (Student's t):",
        "",
        *table_lines(
            ["Lag", *OBJECTIVES], [*rows_by_lag, [f"loss from lag {first} to {last}, paired by seed", *lost.values()]]
        ),
        "",
        "Accuracy of tb minus that of each other objective, paired by seed:",
        "",
        *table_lines(["Lag", *others], [[lag, *of_lag] for lag, of_lag in ahead.items()]),
        "",
        "Step size: the best of a grid by factors of 3.16, not at its edge, by one run each with another seed:",
        "",
        *table_lines(["Lag", *OBJECTIVES], rates_by_lag),
        "",
        f"![accuracy by lag]({name}.png)",
    ]
    table = out / f"{name}.md"
    table.write_text("\n".join(lines) + "\n")
    return table, {
        "arms": {arm: asdict(interval) for arm, interval in accuracies.items()},
        "lost": {objective: asdict(interval) for objective, interval in lost.items()},
    }


def plot_staleness(accuracies: dict[str, Interval], file: Path) -> None:
    """Accuracy by lag, a line an objective, with confidence intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for offset, objective in enumerate(OBJECTIVES):
        points = [accuracies[f"{objective}-lag{lag}"] for lag in LAGS]
        half_widths = [point.half_width or 0.0 for point in points]
        places = [lag * 1.04**offset for lag in LAGS]  # side by side, so that markers do not overlap
        axes.errorbar(places, [p.mean for p in points], yerr=half_widths, marker="o", capsize=3, label=objective)
    axes.set_xscale("log", base=2)
    axes.set_xticks(LAGS, [str(lag) for lag in LAGS])
    axes.set_xlabel("policy steps between sampling and learning")
    axes.set_ylabel("accuracy on held-out sums")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
