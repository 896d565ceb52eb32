"""The Trainer's process: `python -m flows.learn STORE RUN PARENT [PROCESSES ZERO_STAGE]`. Joins trainer and store.

PARENT is the flow's process: without it nobody watches this one, which then ends. One Trainer works on a run: a second
one is refused when it starts, and one that was taken for dead and lives (a machine that froze) stops before it writes.

It is one process beside the flow, so that neither Prefect's threads nor its failures touch training; with many devices
it starts the others' processes (flows/devices.py). It reads the run's configuration from run.json and nowhere else.
"""

import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pyarrow as pa

from flows import control
from flows.config import RunConfig, load_run
from flows.devices import trainer_of
from flows.machine import cpu_threads, model_folder, this_process
from flows.processes import ALREADY_TRAINING
from flows.trackers import Trackers
from storage import ledger, policies
from storage.buffer import NotEnoughExperience, ReplayBuffer
from storage.errors import AlreadyTraining, StoreError, Superseded
from storage.store import RunStore
from tba.policy import Group
from tba.trainer import Batch, Draw, Stopped, Trainer, train
from tba.weights import fingerprint, to_bfloat16, write_weights

HEARTBEAT_S = 2.0
# Several heartbeats, on a slow store too. Only a Trainer of another machine is watched for so long.
TAKEOVER_WATCH_S = 15.0
# No new shard for so long: the Searchers have stopped, or a round takes far longer than it should.
SEARCHERS_SILENT_S = 300.0
# Older ones are deleted: a checkpoint is 3 x the float32 weights, and only the newest whole one is resumed from.
KEPT_CHECKPOINTS = 2
# A Searcher fetches the newest; one more may be in flight while the next is published, and one is spare.
KEPT_POLICIES = 3

log = logging.getLogger("tba.learn")


class StoredExperience:
    """tba.trainer's Experience over storage's replay buffer."""

    def __init__(self, store: RunStore, buffer: ReplayBuffer, attempt: int) -> None:
        self._store, self.buffer, self._attempt = store, buffer, attempt
        self._arrived_at = time.monotonic()  # when a sync last took something in
        self._alarmed = False
        self._fresh_reward_mean = None

    def sync(self, step: int) -> None:
        ledger.check_not_superseded(self._store, self._attempt)
        if found := self.buffer.sync(step, self._attempt):
            self._fresh_reward_mean = found.reward_mean
            self._arrived_at = time.monotonic()
        alarm = searchers_alarm(self._silent_s())
        if alarm and not self._alarmed:
            log.warning(alarm)
        self._alarmed = bool(alarm)

    def draw(self, step: int) -> Batch | str:
        try:
            return self._batch(self.buffer.draw(step), step)
        except NotEnoughExperience as reason:
            return searchers_alarm(self._silent_s()) or str(reason)

    def _silent_s(self) -> float:
        return time.monotonic() - self._arrived_at

    def _batch(self, rows: pa.Table, step: int) -> Batch:
        by_prompt: dict[int, list[dict]] = {}
        for row in rows.to_pylist():
            by_prompt.setdefault(row["prompt_index"], []).append(row)
        staleness = [step - 1 - policy_step for policy_step in rows["policy_step"].to_pylist()]
        recent = [reward for reward, is_recent in zip(*columns(rows, "reward", "recent"), strict=True) if is_recent]
        facts = {
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "reward_recent_mean": sum(recent) / len(recent) if recent else None,
            "fresh_reward_mean": self._fresh_reward_mean,
            "num_trajectories": self.buffer.num_trajectories,
            "num_prompts": self.buffer.num_prompts,
            "num_inserted": self.buffer.num_taken_in,
            "samples_per_insert": self.buffer.samples_per_insert(step),
            "num_too_old": self.buffer.num_too_old(step),
            "searchers_silent_s": self._silent_s(),
        }
        return Batch([make_draw(of_prompt) for of_prompt in by_prompt.values()], facts, rows)


def searchers_alarm(silent_s: float) -> str:
    """What to tell whoever watches; nothing while Searchers commit."""
    if silent_s < SEARCHERS_SILENT_S:
        return ""
    return f"no new shard for {silent_s:.0f} s: have the Searchers stopped? Their flow runs' logs in Prefect say why"


def columns(rows: pa.Table, *names: str) -> list[list]:
    return [rows[name].to_pylist() for name in names]


