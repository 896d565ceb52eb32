"""`tba watch`: follows a run by its store, on any machine that sees the store."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from flows.cli.common import RunName, StoreOption, existing_run, fail

if TYPE_CHECKING:
    from storage.store import RunStore

app = typer.Typer()

POLL_S = 1.0


@app.command()
def watch(run: RunName, store: StoreOption = None) -> None:
    """Follow a run to its end by its store, on whatever machine it trains, also through crashes and resumes.

    If a Prefect server answers, shows its states of the run, too. Ctrl-C does not stop the run.

    Example: tba watch arithmetic --store s3://bucket/runs
    """
    from flows.cli.console import Progress, console, summary_table
    from flows.run.watcher import Watcher
    from storage.errors import StoreError
    from storage.summary import read_summary

    run_store = existing_run(run, store)
    try:
        with Watcher(run_store) as watcher, Progress(console(), run, began_s=_age_s(run_store)) as progress:
            while not (seen := watcher.look()).is_over:
                progress.show(seen.stage, seen.heartbeat, seen.server)
                progress.wait(POLL_S)
        console().print(summary_table(read_summary(run_store)))
    except StoreError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _age_s(store: "RunStore") -> float:
    """Seconds since the run began to train; 0 before that."""
    from storage.attempts import first_attempt_at
    from storage.errors import NotFound

    try:
        return (datetime.now(UTC) - first_attempt_at(store)).total_seconds()
    except NotFound:
        return 0.0
