"""The limits of a process's control groups, as of a container, a systemd unit or a job: of cores and of memory.

Both versions of control groups are read. A limit holds for a process if its own group has it or one around that.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

GROUPS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Of memory, by version: file of the limit, file of the use, and the line of memory.stat with the reclaimable page
# cache, which the use includes.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def core_limit(groups: Path = GROUPS, root: Path = ROOT) -> float:
    """Whole cores' time that this process may use, at least 1; infinite without a limit."""
    limits = []
    for version, folder in _folders("cpu", groups, root):
        with suppress(OSError, ValueError):  # no limit ("max"), or not seen from a container
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
            quota, period = map(int, " ".join((folder / file).read_text() for file in files).split())
            if quota >= 0:  # -1: no limit, in version 1
                limits.append(max(1, quota // period))
    return min(limits, default=math.inf)


def memory_limits(groups: Path = GROUPS, root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """Of each control group with a limit of memory: the limit, and what is left of it, in bytes."""
    for version, folder in _folders("memory", groups, root):
        limit, used, read_again = _MEMORY_FILES[version]
        with suppress(OSError, ValueError, KeyError):  # as above
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            most = int((folder / limit).read_text())
            yield most, most - int((folder / used).read_text()) + int(stat[read_again])


def _folders(controller: str, groups: Path, root: Path) -> Iterator[tuple[int, Path]]:
    """Version and folder of the groups that have this controller: this process's own, then those around it."""
    with suppress(OSError):  # a system without control groups
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            version, of_version = (1, root / controller) if controllers else (2, root)
            for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                yield version, of_version / group.relative_to("/")
