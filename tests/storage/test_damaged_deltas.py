"""Claims about damage to policies that travel as deltas. Run: pytest tests/storage/test_damaged_deltas.py

- whatever is damaged, lost or replaced, in the store or the cache: the published bits or a declared error, and no wrong
  copy stays in the cache; `tba verify` names what is damaged
- killed at any request of publishing or of fetching, or while it rebuilds: the same
- a policy.json with a hostile chain is refused, before anything is read or written elsewhere; an old one is read
"""

import hashlib
import json
import shutil
import threading
from itertools import count
from pathlib import Path

import pytest

from storage import attempts
from storage.errors import DamagedPolicy, DamagedRecord, NotFound
from storage.kept_policies import keep_if_best, prune_policies
from storage.policies import PolicyRef, fetch_policy, is_stored, latest_policy, published_policies
from storage.store import RunStore
from storage.verify import verify
from tests.faults.memory_store import memory_store
from tests.storage.helpers import OWNER, start_python
from tests.storage.travelling import (
    DELTA,
    NUM_WEIGHTS,
    WHOLE,
    Killed,
    Trainer,
    files,
    flip,
    is_right,
    weights,
    write_policy,
)

# --- damage on the machine --------------------------------------------------------------------------------------------


DAMAGES_OF_A_COPY = {
    "dropped": shutil.rmtree,
    "flipped": lambda copy: flip(copy / "model.safetensors"),
    "cut short": lambda copy: (copy / "model.safetensors").write_bytes(b"half"),
    "without weights": lambda copy: (copy / "model.safetensors").unlink(),
    "without its policy.json": lambda copy: (copy / "policy.json").unlink(),
}


@pytest.mark.parametrize("fault", ["dropped", "flipped", "cut short", "without weights"])
def test_without_a_sound_copy_of_the_base_the_policy_is_whole(trainer, memory_run, tmp_path, fault):
    base = trainer.publish(0)
    DAMAGES_OF_A_COPY[fault](fetch_policy(memory_run, base, trainer.cache))
    assert files(memory_run, trainer.publish(1)) == WHOLE
    assert files(memory_run, trainer.publish(2)) == DELTA
    assert is_right(fetch_policy(memory_run, trainer.served, tmp_path / "cache"), 2)


@pytest.mark.parametrize("fault", DAMAGES_OF_A_COPY)
@pytest.mark.parametrize("copied", [0, 2])  # the anchor, a delta
def test_a_damaged_copy_is_dropped_and_what_it_was_for_is_fetched(trainer, memory_run, tmp_path, fault, copied):
    refs, cache = [trainer.publish(step) for step in range(4)], tmp_path / "cache"
    DAMAGES_OF_A_COPY[fault](fetch_policy(memory_run, refs[copied], cache))
    assert is_right(fetch_policy(memory_run, refs[3], cache), 3)
    assert all(
        is_right(folder, int(folder.name[5:13])) for folder in cache.iterdir() if fault != "without its policy.json"
    )
    assert is_right(fetch_policy(memory_run, refs[copied], cache), copied)


# --- damage in the store ----------------------------------------------------------------------------------------------


