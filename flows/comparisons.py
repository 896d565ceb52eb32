"""What is compared, and how it is written down: a table, a plot and the numbers, in one folder."""

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from flows.compare import Arm, Outcome, Summary, confidence_interval, run_arm, summarise_arms, tune
from flows.config import RunConfig
from flows.machine import model_folder
from storage.inspect import query
from storage.ledger import first_attempt_at
from storage.store import RunStore
from tba.adder import make_adder

ADDER = "adder"  # in place of a model's name: the small policy of tba/adder.py
LAGS = (1, 4, 16)
# Published: TBA 0.004 to 0.014, Dr. GRPO 0. RLOO gets TBA's, as both have the KL in the reward.
OBJECTIVES = {
    "tb": {"objective": "tb", "beta": 0.05},
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
RATES = (1e-5, 3e-5, 1e-4)
POLL_S = 5.0  # between two looks at a run that may have trained enough: a look takes the time of a core


def staleness(
    store: str, out: Path, model: str, seeds: int, steps: int, num_heldout: int, say: Callable[[str], None]
) -> Path:
    """Each objective at each lag, with the learning rate of `RATES` that is best there. Returns the table's file.

    Interrupted, it goes on where it was: what has run is in the store.
    """
    folder = make_adder(Path.cwd() / ".tba" / ".local" / "adder") if model == ADDER else model_folder(model)
    base = comparison_config(store, model, steps)
    arms = [Arm(f"{name}-lag{lag}", lag, settings) for lag in LAGS for name, settings in OBJECTIVES.items()]
    arms = tune(arms, list(RATES), base, folder, num_heldout, say)
    outcomes = []
    for seed in range(seeds):
        for arm in arms:
            outcome = run_arm(arm, base, folder, seed, num_heldout)
            outcomes.append(outcome)
            say(
                f"{arm.name}, seed {seed}: {outcome.accuracy_before:.3f} -> {outcome.accuracy_after:.3f}, "
                f"staleness {outcome.staleness_mean:.1f}, {outcome.seconds:.0f} s"
            )
    about = {
        "model": "0.2 M parameters, made by tba/adder.py" if model == ADDER else model,
        "task": "two-digit addition",
        "samples": outcomes[0].num_trajectories,
        "steps": steps,
        "learning rates tried": list(RATES),
        "learning rates chosen": {arm.name: arm.settings["learning_rate"] for arm in arms},
        "held-out sums": num_heldout,
    }
    stores = [RunStore(store, f"{outcome.arm}-seed{outcome.seed}") for outcome in outcomes]
    return write_results("staleness", out, outcomes, about | results_about(stores))


def comparison_config(store: str, model: str, steps: int) -> RunConfig:
    """What all runs of the comparison share: 32 prompts x 8 responses a step, sampled as the loss scores them."""
    return RunConfig.model_validate(
        {
            "run": "base",
            "store": store,
            "model": model,
            "search": {"prompts_per_round": 32, "samples_per_prompt": 8},
            "sampling": {"prompts_per_batch": 32, "responses_per_prompt": 8},
            "train": {"steps": steps, "warmup_steps": 5, "learning_rate_schedule": "linear", "sync_interval": 1},
        }
    )


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
        cells = (f"{mean:.3f}" if math.isnan(half) else f"{mean:.3f} ± {half:.3f}" for mean, half in intervals)
        lines.append(f"| {mode} | {' | '.join(cells)} |")
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
    return {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "commit": ", ".join(sorted(versions)),
        "date": datetime.now(UTC).date().isoformat(),
    }


def write_results(theme: str, out: Path, outcomes: list[Outcome], about: dict) -> Path:
    """`<theme>_cpu_<date>`: .md with the table, .png with the plot, .json with every run. Returns the table.

    about: what the table begins with; its "date" is part of the name.
    """
    out.mkdir(parents=True, exist_ok=True)
    name = f"{theme}_cpu_{about['date']}"
    summaries = summarise_arms(outcomes)
    write_numbers(out / f"{name}.json", about, [asdict(outcome) for outcome in outcomes])
    plot(summaries, out / f"{name}.png")
    lines = [
        f"# {theme.capitalize()}: what an old policy's samples cost",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
        "",
        "| Objective | Lag | Staleness measured (mean, most) | Accuracy (95 % CI) | By seed |",
        "|---|---|---|---|---|",
        *(_row(summary) for summary in summaries),
        "",
        "| Objective | Accuracy lost from the smallest lag to the largest (95 % CI, by seed) |",
        "|---|---|",
        *(_loss_row(objective, outcomes) for objective in dict.fromkeys(s.arm.split("-lag")[0] for s in summaries)),
        "",
        f"Before training: {outcomes[0].accuracy_before:.3f}. Accuracy is greedy, on held-out sums; the interval is "
        "Student's t over seeds. Staleness is that of the batches of the second half, from the ledger.",
        "",
        f"![accuracy by lag]({name}.png)",
    ]
    table = out / f"{name}.md"
    table.write_text("\n".join(lines) + "\n")
    return table


def write_numbers(file: Path, about: dict, runs: list[dict]) -> None:
    """One JSON object, a line a run."""
    lines = ",\n".join(json.dumps(run, default=str) for run in runs)
    file.write_text(f'{{"about": {json.dumps(about)},\n"runs": [\n{lines}\n]}}\n')


def _row(summary: Summary) -> str:
    objective, lag = summary.arm.split("-lag")
    seeds = ", ".join(f"{accuracy:.3f}" for accuracy in summary.accuracies)
    return (
        f"| {objective} | {lag} | {summary.staleness_mean:.2f}, {summary.staleness_max} | "
        f"{summary.accuracy_mean:.3f} ± {summary.half_width:.3f} | {seeds} |"
    )


def _loss_row(objective: str, outcomes: list[Outcome]) -> str:
    lost = loss_by_seed(objective, outcomes)
    mean, half_width = confidence_interval(lost)
    return f"| {objective} | {mean:.3f} ± {half_width:.3f} |"


def loss_by_seed(objective: str, outcomes: list[Outcome]) -> list[float]:
    """For each seed the accuracy at the smallest lag less that at the largest."""
    of = {(o.arm, o.seed): o.accuracy_after for o in outcomes}
    return [
        of[f"{objective}-lag{LAGS[0]}", seed] - of[f"{objective}-lag{LAGS[-1]}", seed]
        for seed in sorted({o.seed for o in outcomes})
    ]


def plot(summaries: list[Summary], file: Path) -> None:
    """Accuracy by lag, a line an objective, with confidence intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for summary in summaries:
        objective, lag = summary.arm.split("-lag")
        half_width = 0.0 if math.isnan(summary.half_width) else summary.half_width
        lines.setdefault(objective, []).append((int(lag), summary.accuracy_mean, half_width))
    for offset, (objective, points) in enumerate(lines.items()):
        lags, means, half_widths = zip(*points, strict=True)
        places = [lag * 1.04**offset for lag in lags]  # side by side, not on top of each other
        axes.errorbar(places, means, yerr=half_widths, marker="o", capsize=3, label=objective)
    axes.set_xscale("log", base=2)
    axes.set_xticks(LAGS, [str(lag) for lag in LAGS])
    axes.set_xlabel("policy steps between sampling and learning")
    axes.set_ylabel("accuracy on held-out sums")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
