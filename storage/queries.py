"""Read-only SQL over a run: its trajectories and its ledger as views.

Each view is a storage/sql/view_<name>.sql over the run's Parquet files: it works on any store, during and after a run.
`SELECT column_name, comment FROM duckdb_columns() WHERE table_name = 'batches'` describes the columns.

A query can read these views and nothing else. Arrow reads the files, so DuckDB needs no access to files or network,
which is turned off, as are extensions, changes of settings and Python's variables. Each statement runs in a read-only
transaction.

Shards that the Trainer's intake refused do not count. A torn shard that the intake has not read yet would break every
query, so it is left out, too, with a warning. So is a torn entry of the ledger, which `tba verify` names.
"""

import logging
from collections.abc import Callable, Collection
from functools import reduce
from operator import or_
from typing import TypeVar

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from storage import attempts, ledger_files, schema
from storage.errors import DamagedRecord, NotFound, ReadOnly, StoreError, TornShard
from storage.ledger import NEEDED, read_entry
from storage.ledger_files import KEYS, counting_parts, is_entry, parts_named
from storage.shard_files import read_file
from storage.shards import committed_files, refused_rounds
from storage.sql import sql
from storage.store import RunStore, scans, transfer_all, transfer_each

Answer = TypeVar("Answer")
logger = logging.getLogger(__name__)

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
_MOST_FETCHED = 4_096  # small files of a table that are fetched at once
_MOST_BYTES = 256 << 20  # of these files that are held in memory; Arrow reads the others in place
_READING = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)  # DESCRIBE, SHOW and SUMMARIZE are SELECTs


@scans
def query(store: RunStore, statement: str) -> pa.Table:
    """The rows of one SELECT, DESCRIBE, SHOW, SUMMARIZE or EXPLAIN statement.

    Raises: ReadOnly: any other statement, or several. duckdb.Error: wrong SQL, or a name that is not a view's.
    """

    def answer(connection: duckdb.DuckDBPyConnection) -> pa.Table:
        parsed = connection.extract_statements(statement)
        if len(parsed) != 1:
            raise ReadOnly(f"query: got {len(parsed)} statements; write one at a time")
        if parsed[0].type not in _READING:
            raise ReadOnly(
                f"query: got a {parsed[0].type.name} statement; a run's store is read-only: SELECT, DESCRIBE, SHOW, "
                "SUMMARIZE or EXPLAIN. To change data, read the Parquet files with a DuckDB of your own."
            )
        connection.execute("BEGIN TRANSACTION READ ONLY")  # EXPLAIN ANALYZE executes what it explains
        return connection.sql(parsed[0]).to_arrow_table()

    return ask(store, answer, _tables_in(statement))


def _tables_in(statement: str) -> Collection[str]:
    """The tables that a statement may read: those whose names are in its text."""
    text = statement.lower()
    if "query" in text:  # DuckDB's functions query and query_table put names together
        return STORED
    named = [name for name in STORED if name in text]
    return [*named, "trajectories"] if "rewards" in named and "trajectories" not in named else named


@scans
def show_batch(store: RunStore, step: int) -> pa.Table:
    """The batch of a training step: one row for each prompt and drawn trajectory; no rows if no such step counts."""
    return ask(
        store,
        lambda reader: reader.sql(sql("show_batch"), params={"step": step}).to_arrow_table(),
        ("batches", "trajectories"),
    )


def ask(
    store: RunStore, answer: Callable[[duckdb.DuckDBPyConnection], Answer], tables: Collection[str] = STORED
) -> Answer:
    """Returns answer(connection), then closes the connection. Torn files are left out, with a warning.

    tables: as for connect.
    """
    torn: dict[str, StoreError] = {}
    while True:
        try:
            with connect(store, torn, tables) as connection:
                return answer(connection)
        except duckdb.InvalidInputException as error:
            # where a file cannot be read, the message names its table; that of an error in the SQL names none
            named = [name for name in tables if f"stored_{name}" in str(error)]
            found = {path: reason for path, reason in torn_files(store, named).items() if path not in torn}
            if not found:
                raise
        for reason in found.values():
            logger.warning("a torn file is left out of the answer: %s", reason)
        torn |= found


def torn_files(store: RunStore, tables: Collection[str] = STORED) -> dict[str, StoreError]:
    """Files of these tables that count but cannot be read, by path, with the reasons. Reads all of their files."""

    def read(path: str, folder: str, columns: pa.Schema) -> StoreError | None:
        try:
            read_file(store, path) if folder == "trajectories" else read_entry(store, path, columns, NEEDED[folder])
        except (TornShard, DamagedRecord) as error:
            return error
        except NotFound:  # deleted since it was listed
            return None

    places = [STORED[name] for name in tables]
    files = [(path, folder, columns) for folder, columns in places for path in _files_of(store, folder)]
    found = zip(files, transfer_all(lambda file: read(*file), files), strict=True)
    return {path: error for (path, _, _), error in found if error}


