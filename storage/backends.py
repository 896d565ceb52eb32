"""The two kinds of store: a folder and an S3 prefix. storage/store.py is what everything else uses.

Both keep the same promises. A reader sees a whole file or none, even if a writer was killed. Of several writers that
race to create one path exactly one wins (on S3, if the server honours create-if-absent). A listing shows every file put
before it. If the store is full or does not answer, operations are retried for `patience_s`. Paths are relative, with
`/`; exceptions are the backend's.
"""

import errno
import functools
import ipaddress
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import pyarrow.fs

_TEMPORARY = ".tmp-"  # begins the name of a file still being written: no listing and no *.parquet glob shows it
# Long enough for a gateway to restart, a network to return, or a disk to be cleared. Shorter than the silence after
# which a Searcher assumes that the Trainer is dead (180 s), so that an outage ends no Searcher.
PATIENCE_S = 120.0
_LONGEST_PAUSE_S = 5.0

logger = logging.getLogger(__name__)


def patient(operation: Callable) -> Callable:
    """Repeats a backend's operation while the store is full or away, up to the backend's `patience_s`.

    Only this function waits for an outage; s3fs and botocore by themselves retry for seconds. Every operation may be
    repeated: a put writes the same bytes to the same path.
    """

    @functools.wraps(operation)
    def repeated(self, *arguments):
        deadline, pause_s = time.monotonic() + self.patience_s, 0.25
        while True:
            try:
                return operation(self, *arguments)
            except Exception as error:
                if not _may_pass(error) or time.monotonic() + pause_s > deadline:
                    raise
                logger.warning("store: cannot %s now, retrying: %s", operation.__name__.strip("_"), error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    return repeated


def _may_pass(error: Exception) -> bool:
    """Whether the error may be temporary: the store is full or away, and does not refuse."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    for cause in (error, error.__cause__):
        status = _response(cause).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        names = {ancestor.__name__ for ancestor in type(cause).__mro__}  # by name: botocore is not imported here
        if status >= 500 or names & {"ConnectionError", "HTTPClientError", "TimeoutError"}:
            return True
    return False


def _response(error: BaseException | None) -> dict:
    return getattr(error, "response", None) or {}  # None if the connection was cut


class LocalFolder:
    """A folder. Files are written beside their path under a temporary name, synced to disk, then linked or renamed."""

    def __init__(self, root: str, patience_s: float = PATIENCE_S):
        self._root = Path(root)
        self.patience_s = patience_s

    def put(self, path: str, data: bytes) -> None:
        self._write(path, lambda file: file.write(data), os.replace)

    def put_new(self, path: str, data: bytes) -> None:
        # a link fails if the path exists; a rename would replace another writer's file
        self._write(path, lambda file: file.write(data), os.link)

    def is_exclusive(self, probe: str) -> bool:
        """Whether put_new never replaces; writes, reads and removes a file. A folder's link never does."""
        self.put_new(probe, b"probe")
        self.get(probe)
        self.delete(probe)
        return True

    def put_file(self, path: str, local: Path) -> None:
        def copy(file: BinaryIO) -> None:
            with open(local, "rb") as source:
                shutil.copyfileobj(source, file)

        self._write(path, copy, os.replace)

    @patient
    def _write(self, path: str, fill: Callable[[BinaryIO], object], publish: Callable[[Path, Path], None]) -> None:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            publish(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        # the file's name survives a power cut only once its folder is on disk
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def get(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def get_file(self, path: str, local: Path) -> None:
        shutil.copyfile(self._root / path, local)

    def exists(self, path: str) -> bool:
        return (self._root / path).is_file()

    def files(self, folder: str, start_after: str) -> list[str]:
        return sorted(path for path in self._walk(folder) if path > start_after)

    def _walk(self, folder: str) -> Iterator[str]:
        for parent, _, names in os.walk(self._root / folder):
            prefix = Path(parent).relative_to(self._root).as_posix()
            for name in names:
                if not name.startswith(_TEMPORARY):
                    yield name if prefix == "." else f"{prefix}/{name}"

    def folders(self, folder: str) -> list[str]:
        try:
            with os.scandir(self._root / folder) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []

    def delete(self, path: str) -> None:
        (self._root / path).unlink()

    def delete_folder(self, folder: str) -> None:
        with suppress(FileNotFoundError):  # somebody else is deleting it too
            shutil.rmtree(self._root / folder)

    def arrow_filesystem(self) -> tuple[pyarrow.fs.FileSystem, str]:
        return pyarrow.fs.LocalFileSystem(), str(self._root)

    def local_path(self, path: str) -> Path:
        return self._root / path


class S3Prefix:
    """Objects under `bucket/prefix`, through s3fs. Address and credentials come from AWS's environment and files."""

    def __init__(self, root: str, patience_s: float = PATIENCE_S):
        self._root = root
        self.patience_s = patience_s
        self._bucket, _, self._prefix = root.partition("/")
        # an own instance reads the environment now; without a cache of listings it sees other writers' files at once
        self._fs = self._connect()
        if _is_loopback(urlsplit(self._fs.s3.meta.endpoint_url).hostname):
            # over http client and server hash each byte for the signature: half the cost of a put. Nobody is between
            # two processes of one machine; a checksum goes with the bytes all the same, as it does over https.
            self._fs = self._connect(config_kwargs={"s3": {"payload_signing_enabled": False}})

    @staticmethod
    def _connect(**options):
        import s3fs  # half a second, and a local store needs none of it

        return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True, **options)

    @patient
    def put(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(f"{self._root}/{path}", data)

    def put_new(self, path: str, data: bytes) -> None:
        # A server that ignores create-if-absent would replace the object: looking first narrows this to a moment.
        if self.exists(path):
            raise FileExistsError(path)
        self._create(path, data, uuid.uuid4().hex)

    @patient
    def _create(self, path: str, data: bytes, mark: str) -> None:
        # if the answer to a put was lost, the repeated put finds its own object, which the mark tells apart
        try:
            self._fs.pipe_file(f"{self._root}/{path}", data, mode="create", Metadata={"writer": mark})
        except OSError as error:
            if not _lost_the_race(error):
                raise
            if self._head(path)["Metadata"].get("writer") != mark:
                raise FileExistsError(path) from error

    def is_exclusive(self, probe: str) -> bool:
        """Whether the server honours create-if-absent; writes, reads and removes an object."""
        self.put_new(probe, b"probe")
        try:
            self._create(probe, b"second probe", uuid.uuid4().hex)
            replaced = True
        except FileExistsError:
            replaced = self.get(probe) != b"probe"
        self.delete(probe)
        return not replaced

    @patient
    def put_file(self, path: str, local: Path) -> None:
        # s3fs would send ten parts of 50 MB at once, and other requests would wait for them: 17 s for a checkpoint
        self._fs.put_file(str(local), f"{self._root}/{path}", max_concurrency=2)

    @patient
    def get(self, path: str) -> bytes:
        return self._fs.cat_file(f"{self._root}/{path}")

    @patient
    def get_file(self, path: str, local: Path) -> None:
        self._fs.get_file(f"{self._root}/{path}", str(local))

    def exists(self, path: str) -> bool:
        with suppress(FileNotFoundError):
            return bool(self._head(path))
        return False

    @patient
    def _head(self, path: str) -> dict:
        return self._fs.call_s3("head_object", Bucket=self._bucket, Key=self._key(path))

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}".lstrip("/")

    @patient
    def files(self, folder: str, start_after: str) -> list[str]:
        # StartAfter skips earlier paths on the server, at no cost
        skip = {"StartAfter": self._key(start_after)} if start_after else {}
        start = len(self._key(""))
        return [item["Key"][start:] for page in self._pages(folder, **skip) for item in page.get("Contents", [])]

    @patient
    def folders(self, folder: str) -> list[str]:
        pages = self._pages(folder, Delimiter="/")
        return sorted(Path(item["Prefix"]).name for page in pages for item in page.get("CommonPrefixes", []))

    def _pages(self, folder: str, **arguments) -> Iterator[dict]:
        prefix = self._key(f"{folder}/" if folder else "")
        while True:
            page = self._fs.call_s3("list_objects_v2", Bucket=self._bucket, Prefix=prefix, **arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    @patient
    def delete(self, path: str) -> None:
        self._head(path)  # S3 deletes a missing object without an error
        self._fs.rm_file(f"{self._root}/{path}")

    @patient
    def delete_folder(self, folder: str) -> None:
        for path in self.files(folder, ""):
            self._fs.rm_file(f"{self._root}/{path}")

    def arrow_filesystem(self) -> tuple[pyarrow.fs.FileSystem, str]:
        return self._arrow, self._root

    @functools.cached_property
    def _arrow(self) -> pyarrow.fs.FileSystem:
        # Arrow's own client: s3fs below Arrow deadlocks. pyarrow starts a scan with the interpreter's lock held and
        # waits for a lock of Arrow's, whose holder waits for the interpreter's to open a file. Address and region are
        # what s3fs found; for credentials both look in AWS's standard places.
        found = self._fs.s3.meta
        address = urlsplit(found.endpoint_url)
        is_aws = address.netloc.endswith((".amazonaws.com", ".amazonaws.com.cn"))
        return pyarrow.fs.S3FileSystem(
            region=found.region_name, scheme=address.scheme, endpoint_override=None if is_aws else address.netloc
        )

    def local_path(self, path: str) -> None:
        return None


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _lost_the_race(error: OSError) -> bool:
    """Whether a create-if-absent put failed because the object exists; stores report this in different ways."""
    code = _response(error.__cause__).get("Error", {}).get("Code")
    # 409: another writer was in the middle of it
    return isinstance(error, FileExistsError) or code in ("PreconditionFailed", "412", "ConditionalRequestConflict")
