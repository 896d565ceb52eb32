"""Asynchronous and synchronous training with a core each: `make bench-turns`. Writes docs/results/sync_apart_cpu_*

`tba compare sync`, but the Trainer has one core and the Searcher another one, as if each had hardware of its own. Each
runs under a Prefect worker that is pinned by `taskset`. The first worker takes the run's flow with the Trainer. The
second one, which starts later, takes the Searcher. Prefect's server and the command have both cores.

    SEEDS=1 STEPS=20 make bench-turns     3 seeds and 50 steps by default
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from flows.compare import turns
from infra import prefect_server, stack, stack_state
from infra.processes import stop_processes
from storage.attempts import first_attempt_at
from storage.errors import NotFound
from storage.store import RunStore
from tba.models import EMBEDDED_MODEL

PROJECT = Path(__file__).parents[2]
STORE = (PROJECT / ".tba" / "bench-turns").as_uri()
TRAINER_CORE, SEARCHER_CORE = 0, 1


@contextmanager
def worker(core: int, environment: dict[str, str]) -> Iterator[None]:
    """A Prefect worker for one flow at a time, which has this core alone, as have the processes that it starts."""
    pool = ["--pool", prefect_server.WORK_POOL, "--type", "process", "--work-queue", stack.work_queue(PROJECT)]
    start = [sys.executable, "-m", "prefect", "worker", "start", *pool, "--limit", "1", "--name", f"core-{core}"]
    with open(stack.local_folder(PROJECT) / f"worker-{core}.log", "ab") as log:
        process = psutil.Popen(
            ["taskset", "-c", str(core), *start], cwd=PROJECT, env=environment, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        stop_processes([*process.children(recursive=True), process])


def run_apart(command: list[str]) -> tuple[int, str]:
    """Runs a command of `tba train`: the Trainer on one core, the Searcher on the other. Returns status and output."""
    environment = stack._environment(PROJECT, stack_state.read_state(stack.local_folder(PROJECT)))
    store = RunStore(STORE, command[command.index("train") + 1])
    with ExitStack() as workers:
        workers.enter_context(worker(TRAINER_CORE, environment))
        waiting = [SEARCHER_CORE]

        def start_second() -> bool:
            if waiting and has_begun(store):
                workers.enter_context(worker(waiting.pop(), environment))
            return False  # the run goes on

        return turns.run_to_its_end(command, start_second)


def has_begun(store: RunStore) -> bool:
    """Whether the first worker has taken the run's flow, so that the second one cannot.

    True at once for a run that is resumed: either worker may then take the flow, and each still has a core of its own.
    """
    with suppress(NotFound):
        return bool(first_attempt_at(store))
    return False


def main() -> None:
    os.environ[stack.NO_WORKER_VARIABLE] = "1"
    steps, seeds = int(os.environ.get("STEPS", "50")), int(os.environ.get("SEEDS", "3"))
    about = turns.conditions(EMBEDDED_MODEL, seeds, steps) | {"cores": "the Trainer has one, the Searcher another"}
    stack.up(PROJECT, keep=True)
    try:
        print(turns.turns(STORE, PROJECT / "docs" / "results", about, print, run_apart, name="sync_apart"))
    finally:
        stack.down(PROJECT)


if __name__ == "__main__":
    main()
