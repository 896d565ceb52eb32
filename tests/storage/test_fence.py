"""A superseded Trainer changes nothing that counts (storage/attempts.py, checkpoints.py, policies.py).

Claims
- a checkpoint or policy whose attempt is superseded while it is uploaded does not become complete, and no pointer moves
- a checkpoint that a superseded Trainer completed all the same is not resumed from; verify names it; the living
  Trainer's next one deletes it
- a superseded Trainer deletes no checkpoint
- a pointer that it replaced all the same is not followed, and names no final policy; verify names it
- a policy.json that it writes late, after the policy was pruned, is no fault
- before the new attempt has published, its predecessor's policy is served, and earlier policies are not listed
- checkpoints of older versions, which do not name their attempt, are resumed from, unless a new attempt undid them
- a listing that forgets an attempt does not undo a takeover

Run: pytest tests/storage/test_fence.py
"""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from storage import attempts, checkpoints, kept_policies, policies
from storage.errors import Superseded
from storage.store import RunStore
from storage.verify import verify
from tests.storage.helpers import OWNER


@pytest.fixture
def run(local_store) -> RunStore:
    """A run whose first attempt has begun."""
    local_store.put("run.json", b"{}")
    attempts.start_attempt(local_store, 0, OWNER)
    return local_store


@pytest.fixture
def save(tmp_path):
    """save(store, step, attempt) uploads a checkpoint."""

    def save(store: RunStore, step: int, attempt: int) -> None:
        checkpoints.save_checkpoint(store, step, checkpoint_folder(tmp_path, step), attempt)

    return save


@pytest.fixture
def publish(tmp_path):
    """publish(store, step, attempt, …) publishes a policy."""

    def publish(store: RunStore, step: int, attempt: int, final: bool = False) -> policies.PolicyRef:
        folder = tmp_path / f"policy-{step}-{attempt}"
        folder.mkdir()
        (folder / "model.safetensors").write_text(f"policy {step} of attempt {attempt}")
        ref = policies.policy_ref(step, f"{step:032d}", attempt=attempt, final=final)
        return policies.publish_policy(store, folder, ref)

    return publish


def checkpoint_folder(tmp_path: Path, step: int) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir(exist_ok=True)
    save_file({"weight": np.zeros(4, np.float32)}, folder / "trainer.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": step}))
    return folder


def steps(store: RunStore) -> list[int]:
    return [found.step for found in checkpoints.list_checkpoints(store)]


def faults(store: RunStore, of: str = "checkpoint") -> list[tuple[str, str]]:
    return [(fault.kind, fault.path) for fault in verify(store, None).faults if of in fault.kind]


def takes_over_during(store: RunStore, monkeypatch, suffix: str) -> None:
    """Another Trainer takes the run over while a file with this suffix is uploaded."""
    put_file = store._files.put_file

    def put_slowly(path, local):
        put_file(path, local)
        if path.endswith(suffix) and attempts.latest_attempt(store) == 1:
            attempts.start_attempt(store, 0, OWNER)

    monkeypatch.setattr(store._files, "put_file", put_slowly)


def test_a_checkpoint_is_not_completed_after_a_takeover(run, save, monkeypatch):
    takes_over_during(run, monkeypatch, ".safetensors")
    with pytest.raises(Superseded):
        save(run, 100, 1)
    assert run.list("trainer/step=00000100-a0001") == ["trainer/step=00000100-a0001/trainer.safetensors"]
    assert steps(run) == []


@pytest.mark.parametrize(("suffix", "is_complete"), [(".safetensors", False), ("policy.json", True)])
def test_a_policy_is_not_published_after_a_takeover(run, publish, monkeypatch, suffix, is_complete):
    first = publish(run, 0, 1)
    takes_over_during(run, monkeypatch, suffix)
    with pytest.raises(Superseded):
        publish(run, 2, 1)
    assert run.exists("policies/step=00000002/policy.json") == is_complete
    assert json.loads(run.get(policies.LATEST))["path"] == first.path


def test_a_checkpoint_that_a_superseded_trainer_completed_does_not_count(run, save, monkeypatch):
    save(run, 50, 1)
    with monkeypatch.context() as patch:  # it froze between its last check and its last write
        patch.setattr(checkpoints, "check_not_superseded", lambda *_: None)
        attempts.start_attempt(run, 50, OWNER, checkpoint=checkpoints.list_checkpoints(run)[-1].path)
        save(run, 200, 1)
    assert steps(run) == [50] and checkpoints.newest_whole_checkpoint(run).step == 50
    assert faults(run) == [("superseded checkpoint", "trainer/step=00000200-a0001")]
    save(run, 100, 2)
    checkpoints.delete_checkpoints(run, keep=2, attempt=2)
    assert run.folders("trainer") == ["step=00000050-a0001", "step=00000100-a0002"]
    assert faults(run) == []


def test_a_superseded_trainer_deletes_no_checkpoint(run, save):
    for step in (50, 100, 150):
        save(run, step, 1)
    attempts.start_attempt(run, 50, OWNER)
    with pytest.raises(Superseded):
        checkpoints.delete_checkpoints(run, keep=1, attempt=1)
    assert len(run.folders("trainer")) == 3


