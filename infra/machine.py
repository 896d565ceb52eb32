"""This machine's folders, threads, GPUs and code version, for the processes of a run."""

import ctypes
import fcntl
import logging
import math
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import chain, count
from pathlib import Path, PurePosixPath
from typing import IO

import psutil

from storage.patience import with_room

CHECKOUT = Path(__file__).resolve().parents[1]  # of an installed wheel: site-packages
MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - of Linux; names of its temporary folders cannot be foreseen
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h, for mallopt
NO_CACHES_OF_PIECES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"


def local_folder() -> Path:
    """The folder of this machine's data outside runs: Prefect's database, logs, converted models. Git ignores it."""
    return Path.cwd() / ".tba" / ".local"


def policy_cache(run: str) -> Path:
    """The folder in which this machine's processes share copies of a run's newest policies."""
    return local_folder() / "policies" / run


def cpu_threads(num_processes: int) -> int:
    """Threads for each of this many concurrent processes on the cores that this machine or container may use."""
    return max(1, int(min(len(os.sched_getaffinity(0)), _core_limit())) // num_processes)


def _core_limit(control_group: Path = Path("/sys/fs/cgroup")) -> float:
    """Whole cores' time that this container may use, at least 1; infinite without a limit."""
    with suppress(OSError, ValueError):  # a system without control groups, or of their first version
        quota, period = (control_group / "cpu.max").read_text().split()
        if quota != "max":
            return max(1, int(quota) // int(period))
    return math.inf


def memory_bytes() -> int:
    """Memory of this machine, or the smallest limit of this process's control groups, as of a container or a job."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _memory_limits())])


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU that this process may use; None without one. Imports torch if one may be there."""
    return min(_gpu_sizes(), default=None)


def num_gpus() -> int:
    """GPUs that this process may use. Imports torch if one may be there."""
    return len(_gpu_sizes())


def _gpu_sizes() -> list[int]:
    if not (shutil.which("nvidia-smi") or any(Path("/dev").glob("nvidia[0-9]*"))):
        return []
    import torch

    return [torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())]


def has_bfloat16(cpu: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bfloat16 in hardware, as tba.precision.compute_dtype finds out with torch."""
    with suppress(OSError):
        return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(cpu.read_text().split())
    return False


def processor_name(cpu: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model as the system names it, else its architecture."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(\S.*)$", cpu.read_text(), re.MULTILINE):
            return found[1]
    return platform.machine()


_places: dict[str, tuple[int, IO]] = {}  # by group: this process's place, and the open file that holds it


def take_place(group: str) -> int:
    """This process's place among the living processes of a group on this machine: the lowest free one, from 0.

    group: a name that can be a file's. The process keeps the place to its end, however it ends. A container
    that has its own temporary folder counts as a machine. Raises: StoreFull: the temporary folder was full for minutes.
    """
    if group not in _places:
        _places[group] = with_room(lambda: _first_free(group), "the place of a process")
    return _places[group][0]


def _first_free(group: str) -> tuple[int, IO]:
    return next((place, lock) for place in count() if (lock := _locked(_place_file(group, place))))


def num_places(group: str) -> int:
    """How many places of a group are taken on this machine."""
    own, _ = _places.get(group, (None, None))
    others = {int(file.name.rpartition("-")[2]): file for file in _place_file(group, 0).parent.glob(f"{group}-*")}
    return sum(1 for place, file in others.items() if place == own or _is_locked(file))


def _place_file(group: str, place: int) -> Path:
    """In a folder that other users cannot write to."""
    folder = Path(tempfile.gettempdir()) / f"tba-places-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; delete it, or set TMPDIR to a folder of your own")
    return folder / f"{group}-{place}"


def _locked(file: Path) -> IO | None:
    """The open file, with a lock that ends with this process; None: another process has the lock."""
    opened = file.open("w")
    for pause_s in (0.05, 0.0):  # `num_places` of another process holds a free one for a moment
        with suppress(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return opened
        time.sleep(pause_s)
    opened.close()
    return None


def _is_locked(file: Path) -> bool:
    lock = _locked(file)
    if lock is not None:
        lock.close()
    return lock is None


@contextmanager
def alone_here(what: str) -> Iterator[None]:
    """While this process is inside, others of this user on this machine wait to enter. what: a name as a file's."""
    with _place_file(what, 0).open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(opened, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file, too


def keep_freed_memory() -> None:
    """Makes this process reuse the memory that it frees. Its peak stays the same; no memory returns to the system.

    glibc returns every freed tensor above 32 MiB, and the next one of its size costs a page fault for each 4 KiB. The
    page faults were 12 % of a training step's time on a CPU (docs/LOG.md). Other C libraries are left as they are.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never


def tensor_environment() -> dict[str, str]:
    """Environment variables for a process that takes and frees many tensors: it needs less memory.

    We think that glibc before 2.38 cuts a tensor's memory out of a slightly larger piece and keeps the cut ends in its
    caches of small pieces, so that a freed tensor's memory is too small for the next tensor of its size. The peak of a
    long training step was 14 % higher with these caches (docs/LOG.md).
    """
    chosen = os.environ.get("GLIBC_TUNABLES")  # by the user; the last one counts
    return {"GLIBC_TUNABLES": f"{NO_CACHES_OF_PIECES}:{chosen}" if chosen else NO_CACHES_OF_PIECES}


def gpu_places(num_gpus: int, num_searchers: int, num_trainers: int, num_here: int = 1) -> list[int]:
    """The GPUs of all Searchers, `num_here` of each: after the Trainer's if enough are left, otherwise any."""
    first = num_trainers if num_gpus - num_trainers >= num_here else 0
    return [first + each % (num_gpus - first) for each in range(num_searchers * num_here)]


def take_gpus(place: int, num_searchers: int, num_trainers: int, num_here: int = 1) -> float:
    """Assigns this Searcher GPUs of this machine: after the Trainer's if enough are left, otherwise any.

    place: of this Searcher among the run's `num_searchers` on this machine, from 0. num_trainers: processes of the
    Trainer here, each of which has a GPU, from GPU 0 on. num_here: GPUs that each Searcher needs. Sets
    CUDA_VISIBLE_DEVICES, so call it before this process uses CUDA. Returns this process's share of each GPU's memory,
    less than 1 if another process of the run has the GPU, too; 1 without a GPU. Raises: ValueError: the machine has
    fewer GPUs.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        return 1.0
    if num_here > num_gpus:
        raise ValueError(f"this process needs {num_here} GPUs (search.engine), and this machine has {num_gpus}")
    places = gpu_places(num_gpus, num_searchers, num_trainers, num_here)
    taken = places[place * num_here :][:num_here]
    num_processes = Counter([*range(num_trainers), *places])
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[gpu] for gpu in taken)
    return 1 / max(num_processes[gpu] for gpu in taken)


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


def temporary_folder(kind: str, run: str, num_bytes: int | None = None) -> tempfile.TemporaryDirectory:
    """A temporary folder with this process's pid in its name, for removal after a kill (remove_leftovers).

    num_bytes: of its files. With it the folder is in memory if that has room for four times as much. A step waits until
    a checkpoint is written, and a disk may take longer than its gradient.
    """
    in_memory = num_bytes is not None and 4 * num_bytes <= _free_memory_bytes()
    return tempfile.TemporaryDirectory(
        prefix=f"tba-{kind}-{run}@{os.getpid()}-", dir=MEMORY_FOLDER if in_memory else None
    )


def _free_memory_bytes() -> int:
    """Memory that files of MEMORY_FOLDER may take; 0 if there is no such folder. Within this process's limits."""
    if not os.access(MEMORY_FOLDER, os.W_OK):
        return 0
    free = min(shutil.disk_usage(MEMORY_FOLDER).free, psutil.virtual_memory().available)
    return min([free, *(left for _, left in _memory_limits())])


# By the version of control groups: folder, files of the limit and of the use, line of memory.stat for files that were
# read and can be read again, which the use has in it.
_MEMORY_GROUPS = {
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("", "memory.max", "memory.current", "inactive_file"),
}


def _memory_limits(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[int, int]]:
    """Of each control group with a limit, this process's own and those around it: the limit, and what is left of it."""
    with suppress(OSError):  # a system without control groups
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            folder, *files = _MEMORY_GROUPS[1 if controllers else 2]
            for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                yield from _memory_limit(root / folder / group.relative_to("/"), *files)


def _memory_limit(group: Path, limit: str, used: str, read_again: str) -> Iterator[tuple[int, int]]:
    with suppress(OSError, ValueError, KeyError):  # no limit ("max"), or not seen from a container
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        most = int((group / limit).read_text())
        yield most, most - int((group / used).read_text()) + int(stat[read_again])


def filled_folder(
    kind: str, run: str, fill: Callable[[Path], object], num_bytes: int | None = None
) -> tempfile.TemporaryDirectory:
    """A temporary folder with the files that `fill` writes to it. If the disk is full, `fill` is repeated (patience_s).

    num_bytes: as of `temporary_folder`. Raises: StoreFull: the disk was full for all that time.
    """

    def try_once() -> tempfile.TemporaryDirectory:
        folder = temporary_folder(kind, run, num_bytes)
        try:
            fill(Path(folder.name))
        except Exception:
            folder.cleanup()  # frees the room that half of a checkpoint takes
            raise
        return folder

    return with_room(try_once, f"a {kind} of run {run}")


def remove_leftovers(run: str) -> None:
    """Removes temporary folders that killed Trainers of the run left on this machine: a checkpoint is gigabytes.

    In memory also those of other runs, after a day: such a run may never be resumed here.
    """
    places = Path(tempfile.gettempdir()), MEMORY_FOLDER
    for folder in chain(*(place.glob("tba-*") for place in places)):
        match = re.fullmatch(r"tba-(checkpoint|policy|resume)-(.+)@(\d+)-\w+", folder.name)
        if match is None or psutil.pid_exists(int(match[3])):
            continue
        with suppress(OSError):  # removed meanwhile
            is_old = folder.parent == MEMORY_FOLDER and time.time() - folder.stat().st_mtime > 24 * 3600
            if match[2] == run or is_old:
                logging.getLogger("tba.learn").info("removing %s, which a killed Trainer left", folder)
                shutil.rmtree(folder, ignore_errors=True)  # another user's stays
