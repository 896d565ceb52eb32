"""What does a sync cost with many Searchers, on a remote S3? `make bench-scale`: a table, then one JSON object.

N simulated Searchers (1, 8, 64, 1,000; SEARCHERS=… chooses) have committed shards of 16 prompts x 4 responses of 64
tokens, 50 kB each. The reader is a Trainer's: replay buffer, and syncs in their own thread. Its step does nothing for
0.2 s. S3 is Ceph's radosgw behind a proxy by which each answer takes 30 ms longer; server and proxy have the same
cores as the reader.

    first_sync_s          N shards, found by a scan, as after a resume
    empty_sync_s          a sync with nothing new, median of 10; empty_sync_requests: its requests to S3
    sync_s                a sync of N new shards, one of each Searcher, while nothing trains: median of 5;
                          slowest_sync_s: the slowest
    train_stall_ms        the longest of 20 steps' waits for a sync of N shards: at its request, and before a draw
    draw_ms               the longest draw meanwhile, on the same cores; usual_draw_ms: the median before the sync
    rss_mb, disk_mb       largest resident memory, and size of the word file, at the end
    prefect_…             what Prefect's server spends: tests/benchmarks/bench_prefect.py
"""

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from flows.trainer.alarms import RunAlarms
from flows.trainer.experience import StoredExperience
from infra.local_s3 import LocalS3
from storage import attempts
from storage.buffer import ReplayBuffer
from storage.mop import SamplingSettings
from storage.shards import commit_shard
from storage.store import RunStore, transfer_all
from tests.benchmarks import bench_buffer
from tests.storage.helpers import OWNER

LATENCY_S = 0.030
METHODS = (b"GET ", b"HEAD ", b"PUT ", b"POST ", b"DELETE ")
NUM_PROMPTS, RESPONSES_PER_PROMPT, RESPONSE_TOKENS = 16, 4, 64
SAMPLING = SamplingSettings(prompts_per_batch=16, responses_per_prompt=8, min_size=1)
STEP_S, NUM_STEPS, NUM_EMPTY = 0.2, 20, 10
NUM_SYNCS = 5  # of N new shards, while nothing trains
ROUNDS = NUM_SYNCS + 2  # the first sync's, those while nothing trains, one in training


class Latency(threading.Thread):
    """A proxy on loopback: what a client sends reaches the server later, in order. It counts requests."""

    def __init__(self, endpoint: str, counter: Path, latency_s: float = LATENCY_S):
        """counter: the file that gets the number of requests."""
        super().__init__(daemon=True)
        self._target, self._ready, self._latency_s = urlsplit(endpoint), threading.Event(), latency_s
        self.requests: list[tuple[float, bytes]] = []
        """Time (seconds since the epoch), and method and target, of each."""
        counter.write_bytes(bytes(8))
        self._number = np.memmap(counter, np.int64, "r+")
        self.start()
        self._ready.wait()

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await server.serve_forever()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection(self._target.hostname, self._target.port)
        requests = self._pass(reader, to_server[1], self._latency_s, counts=True)
        await asyncio.gather(requests, self._pass(to_server[0], writer, 0.0))

    async def _pass(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, delay_s: float, counts: bool = False
    ) -> None:
        loop = asyncio.get_running_loop()
        while data := await source.read(1 << 16):
            if counts and data.startswith(METHODS):
                self._number += 1
                self.requests.append((time.time(), data.partition(b" HTTP/")[0]))
            loop.call_later(delay_s, target.write, data)
        loop.call_later(delay_s, target.close)


def commit_rounds(store: RunStore, num_searchers: int) -> None:
    """Commits the next shard of each Searcher, from its process's standard input: one round a line."""
    bench_buffer.SHARD_ROWS = NUM_PROMPTS * RESPONSES_PER_PROMPT
    bench_buffer.RESPONSES_PER_PROMPT, bench_buffer.RESPONSE_TOKENS = RESPONSES_PER_PROMPT, RESPONSE_TOKENS
    for line in sys.stdin:
        number = int(line)
        shards = [bench_buffer.make_shard(f"s{index}", number, 20_000) for index in range(num_searchers)]
        transfer_all(lambda shard: commit_shard(store, shard), shards)
        print("committed", flush=True)


