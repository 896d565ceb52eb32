"""The crash matrix: kill every part of a running job at every point of its checkpoint cycle, and count what is left.

    make crash-matrix                                    all cells, on radosgw; prints a table, exit status 1 on a fault
    python -m tests.faults.matrix --parts trainer flow    some parts only
    python -m tests.faults.matrix --drop-shard            deletes one acknowledged shard at the end: must be reported

One run of the real pipeline (Prefect's server and worker, a Searcher, the Trainer) goes through all cells. A cell waits
for its point, sends SIGKILL, gives the command `tba train` again where it ended, waits until the run searches and
trains again, and accounts for every trajectory whose commit was ever acknowledged: a Searcher says so in its log, after
the store's answer. The harness sees what an operator sees: logs, temporary files, processes.

What is killed must come back thirty times, so what starts slowly is small: the model has 14 M random weights, and the
Searcher finds no vLLM, which starts in 40 s where transformers' generate does in 3. tests/flows/test_end_to_end.py
kills a run of the embedded model with vLLM.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.local_s3 import LocalS3, free_ports
from infra.processes import find_processes, stop_processes
from infra.temporary_folders import MEMORY_FOLDER
from storage import attempts, ledger
from storage.errors import NotFound, StoreError
from storage.new_shards import new_shards
from storage.queries import query
from storage.shard_files import by_block, read_each
from storage.shards import shard_path, trajectory_id
from storage.store import RunStore
from storage.verify import verify
from tba.weights import fingerprint, read_weights
from tests.character_model import save_character_model

REPOSITORY = Path(__file__).parents[2]
INTERVAL = 4  # steps between checkpoints
SETTINGS = {
    "searchers": 1,
    "sampling.prompts_per_batch": 2,
    "sampling.responses_per_prompt": 4,
    "sampling.min_size": 32,
    "search.prompts_per_round": 4,
    "search.samples_per_prompt": 8,
    "train.checkpoint_interval": INTERVAL,
    "train.steps": 100_000,  # the matrix ends the run
    "task.num_heldout": 16,
}
SEARCHER = "s0"
PARTS = ("searcher", "trainer", "flow", "worker", "server", "gateway")
GATEWAY_DOWN_S = 3.0
CELL_TIMEOUT_S = 600  # of a machine that others keep busy
STOP_TIMEOUT_S = 120
WITHOUT_VLLM = "import sys\n\nsys.modules['vllm'] = None\n"  # every Python process of the project begins with it
ACKNOWLEDGED = re.compile(r"round (\d+): (\d+) trajectories, policy step")


class CrashTest:
    """A run in a project folder of its own, its stack kept up between commands, and what the harness knows of it."""

    def __init__(self, folder: Path, url: str, outages: dict[str, Callable[[], None]]):
        """outages: parts that are not ours to kill by pid, and what makes each fail and come back."""
        self.project, self.store, self.outages = folder / "project", RunStore(url, "crash"), outages
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.acknowledged: dict[int, int] = {}  # trajectories, by round of the one Searcher
        self.resumes = 0
        self._output = open(folder / "output.log", "w")  # noqa: SIM115, closed with the run
        self._command: subprocess.Popen | None = None
        api = f"http://127.0.0.1:{free_ports(1)[0]}/api"
        self._environment = os.environ | {"PREFECT_API_URL": api, "TMPDIR": str(self.temporary)}
        self.project.mkdir()
        for name in ("prefect.yaml", "flows", "infra", "storage", "tba"):
            (self.project / name).symlink_to(REPOSITORY / name)
        (self.project / "sitecustomize.py").write_text(WITHOUT_VLLM)
        self._model = make_model(folder / "model")

    # --- the job ------------------------------------------------------------------------------------------------------

    def tba(self, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *arguments],
            cwd=self.project,
            env=self._environment | {"PYTHONPATH": str(self.project)},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def start(self) -> None:
        if status := self.tba("up").wait():
            raise RuntimeError(f"tba up ended with status {status}: {self._output.name}")
        self.resume()

    def resume(self) -> None:
        """Give the command, if it is not still following the run."""
        if self._command is None or self._command.poll() is not None:
            self.read_acknowledgements()  # a new worker begins its log anew
            settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
            where = ["--store", self.store.url, "--model", str(self._model)]
            self._command = self.tba("train", self.store.run, *where, *settings)
            self.resumes += 1

    def stop(self) -> None:
        """In order, where the machine lets it; nothing stays in any case."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._command and self._command.poll() is None:
                self._command.send_signal(signal.SIGINT)
                self._command.wait(STOP_TIMEOUT_S)
            self.tba("down").wait(STOP_TIMEOUT_S)
        stop_processes(find_processes("TBA_STACK", str(self.project)))
        if self._command and self._command.poll() is None:
            self._command.kill()
        self._output.close()

    def processes(self, part: str) -> list[psutil.Process]:
        """Of flow processes the one that has the Trainer is the flow; the others are Searchers."""
        if part in ("worker", "server"):
            state = json.loads((self.project / ".tba" / ".local" / "stack.json").read_text())
            return [psutil.Process(state["processes"][part]["pid"])]
        ours = find_processes("TBA_STACK", str(self.project))
        trainers = [process for process in ours if "flows.trainer" in process.cmdline()]
        if part == "trainer":
            return trainers
        owners = {process.ppid() for process in trainers}
        flows = [process for process in ours if "prefect.engine" in process.cmdline()]
        return [process for process in flows if (process.pid in owners) == (part == "flow")]

    def kill(self, part: str) -> bool:
        """SIGKILL, and nothing before it. False: the part is not there now."""
        if part in self.outages:
            self.outages[part]()
            return True
        with contextlib.suppress(psutil.NoSuchProcess, KeyError, FileNotFoundError):
            found = self.processes(part)
            for process in found:
                process.kill()
            psutil.wait_procs(found, 10)
            return bool(found)
        return False

    # --- what can be seen of it ---------------------------------------------------------------------------------------

    def read_acknowledgements(self) -> None:
        """From the worker's log, which carries its flows' output, and Prefect's copy of it: either may be killed."""
        local = self.project / ".tba" / ".local"
        messages = []
        with contextlib.suppress(FileNotFoundError):
            messages.append((local / "worker.log").read_text(errors="replace"))
        with contextlib.suppress(sqlite3.Error), contextlib.closing(self._prefect_database(local)) as database:
            messages += [message for (message,) in database.execute("SELECT message FROM log")]
        for message in messages:
            for number, num_trajectories in ACKNOWLEDGED.findall(message):
                self.acknowledged[int(number)] = int(num_trajectories)

    @staticmethod
    def _prefect_database(local: Path) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{local}/prefect/prefect.db?mode=ro", uri=True, timeout=5)

    def progress(self) -> tuple[int, int]:
        """Attempt and step of the Trainer's newest sign of life; (0, 0) before the first step."""
        with contextlib.suppress(NotFound):
            beat = json.loads(self.store.get(attempts.HEARTBEAT))
            if beat["state"] == "training":
                return beat["attempt"], beat["step"]
        return 0, 0

    def staged(self, kind: str, file: str) -> bool:
        """Whether the Trainer has written a file of the checkpoint or policy that it is about to upload."""
        places = self.temporary, MEMORY_FOLDER
        return any(found for place in places for found in place.glob(f"tba-{kind}-{self.store.run}@*/{file}"))

    def await_(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + CELL_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                said = Path(self._output.name).read_text()[-10_000:]
                raise TimeoutError(f"{what}: not in {CELL_TIMEOUT_S} s. What the commands said last:\n{said}")
            self.resume()
            time.sleep(0.05)


def make_model(folder: Path) -> Path:
    """A Llama with random weights. A checkpoint is 170 MB: large enough to be killed in the middle of."""
    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}
    return save_character_model(folder, dtype="bfloat16", num_key_value_heads=6, **shape)


