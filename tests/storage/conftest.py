"""Fixtures that several tests of storage share."""

import time

import pytest

from storage.policies import policy_ref, publish_policy
from storage.store import RunStore


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
