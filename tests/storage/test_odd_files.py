"""One odd file or entry costs what it holds, and nothing else.

Claims
- a late evaluation of a policy that was pruned meanwhile does not become the best one; the successor's hold stays
- latest.json is written again if it is missing or damaged, and a finished run is not trained again
- a full disk while a policy is fetched, and a stale handle in a look-up or a deletion, are waited for
- a name that is not UTF-8 stops neither a sync nor upkeep
- a run is summarised though an entry lacks a value, has a far-off time or a duration without end
- a checkpoint whose header is damaged in any bit is not resumed from, if that can be seen without its tensors
- `tba runs` lists the others of a store beside an odd one
- a shard in which a component of the reward has two values is refused
- an export of a folder counts as `tba sql` does, whatever foreign files lie beside
- copies of ledger entries count nowhere, and verify names them
- a mark of expired rounds that upkeep did not write deletes no shard
- verify goes on though upkeep deletes rewards meanwhile

Run: pytest tests/storage/test_odd_files.py
"""

import errno
import json
import os
import random
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from storage import (
    attempts,
    checkpoints,
    kept_policies,
    ledger,
    ledger_upkeep,
    policies,
    queries,
    reward_versions,
    status,
    summary,
    upkeep,
)
from storage.buffer import ReplayBuffer
from storage.errors import DamagedPolicy
from storage.export import export
from storage.intake import refusals
from storage.mop import SamplingSettings
from storage.new_shards import NewShards, new_shards
from storage.process_identity import Identity
from storage.shards import commit_shard, parquet_bytes
from storage.store import RunStore
from storage.upkeep import delete_superseded
from storage.verify import verify
from tests.faults.memory_store import memory_store
from tests.flows.prepared_run import prepare_run
from tests.storage.helpers import OWNER, make_shard

STEP = "metrics/training/attempt=00000001/step=00000003.parquet"
ROUND = "metrics/search/searcher=s0/round=00000001.parquet"
EVALUATION = "metrics/evaluations/step=00000000.parquet"
ATTEMPT = "trainer/attempt=00000001.json"
SHARD = "trajectories/searcher=s0/round=00000001.parquet"


@pytest.fixture
def run(tmp_path) -> RunStore:
    return prepare_run((tmp_path / "store").as_uri())


@pytest.fixture
def publish(tmp_path):
    """publish(store, step, …) publishes a policy of one file."""

    def publish(store: RunStore, step: int, *, final: bool = False) -> policies.PolicyRef:
        folder = tmp_path / f"policy-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"w" * 1000)
        return policies.publish_policy(store, folder, policies.policy_ref(step, f"{step:032d}", attempt=1, final=final))

    return publish


def change(run: RunStore, path: str, column: str, value) -> None:
    table = pq.read_table(pa.BufferReader(run.get(path)))
    place = table.schema.get_field_index(column)
    field = table.schema.field(place)
    run.put(path, parquet_bytes(table.set_column(place, field, pa.array([value] * table.num_rows, field.type))))


def count(run: RunStore, *views: str) -> list[int]:
    return [queries.query(run, f"SELECT count(*) AS n FROM {view}")["n"][0].as_py() for view in views]


def test_a_late_evaluation_of_a_pruned_policy_changes_nothing(local_store, publish):
    local_store.put("run.json", b"{}")
    attempts.start_attempt(local_store, 0, OWNER)
    late = publish(local_store, 4)
    assert kept_policies.hold_policy(local_store, late, "s0")  # its machine freezes
    newest = [publish(local_store, step) for step in range(5, 10)][-1]
    kept_policies.hold_policy(local_store, newest, "s0")  # by its successor
    kept_policies.prune_policies(local_store, keep=3)
    assert not kept_policies.keep_if_best(local_store, late, 0.9, 8)
    assert kept_policies.best_policy(local_store) is None


@pytest.mark.parametrize("damage", [lambda run: run.put(policies.LATEST, b""), lambda run: run.delete(policies.LATEST)])
def test_latest_json_is_written_again_and_a_finished_run_stays_finished(local_store, publish, damage):
    local_store.put("run.json", b"{}")
    attempts.start_attempt(local_store, 0, OWNER)
    publish(local_store, 40)
    final = publish(local_store, 80, final=True)
    damage(local_store)
    found = policies.restore_latest(local_store)
    assert (found.step, found.path, found.final) == (80, final.path, True)
    assert policies.latest_policy(local_store) == found


