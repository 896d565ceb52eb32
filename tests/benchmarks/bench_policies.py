"""How fast does a policy travel over 100 Mbit/s? `make bench-policies`: one JSON object.

The embedded model's files (269 MB of bfloat16 weights), published to Ceph's radosgw, which is started for it
(infra/local_s3.py). Each policy differs from the one before in 0.8 % of its weights, by one unit in the last place, at
random places; between consecutive policies of a default run it was 0.77 %. Times are medians of three,
whole policies are measured once. Fetches, and publishing where it says so, go through a proxy on loopback that passes
100 Mbit/s each way (12.5 MB/s).

    fetch_s_100mbit          to a cache that has the policy before: until all files are there and checked
    whole_fetch_s_100mbit    to an empty cache, the weights whole
    join_s_100mbit           to an empty cache, an anchor and the deltas after it (num_deltas)
    eight_fetches_s_100mbit  until the last of eight processes that fetch at once has ended
    downloads_per_host       bytes that eight processes fetch at once through one cache, by those that one fetches

It takes three minutes and 2 GB of the folder for temporary files (TMPDIR). `--mb 4` takes random weights instead.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from safetensors.numpy import save_file

from infra.local_s3 import LocalS3
from storage.policies import PolicyRef, fetch_policy, policy_ref, publish_policy
from storage.store import RunStore
from tba.models import EMBEDDED_MODEL, model_folder

PROJECT = Path(__file__).parents[2]
BYTES_PER_S = 100e6 / 8
CHANGED_SHARE = 0.008
REPEATS, NUM_PROCESSES = 3, 8
CHUNK_BYTES = 2**14
# A process that fetches when it is told to.
FETCHING = """
import json, sys
from storage.policies import PolicyRef, fetch_policy
from storage.store import RunStore
url, cache, ref = sys.argv[1:]
store = RunStore(url, "run")
print("ready", flush=True)
sys.stdin.readline()
fetch_policy(store, PolicyRef(**json.loads(ref)), cache)
"""


class Throttle:
    """A proxy on loopback that passes bytes at one rate each way, whatever the number of connections."""

    def __init__(self, endpoint: str, bytes_per_s: float):
        self._address = (urlsplit(endpoint).hostname, urlsplit(endpoint).port)
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = {"up": 0.0, "down": 0.0}  # when the line has passed what it was given
        self.passed = {"up": 0, "down": 0}  # bytes
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._server.accept()
            store = socket.create_connection(self._address)
            for source, target, way in ((client, store, "up"), (store, client, "down")):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass, args=(source, target, way), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with suppress(OSError):  # the client has ended
            while data := source.recv(CHUNK_BYTES):
                with self._lock:
                    start = max(self._free_at[way], time.monotonic())
                    self._free_at[way] = start + len(data) / self._bytes_per_s
                    self.passed[way] += len(data)
                time.sleep(max(0.0, self._free_at[way] - time.monotonic()))
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class Policies:
    """Publishes policies, each a little different from the one before."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder, self._step = model, folder, 0
        self._cache = folder / "trainer"
        self._weights = np.fromfile(model / "model.safetensors", np.uint8)
        header = 8 + int.from_bytes(self._weights[:8].tobytes(), "little")
        self._values = self._weights[header:].view(np.uint16)
        self.served: PolicyRef | None = None

    def publish(self, store: RunStore, *, whole: bool = False) -> float:
        """Returns the seconds from the files to the pointer."""
        random = np.random.default_rng(self._step)
        places = random.integers(0, len(self._values), int(CHANGED_SHARE * len(self._values)))
        self._values[np.unique(places)] ^= 1
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            for file in self._model.iterdir():
                if file.suffix != ".safetensors":
                    shutil.copy(file, folder)
            self._weights.tofile(Path(folder, "model.safetensors"))
            ref = policy_ref(self._step, f"{self._step:032d}", attempt=1)
            start = time.perf_counter()
            self.served = publish_policy(store, folder, ref, self._cache, None if whole else self.served)
        self._step += 1
        return time.perf_counter() - start


def timed(work: Callable, *arguments) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def random_model(folder: Path, num_mb: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    values = np.random.default_rng(0).integers(0, 2**16, num_mb * 500_000, np.uint16)
    save_file({"weight": values}, folder / "model.safetensors")
    return folder


def fetch_at_once(store: RunStore, ref: PolicyRef, cache: Path) -> float:
    """Seconds until the last of the processes has the policy."""
    command = [sys.executable, "-c", FETCHING, store.url, str(cache), json.dumps(vars(ref))]
    processes = [
        subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(NUM_PROCESSES)
    ]
    for process in processes:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("a process that fetches did not start")
    start = time.perf_counter()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    if any([process.wait() for process in processes]):
        raise RuntimeError("a process could not fetch the policy")
    return time.perf_counter() - start


def measure(direct: RunStore, throttle: Throttle, model: Path, folder: Path) -> dict:
    os.environ["AWS_ENDPOINT_URL"] = throttle.url
    slow = RunStore(direct.url, direct.run)
    policies, cache, figures = Policies(model, folder), folder / "searcher", {}
    whole_publish_s = policies.publish(direct)
    figures["whole_fetch_s_100mbit"] = timed(fetch_policy, slow, policies.served, cache)
    publish_s, fetch_s = [], []
    for _ in range(REPEATS):
        publish_s.append(policies.publish(direct))
        before = throttle.passed["down"]
        fetch_s.append(timed(fetch_policy, slow, policies.served, cache))
        bytes_of_one = throttle.passed["down"] - before
    weights, delta = model / "model.safetensors", f"{policies.served.path}/model.safetensors.delta"
    figures["delta_bytes_share"] = len(direct.get(delta)) / weights.stat().st_size
    figures["fetched_bytes_share"] = bytes_of_one / sum(file.stat().st_size for file in model.iterdir())
    figures["fetch_s_100mbit"] = statistics.median(fetch_s)
    slow_publish_s = [policies.publish(slow) for _ in range(REPEATS)]
    fetch_policy(slow, policies.served, cache)
    policies.publish(direct)
    before = throttle.passed["down"]
    figures["eight_fetches_s_100mbit"] = fetch_at_once(slow, policies.served, cache)
    figures["downloads_per_host"] = (throttle.passed["down"] - before) / bytes_of_one
    figures["num_deltas"] = policies.served.step
    figures["join_s_100mbit"] = timed(fetch_policy, slow, policies.served, folder / "joiner")
    figures["publish_s"] = {"whole": whole_publish_s, "delta": statistics.median(publish_s)}
    figures["publish_s_100mbit"] = {
        "whole": policies.publish(slow, whole=True),
        "delta": statistics.median(slow_publish_s),
    }
    return figures


def rounded(figures: dict) -> dict:
    return {
        name: rounded(value) if isinstance(value, dict) else round(value, 4 if "share" in name else 2)
        for name, value in figures.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, help="random weights of this size instead of the embedded model's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as name:
        folder = Path(name)
        model = random_model(folder / "model", arguments.mb) if arguments.mb else model_folder(EMBEDDED_MODEL)
        server = LocalS3(folder / "s3")
        try:
            environment = server.start()
            os.environ |= environment
            throttle = Throttle(environment["AWS_ENDPOINT_URL"], BYTES_PER_S)
            figures = measure(RunStore(f"{environment['S3_URL']}/stores", "run"), throttle, model, folder)
        finally:
            server.stop()
        figures["weights_mb"] = (model / "model.safetensors").stat().st_size / 1e6
    print(json.dumps(rounded(figures)))


if __name__ == "__main__":
    main()
