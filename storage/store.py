"""RunStore: the files of one run, under `<store>/<run>/`. docs/concepts.md has the layout.

There are two ways to write. `put_new` creates an immutable file and never replaces one: if several writers race for one
path, one succeeds and the others get AlreadyExists. `put` replaces a file in one step, for the few files that change. A
reader sees a whole file or none, even if the writer was killed.
"""

from __future__ import annotations  # the method `list` hides the type in the annotations after it

import functools
import json
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.fs
from pydantic import TypeAdapter, ValidationError

from storage.errors import (
    AlreadyExists,
    DamagedRecord,
    NotFound,
    RunConfigMismatch,
    StoreError,
    StoreUnreachable,
    UnsafePath,
    is_without_reason,
    translate,
)
from storage.local_folder import LocalFolder
from storage.paths import check_path, inside, is_plain
from storage.patience import patiently
from storage.s3_prefix import S3Prefix
from storage.store_url import default_store, parse_store_url

RESTORE = "Restore the file from a copy of the store; `tba verify` names the others that are damaged."
_BACKENDS = {"file": LocalFolder, "s3": S3Prefix}
_RUN_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PARALLEL_TRANSFERS = 8  # hides the latency of an object store without flooding it
_PARALLEL_READS, _AHEAD = 32, 64  # of small files, as a thousand Searchers commit them
_PROBE_PATIENCE_S = 3.0  # before a run begins: no answer is then more often a wrong address than an outage


def check_run_name(run: str) -> str:
    """Returns the name. Raises: ValueError: some store does not accept it as a folder's name."""
    if not _RUN_NAME.fullmatch(run):
        raise ValueError(
            f"run: got {run!r}; a run's name is 1 to 64 letters, digits, '.', '_' or '-', begins with a letter or "
            "digit and has no '..': it becomes a folder. Choose another name."
        )
    return run


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)


def transfer_all(transfer: Callable, items: Iterable, at_once: int = _PARALLEL_TRANSFERS) -> list:
    """transfer(item) for each item, in order. Some run at once, so that waits for an object store overlap."""
    items = list(items)
    if len(items) < 2:
        return list(map(transfer, items))
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(transfer, items))


