"""A policy's folder: its policy.json, whether it is whole, and the cache of such folders on a machine.

Before: storage/policies.py publishes a policy; after: it hands the cache's copy to a Searcher.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from stat import S_ISREG

from pydantic import TypeAdapter, ValidationError

from storage.errors import UnsafePath
from storage.paths import inside, is_plain
from storage.patience import with_room

MANIFEST = "policy.json"
POLICY_NAME = re.compile(r"step=(?P<step>[0-9]{8})(-a(?P<attempt>[0-9]{4,}))?")
DELTA = ".delta"  # suffix of a file that holds the changes of another (storage/policy_delta.py)
LONGEST_CHAIN = 32  # links; two anchors are among them (storage/policy_delta.py)
_DIGEST = re.compile(r"[0-9a-f]{64}")
# The served policy and the next one. So the base of a delta is there: the policy that this machine had before.
_CACHED_POLICIES = 2
_STALE_DOWNLOAD_S = 3600  # a download of this age belongs to a process that has died

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Link:
    """A policy, as a later one's policy.json names it."""

    path: str  # of its folder, inside the run
    fingerprint: str
    whole: bool  # whether its folder had the weights when the later policy was published


@dataclass(frozen=True)
class Manifest:
    """The content of policy.json. Raises: ValueError: its chain is none that a Trainer writes."""

    step: int
    fingerprint: str
    attempt: int
    files: dict[str, int]  # size of each of the whole policy, by its path in the folder
    final: bool = False  # older versions did not record it
    pruned: bool = False
    whole: bool = True  # whether the folder has the weights; if not, a chain leads to them
    digests: dict[str, str] = field(default_factory=dict)  # BLAKE3 of weights and large files; none in a local folder
    chain: list[Link] = field(default_factory=list)  # policies before it, oldest first; its delta's base is the last

    def __post_init__(self) -> None:
        if not self.digests.keys() <= self.files.keys() or not all(map(_DIGEST.fullmatch, self.digests.values())):
            raise ValueError("its digests are not those of its files")
        if (self.chain or not self.whole) and (fault := _chain_fault(self)):
            raise ValueError(fault)

    @property
    def anchor(self) -> int:
        """The place in the chain of the newest policy with weights."""
        return max(number for number, link in enumerate(self.chain) if link.whole)

    @property
    def needs(self) -> list[Link]:
        """The policies before it without which its weights cannot be rebuilt."""
        return [] if self.whole else self.chain[self.anchor :]

    @property
    def deltas(self) -> set[str]:
        return {name + DELTA for name in self.digests} if self.chain else set()

    @property
    def stored(self) -> set[str]:
        """The names of the files that its folder has in the store, without policy.json."""
        return self.deltas | (set(self.files) if self.whole else self.files.keys() - self.digests.keys())


def _chain_fault(manifest: Manifest) -> str | None:
    """The rule that the chain breaks; None: it keeps all.

    Its names are safe as paths, its steps rise, so that it has no loop, all policies are of the manifest's attempt,
    and all weights have digests.
    """
    chain = manifest.chain
    names_hold = all(is_policy(link.path) and is_safe_fingerprint(link.fingerprint) for link in chain)
    if not names_hold or len(chain) > LONGEST_CHAIN or not any(link.whole for link in chain):
        return f"its chain does not have 1 to {LONGEST_CHAIN} policies, or none of them has the weights"
    ages = [age(link.path) for link in chain] + [(manifest.attempt, manifest.step)]
    if len({attempt for attempt, _ in ages}) > 1 or any(one >= next for one, next in pairwise(ages)):
        return "its chain has policies of another attempt, or its steps do not rise"
    weights = {name for name in manifest.files if name.endswith(".safetensors")}
    if not weights or not weights <= manifest.digests.keys() or not all(map(is_plain, manifest.digests)):
        return "its chain leads to weights without a digest"
    return None


def is_policy(folder: str) -> bool:
    """Whether the folder's name is that of a policy. Other folders are ignored."""
    parent, _, name = folder.rpartition("/")
    return parent == "policies" and bool(POLICY_NAME.fullmatch(name))


def age(folder: str) -> tuple[int, int]:
    """Attempt and step. A policy of a later attempt is newer, whatever its step."""
    name = POLICY_NAME.fullmatch(Path(folder).name)
    return int(name["attempt"] or 1), int(name["step"])


