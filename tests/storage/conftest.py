"""Fixtures that several tests of storage share."""

import time
from collections import Counter
from pathlib import Path

import pytest

from storage import file_delta, policy_delta
from storage.policies import policy_ref, publish_policy
from storage.store import RunStore
from tests.faults.memory_store import memory_store
from tests.storage.travelling import Trainer


@pytest.fixture
def publish(tmp_path):
    """publish(store, step, attempt=1, …) publishes a policy of two files."""

    def publish(store: RunStore, step: int, attempt: int = 1, weights: str = "w", cache_dir=None, final=False):
        folder = tmp_path / f"policy-{time.monotonic_ns()}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text(weights * (1000 + step))
        ref = policy_ref(step, f"{weights}{step:031d}", attempt=attempt, final=final)
        return publish_policy(store, folder, ref, cache_dir)

    return publish


@pytest.fixture
def memory_run() -> RunStore:
    """A new run in a store in memory, which is remote: its files have no path here."""
    return memory_store()


@pytest.fixture
def small_chunks(monkeypatch):
    """Small chunks and pieces, so that a file has several, the last one shorter."""
    monkeypatch.setattr(file_delta, "_CHUNK_BYTES", 10_000)
    monkeypatch.setattr(file_delta, "_PIECE_BYTES", 3_000)


@pytest.fixture
def anchors(monkeypatch):
    """Every eighth policy is whole, so that a short chain suffices."""
    monkeypatch.setattr(policy_delta, "ANCHOR_EVERY", 8)


@pytest.fixture
def trainer(memory_run, small_chunks, anchors, tmp_path) -> Trainer:
    return Trainer(memory_run, tmp_path / "trainer")


@pytest.fixture
def downloads(memory_run, monkeypatch) -> Counter:
    """How often each file was downloaded."""
    found, get_file = Counter(), memory_run._files.get_file

    def counted(path: str, local: Path) -> None:
        found[path.removeprefix("policies/step=000000")] += 1
        get_file(path, local)

    monkeypatch.setattr(memory_run._files, "get_file", counted)
    return found
