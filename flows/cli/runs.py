"""`tba runs`: the runs of a store."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from flows.cli.common import AsJson, StoreOption, fail, say, store_url

if TYPE_CHECKING:
    from rich.console import RenderableType

    from storage.status import RunStatus

app = typer.Typer()

STATE_STYLES = {
    "finished": "green",
    "alive": "bold cyan",
    "failed": "red",
    "trained": "cyan",
    "stopped": "yellow",
    "unreadable": "red",
}


@app.command()
def runs(store: StoreOption = None, as_json: AsJson = False) -> None:
    """List the runs of a store, the newest first.

    state: alive (a Trainer works on it), stopped, failed, trained (not evaluated yet), finished, unreadable. accuracy:
    on held-out problems, of the newest policy that was evaluated; best: of the best policy. trajectories: taken in by
    the Trainer so far. age: since training began.

    Example: tba runs --store s3://bucket/runs
    """
    from storage.errors import StoreError
    from storage.status import all_runs

    url = store_url(store)
    try:
        statuses = all_runs(url)
    except (StoreError, ValueError) as error:
        fail(str(error), status=2)
    if as_json:
        typer.echo(json.dumps([asdict(status) for status in statuses], default=str, indent=2))
    elif not statuses:
        say(f"There are no runs in {url}. `tba train` with the same --store starts one.")
    else:
        from flows.cli.console import console

        console().print(_runs_table(statuses))
        for status in statuses:
            if status.message and status.state in ("unreadable", "failed", "trained"):
                say(f"{status.run}: {status.message}", err=True)


def _runs_table(statuses: "list[RunStatus]") -> "RenderableType":
    from rich.table import Table

    from flows.cli.console import styled
    from flows.report.text import duration

    table = Table()
    for heading in ("run", "state"):
        table.add_column(heading, overflow="fold")
    for heading in ("step", "accuracy", "best", "trajectories", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    now = datetime.now(UTC)
    for status in statuses:
        table.add_row(
            status.run,
            styled(status.state, STATE_STYLES[status.state]),
            f"{status.step}/{status.steps}" if status.steps else str(status.step),
            "" if status.accuracy is None else f"{status.accuracy:.3f}",
            "" if status.best_accuracy is None else f"{status.best_accuracy:.3f}",
            f"{status.trajectories:,}",
            duration((now - status.began_at).total_seconds()) if status.began_at else "",
        )
    return table