def is_safe_fingerprint(text: str) -> bool:
    """Whether it can be a part of a file's name."""
    return not set(text) & set("/\\\0")


def read_manifest(folder: Path) -> Manifest:
    """Raises: FileNotFoundError: there is none. ValueError: it cannot be read; the message says why. UnsafePath."""
    file = inside(folder, MANIFEST)
    if not S_ISREG(file.stat().st_mode):  # a pipe would be waited for
        raise ValueError(f"{MANIFEST} is no file")
    return parse_manifest(file.read_bytes())


def parse_manifest(text: bytes) -> Manifest:
    """Raises: ValueError: it cannot be read; the message says why."""
    try:
        return TypeAdapter(Manifest).validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error.errors()[0]['msg']})") from error


def manifest_text(manifest: Manifest) -> bytes:
    """policy.json, without what every policy in a local folder has."""
    usual = {"pruned": False, "whole": True, "digests": {}, "chain": []}
    return json.dumps(
        {name: value for name, value in asdict(manifest).items() if usual.get(name) != value}, indent=2
    ).encode()


def folder_fault(folder: Path) -> str | None:
    """How the policy's files differ from the published ones by their sizes; None: they do not.

    Raises: FileNotFoundError: a file is missing. UnsafePath: the list of files names one outside the folder.
    """
    if others := [file.name for file in folder.glob("*.safetensors") if file.exists() and not file.is_file()]:
        return f"{min(others)} is no file"
    try:
        return sizes_fault(folder, read_manifest(folder).files)
    except ValueError as error:
        return str(error)


def sizes_fault(folder: Path, sizes: dict[str, int]) -> str | None:
    """folder_fault, of the files with these published sizes."""
    for name, published in sizes.items():
        found = inside(folder, name).stat()
        if not S_ISREG(found.st_mode):
            return f"{name} is no file"
        if found.st_size != published:
            return f"{name} has {found.st_size} bytes, but {published} were published"
    return None


def cached_path(path: str, fingerprint: str, cache_dir: str | Path) -> Path:
    """Where the cache has its copy of a policy. The fingerprint separates runs of one name in different stores."""
    return inside(Path(cache_dir), f"{Path(path).name}-{fingerprint[:16]}")


def into_cache(cached: Path, fill: Callable[[Path], object], *, waits_for_room: bool = True) -> Path:
    """The cache's copy at this path. If there is none, or it is damaged, `fill` writes one into an empty folder.

    Of several processes of this machine one fills, and the others wait for it. A kill leaves the copy whole or absent.
    waits_for_room: if the disk is full, for up to patience_s. Raises: StoreFull: it was full for all that time.
    OSError: without waits_for_room, it is full.
    """
    room = with_room if waits_for_room else lambda write, *_: write()
    room(lambda: cached.parent.mkdir(parents=True, exist_ok=True), cached.name, cached.parent)
    with _one_process(cached.parent / f".tmp-lock-{cached.name}"):
        if cached.is_dir() and (fault := _copy_fault(cached)):
            logger.warning("the copy %s of a policy is damaged and is fetched again: %s", cached, fault)
            drop(cached)
        if not cached.is_dir():
            room(lambda: _fill(cached, fill), f"policy {cached.name}", cached.parent)
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


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Links a file if the filesystem allows it, else copies it."""
    try:
        os.link(source, target)
    except OSError:  # on another filesystem, or on one without links
        shutil.copyfile(source, target)


def _trim(cache_dir: Path) -> None:
    changed_at: dict[Path, float] = {}
    for folder in cache_dir.iterdir():
        with suppress(FileNotFoundError):  # another process has removed it since
            changed_at[folder] = folder.stat().st_mtime
    newest_first = sorted(changed_at, key=changed_at.get, reverse=True)
    policies = [folder for folder in newest_first if POLICY_NAME.match(folder.name)]
    dead_downloads = [
        folder
        for folder in newest_first
        if folder.name.startswith(".tmp-") and time.time() - changed_at[folder] > _STALE_DOWNLOAD_S
    ]
    for folder in policies[_CACHED_POLICIES:] + dead_downloads:
        drop(folder)
