"""`tba export`: a run as a DuckDB database file."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    file: Annotated[Path | None, typer.Argument(help="The database to write; default: RUN.duckdb here.")] = None,
    store: Annotated[str | None, typer.Option(help="Root URL or folder; default: .tba/ here.")] = None,
) -> None:
    """Write a DuckDB database of a run, for notebooks and `duckdb -ui`: tba export arithmetic

    Of a local store it holds views over the run's files, and follows the run. Of an S3 store it holds a copy.
    """
    from flows.config import default_store
    from storage.errors import StoreError
    from storage.export import export as export_run
    from storage.store import RunStore

    file = file or Path(f"{run}.duckdb")
    root = store or default_store()
    try:
        run_store = RunStore(root if "://" in root else Path(root).absolute().as_uri(), run)
        if not run_store.exists("run.json"):
            raise ValueError(f"There is no run {run!r} in {root}.")
        follows = export_run(run_store, file)
    except (StoreError, ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    kind = "It follows the run" if follows else "It is a copy of the run as it is now"
    typer.echo(
        f'{kind}. In Python: duckdb.connect("{file}", read_only=True). In a browser: duckdb -ui -readonly {file}'
    )
