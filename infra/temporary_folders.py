"""Temporary folders of checkpoints and policies, in memory where it has room."""

import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path

import psutil

from infra.memory import available_bytes
from storage.patience import with_room

MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - of Linux; names of its temporary folders cannot be foreseen


def temporary_folder(kind: str, run: str, num_bytes: int | None = None) -> tempfile.TemporaryDirectory:
    """A temporary folder with this process's pid in its name, for removal after a kill (remove_leftovers).

    num_bytes: of its files. With it the folder is in memory if that has room for four times as much. A step waits until
    a checkpoint is written, and a disk may take longer than its gradient.
    """
    in_memory = num_bytes is not None and 4 * num_bytes <= _room_in_memory()
    return tempfile.TemporaryDirectory(
        prefix=f"tba-{kind}-{run}@{os.getpid()}.{_pid_namespace()}-", dir=MEMORY_FOLDER if in_memory else None
    )


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

    In memory also those of other runs, after a day: such a run may never be resumed here. Processes of other containers
    that share the folder cannot be looked up; theirs count as left after a day.
    """
    places = Path(tempfile.gettempdir()), MEMORY_FOLDER
    for folder in chain(*(place.glob("tba-*") for place in places)):
        match = re.fullmatch(r"tba-(checkpoint|policy|resume)-(.+)@(\d+)(?:\.(\d+))?-\w+", folder.name)
        if match is None:
            continue
        is_ours, is_known = match[2] == run, match[4] == str(_pid_namespace())
        if is_known and psutil.pid_exists(int(match[3])):
            continue
        with suppress(OSError):  # removed meanwhile
            is_old = time.time() - folder.stat().st_mtime > 24 * 3600
            if (is_ours and is_known) or (is_old and (is_ours or folder.parent == MEMORY_FOLDER)):
                logging.getLogger("tba.trainer").info("removing %s, which a killed Trainer left", folder)
                shutil.rmtree(folder, ignore_errors=True)  # another user's stays


def _pid_namespace() -> int:
    """The number of the namespace in which this process's pid holds: containers have their own. 0: it is unknown."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _room_in_memory() -> int:
    """Memory that files of MEMORY_FOLDER may take; 0 if there is no such folder."""
    if not os.access(MEMORY_FOLDER, os.W_OK):
        return 0
    return min(shutil.disk_usage(MEMORY_FOLDER).free, available_bytes())
