"""The policies that the Trainer publishes (flows/trainer/outbox.py).

Claims
- what is published is what the Trainer hands over, and its fingerprint; to a remote store its changes, file by file
- a policy's folder has its own weights, and the model's other files
- a policy by adapters has peft's files and no weights; the final one has weights and no adapters
- while a policy is written to a slow store, training goes on, and of the policies that wait the newest is published
- a policy is published behind the records of its step; older policies and checkpoints are deleted
- a Trainer that waits notices every few seconds that its policy was removed, and mends the pointer to it

Run: pytest tests/flows/trainer/test_outbox.py
"""

import contextlib
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from flows.config import RunConfig
from flows.trainer.outbox import StoreOutbox
from storage import checkpoints, policies
from tba.batch import Batch
from tba.precision import to_bfloat16
from tba.weights import fingerprint, read_weights
from tests.faults.memory_store import memory_store
from tests.futures import done, wait_until


def test_a_policy_has_its_own_weights_and_the_models_other_files(store, outbox, tmp_path):
    """The index of a model's files names files that the policy does not have."""
    for name in ("model.safetensors.index.json", "pytorch_model.bin", "model-00001-of-00002.safetensors", "merges.txt"):
        (tmp_path / "template" / name).write_text("{}")
    outbox.publish(2, done({"weight": torch.zeros(4, dtype=torch.bfloat16)}), final=False)
    outbox._newest_policy.result()
    folder = store.local_path(policies.policy_path(2, 1))
    names = {"config.json", "merges.txt", "model.safetensors", policies.MANIFEST}
    assert {file.name for file in folder.iterdir()} == names


def test_what_is_published_is_what_the_trainer_hands_over(store, outbox, tmp_path):
    published = to_bfloat16(torch.full((1000,), 1 + 2**-10))
    outbox.publish(7, done({"weight": published}), final=False)
    deadline = time.monotonic() + 30
    while (ref := policies.latest_policy(store)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    folder = policies.fetch_policy(store, ref, tmp_path / "cache")
    ((_, weight),) = read_weights(folder)
    assert torch.equal(weight, published)
    assert (folder / "config.json").exists() and ref.fingerprint == fingerprint([("weight", weight)])


def test_a_remote_store_gets_the_changes_and_after_a_loss_the_weights(heart, alarms, tmp_path, monkeypatch):
    monkeypatch.setattr("flows.trainer.outbox.LOOK_S", 0.0)
    monkeypatch.setattr("flows.trainer.outbox.policy_cache", lambda run: tmp_path / "cache")
    remote, weight = memory_store(), torch.randn(10_000).bfloat16()
    (tmp_path / "template").mkdir()
    with contextlib.closing(StoreOutbox(remote, RunConfig(), 1, tmp_path / "template", heart, alarms)) as outbox:
        for step in (7, 9):
            weight[step] += 1
            outbox.publish(step, done({"weight": weight.clone()}), final=False)
            ref = published(outbox, remote)
        delta, manifest = f"{ref.path}/model.safetensors.delta", f"{ref.path}/policy.json"
        assert remote.list(ref.path) == [delta, manifest] and not outbox.has_lost_policy()
        remote.delete(delta)
        assert outbox.has_lost_policy()
        outbox.publish(9, done({"weight": weight}), final=False)
        assert remote.list(published(outbox, remote).path) == [f"{ref.path}/model.safetensors", manifest]
    ((_, found),) = read_weights(policies.fetch_policy(remote, ref, tmp_path / "another"))
    assert torch.equal(found, weight)


def test_each_file_of_a_large_policy_travels_as_its_changes(heart, alarms, tmp_path, monkeypatch):
    monkeypatch.setattr("flows.trainer.outbox.policy_cache", lambda run: tmp_path / "cache")
    monkeypatch.setattr("tba.weights.SHARD_BYTES", 25_000)
    remote, weights = memory_store(), {name: torch.randn(10_000).bfloat16() for name in ("a", "b")}
    (tmp_path / "template").mkdir()
    with contextlib.closing(StoreOutbox(remote, RunConfig(), 1, tmp_path / "template", heart, alarms)) as outbox:
        for step in (7, 9):
            weights["a"][step] += 1
            outbox.publish(step, done({name: weight.clone() for name, weight in weights.items()}), final=False)
            ref = published(outbox, remote)
    files = [path.rpartition("/")[2] for path in remote.list(ref.path)]
    deltas = [f"model-0000{number}-of-00002.safetensors.delta" for number in (1, 2)]
    assert files == [*deltas, "model.safetensors.index.json", "policy.json"]
    found = dict(read_weights(policies.fetch_policy(remote, ref, tmp_path / "another")))
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def test_older_policies_and_checkpoints_are_deleted(store, outbox):
    def save(folder: Path) -> None:
        save_file({"weight": torch.zeros(4)}, folder / "trainer.safetensors")
        (folder / "state.json").write_text(json.dumps({"step": step}))

    trainer = SimpleNamespace(save=save, start_copy=lambda read: done(read()), checkpoint_bytes=1000)
    for step in range(1, 6):
        outbox.publish(step, done({"weight": torch.full((4,), float(step)).bfloat16()}), final=False)
        published(outbox, store)
        outbox.checkpoint(step, trainer)
    outbox._newest_checkpoint.result()
    whole = [path.split("/")[1] for path in store.list("policies") if path.endswith(".safetensors")]
    assert whole == [f"step={number:08d}" for number in (3, 4, 5)]
    assert [found.step for found in checkpoints.list_checkpoints(store)] == [4, 5]


def test_a_complete_checkpoint_is_not_rewritten(store, outbox, alarms, tmp_path, monkeypatch):
    """A stop while the Trainer waits saves that step once more; by then an alarm may be on, and a kill may come."""

    def save(folder: Path) -> None:
        save_file({"weight": torch.zeros(4)}, folder / "trainer.safetensors")
        (folder / "state.json").write_text(json.dumps({"step": 3}))

    trainer = SimpleNamespace(save=save, start_copy=lambda read: done(read()), checkpoint_bytes=1000)
    outbox.checkpoint(3, trainer)
    outbox._newest_checkpoint.result()
    alarms.see_silence(1e6)
    assert alarms.on
    monkeypatch.setattr(store._files, "put_file", lambda path, local: pytest.fail(f"{path} is written again"))
    outbox.checkpoint(3, trainer)
    outbox._newest_checkpoint.result()
    checkpoints.download_checkpoint(store, checkpoints.newest_whole_checkpoint(store), tmp_path / "copy")


def test_a_policy_by_adapters_is_adapters_and_the_final_one_is_whole(store, outbox, tmp_path):
    parts = {
        f"base_model.model.layers.0.q_proj.lora_{side}.weight": torch.randn(shape)
        for side, shape in (("A", (2, 6)), ("B", (8, 2)))
    }
    outbox.publish(2, done(parts), final=False)
    ref = published(outbox, store)
    folder = policies.fetch_policy(store, ref, tmp_path / "cache")
    assert {file.name for file in folder.glob("adapter*")} == {"adapter_config.json", "adapter_model.safetensors"}
    assert not (folder / "model.safetensors").exists() and ref.fingerprint == fingerprint(read_weights(folder))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj"] and config["r"] == 2
    assert config["base_model_name_or_path"] == str(tmp_path / "template")
    outbox.publish(3, done({"weight": torch.zeros(4, dtype=torch.bfloat16)}), final=True)
    final = policies.fetch_policy(store, published(outbox, store), tmp_path / "cache")
    assert (final / "model.safetensors").exists() and not list(final.glob("adapter*"))


@pytest.fixture
def slow(monkeypatch):
    """Policies that are published, and an event that lets each be written."""
    steps, may_write, publish = [], threading.Event(), policies.publish_policy

    def publish_slowly(store, folder, policy, *rest):
        steps.append(policy.step)
        assert may_write.wait(30)
        return publish(store, folder, policy, *rest)

    monkeypatch.setattr(policies, "publish_policy", publish_slowly)
    return steps, may_write


def test_training_does_not_wait_for_a_policy_and_the_newest_is_next(store, outbox, slow):
    steps, may_write = slow

    def publish(step: int) -> None:
        outbox.publish(step, done({"weight": torch.full((4,), float(step)).bfloat16()}), final=False)

    publish(1)
    wait_until(lambda: steps == [1])
    for step in (2, 3, 4):
        publish(step)  # returns, while the first is written
    assert len(outbox._unpublished) == 1, "each would be as large as the model"
    may_write.set()
    assert published(outbox, store).step == 4 and steps == [1, 4]


def test_a_policy_is_published_behind_its_record(store, outbox, monkeypatch, slow):
    steps, may_write = slow
    may_write.set()
    may_record = threading.Event()
    monkeypatch.setattr(outbox, "_write_record", lambda *_: may_record.wait(30))
    outbox.record(2, Batch([], {}, None), {})
    outbox.publish(2, done({"weight": torch.ones(4).bfloat16()}), final=False)
    time.sleep(0.2)
    assert steps == []
    may_record.set()
    assert published(outbox, store).step == 2


def published(outbox, store) -> policies.PolicyRef:
    outbox._newest_policy.result()
    return policies.latest_policy(store)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "policy.json"])