@pytest.mark.parametrize("name", ["policy.json", "model.safetensors", "other.safetensors"])
def test_a_pipe_in_a_policys_folder_is_not_waited_for(local_store, publish, tmp_path, name):
    ref = publish(local_store, 4)
    file = local_store.local_path(f"{ref.path}/{name}")
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with pytest.raises(DamagedPolicy, match=f"{name} is no file"):
        policies.fetch_policy(local_store, ref, tmp_path / "cache")


def test_a_run_without_a_policy_gets_no_latest_json(run):
    assert policies.restore_latest(run) is None and not run.exists(policies.LATEST)


def test_a_full_disk_is_waited_for_while_a_policy_is_fetched(publish, tmp_path, monkeypatch):
    remote = memory_store()
    remote.put("run.json", b"{}")
    attempts.start_attempt(remote, 0, OWNER)
    ref, write, full = publish(remote, 4), Path.write_bytes, [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def write_bytes(path: Path, data: bytes) -> int:
        if path.name == "policy.json" and full:
            raise full.pop()
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    assert (policies.fetch_policy(remote, ref, tmp_path / "cache") / "model.safetensors").stat().st_size == 1000
    assert not full


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("is_file", lambda run: attempts.check_not_superseded(run, 1)),
        ("unlink", lambda run: run.delete("control/stop.json")),
    ],
)
def test_a_stale_handle_is_tried_again(run, monkeypatch, name, act):
    run.put("control/stop.json", b"{}")
    real, stale = getattr(Path, name), [OSError(errno.ESTALE, os.strerror(errno.ESTALE))]

    def once(path: Path, *arguments, **named):
        if stale:
            raise stale.pop()
        return real(path, *arguments, **named)

    monkeypatch.setattr(Path, name, once)
    act(run)
    assert not stale


@pytest.mark.parametrize(
    ("path", "column", "value"),
    [
        (STEP, "wait_s", None),
        (STEP, "step_s", None),
        (STEP, "staleness_mean", None),
        (STEP, "started_at", 2**62),
        (ROUND, "sampling_started_at", None),
        (EVALUATION, "seconds", float("inf")),
        (EVALUATION, "created_at", 2**62),
    ],
)
def test_a_run_is_summarised_though_a_value_is_missing_or_odd(run, path, column, value):
    change(run, path, column, value)
    assert summary.summarise(run)["trajectories"] == 8


def test_a_name_that_is_not_utf8_hides_no_shard(run, tmp_path):
    before = new_shards(run, {})
    for folder in ("heads", "trajectories", "metrics/search"):
        (tmp_path / "store" / run.run / folder / os.fsdecode(b"caf\xe9.txt")).touch()
    assert NewShards(run).find({}) == before != {}
    assert ledger_upkeep.compact_ledger(run) >= 0 and upkeep.compact(run) >= 0
    assert upkeep.expire(run, timedelta(hours=1), None, min_size=1) == {}


def test_a_run_whose_only_step_is_torn_is_summarised(run):
    for path in run.list("metrics/training"):
        run.put(path, b"torn")
    assert summary.summarise(run)["steps"] == 0


def test_a_damaged_header_of_a_checkpoint_is_seen(local_store, tmp_path):
    local_store.put("run.json", b"{}")
    attempts.start_attempt(local_store, 0, OWNER)
    weights = {
        f"{kind}.layer.{place}": np.zeros((4, 4), np.float32) for kind in ("policy", "exp_avg") for place in range(3)
    }
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(weights, folder / "trainer.safetensors")
    (folder / "state.json").write_text('{"step": 50}')
    checkpoints.save_checkpoint(local_store, 50, folder, 1)
    assert checkpoints.newest_whole_checkpoint(local_store).step == 50
    file = local_store.local_path("trainer/step=00000050-a0001/trainer.safetensors")
    whole, chance = file.read_bytes(), random.Random(0)
    length = int.from_bytes(whole[:8], "little")
    for _ in range(200):
        flipped = bytearray(whole)
        flipped[8 + chance.randrange(length)] ^= 1 << chance.randrange(7)
        file.write_bytes(flipped)
        if checkpoints.newest_whole_checkpoint(local_store) is not None:
            assert len(load_file(file)) == len(weights)  # their names may differ, which the Trainer sees
    file.write_bytes((2).to_bytes(8, "little") + b"{}")
    assert checkpoints.newest_whole_checkpoint(local_store) is None


def test_an_odd_folder_hides_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "WATCH_S", 0.05)
    prepare_run(tmp_path.as_uri(), "one")
    two = prepare_run(tmp_path.as_uri(), "two")
    three = prepare_run(tmp_path.as_uri(), "three")
    (tmp_path / "loop").symlink_to("loop")
    record = json.loads(three.get(ATTEMPT))
    three.put(ATTEMPT, json.dumps(record | {"owner": asdict(replace(Identity.current(), pid=-1))}).encode())
    two.delete("run.json")
    (tmp_path / "outside").write_text("{}")
    (tmp_path / "two" / "run.json").symlink_to(tmp_path / "outside")
    found = {row.run: row.state for row in status.all_runs(tmp_path.as_uri())}
    assert found.keys() == {"one", "two", "three"} and found["two"] == "unreadable"


