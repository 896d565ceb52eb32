"""The Trainer's processes, one for each device. The first is flows.trainer's own; the others run
`python -m flows.trainer.ranks MODEL SETTINGS SEED` and follow it, on its machine and on others (flows/ranks.py).

They end together: if the first fails, it kills those of its machine; if it dies, the others end by themselves.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

from flows.config import RunConfig
from flows.trainer.meeting import LOOPBACK, POLL_S, Meeting, free_port, interface_variables, own_address
from infra.gpus import gpu_bytes, num_gpus
from storage import attempts, machines
from storage.errors import StoreError
from storage.machines import World
from storage.process_identity import Pulse
from storage.store import RunStore
from tba.config import TrainSettings
from tba.memory import GIB, Machine, Pass, UnknownShape, certain, read_shape, trainer_parts
from tba.precision import default_device
from tba.trainer import Trainer

DEEPSPEED = files("infra") / "deepspeed"
BUILD_S = 1800.0  # to meet, load the model and compile DeepSpeed's operators
OWN_END_S = 15.0  # for this process, which may be ending by the same failure and has its reason to tell
END_TIMEOUT_S = 30  # the other processes have no work left when the first one closes

log = logging.getLogger("tba.ranks")


@contextlib.contextmanager
def trainer_of(model: Path, settings: TrainSettings, seed: int, meeting: Meeting | None = None) -> Iterator[Trainer]:
    """The run's Trainer. Its other processes run within the context.

    meeting: with the further machines, if settings.machines is more than 1.
    """
    world = World(LOOPBACK, free_port(LOOPBACK), []) if meeting is None else meeting.form()
    check_memory(model, settings, 1 + len(world.machines))
    size = settings.processes * (1 + len(world.machines))
    if size == 1:
        yield Trainer(model, settings, default_device(), seed)
        return
    variables = _variables(world, settings, 0)
    others = _start(model, settings, seed, variables[1:])
    built, closing = threading.Event(), threading.Event()
    threading.Thread(target=_end_without, args=(others, meeting, built, closing), daemon=True).start()
    log.info("starting %d processes; DeepSpeed compiles its operators when a machine first uses them", size)
    try:
        os.environ.update(variables[0])
        trainer = _sharded(model, settings, seed)
        built.set()
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


def check_memory(model: Path, settings: TrainSettings, num_machines: int) -> None:
    """Raises: RuntimeError: fewer machines came than are wanted, and the Trainer does not fit on their GPUs."""
    if num_machines == settings.machines or (on_gpu := gpu_bytes()) is None:
        return
    with contextlib.suppress(UnknownShape):
        here = settings.model_copy(update={"machines": num_machines})
        needed = certain(trainer_parts(read_shape(model), here, Pass(1), Machine(True, True, on_gpu)))
        if needed > on_gpu:
            raise RuntimeError(
                f"{num_machines} of the Trainer's {settings.machines} machines came. With so few each GPU needs "
                f"{needed / GIB:.0f} GiB and has {on_gpu / GIB:.0f}: start workers on the other machines, or give each "
                "machine more train.processes"
            )


def follow(store: RunStore, config: RunConfig, load: Callable[[], Path], attempt: int, key: str) -> bool:
    """Joins this machine's processes to an attempt's Trainer, until the attempt ends.

    load: returns the folder of config.model, perhaps after a download, for which the Trainer waits. key: see
    storage/machines.py. Returns False: the Trainer began without this machine.
    Raises: RuntimeError: a process failed. StoreError.
    """
    settings = config.train
    machine, closing = machines.join(store, attempt, settings.processes, num_gpus() > 0), threading.Event()
    renewing = threading.Thread(target=_renew, args=(store, machine, closing), daemon=True)
    renewing.start()
    processes = []
    try:
        model = load()
        machines.tell_ready(store, machine)
        pulse = attempts.pulse(store)
        while (world := machines.read_world(store, attempt, key)) is None and not _is_over(store, attempt, pulse):
            time.sleep(POLL_S)
        if world is None or machine.number not in world.machines:
            return False
        first = settings.processes * (1 + world.machines.index(machine.number))
        processes = _start(model, settings, config.seed, _variables(world, settings, first))
        while not _is_over(store, attempt, pulse):
            if failed := [process.returncode for process in processes if process.poll()]:
                raise RuntimeError(f"a process of the Trainer ended with status {failed[0]}; the run resumes by itself")
            if all(process.returncode == 0 for process in processes):
                break
            time.sleep(POLL_S)
        return True
    finally:
        closing.set()
        for process in processes:
            process.kill()
            process.wait()


def _variables(world: World, settings: TrainSettings, first: int) -> list[dict[str, str]]:
    """Torch's environment variables of each process of this machine. first: the first one's rank."""
    of_all = {
        "WORLD_SIZE": str(settings.processes * (1 + len(world.machines))),
        "MASTER_ADDR": world.address,
        "MASTER_PORT": str(world.port),
    }
    of_all |= interface_variables(own_address() if world.machines else LOOPBACK)
    return [of_all | {"RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(settings.processes)]


def _start(model: Path, settings: TrainSettings, seed: int, variables: list[dict[str, str]]) -> list[subprocess.Popen]:
    command = [sys.executable, "-m", "flows.trainer.ranks", str(model), settings.model_dump_json(), str(seed)]
    return [subprocess.Popen(command, env=os.environ | of_one) for of_one in variables]


def _is_over(store: RunStore, attempt: int, pulse: Pulse) -> bool:
    """Whether the attempt has ended: another one began, or its Trainer is silent."""
    return pulse.is_silent(machines.SILENT_S) or attempts.is_superseded(store, attempt)


def _renew(store: RunStore, machine: machines.Machine, closing: threading.Event) -> None:
    while not closing.wait(machines.RENEWAL_S):
        try:
            machines.renew(store, machine)
        except StoreError as error:
            log.warning("this machine's file could not be renewed: %s", error)


def _sharded(model: Path, settings: TrainSettings, seed: int) -> "ShardedTrainer":  # noqa: F821
    from tba.zero_trainer import ShardedTrainer

    return ShardedTrainer(model, settings, DEEPSPEED / f"zero{settings.zero_stage}.json", seed)


def _end_without(
    others: list[subprocess.Popen], meeting: Meeting | None, built: threading.Event, closing: threading.Event
) -> None:
    """Ends the Trainer when one of its other processes dies, because the rest might wait for that one for ever."""
    deadline = time.monotonic() + BUILD_S
    while not closing.wait(1):
        if any(other.poll() for other in others) or (meeting is not None and meeting.has_lost()):
            if closing.wait(OWN_END_S):
                return
            log.error("a process of the Trainer failed; its output is above. The run resumes from its last checkpoint.")
            os._exit(1)
        if not built.is_set() and time.monotonic() > deadline:
            address = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
            log.error(
                "the Trainer's processes have not met at %s in %.0f s: does a firewall part them?", address, BUILD_S
            )
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
