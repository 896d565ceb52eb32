"""`tba export`: a run as a DuckDB database file."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import RunName, StoreOption, existing_run, fail, say

app = typer.Typer()


@app.command()
def export(
    run: RunName,
    file: Annotated[Path | None, typer.Argument(help="File of the database; default: RUN.duckdb here.")] = None,
    store: StoreOption = None,
) -> None:
    """Write a DuckDB database of a run, for notebooks and `duckdb -ui`. Open it read-only.

    For a local store the database has views over the run's files, so it follows the run. For an S3 store it has a copy.

    Example: tba export arithmetic
    """
    import duckdb

    from storage.errors import StoreError
    from storage.export import export as export_run

    run_store = existing_run(run, store)
    file = file or Path(f"{run}.duckdb")
    try:
        follows = export_run(run_store, file)
    except (StoreError, OSError) as error:
        fail(str(error), status=2)
    except duckdb.IOException as error:  # names the temporary file, which the user has not named
        fail(f"{file} cannot be written: {error}", status=2)
    kind = "It follows the run" if follows else "It is a copy of the run as it is now"
    say(f'{kind}. In Python: duckdb.connect("{file}", read_only=True). In a browser: duckdb -ui -readonly {file}')