def test_a_trainer_that_waits_notices_that_its_policy_was_removed(store, outbox, monkeypatch, file):
    monkeypatch.setattr("flows.trainer.outbox.LOOK_S", 0.0)
    assert not outbox.has_lost_policy(), "none was published"
    outbox.publish(7, done({"weight": torch.ones(4).bfloat16()}), final=False)
    ref = published(outbox, store)
    assert not outbox.has_lost_policy()
    store.delete(f"{ref.path}/{file}")
    assert outbox.has_lost_policy()
    outbox.publish(7, done({"weight": torch.ones(4).bfloat16()}), final=False)
    assert published(outbox, store).path == ref.path and not outbox.has_lost_policy()


@pytest.mark.parametrize("content", [b"", b'{"a": 1}', None])
def test_a_trainer_that_waits_mends_the_pointer(store, outbox, monkeypatch, content):
    monkeypatch.setattr("flows.trainer.outbox.LOOK_S", 0.0)
    outbox.publish(7, done({"weight": torch.ones(4).bfloat16()}), final=False)
    ref = published(outbox, store)
    store.put(policies.LATEST, content) if content is not None else store.delete(policies.LATEST)
    assert not outbox.has_lost_policy()
    assert policies.latest_policy(store) == ref


def test_it_looks_now_and_then_only(outbox, store, monkeypatch):
    outbox.publish(7, done({"weight": torch.ones(4).bfloat16()}), final=False)
    published(outbox, store)
    monkeypatch.setattr(policies, "is_stored", lambda *_: pytest.fail("asked the store"))
    assert not any(outbox.has_lost_policy() for _ in range(100))
