"""Claims about names from a store and links in it. Run: pytest tests/storage/test_paths.py

- a path that leads out of the run is refused by every operation, from a pointer as from a policy's list of files
- a symbolic link that leads out is refused, and no link is listed; the run itself may be one
- a folder that cannot be read, or is a file, fails a listing instead of reading as empty
- a run whose name no store accepts is in no list of runs
"""

import json
import os
from dataclasses import replace

import pytest

from storage import errors, local_folder, policies
from storage.errors import DamagedRecord, StoreError, UnsafePath
from storage.new_shards import new_shards
from storage.paths import inside, is_plain
from storage.store import list_runs

OUTSIDE = [
    "../x",
    "a/../../x",
    "/etc/passwd",
    "a/..",
    "..",
    ".",
    "a/./b",
    "a//b",
    "a/",
    "a\\b",
    "a\0b",
    "a\x1b[2Jb",
    "a\nb",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_leads_out_is_refused_everywhere(store, tmp_path, path):
    assert not is_plain(path)
    operations = [
        lambda: store.put(path, b""),
        lambda: store.put_new(path, b""),
        lambda: store.get(path),
        lambda: store.exists(path),
        lambda: store.delete(path),
        lambda: store.local_path(path),
        lambda: store.delete_folder(path, first="a"),
        lambda: store.upload_folder(tmp_path, path),
        lambda: store.download_folder(path.rstrip("/") + "/..", tmp_path / "copy"),
        lambda: inside(tmp_path, path),
    ]
    for operation in operations:
        with pytest.raises(UnsafePath, match=r"leads out of its folder"):
            operation()


def test_usual_names_are_plain():
    for path in ("a", "policies/step=00000040-a0002/model.safetensors", "a b", ".hidden/..a", "ä/x..y"):
        assert is_plain(path)


def test_a_pointer_or_manifest_cannot_lead_out(local_store, tmp_path):
    (tmp_path / "secret").write_text("12345")
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/model.safetensors").write_bytes(b"w")
    ref = policies.publish_policy(local_store, tmp_path / "policy", policies.policy_ref(0, "f" * 32, attempt=1))
    with pytest.raises(DamagedRecord):
        policies.fetch_policy(local_store, replace(ref, path="../../policy"), tmp_path / "cache")
    manifest = f"{ref.path}/policy.json"
    content = json.loads(local_store.get(manifest))
    local_store.put(manifest, json.dumps(content | {"files": {"../../../../secret": 5}}).encode())
    with pytest.raises(UnsafePath):
        policies.fetch_policy(local_store, ref, tmp_path / "cache")


@pytest.mark.s3
def test_a_fingerprint_cannot_lead_out_of_the_cache(moto_store, tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/model.safetensors").write_bytes(b"w")
    bad = policies.policy_ref(0, "/../../out", attempt=1)
    with pytest.raises((UnsafePath, DamagedRecord)):
        policies.publish_policy(moto_store, tmp_path / "policy", bad, tmp_path / "deep/cache")
    good = policies.publish_policy(moto_store, tmp_path / "policy", policies.policy_ref(1, "f" * 32, attempt=1))
    with pytest.raises((UnsafePath, DamagedRecord)):
        policies.fetch_policy(moto_store, replace(good, fingerprint="/../../out"), tmp_path / "deep/cache")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def linked(local_store, tmp_path):
    """A run with a file and a Searcher's folder that are links to outside."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "round=00000000.parquet").write_bytes(b"x")
    local_store.put("trajectories/searcher=s0/round=00000000.parquet", b"y")
    folder = local_store.local_path("trajectories")
    (folder / "searcher=s1").symlink_to(outside)
    (folder / "searcher=s0/round=00000001.parquet").symlink_to(outside / "round=00000000.parquet")
    os.mkfifo(folder / "searcher=s0/round=00000002.parquet")  # to open it would hang
    return local_store


def test_no_link_is_listed_and_each_is_told_once(linked, caplog):
    for _ in range(2):
        assert linked.list("trajectories") == ["trajectories/searcher=s0/round=00000000.parquet"]
        assert linked.folders("trajectories") == ["searcher=s0"]
        assert new_shards(linked, {}) == {"s0": [0]}
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all(
        "is a symbolic link and is not read; put the file or folder in its place" in line for line in told
    )


def test_a_link_that_leads_out_is_refused(linked, tmp_path):
    for path in ("trajectories/searcher=s1/round=00000000.parquet", "trajectories/searcher=s0/round=00000001.parquet"):
        for operation in (linked.get, linked.exists, linked.delete, lambda path: linked.put(path, b"")):
            with pytest.raises(UnsafePath, match="by a symbolic link out of"):
                operation(path)
    with pytest.raises(UnsafePath):
        linked.list("trajectories/searcher=s1")
    assert (tmp_path / "outside/round=00000000.parquet").read_bytes() == b"x"


def test_the_run_itself_may_be_a_link(local_store, tmp_path):
    local_store.put("run.json", b"{}")
    (tmp_path / "disk").mkdir()
    os.rename(tmp_path / "store/run", tmp_path / "disk/run")
    (tmp_path / "store/run").symlink_to(tmp_path / "disk/run")
    assert list_runs(local_store.url) == ["run"]
    assert local_store.list("") == ["run.json"]
    local_store.put("a/1", b"")
    assert local_store.list("a") == ["a/1"]


def test_a_folder_that_cannot_be_read_is_not_empty(local_store, monkeypatch):
    local_store.put("a/b/1", b"")
    local_store.put("file", b"")
    with pytest.raises(StoreError, match=r"cannot list file \(run run in .*NotADirectoryError"):
        local_store.list("file")
    scandir = os.scandir

    def denied(folder):  # as for any user but root
        if str(folder).endswith("a/b"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(local_folder.os, "scandir", denied)
    for read in (lambda: local_store.list("a"), lambda: local_store.folders("a/b")):
        with pytest.raises(StoreError, match=r"cannot list a.* this account may not read or write here; give it"):
            read()
    assert local_store.list("nothing") == [] and local_store.folders("nothing") == []


def test_a_name_that_is_no_run_is_in_no_list(tmp_path):
    for name in ("run", "a..b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    assert list_runs(tmp_path.as_uri()) == ["run"]


def test_a_firewall_that_refuses_a_connection_is_no_folder():
    class ClientConnectionError(OSError):  # aiohttp's, which has the system's error number
        pass

    assert errors.find_cause(ClientConnectionError(13, "Permission denied")) == errors.CUT_OFF
    assert errors.find_cause(PermissionError("Access Denied")) == errors.DENIED  # s3fs's
    assert errors.find_cause(PermissionError(13, "Permission denied")) == errors.FORBIDDEN
