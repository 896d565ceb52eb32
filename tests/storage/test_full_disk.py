"""Claims about temporary files without room or number. Run: pytest tests/storage/test_full_disk.py

- a policy whose policy.json does not fit is published once there is room
- a sync whose trajectories do not fit in the word file ends once there is room, and nothing of them is lost
- the wait for the word file ends with an error that says what could not be written, where, and the remedy
- a word file may have more segments than the process could open files at first
"""

import resource
import threading

import numpy as np
import pytest

from storage import word_file
from storage.buffer import ReplayBuffer
from storage.errors import StoreFull
from storage.mop import SamplingSettings
from storage.policies import latest_policy, policy_ref, publish_policy
from storage.shards import commit_shard
from storage.word_file import WordFile
from tests.storage.helpers import make_shard

SAMPLING = SamplingSettings(prompts_per_batch=2, responses_per_prompt=2, min_size=1)


def fill(ballast) -> None:
    with open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def test_a_policy_is_published_once_there_is_room(small_disk, moto_store):
    folder, ballast = small_disk, small_disk / "ballast"
    policy = folder / "policy"
    policy.mkdir()
    (policy / "model.safetensors").write_bytes(b"w" * 1000)
    fill(ballast)
    threading.Timer(1.0, ballast.unlink).start()
    ref = publish_policy(moto_store, policy, policy_ref(4, "f" * 32, attempt=1))
    assert latest_policy(moto_store) == ref
    assert moto_store.read_json(f"{ref.path}/policy.json")["files"] == {"model.safetensors": 1000}


@pytest.mark.slow
def test_a_sync_ends_once_there_is_room(small_disk, local_store):
    ballast = small_disk / "ballast"
    for number in range(2):
        commit_shard(local_store, make_shard("s0", number, response_tokens=list(range(2000)), **LOGPROBS))
    whole, buffer = ReplayBuffer(local_store, SAMPLING, seed=0), ReplayBuffer(local_store, SAMPLING, seed=0)
    whole.sync(1, attempt=1)
    local_store.delete("syncs/attempt=00000001/sync=00000001.parquet")
    fill(ballast)
    threading.Timer(1.0, ballast.unlink).start()
    assert buffer.sync(1, attempt=1).num_trajectories == 8
    assert buffer.draw(1).equals(whole.draw(1))


LOGPROBS = {name: [-0.5] * 2000 for name in ("behavior_logprobs", "reference_logprobs")}


def test_the_wait_ends_with_cause_and_remedy(small_disk, monkeypatch):
    folder, ballast = small_disk, small_disk / "ballast"
    words = WordFile()
    fill(ballast)
    monkeypatch.setenv("TBA_STORE_PATIENCE_MINUTES", "0.01")
    with pytest.raises(StoreFull, match=f"cannot write the replay buffer's word file to {folder}: no room .* TMPDIR"):
        words.append(make_shard())


def test_a_word_file_raises_the_limit_of_open_files(monkeypatch):
    monkeypatch.setattr(word_file, "SEGMENT_BYTES", 1)  # each shard fills one
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words, shards = WordFile(), [make_shard("s0", number) for number in range(300)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        records = np.concatenate([words.append(shard)["record"] for shard in shards])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert words.num_filled == 299
    expected = [tokens for shard in shards for tokens in shard["response_tokens"].to_pylist()]
    assert words.read(records)["response_tokens"].to_pylist() == expected
