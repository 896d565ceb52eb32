"""How far is `tba plan` off? `make bench-plan`: real runs beside their simulation; a table, then one JSON object.

The real Trainer and Searchers, a model so small that it takes milliseconds, Searchers that pause for a second after
each round (tests/faults/searcher.py), a local folder. The first run gives the times; the others are simulated from
these, with other numbers of Searchers, intervals of syncs and limits of draws. An error is simulated over measured,
less 1.

Before, the set-ups that the paper published hours of (arXiv 2503.18929, table 6), simulated from these hours; this part
takes seconds: `make bench-plan PUBLISHED=1`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from flows.config import RunConfig, load_run
from flows.plan.simulator import Loop, simulate
from flows.plan.times import Outcome, Times, measured_outcome, measured_times, round_size
from storage.store import RunStore
from tests.character_model import save_character_model

REPOSITORY = Path(__file__).parents[2]
COMMON = {
    "trackers": [],
    "task": {"num_heldout": 8},
    "sampling": {"prompts_per_batch": 2, "responses_per_prompt": 4, "min_size": 16},
    "search": {"prompts_per_round": 2, "samples_per_prompt": 4},
}
# By name: Searchers, sync interval, samples_per_insert, steps. The first gives the times.
RUNS = {
    "two": (2, 4, 2.0, 100),
    "one": (1, 4, 2.0, 60),
    "four": (4, 4, 2.0, 200),
    "once": (2, 4, 1.0, 60),
    "often": (2, 1, 2.0, 100),
    "free": (2, 8, 20.0, 600),
}
LOAD_S = 15.0  # Searchers load before the Trainer starts, so that their first rounds begin together
SEEDS = 5
# Red-teaming, 5,000 steps of 128 attacks: hours of the synchronous predecessor, of TBA, and the numbers of Searchers
# (GPUs less two) with the published hours of each.
PUBLISHED = {
    "GPT-2": (11.9, 1.7, {2: 1.7, 14: 2.5, 62: 2.9, 1000: None}),
    "Llama-3.2-1B": (37.4, 5.7, {6: 5.7, 1000: None}),
}
SHOWN = ("seconds", "trainer_wait_share", "num_trajectories", "fresh_staleness")


def run_for_real(folder: Path, name: str) -> RunStore:
    """A run from its start to its end."""
    searchers, sync_interval, samples_per_insert, steps = RUNS[name]
    model = save_character_model(folder / "model")
    store = RunStore((folder / "store").as_uri(), name)
    settings = COMMON | {
        "run": name, "store": store.url, "model": str(model), "searchers": searchers,
        "sampling": COMMON["sampling"] | {"samples_per_insert": samples_per_insert},
        "train": {"steps": steps, "sync_interval": sync_interval, "checkpoint_interval": steps},
    }  # fmt: skip
    store.create_run(RunConfig.model_validate(settings).recorded())
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}

    def start(*command: str) -> subprocess.Popen:
        with open(folder / "log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command], cwd=folder, env=environment, stdout=log, stderr=log
            )

    with ExitStack() as started:
        for number in range(searchers):
            command = ("tests.faults.searcher", store.url, name, f"s{number}", str(folder / f"s{number}"))
            started.callback(start(*command).kill)
        time.sleep(LOAD_S)
        trainer = start("flows.trainer", store.url, name, str(os.getpid()))
        started.callback(trainer.kill)
        if status := trainer.wait():
            sys.exit(f"run {name}: the Trainer ended with status {status}:\n{(folder / 'log').read_text()[-3000:]}")
    return store


def simulated(times: Times, store: RunStore) -> dict[str, float]:
    outcomes = [asdict(simulate(times, Loop.of(load_run(store), round_size(store)), seed)) for seed in range(SEEDS)]
    return {key: fmean(outcome[key] for outcome in outcomes) for key in SHOWN}


def compare(times: Times, store: RunStore, measured: Outcome) -> dict:
    found = simulated(times, store)
    return {
        key: {"measured": getattr(measured, key), "simulated": value, "error": value / getattr(measured, key) - 1}
        for key, value in found.items()
        if getattr(measured, key)
    }


def published() -> list[dict]:
    """Simulated hours of the published set-ups, with replay as published, and with each attack trained on once.

    A synchronous turn is a round and a step. A step is taken to last as long as one of TBA with the fewest GPUs.
    """
    found = []
    for model, (synchronous_h, shortest_h, hours) in PUBLISHED.items():
        step_s, turn_s = shortest_h * 3600 / 5000, synchronous_h * 3600 / 5000
        times = Times(steps=[step_s], rounds=[turn_s - step_s], pauses=[0.0], loads=[0.0], evaluations=[], publish=0.0)
        for searchers, published_h in hours.items():
            loops = [Loop(searchers, 5000, 10, 128, 128, 1, draws) for draws in (None, 1.0)]
            replayed_h, once_h = (simulate(times, loop).seconds / 3600 for loop in loops)
            row = {"model": model, "searchers": searchers, "synchronous_h": synchronous_h, "published_h": published_h}
            found.append(row | {"simulated_h": replayed_h, "simulated_once_h": once_h})
    return found


def main() -> None:
    setups = published()
    for row in setups:
        print(
            *(f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
        )
    if os.environ.get("PUBLISHED"):
        print(json.dumps({"published": setups}))
        return
    runs, times = {}, None
    print(f"{'run':8}{'':20}{'measured':>10}{'simulated':>11}{'error':>8}", flush=True)
    for name in RUNS:
        with tempfile.TemporaryDirectory(prefix="bench-plan-") as folder:
            store = run_for_real(Path(folder), name)
            times = times or measured_times(store)
            runs[name] = compare(times, store, measured_outcome(store))
        for key, of_key in runs[name].items():
            cells = f"{of_key['measured']:10.2f}{of_key['simulated']:11.2f}{of_key['error']:8.1%}"
            print(f"{name:8}{key:20}{cells}", flush=True)
    held_out = [of_run["seconds"]["error"] for name, of_run in runs.items() if name != next(iter(RUNS))]
    print(json.dumps({"published": setups, "runs": runs, "largest_error_of_seconds": max(map(abs, held_out))}))


if __name__ == "__main__":
    main()
