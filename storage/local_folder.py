"""The backend for a store in a folder of this machine. Only storage/store.py uses it; storage/s3_prefix.py is the other
one.

Both keep the same promises. A reader sees a whole file or none, even if a writer was killed. If several writers create
one path at once, exactly one succeeds (on S3, if the server honours create-if-absent). A listing has every file that
was put before it, or fails: it is not empty because the store does not answer. An operation is repeated while its error
may pass (storage/patience.py). Paths are relative, with `/`; exceptions are the backend's.
"""

import errno
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pyarrow.fs

from storage.errors import UnsafePath
from storage.paths import inside
from storage.patience import patience_s, patient

_TEMPORARY = ".tmp-"  # prefix of a file that is being written; no listing and no *.parquet glob shows it

logger = logging.getLogger(__name__)


class LocalFolder:
    """A folder. Files are written beside their path under a temporary name, synced to disk, then linked or renamed.

    Listings leave symbolic links out. A path through a link that leads out of the folder raises UnsafePath.
    """

    def __init__(self, root: str, limit_s: float | None = None):
        """limit_s: how long an operation is repeated while its error may pass, in seconds; None: patience_s()."""
        self._root = Path(root)
        self.patience_s = patience_s() if limit_s is None else limit_s
        self._links: set[str] = set()  # links that were warned of, once each

    def renew(self) -> None:
        """A folder needs no credentials."""

    def _path(self, path: str) -> Path:
        return inside(self._root, path)

    def put(self, path: str, data: bytes, check: Callable[[], object]) -> None:
        self._write(path, lambda file: (check(), file.write(data)), os.replace)
        self._sync_folder(path)

    def put_new(self, path: str, data: bytes) -> None:
        # a link fails if the path exists; a rename would replace another writer's file
        self._write(path, lambda file: file.write(data), _link)
        self._sync_folder(path)

    def is_exclusive(self, probe: str) -> bool:
        """Writes, reads and removes a file. Returns whether put_new never replaces a file, which holds for a folder."""
        self.put_new(probe, b"probe")
        self.get(probe)
        self.delete(probe)
        return True

    def put_file(self, path: str, local: Path) -> None:
        def copy(file: BinaryIO) -> None:
            with open(local, "rb") as source:
                shutil.copyfileobj(source, file)

        self._write(path, copy, os.replace)
        self._sync_folder(path)

    @patient("write")
    def _write(self, path: str, fill: Callable[[BinaryIO], object], publish: Callable[..., None]) -> None:
        target = self._path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        folder, temporary = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY), f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            self._check_inside(folder, path)
            new = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
            with open(new, "wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            publish(temporary, target.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(OSError):  # which would have the write repeated, and put_new meet its own file
                os.unlink(temporary, dir_fd=folder)
            os.close(folder)

    def _check_inside(self, folder: int, path: str) -> None:
        """Raises: UnsafePath: the open folder is not the run's any more: a link took its place since it was checked."""
        real = os.path.realpath(f"/proc/self/fd/{folder}")  # on Linux
        if real.startswith("/proc/") or f"{real}/".startswith(f"{os.path.realpath(self._root)}/"):
            return
        raise UnsafePath(
            f"path {path!r} leads to {real}, out of the run's folder, by a symbolic link. Remove the link."
        )

    @patient("write")
    def _sync_folder(self, path: str) -> None:
        """The file's name survives a power cut only once its folder is on disk.

        Apart from `_write`: if this is repeated, put_new does not meet its own file and take it for another writer's.
        """
        folder = os.open(self._path(path).parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @patient("read")
    def get(self, path: str) -> bytes:
        with open(os.open(self._path(path), os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe would be waited for
                raise OSError(errno.EINVAL, "it is no regular file; remove it", path)
            return file.read()

    def get_fast(self, path: str) -> None:
        """A folder has no faster way than `get`."""

    @patient("copy")
    def get_file(self, path: str, local: Path) -> None:
        shutil.copyfile(self._path(path), local)

    @patient("look up")
    def exists(self, path: str) -> bool:
        return self._path(path).is_file()

    @patient("list")
    def files(self, folder: str, start_after: str) -> list[str]:
        return sorted(path for path in self._walk(folder) if path > start_after)

    def _walk(self, folder: str) -> Iterator[str]:
        for entry in self._entries(folder):
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(path)
            elif entry.is_file(follow_symlinks=False) and not entry.name.startswith(_TEMPORARY):
                yield path

    @patient("list")
    def folders(self, folder: str) -> list[str]:
        may_be_links = not folder  # a run may lie on another disk than its store
        return sorted(e.name for e in self._entries(folder) if _is_folder(e, may_be_links))

    def _entries(self, folder: str) -> list[os.DirEntry]:
        """A folder's entries; none if there is no such folder. Any other error is raised, unlike by os.walk."""
        try:
            with os.scandir(self._path(folder)) as scan:
                entries = list(scan)
        except FileNotFoundError:
            return []
        for link in {entry.path for entry in entries if folder and entry.is_symlink()} - self._links:
            logger.warning("store: %s is a symbolic link and is not read; put the file or folder in its place", link)
            self._links.add(link)
        return entries

    @patient("delete")
    def delete(self, path: str) -> None:
        self._path(path).unlink(missing_ok=True)

    @patient("delete")
    def delete_folder(self, folder: str) -> None:
        with suppress(FileNotFoundError):  # another process deletes it, too
            shutil.rmtree(self._path(folder))

    def arrow_filesystem(self) -> tuple[pyarrow.fs.FileSystem, str]:
        return pyarrow.fs.LocalFileSystem(), str(self._root)

    def local_path(self, path: str) -> Path:
        return self._path(path)


def _link(temporary: str, name: str, **folders: int) -> None:
    """os.link. A network file system may repeat it after its answer was lost, and then meets its own link.

    Raises: FileExistsError: another file has the name. OSError with ENOTSUP: the file system has no hard links.
    """
    try:
        os.link(temporary, name, **folders)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):  # the file itself could be written
            raise OSError(errno.ENOTSUP, "this file system has no hard links", name) from error
        if not isinstance(error, FileExistsError):
            raise
        ours = os.stat(temporary, dir_fd=folders["src_dir_fd"])
        if not os.path.samestat(ours, os.stat(name, dir_fd=folders["dst_dir_fd"], follow_symlinks=False)):
            raise


def _is_folder(entry: os.DirEntry, may_be_link: bool) -> bool:
    try:
        return entry.is_dir(follow_symlinks=may_be_link)
    except OSError:  # a link that leads to itself, or to where this account may not look
        return False
