"""The memory that `tba plan` names beside the peaks of real runs' processes: `make bench-memory`.

Each configuration trains a few steps with one Searcher, and writes a checkpoint in the middle. The peak of a process is
the kernel's (VmHWM). The last line is a JSON object. It has for each configuration and process the planned bytes, the
measured ones and their ratio. It also has the Trainer's peak until its last step ends, by that before the first
checkpoint: after the last step the final policy is copied.
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil

from flows.config import load_run
from flows.run.memory import plan_memory
from storage.queries import query
from tests.benchmarks.default_run import default_run

STEPS, CHECKPOINT_STEP = 8, 4  # policies are published meanwhile
LONG = {"task.name": "gsm8k", "task.max_response_tokens": 64, "train.micro_batch_tokens": 4096}
FEW = {"search.prompts_per_round": 4, "sampling.prompts_per_batch": 4}
CONFIGURATIONS = {
    "default": {},
    "long responses": {**LONG, **FEW, "task.data": Path(__file__).parents[1] / "smoke" / "gsm8k.jsonl"},
    "adapters": {"train.lora_rank": 16},
}
WATCH_S = 0.5


def peak_bytes(process: psutil.Process) -> int:
    """The kernel's record of a process's largest resident memory."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def with_children(process: psutil.Process) -> int:
    """The sum of the peaks of a process and its children.

    A child that was just forked still runs its parent's program and shares its memory: it is left out.
    """
    command = process.cmdline()
    return sum(map(peak_bytes, [process, *(child for child in process.children() if child.cmdline() != command)]))


class Peaks:
    """Watches the processes of a `default_run`."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self.of_trainer = self.of_searcher = 0
        self._of_trainer_at: list[tuple[datetime, int]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Peaks":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def of_trainer_before(self, when: datetime) -> int:
        return max(peak for at, peak in self._of_trainer_at if at < when)

    def _watch(self) -> None:
        while not self._end.wait(WATCH_S):
            with contextlib.suppress(psutil.Error, OSError, StopIteration):
                for trainer in self._trainers():
                    self._of_trainer_at.append((datetime.now(UTC), peak_bytes(trainer)))
                    self.of_trainer = max(self.of_trainer, self._of_trainer_at[-1][1])
                    flow = trainer.parent()
                    others = [each for each in flow.parent().children(recursive=True) if each not in (trainer, flow)]
                    self.of_searcher = max([self.of_searcher, *map(with_children, others)])

    def _trainers(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "flows.trainer" in command and any("bench-run-" in word for word in command):
                yield process


def main() -> None:
    results = {}
    for name, settings in CONFIGURATIONS.items():
        chosen = {**settings, "train.checkpoint_interval": CHECKPOINT_STEP}
        arguments = [f"--set={key}={value}" for key, value in chosen.items()]
        with Peaks() as peaks, default_run(0, [f"--steps={STEPS}", *arguments]) as run:
            steps = query(run, "SELECT ended_at, num_response_tokens FROM training_steps ORDER BY step").to_pylist()
            most = max(step["num_response_tokens"] for step in steps)  # of a batch's different responses
            plan = plan_memory(load_run(run), most)
        planned = {process.process: process.num_bytes for process in plan.processes}
        measured = {"Trainer": peaks.of_trainer, "Searcher": peaks.of_searcher}
        results[name] = {
            process: {"planned": planned[process], "measured": peak, "ratio": round(planned[process] / peak, 3)}
            for process, peak in measured.items()
        }
        before, after = (peaks.of_trainer_before(steps[step - 1]["ended_at"]) for step in (CHECKPOINT_STEP, STEPS))
        results[name]["peak_by_peak_before_checkpoint"] = round(after / before, 3)
        print(name, results[name], flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
