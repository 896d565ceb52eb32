"""Claims about storage/queries.py. Run: pytest tests/storage/test_queries.py

- the views show what is stored, on a local folder and on S3; what is not there yet is an empty view with its columns
- batches, training_steps and syncs leave out what a resumed Trainer undid; all_batches does not
- what an older version did not record is NULL
- every view and every column of it is documented, with the schema's columns
- SELECT, DESCRIBE, SHOW, SUMMARIZE and EXPLAIN work; a query looks only for the files of the tables it names
- nothing else does: no writing, attaching, installing or setting, one statement at a time
- SQL reaches no file, no network, no extension, no secret and no Python variable, and leaves no file behind
- connections share nothing; times are UTC
"""

from datetime import UTC, datetime
from itertools import accumulate

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import attempts, ledger, queries, schema
from storage.errors import ReadOnly
from storage.shards import commit_shard
from tests.storage.helpers import NOON, OWNER, Sync, make_batch, make_search_round, make_shard, make_training_step


def rows(store, statement: str) -> list[tuple]:
    return [tuple(row.values()) for row in queries.query(store, statement).to_pylist()]


@pytest.fixture
def stored(store):
    """Two searchers' shards, and a Trainer that took steps 1 to 3, was killed, and resumed from step 2."""
    for searcher, number in (("s0", 0), ("s0", 1), ("s1", 0)):
        commit_shard(store, make_shard(searcher, number))
        ledger.record_search_round(store, make_search_round(searcher, number))
    for attempt, resumed_from, steps in ((1, 0, (1, 2, 3)), (2, 2, (3, 4))):
        assert attempts.start_attempt(store, resumed_from, OWNER) == attempt
        for step in steps:
            ledger.record_batch(store, attempt, step, make_batch([0, 0]))
            ledger.record_training_step(store, make_training_step(attempt, step))
            ledger.record_sync(store, Sync(step, step, attempt, {"s0": [step]}))
    row = {"attempt": 2, "policy_step": 0, "split": "heldout", "num_problems": 4, "accuracy": 0.5}
    ledger.record_evaluation(store, row | {"mean_response_tokens": 2.0, "seconds": 2.0, "created_at": NOON})
    return store


def test_the_views_show_what_is_stored(stored):
    by_policy = rows(stored, "SELECT policy_step, count(*), avg(reward) FROM trajectories GROUP BY 1 ORDER BY 1")
    assert by_policy == [(0, 8, 0.5), (1, 4, 0.5)]  # make_shard's policy step is its round
    assert rows(stored, "SELECT searcher, max(round) FROM trajectories WHERE reward > 0 GROUP BY 1 ORDER BY 1") == [
        ("s0", 1),
        ("s1", 0),
    ]
    assert rows(stored, "SELECT response_tokens, rewards['exact'] FROM trajectories WHERE round = 1 LIMIT 1") == [
        ([4, 2], 0.0)
    ]
    assert rows(stored, "SELECT count(*) FROM search_rounds") == [(3,)]
    assert rows(stored, "SELECT accuracy FROM evaluations") == [(0.5,)]
    assert rows(stored, "SELECT attempt, resumed_from, host FROM attempts ORDER BY 1") == [
        (1, 0, "elsewhere"),
        (2, 2, "elsewhere"),
    ]


def test_what_a_resumed_trainer_undid_does_not_count(stored):
    effective = [(1, 1), (2, 1), (3, 2), (4, 2)]
    for view in ("batches", "training_steps", "syncs"):
        assert rows(stored, f"SELECT DISTINCT step, attempt FROM {view} ORDER BY ALL") == effective, view
    assert rows(stored, "SELECT DISTINCT step, attempt FROM all_batches ORDER BY ALL") == sorted([*effective, (3, 1)])


def test_a_run_with_nothing_yet_has_empty_views_with_their_columns(store):
    for view in queries.VIEWS:
        table = queries.query(store, f"SELECT * FROM {view}")
        assert table.num_rows == 0 and table.num_columns >= 4, view


SCHEMAS = {
    "trajectories": schema.TRAJECTORY,
    "batches": schema.BATCH,
    "all_batches": schema.BATCH,
    "search_rounds": schema.SEARCH_ROUND,
    "training_steps": schema.TRAINING_STEP,
    "evaluations": schema.EVALUATION,
    "diversity": schema.DIVERSITY,
    "syncs": schema.SYNC,
    "attempts": schema.ATTEMPT,
    "rewards": schema.REWARD,
}


