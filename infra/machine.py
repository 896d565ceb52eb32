"""This machine's folders, threads, GPUs and code version, for the processes of a run."""

import ctypes
import logging
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import psutil

from storage.patience import with_room

CHECKOUT = Path(__file__).resolve().parents[1]  # of an installed wheel: site-packages
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h, for mallopt


def default_store() -> str:
    """Root URL of the default store: TBA_STORE, else `.tba/` in the working folder, which git ignores."""
    return os.environ.get("TBA_STORE") or (Path.cwd() / ".tba").as_uri()


def local_folder() -> Path:
    """The folder of this machine's data outside runs: Prefect's database, logs, converted models. Git ignores it."""
    return Path.cwd() / ".tba" / ".local"


def policy_cache(run: str) -> Path:
    """The folder in which this machine's processes share copies of a run's newest policies."""
    return local_folder() / "policies" / run


def cpu_threads(num_processes: int) -> int:
    """Threads for each of this many concurrent processes on this machine's cores."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


def keep_freed_memory() -> None:
    """Makes this process reuse the memory that it frees. Its peak stays the same; no memory returns to the system.

    glibc returns every freed tensor above 32 MiB, and the next one of its size costs a page fault for each 4 KiB. The
    page faults were 12 % of a training step's time on a CPU (docs/LOG.md). Other C libraries are left as they are.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never


def take_gpus(first: int, num_of_run: int, num_here: int = 1) -> float:
    """Assigns this process some of this machine's GPUs. They are shared if the run's processes need more.

    first: index of the process's first GPU among the `num_of_run` that the run's processes on this machine need.
    num_here: GPUs that this process needs. Sets CUDA_VISIBLE_DEVICES, so call it before this process uses CUDA.
    Returns this process's share of each GPU's memory; 1 without a GPU. Raises: ValueError: the machine has fewer GPUs.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        return 1.0
    if num_here > num_gpus:
        raise ValueError(f"this process needs {num_here} GPUs (search.engine), and this machine has {num_gpus}")
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[(first + each) % num_gpus] for each in range(num_here))
    return 1 / math.ceil(num_of_run / num_gpus)


def code_version() -> str:
    """The checkout's git commit, where "+" marks uncommitted changes; of an installed wheel its version, "tba 0.1.0".

    A wheel may lie inside another project's checkout, whose commit says nothing about this code."""
    if not (CHECKOUT / ".git").exists():
        return _installed_version()
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],  # noqa: S607 - the PATH is trusted
            cwd=CHECKOUT, capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return _installed_version()
    return described.stdout.strip() or _installed_version()


def _installed_version() -> str:
    try:
        return f"tba {metadata.version('tba')}"
    except metadata.PackageNotFoundError:
        return "unknown"


def temporary_folder(kind: str, run: str) -> tempfile.TemporaryDirectory:
    """A temporary folder with this process's pid in its name, for removal after a kill (remove_leftovers)."""
    return tempfile.TemporaryDirectory(prefix=f"tba-{kind}-{run}@{os.getpid()}-")


def filled_folder(kind: str, run: str, fill: Callable[[Path], object]) -> tempfile.TemporaryDirectory:
    """A temporary folder with the files that `fill` writes to it. If the disk is full, `fill` is repeated (patience_s).

    Raises: StoreFull: the disk was full for all that time.
    """

    def try_once() -> tempfile.TemporaryDirectory:
        folder = temporary_folder(kind, run)
        try:
            fill(Path(folder.name))
        except Exception:
            folder.cleanup()  # frees the room that half of a checkpoint takes
            raise
        return folder

    return with_room(try_once, f"a {kind} of run {run}")


def remove_leftovers(run: str) -> None:
    """Removes temporary folders that killed Trainers of the run left on this machine: a checkpoint is gigabytes."""
    for folder in Path(tempfile.gettempdir()).glob("tba-*"):
        match = re.fullmatch(rf"tba-(checkpoint|policy|resume)-{re.escape(run)}@(\d+)-\w+", folder.name)
        if match and not psutil.pid_exists(int(match[2])):
            logging.getLogger("tba.learn").info("removing %s, which a killed Trainer left", folder)
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays
