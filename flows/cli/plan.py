"""`tba plan`: how long a run would take with other numbers of Searchers."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import AsJson, RunName, StoreOption, existing_run, fail, say

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer()

SEEDS = 5  # simulated runs in a row's means


@app.command()
def plan(
    run: RunName,
    store: StoreOption = None,
    searchers: Annotated[
        list[int], typer.Option("--searchers", min=1, max=10_000, help="Number of Searchers; may be repeated.")
    ] = (1, 2, 4, 8, 16),
    as_json: AsJson = False,
) -> None:
    """Simulate a run with other numbers of Searchers, from the times that its ledger has.

    The simulation gives every Searcher hardware of its own. The first row is the run so far, the others are whole runs.
    seconds: from the first round to the last step. waits: the share in which the Trainer waits for a batch. staleness:
    the age of the newest trajectories, in policy steps. turns / seconds: the estimated duration where Searchers and
    Trainer take turns, divided by seconds.

    Example: tba plan arithmetic --searchers 2 --searchers 8
    """
    from dataclasses import replace
    from statistics import fmean

    from flows.config import load_run
    from flows.plan.simulator import Loop, simulate, synchronous_seconds
    from flows.plan.times import TooFewTimes, measured_outcome, measured_times, resumes
    from storage.errors import StoreError

    run_store = existing_run(run, store)
    try:
        times, measured, resumed = measured_times(run_store), measured_outcome(run_store), resumes(run_store)
        loop = Loop.of(load_run(run_store))
    except (StoreError, TooFewTimes) as error:
        fail(str(error), status=2)
    if resumed:
        say(f"Run {run!r} was resumed {len(resumed)} times; the first row has the time in between, too.", err=True)
    rows = [{"kind": "measured"} | asdict(measured)]
    for number in dict.fromkeys([measured.searchers, *searchers]):
        planned = replace(loop, searchers=number)
        outcomes = [asdict(simulate(times, planned, seed)) for seed in range(SEEDS)]
        means = {key: fmean(outcome[key] for outcome in outcomes) for key in outcomes[0]}
        ratio = synchronous_seconds(times, planned) / means["seconds"]
        rows.append({"kind": "simulated", **means, "searchers": number, "ratio_to_turns": ratio})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        from flows.cli.console import console

        console().print(_table(rows))


def _table(rows: list[dict]) -> "Table":
    from rich.table import Table

    table = Table("searchers", "", "seconds", "waits", "trajectories", "staleness", "turns / seconds")
    for row in rows:
        ratio = f"{row['ratio_to_turns']:.2f}" if "ratio_to_turns" in row else ""
        table.add_row(
            str(row["searchers"]),
            row["kind"],
            f"{row['seconds']:.0f}",
            f"{row['trainer_wait_share']:.0%}",
            f"{row['num_trajectories']:.0f}",
            "–" if row["fresh_staleness"] is None else f"{row['fresh_staleness']:.1f}",
            ratio,
        )
    return table
