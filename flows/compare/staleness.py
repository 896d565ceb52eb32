"""What is compared, and how it is written down: a table, a plot and the numbers, in one folder."""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from flows.compare.arms import Arm, Bench, Interval, Outcome, by_arm, confidence_interval, paired_differences
from storage.ledger import first_attempt_at
from storage.queries import query
from storage.store import RunStore

LAGS = (1, 4, 16, 64, 128)
# Published: TBA 0.004 to 0.014, Dr. GRPO 0. RLOO gets TBA's, as both have the KL in the reward.
OBJECTIVES = {
    "tb": {"objective": "tb", "beta": 0.05},
    "tb_plain": {"objective": "tb", "beta": 0.05, "residual_weight": "plain"},
    "dr_grpo": {"objective": "dr_grpo", "beta": 0.0},
    "prox_rloo": {"objective": "prox_rloo", "beta": 0.05},
}
# What a user would run: `make train` as it is, and in turns one Searcher with a whole batch a round. Steps, batches and
# all of training are the same.
MODES = {
    "asynchronous": (),
    "synchronous": (
        "--set=synchronous=true",
        "--set=searchers=1",
        "--set=search.prompts_per_round=8",
        "--set=sampling.min_size=128",
        "--set=train.sync_interval=1",
    ),
}
SUMMARISED = {
    "accuracy_after": "Accuracy at the end",
    "wall_s": "Wall time, s",
    "seconds_to_common": "s to equal accuracy",
    "trainer_wait_share": "Trainer waits",
    "searcher_idle_share": "Searchers idle",
    "staleness_mean": "Staleness",
}
WINDOW = 1024  # trajectories that sampled accuracy is the mean of: 64 prompts
POLL_S = 5.0  # between two looks at a run that may have trained enough: a look takes the time of a core


def staleness(store: str, out: Path, seeds: int, steps: int, say: Callable[[str], None]) -> tuple[Path, dict]:
    """Each objective at each lag, with the step size that is best there. Returns the table's file and its numbers.

    Interrupted, it goes on where it was: what has run is in the store.
    """
    from tba import testbed

    first_policy = Path.cwd() / ".tba" / ".local" / "testbed.safetensors"
    testbed.first_policy(first_policy)
    arms = [Arm(name, lag, settings | {"steps": steps}) for lag in LAGS for name, settings in OBJECTIVES.items()]
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

    about: what the table begins with; its "date" is part of the name.
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
    header = f"| Lag | {' | '.join(OBJECTIVES)} |"
    lines = [
        "# Staleness: accuracy by the age of the samples",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
        "",
        "Greedy accuracy on held-out sums, mean over seeds with its 95 % confidence interval (Student's t):",
        "",
        header,
        f"|---|{'---|' * len(OBJECTIVES)}",
        *(f"| {lag} | {' | '.join(str(accuracies[f'{name}-lag{lag}']) for name in OBJECTIVES)} |" for lag in LAGS),
        f"| lost from {first} to {last}, by seed | {' | '.join(map(str, lost.values()))} |",
        "",
        "Accuracy of tb less that of the others, by seed:",
        "",
        f"| Lag | {' | '.join(others)} |",
        f"|---|{'---|' * len(others)}",
        *(f"| {lag} | {' | '.join(map(str, of_lag))} |" for lag, of_lag in ahead.items()),
        "",
        "Step size of each: the best of a grid by factors of 3.16, at no edge of it, by one run each of another seed:",
        "",
        header,
        f"|---|{'---|' * len(OBJECTIVES)}",
        *(f"| {lag} | {' | '.join(format(rates[f'{name}-lag{lag}'], '.2g') for name in OBJECTIVES)} |" for lag in LAGS),
        "",
        f"![accuracy by lag]({name}.png)",
    ]
    table = out / f"{name}.md"
    table.write_text("\n".join(lines) + "\n")
    return table, {
        "arms": {arm: asdict(interval) for arm, interval in accuracies.items()},
        "lost": {objective: asdict(interval) for objective, interval in lost.items()},
    }


