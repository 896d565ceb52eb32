"""Read-only SQL over a run: its trajectories and its ledger as views.

Each view is a storage/sql/view_<name>.sql over the run's Parquet files: it works on any store, during and after a run.
`SELECT column_name, comment FROM duckdb_columns() WHERE table_name = 'batches'` describes the columns.

A query can read these views only. Arrow reads the files, so DuckDB needs neither files nor network: access to both is
turned off, as are extensions, settings and Python's variables. Each statement runs in a read-only transaction.
"""

from datetime import datetime

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from storage import attempts, schema
from storage.errors import ReadOnly
from storage.shards import committed_paths
from storage.sql import sql
from storage.store import RunStore, scans

VIEWS = (
    "trajectories",
    "batches",
    "all_batches",
    "search_rounds",
    "training_steps",
    "evaluations",
    "syncs",
    "attempts",
    "rewards",
    "diversity",
)

# The folder of each table's files, and their columns.
STORED = {
    "trajectories": ("trajectories", schema.TRAJECTORY),
    "batches": ("batches", schema.BATCH),
    "search_rounds": ("metrics/search", schema.SEARCH_ROUND),
    "training_steps": ("metrics/training", schema.TRAINING_STEP),
    "evaluations": ("metrics/evaluations", schema.EVALUATION),
    "syncs": ("syncs", schema.SYNC),
    "rewards": ("rewards", schema.REWARD),
    "diversity": ("diversity", schema.DIVERSITY),
}

# Without external access there are no files, network, extensions or Python variables as tables; without temp_directory
# a query larger than memory fails instead of writing files; lock_configuration makes the settings final.
_SETTINGS = """
SET TimeZone = 'UTC';
SET temp_directory = '';
SET enable_external_access = false;
SET lock_configuration = true;
"""
_READING = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)  # DESCRIBE, SHOW and SUMMARIZE are SELECTs


@scans
def query(store: RunStore, statement: str) -> pa.Table:
    """The rows that one SELECT, DESCRIBE, SHOW, SUMMARIZE or EXPLAIN statement returns.

    ReadOnly for any other statement; duckdb.Error if the SQL is wrong or names something other than a view.
    """
    with connect(store) as connection:
        parsed = connection.extract_statements(statement)
        if len(parsed) != 1:
            raise ReadOnly(f"query: got {len(parsed)} statements; ask one at a time")
        if parsed[0].type not in _READING:
            raise ReadOnly(
                f"query: got a {parsed[0].type.name} statement; a run's store is read-only: SELECT, DESCRIBE, SHOW, "
                "SUMMARIZE or EXPLAIN. To change data, read the Parquet files with a DuckDB of your own."
            )
        connection.execute("BEGIN TRANSACTION READ ONLY")  # EXPLAIN ANALYZE executes what it explains
        return connection.sql(parsed[0]).to_arrow_table()


@scans
def show_batch(store: RunStore, step: int) -> pa.Table:
    """The batch that trained a step, one row a prompt and drawn trajectory; no rows if no such step counts."""
    with connect(store) as connection:
        return connection.sql(sql("show_batch"), params={"step": step}).to_arrow_table()


def connect(store: RunStore) -> duckdb.DuckDBPyConnection:
    """A new in-memory database with the views over the files stored now. A table without files is an empty view."""
    connection = duckdb.connect()
    for name, (folder, columns) in STORED.items():
        connection.register(f"stored_{name}", dataset(store, folder, columns))
    connection.register("stored_attempts", attempts_table(store))
    connection.execute(sql("create_counts"))
    for name in VIEWS:
        connection.execute(sql(f"view_{name}"))
    connection.execute(_SETTINGS)
    return connection


def dataset(store: RunStore, folder: str, columns: pa.Schema) -> ds.Dataset:
    """The Parquet files of a table that exist now, without those of expired shards."""
    filesystem, base = store.arrow_filesystem()
    stored = committed_paths(store) if folder == "trajectories" else store.list(folder)
    paths = [f"{base}/{path}" for path in stored if path.endswith(".parquet")]
    return ds.FileSystemDataset.from_paths(paths, columns, ds.ParquetFileFormat(), filesystem)


def attempts_table(store: RunStore) -> pa.Table:
    """Attempts of the Trainer, which are stored as JSON."""
    rows = [
        {
            "attempt": record["attempt"],
            "resumed_from": record["resumed_from"],
            "host": record["owner"]["host"],
            "pid": record["owner"]["pid"],
            "created_at": datetime.fromisoformat(record["created_at"]),
        }
        for record in attempts.list_attempts(store)
    ]
    return schema.to_table(rows, schema.ATTEMPT)
