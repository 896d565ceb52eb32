"""This machine's memory, and how a process that trains or samples uses it."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h, for mallopt
NO_CACHES_OF_PIECES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
# By the version of control groups: folder, file of the limit, file of the use, and the line of memory.stat with the
# reclaimable page cache, which the use includes.
_MEMORY_GROUPS = {
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("", "memory.max", "memory.current", "inactive_file"),
}


def memory_bytes() -> int:
    """Memory of this machine, or the smallest limit of this process's control groups, as of a container or a job."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _memory_limits())])


def available_bytes() -> int:
    """Memory that this process can still take, within the limits of its control groups."""
    return min([psutil.virtual_memory().available, *(left for _, left in _memory_limits())])


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
