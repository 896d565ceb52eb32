"""A run as a DuckDB database file, for notebooks, `duckdb -ui` and other programs.

For a local store the database has only views. Each query reads the run's current Parquet files, so the database follows
the run, takes no space, and locks none of the run's files. In two cases it is a copy of the run as it is now: for an S3
store, which plain DuckDB cannot read without an extension and credentials; and for a folder with a backslash in its
path, which DuckDB's file patterns take for a separator.
"""

import errno
import os
import re
import uuid
from collections.abc import Collection
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from storage import shards
from storage.ledger_files import COMPACTED_NAME, KEYS, NAMES
from storage.queries import STORED, VIEWS, attempts_table, dataset, torn_files
from storage.shards import committed_files, files_named, marked_through, refused_rounds, shard_path, stray_files
from storage.sql import sql
from storage.store import RunStore


def export(store: RunStore, path: Path) -> bool:
    """Writes the database to `path`, replacing an existing file. Returns whether it follows the run; False: it is a
    copy.

    Any number of processes may open it with `duckdb.connect(path, read_only=True)`. Raises: OSError: `path` names no
    file that can be replaced, but a folder, a device or a link.
    """
    if not path.name or path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "this is no file that can be replaced; name a file", str(path))
    partial = path.with_name(f".tmp-{uuid.uuid4().hex}-{path.name}")
    folder = _folder_for_views(store)
    try:
        with duckdb.connect(partial) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            if folder is None:
                store.scan(lambda: _copy(connection, store))
            else:
                _view_files(connection, folder, store)
            connection.execute(sql("create_counts"))
            for name in VIEWS:
                connection.execute(sql(f"view_{name}"))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return folder is not None


def _folder_for_views(store: RunStore) -> Path | None:
    folder = store.local_path("")
    real = folder and folder.resolve()  # DuckDB names files without `..`
    return None if "\\" in str(real) else real


def _copy(connection: duckdb.DuckDBPyConnection, store: RunStore, torn: Collection[str] = ()) -> None:
    try:
        for name, (folder, columns) in STORED.items():
            connection.register("arriving", dataset(store, folder, columns, torn))
            connection.execute(f"CREATE OR REPLACE TABLE stored_{name} AS FROM arriving")
    except duckdb.InvalidInputException:
        found = torn_files(store)
        if not found.keys() - torn:
            raise
        _copy(connection, store, found.keys())
        return
    connection.register("arriving", attempts_table(store))
    connection.execute("CREATE OR REPLACE TABLE stored_attempts AS FROM arriving")
    connection.unregister("arriving")


def _view_files(connection: duckdb.DuckDBPyConnection, run: Path, store: RunStore) -> None:
    for name, (folder, columns) in STORED.items():
        types = _types(connection, columns)
        values = {
            "table": name,
            "columns": ", ".join(columns.names),
            "typed_nulls": ", ".join(f"NULL::{type_} AS {column}" for column, type_ in types),
            "schema": ", ".join(
                f"'{column}': {{name: '{column}', type: '{type_}', default_value: NULL}}" for column, type_ in types
            ),
            "files": f"{_pattern(run / folder)}/**/*.parquet",
            "condition": "true",
        }
        if name == "trajectories":
            trajectories_named = _named(run, store)
            values |= {"table": "files", "columns": f"{values['columns']}, filename", "condition": trajectories_named}
        else:
            torn = [path for path in store.list(folder) if path.endswith(".parquet") and not _has_footer(run / path)]
            values["condition"] = _is_none_of(run, ["", *torn, *_links(run, folder)])
            if folder in KEYS:
                _view_entries(connection, run, values | {"folder": folder})
                continue
            values["condition"] += f" AND {_is_named(folder, NAMES[folder])}"
        connection.execute(sql("export_files").format(**values))
    columns = ", ".join(STORED["trajectories"][1].names)
    values = {"run": _quoted(run), "pattern": _pattern(run), "columns": columns, "block": shards.ROUNDS_PER_BLOCK}
    connection.execute(sql("export_committed").format(**values, condition=trajectories_named))
    connection.execute(sql("export_attempts").format(folder=_pattern(run / "trainer"), digits="[0-9]" * 8))


def _view_entries(connection: duckdb.DuckDBPyConnection, run: Path, values: dict[str, str]) -> None:
    """The view of a folder of the ledger, of whose entries many may be in one file. values: of export_files.sql."""
    folder, table = values["folder"], f"files_{values['table']}"
    group, number = KEYS[folder]
    is_named = _is_named(folder, NAMES[folder], COMPACTED_NAME)
    files = {
        "table": table,
        "columns": f"{values['columns']}, filename",
        "condition": f"{values['condition']} AND {is_named}",
    }
    connection.execute(sql("export_files").format(**values | files))
    # older versions recorded no attempt of evaluations
    of_group = {"group": "coalesce(attempt, 1)" if group == "attempt" else group, "number": number}
    connection.execute(sql("export_entries").format(**values | of_group, pattern=_pattern(run)))


def _is_named(folder: str, *names: str) -> str:
    """The condition for files with names of a folder of the ledger."""
    either = "|".join(re.sub(r"\(\?P<\w+>", "(", name) for name in names)
    return f"regexp_matches(filename, '/{folder}/({either})\\.parquet$')"


def _named(run: Path, store: RunStore) -> str:
    """The condition for files of trajectories: names of shards or compacted files, neither refused nor torn now."""
    refused = [shard_path(name, number) for name, rounds in refused_rounds(store).items() for number in rounds]
    torn = [file.path for file in committed_files(store) if not _has_footer(run / file.path)]
    names = r"/(searcher=[a-z][a-z0-9-]*/round=[0-9]{8}|compacted/[a-z][a-z0-9-]*-[0-9]{8}-[0-9]{8})\.parquet$"
    marked, paths = marked_through(store.list("expired")), store.list("trajectories")
    files = files_named(paths)
    stray = [file.path for file in stray_files(files, marked)]
    stray += {path for path in paths if path.endswith(".parquet")} - {file.path for file in files}
    excluded = ["", *refused, *torn, *stray, *_links(run, "trajectories")]
    return f"regexp_matches(filename, '{names}') AND {_is_none_of(run, excluded)}"


def _links(run: Path, folder: str) -> list[str]:
    """Symbolic links to files, which no listing of the store has; DuckDB's patterns follow them."""
    return [path.relative_to(run).as_posix() for path in (run / folder).rglob("*.parquet") if path.is_symlink()]


def _is_none_of(run: Path, paths: list[str]) -> str:
    """The condition for files with other paths in the run."""
    excluded = ", ".join(f"'{_quoted(run / path)}'" for path in paths)
    return f"filename NOT IN ({excluded})"


def _has_footer(file: Path) -> bool:
    try:
        pq.read_schema(file)
    except FileNotFoundError:  # deleted since it was listed
        return False
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # the system's error, not Parquet's: the file may be whole
            raise
        return False
    return True


def _types(connection: duckdb.DuckDBPyConnection, columns: pa.Schema) -> list[tuple[str, str]]:
    """The names of an Arrow schema's columns with DuckDB's types."""
    connection.register("empty", columns.empty_table())
    described = connection.execute("SELECT column_name, column_type FROM (DESCRIBE empty)").fetchall()
    connection.unregister("empty")
    return described


def _pattern(path: Path) -> str:
    """A DuckDB file pattern that matches only this path, for use within SQL quotes."""
    return re.sub(r"([*?[])", r"[\1]", _quoted(path))


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
