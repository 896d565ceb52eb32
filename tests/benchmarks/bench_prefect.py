"""What does Prefect's server spend on a run with N Searchers? Part of `make bench-scale`.

A real server, N flow runs that are Running, and a run's requests for SECONDS: the flow asks every two seconds which
Searchers have ended, and each Searcher ends a round every ROUND_S, which is a task with an asset if its report is due.

    prefect_cpu_share     of a core, that the server spends meanwhile; prefect_idle_share: before
    prefect_rounds        rounds that were reported, of N * SECONDS / ROUND_S
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from uuid import UUID

import httpx
import psutil
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_LEVEL, temporary_settings
from prefect.states import Running

from flows import search
from flows.run.searchers import read_ended
from flows.searcher.round_reports import RoundReports
from flows.train import POLL_S
from infra.local_s3 import free_ports
from storage.store import RunStore

SECONDS, ROUND_S = 40.0, 10.0


@contextlib.contextmanager
def server(folder: Path):
    """A Prefect server with SQLite, as `tba up` starts one; its process, with PREFECT_API_URL set."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--analytics-off"],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PREFECT_HOME": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}/api"
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{url}/health").raise_for_status()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the Prefect server did not start")
            time.sleep(0.5)
        with temporary_settings({PREFECT_API_URL: url, PREFECT_LOGGING_LEVEL: "WARNING"}):
            yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


@flow(name="bench")
def idle() -> None:
    """What each simulated Searcher runs."""


def start_searchers(number: int) -> list[UUID]:
    with get_client(sync_client=True) as client:
        return [client.create_flow_run(idle, state=Running()).id for _ in range(number)]


def cpu_s(process: psutil.Process) -> float:
    times = [each.cpu_times() for each in [process, *process.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


@flow(name="rounds", log_prints=False)
def end_rounds(store: RunStore, number: int) -> int:
    """The Searchers' rounds, one after the other. Returns the number of those reported."""
    searchers, num_reported, began = [RoundReports(store, number) for _ in range(number)], 0, time.monotonic()
    for turn in range(int(SECONDS / ROUND_S * number)):
        time.sleep(max(0.0, began + turn * ROUND_S / number - time.monotonic()))
        if searchers[turn % number].is_due():
            search.as_asset(store, f"s{turn % number}", turn // number, ["policies/step=00000000"])(lambda: True)()
            num_reported += 1
    return num_reported


def keep_up(ids: list[UUID], over: threading.Event) -> None:
    while not over.wait(POLL_S):
        assert read_ended(ids) == {}


def measure(number: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench-prefect-") as folder, server(Path(folder)) as process:
        store = RunStore(Path(folder).as_uri(), "run")
        ids, over = start_searchers(number), threading.Event()
        time.sleep(10)  # the server notes down what has begun
        before, began = cpu_s(process), time.monotonic()
        time.sleep(10)
        idle_share = (cpu_s(process) - before) / (time.monotonic() - began)
        asking = threading.Thread(target=keep_up, args=(ids, over))
        before, began = cpu_s(process), time.monotonic()
        asking.start()
        num_reported = end_rounds(store, number)
        share = (cpu_s(process) - before) / (time.monotonic() - began)
        over.set()
        asking.join()
    return {"prefect_cpu_share": share, "prefect_idle_share": idle_share, "prefect_rounds": num_reported}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
