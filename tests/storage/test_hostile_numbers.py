"""A store's writer cannot make a reader count without end, hang, or write outside the run.

Claims
- a step, an attempt or a round beyond eight digits inside a record is that record's fault, and nobody counts up to it
- a time without a zone, or a list of files that no folder can have, is that record's fault
- digits of other scripts are no numbers in names, so no round counts twice
- a pipe in place of a file is an error, not a wait
- a link that takes a folder's place between the check and the write leads nowhere
- an export replaces no device, no folder and no link

Run: pytest tests/storage/test_hostile_numbers.py
"""

import json
import os
import resource
from pathlib import Path

import pytest

from storage import attempts, ledger, requests
from storage.errors import DamagedRecord, StoreError, UnsafePath
from storage.export import export
from storage.local_folder import LocalFolder
from storage.queries import query
from storage.schema import BATCH, SYNC, to_table
from storage.shards import parquet_bytes
from storage.store import RunStore
from storage.verify import MOST_MISSING, verify
from tests.flows.prepared_run import prepare_run


@pytest.fixture
def run(tmp_path) -> RunStore:
    run = prepare_run((tmp_path / "store").as_uri())
    sync = {"attempt": 1, "sync": 1, "step": 1, "searcher": "s0", "first_round": 0, "last_round": 1}
    run.put(
        "syncs/attempt=00000001/sync=00000001.parquet",
        parquet_bytes(to_table([sync | {"num_trajectories": 8}], SYNC)),
    )
    return run


@pytest.fixture
def little_memory():
    """A range of that many numbers does not fit."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 * 1024**3, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def change_rows(run: RunStore, path: str, schema, **columns) -> None:
    rows = ledger.read_entry(run, path, schema, []).to_pylist()
    run.put(path, parquet_bytes(to_table([row | columns for row in rows], schema)))


def change_record(run: RunStore, path: str, **fields) -> None:
    run.put(path, json.dumps(json.loads(run.get(path)) | fields).encode())


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("syncs/attempt=00000001/sync=00000001.parquet", (SYNC, {"last_round": 10**12})),
        ("syncs/attempt=00000001/sync=00000001.parquet", (SYNC, {"first_round": 0, "last_round": 99_999_999})),
        ("syncs/attempt=00000001/sync=00000001.parquet", (SYNC, {"first_round": -1})),
        ("batches/attempt=00000001/step=00000002.parquet", (BATCH, {"step": 10**9})),
        ("trainer/attempt=00000001.json", {"resumed_from": 10**12}),
        ("trainer/attempt=00000001.json", {"created_at": "2026-01-01T00:00:00"}),
    ],
    ids=["round", "rounds", "negative", "step", "attempt", "time"],
)
def test_a_number_that_cannot_be_is_the_records_fault(run, little_memory, path, change):
    change_record(run, path, **change) if isinstance(change, dict) else change_rows(run, path, change[0], **change[1])
    assert path in [fault.path for fault in verify(run, lambda _: "").faults]
    with pytest.raises(DamagedRecord, match=path):
        if path.startswith("trainer"):
            attempts.list_attempts(run)
        else:
            ledger.read_entry(run, path, SYNC if path.startswith("syncs") else BATCH, [])


def test_verify_names_few_of_the_steps_that_an_attempt_claims(run, little_memory):
    change_record(run, "trainer/attempt=00000001.json", resumed_from=99_999_999)
    told = [fault.message for fault in verify(run, lambda _: "").faults if fault.kind == "missing batch"]
    assert len(told) == MOST_MISSING + 1 and told[-1].startswith("9999899")
    assert told[-1].endswith("further steps count as trained, without a recorded draw")


def test_verify_names_few_of_the_rounds_that_a_sync_claims(run, little_memory):
    change_rows(run, "syncs/attempt=00000001/sync=00000001.parquet", SYNC, last_round=900_000)
    told = [fault.message for fault in verify(run, lambda _: "").faults if fault.kind == "sync without shards"]
    assert told and all(len(message) < 10_000 for message in told) and " and more were taken in" in told[0]


def test_no_request_wants_more_searchers_than_a_flow_can_start(run):
    run.put(requests.SEARCHERS, b'{"wanted": 1000000000}')
    with pytest.raises(DamagedRecord, match="wanted: Input should be less than or equal to 10000"):
        requests.wanted_searchers(run, 1)


def test_digits_of_other_scripts_are_no_numbers(run):
    counted = "SELECT count(*) AS n FROM trajectories"
    before = query(run, counted)["n"][0].as_py()
    copy = "trajectories/searcher=s0/round=0000000\N{ARABIC-INDIC DIGIT ONE}.parquet"
    run.put(copy, run.get("trajectories/searcher=s0/round=00000001.parquet"))
    assert query(run, counted)["n"][0].as_py() == before
    assert copy in [fault.path for fault in verify(run, lambda _: "").faults]
    run.put("trainer/attempt=0000000\N{ARABIC-INDIC DIGIT FIVE}.json", b"{}")
    assert attempts.latest_attempt(run) == 1


def test_a_pipe_is_not_waited_for(run, tmp_path):
    heartbeat = tmp_path / "store" / run.run / attempts.HEARTBEAT
    heartbeat.unlink(missing_ok=True)
    os.mkfifo(heartbeat)
    with pytest.raises(StoreError, match="it is no regular file; remove it"):
        attempts.read_heartbeat(run)


def test_a_link_that_takes_a_folders_place_leads_nowhere(run, tmp_path, monkeypatch):
    """It comes after the path was checked."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "store" / run.run / "control"
    elsewhere.mkdir()
    folder.mkdir(exist_ok=True)
    path_of = LocalFolder._path

    def swapped(self, path: str) -> Path:
        found = path_of(self, path)
        if not folder.is_symlink():
            folder.rename(tmp_path / "before")
            folder.symlink_to(elsewhere)
        return found

    monkeypatch.setattr(LocalFolder, "_path", swapped)
    with pytest.raises(UnsafePath, match="out of the run's folder"):
        run.put("control/stop.json", b"{}")
    assert list(elsewhere.iterdir()) == []


def test_an_export_replaces_files_only(run, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "link", "pipe"):
        with pytest.raises(OSError, match="this is no file that can be replaced; name a file"):
            export(run, tmp_path / name)
    with pytest.raises(OSError, match="name a file"):
        export(run, Path("/"))
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
