"""Claims about policies that travel as deltas (storage/policy_delta.py). Run: pytest tests/storage/test_policy_delta.py

- what is rebuilt is what was published, to the bit, whatever the sizes; a delta takes a small part of the bytes
- a machine fetches what it lacks: one delta, several, or anchor and deltas; nobody waits for an anchor's weights
- the final, the best and every eighth policy are whole in the store; after a loss and in a new attempt the next one is
- pruning keeps what a kept policy is rebuilt from, and nothing else
- of many processes one downloads, and processes that rebuild several policies of a chain do not wait for each other
- whatever is damaged, lost or replaced, in the store or the cache: the published bits or a declared error, and no wrong
  copy stays in the cache
- killed at any request of publishing or of fetching: the same
- a policy.json with a hostile chain is refused, before anything is read or written elsewhere; an old one is read
"""

import hashlib
import json
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from storage import attempts, policy_delta
from storage.errors import DamagedPolicy, DamagedRecord, NotFound
from storage.policies import (
    PolicyRef,
    best_policy,
    fetch_policy,
    hold_policy,
    is_stored,
    keep_if_best,
    latest_policy,
    policy_ref,
    prune_policies,
    publish_policy,
    published_policies,
    release_policy,
)
from storage.store import RunStore
from storage.verify import verify
from tests.faults.memory_store import memory_store
from tests.storage.helpers import OWNER, start_python

NUM_WEIGHTS = 20_000


class Killed(BaseException):
    """A process ends here."""


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """Small chunks, so that a file has several, the last one shorter."""
    monkeypatch.setattr(policy_delta, "_CHUNK_BYTES", 10_000)


@pytest.fixture
def store() -> RunStore:
    return memory_store()