class Writers:
    """The Searchers, in a process of their own and without latency."""

    def __init__(self, url: str, run: str, num_searchers: int, environment: dict[str, str]):
        command = [sys.executable, "-m", "tests.benchmarks.bench_scale", "--write", url, run, str(num_searchers)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)

    def commit(self, number: int) -> None:
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "committed\n":
            raise RuntimeError("the simulated Searchers ended")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def timed_s(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(
    url: str, run: str, num_searchers: int, direct: dict[str, str], num_requests: Callable[[], int]
) -> dict[str, float]:
    """One N, in a process of its own. direct: the environment without latency. num_requests: so far."""
    store = RunStore(url, run)
    attempts.start_attempt(store, resumed_from=0, owner=OWNER)
    buffer = ReplayBuffer(store, SAMPLING, seed=0)
    with (
        closing(Writers(url, run, num_searchers, direct)) as writers,
        closing(StoredExperience(store, buffer, 1, RunAlarms())) as experience,
    ):
        writers.commit(0)
        figures = {"first_sync_s": timed_s(lambda: experience.sync(1))}
        before = num_requests()
        figures["empty_sync_s"] = statistics.median(timed_s(lambda: experience.sync(1)) for _ in range(NUM_EMPTY))
        figures["empty_sync_requests"] = (num_requests() - before) / NUM_EMPTY
        syncs_s = []
        for number in range(1, 1 + NUM_SYNCS):
            writers.commit(number)
            syncs_s.append(timed_s(lambda: experience.sync(1)))
            assert buffer.num_inserted == (1 + number) * num_searchers * NUM_PROMPTS * RESPONSES_PER_PROMPT
        figures |= {"sync_s": statistics.median(syncs_s), "slowest_sync_s": max(syncs_s)}
        usual_s = statistics.median(timed_s(lambda step=step: experience.draw(step)) for step in range(1, 11))
        writers.commit(ROUNDS - 1)
        stalls_s, draws_s = zip(*(time_step(experience, step) for step in range(11, 11 + NUM_STEPS)), strict=True)
        figures["train_stall_ms"] = 1e3 * max(stalls_s)
        figures |= {"draw_ms": 1e3 * max(draws_s), "usual_draw_ms": 1e3 * usual_s}
        step = 11 + NUM_STEPS
        while buffer.num_inserted < ROUNDS * num_searchers * NUM_PROMPTS * RESPONSES_PER_PROMPT:
            time_step(experience, step)
            step += 1
        figures["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        figures["disk_mb"] = sum(segment.num_bytes for segment in buffer._index.words._segments) / 1e6
    return figures


def time_step(experience: StoredExperience, step: int) -> tuple[float, float]:
    """How long a step waits for a sync, and how long it draws, in seconds."""
    sync_s, draw, begins = timed_s(lambda: experience.sync(step)), experience.buffer.draw, []

    def timed_draw(step: int) -> pa.Table:
        begins.append(time.perf_counter())
        return draw(step)

    experience.buffer.draw = timed_draw
    called = time.perf_counter()
    experience.draw(step)
    ended = time.perf_counter()
    del experience.buffer.draw
    time.sleep(STEP_S)
    return sync_s + begins[0] - called, ended - begins[0]


def ask_prefect(num_searchers: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_prefect", str(num_searchers)]
    child = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(next(line for line in child.stdout.splitlines() if line.startswith("{")))


def main() -> None:
    numbers = [int(number) for number in os.environ.get("SEARCHERS", "1,8,64,1000").split(",")]
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        server = LocalS3(Path(folder))
        direct = {**os.environ, **server.start()}
        try:
            counter = Path(folder) / "requests"
            url, far = direct["S3_URL"], direct | {"AWS_ENDPOINT_URL": Latency(direct["AWS_ENDPOINT_URL"], counter).url}
            for number in numbers:
                told = json.dumps({name: value for name, value in direct.items() if name not in os.environ})
                program = [sys.executable, "-m", "tests.benchmarks.bench_scale", "--measure"]
                command = [*program, url, f"n{number}", str(number), str(counter)]
                child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=far, input=told)
                figures = json.loads(child.stdout.splitlines()[-1]) | ask_prefect(number)
                results |= {f"{name}_at_{number}": round(value, 3) for name, value in figures.items()}
        finally:
            server.stop()
    names = list(dict.fromkeys(name.rpartition("_at_")[0] for name in results))
    print(f"{'Searchers':24}" + "".join(f"{number:>12}" for number in numbers))
    for name in names:
        print(f"{name:24}" + "".join(f"{results[f'{name}_at_{number}']:>12}" for number in numbers))
    print(json.dumps(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        commit_rounds(RunStore(*sys.argv[2:4]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["--measure"]:
        environment = {**os.environ, **json.loads(sys.stdin.read())}
        counted = np.memmap(sys.argv[5], np.int64, "r")
        print(json.dumps(measure(*sys.argv[2:4], int(sys.argv[4]), environment, lambda: int(counted[0]))))
    else:
        main()
