"""This machine's memory, and how a process that trains or samples uses it."""

import ctypes
import os

import psutil

from infra.control_groups import memory_limits

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h, for mallopt
NO_CACHES_OF_PIECES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"


def memory_bytes() -> int:
    """Memory of this machine, or the smallest limit of this process's control groups, as of a container or a job."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in memory_limits())])


def available_bytes() -> int:
    """Memory that this process can still take, within the limits of its control groups."""
    return min([psutil.virtual_memory().available, *(left for _, left in memory_limits())])


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
