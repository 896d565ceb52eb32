"""Processes of this machine: told apart for certain, found by what they carry, stopped."""

import contextlib
import os
from dataclasses import dataclass

import psutil

ALREADY_TRAINING = 75  # a Trainer's exit status: the run has another one (EX_TEMPFAIL of sysexits.h)
STOP_TIMEOUT_S = 15  # a flow process that is told to stop reports its state to the server first


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


def find_processes(variable: str, value: str) -> list[psutil.Process]:
    """Processes that carry this environment variable: children inherit it, whoever their parent is later."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or it is another user's
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def stop_processes(processes: list[psutil.Process]) -> None:
    """Terminate, wait, kill what is left."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=STOP_TIMEOUT_S)