def restart(gateway: LocalS3) -> None:
    gateway.kill_gateway()
    time.sleep(GATEWAY_DOWN_S)
    gateway.start_gateway()


def between_checkpoints(test: CrashTest) -> bool:
    return test.progress()[1] % INTERVAL == INTERVAL // 2


def saving(test: CrashTest) -> bool:
    return test.staged("checkpoint", "*") and not test.staged("checkpoint", "state.json")


def uploading(test: CrashTest) -> bool:
    return test.staged("checkpoint", "state.json")


def after_checkpoint(test: CrashTest) -> bool:
    """Complete in the store, its temporary folder gone; training went on meanwhile."""
    test.await_(lambda: uploading(test), "the next checkpoint")
    test.await_(lambda: not uploading(test), "its end")
    return True


def publishing(test: CrashTest) -> bool:
    return test.staged("policy", "policy.json")


POINTS: dict[str, Callable[[CrashTest], bool]] = {
    "between checkpoints": between_checkpoints,
    "checkpoint saved": saving,
    "checkpoint uploaded": uploading,
    "after a checkpoint": after_checkpoint,
    "policy published": publishing,
}


@dataclass
class Account:
    """Every acknowledged trajectory, looked for in the store."""

    acknowledged: int
    found: int  # of those, in their shard
    faults: list[str]


