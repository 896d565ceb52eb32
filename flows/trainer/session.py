"""Training a run: tba.trainer's loop between the store's replay buffer and the store. flows/trainer/__main__.py runs
it."""

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pyarrow as pa
import torch

from flows.config import RunConfig
from flows.trainer.heartbeat import Heartbeat
from flows.trainer.ranks import trainer_of
from flows.trainer.trackers import Trackers
from infra.machine import cpu_threads, policy_cache, temporary_folder
from storage import ledger, policies
from storage.buffer import NotEnoughExperience, ReplayBuffer
from storage.fresh import FRESH_COLUMNS, Fresh
from storage.queries import query
from storage.store import RunStore
from tba.alarms import Alarms
from tba.logprobs import Group
from tba.models import model_folder
from tba.trainer import Batch, Draw, Stopped, Trainer, train
from tba.weights import fingerprint, write_weights

# Older ones are deleted: a checkpoint is 3 x the float32 weights, and only the newest whole one is resumed from.
KEPT_CHECKPOINTS = 2
# A Searcher fetches the newest; one more may be in flight while the next is published, and one is spare.
KEPT_POLICIES = 3

log = logging.getLogger("tba.learn")


def train_run(
    store: RunStore,
    config: RunConfig,
    attempt: int,
    resumed_from: int,
    heart: Heartbeat,
    processes: int,
    zero_stage: int,
) -> str:
    """Trains to the run's end or until it is told to stop, from the checkpoint of step `resumed_from` (0: from none).

    Returns "finished" or "stopped".
    """
    folder = model_folder(config.model)
    threads = cpu_threads(processes if config.synchronous else processes + config.searchers)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes that are started here
    settings = config.train.model_copy(update={"processes": processes, "zero_stage": zero_stage})
    alarms = RunAlarms(store, resumed_from)
    with (
        contextlib.closing(StoreOutbox(store, config, attempt, folder, heart, alarms)) as outbox,
        trainer_of(folder, settings, config.seed) as trainer,
    ):
        if resumed_from:
            with temporary_folder("resume", store.run) as local:
                store.download_folder(ledger.checkpoint_path(resumed_from), Path(local))
                trainer.load(Path(local))
        buffer = ReplayBuffer(store, config.sampling, config.seed)
        buffer.rebuild(resumed_from)
        awaits_shard = attempt > 1 and config.searchers > 0
        train(trainer, StoredExperience(store, buffer, attempt, alarms, awaits_shard=awaits_shard), outbox)
        return "finished" if trainer.step >= config.train.steps else "stopped"


class RunAlarms:
    """The alarms of a run that trains; one that goes on is a warning in the log."""

    def __init__(self, store: RunStore, resumed_from: int) -> None:
        """`resumed_from`: the last step of the Trainer's earlier lives, whose rows count; 0: there are none."""
        self._alarms = Alarms()
        for row in query(store, "SELECT * FROM training_steps ORDER BY step").to_pylist() if resumed_from else []:
            self._alarms.see(row)

    @property
    def on(self) -> dict[str, str]:
        """By name the messages of those that are on."""
        return self._alarms.on

    def see(self, row: dict) -> None:
        self._warn(self.on, self._alarms.see(row))

    def see_silence(self, silent_s: float) -> None:
        self._warn(self.on, self._alarms.see_silence(silent_s))

    def _warn(self, before: dict[str, str], now: dict[str, str]) -> None:
        for name in now.keys() - before.keys():
            log.warning(now[name])


class StoredExperience:
    """tba.trainer's Experience over storage's replay buffer."""

    def __init__(
        self, store: RunStore, buffer: ReplayBuffer, attempt: int, alarms: RunAlarms, *, awaits_shard: bool = False
    ) -> None:
        """`awaits_shard`: the first batch waits for a shard that comes after the first sync.

        A run that was killed whole resumes sooner than its engines start. Until they sample, a minute or two, it would
        spend its steps on what it has.
        """
        self._store, self.buffer, self._attempt, self._alarms = store, buffer, attempt, alarms
        self._awaits_shard, self._caught_up = awaits_shard, False
        self._arrived_at = time.monotonic()  # when a sync last took something in
        self._fresh: Fresh | None = None

    def sync(self, step: int) -> None:
        ledger.check_not_superseded(self._store, self._attempt)
        if found := self.buffer.sync(step, self._attempt):
            self._fresh = found.fresh
            self._arrived_at = time.monotonic()
            self._awaits_shard = self._awaits_shard and not self._caught_up
        self._caught_up = True
        self._alarms.see_silence(self._silent_s())

    def draw(self, step: int) -> Batch | str:
        if self._awaits_shard:
            return self._why_silent() or "resumed: the Searchers' first new shard is awaited"
        try:
            return self._batch(self.buffer.draw(step), step)
        except NotEnoughExperience as reason:
            return self._why_silent() or str(reason)

    def _silent_s(self) -> float:
        return time.monotonic() - self._arrived_at

    def _why_silent(self) -> str | None:
        self._alarms.see_silence(self._silent_s())
        return self._alarms.on.get("searchers_silent")

    def _batch(self, rows: pa.Table, step: int) -> Batch:
        by_prompt: dict[int, list[dict]] = {}
        for row in rows.to_pylist():
            by_prompt.setdefault(row["prompt_index"], []).append(row)
        staleness = ledger.staleness(rows, step).to_pylist()
        recent = [reward for reward, is_recent in zip(*columns(rows, "reward", "recent"), strict=True) if is_recent]
        fresh = self._fresh.facts(step) if self._fresh else dict.fromkeys(FRESH_COLUMNS)
        facts = fresh | {
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "reward_recent_mean": sum(recent) / len(recent) if recent else None,
            "num_trajectories": self.buffer.num_trajectories,
            "num_prompts": self.buffer.num_prompts,
            "num_inserted": self.buffer.num_taken_in,
            "samples_per_insert": self.buffer.samples_per_insert(step),
            "num_too_old": self.buffer.num_too_old(step),
            "searchers_silent_s": self._silent_s(),
        }
        return Batch(make_draws(by_prompt.values()), facts, rows)


