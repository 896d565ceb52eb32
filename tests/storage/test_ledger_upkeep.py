"""Claims about storage/ledger_upkeep.py. Run: pytest tests/storage/test_ledger_upkeep.py

- compaction and deletion change no answer of any reader: SQL, export, evaluations, syncs, verify, Prefect's page; on
  each store
- files become fewer as entries become more: those of each width are written as the next
- cut off at any write or deletion, no row is lost or twice, and the next call ends the work; two calls at once neither
- an entry that comes late counts, as does one that cannot be read later than the others; a wider file takes it in
- a torn entry stays and is named, and so does a torn compacted file; while one cannot be read, its entries count
- files whose rows are not those of their name, or have a newer version's column, are left alone
"""

import contextlib
import itertools
import shutil
from datetime import timedelta

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.config import RunConfig
from flows.run.prefect_page_artifacts import Artifacts
from storage import attempts, ledger, ledger_files, ledger_upkeep, queries
from storage.errors import AlreadyExists
from storage.export import export
from storage.ledger_upkeep import compact_ledger, delete_compacted
from storage.shards import parquet_bytes
from storage.store import RunStore
from storage.verify import verify
from tests.storage.helpers import NOON, OWNER, Sync, make_batch, make_search_round, make_training_step

VIEWS = ("training_steps", "all_batches", "batches", "search_rounds", "evaluations", "syncs")
STEPS = {1: (0, 13), 2: (5, 21)}  # by attempt: the checkpoint that it resumed from, and its last step


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr(ledger_files, "WIDTHS", (4, 8, 16))


def record(store: RunStore, attempt: int, steps: range) -> None:
    for step in steps:
        ledger.record_batch(store, attempt, step, make_batch([step - 1, 0]))
        ledger.record_training_step(store, make_training_step(attempt, step))
        ledger.record_sync(store, Sync(step, step, attempt, {"s0": [step - 1], "s1": [step - 1]}))
        if step % 3 == 0:
            row = {"attempt": attempt, "policy_step": step, "split": "heldout", "num_problems": 1}
            row |= {"accuracy": step / 100, "mean_response_tokens": 1.0, "seconds": 2.0, "created_at": NOON}
            ledger.record_evaluation(store, row)


def make_ledger(store: RunStore) -> None:
    store.create_run({})
    for attempt, (resumed_from, last) in STEPS.items():
        attempts.start_attempt(store, resumed_from, OWNER)
        record(store, attempt, range(resumed_from + 1, last + 1))
    for searcher, number in itertools.product(("s0", "s1"), range(13)):
        if (searcher, number) != ("s1", 6):  # it was killed between the shard and the entry
            ledger.record_search_round(store, make_search_round(searcher, number))


def answers(store: RunStore, views: tuple[str, ...] = VIEWS) -> dict:
    """What every reader of the ledger tells."""
    found = {view: queries.query(store, f"SELECT * FROM {view} ORDER BY ALL").to_pylist() for view in views}
    found["counted"] = {step: ledger.accuracy(store, path, step) for step, path in ledger.evaluations(store).items()}
    return found | {"effective": ledger.effective_syncs(store, 2**62)}


def differing(one: dict, other: dict) -> list[str]:
    """Names of differing answers: pytest would take minutes to show how they differ."""
    return [name for name in one if one[name] != other[name]]


def num_entries(store: RunStore) -> int:
    return sum(len(store.list(folder)) for folder in ledger_files.KEYS)


def exported(database: duckdb.DuckDBPyConnection) -> dict:
    return {view: database.sql(f"SELECT * FROM {view} ORDER BY ALL").to_arrow_table().to_pylist() for view in VIEWS}


@pytest.fixture
def made(local_store) -> RunStore:
    make_ledger(local_store)
    return local_store


def test_no_answer_changes(store, tmp_path):
    make_ledger(store)
    before, num_files = answers(store), num_entries(store)
    assert len(before["training_steps"]) == 21 and len(before["effective"]) == 42
    export(store, tmp_path / "run.duckdb")  # of a local store it follows the run

    assert compact_ledger(store) > 0
    assert not differing(before, answers(store))
    assert compact_ledger(store) == 0
    assert delete_compacted(store, timedelta(hours=1)) == 0
    num_deleted = delete_compacted(store, timedelta(0))
    assert num_entries(store) < num_files and num_files / 3 < num_deleted
    assert not differing(before, answers(store))
    assert {fault.kind for fault in verify(store, None).faults} <= {"unknown trajectory", "sync without shards"}
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as database:
        assert not differing(exported(database), before)


def test_an_export_counts_each_entry_once_while_both_files_are_there(made, tmp_path):
    before = answers(made)
    compact_ledger(made)
    record(made, 2, range(22, 50))
    compact_ledger(made)  # now files of several widths hold one step
    export(made, tmp_path / "run.duckdb")
    after = answers(made)
    assert len(after["training_steps"]) == 49 and after["training_steps"][:21] == before["training_steps"]
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as database:
        assert not differing(exported(database), after)


def test_prefects_page_shows_each_step_once(made):
    compact_ledger(made)
    page = Artifacts(made, RunConfig(run=made.run, store=made.url))
    page.read_steps()
    delete_compacted(made, timedelta(0))
    record(made, 2, range(22, 50))
    compact_ledger(made)
    for _ in range(2):
        page.read_steps()
    assert [row["step"] for row in page._steps] == list(range(1, 50))
    of_resumed_flow = Artifacts(made, RunConfig(run=made.run, store=made.url))
    of_resumed_flow.read_steps()
    assert of_resumed_flow._steps == page._steps


def test_files_become_fewer_as_entries_become_more(local_store):
    attempts.start_attempt(local_store, 0, OWNER)
    local_store.create_run({})
    for first in range(1, 101, 5):
        record(local_store, 1, range(first, first + 5))
        compact_ledger(local_store)
        delete_compacted(local_store, timedelta(0))
    names = [path.removeprefix("metrics/training/") for path in local_store.list("metrics/training")]
    group = "attempt=00000001"
    assert names[: len(names) - 6] == [f"{group}/step={step:08d}.parquet" for step in range(96, 101)]
    assert names[-6:] == [f"compacted/{group}-{first:08d}-{first + 15:08d}.parquet" for first in range(0, 96, 16)]
    assert len(queries.query(local_store, "SELECT * FROM training_steps").to_pylist()) == 100


class Cut(BaseException):
    """The process ends here."""


@contextlib.contextmanager
def cut_after(store: RunStore, monkeypatch, number: int):
    """The store's process ends before its change of this number."""
    changes = itertools.count()
    with monkeypatch.context() as patch:
        for name in ("put_new", "delete"):
            change = getattr(store, name)

            def change_or_end(*arguments, change=change):
                if next(changes) >= number:
                    raise Cut
                return change(*arguments)

            patch.setattr(store, name, change_or_end)
        yield


def test_cut_off_anywhere_no_row_is_lost_or_twice(local_store, tmp_path, monkeypatch):
    views, num_cuts = ("search_rounds", "training_steps"), 0
    for number in range(13):
        ledger.record_search_round(local_store, make_search_round("s0", number))
    attempts.start_attempt(local_store, 0, OWNER)
    for step in range(1, 10):
        ledger.record_training_step(local_store, make_training_step(1, step))
    before = answers(local_store, views)
    for number in itertools.count():
        shutil.copytree(tmp_path / "store", tmp_path / f"cut-{number}")
        cut = RunStore((tmp_path / f"cut-{number}").as_uri(), local_store.run)
        with cut_after(cut, monkeypatch, number):
            try:
                compact_ledger(cut)
                delete_compacted(cut, timedelta(0))
                break
            except Cut:
                num_cuts += 1
        assert not differing(before, answers(cut, views))
        compact_ledger(cut)
        delete_compacted(cut, timedelta(0))
        assert not differing(before, answers(cut, views))
        assert compact_ledger(cut) == delete_compacted(cut, timedelta(0)) == 0
    assert num_cuts > 10


def test_two_calls_at_once_write_each_file_once(made, monkeypatch):
    before, put_new = answers(made), made.put_new

    def put_after_another(path: str, data: bytes) -> None:
        compact_ledger(RunStore(made.url, made.run))
        put_new(path, data)

    monkeypatch.setattr(made, "put_new", put_after_another)
    assert compact_ledger(made) == 0
    delete_compacted(made, timedelta(0))
    assert not differing(before, answers(made))


def test_an_entry_that_comes_late_counts_and_a_wider_file_takes_it_in(made):
    compact_ledger(made)
    delete_compacted(made, timedelta(0))
    ledger.record_search_round(made, make_search_round("s1", 6))

    def rounds() -> list[int]:
        query = "SELECT round FROM search_rounds WHERE searcher = 's1' ORDER BY 1"
        return queries.query(made, query)["round"].to_pylist()

    assert rounds() == list(range(13))
    with pytest.raises(AlreadyExists):
        ledger.record_search_round(made, make_search_round("s1", 6))
    assert compact_ledger(made) == delete_compacted(made, timedelta(0)) == 0
    assert rounds() == list(range(13))