def cut(data: bytes, other: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes, other: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def replaced(data: bytes, other: bytes) -> bytes:
    return other


DAMAGES = {"missing": None, "empty": lambda data, other: b"", "cut": cut, "flipped": flipped, "replaced": replaced}
PLACES = ["00/model.safetensors", "00/policy.json", "01/model.safetensors.delta", "01/policy.json",
          "03/model.safetensors.delta", "03/policy.json"]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("copied", [None, 0, 2])
def test_damage_in_the_store_never_leads_to_other_weights(trainer, memory_run, tmp_path, place, damage, copied):
    refs, cache = [trainer.publish(step) for step in range(4)], tmp_path / "cache"
    another = Trainer(memory_store(), tmp_path / "another")
    for step in range(4):
        another.publish(step, values=weights(step)[::-1].copy())
    if copied is not None:
        fetch_policy(memory_run, refs[copied], cache)
    path = f"policies/step=000000{place}"
    data = memory_run.get(path)
    if damage == "missing":
        memory_run.delete(path)
    else:
        memory_run.put(path, DAMAGES[damage](data, another.store.get(path)))
    for _ in range(2):
        try:
            assert is_right(fetch_policy(memory_run, refs[3], cache), 3)
            is_fetched = True
        except (NotFound, DamagedPolicy) as error:
            assert refs[3].path in str(error) or path.rpartition("/")[0] in str(error)
            assert "publish the policy again" in str(error) or "Fetch the latest policy" in str(error)
            is_fetched = False
    needed = {None: PLACES[:3] + PLACES[4:], 0: PLACES[2:3] + PLACES[4:], 2: PLACES[4:]}[copied]
    assert is_fetched == (place not in needed)
    if cache.exists():
        assert all(is_right(folder, int(folder.name[5:13])) for folder in cache.iterdir())
    memory_run.put(path, data)
    assert is_right(fetch_policy(memory_run, refs[3], cache), 3)


def test_verify_reads_deltas_and_names_those_that_are_damaged(trainer, memory_run):
    memory_run.put("run.json", b"{}")
    refs = [trainer.publish(step) for step in range(10)]
    prune_policies(memory_run, keep=3)

    def fingerprint(folder: Path) -> str:
        return hashlib.sha256((folder / "model.safetensors").read_bytes()[-2 * NUM_WEIGHTS :]).hexdigest()[:32]

    report = verify(memory_run, fingerprint)
    assert report.faults == [] and report.num_policies == 10
    # A policy with weights and a delta: weights that are rebuilt from the policy before it do not stand in for its own.
    assert f"{refs[8].path}/model.safetensors.delta" in memory_run.list(refs[8].path)
    whole = memory_run.get(f"{refs[8].path}/model.safetensors")
    memory_run.delete(f"{refs[8].path}/model.safetensors")
    assert [(fault.kind, fault.path) for fault in verify(memory_run, fingerprint).faults] == [
        ("damaged policy", refs[8].path)
    ]
    memory_run.put(f"{refs[8].path}/model.safetensors", whole)
    memory_run.put(f"{refs[7].path}/model.safetensors.delta", b"half")
    assert [(fault.kind, fault.path) for fault in verify(memory_run, fingerprint).faults] == [
        ("damaged policy", refs[7].path)
    ]
    memory_run.put(f"{refs[0].path}/model.safetensors", b"half")
    assert {fault.path for fault in verify(memory_run, fingerprint).faults} == {ref.path for ref in refs[:8]}


# --- kills ------------------------------------------------------------------------------------------------------------

REQUESTS = ("put", "put_new", "put_file", "get", "get_file", "files", "delete")


def dies_at(store: RunStore, number: int, monkeypatch, when: str) -> None:
    """The process dies before or after its request of this number; a file in transfer is then half there."""
    left, lock = [number], threading.Lock()

    def dying(call):
        def request(*arguments):
            with lock:
                left[0] -= 1
                is_last = left[0] == 0
                is_dead = left[0] < 0
            if is_dead or (is_last and when == "before"):
                raise Killed
            result = call(*arguments)
            if is_last:
                raise Killed
            return result

        return request

    for name in REQUESTS:
        monkeypatch.setattr(store._files, name, dying(getattr(store._files, name)))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [2, 8])  # a delta; one that becomes whole
def test_killed_at_any_request_of_publishing(tmp_path, monkeypatch, when, step):
    for number in count(1):
        store = memory_store()
        trainer = Trainer(store, tmp_path / f"{number}")
        for before in range(step):
            trainer.publish(before)
        with monkeypatch.context() as patch:
            dies_at(store, number, patch, when)
            try:
                trainer.publish(step)
                prune_policies(store, keep=3)
                break
            except Killed:
                pass
        served = latest_policy(store)
        assert served.step in (step - 1, step), number
        assert is_right(fetch_policy(store, served, tmp_path / f"cache-{number}"), served.step), number
        assert is_right(fetch_policy(store, served, trainer.cache), served.step), number
        attempts.start_attempt(store, 0, OWNER)
        attempts.start_attempt(store, 0, OWNER)
        resumed = Trainer(store, trainer.folder, attempt=2)
        resumed.publish(1)
        prune_policies(store, keep=1)
        assert is_right(fetch_policy(store, latest_policy(store), tmp_path / f"cache-{number}"), 1), number
    assert number > 10


@pytest.mark.parametrize("copied", [None, 1])
def test_killed_at_any_request_of_fetching(trainer, memory_run, tmp_path, monkeypatch, copied):
    refs = [trainer.publish(step) for step in range(4)]
    for number in count(1):
        cache = tmp_path / f"cache-{number}"
        if copied is not None:
            fetch_policy(memory_run, refs[copied], cache)
        with monkeypatch.context() as patch:
            dies_at(memory_run, number, patch, "after")
            try:
                fetch_policy(memory_run, refs[3], cache)
                break
            except Killed:
                pass
        assert all(is_right(folder, int(folder.name[5:13])) for folder in cache.iterdir())
        assert is_right(fetch_policy(memory_run, refs[3], cache), 3), number
    assert number > 4


# A process that has written half of the weights when it says so, and then waits.
REBUILDING = """
import sys, time
from pathlib import Path
from storage import file_delta
from storage.policies import fetch_policy, latest_policy
from storage.store import RunStore

file_delta._CHUNK_BYTES = 10_000
read = file_delta._next_changes

def waits(delta, num_bytes):
    if delta.tell() > 0:
        print("half", flush=True)
        time.sleep(600)
    return read(delta, num_bytes)

file_delta._next_changes = waits
store = RunStore(sys.argv[1], "run")
fetch_policy(store, latest_policy(store), sys.argv[2])
"""


def test_killed_while_it_rebuilds(trainer, memory_run, local_store, tmp_path):
    refs, cache = [trainer.publish(step) for step in range(3)], tmp_path / "cache"
    for path in memory_run.list("policies"):
        local_store.put(path, memory_run.get(path))
    killed = start_python(REBUILDING, local_store.url, str(cache))
    assert killed.stdout.readline() == "half\n"
    killed.kill()
    killed.communicate()
    visible = [folder for folder in cache.iterdir() if not folder.name.startswith(".tmp-")]
    assert [folder.name[:13] for folder in visible] == ["step=00000000"] and is_right(visible[0], 0)
    assert is_right(fetch_policy(local_store, refs[2], cache), 2)


