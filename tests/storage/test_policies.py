"""Claims about storage/policies.py, on a local folder and on S3. Run: pytest tests/storage/test_policies.py

- the pointer names a policy only after every file of it is there
- what is fetched is what was published; on this machine without a copy, on the Trainer's without a download
- an interrupted download is never taken for a policy; a damaged one is refused; a pruned one is NotFound
- the cache keeps two, and tells runs of one name in different stores apart
- a later attempt publishes beside the earlier one's files, and an attempt that was superseded cannot publish
- pruning keeps the newest of the newest attempt, whatever their steps, and leaves no half policies
- of a pruned policy the fingerprint stays; pruning that was killed half-way is finished by the next
"""

import errno
import json
import os
import tempfile

import pytest

from storage.errors import DamagedPolicy, NotFound, StoreError, Superseded
from storage.file_delta import file_digest
from storage.kept_policies import prune_policies
from storage.policies import fetch_policy, latest_policy, published_policies
from storage.store import RunStore
from tests.storage.helpers import has_weights


def test_before_the_first_policy_there_is_none(store):
    assert latest_policy(store) is None


def test_what_is_fetched_is_what_was_published(store, publish, tmp_path):
    ref = publish(store, 40, final=True)
    assert latest_policy(store) == ref
    assert (ref.step, ref.path, ref.final, ref.attempt) == (40, "policies/step=00000040", True, 1)
    folder = fetch_policy(store, ref, tmp_path / "cache")
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "policy.json"]
    assert (folder / "model.safetensors").read_text() == "w" * 1040
    assert json.loads((folder / "policy.json").read_text()) == {
        "step": 40,
        "fingerprint": ref.fingerprint,
        "attempt": 1,
        "files": {"config.json": 2, "model.safetensors": 1040},
        "final": True,
    } | ({} if store.local_path("") else {"digests": {"model.safetensors": file_digest(folder / "model.safetensors")}})


def test_the_pointer_moves_only_when_everything_is_there(store, publish, monkeypatch):
    first = publish(store, 0)
    put_file = store._files.put_file

    def dies_at_the_weights(path, local):
        if path.endswith(".safetensors"):
            raise OSError("the network went away")
        put_file(path, local)

    monkeypatch.setattr(store._files, "put_file", dies_at_the_weights)
    with pytest.raises(StoreError, match="network went away"):
        publish(store, 2)
    assert latest_policy(store) == first
    assert not store.exists("policies/step=00000002/policy.json")


def test_a_local_store_serves_its_own_folder(local_store, publish, tmp_path):
    ref = publish(local_store, 4, cache_dir=tmp_path / "cache")
    assert fetch_policy(local_store, ref, tmp_path / "cache") == local_store.local_path("policies/step=00000004")
    assert not (tmp_path / "cache").exists()


@pytest.mark.s3
def test_a_fetched_policy_is_not_downloaded_again(s3_store, publish, tmp_path, monkeypatch):
    ref = publish(s3_store, 4)
    folder = fetch_policy(s3_store, ref, tmp_path / "cache")
    monkeypatch.setattr(s3_store, "download_folder", None)
    assert fetch_policy(s3_store, ref, tmp_path / "cache") == folder


