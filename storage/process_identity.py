"""Identities of processes: distinct from later processes with the same pid, and from processes of other machines and
pods. And whether such a process lives.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

SHORTEST_PAUSE_S = 0.2  # between two looks at a process and its heartbeat
CONFIRM_S = 10.0  # several heartbeats


@dataclass(frozen=True)
class Process:
    """A process of this machine, by pid and start time, which together are never reused."""

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
        """The running process; None: it has ended. A zombie has ended."""
        try:
            process = psutil.Process(self.pid)
            same = abs(_since_boot_s(process) - self.started) < 0.1 and process.status() != psutil.STATUS_ZOMBIE
            return process if same else None
        except (psutil.NoSuchProcess, ValueError, OverflowError):  # ValueError: no system has such a pid
            return None


@dataclass(frozen=True)
class Identity(Process):
    """A process anywhere, as the store records it."""

    host: str
    """Host name, for people, and for machines without a boot_id. Clones and pods may share it."""
    boot_id: str | None = None
    """Id that the kernel draws at each boot. None: recorded by an older version, or the system is not Linux."""
    pid_namespace: int | None = None
    """Namespace of the pid, unique among the existing ones of a kernel. None: as for boot_id."""

    @classmethod
    def of(cls, pid: int) -> "Identity":
        """The identity of a running process of this machine and namespace."""
        return cls(**asdict(Process.of(pid)), **_place())

    @property
    def place(self) -> tuple[str, str | None, int | None]:
        """The machine and namespace of the process."""
        return self.host, self.boot_id, self.pid_namespace

    def is_here(self) -> bool:
        """Whether the process belongs to this machine and namespace, so that its pid can be looked up here."""
        return self.place == tuple(_place().values())

    def is_running(self) -> bool | None:
        """Whether the process runs. None: it cannot be looked up from here.

        Without a boot_id, True is certain, but a missing process may run on another machine: None.
        """
        if not self.is_here():
            return None
        return True if self.find() else (False if self.boot_id else None)

    def is_alive(
        self, read_beat: Callable[[], bytes | None], watch_s: float, pause_s: float = SHORTEST_PAUSE_S
    ) -> bool:
        """Whether the process works: by `is_running`, or, if it cannot be looked up from here, by its heartbeat.

        read_beat: its newest heartbeat, which must change twice, each time within `watch_s`. pause_s: between two calls
        of it. Compares no clocks. Takes up to twice `watch_s`, without the time that `read_beat` takes; no time if the
        process is known to be dead.
        """
        beats = [read_beat()]
        deadline = time.monotonic() + watch_s
        while (runs := self.is_running()) is not False:
            asked_at = time.monotonic()
            beat, took_s = read_beat(), time.monotonic() - asked_at
            deadline += took_s  # the store may have been away for the process, too
            if beat not in beats:
                beats.append(beat)
                deadline = time.monotonic() + watch_s
            if len(beats) > 2:  # one change may be the last heartbeat of a process that ends
                return True
            if time.monotonic() > deadline:
                return bool(runs)  # True: the process exists without a heartbeat, because it starts or hangs
            time.sleep(pause_s)
        return False


class Pulse:
    """Tells whether a process goes on: whether its heartbeat changes. Compares no clocks."""

    def __init__(self, read_beat: Callable[[], bytes | None]) -> None:
        """`read_beat`: its newest heartbeat, or None."""
        self._read, self._seen_at = read_beat, time.monotonic()
        self._looked_at = self._seen_at
        self.last: bytes | None = None
        """The newest heartbeat."""

    def is_silent(self, limit_s: float) -> bool:
        """Reads the heartbeat. Returns whether it has not changed for `limit_s`.

        The time of the reading does not count: the store may make the process wait, too. After a long time without a
        look, in which this process and the other may both have been frozen, it looks once more, `CONFIRM_S` later.
        Raises: what `read_beat` does.
        """
        was_away, is_silent = time.monotonic() - self._looked_at > CONFIRM_S, self._quiet_s() > limit_s
        if is_silent and was_away:
            time.sleep(CONFIRM_S)
            is_silent = self._quiet_s() > limit_s
        return is_silent

    def _quiet_s(self) -> float:
        """Reads the heartbeat. Returns for how long it has not changed."""
        asked_at = time.monotonic()
        beat = self._read()
        self._looked_at = now = time.monotonic()
        self._seen_at += now - asked_at
        if beat != self.last:
            self.last, self._seen_at = beat, now
        return now - self._seen_at


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
    return process.create_time() - psutil.boot_time()  # both by the clock as it is set now
