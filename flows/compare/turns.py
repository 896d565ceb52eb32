"""tba compare sync: asynchronous and synchronous training by `tba train`; writes a table, a plot and the numbers."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path

from flows.compare.results import confidence_interval, file_name, results_about, table_lines, write_numbers
from storage.attempts import first_attempt_at, latest_attempt
from storage.queries import query
from storage.store import RunStore
from storage.summary import read_summary

# Asynchronous: the defaults. Synchronous: one Searcher, whose round is one batch, and the Trainer take turns. All other
# settings are the same.
MODES = {
    "asynchronous": (),
    "synchronous": (
        "--set=synchronous=true",
        "--set=searchers=1",
        "--set=search.prompts_per_round=16",
        "--set=sampling.min_size=128",
        "--set=train.sync_interval=1",
    ),
}
SUMMARISED = {
    "accuracy_after": "Accuracy at the end",
    "wall_s": "Wall time, s",
    "seconds_a_step": "Time a policy step, s",
    "seconds_to_common": "Time to equal accuracy, s",
    "trainer_wait_share": "Trainer waits, share",
    "searcher_idle_share": "Searchers outside rounds, share",
    "staleness_mean": "Staleness, policy steps",
}
TIMES = ("wall_s", "seconds_a_step", "seconds_to_common")
WINDOW = 1024  # trajectories in a mean of sampled accuracy: 128 prompts of the default round
LEAST_STEPS = 8  # of a synchronous run, whose steps have 128 trajectories each, so that it has a window
POLL_S = 5.0  # between two checks whether a run has trained enough; a check takes time of a core


def conditions(model: str, seeds: int, steps: int) -> dict:
    """The facts of a comparison that `turns` reads."""
    return {"model": model, "steps": steps, "seeds": seeds}


def turns(
    store: str,
    out: Path,
    about: dict,
    say: Callable[[str], None],
    train: Callable[[list[str]], tuple[int, str]] | None = None,
    name: str = "sync",
) -> Path:
    """Trains asynchronously and synchronously by `tba train`, and compares the times to equal accuracy: the highest
    sampled accuracy that all runs reached. Returns the table's file.

    about: `conditions`, and further facts for the page. train: runs a command to its end, and returns status
    and output; default: `run_to_its_end`. name: of the comparison, in the names of the files.

    Raises: ValueError: too few steps; a run failed, and the message has the end of its output; or a run was
    interrupted, so its times have a pause. The same call continues after the last whole run.
    """
    if about["steps"] < LEAST_STEPS:
        raise ValueError(f"--steps: got {about['steps']}; sync needs {LEAST_STEPS}, for means of {WINDOW} trajectories")
    rows, curves = [], []
    for seed, (mode, settings) in product(range(about["seeds"]), MODES.items()):
        run = f"{mode}-seed{seed}"
        command = [sys.executable, "-m", "flows.cli", "train", run, "--store", store, "--steps", str(about["steps"])]
        command += ["--seed", str(seed), "--model", about["model"], *settings]
        status, output = (train or run_to_its_end)(command)
        if status:  # a finished run returns 0 at once
            raise ValueError(f"tba train {run} ended with status {status}:\n{output[-3000:]}")
        run_store = RunStore(store, run)
        summary = read_summary(run_store)
        if summary is None or latest_attempt(run_store) > 1:
            raise ValueError(
                f"run {run} in {store} was interrupted, so its times have a pause: delete its folder, and go on"
            )
        curves.append(sampled_accuracy(run_store))
        rows.append(summary | {"mode": mode, "seed": seed, "seconds_a_step": seconds_a_step(run_store)})
        say(f"{run}: accuracy {summary['accuracy_after']:.3f}, {summary['wall_s']:.0f} s")
    stores = [RunStore(store, row["run"]) for row in rows]
    return write_turns(out, name, rows, curves, results_about(stores) | {"task": "two-digit addition"} | about)


def write_turns(out: Path, name: str, rows: list[dict], curves: list[list[tuple[float, float]]], about: dict) -> Path:
    """Writes .md with the table, .png with the plot and .json with every run, named by `file_name`.

    Returns the table's file.
    """
    common = common_accuracy(curves)
    for row, curve in zip(rows, curves, strict=True):
        row["seconds_to_common"] = next(seconds for seconds, accuracy in curve if accuracy >= common)
    by_mode = {mode: [row for row in rows if row["mode"] == mode] for mode in MODES}
    intervals = [
        [mode, *(confidence_interval([row[key] for row in of_mode]) for key in SUMMARISED)]
        for mode, of_mode in by_mode.items()
    ]
    name = file_name(name, about)
    pairs = list(zip(*by_mode.values(), strict=True))  # of each seed
    ratios = [confidence_interval([a[key] / b[key] for a, b in pairs]) if key in TIMES else "" for key in SUMMARISED]
    over_seeds = " ±: 95 % confidence interval over seeds (Student's t)." if about["seeds"] > 1 else ""
    lines = [
        "# Asynchronous and synchronous training: accuracy and time",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
        "",
        *table_lines(["Mode", *SUMMARISED.values()], [*intervals, ["asynchronous / synchronous, by seed", *ratios]]),
        "",
        f"Equal accuracy: {common:.3f}, the highest mean reward of {WINDOW} trajectories that every run reached;"
        " its time is from the run's start. Accuracy at the end is greedy, on held-out sums. Wall time includes the "
        "engines' start. The time a policy step is from the first step's begin to the last one's end, by the number of "
        f"steps. Shares are of time, as in each run's summary.json.{over_seeds}",
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
    """Runs a `tba train` to its end, or stops it once `enough` returns true, as Ctrl-C does. Returns status, output.

    An error or an interrupt here stops it in the same way and waits, because a killed command would leave its run.
    """
    with tempfile.TemporaryFile("w+") as output:
        # a process group of its own: otherwise Ctrl-C in a terminal would reach it beside the signal sent here
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            while process.poll() is None and not enough():
                _wait(process)
        finally:
            process.terminate()  # has no effect on a process that has ended
            process.wait()
        output.seek(0)
        return process.returncode, output.read()


def _wait(process: subprocess.Popen) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(POLL_S)


def seconds_a_step(store: RunStore) -> float:
    """From the first step's begin to the last one's end, by the number of steps."""
    span = "SELECT epoch(max(ended_at) - min(started_at)) / count(*) FROM training_steps"
    return query(store, span).column(0)[0].as_py()


def sampled_accuracy(store: RunStore) -> list[tuple[float, float]]:
    """Pairs of seconds since the run began and the mean reward of the newest `WINDOW` trajectories at that time.

    Raises: ValueError: the run has fewer than `WINDOW` trajectories.
    """
    age = "ORDER BY created_at, trajectory_id"
    rows = query(
        store,
        # only constants of this file are put into the query
        f"SELECT created_at, avg(reward) OVER ({age} ROWS {WINDOW - 1} PRECEDING) AS accuracy FROM trajectories "  # noqa: S608
        f"QUALIFY row_number() OVER ({age}) >= {WINDOW} {age}",
    ).to_pylist()
    if not rows:
        raise ValueError(f"run {store.run} has fewer than {WINDOW} trajectories; raise --steps")
    began = first_attempt_at(store)
    return [((row["created_at"] - began).total_seconds(), row["accuracy"]) for row in rows]


def common_accuracy(curves: list[list[tuple[float, float]]]) -> float:
    """The highest accuracy that all runs reached."""
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
