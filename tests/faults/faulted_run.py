"""The run of a soak: the real Trainer and Searchers behind the proxy, what is done to them, and their account."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import boto3
import pyarrow as pa

from flows.config import RunConfig
from storage import requests
from storage.attempts import read_heartbeat
from storage.schema import SCHEMA_VERSION
from storage.shards import parquet_bytes
from storage.store import RunStore
from tests.character_model import ARITHMETIC, save_character_model
from tests.faults import accounting
from tests.faults.s3_proxy import S3Proxy
from tests.faults.schedule import MACHINE_FAULTS, STORE_FAULTS, Event
from tests.storage.helpers import make_shard

REPOSITORY = Path(__file__).parents[2]
RUN = "soak"
# Longest pause between two training steps, faults of the store included. Times when the Trainer was frozen or its disk
# full do not count, and a kill begins a new pause: the schedule may kill a Trainer three times in a minute. A killed
# Trainer starts in 15 s on two idle cores, and its first batch waits for a Searcher's next round.
STALL_LIMIT_S = 90.0
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 150.0  # longer than the store's patience
LONGEST_FREEZE_S, LONGEST_FULL_S = 20.0, 20.0
TEMPORARY_BYTES = 64 << 20
SEARCHERS = ("s0", "s1")
VOCABULARY = len(ARITHMETIC) + 2
B, K = 2, 4
SETTINGS = {
    "searchers": len(SEARCHERS),
    "trackers": [],
    "task": {"num_heldout": 8, "rewards": ["soak_reward:spread"]},
    "sampling": {"prompts_per_batch": B, "responses_per_prompt": K, "min_size": 16, "samples_per_insert": 2},
    "search": {"prompts_per_round": B, "samples_per_prompt": K},
    "train": {"steps": 10_000_000, "sync_interval": 4, "checkpoint_interval": 20},  # the harness ends the run
}
# In the processes' working folder. The small model never answers a sum: without a reward that differs its weights would
# stay as they are, and so would every fingerprint.
REWARD = """def spread(completion_ids, **columns):
    return [sum(tokens) % 7 / 7 for tokens in completion_ids]