def turns(store: str, out: Path, model: str, seeds: int, steps: int, say: Callable[[str], None]) -> Path:
    """Asynchronous beside synchronous training by `tba train`, and the time of each to equal accuracy: the highest that
    all runs came to, as sampled during training. Returns the table's file.

    Raises: ValueError: a run failed; with the end of what it said. The same call goes on where that one stopped.
    """
    rows, curves = [], []
    for seed in range(seeds):
        for mode, settings in MODES.items():
            run = f"{mode}-seed{seed}"
            command = [sys.executable, "-m", "flows.cli", "train", run, "--store", store, "--steps", str(steps)]
            command += ["--seed", str(seed), "--model", model, *settings]
            status, output = run_to_its_end(command)
            if status:  # of a finished run it is 0 at once
                raise ValueError(f"tba train {run} ended with status {status}:\n{output[-3000:]}")
            run_store = RunStore(store, run)
            summary = json.loads(run_store.get("summary.json"))
            curves.append(sampled_accuracy(run_store))
            rows.append(summary | {"mode": mode, "seed": seed})
            say(f"{run}: accuracy {summary['accuracy_after']:.3f}, {summary['wall_s']:.0f} s")
    common = common_accuracy(curves)
    for row, curve in zip(rows, curves, strict=True):
        row["seconds_to_common"] = next(seconds for seconds, accuracy in curve if accuracy >= common)
    stores = [RunStore(store, row["run"]) for row in rows]
    about = results_about(stores) | {"task": "two-digit addition", "model": model, "steps": steps, "seeds": seeds}
    lines = [
        "# Asynchronous beside synchronous: what taking turns costs",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
        "",
        f"| Mode | {' | '.join(SUMMARISED.values())} |",
        f"|---|{'---|' * len(SUMMARISED)}",
    ]
    for mode in MODES:
        of_mode = [row for row in rows if row["mode"] == mode]
        intervals = (confidence_interval([row[key] for row in of_mode]) for key in SUMMARISED)
        lines.append(f"| {mode} | {' | '.join(map(str, intervals))} |")
    name = f"sync_cpu_{about['date']}"
    lines += [
        "",
        f"Equal accuracy: {common:.3f}, the highest that every run came to, of what was sampled (the mean of {WINDOW} "
        "trajectories); seconds are from the run's start. Accuracy at the end is greedy, on held-out sums. Shares are "
        "of time; `tba show RUN` has each run's." + (" Mean over seeds with Student's t, 95 %." if seeds > 1 else ""),
        "",
        f"![sampled accuracy by time]({name}.png)",
    ]
    out.mkdir(parents=True, exist_ok=True)
    plot_turns([row["mode"] for row in rows], curves, common, out / f"{name}.png")
    table = out / f"{name}.md"
    table.write_text("\n".join(lines) + "\n")
    write_numbers(table.with_suffix(".json"), about, rows)
    return table


def run_to_its_end(command: list[str], enough: Callable[[], bool] = lambda: False) -> tuple[int, str]:
    """Status and output of a `tba train`, which is asked to stop, as by Ctrl-C, once `enough` returns true.

    An error or an interrupt here stops it in the same way, and waits: killed, it would leave its run behind.
    """
    with tempfile.TemporaryFile("w+") as output:
        # a process group of its own: Ctrl-C in a terminal would reach it beside what is sent here
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            while process.poll() is None and not enough():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            process.terminate()  # of a process that has ended it does nothing
            process.wait()
        output.seek(0)
        return process.returncode, output.read()


def sampled_accuracy(store: RunStore) -> list[tuple[float, float]]:
    """Seconds since the run began, and the mean reward of the newest `WINDOW` trajectories then; for each of these.

    Raises: ValueError: the run has not so many.
    """
    age = "ORDER BY created_at, trajectory_id"
    rows = query(
        store,
        f"SELECT created_at, avg(reward) OVER ({age} ROWS {WINDOW - 1} PRECEDING) AS accuracy FROM trajectories "
        f"QUALIFY row_number() OVER ({age}) >= {WINDOW} {age}",
    ).to_pylist()
    if not rows:
        raise ValueError(f"run {store.run} has fewer than {WINDOW} trajectories: give it more steps")
    began = first_attempt_at(store)
    return [((row["created_at"] - began).total_seconds(), row["accuracy"]) for row in rows]


def common_accuracy(curves: list[list[tuple[float, float]]]) -> float:
    """The highest accuracy that all of them reached."""
    return min(max(accuracy for _, accuracy in curve) for curve in curves)


def plot_turns(modes: list[str], curves: list[list[tuple[float, float]]], common: float, file: Path) -> None:
    """Sampled accuracy by time, a line a run, a colour a mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    colours = {mode: f"C{place}" for place, mode in enumerate(MODES)}
    for place, (mode, curve) in enumerate(zip(modes, curves, strict=True)):
        seconds, accuracies = zip(*curve, strict=True)
        axes.plot(seconds, accuracies, color=colours[mode], label=mode if modes.index(mode) == place else None)
    axes.axhline(common, color="grey", linewidth=0.8)
    axes.set_xlabel("seconds from the run's start")
    axes.set_ylabel(f"mean reward of the newest {WINDOW} trajectories")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def results_about(stores: list[RunStore]) -> dict:
    """Where and when results came about, and by which code: that of the runs, which may be of an earlier day."""
    versions = set()
    for store in stores:
        versions.update(query(store, "SELECT DISTINCT code_version FROM trajectories").column(0).to_pylist())
    return {"commit": ", ".join(sorted(versions))} | hardware()


def hardware() -> dict:
    return {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).date().isoformat(),
    }


def write_numbers(file: Path, about: dict, runs: list[dict]) -> None:
    """One JSON object, a line a run."""
    lines = ",\n".join(json.dumps(run, default=str) for run in runs)
    file.write_text(f'{{"about": {json.dumps(about)},\n"runs": [\n{lines}\n]}}\n')


def plot_staleness(accuracies: dict[str, Interval], file: Path) -> None:
    """Accuracy by lag, a line an objective, with confidence intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for offset, objective in enumerate(OBJECTIVES):
        points = [accuracies[f"{objective}-lag{lag}"] for lag in LAGS]
        half_widths = [point.half_width or 0.0 for point in points]
        places = [lag * 1.04**offset for lag in LAGS]  # side by side, not on top of each other
        axes.errorbar(places, [p.mean for p in points], yerr=half_widths, marker="o", capsize=3, label=objective)
    axes.set_xscale("log", base=2)
    axes.set_xticks(LAGS, [str(lag) for lag in LAGS])
    axes.set_xlabel("policy steps between sampling and learning")
    axes.set_ylabel("accuracy on held-out sums")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