def test_a_component_with_two_values_is_refused(tmp_path):
    store = memory_store()
    store.put("run.json", b"{}")
    attempts.start_attempt(store, 0, OWNER)
    shard = make_shard("s0", 0)
    place = shard.schema.get_field_index("rewards")
    twice = pa.array([[("exact", 1.0), ("exact", 0.0)]] * 4, shard.schema.field(place).type)
    commit_shard(store, shard.set_column(place, shard.schema.field(place), twice))
    commit_shard(store, make_shard("s0", 1))
    assert ReplayBuffer(store, SamplingSettings(min_size=1), 0).sync(1, 1).rounds == {"s0": [1]}
    (refusal,) = refusals(store)
    assert refusal.round == 0 and "have different names" in refusal.reasons[0]
    assert count(store, "trajectories") == [4]


@pytest.mark.parametrize(
    "place",
    [
        lambda run: run.put(
            "trainer/attempt=99999999.json", run.get(ATTEMPT).replace(b'"attempt": 1', b'"attempt": 99999999')
        ),
        lambda run: run.put("trainer/attempt=copy.json", b"junk"),
        lambda run: run.put("trajectories/searcher=s0/round=1.parquet", run.get(SHARD)),
        lambda run: run.put("trajectories/compacted/s0-00000000-00000001.parquet", run.get(SHARD)),
        lambda run: run.put("quarantine/searcher=s0/round=1.json", b"{}"),
        lambda run: run.put(f"expired/searcher=s0/through={'9' * 20}.json", b""),
        lambda run: run.put(STEP.replace(".parquet", " (copy).parquet"), run.get(STEP)),
    ],
    ids=["attempt", "copied attempt", "round", "block", "refusal", "mark", "copied step"],
)
def test_an_export_counts_as_sql_does_beside_foreign_files(run, tmp_path, place):
    views = ("trajectories", "batches", "training_steps")
    before = count(run, *views)
    place(run)
    export(run, tmp_path / "run.duckdb")
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as database:
        exported = [database.execute(f"SELECT count(*) FROM {view}").fetchone()[0] for view in views]
    assert exported == count(run, *views) == before


def test_a_copy_of_an_entry_counts_nowhere_and_is_named(run):
    before = count(run, "batches", "training_steps")
    copies = [
        path.replace(".parquet", " (conflicted copy).parquet")
        for path in (STEP, STEP.replace("metrics/training", "batches"))
    ]
    for copy in copies:
        run.put(copy, run.get(copy.replace(" (conflicted copy)", "")))
    assert count(run, "batches", "training_steps") == before
    assert set(copies) <= {fault.path for fault in verify(run, lambda _: "").faults if fault.kind == "stray file"}


def test_a_mark_of_another_program_deletes_no_shard(run):
    for number in range(2, 5):
        commit_shard(run, make_shard("s0", number))
    run.put("expired/searcher=s0/through=99999999.json", b"")
    before = run.list("trajectories")
    assert delete_superseded(run, timedelta(0)) == 0 and run.list("trajectories") == before


def test_verify_goes_on_though_rewards_are_deleted_meanwhile(run, monkeypatch):
    reward_versions.begin_version(run, "v2", "a:b", source="")
    reward_versions.record_rewards(run, "v2", make_shard("s0", 0), [1.0] * 4)
    get = RunStore.get

    def gone(store: RunStore, path: str) -> bytes:
        if path.startswith("rewards/v2/searcher"):
            store.delete(path)
        return get(store, path)

    before = {(fault.kind, fault.path) for fault in verify(run, lambda _: "").faults}
    monkeypatch.setattr(RunStore, "get", gone)
    assert {(fault.kind, fault.path) for fault in verify(run, lambda _: "").faults} == before


def test_an_undone_evaluation_of_an_older_version_does_not_count(run):
    old = pq.read_table(pa.BufferReader(run.get(EVALUATION))).drop_columns(["attempt"])
    place = old.schema.get_field_index("policy_step")
    run.put(
        "metrics/evaluations/step=00000008.parquet", parquet_bytes(old.set_column(place, "policy_step", pa.array([8])))
    )
    attempts.start_attempt(run, 4, OWNER)
    assert list(ledger.evaluations(run)) == queries.query(run, "SELECT policy_step p FROM evaluations")["p"].to_pylist()
