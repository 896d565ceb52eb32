"""`tba export`: a run as a DuckDB database file."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import RunName, StoreOption, existing_run, fail, say

app = typer.Typer()


@app.command()
def export(
    run: RunName,
    file: Annotated[Path | None, typer.Argument(help="The database to write; default: RUN.duckdb here.")] = None,
    store: StoreOption = None,
) -> None:
    """Write a DuckDB database of a run, for notebooks and `duckdb -ui`, to be opened read-only.

    Of a local store it holds views over the run's files, and follows the run. Of an S3 store it holds a copy.

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
    except duckdb.IOException as error:  # of the unfinished file, whose name nobody has given
        fail(f"{file} cannot be written: {error}", status=2)
    kind = "It follows the run" if follows else "It is a copy of the run as it is now"
    say(f'{kind}. In Python: duckdb.connect("{file}", read_only=True). In a browser: duckdb -ui -readonly {file}')
