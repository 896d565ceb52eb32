"""Entries of the ledger that are torn, or another program's. Run: pytest tests/storage/test_torn_entries.py

- SQL, report, export, the run's summary and Prefect's page leave them out, whichever table has them
- verify names each with its path, torn rewards and measurements too; a torn sync hides no other fault
- rewards of another version that cannot be read are named with their path
- neither a clock that stood still nor a single step keeps a run from its report and its summary
"""

import duckdb
import pyarrow as pa
import pytest

from flows.config import RunConfig
from flows.report.render import render
from flows.run.prefect_page_artifacts import Artifacts
from flows.run.prefect_page_lineage import PublishedPolicies
from storage import intake, queries, summary, verify
from storage.errors import DamagedRecord
from storage.export import export
from storage.reward_versions import with_rewards
from storage.shards import parquet_bytes
from tests.flows.prepared_run import prepare_run
from tests.storage.helpers import make_shard

FOREIGN = parquet_bytes(pa.table({"mood": ["good", "bad"]}))
ENTRIES = {
    "metrics/training/attempt=00000001/step=00000002.parquet": b"PAR1 cut",
    "metrics/training/attempt=00000001/step=00000003.parquet": FOREIGN,
    "batches/attempt=00000001/step=00000002.parquet": b"",
    "batches/attempt=00000001/step=00000003.parquet": FOREIGN,
    "metrics/search/searcher=s0/round=00000001.parquet": FOREIGN,
    "metrics/evaluations/step=00000004.parquet": b"<html>",
    "syncs/attempt=00000001/sync=00000001.parquet": b"",
    "rewards/v2/searcher=s0/round=00000000.parquet": FOREIGN,
    "diversity/measured=20261121T120000.000000Z.parquet": b"junk",
}
ROWS = {
    "training_steps": 1,
    "batches": 4,
    "all_batches": 4,
    "search_rounds": 1,
    "evaluations": 1,
    "syncs": 0,
    "diversity": 0,
    "trajectories": 8,
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of three steps and two rounds with every kind of entry damaged."""
    monkeypatch.setattr(intake, "SECOND_READING_S", 0)
    store = prepare_run((tmp_path / "store").as_uri())
    for path, data in ENTRIES.items():
        store.put(path, data)
    store.put("rewards/v2/version.json", b'{"version": "v2", "reward": "a:b"}')
    return store


def test_sql_leaves_them_out(run, caplog):
    counted = {view: queries.query(run, f"SELECT count(*) AS n FROM {view}")["n"][0].as_py() for view in ROWS}
    assert counted == ROWS
    assert "metrics/training/attempt=00000001/step=00000002.parquet" in caplog.text


def test_an_export_leaves_them_out(run, tmp_path):
    export(run, tmp_path / "run.duckdb")
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as database:
        assert {view: database.execute(f"SELECT count(*) FROM {view}").fetchone()[0] for view in ROWS} == ROWS


def test_prefects_page_leaves_them_out(run, monkeypatch):
    """An error there would end the run, and each resume."""
    page = Artifacts(run, RunConfig(run=run.run, store=run.url))
    page.read_steps()
    assert [row["step"] for row in page._steps] == [1]
    assert PublishedPolicies(run)._shards_of(1, range(1, 4)) == ["trajectories/searcher=s0/round=00000000.parquet"]


def test_a_report_and_a_summary_are_written(run):
    assert "metrics/training/attempt=00000001/step=00000002.parquet" in render(run)
    assert summary.summarise(run)["steps"] == 1
    assert summary.read_summary(run)["trainer_wait_share"] is None  # all times are noon


def test_verify_names_each(run):
    named = {fault.path for fault in verify.verify(run, None).faults if fault.kind == "torn ledger entry"}
    assert named == ENTRIES.keys()


def test_torn_rewards_are_named(run):
    with pytest.raises(DamagedRecord, match=r"rewards/v2/searcher=s0/round=00000000\.parquet \(run .*Restore"):
        with_rewards(run, "v2", make_shard("s0", 0))
