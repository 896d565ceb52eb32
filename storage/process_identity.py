"""A process of this machine, told apart from any that later has its pid. Light to import: the command does so first."""

import os
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Process:
    """A process by pid and start time: together they are never reused."""

    pid: int
    started: float
    """s since the machine started; the time of day would move whenever the clock is set."""

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
