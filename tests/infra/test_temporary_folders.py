"""Claims about infra/temporary_folders.py. Run: pytest tests/infra/test_temporary_folders.py

- a temporary folder on a full disk is waited for, whichever library found it full; nothing half-written stays
- a folder for files of a known size is in memory if that has room for four times as much, also by a container's limit
- the wait ends with an error that names folder, cause and remedy; another error is raised at once
- what killed Trainers of a run left is removed, and what other runs left in memory a day ago; a living one's
  stays, and one's of another container for a day
"""

import errno
import os
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from infra import memory, temporary_folders
from storage.errors import StoreFull

WRITES = {
    "bytes": lambda folder: (folder / "file").write_bytes(bytes(700_000)),
    "safetensors": lambda folder: save_file({"a": torch.zeros(175_000)}, folder / "file"),
}


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES)
def test_a_full_temporary_folder_is_waited_for(small_disk, monkeypatch, caplog, write):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1 << 19))
    threading.Timer(1.5, ballast.unlink).start()
    with temporary_folders.filled_folder("checkpoint", "run", WRITES[write]) as folder:
        assert (Path(folder) / "file").stat().st_size >= 700_000
    assert "cannot write a checkpoint of run run to" in caplog.text and "retrying" in caplog.text
    monkeypatch.setenv("TBA_STORE_PATIENCE_MINUTES", "0")
    ballast.write_bytes(bytes(1 << 19))
    with pytest.raises(StoreFull, match=rf"cannot write a policy of run run to {small_disk}: no room is left.*TMPDIR"):
        temporary_folders.filled_folder("policy", "run", WRITES[write])
    assert list(small_disk.iterdir()) == [ballast]


def test_a_folder_of_a_known_size_is_in_memory_if_there_is_room(tmp_path, monkeypatch):
    in_memory, disk = tmp_path / "memory", tmp_path / "disk"
    monkeypatch.setattr(temporary_folders, "MEMORY_FOLDER", in_memory)
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    disk.mkdir()

    def place(num_bytes: int | None) -> Path:
        with temporary_folders.filled_folder("checkpoint", "run", WRITES["bytes"], num_bytes) as folder:
            return Path(folder).parent

    assert place(1000) == disk  # no system without such a folder is refused
    in_memory.mkdir()
    assert (place(None), place(1000)) == (disk, in_memory)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=3999))
    assert place(1000) == disk
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=4000))
    assert place(1000) == in_memory
    monkeypatch.setattr(memory, "memory_limits", lambda: iter([(9999, 9000), (9999, 3999)]))
    assert place(1000) == disk


@pytest.mark.parametrize("error", [ValueError("no such tensor"), OSError(errno.EACCES, "denied"), KeyError("x")])
def test_another_error_is_raised_at_once(error):
    tries = []

    def fill(folder):
        tries.append(folder)
        raise error

    with pytest.raises(type(error)):
        temporary_folders.filled_folder("policy", "run", fill)
    assert len(tries) == 1 and not tries[0].exists()


def test_what_killed_trainers_of_the_run_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    of_container, forgotten = (tmp_path / f"tba-checkpoint-mine@{ended.pid}.{number}-abc" for number in (1, 2))
    of_container.mkdir()
    forgotten.mkdir()
    os.utime(forgotten, (0, 0))
    for pid, run in ((ended.pid, "mine"), (ended.pid, "mine.2"), (ended.pid, "not-mine"), (os.getpid(), "mine")):
        for kind in ("checkpoint", "policy", "resume"):
            (tmp_path / f"tba-{kind}-{run}@{pid}.{namespace}-abc").mkdir()
    (tmp_path / "tba-words-mine").mkdir()
    memory_folder = tmp_path / "memory"
    monkeypatch.setattr(temporary_folders, "MEMORY_FOLDER", memory_folder)
    in_memory = [
        memory_folder / f"tba-checkpoint-{name}@{ended.pid}.{namespace}-abc" for name in ("mine", "old", "new")
    ]
    for folder in in_memory:
        folder.mkdir(parents=True)
    os.utime(in_memory[1], (0, 0))
    temporary_folders.remove_leftovers("mine")
    assert [folder.exists() for folder in in_memory] == [False, False, True]
    shutil.rmtree(memory_folder)
    gone = {tmp_path / f"tba-{kind}-mine@{ended.pid}.{namespace}-abc" for kind in ("checkpoint", "policy", "resume")}
    assert of_container.exists() and not forgotten.exists(), "its process cannot be looked up"
    assert len(list(tmp_path.iterdir())) == 11 and not gone & set(tmp_path.iterdir())
    with temporary_folders.temporary_folder("checkpoint", "mine") as folder:
        temporary_folders.remove_leftovers("mine")
        assert Path(folder).is_dir()
