"""Places of this machine's processes in groups, and turns that they take. Each is the lock of a file."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

from storage.patience import with_room

_places: dict[str, tuple[int, IO]] = {}  # by group: this process's place, and the open file that holds it


def take_place(group: str) -> int:
    """This process's place among the living processes of a group on this machine: the lowest free one, from 0.

    group: a name that can be a file's. The process keeps the place to its end, however it ends. A container
    that has its own temporary folder counts as a machine. Raises: StoreFull: the temporary folder was full for minutes.
    """
    if group not in _places:
        _keep(_place_file(group, 0).parent)
        _places[group] = with_room(lambda: _first_free(group), "the place of a process")
    return _places[group][0]


def num_places(group: str) -> int:
    """How many places of a group are taken on this machine."""
    own, _ = _places.get(group, (None, None))
    others = {int(file.name.rpartition("-")[2]): file for file in _place_file(group, 0).parent.glob(f"{group}-*")}
    return sum(1 for place, file in others.items() if place == own or _is_locked(file))


@contextmanager
def alone_here(what: str) -> Iterator[None]:
    """While this process is inside, others of this user on this machine wait to enter. what: a name as a file's."""
    with _place_file(what, 0).open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(opened, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file, too


def _keep(folder: Path) -> None:
    """Has systemd-tmpfiles leave the folder's files, which it would delete after ten days, though they are locked."""
    opened = os.open(folder, os.O_RDONLY)  # to the process's end
    fcntl.flock(opened, fcntl.LOCK_SH)


def _first_free(group: str) -> tuple[int, IO]:
    return next((place, lock) for place in count() if (lock := _locked(_place_file(group, place))))


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
