"""tba compare: named configurations, by seeds."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import fail, not_empty, say, store_url

app = typer.Typer()


@app.command()
def compare(
    theme: Annotated[str, typer.Argument(help="Comparison: staleness or sync.")] = "staleness",
    out: Annotated[Path, typer.Option(help="Folder of the table and the plot.")] = Path("docs/results"),
    store: Annotated[
        str | None,
        typer.Option(help="Store of the runs, as URL or folder; default: .tba/compare here.", callback=not_empty),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model of the comparison sync, as for tba train.")
    ] = "smollm2-135m-instruct",
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds; default: 10, for sync 3.")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Policy steps of a run; default: 320, for sync 50.")] = None,
) -> None:
    """Train named configurations with several seeds; write a table and a plot with confidence intervals.

    staleness: Trajectory Balance with and without the taper, Dr. GRPO and proximal RLOO, on samples 1 to 128 policy
    steps old, with a small policy made for it. The last line is a JSON object. sync: asynchronous and synchronous
    training by tba train, and the time of each to equal accuracy. If interrupted, the same command continues.

    Example: tba compare staleness --seeds 3
    """
    from flows.compare import staleness, turns
    from storage.errors import StoreError

    if theme not in ("staleness", "sync"):
        fail(f"compare: got {theme!r}; known are staleness and sync", status=2)
    root, numbers = store_url(store or ".tba/compare"), None
    try:
        if theme == "sync":
            table = turns.turns(root, out, model, seeds or 3, steps or 50, say)
        else:
            table, numbers = staleness.staleness(root, out, seeds or 10, steps or 320, say)
    except (StoreError, ValueError) as error:
        fail(str(error))
    say(f"Written: {table}")
    if numbers:
        typer.echo(json.dumps(numbers))
