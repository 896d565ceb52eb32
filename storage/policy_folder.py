"""A policy's folder: whether it is whole, and the cache of such folders on a machine.

Before: storage/policies.py publishes a policy; after: it hands the cache's copy to a Searcher.
"""

import fcntl
import logging
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from storage.errors import UnsafePath
from storage.paths import inside

MANIFEST = "policy.json"
POLICY_NAME = re.compile(r"step=(?P<step>\d{8})(-a(?P<attempt>\d{4}))?")
_CACHED_POLICIES = 2  # the served policy, and the next one
_STALE_DOWNLOAD_S = 3600  # a download of this age belongs to a process that has died

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """The content of policy.json."""

    step: int
    fingerprint: str
    attempt: int
    files: dict[str, int]  # size of each, by its path in the folder
    final: bool = False  # older versions did not record it
    pruned: bool = False


def folder_fault(folder: Path) -> str | None:
    """How the policy's files differ from the published ones; None: they do not.

    Raises: FileNotFoundError: a file is missing. UnsafePath: the list of files names one outside the folder.
    """
    try:
        manifest = TypeAdapter(Manifest).validate_json((folder / MANIFEST).read_bytes())
    except ValidationError as error:
        return f"{MANIFEST} cannot be read ({error.errors()[0]['msg']})"
    for name, published in manifest.files.items():
        if (found := inside(folder, name).stat().st_size) != published:
            return f"{name} has {found} bytes, but {published} were published"
    return None


def into_cache(cached: Path, fill: Callable[[Path], object]) -> Path:
    """The cache's copy at this path. If there is none, or it is damaged, `fill` writes one into an empty folder.

    Of several processes of this machine one fills, and the others wait for it. A kill leaves the copy whole or absent.
    """
    cached.parent.mkdir(parents=True, exist_ok=True)
    with _one_process(cached.parent / f".tmp-lock-{cached.name}"):
        if cached.is_dir() and (fault := _copy_fault(cached)):
            logger.warning("the copy %s of a policy is damaged and is fetched again: %s", cached, fault)
            drop(cached)
        if not cached.is_dir():
            _fill(cached, fill)
            _trim(cached.parent)
    return cached


def _fill(cached: Path, fill: Callable[[Path], object]) -> None:
    incoming = Path(tempfile.mkdtemp(prefix=".tmp-", dir=cached.parent))
    try:
        fill(incoming)
        with suppress(OSError):  # a process that could not wait was faster; its copy is used
            os.rename(incoming, cached)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


@contextmanager
def _one_process(lock: Path) -> Iterator[None]:
    """Waits until no other process of this machine is in this context. The end of a process ends its lock.

    Where a lock cannot be taken (the disk is full, or the file system has none), it does not wait.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            lock.mkdir(exist_ok=True)
            folder = os.open(lock, os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):  # a process that waits for the removed lock finds the copy when it goes on
                lock.rmdir()


def _copy_fault(cached: Path) -> str | None:
    try:
        return folder_fault(cached)
    except (OSError, UnsafePath) as error:  # a file of the copy was lost or cannot be read
        return str(error)


def drop(cached: Path) -> bool:
    """Removes a copy from the cache. Returns False if there is none."""
    removed = cached.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        os.rename(cached, removed)  # in one step, so that other processes find the whole copy or none
    except FileNotFoundError:
        return False
    shutil.rmtree(removed, ignore_errors=True)
    return True


def link_or_copy(source: str, target: str) -> None:
    """For shutil.copytree: links a file if the filesystem allows it, else copies it."""
    try:
        os.link(source, target)
    except OSError:  # on another filesystem, or on one without links
        shutil.copyfile(source, target)


def _trim(cache_dir: Path) -> None:
    newest_first = sorted(cache_dir.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
    policies = [folder for folder in newest_first if POLICY_NAME.match(folder.name)]
    dead_downloads = [
        folder
        for folder in newest_first
        if folder.name.startswith(".tmp-") and time.time() - folder.stat().st_mtime > _STALE_DOWNLOAD_S
    ]
    for folder in policies[_CACHED_POLICIES:] + dead_downloads:
        shutil.rmtree(folder, ignore_errors=True)