def test_a_late_entry_is_in_the_next_wider_file(local_store):
    for number in [0, 1, 3, *range(4, 12)]:
        ledger.record_search_round(local_store, make_search_round("s0", number))
    assert compact_ledger(local_store) > 0  # of width 4
    delete_compacted(local_store, timedelta(0))
    for number in (2, *range(12, 30)):
        ledger.record_search_round(local_store, make_search_round("s0", number))
    assert compact_ledger(local_store) > 0  # of width 16
    delete_compacted(local_store, timedelta(0))
    assert "metrics/search/searcher=s0/round=00000002.parquet" not in local_store.list("metrics/search")
    assert queries.query(local_store, "SELECT round FROM search_rounds ORDER BY 1")["round"].to_pylist() == [*range(30)]


def test_a_torn_entry_stays_and_is_named(made, caplog):
    torn = "metrics/training/attempt=00000002/step=00000013.parquet"
    whole = made.get(torn)
    made.put(torn, whole[:100])
    compact_ledger(made)
    delete_compacted(made, timedelta(0))
    assert torn in [fault.path for fault in verify(made, None).faults if fault.kind == "torn ledger entry"]

    def steps() -> list[int]:
        return queries.query(made, "SELECT step FROM training_steps ORDER BY 1")["step"].to_pylist()

    assert steps() == [step for step in range(1, 22) if step != 13] and torn in caplog.text
    made.put(torn, whole)  # restored
    assert steps() == list(range(1, 22))


def test_an_entry_of_a_newer_version_stays(made):
    """It has a column that this version would lose."""
    newer = "metrics/training/attempt=00000002/step=00000013.parquet"
    rows = pq.read_table(pa.BufferReader(made.get(newer)))
    made.put(newer, parquet_bytes(rows.append_column("of_tomorrow", pa.array([1.5]))))
    before = answers(made)
    compact_ledger(made)
    delete_compacted(made, timedelta(0))
    assert "of_tomorrow" in pq.read_table(pa.BufferReader(made.get(newer))).column_names
    assert not differing(before, answers(made))


@pytest.mark.parametrize("is_deleted", [False, True])
def test_while_a_compacted_file_cannot_be_read_its_entries_count(made, is_deleted):
    before = answers(made)
    compact_ledger(made)
    compacted = [path for path in made.list("metrics/training") if "/compacted/" in path]
    for path in compacted:
        made.delete(path) if is_deleted else made.put(path, made.get(path)[:200])
    assert delete_compacted(made, timedelta(0)) > 0  # of other folders
    assert not differing(before, answers(made))


def test_a_torn_compacted_file_is_left_alone_for_its_owner_to_restore(local_store):
    for number in range(9):
        ledger.record_search_round(local_store, make_search_round("s0", number))
    assert compact_ledger(local_store) == 1
    delete_compacted(local_store, timedelta(0))
    torn = "metrics/search/compacted/searcher=s0-00000000-00000003.parquet"
    whole = local_store.get(torn)
    local_store.put(torn, whole[:200])
    for number in range(9, 30):
        ledger.record_search_round(local_store, make_search_round("s0", number))
    compact_ledger(local_store)
    delete_compacted(local_store, timedelta(0))
    local_store.put(torn, whole)
    assert queries.query(local_store, "SELECT round FROM search_rounds ORDER BY 1")["round"].to_pylist() == [*range(30)]


@pytest.mark.parametrize("step", ["torn", None, -1, "5", 10**10])
def test_of_a_torn_file_of_evaluations_the_others_count(local_store, caplog, step):
    """Also of one whose steps are no numbers."""
    make_ledger(local_store)
    before = ledger.evaluations(local_store)
    compact_ledger(local_store)
    delete_compacted(local_store, timedelta(0))
    torn = next(path for path in local_store.list("metrics/evaluations") if "/compacted/" in path)
    if step == "torn":
        local_store.put(torn, local_store.get(torn)[:200])
    else:
        rows = pq.read_table(pa.BufferReader(local_store.get(torn)))
        place = rows.schema.get_field_index("policy_step")
        local_store.put(torn, parquet_bytes(rows.set_column(place, "policy_step", pa.array([step] * rows.num_rows))))
    left = ledger.evaluations(local_store)
    assert left.keys() < before.keys() and torn in caplog.text


def test_files_with_rows_of_other_names_are_left_alone(made):
    foreign = {
        "metrics/training/attempt=00000001/step=00000005.parquet": [make_training_step(1, 6)],
        "metrics/training/attempt=00000001/step=00000006.parquet": [make_training_step(2, 6)],
    }
    for path, rows in foreign.items():
        made.put(path, parquet_bytes(pa.Table.from_pylist(rows, ledger_upkeep.COLUMNS["metrics/training"])))
    made.put("metrics/training/compacted/attempt=00000001-00000001-00000004.parquet", b"no block begins at 1")
    before = answers(made)
    compact_ledger(made)
    delete_compacted(made, timedelta(0))
    assert not differing(before, answers(made))
    assert foreign.keys() <= set(made.list("metrics/training"))
