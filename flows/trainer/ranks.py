"""The Trainer's processes, one for each device. The first is flows.trainer's own; the others run
`python -m flows.trainer.ranks MODEL SETTINGS SEED` and follow it.

They end together: if the first fails, it kills the others; if the first dies, the others end by themselves.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from tba.config import TrainSettings
from tba.precision import default_device
from tba.trainer import Trainer

DEEPSPEED = files("infra") / "deepspeed"
END_TIMEOUT_S = 30  # the other processes have no work left when the first one closes

log = logging.getLogger("tba.devices")


@contextlib.contextmanager
def trainer_of(model: Path, settings: TrainSettings, seed: int) -> Iterator[Trainer]:
    """The run's Trainer. Its other processes run within the context."""
    if settings.processes == 1:
        yield Trainer(model, settings, default_device(), seed)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(settings.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "flows.trainer.ranks", str(model), settings.model_dump_json(), str(seed)]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(settings.processes)]
    others = [subprocess.Popen(command, env=os.environ | world | rank) for rank in ranks[1:]]
    closing = threading.Event()
    threading.Thread(target=_end_without, args=(others, closing), daemon=True).start()
    log.info("starting %d processes; DeepSpeed compiles its operators when a machine first uses them", len(ranks))
    try:
        os.environ.update(world | ranks[0])
        trainer = _sharded(model, settings, seed)
        yield trainer
        closing.set()  # from here on, the end of a process is no failure
        trainer.close()
        for other in others:
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.wait(END_TIMEOUT_S)
    finally:
        closing.set()
        for other in others:
            other.kill()
            other.wait()


def _sharded(model: Path, settings: TrainSettings, seed: int) -> "ShardedTrainer":  # noqa: F821
    from tba.zero_trainer import ShardedTrainer

    return ShardedTrainer(model, settings, DEEPSPEED / f"zero{settings.zero_stage}.json", seed)


def _end_without(others: list[subprocess.Popen], closing: threading.Event) -> None:
    """Ends the Trainer when one of its other processes dies, because the rest might wait for that one for ever."""
    while not closing.wait(1):
        if any(other.poll() for other in others):
            log.error("a process of the Trainer failed; its output is above. The run resumes from its last checkpoint.")
            os._exit(1)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(model: str, settings: str, seed: str) -> None:
    import torch

    for number in (signal.SIGTERM, signal.SIGINT):  # they may reach every process; only the first handles them
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _sharded(Path(model), TrainSettings.model_validate_json(settings), int(seed)).follow()


if __name__ == "__main__":
    main(*sys.argv[1:])
