"""A run as a DuckDB database file, for notebooks, `duckdb -ui` and other programs.

For a local store the file has only views. Each query reads the run's current Parquet files, so the database follows the
run, costs no space, and locks none of the run's files. For another store, which plain DuckDB cannot read without an
extension and credentials, it is a copy of the run as it is now.
"""

import os
import uuid
from pathlib import Path

import duckdb
import pyarrow as pa

from storage.queries import STORED, VIEWS, attempts_table, dataset
from storage.sql import sql
from storage.store import RunStore


def export(store: RunStore, path: Path) -> bool:
    """Writes the database to `path`, replacing an existing file. True: it follows the run; False: it is a copy.

    With `duckdb.connect(path, read_only=True)` any number of processes may open it.
    """
    partial = path.with_name(f".tmp-{uuid.uuid4().hex}-{path.name}")
    folder = store.local_path("")
    try:
        with duckdb.connect(partial) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            if folder is None:
                store.scan(lambda: _copy(connection, store))
            else:
                _view_files(connection, folder.absolute())
            connection.execute(sql("create_counts"))
            for name in VIEWS:
                connection.execute(sql(f"view_{name}"))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return folder is not None


def _copy(connection: duckdb.DuckDBPyConnection, store: RunStore) -> None:
    for name, (folder, columns) in STORED.items():
        connection.register("arriving", dataset(store, folder, columns))
        connection.execute(f"CREATE OR REPLACE TABLE stored_{name} AS FROM arriving")
    connection.register("arriving", attempts_table(store))
    connection.execute("CREATE OR REPLACE TABLE stored_attempts AS FROM arriving")
    connection.unregister("arriving")


def _view_files(connection: duckdb.DuckDBPyConnection, run: Path) -> None:
    for name, (folder, columns) in STORED.items():
        shown = ", ".join(columns.names)
        values = {"table": name, "folder": _quoted(run / folder), "columns": shown}
        if name == "trajectories":
            values |= {"table": "files", "columns": f"{shown}, filename"}
        connection.execute(sql("view_of_files").format(typed_nulls=_typed_nulls(connection, columns), **values))
    columns = ", ".join(STORED["trajectories"][1].names)
    connection.execute(sql("view_of_committed").format(run=_quoted(run), columns=columns))
    connection.execute(sql("view_of_attempts").format(folder=_quoted(run / "trainer")))


def _typed_nulls(connection: duckdb.DuckDBPyConnection, columns: pa.Schema) -> str:
    """The columns of an Arrow schema as DuckDB's types: `NULL::BIGINT AS step, …`."""
    connection.register("empty", columns.empty_table())
    described = connection.execute("SELECT column_name, column_type FROM (DESCRIBE empty)").fetchall()
    connection.unregister("empty")
    return ", ".join(f"NULL::{type_} AS {name}" for name, type_ in described)


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