def _files_of(store: RunStore, folder: str, torn: Collection[str] = ()) -> list[str]:
    """Paths of a table's files, less torn ones; of trajectories those that count."""
    if folder == "trajectories":
        return [file.path for file in committed_files(store, torn)]
    paths = [path for path in store.list(folder) if path not in torn]
    if folder in KEYS:
        return [part.path for part in counting_parts(store, folder, paths)]
    return [path for path in paths if is_entry(folder, path)]


def connect(store: RunStore, torn: Collection[str] = (), tables: Collection[str] = STORED) -> duckdb.DuckDBPyConnection:
    """A new in-memory database with the views over the files stored now. A view without files is empty.

    torn: paths of files to leave out. tables: the tables to look for files of; views of the others are empty.
    """
    connection = duckdb.connect()
    for name, (folder, columns) in STORED.items():
        rows = dataset(store, folder, columns, torn) if name in tables else columns.empty_table()
        connection.register(f"stored_{name}", rows)
    connection.register("stored_attempts", attempts_table(store))
    connection.execute(sql("create_counts"))
    for name in VIEWS:
        connection.execute(sql(f"view_{name}"))
    connection.execute(_SETTINGS)
    return connection


def dataset(store: RunStore, folder: str, columns: pa.Schema, torn: Collection[str] = ()) -> ds.Dataset:
    """The Parquet files of a table that exist now; for trajectories, the files that count."""
    if folder == "trajectories":
        return _committed(store, columns, torn)
    paths = _files_of(store, folder, torn)
    parts = parts_named(folder, paths) if folder in KEYS else []
    small = [part.path for part in parts if len(part.numbers) <= ledger_files.WIDTHS[0]]
    if store.local_path("") or not 0 < len(small) <= _MOST_FETCHED:
        return _of_files(store, columns, paths)
    fetched = _fetch(store, small)
    fetched_paths = set(small[: len(fetched)])
    in_place = [path for path in paths if path not in fetched_paths]
    in_memory = ds.FileSystemDataset(fetched, columns, ds.ParquetFileFormat())
    return ds.UnionDataset(columns, [in_memory, _of_files(store, columns, in_place)])


def _fetch(store: RunStore, paths: list[str]) -> list[ds.ParquetFileFragment]:
    """The first of these files of a remote store, in memory, up to `_MOST_BYTES`.

    They are fetched at once: Arrow would ask for the parts of each in turn.
    """

    def fetch(path: str) -> bytes:
        data = store.get_fast(path)
        return data if data is not None and data.endswith(b"PAR1") else store.get(path)

    fragments, num_bytes = [], 0
    for data in transfer_each(fetch, paths):
        num_bytes += len(data)
        if num_bytes > _MOST_BYTES:
            break
        fragments.append(ds.ParquetFileFormat().make_fragment(pa.BufferReader(data)))
    return fragments


def _committed(store: RunStore, columns: pa.Schema, torn: Collection[str]) -> ds.Dataset:
    files, refused = committed_files(store, torn), refused_rounds(store)
    stored = _of_files(store, columns, [file.path for file in files])
    partly = {
        (file.searcher, number)
        for file in files
        for number in refused.get(file.searcher, set()).intersection(file.rounds)
    }
    if not partly:
        return stored
    # of files that were compacted before the Trainer refused a round of them
    of_rounds = [(pc.field("searcher") == searcher) & (pc.field("round") == number) for searcher, number in partly]
    return stored.filter(~reduce(or_, of_rounds))


def _of_files(store: RunStore, columns: pa.Schema, paths: list[str]) -> ds.FileSystemDataset:
    filesystem, base = store.arrow_filesystem()
    files = [f"{base}/{path}" for path in paths]
    return ds.FileSystemDataset.from_paths(files, columns, ds.ParquetFileFormat(), filesystem)


def attempts_table(store: RunStore) -> pa.Table:
    """Attempts of the Trainer, which are stored as JSON."""
    rows = [
        {
            "attempt": record.attempt,
            "resumed_from": record.resumed_from,
            "host": record.owner.host,
            "pid": record.owner.pid,
            "created_at": record.began_at,
        }
        for record in attempts.list_attempts(store)
    ]
    return schema.to_table(rows, schema.ATTEMPT)
