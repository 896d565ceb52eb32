"""Claims about policies that travel as deltas (storage/policy_delta.py). Run: pytest tests/storage/test_policy_delta.py

- what is rebuilt is what was published, to the bit, whatever the sizes; a delta takes a small part of the bytes
- a machine fetches what it lacks: one delta, several, or anchor and deltas; nobody waits for an anchor's weights
- the final, the best and every 16th policy (here every eighth) are whole in the store; after a loss and in a new
  attempt the next one is
- the best one becomes whole although the cache drops its copy meanwhile
- pruning keeps what a kept policy is rebuilt from, and nothing else
- of many processes one downloads, and processes that rebuild several policies of a chain do not wait for each other
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from storage import attempts, file_delta, kept_policies, policy_delta
from storage.errors import Superseded
from storage.kept_policies import best_policy, hold_policy, keep_if_best, prune_policies, release_policy
from storage.policies import fetch_policy, is_stored, latest_policy, published_policies
from storage.policy_folder import drop
from tests.storage.helpers import OWNER
from tests.storage.travelling import BOTH, DELTA, NUMBERS, WHOLE, Killed, Trainer, files, is_right, of_weights, weights

# --- what is published and fetched ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, 9_999, 10_000, 10_001, 35_000])
def test_what_the_deltas_make_of_a_file_is_the_other_file(tmp_path, small_chunks, num_bytes):
    random = np.random.default_rng(num_bytes)
    names = [tmp_path / str(number) for number in range(4)]
    for file in names:
        file.write_bytes(random.bytes(num_bytes))
    deltas = [tmp_path / f"{number}.delta" for number in range(3)]
    for before, after, delta in zip(names, names[1:], deltas, strict=False):
        found = file_delta.write_delta(before, after, delta)
        assert found == (file_delta.file_digest(before), file_delta.file_digest(after))
    digest = file_delta.apply_deltas(names[0], deltas, tmp_path / "rebuilt")
    assert (tmp_path / "rebuilt").read_bytes() == names[3].read_bytes()
    assert digest == file_delta.file_digest(names[3])


def test_the_changes_travel_instead_of_the_weights(trainer, memory_run, tmp_path):
    first, second = trainer.publish(0), trainer.publish(2)
    assert (files(memory_run, first), files(memory_run, second)) == (WHOLE, DELTA)
    sizes = [len(memory_run.get(f"{ref.path}/{name}")) for ref, name in ((first, WHOLE[1]), (second, DELTA[1]))]
    assert sizes[1] < 0.06 * sizes[0]
    manifest = json.loads(memory_run.get(f"{second.path}/policy.json"))
    assert manifest["chain"] == [{"path": first.path, "fingerprint": first.fingerprint, "whole": True}]
    assert manifest["files"]["model.safetensors"] == sizes[0] and not manifest["whole"]
    assert latest_policy(memory_run) == second and is_right(fetch_policy(memory_run, second, tmp_path / "cache"), 2)


def test_every_policy_can_be_fetched_with_the_intervals_of_a_run(memory_run, small_chunks, tmp_path):
    trainer, every = Trainer(memory_run, tmp_path / "trainer"), policy_delta.ANCHOR_EVERY
    refs = [trainer.publish(step) for step in range(2 * every + 2)]
    assert [ref.step for ref in refs if files(memory_run, ref) == BOTH] == [every, 2 * every]
    cache = tmp_path / "cache"
    for step in (0, 2 * every - 1):  # from a copy that is as old as the chain allows
        assert is_right(fetch_policy(memory_run, refs[step], cache), step)
    for step in (every - 1, 2 * every - 1, 2 * every + 1):  # from nothing
        assert is_right(fetch_policy(memory_run, refs[step], tmp_path / f"cache-{step}"), step)


@pytest.mark.s3
def test_on_a_real_server_as_well(s3_store, anchors, tmp_path):
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


def test_a_large_tokenizer_travels_once(trainer, memory_run, tmp_path, downloads, monkeypatch):
    monkeypatch.setattr(policy_delta, "_LARGE_BYTES", 1)  # so config.json is one
    refs = [trainer.publish(step) for step in range(3)]
    assert files(memory_run, refs[2]) == ["config.json.delta", *DELTA[1:]]
    for step in (0, 1, 2):
        assert is_right(fetch_policy(memory_run, refs[step], tmp_path / "cache"), step)
    assert is_right(fetch_policy(memory_run, refs[2], tmp_path / "another"), 2)
    assert [downloads[f"0{step}/config.json"] for step in range(3)] == [2, 0, 0]


def test_a_machine_that_joins_later_replays_the_chain(trainer, memory_run, tmp_path, downloads):
    refs = [trainer.publish(step) for step in range(6)]
    assert is_right(fetch_policy(memory_run, refs[-1], tmp_path / "cache"), 5)
    assert of_weights(downloads) == ["00/model.safetensors"] + [f"0{n}/model.safetensors.delta" for n in range(1, 6)]
    assert sorted(path.name[:13] for path in (tmp_path / "cache").iterdir()) == ["step=00000000", "step=00000005"]


def test_a_machine_that_skipped_policies_needs_their_deltas_only(trainer, memory_run, tmp_path, downloads):
    refs = [trainer.publish(step) for step in range(3)]
    fetch_policy(memory_run, refs[-1], tmp_path / "cache")
    refs += [trainer.publish(step) for step in range(3, 10)]  # the ninth is whole, too
    downloads.clear()
    assert is_right(fetch_policy(memory_run, refs[-1], tmp_path / "cache"), 9)
    assert of_weights(downloads) == [f"0{number}/model.safetensors.delta" for number in range(3, 10)]


def test_every_eighth_is_whole_and_nobody_waits_for_it(trainer, memory_run, tmp_path, downloads, monkeypatch):
    put, seen = memory_run._files.put_file, []

    def look(path: str, local: Path) -> None:
        if path.endswith(".safetensors") and trainer.served:
            seen.append(latest_policy(memory_run).step)
            assert is_right(fetch_policy(memory_run, latest_policy(memory_run), tmp_path / "cache"), seen[-1])
        put(path, local)

    monkeypatch.setattr(memory_run._files, "put_file", look)
    refs = []
    for step in range(20):
        refs.append(trainer.publish(step))
        assert is_right(fetch_policy(memory_run, refs[-1], tmp_path / "cache"), step)
    assert seen == [8, 16]  # each was being uploaded when its delta was there to be fetched
    assert [ref.step for ref in refs if files(memory_run, ref) == BOTH] == [8, 16]
    assert [ref.step for ref in refs if files(memory_run, ref) == WHOLE] == [0]
    assert of_weights(downloads)[:2] == ["00/model.safetensors", "01/model.safetensors.delta"]
    assert sum(downloads[f"{step:02}/model.safetensors"] for step in range(20)) == 1
    downloads.clear()
    assert is_right(fetch_policy(memory_run, refs[16], tmp_path / "another"), 16)
    assert is_right(fetch_policy(memory_run, refs[19], tmp_path / "third"), 19)
    assert of_weights(downloads) == ["16/model.safetensors"] * 2 + [
        f"{n}/model.safetensors.delta" for n in (17, 18, 19)
    ]


def test_a_superseded_trainer_makes_no_policy_whole(trainer, memory_run, tmp_path, monkeypatch):
    refs, put_file = [trainer.publish(step) for step in range(8)], memory_run._files.put_file

    def is_overtaken(path: str, local: Path) -> None:
        if path == "policies/step=00000008/model.safetensors":
            attempts.start_attempt(memory_run, 0, OWNER)
            attempts.start_attempt(memory_run, 4, OWNER)
        put_file(path, local)

    monkeypatch.setattr(memory_run._files, "put_file", is_overtaken)
    with pytest.raises(Superseded):
        trainer.publish(8)
    assert not published_policies(memory_run)["policies/step=00000008"].whole
    assert is_right(fetch_policy(memory_run, latest_policy(memory_run), tmp_path / "cache"), 8) and len(refs) == 8


def test_on_the_machine_that_published_nothing_is_downloaded(trainer, memory_run, downloads):
    for step in range(4):
        assert is_right(fetch_policy(memory_run, trainer.publish(step), trainer.cache), step)
    assert not downloads and len(list(trainer.cache.iterdir())) == 2


def test_the_final_policy_is_whole_and_the_cached_one_before_saves_its_download(
    trainer, memory_run, tmp_path, downloads
):
    fetch_policy(memory_run, trainer.publish(0), tmp_path / "cache")
    final = trainer.publish(1, final=True)
    assert files(memory_run, final) == BOTH
    assert is_right(fetch_policy(memory_run, final, tmp_path / "cache"), 1)
    assert of_weights(downloads) == ["00/model.safetensors", "01/model.safetensors.delta"]


@pytest.mark.parametrize("has_cache", [True, False])
def test_the_best_policy_is_whole_before_best_json_names_it(trainer, memory_run, tmp_path, has_cache, monkeypatch):
    refs, cache = [trainer.publish(step) for step in range(4)], tmp_path / "cache"
    fetch_policy(memory_run, refs[3], cache)
    assert hold_policy(memory_run, refs[3], "s0")
    put = memory_run._files.put

    def dies_at_the_pointer(path: str, data: bytes, check) -> None:
        if path.endswith("best.json"):
            raise Killed
        put(path, data, check)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(memory_run._files, "put", dies_at_the_pointer)
        keep_if_best(memory_run, refs[3], 0.5, 8, cache if has_cache else None)
    assert files(memory_run, refs[3]) == BOTH and best_policy(memory_run) is None
    assert keep_if_best(memory_run, refs[3], 0.5, 8, cache if has_cache else None)
    release_policy(memory_run, "s0")
    for step in range(4, 10):
        trainer.publish(step)
    prune_policies(memory_run, keep=1)
    assert files(memory_run, refs[3]) == BOTH and files(memory_run, refs[0]) == files(memory_run, refs[2]) == [
        "policy.json"
    ]
    memory_run.download_folder(refs[3].path, tmp_path / "plain", only=WHOLE)  # as by from_pretrained
    assert is_right(tmp_path / "plain", 3)
    assert is_right(fetch_policy(memory_run, best_policy(memory_run), tmp_path / "another"), 3)


def test_the_best_policy_is_stored_though_the_cache_makes_room_meanwhile(trainer, memory_run, tmp_path, monkeypatch):
    """Newer copies push its copy out twice: between fetch and use, and while the weights are uploaded."""
    refs, cache, fetched = [trainer.publish(step) for step in range(2)], tmp_path / "cache", []
    upload = memory_run.upload_folder

    def fetch_and_lose(store, ref, cache_dir):
        fetched.append(fetch_policy(store, ref, cache_dir))
        if len(fetched) == 1:
            drop(fetched[0])
        return fetched[-1]

    def lose_and_upload(folder, path, only):
        drop(fetched[-1])
        upload(folder, path, only=only)

    monkeypatch.setattr(kept_policies, "fetch_policy", fetch_and_lose)
    monkeypatch.setattr(memory_run, "upload_folder", lose_and_upload)
    assert hold_policy(memory_run, refs[1], "s0") and keep_if_best(memory_run, refs[1], 0.5, 8, cache)
    assert files(memory_run, refs[1]) == BOTH and len(fetched) == 2
    memory_run.download_folder(refs[1].path, tmp_path / "plain", only=WHOLE)
    assert is_right(tmp_path / "plain", 1)
    assert not list(cache.glob(".tmp-best-*"))


def test_a_policy_that_cannot_be_stored_whole_does_not_become_the_best(trainer, memory_run, tmp_path):
    refs = [trainer.publish(step) for step in range(2)]
    copy = fetch_policy(memory_run, refs[1], tmp_path / "cache")
    damaged = bytearray((copy / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (copy / "model.safetensors").write_bytes(damaged)
    assert not keep_if_best(memory_run, refs[1], 0.5, 8, tmp_path / "cache") and best_policy(memory_run) is None
    assert files(memory_run, refs[1]) == DELTA
    memory_run.delete(f"{refs[1].path}/model.safetensors.delta")
    assert not keep_if_best(memory_run, refs[1], 0.5, 8) and best_policy(memory_run) is None


def test_if_most_weights_change_the_policy_is_whole(trainer, memory_run):
    trainer.publish(0)
    assert files(memory_run, trainer.publish(1, values=weights(0)[::-1].copy())) == WHOLE
    assert sorted(path.name for path in fetch_policy(memory_run, trainer.served, trainer.cache).iterdir()) == WHOLE
    assert files(memory_run, trainer.publish(2, values=weights(0)[:-2].copy())) == WHOLE  # another size


def test_a_policy_in_a_local_folder_is_whole_and_has_no_digests(local_store, tmp_path):
    trainer = Trainer(local_store, tmp_path)
    refs = [trainer.publish(step) for step in range(2)]
    assert files(local_store, refs[1]) == WHOLE
    assert json.loads(local_store.get(f"{refs[1].path}/policy.json")).keys() == {
        "step", "fingerprint", "attempt", "files", "final"
    }  # fmt: skip


def test_a_run_that_was_copied_to_a_local_folder_is_rebuilt_in_the_cache(trainer, memory_run, local_store, tmp_path):
    refs = [trainer.publish(step) for step in range(3)]
    for path in memory_run.list("policies"):
        local_store.put(path, memory_run.get(path))
    assert is_right(fetch_policy(local_store, refs[2], tmp_path / "cache"), 2)
    assert fetch_policy(local_store, refs[0], tmp_path / "cache") == local_store.local_path(refs[0].path)


def test_a_new_attempt_has_a_chain_of_its_own(trainer, memory_run, tmp_path):
    for step in range(3):
        trainer.publish(step)
    attempts.start_attempt(memory_run, 0, OWNER)
    attempts.start_attempt(memory_run, 1, OWNER)
    resumed = Trainer(memory_run, trainer.folder, attempt=2)
    resumed.served = trainer.served
    second = resumed.publish(3)
    assert files(memory_run, second) == WHOLE
    third = resumed.publish(4)
    assert [link["path"] for link in json.loads(memory_run.get(f"{third.path}/policy.json"))["chain"]] == [second.path]
    assert is_right(fetch_policy(memory_run, third, tmp_path / "cache"), 4)


# --- pruning, losses and many processes -------------------------------------------------------------------------------


def test_pruning_keeps_what_a_kept_policy_is_rebuilt_from(trainer, memory_run, tmp_path):
    refs = []
    for step in range(18):
        refs.append(trainer.publish(step))
        prune_policies(memory_run, keep=3)
        for ref in refs[-3:]:
            assert is_right(fetch_policy(memory_run, ref, tmp_path / f"cache-{next(NUMBERS)}"), ref.step)
    stored = [ref.step for ref in refs if files(memory_run, ref) != ["policy.json"]]
    assert stored == [*range(8, 18)]  # 15 is of the chain of 8, which its step does not need; 16 is whole
    assert {path: manifest.pruned for path, manifest in published_policies(memory_run).items()} == {
        ref.path: ref.step not in stored for ref in refs
    }


def test_pruning_keeps_what_a_held_policy_is_rebuilt_from(trainer, memory_run, tmp_path):
    refs = [trainer.publish(step) for step in range(3)]
    assert hold_policy(memory_run, refs[2], "s0")
    refs += [trainer.publish(step) for step in range(3, 10)]
    prune_policies(memory_run, keep=1)
    assert is_right(fetch_policy(memory_run, refs[2], tmp_path / "cache"), 2)
    assert [ref.step for ref in refs if files(memory_run, ref) != ["policy.json"]] == [0, 1, 2, 8, 9]
    assert keep_if_best(memory_run, refs[2], 0.5, 8, tmp_path / "another")
    release_policy(memory_run, "s0")
    prune_policies(memory_run, keep=1)
    assert [ref.step for ref in refs if files(memory_run, ref) != ["policy.json"]] == [2, 8, 9]


@pytest.mark.parametrize("lost", ["00/model.safetensors", "00/policy.json", "01/model.safetensors.delta",
                                  "01/policy.json", "02/model.safetensors.delta", "02/config.json"])  # fmt: skip
def test_a_lost_file_is_noticed_and_the_policy_is_published_whole(trainer, memory_run, tmp_path, lost):
    for step in range(3):
        trainer.publish(step)
    assert is_stored(memory_run, trainer.served)
    memory_run.delete(f"policies/step=000000{lost}")
    assert not is_stored(memory_run, trainer.served)
    trainer.publish(2)
    assert is_stored(memory_run, trainer.served) and set(WHOLE) <= set(files(memory_run, trainer.served))
    assert is_right(fetch_policy(memory_run, trainer.served, tmp_path / "cache"), 2)
    assert files(memory_run, trainer.publish(3)) == DELTA
    assert is_right(fetch_policy(memory_run, trainer.served, tmp_path / "another"), 3)


def test_after_a_loss_the_next_policy_is_whole(trainer, memory_run, tmp_path):
    for step in range(3):
        trainer.publish(step)
    memory_run.delete("policies/step=00000001/model.safetensors.delta")
    assert files(memory_run, trainer.publish(3)) == WHOLE
    assert is_right(fetch_policy(memory_run, trainer.served, tmp_path / "cache"), 3)


def test_of_eight_processes_one_downloads(trainer, memory_run, tmp_path, downloads):
    """Threads here: as with processes, each has opened the lock for itself."""
    refs, cache = [trainer.publish(step) for step in range(6)], tmp_path / "cache"
    with ThreadPoolExecutor(8) as pool:
        copies = set(pool.map(lambda _: fetch_policy(memory_run, refs[5], cache), range(8)))
    assert len(copies) == 1 and is_right(copies.pop(), 5)
    assert set(downloads.values()) == {1}


def test_processes_that_rebuild_policies_of_one_chain_end(trainer, memory_run, tmp_path, downloads):
    refs, cache = [trainer.publish(step) for step in range(8)], tmp_path / "cache"
    with ThreadPoolExecutor(8) as pool:
        fetched = [(step, pool.submit(fetch_policy, memory_run, refs[step], cache)) for step in (*range(8), *range(8))]
        for _, future in fetched:
            future.result(timeout=60)
    assert len([path for path in cache.iterdir() if not path.name.startswith(".tmp-")]) == 2
    assert all(is_right(path, int(path.name[5:13])) for path in cache.iterdir())


def test_an_anchor_that_another_process_removes_is_fetched_again(trainer, memory_run, tmp_path, monkeypatch):
    refs, into_cache, removed = [trainer.publish(step) for step in range(3)], policy_delta.into_cache, []

    def with_a_process_beside(cached: Path, fill) -> Path:
        into_cache(cached, fill)
        if cached.name.startswith("step=00000000") and not removed:
            removed.append(cached)
            shutil.rmtree(cached)
        return cached

    monkeypatch.setattr(policy_delta, "into_cache", with_a_process_beside)
    assert is_right(fetch_policy(memory_run, refs[2], tmp_path / "cache"), 2) and removed


def test_a_policy_that_becomes_whole_during_a_fetch_is_fetched(trainer, memory_run, tmp_path, monkeypatch):
    refs = [trainer.publish(step) for step in range(2)]
    get = memory_run._files.get

    def becomes_whole(path: str) -> bytes:
        data = get(path)
        if path == f"{refs[1].path}/policy.json":
            monkeypatch.setattr(memory_run._files, "get", get)
            policy_delta.make_whole(memory_run, refs[1].path, fetch_policy(memory_run, refs[1], trainer.cache))
        return data

    monkeypatch.setattr(memory_run._files, "get", becomes_whole)
    assert is_right(fetch_policy(memory_run, refs[1], tmp_path / "cache"), 1)
    assert files(memory_run, refs[1]) == BOTH