def make_draw(rows: list[dict]) -> Draw:
    """A trajectory that fills several slots is computed once."""
    distinct = list({row["trajectory_id"]: row for row in rows}.values())
    place = {row["trajectory_id"]: number for number, row in enumerate(distinct)}
    return Draw(
        group=Group(rows[0]["prompt_tokens"], [row["response_tokens"] for row in distinct]),
        slot=[place[row["trajectory_id"]] for row in rows],
        reference_logprob=[sum(row["reference_logprobs"]) for row in rows],
        reward=[row["reward"] for row in rows],
        behavior_logprobs=[row["behavior_logprobs"] for row in distinct],
        reference_logprobs=[row["reference_logprobs"] for row in distinct],
    )


class StoreOutbox:
    """tba.trainer's Outbox over the store. One background thread writes, in order: training does not wait."""

    def __init__(self, store: RunStore, config: RunConfig, attempt: int, template: Path, parent: int) -> None:
        """`template`: the model's folder, from which published policies take configuration and tokenizer.

        `parent`: the process without which this one ends.
        """
        self._store, self._config, self._attempt, self._template = store, config, attempt, template
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._pending: list[Future] = []
        self._trackers = Trackers(store, config, attempt)
        self._started = time.monotonic()
        self._first_step: int | None = None
        self._beat = {"state": "starting", "step": 0}
        self._parent = parent
        self.stop = threading.Event()  # set: training ends after the step that it is at
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat_on, daemon=True)
        self._heart.start()

    def status(self, state: str, step: int, metrics: dict | None = None) -> None:
        if state == "training" and self._first_step is None:
            self._first_step, self._started = step, time.monotonic()
        told = metrics or {}
        alarm = searchers_alarm(told.get("searchers_silent_s", 0.0))
        self._beat = self._beat | {"state": state, "step": step, "message": alarm} | told
        if self.stop.is_set():
            raise Stopped

    def record(self, step: int, batch: Batch, metrics: dict) -> None:
        self._later(self._write_record, step, batch.record, metrics)

    def publish(self, step: int, weights: dict, final: bool) -> None:
        self._later(self._write_policy, step, weights, final)

    def checkpoint(self, step: int, trainer: Trainer) -> None:
        for future in self._pending:
            future.result()  # what trained the steps before it is on record first: a resumed run takes them as done
        ledger.check_not_superseded(self._store, self._attempt)
        with temporary_folder("checkpoint", self._store.run) as folder:
            trainer.save(Path(folder))
            ledger.save_checkpoint(self._store, step, Path(folder))
        ledger.delete_checkpoints(self._store, keep=KEPT_CHECKPOINTS)

    def close(self, state: str, message: str = "") -> None:
        """Waits until all is written, then says how it ended. Raises what the writer raised."""
        self._writer.submit(self._trackers.finish)
        self._writer.shutdown(wait=True)
        errors = [error for future in self._pending if (error := future.exception())]
        if errors:
            state, message = "failed", message or f"{type(errors[0]).__name__}: {errors[0]}"
        self._closing.set()
        self._heart.join()
        self._beat = self._beat | {"state": state, "message": message}
        with contextlib.suppress(Superseded):  # the last word is another's
            self._write_beat()
        if errors:
            raise errors[0]

    def _later(self, write, *arguments) -> None:
        done = [future for future in self._pending if future.done()]
        for future in done:
            future.result()  # an error of the writer stops training at the next hand-over
        self._pending = [future for future in self._pending if not future.done()]
        self._pending.append(self._writer.submit(self._fenced, write, *arguments))

    def _fenced(self, write, *arguments) -> None:
        ledger.check_not_superseded(self._store, self._attempt)
        write(*arguments)

    def _write_record(self, step: int, rows: pa.Table, metrics: dict) -> None:
        ledger.record_batch(self._store, self._attempt, step, rows)
        ledger.record_training_step(self._store, {"attempt": self._attempt, "step": step} | metrics)
        self._trackers.log(step, metrics, rows)

    def _write_policy(self, step: int, weights: dict, final: bool) -> None:
        with temporary_folder("policy", self._store.run) as folder:
            for file in self._template.iterdir():
                if file.is_file() and file.suffix != ".safetensors":
                    shutil.copy(file, folder)
            weights = to_bfloat16(weights, seed=step)
            write_weights(weights, folder)
            mark = fingerprint(weights.items())
            policies.publish_policy(self._store, Path(folder), step, mark, attempt=self._attempt, final=final)
        policies.prune_policies(self._store, keep=KEPT_POLICIES)

    def _beat_on(self) -> None:
        """The first beat comes at once: who starts at the same time must see that the run is taken."""
        while True:
            if os.getppid() != self._parent:
                os._exit(1)  # the flow was killed: nobody watches this process or would end the run
            try:
                self._write_beat()
                if control.take_back_stop(self._store):
                    self.stop.set()
            except Superseded as error:
                log.error(error)
                os._exit(1)  # at once, whatever the other threads are in the middle of
            except StoreError as error:
                log.warning("no sign of life could be written: %s", error)
            if self._closing.wait(HEARTBEAT_S):
                return

    def _write_beat(self) -> None:
        ledger.check_not_superseded(self._store, self._attempt)
        steps, step = self._config.train.steps, self._beat["step"]
        since_first = step - self._first_step if self._first_step is not None else 0
        seconds_left = (time.monotonic() - self._started) / since_first * (steps - step) if since_first else None
        ledger.heartbeat(
            self._store,
            self._beat
            | {
                "attempt": self._attempt,
                "steps": steps,
                "min_size": self._config.sampling.min_size,
                "seconds_left": seconds_left,
                "owner": this_process(),
                "at": datetime.now(UTC).isoformat(),
            },
        )


