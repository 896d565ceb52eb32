"""Claim: a Searcher killed while it fetches a policy never serves mixed weights (storage/policies.py, tba/weights.py).

A real process is killed with SIGKILL in the middle of a download; whoever starts next serves the old policy or the new
one, each whole: the fingerprint of the weights is the published one.

python -m pytest tests/flows/searcher/test_torn_policy.py
"""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from storage.policies import PolicyRef, fetch_policy, policy_ref, publish_policy
from storage.store import RunStore
from tba.weights import fingerprint, read_weights

NUM_FILES, FILE_MB = 8, 8
FETCH = """
import json, sys
from storage.policies import fetch_policy, latest_policy
from storage.store import RunStore
url, run, cache = sys.argv[1:]
store = RunStore(url, run)
fetch_policy(store, latest_policy(store), cache)
"""


def publish(store: RunStore, step: int, folder: Path) -> PolicyRef:
    """A policy whose every weight is its step."""
    folder.mkdir()
    for number in range(NUM_FILES):
        weight = torch.full((FILE_MB * 2**18,), float(step))
        save_file({f"weight.{number}": weight}, folder / f"model-{number}.safetensors")
    return publish_policy(store, folder, policy_ref(step, fingerprint(read_weights(folder)), attempt=1))


def fetched_bytes(cache: Path) -> int:
    """Of a fetch that is not complete."""
    with contextlib.suppress(FileNotFoundError):  # completed while this looks
        return sum(file.stat().st_size for file in cache.glob(".tmp-*/*"))
    return 0


def killed_while_it_fetches(store: RunStore, cache: Path) -> bool:
    """Whether the kill came when something was there and not all."""
    fetching = subprocess.Popen([sys.executable, "-c", FETCH, store.url, store.run, str(cache)])
    try:
        deadline = time.monotonic() + 120
        while not fetched_bytes(cache) and fetching.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
    finally:
        fetching.kill()
        fetching.wait()
    return fetched_bytes(cache) > 0


@pytest.mark.s3
def test_a_searcher_killed_during_a_fetch_never_serves_mixed_weights(moto_store, tmp_path):
    cache = tmp_path / "cache"
    old = publish(moto_store, 1, tmp_path / "old")
    fetch_policy(moto_store, old, cache)
    new = publish(moto_store, 2, tmp_path / "new")
    assert killed_while_it_fetches(moto_store, cache), "the kill came too late to test anything"
    visible = [folder for folder in cache.iterdir() if not folder.name.startswith(".tmp-")]
    assert [fingerprint(read_weights(folder)) for folder in visible] == [old.fingerprint]
    for policy in (old, new):  # what the next start serves, whichever it is told of
        assert fingerprint(read_weights(fetch_policy(moto_store, policy, cache))) == policy.fingerprint
