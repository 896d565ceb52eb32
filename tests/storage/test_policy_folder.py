"""The cache of policies on a machine (storage/policy_folder.py). Run: pytest tests/storage/test_policy_folder.py

- a copy that was cut short, lost a file or has a damaged policy.json is removed and fetched anew
- processes that need a policy at once download it once; one that is killed meanwhile keeps nobody waiting
- only a policy that is damaged in the store is called damaged
"""

import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.errors import DamagedPolicy
from storage.policies import PolicyRef, drop_cached_policy, fetch_policy, policy_ref, publish_policy
from storage.policy_folder import into_cache
from tests.storage.helpers import start_python

pytestmark = pytest.mark.s3  # a local store needs no copies

DAMAGES = {
    "cut short": lambda copy: (copy / "model.safetensors").write_text("wei"),
    "0 bytes": lambda copy: (copy / "model.safetensors").write_text(""),
    "without a file": lambda copy: (copy / "config.json").unlink(),
    "manifest of 0 bytes": lambda copy: (copy / "policy.json").write_text(""),
    "foreign manifest": lambda copy: (copy / "policy.json").write_text("[]"),
    "without its manifest": lambda copy: (copy / "policy.json").unlink(),
}


# A process that downloads for ever.
DOWNLOADING = """
import sys, time
from pathlib import Path
from storage.policy_folder import into_cache

def fill(folder):
    print("downloading", flush=True)
    time.sleep(600)

into_cache(Path(sys.argv[1]), fill)
"""


def write_policy(folder: Path) -> None:
    """A policy's files and their list."""
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    files = {"config.json": 2, "model.safetensors": 7}
    (folder / "policy.json").write_text(json.dumps({"step": 4, "fingerprint": "f", "attempt": 1, "files": files}))


@pytest.fixture
def published(moto_store, tmp_path) -> PolicyRef:
    (tmp_path / "policy").mkdir()
    write_policy(tmp_path / "policy")
    return publish_policy(moto_store, tmp_path / "policy", policy_ref(4, "f" * 32, attempt=1))


def whole(copy: Path) -> bool:
    return (copy / "model.safetensors").read_text() == "weights" and (copy / "config.json").exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_fetched_anew(moto_store, published, tmp_path, damage, caplog):
    copy = fetch_policy(moto_store, published, tmp_path / "cache")
    DAMAGES[damage](copy)
    with caplog.at_level(logging.WARNING):
        assert fetch_policy(moto_store, published, tmp_path / "cache") == copy and whole(copy)
    assert str(copy) in caplog.text and "fetched again" in caplog.text
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [copy.name]


def test_a_policy_damaged_in_the_store_is_called_damaged(moto_store, published, tmp_path):
    copy = fetch_policy(moto_store, published, tmp_path / "cache")
    (copy / "model.safetensors").write_text("wei")
    moto_store.put(f"{published.path}/model.safetensors", b"ha")
    with pytest.raises(DamagedPolicy, match=r"model.safetensors has 2 bytes, but 7 were published"):
        fetch_policy(moto_store, published, tmp_path / "cache")
    moto_store.put(f"{published.path}/policy.json", b"")
    with pytest.raises(DamagedPolicy, match=r"policy.json cannot be read"):
        fetch_policy(moto_store, published, tmp_path / "cache")


def test_a_copy_can_be_dropped(moto_store, published, tmp_path):
    assert not drop_cached_policy(published, tmp_path / "cache")
    copy = fetch_policy(moto_store, published, tmp_path / "cache")
    assert drop_cached_policy(published, tmp_path / "cache") and not copy.exists()
    assert whole(fetch_policy(moto_store, published, tmp_path / "cache"))


def test_of_eight_processes_one_downloads(tmp_path):
    """Threads here: as with processes, each has opened the lock for itself."""
    downloads = []

    def fill(folder: Path) -> None:
        downloads.append(folder)
        time.sleep(0.5)  # the others come meanwhile
        write_policy(folder)

    with ThreadPoolExecutor(8) as pool:
        copies = list(pool.map(lambda _: into_cache(tmp_path / "cache" / "step=00000004", fill), range(8)))
    assert len(downloads) == 1 and set(copies) == {tmp_path / "cache" / "step=00000004"} and whole(copies[0])
    assert os.listdir(tmp_path / "cache") == ["step=00000004"]


def test_a_download_that_is_killed_keeps_nobody_waiting(tmp_path):
    cached = tmp_path / "cache" / "step=00000004"
    killed = start_python(DOWNLOADING, str(cached))
    assert killed.stdout.readline() == "downloading\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(into_cache, cached, write_policy)
        time.sleep(0.5)
        assert not waiting.done()
        killed.kill()
        killed.communicate()
        assert whole(waiting.result(timeout=60))
