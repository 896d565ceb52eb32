"""Trains a run: joins tba.training_loop to buffer and store, in the process of flows/trainer/__main__.py."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from flows.config import RunConfig
from flows.trainer.alarms import RunAlarms
from flows.trainer.experience import StoredExperience
from flows.trainer.heartbeat import Heartbeat
from flows.trainer.meeting import KEY_VARIABLE, Meeting
from flows.trainer.outbox import StoreOutbox
from flows.trainer.ranks import trainer_of
from infra.gpus import GPU_START, shares_a_gpu
from infra.machine import cpu_threads
from infra.memory import keep_freed_memory
from infra.places import alone_here
from storage import requests
from storage.buffer import ReplayBuffer
from storage.errors import NotFound
from storage.rules import Limits
from storage.run_inputs import check_model
from storage.store import RunStore
from tba.lora import base_fingerprint
from tba.models import model_folder
from tba.precision import default_device
from tba.trainer import Trainer
from tba.training_loop import train

log = logging.getLogger("tba.trainer")


def train_run(
    store: RunStore, config: RunConfig, attempt: int, heart: Heartbeat, files: TemporaryDirectory | None
) -> str:
    """Trains from a checkpoint or from scratch, to the run's end or until a stop request.

    files: of the checkpoint; None: there is none. They are removed once they are read.
    Returns "finished" or "stopped".
    """
    folder, processes = model_folder(config.model), config.train.processes
    check_model(store, config.model, base_fingerprint(str(folder)))
    threads = cpu_threads(processes if config.synchronous else processes + config.searchers)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for the processes started here
    if default_device() == "cpu":
        keep_freed_memory()
    alarms = RunAlarms()
    with (
        contextlib.closing(StoreOutbox(store, config, attempt, folder, heart, alarms)) as outbox,
        _resumed_trainer(store, config, attempt, files, alarms) as trainer,
    ):
        limits = Limits(vocab_size=trainer.vocabulary_size, last_step=config.train.steps)
        buffer = _resumed_buffer(store, config, limits, trainer.step)
        log.info("attempt %d: the buffer holds %d trajectories", attempt, buffer.num_trajectories)
        has_searchers = requests.wanted_or_configured(store, config.searchers) > 0
        experience = StoredExperience(
            store, buffer, attempt, alarms, has_searchers=has_searchers, awaits_shard=has_searchers and attempt > 1
        )
        with contextlib.closing(experience):
            train(trainer, experience, outbox)
        return "finished" if trainer.step >= config.train.steps else "stopped"


def _resumed_buffer(store: RunStore, config: RunConfig, limits: Limits, step: int) -> ReplayBuffer:
    """The buffer as it was at the step. Raises: RuntimeError: a shard that it had is gone."""
    buffer = ReplayBuffer(store, config.sampling, config.seed, limits)
    try:
        buffer.rebuild(step)
    except NotFound as error:
        raise RuntimeError(
            f"{error}. The run had taken this shard in, so it cannot resume without it. Restore the file from a copy "
            "of the store, or begin another run with the other shards: "
            f"`{store.command(f'train NEW --warm-start {store.run}')}`, with the same --model and --task."
        ) from error
    return buffer


@contextlib.contextmanager
def _resumed_trainer(
    store: RunStore, config: RunConfig, attempt: int, files: TemporaryDirectory | None, alarms: RunAlarms
) -> Iterator[Trainer]:
    """The run's Trainer with the checkpoint's state. If a Searcher has its GPU, one of them loads at a time."""
    folder, num_machines = model_folder(config.model), config.train.machines
    meeting = Meeting(store, attempt, num_machines, os.environ[KEY_VARIABLE]) if num_machines > 1 else None
    is_shared = shares_a_gpu(config.searchers, config.train.processes, config.search.num_devices)
    with contextlib.ExitStack() as training:
        with alone_here(GPU_START) if is_shared else contextlib.nullcontext():
            trainer = training.enter_context(trainer_of(folder, config.train, config.seed, meeting))
            log.info("attempt %d: the model is loaded", attempt)
            if files:
                _restore(trainer, alarms, store, files)
                log.info("attempt %d: checkpoint of step %d is restored", attempt, trainer.step)
        yield trainer


def _restore(trainer: Trainer, alarms: RunAlarms, store: RunStore, files: TemporaryDirectory) -> None:
    with files as local:
        trainer.load(Path(local))
        alarms.load(Path(local), store)
