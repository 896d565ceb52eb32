"""Writes the Trainer's records, policies and checkpoints to the store, beside training.

Before: tba/trainer.py updates the policy; after: storage/policies.py publishes it.
"""

import logging
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import datetime
from functools import partial
from pathlib import Path

import pyarrow as pa
from torch import Tensor

from flows.config import RunConfig
from flows.trainer.alarms import RunAlarms
from flows.trainer.heartbeat import Heartbeat
from flows.trainer.trackers import Trackers
from infra.machine import policy_cache
from infra.temporary_folders import filled_folder
from storage import attempts, checkpoints, kept_policies, ledger, policies
from storage.store import RunStore
from tba import lora
from tba.batch import Batch
from tba.model_files import copy_beside_weights
from tba.models import EMBEDDED_MODEL
from tba.trainer import Trainer
from tba.training_loop import Stopped
from tba.weights import fingerprint, write_weights

# Older checkpoints are deleted: each has 3 x the float32 weights, and a run resumes from the newest whole one.
KEPT_CHECKPOINTS = 2
# The newest; the one before it, which a Searcher may still be fetching; and a spare one.
KEPT_POLICIES = 3
# Seconds between two checks of a waiting Trainer that Searchers can still fetch its policy: four requests each, and two
# for each policy that its weights are rebuilt from.
LOOK_S = 10.0

log = logging.getLogger("tba.trainer")


class StoreOutbox:
    """tba.training_loop's Outbox: writes to the store in threads of its own.

    Records, policies and checkpoints have a thread each, so that none waits for larger ones. A policy and a checkpoint
    are written behind the records of their steps.

    A slow store must not fill memory and disk. While one policy is written, only the newest of the waiting policies is
    kept. Before a new checkpoint, training waits until the previous one is written. Before a new policy is handed over,
    it waits until the records that are older than the previous policy are written.
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
        is_hub_id = config.model != EMBEDDED_MODEL and not Path(config.model).is_dir()
        self._hub_id = config.model if is_hub_id else None
        self._alarms = alarms
        self._recorder = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="policies")
        self._uploader = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending: list[Future] = []
        self._checkpointed: int | None = None  # the step of this attempt's newest checkpoint
        self._newest_policy = self._newest_checkpoint = self._newest_record = self._recorder.submit(lambda: None)
        self._record_before_policy = self._newest_record  # the newest record when the newest policy was handed over
        # The newest policy until its writing begins: step, weights, whether it is final, the record before it.
        self._unpublished: deque[tuple[int, Future[dict[str, Tensor]], bool, Future]] = deque(maxlen=1)
        self._trackers = Trackers(store, config, attempt)
        self._served: policies.PolicyRef | None = None  # published last
        self._looked_at = time.monotonic()  # when it was last looked for in the store

    def status(self, state: str, step: int, metrics: Mapping[str, float | str | None]) -> None:
        self._raise_writer_errors()  # otherwise the Trainer would wait for samples of a policy that was never published
        if state == "training":
            self._alarms.see(metrics)
        self._heart.tell(state, step, {"message": "", "alarms": self._alarms.on, **metrics})
        if self._heart.stop.is_set():
            raise Stopped

    def has_lost_policy(self) -> bool:
        """Whether the newest published policy was removed from the store; checked every `LOOK_S`. Mends latest.json."""
        if not self._newest_policy.done() or self._served is None or time.monotonic() - self._looked_at < LOOK_S:
            return False
        self._looked_at = time.monotonic()
        if not policies.is_stored(self._store, self._served):
            log.warning("policy %s was removed from the store or damaged: it is published again", self._served.path)
            return True
        if not policies.is_latest(self._store, self._served):
            log.warning("policies/latest.json was removed or damaged: it is written again")
            policies.point_to(self._store, self._served)
        return False

    def record(self, step: int, batch: Batch, metrics: Mapping[str, float | datetime | None]) -> None:
        self._newest_record = self._submit(self._recorder, self._write_record, step, batch.record, metrics)

    def publish(self, step: int, weights: Future[dict[str, Tensor]], final: bool) -> None:
        if final:
            wait(self._pending)  # no process trains the run after its final policy, so its records must be complete
        self._record_before_policy.result()
        self._record_before_policy = self._newest_record
        self._unpublished.append((step, weights, final, self._record_before_policy))  # in place of one that waits
        self._newest_policy = self._submit(self._publisher, self._write_newest_policy)

    def checkpoint(self, step: int, trainer: Trainer) -> None:
        self._newest_checkpoint.result()
        if step == self._checkpointed:  # a stop while the Trainer waits at this step; a complete one is not rewritten
            return
        self._checkpointed = step
        save_alarms = self._alarms.saving()  # their state of this step

        def fill(folder: Path) -> None:
            trainer.save(folder)
            save_alarms(folder)

        num_bytes = trainer.checkpoint_bytes
        folder = trainer.start_copy(partial(filled_folder, "checkpoint", self._store.run, fill, num_bytes))
        before = list(self._pending)
        self._newest_checkpoint = self._submit(self._uploader, self._write_checkpoint, step, folder, before)

    def close(self) -> None:
        """Waits until everything is written. Raises the writers' errors."""
        self._recorder.submit(self._trackers.finish)
        for thread in (self._recorder, self._publisher, self._uploader):
            thread.shutdown(wait=True)
        for future in self._pending:
            future.result()

    def _submit(self, thread: ThreadPoolExecutor, write, *arguments) -> Future:
        self._raise_writer_errors()
        self._pending.append(thread.submit(self._fenced, write, *arguments))
        return self._pending[-1]

    def _raise_writer_errors(self) -> None:
        """Raises a writer's error, which stops training."""
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        for future in done:
            future.result()

    def _fenced(self, write, *arguments) -> None:
        """Calls a writer, unless a later attempt has begun. Raises: Superseded."""
        attempts.check_not_superseded(self._store, self._attempt)
        write(*arguments)

    def _write_record(self, step: int, rows: pa.Table, metrics: Mapping[str, float | datetime | None]) -> None:
        ledger.record_batch(self._store, self._attempt, step, rows)
        ledger.record_training_step(self._store, {"attempt": self._attempt, "step": step, **metrics})
        self._trackers.log(step, metrics, rows)

    def _write_checkpoint(self, step: int, filled: Future[tempfile.TemporaryDirectory], before: list[Future]) -> None:
        with filled.result() as folder:
            for future in before:
                future.result()  # earlier steps are recorded first, because a resumed run does not repeat them
            checkpoints.save_checkpoint(self._store, step, Path(folder), self._attempt)
        checkpoints.delete_checkpoints(self._store, KEPT_CHECKPOINTS, self._attempt)

    def _write_newest_policy(self) -> None:
        if not self._unpublished:
            return  # it was written in place of an older one
        step, copied, final, record = self._unpublished.pop()
        record.result()
        weights = copied.result()
        with filled_folder("policy", self._store.run, partial(self.fill_policy, weights)) as folder:
            policy = policies.policy_ref(step, fingerprint(weights.items()), attempt=self._attempt, final=final)
            cache, before = policy_cache(self._store.run), self._served
            self._served = policies.publish_policy(self._store, folder, policy, cache, before)
        attempts.check_not_superseded(self._store, self._attempt)
        kept_policies.prune_policies(self._store, keep=KEPT_POLICIES)

    def fill_policy(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Writes a policy that from_pretrained loads: weights, or adapters, and the model's other files."""
        copy_beside_weights(self._template, folder)
        if lora.are_adapters(weights):
            lora.write_adapters(weights, self._template, folder, hub_id=self._hub_id)
        else:
            write_weights(weights, folder)
