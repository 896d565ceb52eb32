"""tba compare: configurations, with all other settings equal, by seeds."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import fail, not_empty, say, store_url

if TYPE_CHECKING:
    from flows.compare.study import Study

app = typer.Typer()


@app.command()
def compare(
    study: Annotated[str, typer.Argument(help="Name of a study, a .toml file of your own, or sync.")] = "staleness",
    out: Annotated[Path, typer.Option(help="Folder of the tables and the plot.")] = Path("results"),
    store: Annotated[
        str | None,
        typer.Option(help="Store of the runs, as URL or folder; default: .tba/compare here.", callback=not_empty),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model of the comparison sync, as for tba train; default: the embedded one.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds; default: the study's; for sync 3.")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Policy steps; default: the study's; for sync 50.")] = None,
) -> None:
    """Train configurations with several seeds; write tables and a plot with confidence intervals.

    A study trains a small policy, or a model, on samples of enforced ages. If interrupted, the same command continues.
    The last line is a JSON object. Studies: beta, beta_embedded, capacity, losses, prompts, recency, recency_dense,
    redteam_searchers, replay, responses, samples, searchers, searchers_equal, searchers_sparse, staleness,
    staleness_embedded. sync: asynchronous and synchronous training by tba train, and the time of each to equal
    accuracy. If one of its runs was interrupted, the command fails and names the run's folder: delete it, and repeat.

    Example: tba compare staleness --seeds 3
    """
    from importlib.util import find_spec

    from flows.compare import study_page, turns
    from storage.errors import RunConfigMismatch, StoreError
    from tba.models import EMBEDDED_MODEL

    if model is not None and study != "sync":
        fail(f"--model: got {model!r}, but a study's file names its model; only sync takes one", status=2)
    read = _read(study, seeds, steps) if study != "sync" else None
    if find_spec("matplotlib") is None:
        fail("compare draws its plot with matplotlib, which is not installed: pip install matplotlib", status=2)
    root, numbers = store_url(store or ".tba/compare"), None
    try:
        out.mkdir(parents=True, exist_ok=True)  # before runs that take hours
        if read is None:
            page = turns.turns(root, out, turns.conditions(model or EMBEDDED_MODEL, seeds or 3, steps or 50), say)
        else:
            page, numbers = study_page.run_study(Path(study).stem, read, root, out, say)
    except RunConfigMismatch as error:
        differs = str(error).partition(". ")[0]
        fail(f"compare: {differs}. Give another --store, or the settings and --steps of the runs in this one", status=2)
    except (StoreError, ValueError, OSError, RuntimeError) as error:  # the last: an engine's, or of a killed process
        fail(str(error))
    say(f"Written: {page}")
    if numbers:
        typer.echo(json.dumps(numbers))


def _read(study: str, seeds: int | None, steps: int | None) -> "Study":
    from flows.compare.study import read_study

    try:
        return read_study(study, seeds, steps)
    except ValueError as error:
        fail(f"compare: {error}", status=2)