def weights(step: int) -> np.ndarray:
    """bfloat16's bits; those of consecutive steps differ in 1 %."""
    found = np.random.default_rng(0).integers(0, 2**16, NUM_WEIGHTS, np.uint16)
    for number in range(1, step + 1):
        random = np.random.default_rng(number)
        found[random.choice(NUM_WEIGHTS, NUM_WEIGHTS // 100, replace=False)] ^= 1
    return found


def write_policy(folder: Path, values: np.ndarray) -> str:
    """Returns the fingerprint."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"weight": values}, folder / "model.safetensors")
    return hashlib.sha256(values.tobytes()).hexdigest()[:32]


class Trainer:
    """Publishes policies as the Trainer's outbox does."""

    def __init__(self, store: RunStore, folder: Path, attempt: int = 1) -> None:
        self.store, self.folder, self.attempt = store, folder, attempt
        self.cache = folder / "cache"
        self.served: PolicyRef | None = None

    def publish(self, step: int, final: bool = False, values: np.ndarray | None = None) -> PolicyRef:
        folder = self.folder / f"policy-{next(NUMBERS)}"
        ref = policy_ref(step, write_policy(folder, weights(step) if values is None else values),
                         attempt=self.attempt, final=final)  # fmt: skip
        self.served = publish_policy(self.store, folder, ref, self.cache, self.served)
        shutil.rmtree(folder)
        return self.served


NUMBERS = count()


@pytest.fixture
def trainer(store, tmp_path) -> Trainer:
    return Trainer(store, tmp_path / "trainer")


def is_right(folder: Path, step: int) -> bool:
    """Whether the folder has the policy's weights and its other files."""
    expected = folder.parent / f".tmp-expected-{next(NUMBERS)}"
    write_policy(expected, weights(step))
    names = {path.name for path in expected.iterdir()}
    is_same = all((folder / name).read_bytes() == (expected / name).read_bytes() for name in names)
    shutil.rmtree(expected)
    return is_same and {path.name for path in folder.iterdir()} == {*names, "policy.json"}


def files(store: RunStore, ref: PolicyRef) -> list[str]:
    return [path.removeprefix(f"{ref.path}/") for path in store.list(ref.path)]


DELTA = ["config.json", "model.safetensors.delta", "policy.json"]
WHOLE = ["config.json", "model.safetensors", "policy.json"]
BOTH = sorted({*DELTA, *WHOLE})


@pytest.fixture
def downloads(store, monkeypatch) -> Counter:
    """How often each file was downloaded."""
    found, get_file = Counter(), store._files.get_file

    def counted(path: str, local: Path) -> None:
        found[path.removeprefix("policies/step=000000")] += 1
        get_file(path, local)

    monkeypatch.setattr(store._files, "get_file", counted)
    return found


def of_weights(downloads: Counter) -> list[str]:
    return sorted(path for path in downloads.elements() if "safetensors" in path)


# --- what is published and fetched ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, 9_999, 10_000, 10_001, 35_000])
def test_what_the_deltas_make_of_a_file_is_the_other_file(tmp_path, num_bytes):
    random = np.random.default_rng(num_bytes)
    names = [tmp_path / str(number) for number in range(4)]
    for file in names:
        file.write_bytes(random.bytes(num_bytes))
    deltas = [tmp_path / f"{number}.delta" for number in range(3)]
    for before, after, delta in zip(names, names[1:], deltas, strict=False):
        found = policy_delta.write_delta(before, after, delta)
        assert found == (policy_delta.file_digest(before), policy_delta.file_digest(after))
    digest = policy_delta.apply_deltas(names[0], deltas, tmp_path / "rebuilt")
    assert (tmp_path / "rebuilt").read_bytes() == names[3].read_bytes()
    assert digest == policy_delta.file_digest(names[3])


def test_the_changes_travel_instead_of_the_weights(trainer, store, tmp_path):
    first, second = trainer.publish(0), trainer.publish(2)
    assert (files(store, first), files(store, second)) == (WHOLE, DELTA)
    sizes = [len(store.get(f"{ref.path}/{name}")) for ref, name in ((first, WHOLE[1]), (second, DELTA[1]))]
    assert sizes[1] < 0.06 * sizes[0]
    manifest = json.loads(store.get(f"{second.path}/policy.json"))
    assert manifest["chain"] == [{"path": first.path, "fingerprint": first.fingerprint, "whole": True}]
    assert manifest["files"]["model.safetensors"] == sizes[0] and not manifest["whole"]
    assert latest_policy(store) == second and is_right(fetch_policy(store, second, tmp_path / "cache"), 2)


@pytest.mark.s3
def test_on_a_real_server_as_well(s3_store, tmp_path):
    trainer = Trainer(s3_store, tmp_path)
    refs = [trainer.publish(step) for step in range(10)]
    assert files(s3_store, refs[7]) == DELTA and files(s3_store, refs[8]) == BOTH
    for step in (0, 3, 7, 8, 9):
        assert is_right(fetch_policy(s3_store, refs[step], tmp_path / f"cache-{step % 2}"), step)
    assert hold_policy(s3_store, refs[3], "s0") and keep_if_best(s3_store, refs[3], 0.5, 8, tmp_path / "cache-1")
    prune_policies(s3_store, keep=1)
    assert (
        files(s3_store, refs[3]) == BOTH and files(s3_store, refs[8]) == BOTH and files(s3_store, refs[7]) == DELTA[2:]
    )


def test_a_machine_that_joins_later_replays_the_chain(trainer, store, tmp_path, downloads):
    refs = [trainer.publish(step) for step in range(6)]
    assert is_right(fetch_policy(store, refs[-1], tmp_path / "cache"), 5)
    assert of_weights(downloads) == ["00/model.safetensors"] + [f"0{n}/model.safetensors.delta" for n in range(1, 6)]
    assert sorted(path.name[:13] for path in (tmp_path / "cache").iterdir()) == ["step=00000000", "step=00000005"]


def test_a_machine_that_skipped_policies_needs_their_deltas_only(trainer, store, tmp_path, downloads):
    refs = [trainer.publish(step) for step in range(3)]
    fetch_policy(store, refs[-1], tmp_path / "cache")
    refs += [trainer.publish(step) for step in range(3, 10)]  # the ninth is whole, too
    downloads.clear()
    assert is_right(fetch_policy(store, refs[-1], tmp_path / "cache"), 9)
    assert of_weights(downloads) == [f"0{number}/model.safetensors.delta" for number in range(3, 10)]


def test_every_eighth_is_whole_and_nobody_waits_for_it(trainer, store, tmp_path, downloads, monkeypatch):
    put, seen = store._files.put_file, []

    def look(path: str, local: Path) -> None:
        if path.endswith(".safetensors") and trainer.served:
            seen.append(latest_policy(store).step)
            assert is_right(fetch_policy(store, latest_policy(store), tmp_path / "cache"), seen[-1])
        put(path, local)

    monkeypatch.setattr(store._files, "put_file", look)
    refs = []
    for step in range(20):
        refs.append(trainer.publish(step))
        assert is_right(fetch_policy(store, refs[-1], tmp_path / "cache"), step)
    assert seen == [8, 16]  # each was being uploaded when its delta was there to be fetched
    assert [ref.step for ref in refs if files(store, ref) == BOTH] == [8, 16]
    assert [ref.step for ref in refs if files(store, ref) == WHOLE] == [0]
    assert of_weights(downloads)[:2] == ["00/model.safetensors", "01/model.safetensors.delta"]
    assert sum(downloads[f"{step:02}/model.safetensors"] for step in range(20)) == 1
    downloads.clear()
    assert is_right(fetch_policy(store, refs[16], tmp_path / "another"), 16)
    assert is_right(fetch_policy(store, refs[19], tmp_path / "third"), 19)
    assert of_weights(downloads) == ["16/model.safetensors"] * 2 + [
        f"{n}/model.safetensors.delta" for n in (17, 18, 19)
    ]


def test_on_the_machine_that_published_nothing_is_downloaded(trainer, store, downloads):
    for step in range(4):
        assert is_right(fetch_policy(store, trainer.publish(step), trainer.cache), step)
    assert not downloads and len(list(trainer.cache.iterdir())) == 2


def test_the_final_policy_is_whole_and_the_cached_one_before_saves_its_download(trainer, store, tmp_path, downloads):
    fetch_policy(store, trainer.publish(0), tmp_path / "cache")
    final = trainer.publish(1, final=True)
    assert files(store, final) == BOTH
    assert is_right(fetch_policy(store, final, tmp_path / "cache"), 1)
    assert of_weights(downloads) == ["00/model.safetensors", "01/model.safetensors.delta"]


@pytest.mark.parametrize("has_cache", [True, False])
def test_the_best_policy_is_whole_before_best_json_names_it(trainer, store, tmp_path, has_cache, monkeypatch):
    refs, cache = [trainer.publish(step) for step in range(4)], tmp_path / "cache"
    fetch_policy(store, refs[3], cache)
    assert hold_policy(store, refs[3], "s0")
    put = store._files.put

    def dies_at_the_pointer(path: str, data: bytes) -> None:
        if path.endswith("best.json"):
            raise Killed
        put(path, data)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(store._files, "put", dies_at_the_pointer)
        keep_if_best(store, refs[3], 0.5, 8, cache if has_cache else None)
    assert files(store, refs[3]) == BOTH and best_policy(store) is None
    assert keep_if_best(store, refs[3], 0.5, 8, cache if has_cache else None)
    release_policy(store, "s0")
    for step in range(4, 10):
        trainer.publish(step)
    prune_policies(store, keep=1)
    assert files(store, refs[3]) == BOTH and files(store, refs[0]) == files(store, refs[2]) == ["policy.json"]
    store.download_folder(refs[3].path, tmp_path / "plain", only=WHOLE)  # as by from_pretrained
    assert is_right(tmp_path / "plain", 3)
    assert is_right(fetch_policy(store, best_policy(store), tmp_path / "another"), 3)


def test_a_policy_that_cannot_be_stored_whole_does_not_become_the_best(trainer, store, tmp_path):
    refs = [trainer.publish(step) for step in range(2)]
    copy = fetch_policy(store, refs[1], tmp_path / "cache")
    damaged = bytearray((copy / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (copy / "model.safetensors").write_bytes(damaged)
    assert not keep_if_best(store, refs[1], 0.5, 8, tmp_path / "cache") and best_policy(store) is None
    assert files(store, refs[1]) == DELTA
    store.delete(f"{refs[1].path}/model.safetensors.delta")
    assert not keep_if_best(store, refs[1], 0.5, 8) and best_policy(store) is None


def test_if_most_weights_change_the_policy_is_whole(trainer, store):
    trainer.publish(0)
    assert files(store, trainer.publish(1, values=weights(0)[::-1].copy())) == WHOLE
    assert files(store, trainer.publish(2, values=weights(0)[:-2].copy())) == WHOLE  # another size


def test_a_policy_in_a_local_folder_is_whole_and_has_no_digests(local_store, tmp_path):
    trainer = Trainer(local_store, tmp_path)
    refs = [trainer.publish(step) for step in range(2)]
    assert files(local_store, refs[1]) == WHOLE
    assert json.loads(local_store.get(f"{refs[1].path}/policy.json")).keys() == {
        "step", "fingerprint", "attempt", "files", "final"
    }  # fmt: skip


def test_a_run_that_was_copied_to_a_local_folder_is_rebuilt_in_the_cache(trainer, store, local_store, tmp_path):
    refs = [trainer.publish(step) for step in range(3)]
    for path in store.list("policies"):
        local_store.put(path, store.get(path))
    assert is_right(fetch_policy(local_store, refs[2], tmp_path / "cache"), 2)
    assert fetch_policy(local_store, refs[0], tmp_path / "cache") == local_store.local_path(refs[0].path)


def test_a_new_attempt_has_a_chain_of_its_own(trainer, store, tmp_path):
    for step in range(3):
        trainer.publish(step)
    attempts.start_attempt(store, 0, OWNER)
    attempts.start_attempt(store, 1, OWNER)
    resumed = Trainer(store, trainer.folder, attempt=2)
    resumed.served = trainer.served
    second = resumed.publish(3)
    assert files(store, second) == WHOLE
    third = resumed.publish(4)
    assert [link["path"] for link in json.loads(store.get(f"{third.path}/policy.json"))["chain"]] == [second.path]
    assert is_right(fetch_policy(store, third, tmp_path / "cache"), 4)


# --- pruning, losses and many processes -------------------------------------------------------------------------------


def test_pruning_keeps_what_a_kept_policy_is_rebuilt_from(trainer, store, tmp_path):
    refs = []
    for step in range(18):
        refs.append(trainer.publish(step))
        prune_policies(store, keep=3)
        for ref in refs[-3:]:
            assert is_right(fetch_policy(store, ref, tmp_path / f"cache-{next(NUMBERS)}"), ref.step)
    stored = [ref.step for ref in refs if files(store, ref) != ["policy.json"]]
    assert stored == [*range(8, 18)]  # 15 is of the chain of 8, which its step does not need; 16 is whole
    assert {path: manifest["pruned"] for path, manifest in published_policies(store).items()} == {
        ref.path: ref.step not in stored for ref in refs
    }


def test_pruning_keeps_what_a_held_policy_is_rebuilt_from(trainer, store, tmp_path):
    refs = [trainer.publish(step) for step in range(3)]
    assert hold_policy(store, refs[2], "s0")
    refs += [trainer.publish(step) for step in range(3, 10)]
    prune_policies(store, keep=1)
    assert is_right(fetch_policy(store, refs[2], tmp_path / "cache"), 2)
    assert [ref.step for ref in refs if files(store, ref) != ["policy.json"]] == [0, 1, 2, 8, 9]
    assert keep_if_best(store, refs[2], 0.5, 8, tmp_path / "another")
    release_policy(store, "s0")
    prune_policies(store, keep=1)
    assert [ref.step for ref in refs if files(store, ref) != ["policy.json"]] == [2, 8, 9]


@pytest.mark.parametrize("lost", ["00/model.safetensors", "00/policy.json", "01/model.safetensors.delta",
                                  "01/policy.json", "02/model.safetensors.delta", "02/config.json"])  # fmt: skip
def test_a_lost_file_is_noticed_and_the_policy_is_published_whole(trainer, store, tmp_path, lost):
    for step in range(3):
        trainer.publish(step)
    assert is_stored(store, trainer.served)
    store.delete(f"policies/step=000000{lost}")
    assert not is_stored(store, trainer.served)
    trainer.publish(2)
    assert is_stored(store, trainer.served) and set(WHOLE) <= set(files(store, trainer.served))
    assert is_right(fetch_policy(store, trainer.served, tmp_path / "cache"), 2)
    assert files(store, trainer.publish(3)) == DELTA
    assert is_right(fetch_policy(store, trainer.served, tmp_path / "another"), 3)


def test_after_a_loss_the_next_policy_is_whole(trainer, store, tmp_path):
    for step in range(3):
        trainer.publish(step)
    store.delete("policies/step=00000001/model.safetensors.delta")
    assert files(store, trainer.publish(3)) == WHOLE
    assert is_right(fetch_policy(store, trainer.served, tmp_path / "cache"), 3)


@pytest.mark.parametrize("fault", ["dropped", "flipped", "cut short", "without weights"])
def test_without_a_sound_copy_of_the_base_the_policy_is_whole(trainer, store, tmp_path, fault):
    base = trainer.publish(0)
    DAMAGES_OF_A_COPY[fault](fetch_policy(store, base, trainer.cache))
    assert files(store, trainer.publish(1)) == WHOLE
    assert files(store, trainer.publish(2)) == DELTA
    assert is_right(fetch_policy(store, trainer.served, tmp_path / "cache"), 2)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()  # a copy may be a link
    file.write_bytes(data)


DAMAGES_OF_A_COPY = {
    "dropped": shutil.rmtree,
    "flipped": lambda copy: flip(copy / "model.safetensors"),
    "cut short": lambda copy: (copy / "model.safetensors").write_bytes(b"half"),
    "without weights": lambda copy: (copy / "model.safetensors").unlink(),
    "without its policy.json": lambda copy: (copy / "policy.json").unlink(),
}


@pytest.mark.parametrize("fault", DAMAGES_OF_A_COPY)
@pytest.mark.parametrize("copied", [0, 2])  # the anchor, a delta
def test_a_damaged_copy_is_dropped_and_what_it_was_for_is_fetched(trainer, store, tmp_path, fault, copied):
    refs, cache = [trainer.publish(step) for step in range(4)], tmp_path / "cache"
    DAMAGES_OF_A_COPY[fault](fetch_policy(store, refs[copied], cache))
    assert is_right(fetch_policy(store, refs[3], cache), 3)
    assert all(
        is_right(folder, int(folder.name[5:13])) for folder in cache.iterdir() if fault != "without its policy.json"
    )
    assert is_right(fetch_policy(store, refs[copied], cache), copied)


def test_of_eight_processes_one_downloads(trainer, store, tmp_path, downloads):
    """Threads here: as with processes, each has opened the lock for itself."""
    refs, cache = [trainer.publish(step) for step in range(6)], tmp_path / "cache"
    with ThreadPoolExecutor(8) as pool:
        copies = set(pool.map(lambda _: fetch_policy(store, refs[5], cache), range(8)))
    assert len(copies) == 1 and is_right(copies.pop(), 5)
    assert set(downloads.values()) == {1}


def test_processes_that_rebuild_policies_of_one_chain_end(trainer, store, tmp_path, downloads):
    refs, cache = [trainer.publish(step) for step in range(8)], tmp_path / "cache"
    with ThreadPoolExecutor(8) as pool:
        fetched = [(step, pool.submit(fetch_policy, store, refs[step], cache)) for step in (*range(8), *range(8))]
        for _, future in fetched:
            future.result(timeout=60)
    assert len([path for path in cache.iterdir() if not path.name.startswith(".tmp-")]) == 2
    assert all(is_right(path, int(path.name[5:13])) for path in cache.iterdir())


def test_a_policy_that_becomes_whole_during_a_fetch_is_fetched(trainer, store, tmp_path, monkeypatch):
    refs = [trainer.publish(step) for step in range(2)]
    get = store._files.get

    def becomes_whole(path: str) -> bytes:
        data = get(path)
        if path == f"{refs[1].path}/policy.json":
            monkeypatch.setattr(store._files, "get", get)
            policy_delta.make_whole(store, refs[1].path, fetch_policy(store, refs[1], trainer.cache))
        return data

    monkeypatch.setattr(store._files, "get", becomes_whole)
    assert is_right(fetch_policy(store, refs[1], tmp_path / "cache"), 1)
    assert files(store, refs[1]) == BOTH


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
def test_damage_in_the_store_never_leads_to_other_weights(trainer, store, tmp_path, place, damage, copied):
    refs, cache = [trainer.publish(step) for step in range(4)], tmp_path / "cache"
    another = Trainer(memory_store(), tmp_path / "another")
    for step in range(4):
        another.publish(step, values=weights(step)[::-1].copy())
    if copied is not None:
        fetch_policy(store, refs[copied], cache)
    path = f"policies/step=000000{place}"
    data = store.get(path)
    if damage == "missing":
        store.delete(path)
    else:
        store.put(path, DAMAGES[damage](data, another.store.get(path)))
    for _ in range(2):
        try:
            assert is_right(fetch_policy(store, refs[3], cache), 3)
            is_fetched = True
        except (NotFound, DamagedPolicy) as error:
            assert refs[3].path in str(error) or path.rpartition("/")[0] in str(error)
            assert "publish the policy again" in str(error) or "Fetch the latest policy" in str(error)
            is_fetched = False
    needed = {None: PLACES[:3] + PLACES[4:], 0: PLACES[2:3] + PLACES[4:], 2: PLACES[4:]}[copied]
    assert is_fetched == (place not in needed)
    if cache.exists():
        assert all(is_right(folder, int(folder.name[5:13])) for folder in cache.iterdir())
    store.put(path, data)
    assert is_right(fetch_policy(store, refs[3], cache), 3)


def test_verify_reads_deltas_and_names_those_that_are_damaged(trainer, store):
    store.put("run.json", b"{}")
    refs = [trainer.publish(step) for step in range(10)]
    prune_policies(store, keep=3)

    def fingerprint(folder: Path) -> str:
        return hashlib.sha256((folder / "model.safetensors").read_bytes()[-2 * NUM_WEIGHTS :]).hexdigest()[:32]

    report = verify(store, fingerprint)
    assert report.faults == [] and report.num_policies == 10
    store.put(f"{refs[7].path}/model.safetensors.delta", b"half")
    assert [(fault.kind, fault.path) for fault in verify(store, fingerprint).faults] == [
        ("damaged policy", refs[7].path)
    ]
    store.put(f"{refs[0].path}/model.safetensors", b"half")
    assert {fault.path for fault in verify(store, fingerprint).faults} == {ref.path for ref in refs[:8]}


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
def test_killed_at_any_request_of_fetching(trainer, store, tmp_path, monkeypatch, copied):
    refs = [trainer.publish(step) for step in range(4)]
    for number in count(1):
        cache = tmp_path / f"cache-{number}"
        if copied is not None:
            fetch_policy(store, refs[copied], cache)
        with monkeypatch.context() as patch:
            dies_at(store, number, patch, "after")
            try:
                fetch_policy(store, refs[3], cache)
                break
            except Killed:
                pass
        assert all(is_right(folder, int(folder.name[5:13])) for folder in cache.iterdir())
        assert is_right(fetch_policy(store, refs[3], cache), 3), number
    assert number > 4


# A process that has written half of the weights when it says so, and then waits.
REBUILDING = """
import sys, time
from pathlib import Path
from storage import policy_delta
from storage.policies import fetch_policy, latest_policy
from storage.store import RunStore

policy_delta._CHUNK_BYTES = 10_000
read = policy_delta._next_changes

def waits(delta, num_bytes):
    if delta.tell() > 0:
        print("half", flush=True)
        time.sleep(600)
    return read(delta, num_bytes)

policy_delta._next_changes = waits
store = RunStore(sys.argv[1], "run")
fetch_policy(store, latest_policy(store), sys.argv[2])
"""


def test_killed_while_it_rebuilds(trainer, store, local_store, tmp_path):
    refs, cache = [trainer.publish(step) for step in range(3)], tmp_path / "cache"
    for path in store.list("policies"):
        local_store.put(path, store.get(path))
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
def test_a_hostile_chain_is_refused(trainer, store, tmp_path, fault, downloads):
    trainer.publish(0)
    ref = trainer.publish(4)
    path = f"{ref.path}/policy.json"
    store.put(path, json.dumps(json.loads(store.get(path)) | HOSTILE[fault]).encode())
    cache = tmp_path / "a/b/cache"
    with pytest.raises(DamagedPolicy, match=r"step=00000004.*policy\.json.*publish the policy again"):
        fetch_policy(store, ref, cache)
    assert not downloads and list((tmp_path / "a").rglob("*")) == [tmp_path / "a/b", cache]
    if fault != "a step of another folder":
        with pytest.raises(DamagedRecord, match=r"step=00000004/policy\.json"):
            published_policies(store)
        assert not is_stored(store, ref)
    prune_policies(store, keep=1)
    assert files(store, ref) == DELTA and store.exists("policies/step=00000000/model.safetensors")


def test_an_anchor_that_needs_another_is_refused(trainer, store, tmp_path):
    refs = [trainer.publish(step) for step in range(3)]
    path = f"{refs[2].path}/policy.json"
    manifest = json.loads(store.get(path))
    manifest["chain"] = manifest["chain"][1:]
    manifest["chain"][0]["whole"] = True
    store.put(path, json.dumps(manifest).encode())
    with pytest.raises(DamagedPolicy, match=r"step=00000001.*stored as a delta"):
        fetch_policy(store, refs[2], tmp_path / "cache")


def test_a_base_with_another_fingerprint_is_refused(trainer, store, tmp_path):
    refs = [trainer.publish(step) for step in range(2)]
    other = Trainer(memory_store(), tmp_path / "other")
    other.publish(0, values=weights(5))
    for name in WHOLE:
        store.put(f"{refs[0].path}/{name}", other.store.get(f"{refs[0].path}/{name}"))
    with pytest.raises(DamagedPolicy, match=rf"{refs[0].path}.*'{refs[0].fingerprint}' was published"):
        fetch_policy(store, refs[1], tmp_path / "cache")
    assert not is_stored(store, refs[1])


def test_a_policy_json_of_an_older_version_is_read(store, tmp_path):
    mark = write_policy(tmp_path / "policy", weights(0))
    ref = PolicyRef(0, "policies/step=00000000", mark, False, 1, "")
    store.upload_folder(tmp_path / "policy", ref.path)
    sizes = {name: (tmp_path / "policy" / name).stat().st_size for name in WHOLE[:2]}
    manifest = {"step": 0, "fingerprint": mark, "attempt": 1, "files": sizes}
    store.put(f"{ref.path}/policy.json", json.dumps(manifest).encode())
    assert is_stored(store, ref) and is_right(fetch_policy(store, ref, tmp_path / "cache"), 0)
    assert keep_if_best(store, ref, 0.5, 8) and json.loads(store.get(f"{ref.path}/policy.json")) == manifest
    trainer = Trainer(store, tmp_path / "trainer")
    trainer.served, trainer.cache = ref, tmp_path / "cache"
    assert files(store, trainer.publish(1)) == WHOLE and files(store, trainer.publish(2)) == DELTA
