"""A Trainer's state as files (tba/saved_state.py).

- What is read is what was written, in as many files as its size needs, and state.json has their number.
- In writing only the tensors of a few files are in memory at a time.
- A file that cannot be written ends in its error, without the state.json that makes a checkpoint complete.
- The checkpoint of an older version is read.

Run: pytest tests/tba/test_saved_state.py
"""

import json
import weakref

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tba import saved_state
from tba.saved_state import SavedState, write_state

BYTES = 4 * 256  # of a tensor here


def test_what_is_read_is_what_was_written_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_state, "FILE_BYTES", 3 * BYTES)
    tensors = {f"policy.{number}": torch.randn(16, 16) for number in range(7)} | {"step.0": torch.tensor(5.0)}
    tensors["policy.view"] = torch.randn(16, 16).T  # safetensors wants it in order
    write_state(tmp_path, 5, tensors.items())
    state = SavedState(tmp_path)
    assert state.step == 5 and state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == ["trainer-00000.safetensors", "trainer-00001.safetensors", "trainer-00002.safetensors"]
    assert json.loads((tmp_path / "state.json").read_text()) == {"step": 5, "num_files": 3, "skipped_in_a_row": 0}


def test_tensors_of_a_few_files_are_in_memory_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_state, "FILE_BYTES", 3 * BYTES)
    monkeypatch.setattr(saved_state, "NUM_WRITERS", 2)
    memory, most = [], 0  # of each tensor, whatever views of it there are

    def each():
        nonlocal most
        for number in range(40):
            array = np.zeros((16, 16), np.float32)
            memory.append(weakref.ref(array))
            most = max(most, sum(each() is not None for each in memory))
            yield str(number), torch.from_numpy(array)

    write_state(tmp_path, 1, each())
    assert most <= 2 * 3 + 1  # those of two files, and the one that is being made


def test_a_file_that_cannot_be_written_ends_in_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_state, "FILE_BYTES", BYTES)
    (tmp_path / "trainer-00002.safetensors").mkdir()
    with pytest.raises((SafetensorError, OSError), match=r"trainer-00002|[Ii]s a directory"):
        write_state(tmp_path, 5, ((str(number), torch.ones(16, 16)) for number in range(9)))
    assert not (tmp_path / "state.json").exists()


def test_a_checkpoint_of_an_older_version_is_read(tmp_path):
    save_file({"policy.a": torch.ones(3)}, tmp_path / "trainer.safetensors")
    (tmp_path / "state.json").write_text('{"step": 7}')
    state = SavedState(tmp_path)
    assert state.step == 7 and state["policy.a"].tolist() == [1, 1, 1] and "policy.b" not in state
