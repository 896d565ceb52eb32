"""Small files that are empty, cut short or another program's. Run: pytest tests/storage/test_damaged_records.py

- each read of one raises a StoreError with the file's path, the run, the cause and a remedy
- a run with one is named by `tba runs`, and the others are listed
- publishing, pruning and evaluating go on beside a damaged pointer, also one of an attempt that never began
- an accuracy that is no number makes no policy the best, and no pointer with one is followed
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime

import pytest

from flows.config import RunConfig, load_run, read_recorded
from storage import attempts, kept_policies, ledger, policies, requests, summary
from storage.errors import DamagedRecord
from storage.status import all_runs
from storage.store import RunStore
from tests.storage.helpers import NOON, OWNER

DAMAGES = {"0 bytes": b"", "cut short": b'{"step"', "foreign": b'{"a": 1}', "no object": b"7", "no text": b"\xff\x00"}
READERS = {
    "policies/latest.json": policies.latest_policy,
    "policies/best.json": kept_policies.best_policy,
    "trainer/attempt=00000001.json": attempts.list_attempts,
    "trainer/heartbeat.json": attempts.read_heartbeat,
    "control/searchers.json": lambda store: requests.wanted_searchers(store, 1),
    "syncs/attempt=00000001/sync=00000001.parquet": lambda store: ledger.effective_syncs(store, 10),
    "metrics/evaluations/step=00000001.parquet": lambda store: ledger.accuracy(
        store, "metrics/evaluations/step=00000001.parquet", policy_step=1
    ),
    "summary.json": summary.read_summary,
    "run.json": load_run,
}
ANY_OBJECT = ("trainer/heartbeat.json", "summary.json")  # their fields have defaults


@pytest.fixture
def run(local_store) -> RunStore:
    local_store.create_run(RunConfig(run="run").recorded())
    return local_store


def publish(store: RunStore, tmp_path, step: int) -> policies.PolicyRef:
    (tmp_path / "policy").mkdir(exist_ok=True)
    (tmp_path / "policy" / "model.safetensors").write_text("weights")
    return policies.publish_policy(store, tmp_path / "policy", policies.policy_ref(step, f"{step:032d}", attempt=1))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("path", READERS)
def test_the_error_names_path_cause_and_remedy(run, path, damage):
    run.put(path, DAMAGES[damage])
    if damage == "foreign" and path in ANY_OBJECT:
        assert READERS[path](run)["a"] == 1
        return
    with pytest.raises(DamagedRecord) as error:
        READERS[path](run)
    assert path in str(error.value) and run.url in str(error.value)
    assert any(remedy in str(error.value) for remedy in ("Restore", "replaces it", "Delete it"))


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("trainer/heartbeat.json", {"step": "three"}),
        ("trainer/heartbeat.json", {"alarms": []}),
        ("summary.json", {"trajectories": "many"}),
        (
            "trainer/attempt=00000001.json",
            {"attempt": 1, "resumed_from": 0, "owner": asdict(OWNER), "created_at": ""},
        ),
        ("trainer/attempt=00000001.json", {"attempt": 1, "resumed_from": 0, "owner": {}, "created_at": str(NOON)}),
    ],
)
def test_fields_of_another_type_are_named(run, path, content):
    run.put(path, json.dumps(content).encode())
    with pytest.raises(DamagedRecord, match=path):
        READERS[path](run)
    (status,) = all_runs(run.url)
    assert status.state == "unreadable" and path in status.message


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_json_that_is_none_is_named_where_the_run_is_started(run, damage):
    run.put("run.json", DAMAGES[damage])
    with pytest.raises(DamagedRecord, match=r"run\.json"):
        run.create_run(RunConfig(run="run").recorded(), read_recorded)


def test_the_record_of_another_attempt_is_refused(run):
    attempts.start_attempt(run, 0, OWNER)
    run.put("trainer/attempt=00000002.json", run.get("trainer/attempt=00000001.json"))
    with pytest.raises(DamagedRecord, match="is the record of attempt 1"):
        attempts.list_attempts(run)


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "policies/../../elsewhere"},
        {"path": "run.json"},
        {"fingerprint": "f/../../../elsewhere"},
        {"step": -5},
        {"step": 2**62},
    ],
)
def test_a_pointer_out_of_the_policies_is_refused(run, tmp_path, changes):
    publish(run, tmp_path, 1)
    run.put(policies.LATEST, json.dumps(json.loads(run.get(policies.LATEST)) | changes).encode())
    with pytest.raises(DamagedRecord, match="no policy's name"):
        policies.latest_policy(run)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("path", READERS)
def test_one_bad_run_does_not_hide_the_others(run, path, damage):
    other = RunStore(run.url, "whole")
    other.create_run(RunConfig(run="whole").recorded())
    for store in (run, other):
        attempts.start_attempt(store, 0, OWNER)
        attempts.write_heartbeat(store, {"state": "stopped", "step": 3, "at": datetime.now(UTC).isoformat()})
    run.put(path, DAMAGES[damage])
    found = {status.run: status for status in all_runs(run.url)}
    assert (found["whole"].state, found["whole"].step) == ("stopped", 3)
    assert found["run"].state != "unreadable" or path in found["run"].message
    if damage == "0 bytes" and path not in ("control/searchers.json", "policies/latest.json") and "sync" not in path:
        assert found["run"].state == "unreadable"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_pointer_is_replaced_by_the_next_policy(run, tmp_path, damage):
    publish(run, tmp_path, 1)
    for path in (policies.LATEST, kept_policies.BEST):
        run.put(path, DAMAGES[damage])
    newest = publish(run, tmp_path, 2)
    assert policies.latest_policy(run) == newest
    kept_policies.prune_policies(run, keep=1)
    assert run.exists("policies/step=00000001/model.safetensors"), "it may be the best one"
    assert kept_policies.hold_policy(run, newest, "s0") and kept_policies.keep_if_best(run, newest, 0.5, 8)
    kept_policies.prune_policies(run, keep=1)
    assert not run.exists("policies/step=00000001/model.safetensors")
    assert kept_policies.best_policy(run).path == newest.path


def test_a_damaged_best_json_is_deleted_as_its_message_says(run):
    run.put(kept_policies.BEST, b"")
    with pytest.raises(DamagedRecord, match=r"best\.json.*Delete it: the next better policy is named there"):
        kept_policies.best_policy(run)
    run.delete(kept_policies.BEST)
    assert kept_policies.best_policy(run) is None


def test_a_pointer_of_an_attempt_that_never_began_stops_no_trainer(run, tmp_path):
    attempts.start_attempt(run, 0, OWNER)
    publish(run, tmp_path, 1)
    run.put(policies.LATEST, json.dumps(json.loads(run.get(policies.LATEST)) | {"attempt": 999}).encode())
    newest = publish(run, tmp_path, 2)
    assert policies.latest_policy(run) == newest


@pytest.mark.parametrize("accuracy", [float("nan"), float("inf")])
def test_an_accuracy_that_is_no_number_makes_no_best_policy(run, tmp_path, accuracy):
    ref = publish(run, tmp_path, 1)
    assert not kept_policies.keep_if_best(run, ref, accuracy, 8)
    assert kept_policies.best_policy(run) is None
    assert kept_policies.keep_if_best(run, ref, 0.5, 8)
    run.put(kept_policies.BEST, json.dumps(json.loads(run.get(kept_policies.BEST)) | {"accuracy": accuracy}).encode())
    with pytest.raises(DamagedRecord, match=r"policies/best\.json"):
        kept_policies.best_policy(run)
    assert kept_policies.keep_if_best(run, ref, 0.25, 8)
