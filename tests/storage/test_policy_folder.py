"""The cache of policies on a machine (storage/policy_folder.py). Run: pytest tests/storage/test_policy_folder.py

- a copy that was cut short, lost a file or has a damaged policy.json is removed and fetched anew
- only a policy that is damaged in the store is called damaged
"""

import logging
from pathlib import Path

import pytest

from storage.errors import DamagedPolicy
from storage.policies import PolicyRef, drop_cached_policy, fetch_policy, policy_ref, publish_policy

pytestmark = pytest.mark.s3  # a local store needs no copies

DAMAGES = {
    "cut short": lambda copy: (copy / "model.safetensors").write_text("wei"),
    "0 bytes": lambda copy: (copy / "model.safetensors").write_text(""),
    "without a file": lambda copy: (copy / "config.json").unlink(),
    "manifest of 0 bytes": lambda copy: (copy / "policy.json").write_text(""),
    "foreign manifest": lambda copy: (copy / "policy.json").write_text("[]"),
    "without its manifest": lambda copy: (copy / "policy.json").unlink(),
}


@pytest.fixture
def published(moto_store, tmp_path) -> PolicyRef:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "policy" / "model.safetensors").write_text("weights")
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
