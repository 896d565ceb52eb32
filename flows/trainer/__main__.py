"""The Trainer's process: `python -m flows.trainer STORE RUN PARENT [DEVICES]`.

PARENT is the pid of the flow's process: if that process ends, the Trainer ends. A run has one Trainer: a second one is
refused when it starts, and a superseded one that still runs (its machine froze) stops before it writes.

The Trainer runs in a process beside the flow, so that neither Prefect's threads nor its failures touch training. With
several devices it starts their processes (flows/trainer/ranks.py). The run's configuration is that of run.json, but for
DEVICES, a JSON object of RunConfig.devices.
"""

import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from functools import partial

from flows.config import RunConfig, load_run
from flows.report.text import log_printable
from flows.trainer import ALREADY_TRAINING
from flows.trainer.heartbeat import Heartbeat
from infra.machine import keep_compiled_code_private
from infra.temporary_folders import filled_folder, remove_leftovers
from storage import attempts, checkpoints, policies
from storage.errors import AlreadyTraining, DamagedCheckpoint
from storage.process_identity import Identity
from storage.store import RunStore

# Five heartbeats. Only a Trainer on another machine is watched for this long.
TAKEOVER_WATCH_S = 10.0

log = logging.getLogger("tba.trainer")


def learn(store_url: str, run: str, parent: int, devices: dict | None = None) -> None:
    """Trains the run to its end or until SIGTERM, from its newest checkpoint if it has one.

    devices: of the RunConfig; None: one, and its memory is used as the run recorded.
    If the run has its final policy (it was killed before the last evaluation), this does nothing.

    Raises: AlreadyTraining: another Trainer trains the run; nothing was written. Superseded: another took over.
    RuntimeError: the run had a checkpoint, and none is whole now; nothing was written but the record of the attempt.
    """
    store = RunStore(store_url, run)
    config = load_run(store).on_devices(devices or {})
    keep_compiled_code_private()
    # It imports torch, which takes some seconds; meanwhile another machine's Trainer is watched.
    threading.Thread(target=importlib.import_module, args=["flows.trainer.session"]).start()
    previous = attempts.refuse_live_trainer(store, TAKEOVER_WATCH_S)
    if (policy := policies.restore_latest(store)) and policy.final:
        log.info("run %s has its final policy: nothing is left to train", run)
        return
    checkpoint = checkpoints.newest_whole_checkpoint(store)
    if checkpoint is None:
        refuse_to_lose_training(store, config, policy)
        checkpoint = checkpoints.FROM_SCRATCH
    attempt = attempts.start_attempt(
        store, checkpoint.step, Identity.current(),
        previous=previous, checkpoint=checkpoint.path, processes=config.train.processes,
    )  # fmt: skip
    heart = Heartbeat(store, config, attempt, parent, checkpoint.step)
    stop_by_signals(heart.stop)
    state, message = "failed", ""
    try:
        newer = checkpoints.newest_whole_checkpoint(store, before=attempt)
        if newer not in (None, checkpoint):  # an earlier Trainer, which was cut off, saved it before the attempt began
            attempts.resume_from(store, attempt, newer.step, newer.path)
            checkpoint = newer
        remove_leftovers(run)
        checkpoint, files = download(store, config, attempt, checkpoint)
        heart.tell("starting", checkpoint.step, {})
        log.info("attempt %d of run %s begins at step %d", attempt, run, checkpoint.step)
        from flows.trainer.session import train_run

        state = train_run(store, config, attempt, heart, files)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        raise
    finally:
        heart.end(state, message)


def stop_by_signals(stop: threading.Event) -> None:
    """Sets the event at SIGTERM, by which the flow stops training, and at SIGINT: Ctrl-C reaches every process.

    Python runs a signal's handler between two operations of the main thread, and a backward pass is one of them. So a
    thread reads the signal's number, which Python writes at once.
    """
    numbers, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    threading.Thread(target=lambda: (os.read(numbers, 1), stop.set()), name="signals", daemon=True).start()


def download(
    store: RunStore, config: RunConfig, attempt: int, checkpoint: checkpoints.Checkpoint
) -> tuple[checkpoints.Checkpoint, tempfile.TemporaryDirectory | None]:
    """The checkpoint and its files; if their bytes are damaged, those of an older one. None: there are no files.

    Raises: RuntimeError: no checkpoint is whole.
    """
    damaged = []
    while checkpoint != checkpoints.FROM_SCRATCH:
        fill = partial(checkpoints.download_checkpoint, store, checkpoint)
        try:
            return checkpoint, filled_folder("resume", store.run, fill)
        except DamagedCheckpoint as error:
            log.warning("%s. It is not resumed from", error)
        damaged.append(checkpoint)
        older = checkpoints.newest_whole_checkpoint(store, before=attempt, damaged=damaged)
        if older is None:
            refuse_to_lose_training(store, config, None)  # raises, because there was one
        checkpoint = older
        attempts.resume_from(store, attempt, checkpoint.step, checkpoint.path)
    return checkpoint, None


def refuse_to_lose_training(store: RunStore, config: RunConfig, latest: policies.PolicyRef | None) -> None:
    """Refuses to begin a run at step 0 if it had a checkpoint.

    Resumes and damaged checkpoints prove that it had one. Checkpoint n is complete before checkpoint n + 2 begins, so a
    policy of more than two intervals proves it, too.

    Raises: RuntimeError: the run had a checkpoint; the message has the remedies.
    """
    records = attempts.list_attempts(store)
    stored = [checkpoint.step for checkpoint in checkpoints.list_checkpoints(store)]
    reached = max([0, *stored, *(record.resumed_from for record in records)])
    if latest is not None and latest.step > 2 * config.train.checkpoint_interval:
        reached = max(reached, latest.step)
    if reached:
        raise RuntimeError(
            f"run {store.run} in {store.url} has trained {reached} steps, but no checkpoint in trainer/ is whole. The "
            "run is not begun again at step 0. Restore trainer/ from a copy of the store, or begin another run with "
            f"its trajectories: `{store.command(f'train NEW --warm-start {store.run}')}`, with the same --model and "
            "--task."
        )


def main(store: str, run: str, parent: str, devices: str = "{}") -> int:
    """Exit status: ALREADY_TRAINING if the run has another Trainer; other errors are raised."""
    log_printable(logging.INFO, "%(asctime)s %(levelname)s %(message)s", ("",))
    for library in ("botocore", "huggingface_hub"):  # a line for each connection, and for each policy
        logging.getLogger(library).setLevel(logging.WARNING)
    try:
        learn(store, run, int(parent), json.loads(devices))
    except AlreadyTraining as error:
        log.error(error)
        return ALREADY_TRAINING
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main(*sys.argv[1:]))