def columns(rows: pa.Table, *names: str) -> list[list]:
    return [rows[name].to_pylist() for name in names]


def make_draws(prompts: Collection[list[dict]]) -> list[Draw]:
    """Each prompt's rows as a draw. A trajectory that fills several slots is computed once."""
    newest = max(row["policy_step"] for rows in prompts for row in rows)
    return [_make_draw(rows, newest) for rows in prompts]


def _make_draw(rows: list[dict], newest_policy: int) -> Draw:
    distinct = list({row["trajectory_id"]: row for row in rows}.values())
    place = {row["trajectory_id"]: number for number, row in enumerate(distinct)}
    return Draw(
        group=Group(rows[0]["prompt_tokens"], [row["response_tokens"] for row in distinct]),
        slot=[place[row["trajectory_id"]] for row in rows],
        reward=[row["reward"] for row in rows],
        behavior_logprobs=[row["behavior_logprobs"] for row in distinct],
        reference_logprobs=[row["reference_logprobs"] for row in distinct],
        is_fresh=[row["policy_step"] == newest_policy for row in distinct],
    )


class StoreOutbox:
    """tba.trainer's Outbox over the store. Training does not wait: one thread writes records and policies, in order;
    another uploads checkpoints, gigabytes that no policy should wait for.

    Of either kind one is on its way at most, or memory and disk would fill where the store is slower than training.
    """

    def __init__(
        self,
        store: RunStore,
        config: RunConfig,
        attempt: int,
        template: Path,
        heart: Heartbeat,
        alarms: RunAlarms,
    ) -> None:
        """`template`: the model's folder, from which published policies take configuration and tokenizer."""
        self._store, self._attempt, self._template, self._heart = store, attempt, template, heart
        self._alarms = alarms
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._uploader = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending: list[Future] = []
        self._newest_policy = self._newest_checkpoint = self._writer.submit(lambda: None)
        self._trackers = Trackers(store, config, attempt)

    def status(self, state: str, step: int, metrics: dict | None = None) -> None:
        self._raise_what_failed()  # or a Trainer that waits for experience would wait on for a policy that nobody got
        if state == "training":
            self._alarms.see(metrics or {})
        self._heart.tell(state, step, {"message": "", "alarms": self._alarms.on} | (metrics or {}))
        if self._heart.stop.is_set():
            raise Stopped

    def record(self, step: int, batch: Batch, metrics: dict) -> None:
        self._later(self._writer, self._write_record, step, batch.record, metrics)

    def publish(self, step: int, weights: dict, final: bool) -> None:
        if final:
            wait(self._pending)  # a run that has its final policy trains no more: what it trained must be on record
        self._newest_policy.result()
        self._newest_policy = self._later(self._writer, self._write_policy, step, weights, final)

    def checkpoint(self, step: int, trainer: Trainer) -> None:
        self._newest_checkpoint.result()
        folder = temporary_folder("checkpoint", self._store.run)
        trainer.save(Path(folder.name))
        before = list(self._pending)
        self._newest_checkpoint = self._later(self._uploader, self._write_checkpoint, step, folder, before)

    def close(self) -> None:
        """Waits until all is written. Raises what the writers raised."""
        self._writer.submit(self._trackers.finish)
        self._writer.shutdown(wait=True)
        self._uploader.shutdown(wait=True)
        for future in self._pending:
            future.result()

    def _later(self, thread: ThreadPoolExecutor, write, *arguments) -> Future:
        self._raise_what_failed()
        self._pending.append(thread.submit(self._fenced, write, *arguments))
        return self._pending[-1]

    def _raise_what_failed(self) -> None:
        """An error of a writer stops training."""
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        for future in done:
            future.result()

    def _fenced(self, write, *arguments) -> None:
        ledger.check_not_superseded(self._store, self._attempt)
        write(*arguments)

    def _write_record(self, step: int, rows: pa.Table, metrics: dict) -> None:
        ledger.record_batch(self._store, self._attempt, step, rows)
        ledger.record_training_step(self._store, {"attempt": self._attempt, "step": step} | metrics)
        self._trackers.log(step, metrics, rows)

    def _write_checkpoint(self, step: int, folder: tempfile.TemporaryDirectory, before: list[Future]) -> None:
        with folder:
            for future in before:
                future.result()  # what trained the steps before it is on record: a resumed run takes them as done
            ledger.save_checkpoint(self._store, step, Path(folder.name))
        ledger.delete_checkpoints(self._store, keep=KEPT_CHECKPOINTS)

    def _write_policy(self, step: int, weights: dict, final: bool) -> None:
        with temporary_folder("policy", self._store.run) as folder:
            for file in self._template.iterdir():
                if file.is_file() and file.suffix != ".safetensors":
                    shutil.copy(file, folder)
            write_weights(weights, folder)
            mark = fingerprint(weights.items())
            policies.publish_policy(
                self._store, Path(folder), step, mark, attempt=self._attempt, final=final,
                cache_dir=policy_cache(self._store.run),
            )  # fmt: skip
        policies.prune_policies(self._store, keep=KEPT_POLICIES)