@pytest.mark.s3
def test_on_the_machine_that_published_nothing_is_downloaded(s3_store, publish, tmp_path, monkeypatch):
    ref = publish(s3_store, 4, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(s3_store, "download_folder", None)
    assert (fetch_policy(s3_store, ref, tmp_path / "cache") / "model.safetensors").read_text() == "w" * 1004


@pytest.mark.s3
def test_what_is_published_is_not_copied_again(s3_store, publish, tmp_path):
    ref = publish(s3_store, 4, cache_dir=tmp_path / "cache")
    (published,) = tmp_path.glob("policy-*/model.safetensors")
    assert published.samefile(fetch_policy(s3_store, ref, tmp_path / "cache") / "model.safetensors")


@pytest.mark.s3
def test_on_another_filesystem_it_is_copied(s3_store, publish, tmp_path, monkeypatch):
    def another_filesystem(source, target):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", another_filesystem)
    ref = publish(s3_store, 4, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(s3_store, "download_folder", None)
    assert (fetch_policy(s3_store, ref, tmp_path / "cache") / "model.safetensors").read_text() == "w" * 1004


@pytest.mark.s3
def test_a_cache_without_room_does_not_hinder_publishing(s3_store, publish, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert publish(s3_store, 4, cache_dir=tmp_path / "cache") == latest_policy(s3_store)


@pytest.mark.s3
def test_a_full_disk_of_the_cache_does_not_hinder_publishing(s3_store, publish, small_disk, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # temporary files have room
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "ballast").write_bytes(bytes(2 << 20))
    assert publish(s3_store, 4, cache_dir=small_disk / "cache") == latest_policy(s3_store)
    assert "step=00000004" not in str(list((small_disk / "cache").iterdir()))


@pytest.mark.s3
def test_the_cache_keeps_the_newest_two_and_no_dead_downloads(s3_store, publish, tmp_path):
    cache = tmp_path / "cache"
    (cache / ".tmp-dead").mkdir(parents=True)
    os.utime(cache / ".tmp-dead", (0, 0))
    (cache / ".tmp-another-process").mkdir()
    for number, step in enumerate((2, 4, 6)):
        folder = fetch_policy(s3_store, publish(s3_store, step), cache)
        os.utime(folder, (number, number))  # in seconds: one file system is coarser than another
    assert sorted(path.name[:13] for path in cache.iterdir()) == [".tmp-another-", "step=00000004", "step=00000006"]


@pytest.mark.s3
def test_runs_of_one_name_in_different_stores_share_no_cache_entry(s3_url, publish, tmp_path):
    folders = []
    for place, weights in (("a", "x"), ("b", "y")):
        store = RunStore(f"{s3_url}/{place}", "run")
        folders.append(fetch_policy(store, publish(store, 0, weights=weights), tmp_path / "cache"))
    assert [(folder / "model.safetensors").read_text()[0] for folder in folders] == ["x", "y"]


@pytest.mark.s3
def test_an_interrupted_download_is_never_taken_for_a_policy(s3_store, publish, tmp_path, monkeypatch):
    ref = publish(s3_store, 4)
    get_file = s3_store._files.get_file

    def dies_at_the_weights(path, local):
        if path.endswith(".safetensors"):
            local.write_text("ha")
            raise OSError("the network went away")
        get_file(path, local)

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="network went away"):
        patch.setattr(s3_store._files, "get_file", dies_at_the_weights)
        fetch_policy(s3_store, ref, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []
    assert (fetch_policy(s3_store, ref, tmp_path / "cache") / "model.safetensors").read_text() == "w" * 1004


def test_a_damaged_policy_is_refused(store, publish, tmp_path):
    ref = publish(store, 4)
    store.put("policies/step=00000004/model.safetensors", b"ha")
    with pytest.raises(DamagedPolicy, match=r"model.safetensors has 2 bytes, but 1004 were published"):
        fetch_policy(store, ref, tmp_path / "cache")


def test_a_pruned_policy_is_not_found(store, publish, tmp_path):
    old = publish(store, 2)
    publish(store, 4)
    prune_policies(store, keep=1)
    with pytest.raises(NotFound, match="policies/step=00000002"):
        fetch_policy(store, old, tmp_path / "cache")


def test_a_policy_that_lost_a_file_is_not_found(store, publish, tmp_path):
    ref = publish(store, 2)
    store.delete("policies/step=00000002/config.json")
    with pytest.raises(NotFound, match=r"policies/step=00000002.*config\.json"):
        fetch_policy(store, ref, tmp_path / "cache")


def test_a_later_attempt_publishes_beside_and_supersedes(store, publish, tmp_path):
    first = publish(store, 40, weights="x")
    second = publish(store, 40, attempt=2, weights="y")
    assert second.path == "policies/step=00000040-a0002"
    assert [
        (fetch_policy(store, ref, tmp_path / "cache") / "model.safetensors").read_text()[0] for ref in (first, second)
    ] == ["x", "y"]
    with pytest.raises(Superseded, match=r"attempt 1 .* policy step 42: attempt 2 has published step 40"):
        publish(store, 42)
    assert latest_policy(store) == second


def test_pruning_keeps_the_newest_of_the_newest_attempt(store, publish):
    for step in (96, 98, 100):
        publish(store, step)
    resumed = publish(store, 82, attempt=2)  # the second attempt resumed from a checkpoint at 80
    for _ in range(2):  # the second time there is nothing to prune
        prune_policies(store, keep=2)
        assert [name for name in store.folders("policies") if has_weights(store, name)] == [
            "step=00000082-a0002",
            "step=00000100",
        ]
    assert latest_policy(store) == resumed


def test_pruning_leaves_what_is_named_otherwise(store, publish):
    store.put("policies/.DS_Store", b"?")
    for step in (0, 1):
        publish(store, step)
    prune_policies(store, keep=1)
    assert store.exists("policies/.DS_Store") and not store.exists("policies/step=00000000/model.safetensors")


def test_of_a_pruned_policy_the_fingerprint_stays(store, publish):
    refs = {ref.path: ref for ref in (publish(store, 2), publish(store, 4), publish(store, 4, attempt=2))}
    prune_policies(store, keep=1)
    manifests = published_policies(store)
    assert {path: manifest.fingerprint for path, manifest in manifests.items()} == {
        path: ref.fingerprint for path, ref in refs.items()
    }
    assert {path for path, manifest in manifests.items() if not manifest.pruned} == {latest_policy(store).path}


def test_pruning_killed_half_way_is_finished_by_the_next(store, publish, monkeypatch):
    publish(store, 2)
    publish(store, 4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, "delete", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        prune_policies(store, keep=1)
    assert has_weights(store, "step=00000002") and published_policies(store)["policies/step=00000002"].pruned
    prune_policies(store, keep=1)
    assert store.list("policies/step=00000002") == ["policies/step=00000002/policy.json"]


def test_pruning_sweeps_up_half_a_policy(store, publish):
    store.put("policies/step=00000002/model.safetensors", b"half")  # its Trainer was killed
    publish(store, 4, attempt=2)
    prune_policies(store, keep=1)
    assert store.list("policies") == [
        "policies/latest.json",
        "policies/pruning.json",
        "policies/step=00000004-a0002/config.json",
        "policies/step=00000004-a0002/model.safetensors",
        "policies/step=00000004-a0002/policy.json",
    ]