"""


@dataclass
class Part:
    """A process of the run, kept up."""

    command: list[str]
    log: Path
    process: subprocess.Popen | None = None
    is_killed: bool = False  # by the harness
    num_starts: int = 0


class FaultedRun:
    """A run behind the proxy, its processes, and what was done to them."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        """environment: variables that reach the store itself; they are set in this process."""
        os.environ.update(environment)
        self.client = boto3.Session().client("s3")
        self.bucket = "soak"
        self.client.create_bucket(Bucket=self.bucket)
        self.folder, self.store = folder, RunStore(f"s3://{self.bucket}/stores", RUN)
        self.proxy = S3Proxy(environment["AWS_ENDPOINT_URL"], f"{self.bucket}/stores/{RUN}")
        self.acknowledged_in = {name: folder / f"{name}.acknowledged" for name in SEARCHERS}
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.can_fill = self._mount()
        self.spoiled: dict[str, str] = {}  # key: kind
        self.done: Counter[str] = Counter()  # by kind: events that hit
        self.ended: list[dict] = []  # processes that ended by themselves
        self.outages: list[tuple[float, float]] = []
        self.kills: list[float] = []  # times when the Trainer was killed
        self.undo: list[tuple[float, Callable[[], None]]] = []
        self._begun: list[str] = []  # kinds, for the record of what ended
        self._events: list[Event] = []
        self.parts = self._parts()
        (folder / "soak_reward.py").write_text(REWARD)
        model = save_character_model(folder / "model")
        config = RunConfig.model_validate({"run": RUN, "store": self.store.url, "model": str(model)} | SETTINGS)
        self.store.create_run(config.recorded())

    def _parts(self) -> dict[str, Part]:
        url = self.store.url
        trainer = [sys.executable, "-m", "flows.trainer", url, RUN, str(os.getpid())]
        parts = {"trainer": Part(trainer, self.folder / "trainer.log")}
        for name, acknowledged in self.acknowledged_in.items():
            command = [sys.executable, "-m", "tests.faults.searcher", url, RUN, name, str(acknowledged)]
            parts[name] = Part(command, self.folder / f"{name}.log")
        parts["upkeep"] = Part([sys.executable, "-m", "tests.faults.upkeep", url, RUN], self.folder / "upkeep.log")
        return parts

    # --- processes ----------------------------------------------------------------------------------------------------

    def keep_up(self) -> None:
        """Starts parts that do not run, and ends the faults that are over."""
        for part in self.parts.values():
            if part.process is None or part.process.poll() is not None:
                self._note_end(part)
                self._start(part)
        due = [entry for entry in self.undo if entry[0] <= time.monotonic()]
        for entry in due:
            self.undo.remove(entry)
            entry[1]()

    def _start(self, part: Part) -> None:
        environment = {
            "AWS_ENDPOINT_URL": self.proxy.url,
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
        }
        with open(part.log, "ab") as log:
            part.process = subprocess.Popen(
                part.command,
                cwd=self.folder,  # of the cache of policies
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        part.is_killed = False
        part.num_starts += 1

    def _note_end(self, part: Part) -> None:
        if part.process is None or part.is_killed:
            return
        last = [line for line in part.log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        recent = self._begun[-5:]
        said = {"part": part.log.stem, "status": part.process.returncode, "said": "".join(last)[:300], "after": recent}
        self.ended.append(said)
        print(f"{part.log.stem} ended by itself: {said}", file=sys.stderr, flush=True)

    def stop(self) -> list[str]:
        """Ends the run in order, without faults. Returns what did not end."""
        for _, undo in self.undo:
            undo()
        self.undo.clear()
        self.proxy.disarm()
        for name in SEARCHERS:
            requests.ask_to_leave(self.store, name)
        for name in ("trainer", "upkeep"):
            self.parts[name].process.terminate()
        faults = []
        for name, part in self.parts.items():
            try:
                if status := part.process.wait(STOP_TIMEOUT_S):
                    faults.append(f"{name} was told to end, and ended with status {status}: {part.log}")
            except subprocess.TimeoutExpired:
                faults.append(f"{name} did not end in {STOP_TIMEOUT_S} s when it was told to: {part.log}")
        return faults

    def close(self) -> None:
        """Nothing stays, whatever happened."""
        for _, undo in self.undo:
            undo()
        for part in self.parts.values():
            if part.process and part.process.poll() is None:
                part.process.kill()
                part.process.wait()
        self.proxy.close()
        if self.can_fill:
            subprocess.run(["umount", self.temporary], check=False)

    # --- faults -------------------------------------------------------------------------------------------------------

    def run(self, events: list[Event], seconds: float) -> None:
        """Injects the events, from the run's first step on."""
        self._events = events
        self._await(lambda: self._step() >= 1, START_TIMEOUT_S, "the first step")
        began = time.monotonic()
        for event in events:
            while time.monotonic() - began < event.at_s:
                self.keep_up()
                time.sleep(0.1)
            self._inject(event)
        while time.monotonic() - began < seconds or self.undo:
            self.keep_up()
            time.sleep(0.1)
        self.proxy.disarm()
        attempt_and_step = self._attempt(), self._step()
        self._await(
            lambda: (self._attempt(), self._step()) > attempt_and_step, STALL_LIMIT_S, "a step after the faults"
        )

    def _await(self, condition: Callable[[], bool], timeout_s: float, name: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name}: not in {timeout_s} s; logs are in {self.folder}")
            self.keep_up()
            time.sleep(0.2)

    def _beat(self) -> dict:
        return read_heartbeat(self.store) or {}

    def _step(self) -> int:
        return self._beat().get("step", 0)

    def _attempt(self) -> int:
        return self._beat().get("attempt", 0)

    def _inject(self, event: Event) -> None:
        self._begun.append(event.kind)
        if event.kind in STORE_FAULTS:
            self.proxy.arm(event)
        elif event.kind in MACHINE_FAULTS:
            self.done[event.kind] += self._break(event, self.parts[event.target])
        else:
            self._spoil(event)
            self.done[event.kind] += 1

    def _break(self, event: Event, part: Part) -> bool:
        """Whether it happened: a part may not be there now, a file system not be ours to fill."""
        if part.process is None or part.process.poll() is not None:
            return False
        if "killed" in event.kind:
            part.is_killed = True
            part.process.kill()
            if part is self.parts["trainer"]:
                self.kills.append(time.time())
        if event.kind.endswith("a wrong listing"):  # of the checkpoints, to which the next Trainer resumes
            listing = "listing is HTML" if event.amount < 0.5 else "listing is empty"
            self.proxy.arm(replace(event, kind=listing, target="checkpoint listing", times=1))
            return False  # its hit is counted
        if event.kind.endswith("frozen"):
            self._freeze(part, 1 + event.amount * (LONGEST_FREEZE_S - 1))
        elif event.kind == "temporary folder full":
            if not self.can_fill:
                return False
            self._fill(1 + event.amount * (LONGEST_FULL_S - 1))
        return True

    def _freeze(self, part: Part, seconds: float) -> None:
        process = part.process

        def thaw() -> None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)

        process.send_signal(signal.SIGSTOP)
        self.undo.append((time.monotonic() + seconds, thaw))
        if part is self.parts["trainer"]:
            self.outages.append((time.time(), time.time() + seconds + 1))

    def _fill(self, seconds: float) -> None:
        ballast = self.temporary / "ballast"
        with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        self.undo.append((time.monotonic() + seconds, lambda: ballast.unlink(missing_ok=True)))
        self.outages.append((time.time(), time.time() + seconds + 1))

    def _mount(self) -> bool:
        size = f"size={TEMPORARY_BYTES}"
        command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", self.temporary]
        mounted = subprocess.run(command, capture_output=True, text=True)
        if mounted.returncode:
            print(f"temporary folder full: needs root and mount: {mounted.stderr.strip()}", file=sys.stderr)
        return not mounted.returncode

    def _spoil(self, event: Event) -> None:
        """Put a file into the bucket, as another program with the bucket's keys may."""
        searcher = f"w{event.number}"
        key = f"trajectories/searcher={searcher}/round=00000000.parquet"
        if event.kind == "foreign file":
            key = f"trajectories/notes-{event.number}.txt"
        self.spoiled[key] = event.kind
        self.client.put_object(
            Bucket=self.bucket, Key=f"stores/{RUN}/{key}", Body=spoiled_file(event.kind, searcher, event.amount)
        )

    # --- the account --------------------------------------------------------------------------------------------------

    def hits(self) -> Counter[str]:
        """Requests that were hit, by kind; `done` gets the events."""
        found: Counter[str] = Counter()
        for event in self._events:
            found[event.kind] += self.proxy.hits[event.number]
        return found

    def events_done(self) -> Counter[str]:
        hit = Counter(event.kind for event in self._events if self.proxy.hits[event.number])
        return hit + self.done

    def acknowledged(self) -> list[dict]:
        return [
            json.loads(line) for path in self.acknowledged_in.values() for line in path.read_text().splitlines() if line
        ]

    def account(self, ended_at: float) -> dict:
        """Everything of the last line, and `faults`, what does not hold."""
        objects = accounting.S3Objects(self.client, self.bucket, f"stores/{RUN}/")
        found = accounting.account(objects, self.acknowledged(), list(self.spoiled), (B, K), VOCABULARY)
        found.faults += accounting.resumed_too_early(objects, self.proxy.stored)
        ends = accounting.step_ends(objects)
        stall_s = accounting.longest_stall(ends, ended_at, self.outages, self.kills)
        if stall_s > STALL_LIMIT_S:
            found.faults.append(f"no training step for {stall_s:.0f} s, the limit is {STALL_LIMIT_S:.0f} s")
        status, unnamed = self.verify()
        found.faults += unnamed
        return asdict(found) | {
            "steps": len(ends),
            "longest_stall_s": round(stall_s, 1),
            "longest_stall_across_kills_s": round(accounting.longest_stall(ends, ended_at, self.outages), 1),
            "stall_limit_s": STALL_LIMIT_S,
            "verify_status": status,
            "ended_by_themselves": len(self.ended),
        }

    def verify(self) -> tuple[int, list[str]]:
        """`tba verify`: its exit status, and what it says that it should not, or fails to say."""
        command = [sys.executable, "-m", "flows.cli", "verify", RUN, "--store", self.store.url, "--json"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        try:
            said = json.loads(done.stdout)["faults"]
        except ValueError:
            return done.returncode, [f"verify: {(done.stderr or done.stdout)[-1000:]}"]
        return done.returncode, accounting.judge(said, list(self.spoiled), done.returncode)


def spoiled_file(kind: str, searcher: str, amount: float) -> bytes:
    """What another writer puts into the bucket."""
    whole = make_shard(searcher)
    if kind == "torn shard":
        data = parquet_bytes(whole)
        return data[: 1 + int(amount * (len(data) - 1))]
    if kind == "shard of another schema":
        version = whole.schema.get_field_index("schema_version")
        newer = whole.set_column(version, "schema_version", pa.array([SCHEMA_VERSION + 97] * len(whole), pa.int32()))
        return parquet_bytes(newer.append_column("mood", pa.array(["good"] * len(whole))))
    if kind == "shard with a NaN reward":
        return parquet_bytes(make_shard(searcher, reward=float("nan")))
    return b"" if kind == "empty shard" else b"what is this?\n"
