"""A process of this machine, distinct from any later process with its pid. Quick to import."""

import os
from dataclasses import dataclass

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


def _since_boot_s(process: psutil.Process) -> float:
    return process.create_time() - psutil.boot_time()  # of both, psutil asks where the clock stands now
