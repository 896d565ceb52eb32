"""tba compare: objectives beside each other, everything else equal."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli_common import fail, not_empty, store_url

app = typer.Typer()


@app.command()
def compare(
    theme: Annotated[str, typer.Argument(help="What to compare: staleness or sync.")] = "staleness",
    out: Annotated[Path, typer.Option(help="Folder of the table and the plot.")] = Path("docs/results"),
    store: Annotated[
        str | None, typer.Option(help="Root URL or folder of the runs; default: .tba/compare here.", callback=not_empty)
    ] = None,
    model: Annotated[
        str, typer.Option(help="adder (a small policy made here), or a model as tba train takes it.")
    ] = "adder",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each configuration.")] = 3,
    steps: Annotated[int | None, typer.Option(min=2, help="Policy steps of a run; default: 120, of sync 50.")] = None,
    num_heldout: Annotated[int, typer.Option(min=1, help="Held-out problems of an evaluation.")] = 512,
) -> None:
    """Run named configurations by seeds in this process; write one table and one plot with confidence intervals.

    staleness: Trajectory Balance, Dr. GRPO and proximal RLOO at an enforced policy lag of 1, 4 and 16. Interrupted, the
    same command goes on. sync: asynchronous and synchronous training by tba train, with the embedded model, and the
    time of each to equal accuracy.

    Example: tba compare staleness --seeds 3
    """
    from flows import comparisons
    from storage.errors import StoreError

    if theme not in ("staleness", "sync"):
        fail(f"compare: got {theme!r}; known are staleness and sync", status=2)
    root = store_url(store or ".tba/compare")
    try:
        if theme == "sync":
            model = "smollm2-135m-instruct" if model == "adder" else model
            table = comparisons.turns(root, out, model, seeds, steps or 50, typer.echo)
        else:
            table = comparisons.staleness(root, out, model, seeds, steps or 120, num_heldout, typer.echo)
    except (StoreError, ValueError) as error:
        fail(str(error))
    typer.echo(f"Written: {table}")