@pytest.mark.parametrize("view", queries.VIEWS)
def test_every_view_and_column_is_documented(local_store, view):
    about = f"FROM duckdb_columns() WHERE table_name = '{view}' ORDER BY column_index"
    names, comments = zip(*rows(local_store, f"SELECT column_name, comment {about}"), strict=True)
    assert list(names) == SCHEMAS[view].names
    assert all(comments), dict(zip(names, comments, strict=True))
    assert rows(local_store, f"SELECT comment IS NOT NULL FROM duckdb_views() WHERE view_name = '{view}'") == [(True,)]


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 1",
        "FROM trajectories",
        "WITH t AS (SELECT 1) SELECT * FROM t;",
        "VALUES (1)",
        "DESCRIBE batches",
        "SHOW TABLES",
        "SUMMARIZE training_steps",
        "EXPLAIN SELECT * FROM trajectories",
        "EXPLAIN ANALYZE SELECT * FROM trajectories",
        "PIVOT training_steps ON attempt IN (1, 2) USING count(*)",
    ],
)
def test_reading_statements_work(local_store, statement):
    assert queries.query(local_store, statement).num_columns > 0


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO trajectories SELECT * FROM trajectories",
        "UPDATE trajectories SET reward = 1",
        "DELETE FROM trajectories",
        "DROP VIEW trajectories",
        "CREATE TABLE t (x INT)",
        "CREATE TEMP TABLE t (x INT)",
        "CREATE MACRO m() AS 1",
        "CREATE SECRET (TYPE S3)",
        "COPY trajectories TO 'out.parquet'",
        "EXPORT DATABASE 'out'",
        "ATTACH 'other.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET threads = 1",
        "SET enable_external_access = true",
        "RESET lock_configuration",
        "PRAGMA threads = 1",
        "USE temp",
        "CALL pragma_version()",
        "PREPARE p AS SELECT 1",
        "BEGIN",
        "CHECKPOINT",
        "VACUUM",
        "SELECT 1; DROP VIEW trajectories",
        "",
    ],
)
def test_any_other_statement_is_refused(local_store, statement, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReadOnly, match="query: got"):
        queries.query(local_store, statement)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "statement",
    [
        "EXPLAIN ANALYZE CREATE TABLE t AS SELECT 1",
        "EXPLAIN ANALYZE DROP VIEW trajectories",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO 'out.parquet'",
        "EXPLAIN ANALYZE ATTACH 'other.db'",
        "SELECT * FROM query('DROP VIEW trajectories')",
        "SELECT * FROM enable_logging()",
        "SELECT * FROM 'secret.parquet'",
        "SELECT * FROM read_parquet('secret.parquet')",
        "SELECT * FROM parquet_metadata('secret.parquet')",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_blob('/etc/passwd')",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT * FROM glob('*')",
        "SELECT * FROM query_table('secret.parquet')",
        "SELECT * FROM read_csv('http://127.0.0.1:9/x')",
        "SELECT * FROM read_parquet('s3://bucket/x')",
        "SELECT * FROM duckdb_secrets()",
        "SELECT getenv('HOME')",
        "SELECT * FROM python_map_function((SELECT 1))",
        "SELECT * FROM pandas_scan(1)",
        "SELECT * FROM arrow_scan(1, 2, 3)",
        "SELECT * FROM sqlite_scan('secret.db', 't')",
    ],
)
def test_sql_reaches_nothing_but_the_views(local_store, statement, tmp_path, monkeypatch):
    pq.write_table(pa.table({"secret": [1]}), tmp_path / "secret.parquet")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(duckdb.Error):
        queries.query(local_store, statement)
    assert [path.name for path in tmp_path.iterdir()] == ["secret.parquet"]


def test_sql_reads_no_python_variable(local_store):
    secret_table = pa.table({"secret": [1]})
    with duckdb.connect() as open_to_all:
        assert open_to_all.sql("FROM secret_table").fetchall() == [(1,)]
    with queries.connect(local_store) as connection, pytest.raises(duckdb.CatalogException):
        connection.sql("FROM secret_table")
    del secret_table  # it was in reach all the while


def test_a_query_larger_than_memory_spills_nowhere(local_store):
    with queries.connect(local_store) as connection:
        assert connection.execute("SELECT current_setting('temp_directory')").fetchone() == ("",)


def test_connections_share_nothing(stored):
    with queries.connect(stored) as one, queries.connect(stored) as other:
        one.execute("CREATE TABLE t AS SELECT 1")
        with pytest.raises(duckdb.CatalogException):
            other.execute("FROM t")


