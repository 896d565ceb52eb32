"""Does the default run learn without falling back? `make bench-stability`: by seed, alone and on a busy machine.

    SEEDS=0,1 LOAD=1 make bench-stability                              # default: SEEDS=0,1,2,3,4 LOAD=0,1
    ARGS="--set train.learning_rate=3e-5" make bench-stability         # further arguments of `tba train`

Each run is `tba train` with its defaults. Load 1: a process that multiplies matrices on one thread runs all the while.
A line as each run ends, a table, then one JSON object:

    accuracy        greedy, held-out, of the final policy; kept_accuracy: of the best policy; null without one
    worst_fall      of the mean reward of three rounds, below its best so far, once it has passed 0.55
    seconds_to_060  from the first round's start until the newest 640 sampled responses have a mean reward of 0.60
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator

from storage.store import RunStore
from tests.benchmarks.default_run import default_run, reached, sampled, worst_fall

# It ends with the process that started it, however that one ends.
MULTIPLY = """
import os, numpy
parent, matrix = os.getppid(), numpy.ones((512, 512))
while os.getppid() == parent:
    matrix @ matrix
"""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@contextlib.contextmanager
def load(num_processes: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    processes = [
        subprocess.Popen([sys.executable, "-c", MULTIPLY], env=os.environ | ONE_THREAD, process_group=0)
        for _ in range(num_processes)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(store: RunStore) -> dict:
    summary, rounds = json.loads(store.get("summary.json")), sampled(store)
    return {
        "accuracy": summary["accuracy_after"],
        "worst_fall": worst_fall([sample.reward for sample in rounds]),
        "seconds_to_060": reached(rounds)["seconds"],
        "kept_accuracy": summary.get("best_accuracy"),
        "staleness_mean": summary["staleness_mean"],
        "wall_s": summary["wall_s"],
    }


def integers(variable: str, default: str) -> list[int]:
    return [int(number) for number in os.environ.get(variable, default).split(",")]


def row(run: dict) -> str:
    cells = (value if isinstance(value, int) or value is None else f"{value:.3f}" for value in run.values())
    return "| " + " | ".join("–" if cell is None else str(cell) for cell in cells) + " |"


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the run that is on, as Ctrl-C does
    seeds, loads = integers("SEEDS", "0,1,2,3,4"), integers("LOAD", "0,1")
    arguments, runs = shlex.split(os.environ.get("ARGS", "")), []
    for num_processes in loads:
        for seed in seeds:
            with load(num_processes), default_run(seed, arguments) as store:
                runs.append({"seed": seed, "load": num_processes} | measure(store))
            print(json.dumps(runs[-1]), flush=True)
    print("", "| " + " | ".join(runs[0]) + " |", "|---" * len(runs[0]) + "|", *map(row, runs), sep="\n")
    print(json.dumps({"runs": runs}))


if __name__ == "__main__":
    main()