def temporary_folder(kind: str, run: str) -> tempfile.TemporaryDirectory:
    """One that tells whose it is, should this process be killed before it removes it."""
    return tempfile.TemporaryDirectory(prefix=f"tba-{kind}-{run}@{os.getpid()}-")


def remove_leftovers(run: str) -> None:
    """Removes temporary folders that killed Trainers of the run left on this machine: a checkpoint is gigabytes."""
    for folder in Path(tempfile.gettempdir()).glob("tba-*"):
        match = re.fullmatch(rf"tba-(checkpoint|policy|resume)-{re.escape(run)}@(\d+)-\w+", folder.name)
        if match and not psutil.pid_exists(int(match[2])):
            log.info("removing %s, which a killed Trainer left", folder)
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays


def learn(store_url: str, run: str, parent: int, processes: int = 1, zero_stage: int = 2) -> None:
    """Trains the run to its end or until SIGTERM, from its newest checkpoint if it has one, on so many devices.

    Raises: AlreadyTraining: another Trainer works on it; nothing was written. Superseded: one has taken over.
    """
    store = RunStore(store_url, run)
    config = load_run(store)
    folder = model_folder(config.model)  # may take long: whoever has begun an attempt shows signs of life at once
    previous = ledger.refuse_live_trainer(store, TAKEOVER_WATCH_S)
    steps = ledger.list_checkpoints(store)
    resumed_from = steps[-1] if steps else 0
    attempt = ledger.start_attempt(store, resumed_from, this_process(), previous=previous)
    remove_leftovers(run)
    outbox = StoreOutbox(store, config, attempt, folder, parent)
    for number in (signal.SIGTERM, signal.SIGINT):  # the flow's way to say so; Ctrl-C reaches every process
        signal.signal(number, lambda *_: outbox.stop.set())
    import torch

    threads = cpu_threads(config.searchers, processes)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes that are started here
    settings = config.train.model_copy(update={"processes": processes, "zero_stage": zero_stage})
    state, message = "failed", ""
    try:
        with trainer_of(folder, settings) as trainer:
            if steps:
                with temporary_folder("resume", run) as local:
                    store.download_folder(ledger.checkpoint_path(resumed_from), Path(local))
                    trainer.load(Path(local))
            buffer = ReplayBuffer(store, config.sampling, config.seed)
            buffer.rebuild(resumed_from)
            train(trainer, StoredExperience(store, buffer, attempt), outbox)
        state = "finished" if trainer.step >= config.train.steps else "stopped"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        raise
    finally:
        outbox.close(state, message)


def main(store: str, run: str, parent: str, *devices: str) -> int:
    """Exit status: ALREADY_TRAINING where the run has another Trainer; other errors are raised."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        learn(store, run, int(parent), *map(int, devices))
    except AlreadyTraining as error:
        log.error(error)
        return ALREADY_TRAINING
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main(*sys.argv[1:]))