# --- hostile and old policy.json --------------------------------------------------------------------------------------


def link(step: int = 0, **changes) -> dict:
    return {"path": f"policies/step={step:08d}", "fingerprint": "f" * 32, "whole": True} | changes


HOSTILE = {
    "a base outside": {"chain": [link(path="policies/../../elsewhere")]},
    "an absolute base": {"chain": [link(path="/etc")]},
    "a base that is no policy": {"chain": [link(path="trainer/step=00000000")]},
    "a fingerprint with a path": {"chain": [link(fingerprint="../../../x")]},
    "itself": {"chain": [link(4)]},
    "a later one": {"chain": [link(5)]},
    "a loop": {"chain": [link(2), link(3), link(2)]},
    "another attempt's": {"chain": [link(path="policies/step=00000000-a0002")]},
    "no chain": {"chain": []},
    "without an anchor": {"chain": [link(whole=False)]},
    "without end": {"step": 400, "chain": [link(step) for step in range(100)]},
    "no digest": {"digests": {}},
    "no such digest": {"digests": {"model.safetensors": "0" * 63}},
    "a digest of another file": {"digests": {"other.safetensors": "0" * 64}},
    "weights outside": {"files": {"../x.safetensors": 2}, "digests": {"../x.safetensors": "0" * 64}},
    "a chain of another kind": {"chain": {"path": "policies/step=00000000"}},
    "a step of another folder": {"step": 5},
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_chain_is_refused(trainer, memory_run, tmp_path, fault, downloads):
    trainer.publish(0)
    ref = trainer.publish(4)
    path = f"{ref.path}/policy.json"
    memory_run.put(path, json.dumps(json.loads(memory_run.get(path)) | HOSTILE[fault]).encode())
    cache = tmp_path / "a/b/cache"
    with pytest.raises(DamagedPolicy, match=r"step=00000004.*policy\.json.*publish the policy again"):
        fetch_policy(memory_run, ref, cache)
    assert not downloads and list((tmp_path / "a").rglob("*")) == [tmp_path / "a/b", cache]
    if fault != "a step of another folder":
        with pytest.raises(DamagedRecord, match=r"step=00000004/policy\.json"):
            published_policies(memory_run)
        assert not is_stored(memory_run, ref)
    prune_policies(memory_run, keep=1)
    assert files(memory_run, ref) == DELTA and memory_run.exists("policies/step=00000000/model.safetensors")


def test_an_anchor_that_needs_another_is_refused(trainer, memory_run, tmp_path):
    refs = [trainer.publish(step) for step in range(3)]
    path = f"{refs[2].path}/policy.json"
    manifest = json.loads(memory_run.get(path))
    manifest["chain"] = manifest["chain"][1:]
    manifest["chain"][0]["whole"] = True
    memory_run.put(path, json.dumps(manifest).encode())
    with pytest.raises(DamagedPolicy, match=r"step=00000001.*stored as a delta"):
        fetch_policy(memory_run, refs[2], tmp_path / "cache")


def test_a_base_with_another_fingerprint_is_refused(trainer, memory_run, tmp_path):
    refs = [trainer.publish(step) for step in range(2)]
    other = Trainer(memory_store(), tmp_path / "other")
    other.publish(0, values=weights(5))
    for name in WHOLE:
        memory_run.put(f"{refs[0].path}/{name}", other.store.get(f"{refs[0].path}/{name}"))
    with pytest.raises(DamagedPolicy, match=rf"{refs[0].path}.*'{refs[0].fingerprint}' was published"):
        fetch_policy(memory_run, refs[1], tmp_path / "cache")
    assert not is_stored(memory_run, refs[1])


def test_a_policy_json_of_an_older_version_is_read(memory_run, tmp_path):
    mark = write_policy(tmp_path / "policy", weights(0))
    ref = PolicyRef(0, "policies/step=00000000", mark, False, 1, "")
    memory_run.upload_folder(tmp_path / "policy", ref.path)
    sizes = {name: (tmp_path / "policy" / name).stat().st_size for name in WHOLE[:2]}
    manifest = {"step": 0, "fingerprint": mark, "attempt": 1, "files": sizes}
    memory_run.put(f"{ref.path}/policy.json", json.dumps(manifest).encode())
    assert is_stored(memory_run, ref) and is_right(fetch_policy(memory_run, ref, tmp_path / "cache"), 0)
    assert keep_if_best(memory_run, ref, 0.5, 8) and json.loads(memory_run.get(f"{ref.path}/policy.json")) == manifest
    trainer = Trainer(memory_run, tmp_path / "trainer")
    trainer.served, trainer.cache = ref, tmp_path / "cache"
    assert files(memory_run, trainer.publish(1)) == WHOLE and files(memory_run, trainer.publish(2)) == DELTA
