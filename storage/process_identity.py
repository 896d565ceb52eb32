"""A process of this machine, distinct from any later process with its pid, and from those of other machines and pods.
Quick to import.
"""

import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Process:
    """A process by pid and start time: together they are never reused."""

    pid: int
    started: float
    """Seconds since the machine started. (The time of day changes when the clock is set.)"""

    @classmethod
    def current(cls) -> "Process":
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "Process":
        return cls(pid, _since_boot_s(psutil.Process(pid)))

    def find(self) -> psutil.Process | None:
        """The living process, or None if it ended (a zombie has ended)."""
        try:
            process = psutil.Process(self.pid)
            same = abs(_since_boot_s(process) - self.started) < 0.1 and process.status() != psutil.STATUS_ZOMBIE
            return process if same else None
        except psutil.NoSuchProcess:
            return None


@dataclass(frozen=True)
class Identity(Process):
    """A process anywhere, as the store records it."""

    host: str
    """For people, and for machines without a boot_id: cloned machines and pods share names."""
    boot_id: str | None = None
    """Of the machine's kernel, drawn at each boot. None: recorded by an older version, or the system is not Linux."""
    pid_namespace: int | None = None
    """In which the pid counts; distinct among the living ones of one kernel. None: as for boot_id."""

    @classmethod
    def of(cls, pid: int) -> "Identity":
        """A living process of this machine and namespace."""
        return cls(**asdict(Process.of(pid)), **_place())

    def is_here(self) -> bool:
        """Whether the process belongs to this machine and namespace, so that its pid can be looked up here."""
        return all(getattr(self, name) == value for name, value in _place().items())

    def is_running(self) -> bool | None:
        """Whether the process runs. None: that cannot be known from here.

        Without a boot_id a process is recognised, but its absence proves nothing.
        """
        if not self.is_here():
            return None
        return True if self.find() else (False if self.boot_id else None)


def _place() -> dict:
    return {"host": socket.gethostname(), "boot_id": _boot_id(), "pid_namespace": _pid_namespace()}


def _boot_id() -> str | None:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _pid_namespace() -> int | None:
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return None


def _since_boot_s(process: psutil.Process) -> float:
    return process.create_time() - psutil.boot_time()  # of both, psutil asks where the clock stands now