def test_times_are_utc_wherever_one_asks(stored, monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    about = "SELECT max(created_at), max(created_at)::VARCHAR FROM trajectories"
    assert rows(stored, about) == [(datetime(2026, 11, 21, 12, tzinfo=UTC), "2026-11-21 12:00:00+00")]


def test_training_steps_of_an_older_version_have_no_value_for_later_columns(store):
    later = {"fresh_kl", "fresh_entropy", "fresh_cut_share", "fresh_staleness"} | {
        "effective_sample_size", "tapered_share", "logprob_mismatch",
    }  # fmt: skip
    attempts.start_attempt(store, 0, OWNER)
    for step in (1, 2):
        ledger.record_training_step(store, make_training_step(1, step))
    path = "metrics/training/attempt=00000001/step=00000001.parquet"
    old = pq.read_table(pa.BufferReader(store.get(path))).drop_columns(sorted(later))
    sink = pa.BufferOutputStream()
    pq.write_table(old, sink)
    store.put(path, sink.getvalue().to_pybytes())
    found = rows(store, f"SELECT step, reward_mean, {', '.join(sorted(later))} FROM training_steps ORDER BY step")
    assert found[0] == (1, 0.25) + (None,) * 7
    assert None not in found[1]


def test_a_query_looks_only_for_the_files_of_the_tables_it_names(stored, monkeypatch):
    listed, listing = [], stored.list
    monkeypatch.setattr(stored, "list", lambda folder, **named: listed.append(folder) or listing(folder, **named))
    assert rows(stored, "SELECT count(*) > 0 FROM evaluations") == [(True,)]
    assert "metrics/evaluations" in listed and not {"trajectories", "batches", "metrics/training"} & set(listed)


def test_a_query_finds_the_rows_of_a_table_however_it_is_named(stored):
    for statement in (
        "SELECT count(*) > 0 FROM query_table('training' || '_steps')",
        "SELECT count(*) > 0 FROM query('SELECT * FROM ' || 'training' || '_steps')",
        "SELECT count(*) > 0 FROM Training_Steps",
        "SELECT count > 0 FROM (SUMMARIZE training_steps) LIMIT 1",
        "WITH x AS (FROM training_steps) SELECT count(*) > 0 FROM x",
    ):
        assert rows(stored, statement) == [(True,)], statement


def test_the_batch_of_a_step_needs_two_tables(stored, monkeypatch):
    listed, listing = set(), stored.list
    monkeypatch.setattr(stored, "list", lambda folder, **named: listed.add(folder) or listing(folder, **named))
    assert queries.show_batch(stored, 3).num_rows > 0
    assert {"trajectories", "batches"} <= listed and not {"metrics/training", "metrics/search", "syncs"} & listed


def test_a_torn_entry_costs_the_files_of_its_own_table(stored, monkeypatch, caplog):
    (first, *_) = stored.list("batches")
    stored.put(first, b"torn")
    read, get = [], stored.get
    monkeypatch.setattr(stored, "get", lambda path: read.append(path) or get(path))
    assert rows(stored, "SELECT count(*) > 0 FROM batches, trajectories") == [(True,)]
    assert first in caplog.text and not [path for path in read if path.startswith("trajectories")]


def test_torn_files_of_two_tables_are_both_left_out(stored, caplog):
    torn = [stored.list(folder)[0] for folder in ("batches", "metrics/training")]
    for path in torn:
        stored.put(path, b"torn")
    both = "SELECT count(*) > 0 FROM batches JOIN training_steps USING (step)"
    assert rows(stored, both) == [(True,)]
    assert all(path in caplog.text for path in torn)


def test_an_error_in_the_sql_reads_no_file(stored, monkeypatch):
    read, get = [], stored.get
    monkeypatch.setattr(stored, "get", lambda path: read.append(path) or get(path))
    with pytest.raises(duckdb.InvalidInputException, match="Could not parse string"):
        rows(stored, "SELECT strptime('abc', '%Y')")
    assert not [path for path in read if path.endswith(".parquet")]


@pytest.mark.parametrize("most", [0, 1, 20_000])
def test_the_files_of_a_table_need_not_fit_in_memory(moto_store, monkeypatch, most):
    """Files that are beyond the limit are read in place, with the same answer."""
    attempts.start_attempt(moto_store, 0, OWNER)
    for step in range(1, 9):
        ledger.record_training_step(moto_store, make_training_step(1, step))
    monkeypatch.setattr(queries, "_MOST_BYTES", most)
    assert rows(moto_store, "SELECT count(*), sum(step) FROM training_steps") == [(8, 36)]
    paths = moto_store.list("metrics/training")
    sizes = accumulate(len(moto_store.get(path)) for path in paths)
    assert len(queries._fetch(moto_store, paths)) == sum(size <= most for size in sizes) < 8