def transfer_each(transfer: Callable, items: Iterable, size: Callable[[Any], int] = lambda item: 1) -> Iterator:
    """transfer(item) for each item, in order. Some run ahead of the caller, who works on the results meanwhile.

    size: of an item; results of items that are _AHEAD in size together wait in memory.
    """
    pool, ahead, sizes = ThreadPoolExecutor(_PARALLEL_READS), deque(), deque()
    try:
        for item in items:
            ahead.append(pool.submit(transfer, item))
            sizes.append(size(item))
            while sum(sizes) > _AHEAD:
                sizes.popleft()
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class RunStore:
    """One run's files in a store. Paths are relative to the run, with `/`. Safe to use from several threads."""

    def __init__(self, url: str, run: str):
        """url: root of the store, file:///folder or s3://bucket/prefix. Raises: ValueError: bad url or run name."""
        self.url = url
        self.run = check_run_name(run)
        self._backend, self._store_root = _backend_of(url)
        self._files = self._backend(f"{self._store_root}/{run}")

    def __repr__(self) -> str:
        return f"RunStore({self.url!r}, {self.run!r})"

    def put_new(self, path: str, data: bytes) -> None:
        """Creates a file. Raises: AlreadyExists: the path is taken. Of several racing writers exactly one succeeds."""
        with self._errors("create", path):
            self._files.put_new(path, data)

    def put(self, path: str, data: bytes, check: Callable[[], object] = lambda: None) -> None:
        """Creates or replaces a file, in one step.

        check: called before each try, which may come minutes after the first; if it raises, nothing is replaced.
        """
        with self._errors("write", path):
            self._files.put(path, data, check)

    def put_new_json(self, path: str, value: object) -> None:
        """As `put_new`. value: JSON values, or a dataclass."""
        self.put_new(path, _json(value))

    def put_json(self, path: str, value: object, check: Callable[[], object] = lambda: None) -> None:
        """As `put`. value: JSON values, or a dataclass."""
        self.put(path, _json(value), check)

    def get(self, path: str) -> bytes:
        """The content of a file. Raises: NotFound."""
        with self._errors("read", path):
            return self._files.get(path)

    def get_or_none(self, path: str) -> bytes | None:
        """The content of a file as it is now, for comparison with a later one; None: there is no such file."""
        try:
            return self.get(path)
        except NotFound:
            return None

    def get_fast(self, path: str) -> bytes | None:
        """The content of a file, unchecked: it may be a proxy's page. The caller recognises that, and asks `get`.

        None: there is no faster way than `get`, or it failed.
        """
        with self._errors("read", path):
            return self._files.get_fast(path)

    def read_json(self, path: str, kind: Any = Any, *, remedy: str = RESTORE) -> Any:
        """A JSON file as an object of type `kind`, checked by pydantic; None: there is no such file.

        Raises: DamagedRecord: it is no JSON, or JSON of another type; the message ends with `remedy`.
        """
        if (data := self.get_or_none(path)) is None:
            return None
        try:
            return _adapter(kind).validate_json(data)
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".lstrip(": ") for fault in error.errors())
            raise DamagedRecord(
                f"cannot read {path} (run {self.run} in {self.url}): it is empty, cut short or not of this program "
                f"({'; '.join(faults)}). {remedy}"
            ) from error

    def exists(self, path: str) -> bool:
        with self._errors("look up", path):
            return self._files.exists(path)

    def list(self, folder: str, *, start_after: str | None = None) -> list[str]:
        """Paths of all files in a folder, at any depth, sorted; with `start_after`, only paths that sort after it.

        Empty if there is no such folder. Nothing is cached, so files of other writers are listed at once. Names that
        are no plain path (storage/paths.py), such as a bucket's empty folders, are left out.
        """
        folder = folder.rstrip("/")
        with self._errors("list", folder):
            return [path for path in self._files.files(folder, start_after or "") if is_plain(path)]

    def folders(self, folder: str) -> list[str]:
        """Names of the folders directly in a folder, sorted."""
        folder = folder.rstrip("/")
        with self._errors("list", folder):
            return [name for name in self._files.folders(folder) if is_plain(name)]

    def delete(self, path: str) -> None:
        """Deletes a file if it exists, in one request."""
        with self._errors("delete", path):
            self._files.delete(path)

    def delete_folder(self, folder: str, *, first: str) -> None:
        """Deletes every file in a folder. `first`, whose presence means "complete", is deleted before the others."""
        with self._errors("delete", folder):
            self._files.delete(f"{folder}/{first}")
            self._files.delete_folder(folder)

    def upload_folder(
        self,
        local: str | Path,
        folder: str,
        *,
        last: str | None = None,
        before_last: Callable[[], object] = lambda: None,
        only: Iterable[str] | None = None,
        at_once: int = _PARALLEL_TRANSFERS,
    ) -> None:
        """Copies files of a local folder, `at_once` of them at a time, replacing existing files.

        last: path inside the folder of the file to copy after all others; its presence means "complete".
        before_last: called right before `last` is copied; if it raises, the folder stays incomplete.
        only: paths inside the folder of the files to copy; None: all.
        """
        local = Path(local)
        names = (path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file())
        chosen = set(names if only is None else only) - {last}
        with self._errors("upload to", folder):
            transfer_all(lambda name: self._files.put_file(f"{folder}/{name}", local / name), sorted(chosen), at_once)
            if last is not None:
                before_last()
                self._files.put_file(f"{folder}/{last}", local / last)

    def download_folder(self, folder: str, local: str | Path, *, only: Iterable[str] | None = None) -> None:
        """Copies files of a folder to a local one. Raises: NotFound: the folder is empty, or lacks one of `only`.

        only: paths inside the folder; None: all. Of all, files with names that lead out of the local folder are left
        out; in `only`, such a name raises UnsafePath.
        """
        paths = self.list(folder) if only is None else [check_path(f"{folder}/{name}") for name in sorted(only)]
        if not paths and only is None:
            raise NotFound(f"cannot download {self._where(folder)}: it does not exist")

        def download(path: str) -> None:
            target = inside(Path(local), path.removeprefix(f"{folder}/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._errors(f"download to {local}", path):
                self._files.get_file(path, target)

        transfer_all(download, paths)

    def local_path(self, path: str) -> Path | None:
        """The path of a file or folder on this machine; None: the store is elsewhere."""
        return self._files.local_path(check_path(path))

    def arrow_filesystem(self) -> tuple[pyarrow.fs.FileSystem, str]:
        """For pyarrow.dataset: the filesystem and the run's folder in it. Its errors are Arrow's: see `scans`."""
        return self._files.arrow_filesystem()

    def scan(self, read: Callable):
        """Returns read(), which uses arrow_filesystem, with the repeats and the errors of all other operations."""

        def try_once():
            try:
                return read()
            except Exception as error:
                if not is_without_reason(error):
                    raise
                self._files.exists("run.json")  # raises the reason, if every request is refused
                return read()

        with _store_errors("read files of", f"run {self.run} in {self.url}"):
            return patiently(try_once, f"read files of run {self.run}", self._files.patience_s, self._files.renew)

    def check_writable(self) -> str | None:
        """Writes, reads and removes a probe beside the runs. Returns a warning if the store has no create-if-absent.

        Raises: StoreUnreachable: that failed, which takes seconds.
        """
        files, probe = self._backend(self._store_root, _PROBE_PATIENCE_S), f".probe-{uuid.uuid4().hex}"
        try:
            with self._errors("write", probe):
                exclusive = files.is_exclusive(probe)
        except StoreError as error:
            raise StoreUnreachable(f"store: cannot write to {self.url}. {error}") from error
        if exclusive:
            return None
        return (
            f"store: {self.url} does not honour create-if-absent (If-None-Match on PUT). If two processes "
            "write one shard, ledger entry or attempt at the same moment, the later replaces the earlier silently; "
            "neither counts twice. Never start two Trainers of one run, or two Searchers of one name, at once. AWS S3, "
            "Ceph's radosgw, MinIO and a local folder honour it."
        )

    def recorded_config(self) -> bytes:
        """run.json, before a run begins. NotFound: there is no such run; another StoreError after seconds."""
        with self._errors("read", "run.json"):
            return self._backend(f"{self._store_root}/{self.run}", _PROBE_PATIENCE_S).get("run.json")

    def create_run(self, config: dict, read: Callable[[bytes], dict] = json.loads) -> dict:
        """Records the configuration (JSON values) of a new run, or checks that an existing run has the same one.

        read: parses a run.json, which an older version may have written. Returns the recorded configuration.
        Raises: RunConfigMismatch: the message names every setting that differs. DamagedRecord: run.json cannot be read.
        """
        try:
            self.put_new("run.json", json.dumps(config, indent=2, sort_keys=True).encode())
        except AlreadyExists:
            self.check_config(config, read)
        return self.read_json("run.json")

    def check_config(self, config: dict, read: Callable[[bytes], dict] = json.loads) -> None:
        """Checks that the run, if it exists, has this configuration.

        Raises: RunConfigMismatch: the message names every setting that differs. DamagedRecord: run.json cannot be read.
        """
        if not self.exists("run.json"):
            return
        try:
            recorded = read(self.get("run.json"))
        except ValueError as error:
            raise DamagedRecord(
                f"cannot read {self._where('run.json')}: it has no settings of a run ({error}). {RESTORE}"
            ) from error
        if differences := list(_differences(recorded, json.loads(json.dumps(config)))):
            raise RunConfigMismatch(
                f"run {self.run!r} exists in {self.url} with another configuration: {'; '.join(differences)}. "
                "To resume it, leave these settings out: it keeps its own (`tba searchers` changes the number of "
                "Searchers). To use its trajectories with other settings: "
                f"`{self.command(f'train NEW --warm-start {self.run}')}`, with the same --model and --task."
            )

    def command(self, text: str) -> str:
        """`tba TEXT` for a message: with the store, unless that is the default one of this process."""
        return f"tba {text}" if self.url == default_store() else f"tba {text} --store {self.url}"

    def _where(self, path: str) -> str:
        return f"{path} (run {self.run} in {self.url})"

    @contextmanager
    def _errors(self, action: str, path: str) -> Iterator[None]:
        """Turns backends' exceptions into StoreErrors. Raises: UnsafePath: the path leads out of the run."""
        check_path(path)
        with _store_errors(action, self._where(path)):
            yield


def _json(value: object) -> bytes:
    return json.dumps(asdict(value) if is_dataclass(value) else value, indent=2).encode()


def scans(function: Callable) -> Callable:
    """A decorator: runs a function of a RunStore, which uses its arrow_filesystem, by RunStore.scan."""

    @functools.wraps(function)
    def scanning(store: RunStore, *arguments, **named):
        return store.scan(lambda: function(store, *arguments, **named))

    return scanning


def list_runs(url: str) -> list[str]:
    """Names of the runs in a store, sorted. Other folders are left out."""
    backend, root = _backend_of(url)
    with _store_errors("list", url):
        names = [name for name in backend(root).folders("") if _RUN_NAME.fullmatch(name)]
        are_runs = transfer_all(lambda name: _may_be_run(backend(f"{root}/{name}")), names)
    return [name for name, is_run in zip(names, are_runs, strict=True) if is_run]


def _may_be_run(files: LocalFolder | S3Prefix) -> bool:
    """Whether a folder has a run.json. One that may not be looked at is a run: its own status has the reason."""
    try:
        return files.exists("run.json")
    except (PermissionError, UnsafePath):
        return True


def read_url(url: str) -> bytes:
    """The content of a file anywhere in a store, by its URL. Raises: NotFound."""
    backend, path = _backend_of(url)
    path = str(Path(path).resolve()) if backend is LocalFolder else path  # files of the Hub's cache are links
    root, _, name = path.rpartition("/")
    root = root or "/"
    with _store_errors("read", url):
        return backend(root).get(name)


def _backend_of(url: str) -> tuple[type, str]:
    """The backend class for a store's URL, and the root in the backend's form."""
    scheme, root = parse_store_url(url)
    return _BACKENDS[scheme], root


@contextmanager
def _store_errors(action: str, where: str) -> Iterator[None]:
    """Turns backends' exceptions into StoreErrors."""
    try:
        yield
    except Exception as error:
        if translated := translate(error, action, where):
            raise translated from error
        raise


def _differences(recorded: object, wanted: object, key: str = "") -> Iterator[str]:
    """`dotted.key is A, but B is given`, for every setting that differs."""
    if isinstance(recorded, dict) and isinstance(wanted, dict):
        for name in sorted(recorded.keys() | wanted.keys()):
            yield from _differences(recorded.get(name), wanted.get(name), f"{key}.{name}" if key else name)
    elif recorded != wanted:
        yield f"{key} is {recorded!r}, but {wanted!r} is given"