def account(store: RunStore, acknowledged: dict[int, int]) -> Account:
    """acknowledged: trajectories by round of the one Searcher. Reads every shard; faults name what does not hold."""
    faults, found, ids = [], 0, Counter()
    # before the shards: what a running job trains on meanwhile may be in one that comes after they were listed
    trained = set(query(store, "SELECT DISTINCT trajectory_id FROM batches")["trajectory_id"].to_pylist())
    committed = new_shards(store, {}).get(SEARCHER, [])
    if committed != list(range(len(committed))):
        faults.append(f"rounds have gaps: {sorted(set(range(max(committed))) - set(committed))}")
    read = [table for of_block in by_block(committed) for table in read_each(store, SEARCHER, of_block)]
    for number, shard in zip(committed, read, strict=True):
        if isinstance(shard, StoreError):
            faults.append(str(shard))
            continue
        rows = shard["trajectory_id"].to_pylist()
        ids.update(rows)
        if number in acknowledged:
            expected = {trajectory_id(SEARCHER, number, index) for index in range(acknowledged[number])}
            found += len(expected & set(rows))
            if set(rows) != expected:
                faults.append(f"{shard_path(SEARCHER, number)}: {len(rows)} rows, {len(expected)} were acknowledged")
    faults += [f"lost: {shard_path(SEARCHER, n)} was acknowledged" for n in sorted(set(acknowledged) - set(committed))]
    faults += [f"{name} is there {times} times" for name, times in ids.items() if times > 1]
    faults += [f"{name} was trained, but is not there" for name in sorted(trained - set(ids))]
    taken_in = Counter()
    for row in ledger.effective_syncs(store, SETTINGS["train.steps"]):
        taken_in.update(range(row["first_round"], row["last_round"] + 1))
    faults += [f"round {number} was taken in {times} times" for number, times in taken_in.items() if times > 1]
    return Account(sum(acknowledged.values()), found, faults)


def proof(store: RunStore) -> list[str]:
    """What `tba verify` finds wrong with the store."""
    report = verify(store, lambda folder: fingerprint(read_weights(folder)))
    return [f"verify: {fault.kind}: {fault.path}: {fault.message}" for fault in report.faults]


def run_cell(test: CrashTest, part: str, point: str) -> tuple[float, Account]:
    """Kill a part at a point; returns the seconds until the run searched and trained again, and the account."""
    test.await_(lambda: POINTS[point](test) and bool(part in test.outages or test.processes(part)), f"{part}: {point}")
    attempt_and_step = test.progress()
    test.read_acknowledgements()
    newest = max(test.acknowledged)
    test.await_(lambda: test.kill(part), f"{part} to kill")
    killed_at = time.monotonic()

    def works_again() -> bool:
        if test.progress() <= attempt_and_step:
            return False
        test.read_acknowledgements()  # all of the logs, so not each time
        return max(test.acknowledged) > newest

    test.await_(works_again, f"{part} killed ({point}): the run to search and train again")
    return time.monotonic() - killed_at, account(test.store, test.acknowledged)


def run_matrix(test: CrashTest, cells: list[tuple[str, str]]) -> list[str]:
    """Run the cells in order, print a line each; returns all faults."""
    test.start()
    started = time.monotonic()
    test.await_(lambda: test.progress()[1] >= 1, "the first step")
    print(
        f"{'part':10} {'killed at':22} {'back after':>10} {'commands':>9} {'acknowledged':>13} {'found':>7}  faults",
        flush=True,
    )
    faults = []
    for part, point in cells:
        seconds, result = run_cell(test, part, point)
        line = f"{part:10} {point:22} {seconds:8.0f} s {test.resumes:9} {result.acknowledged:13} {result.found:7}"
        print(f"{line}  {len(result.faults) or '-'}", flush=True)
        faults += [f"{part}, {point}: {fault}" for fault in result.faults]
    print(f"{len(cells)} cells in {time.monotonic() - started:.0f} s, {len(faults)} faults")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--points", nargs="+", choices=list(POINTS), default=list(POINTS))
    parser.add_argument("--drop-shard", action="store_true", help="delete one acknowledged shard at the end")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` too must leave no stack and no store behind
    with tempfile.TemporaryDirectory(prefix="crash-matrix-") as folder:
        gateway = LocalS3(Path(folder) / "s3")
        try:
            environment = gateway.start()
            os.environ.update(environment)
            test = CrashTest(Path(folder), environment["S3_URL"], {"gateway": lambda: restart(gateway)})
            try:
                faults = run_matrix(test, [(part, point) for point in arguments.points for part in arguments.parts])
            finally:
                test.stop()
            if arguments.drop_shard:
                test.store.delete(shard_path(SEARCHER, max(test.acknowledged)))
            faults += account(test.store, test.acknowledged).faults + proof(test.store)
        finally:
            gateway.stop()
    print("\n".join(faults) or "Every acknowledged trajectory is there, once, and `tba verify` finds no fault.")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
