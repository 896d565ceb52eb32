"""Checkpoints that are torn, or have other bytes (storage/checkpoints.py). pytest tests/storage/test_checkpoints.py

- a resume takes the newest whole one; a warning and verify name each torn one
- other bytes of the same number are found by the files' digests: at the download before a resume, and by verify
- the upload of one leaves room for other requests
- torn ones do not use up the number of kept ones
- where the store cannot tell which are whole, nothing is deleted and nothing is passed over
"""

import json
import logging
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from storage import attempts, checkpoints
from storage.errors import DamagedCheckpoint, StoreError
from storage.store import RunStore
from storage.verify import verify
from tests.storage.helpers import OWNER

NEWEST = checkpoints.checkpoint_path(100, 1)
WEIGHTS = f"{NEWEST}/trainer.safetensors"


def save(store: RunStore, tmp_path, step: int) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir(exist_ok=True)
    save_file({"weight": np.zeros(64, np.float32)}, folder / "trainer.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": step}))
    checkpoints.save_checkpoint(store, step, folder, attempt=1)


@pytest.fixture
def run(store, tmp_path) -> RunStore:
    store.put("run.json", b"{}")
    attempts.start_attempt(store, 0, OWNER)
    for step in (50, 100):
        save(store, tmp_path, step)
    return store


TORN = {
    "weights cut short": (lambda s: s.put(WEIGHTS, s.get(WEIGHTS)[:-1]), WEIGHTS),
    "weights cut in the header": (lambda s: s.put(WEIGHTS, s.get(WEIGHTS)[:20]), WEIGHTS),
    "weights of 0 bytes": (lambda s: s.put(WEIGHTS, b""), WEIGHTS),
    "another program's file": (lambda s: s.put(WEIGHTS, b"\xff" * 400), WEIGHTS),
    "no weights": (lambda s: s.delete(WEIGHTS), NEWEST),
    "weights of one file of two": (
        lambda s: s.put(f"{NEWEST}/state.json", b'{"step": 100, "num_files": 2}'),
        NEWEST,
    ),
    "state.json of 0 bytes": (lambda s: s.put(f"{NEWEST}/state.json", b""), NEWEST),
    "state.json cut short": (lambda s: s.put(f"{NEWEST}/state.json", b'{"ste'), NEWEST),
    "another program's state.json": (lambda s: s.put(f"{NEWEST}/state.json", b"[1]"), NEWEST),
    "state.json of another step": (lambda s: s.put(f"{NEWEST}/state.json", b'{"step": 50}'), NEWEST),
}


@pytest.mark.parametrize("name", TORN)
def test_a_resume_takes_the_newest_whole_checkpoint(run, caplog, name):
    tear, path = TORN[name]
    assert checkpoints.newest_whole_checkpoint(run).step == 100
    tear(run)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest_whole_checkpoint(run).step == 50
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "storage.checkpoints"]
    assert path in warning and run.url in warning
    assert [(fault.kind, fault.path) for fault in verify(run, None).faults if "checkpoint" in fault.kind] == [
        ("damaged checkpoint", path)
    ]


def test_other_bytes_are_found_by_their_digest(run, tmp_path):
    found = checkpoints.newest_whole_checkpoint(run)
    checkpoints.download_checkpoint(run, found, tmp_path / "whole")
    assert (tmp_path / "whole/trainer.safetensors").read_bytes() == run.get(WEIGHTS)
    assert verify(run, None).faults == []
    run.put(WEIGHTS, run.get(WEIGHTS)[:-1] + b"\1")
    with pytest.raises(DamagedCheckpoint, match=rf"{NEWEST} of run {run.run} in .* trainer.safetensors"):
        checkpoints.download_checkpoint(run, found, tmp_path / "damaged")
    assert checkpoints.newest_whole_checkpoint(run, damaged=[found]).step == 50
    assert [(fault.kind, fault.path) for fault in verify(run, None).faults] == [("damaged checkpoint", WEIGHTS)]


def test_a_wrong_answer_is_asked_for_again(run, tmp_path, monkeypatch):
    get_file, asked = run._files.get_file, []

    def shortened(path, local):
        get_file(path, local)
        asked.append(path)
        if asked.count(path) == 1 and path == WEIGHTS:
            Path(local).write_bytes(bytes(Path(local).stat().st_size))

    monkeypatch.setattr(run._files, "get_file", shortened)
    checkpoints.download_checkpoint(run, checkpoints.newest_whole_checkpoint(run), tmp_path / "copy")
    assert (tmp_path / "copy/trainer.safetensors").read_bytes() == run.get(WEIGHTS)
    assert asked.count(WEIGHTS) == 2


def test_a_file_that_is_missing_is_found_by_its_digest(run, tmp_path):
    """alarms.json has no tensors, so no header tells that it is missing."""
    alarms = f"{checkpoints.checkpoint_path(150, 1)}/alarms.json"
    (tmp_path / "checkpoint/alarms.json").write_text("{}")
    save(run, tmp_path, 150)
    run.delete(alarms)
    with pytest.raises(DamagedCheckpoint, match=r"is damaged: alarms\.json"):
        checkpoints.download_checkpoint(run, checkpoints.newest_whole_checkpoint(run), tmp_path / "copy")
    assert [(fault.path, fault.message) for fault in verify(run, None).faults] == [(alarms, "it is missing")]


def test_a_checkpoint_of_an_older_version_has_no_digests(run, tmp_path):
    run.put(f"{NEWEST}/state.json", b'{"step": 100}')
    checkpoints.download_checkpoint(run, checkpoints.newest_whole_checkpoint(run), tmp_path / "copy")
    assert verify(run, None).faults == []


def test_as_many_files_are_uploaded_at_once_as_there_are_cores(run, tmp_path, monkeypatch):
    """More of them would take the requests of the same process longer."""
    now, most, put_file = [], [], run._files.put_file

    def counted(path, local) -> None:
        now.append(path)
        most.append(len(now))
        time.sleep(0.01)
        put_file(path, local)
        now.remove(path)

    for number in range(9):
        (tmp_path / f"checkpoint/more-{number}.safetensors").write_bytes(b"any")
    monkeypatch.setattr(checkpoints, "_UPLOADS", 2)
    monkeypatch.setattr(run._files, "put_file", counted)
    save(run, tmp_path, 150)
    assert max(most) == 2


def test_torn_checkpoints_do_not_push_whole_ones_out(run, tmp_path):
    run.put(WEIGHTS, b"")
    save(run, tmp_path, 150)
    checkpoints.delete_checkpoints(run, keep=2, attempt=1)
    assert [found.step for found in checkpoints.list_checkpoints(run)] == [50, 100, 150]
    save(run, tmp_path, 200)
    checkpoints.delete_checkpoints(run, keep=2, attempt=1)
    assert [found.step for found in checkpoints.list_checkpoints(run)] == [150, 200]


def test_a_store_that_refuses_is_no_torn_checkpoint(run, monkeypatch):
    class Refusing:
        def open_input_file(self, path):
            raise OSError(f"access denied: {path}")

    monkeypatch.setattr(run, "arrow_filesystem", lambda: (Refusing(), "base"))
    with pytest.raises(StoreError, match=f"access denied: base/{WEIGHTS}"):
        checkpoints.newest_whole_checkpoint(run)
    checkpoints.delete_checkpoints(run, keep=1, attempt=1)
    assert len(checkpoints.list_checkpoints(run)) == 2