def test_a_pointer_that_a_superseded_trainer_replaced_is_not_followed(run, publish, monkeypatch):
    monkeypatch.setattr("storage.verify._BETWEEN_WRITES_S", 0)
    publish(run, 90, 1, final=True)
    late = run.get(policies.LATEST)
    attempts.start_attempt(run, 50, OWNER)
    found = policies.latest_policy(run)
    assert (found.path, found.final) == ("policies/step=00000090", False), "served until the new attempt publishes"
    newest = publish(run, 50, 2)
    assert policies.latest_policy(run) == newest
    run.put(policies.LATEST, late)
    assert policies.latest_policy(run).path == newest.path
    assert faults(run, "pointer") == [("broken pointer", policies.LATEST)]
    publish(run, 51, 2)
    assert policies.latest_policy(run).path == "policies/step=00000051-a0002"
    assert faults(run, "pointer") == []


def test_searchers_that_wait_for_a_resumed_trainer_do_not_list_the_earlier_policies(run, publish, monkeypatch):
    for step in (0, 10, 20):
        publish(run, step, 1)
    late, listed, list_ = run.get(policies.LATEST), [], run.list
    attempts.start_attempt(run, 20, OWNER)
    newest = publish(run, 20, 2)
    run.put(policies.LATEST, late)

    def listing(folder: str, **given: str) -> list[str]:
        listed.extend(list_(folder, **given))
        return list_(folder, **given)

    monkeypatch.setattr(run, "list", listing)
    assert policies.latest_policy(run).path == newest.path
    folders = {path.split("/")[1] for path in listed if path.startswith("policies/")}
    assert folders == {"step=00000020", "step=00000020-a0002"}


def test_a_policy_that_comes_back_after_a_later_attempt_pruned_it_is_no_fault(run, publish):
    """The network held up the superseded Trainer's put of policy.json, and its client repeated it."""
    late = publish(run, 90, 1)
    text = run.get(f"{late.path}/policy.json")
    attempts.start_attempt(run, 50, OWNER)
    publish(run, 50, 2)
    newest = publish(run, 51, 2)
    kept_policies.prune_policies(run, keep=2)
    run.put(f"{late.path}/policy.json", text)
    assert policy_faults(run) == []

    run.put(f"{late.path}/model.safetensors", b"policy 90 of another run")
    assert policy_faults(run) == [late.path], "damage is one"
    run.delete(f"{late.path}/model.safetensors")
    run.put(policies.LATEST, json.dumps(asdict(late)).encode())
    assert policy_faults(run) == [late.path], "a pointer names it"
    run.put(policies.LATEST, json.dumps(asdict(newest)).encode())
    run.delete(f"{newest.path}/model.safetensors")
    assert policy_faults(run) == [newest.path], "it is of the newest attempt"


def policy_faults(store: RunStore) -> list[str]:
    def fingerprint(folder: Path) -> str:
        return f"{int((folder / 'model.safetensors').read_text().split()[1]):032d}"

    return [fault.path for fault in verify(store, fingerprint).faults if fault.kind == "damaged policy"]


def old_checkpoint(store: RunStore, tmp_path: Path, step: int) -> None:
    """As versions before 2026-11-24 stored them."""
    store.upload_folder(checkpoint_folder(tmp_path, step), f"trainer/step={step:08d}", last="state.json")


def old_attempt(store: RunStore, attempt: int, resumed_from: int) -> None:
    record = {
        "attempt": attempt,
        "resumed_from": resumed_from,
        "owner": asdict(OWNER),
        "created_at": "2026-11-21T12:00:00+00:00",
    }
    store.put_new(f"trainer/attempt={attempt:08d}.json", json.dumps(record).encode())


def test_checkpoints_of_an_older_version_are_resumed_from(local_store, tmp_path, save):
    for attempt, resumed_from in ((1, 0), (2, 50)):
        old_attempt(local_store, attempt, resumed_from)
    for step in (50, 100):
        old_checkpoint(local_store, tmp_path, step)
    newest = checkpoints.newest_whole_checkpoint(local_store)
    assert (newest.step, newest.path) == (100, "trainer/step=00000100")
    assert attempts.start_attempt(local_store, 100, OWNER, checkpoint=newest.path) == 3
    old_checkpoint(local_store, tmp_path, 150)  # by a superseded Trainer of the older version
    assert steps(local_store) == [50, 100]
    save(local_store, 150, 3)
    checkpoints.delete_checkpoints(local_store, keep=2, attempt=3)
    assert local_store.folders("trainer") == ["step=00000100", "step=00000150-a0003"]


def test_a_listing_that_forgets_an_attempt_does_not_undo_a_takeover(run, save, monkeypatch):
    save(run, 50, 1)
    for resumed_from in (20, 20):
        attempts.start_attempt(run, resumed_from, OWNER)
    listed = run._files.files
    for forgotten in ("attempt=00000002", "attempt=00000003"):
        monkeypatch.setattr(
            run._files, "files", lambda *of, name=forgotten: [path for path in listed(*of) if name not in path]
        )
        assert attempts.latest_attempt(run) == 3 and len(attempts.list_attempts(run)) == 3
        assert steps(run) == []
