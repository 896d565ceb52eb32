"""A store in memory, for tests that read thousands of inputs: a folder's fsync would take most of their time."""

from collections.abc import Callable
from pathlib import Path

import pyarrow.fs

from storage.store import RunStore


class MemoryFiles:
    """The interface of storage/local_folder.py over a dictionary."""

    patience_s = 0.0

    def __init__(self):
        self.data: dict[str, bytes] = {}

    def renew(self) -> None:
        """No credentials."""

    def put(self, path: str, data: bytes, check: Callable[[], object]) -> None:
        check()
        self.data[path] = data

    def put_new(self, path: str, data: bytes) -> None:
        if path in self.data:
            raise FileExistsError(path)
        self.data[path] = data

    def put_file(self, path: str, local: Path) -> None:
        self.data[path] = local.read_bytes()

    def get(self, path: str) -> bytes:
        if path not in self.data:
            raise FileNotFoundError(path)
        return self.data[path]

    def get_fast(self, path: str) -> None:
        """It has no faster way than `get`."""

    def get_file(self, path: str, local: Path) -> None:
        local.write_bytes(self.get(path))

    def exists(self, path: str) -> bool:
        return path in self.data

    def files(self, folder: str, start_after: str) -> list[str]:
        inside = f"{folder}/" if folder else ""
        return sorted(path for path in self.data if path.startswith(inside) and path > start_after)

    def folders(self, folder: str) -> list[str]:
        rest = (path.removeprefix(f"{folder}/") for path in self.files(folder, ""))
        return sorted({path.split("/")[0] for path in rest if "/" in path})

    def delete(self, path: str) -> None:
        self.data.pop(path, None)

    def delete_folder(self, folder: str) -> None:
        for path in self.files(folder, ""):
            del self.data[path]

    def arrow_filesystem(self) -> tuple[pyarrow.fs.FileSystem, str]:
        """A copy of the files, in Arrow's own memory."""
        filesystem, _ = pyarrow.fs.FileSystem.from_uri("mock://")
        for path, data in self.data.items():
            filesystem.create_dir(f"run/{path}".rpartition("/")[0])
            with filesystem.open_output_stream(f"run/{path}") as file:
                file.write(data)
        return filesystem, "run"

    def local_path(self, path: str) -> None:
        return None


def memory_store() -> RunStore:
    """A new run without files. Each call returns another."""
    store = RunStore("file:///memory", "run")
    store._files = MemoryFiles()
    return store
