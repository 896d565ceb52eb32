"""`tba report`: a run as one HTML file."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import AsJson, RunName, StoreOption, existing_run, fail

app = typer.Typer()


@app.command()
def report(
    run: RunName,
    store: StoreOption = None,
    output: Annotated[
        Path | None, typer.Option(help="HTML file to write; default: report.html in the run's store.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write figures, tables, alarms and faults of a run as one HTML file, during or after the run.

    The file needs no network and no other file.

    Example: tba report arithmetic --output arithmetic.html
    """
    import duckdb

    from flows.report.render import render, write_report
    from storage.errors import StoreError

    run_store = existing_run(run, store)
    try:
        if output is None:
            url = write_report(run_store)
        else:
            output.write_text(render(run_store), encoding="utf-8")
            url = output.absolute().as_uri()
    except (StoreError, ValueError, OSError, OverflowError, duckdb.Error) as error:
        fail(str(error), status=2)
    typer.echo(json.dumps({"run": run, "report": url}) if as_json else url)
