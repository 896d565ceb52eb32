"""The part of the command line that works on stored data: `tba rescore`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def rescore(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    reward: Annotated[str, typer.Option(help="module:function in TRL's signature, or task: the task's own, as it is.")],
    version: Annotated[str | None, typer.Option(help="Name of the new version; default: the function's.")] = None,
    store: Annotated[str | None, typer.Option(help="Root URL or folder; default: .tba/ here.")] = None,
) -> None:
    """Score a run's stored trajectories by another reward; the shards stay as they are. Repeat it to score what came.

    The function: f(prompts, completions, **columns) -> list[float], with columns prompt_id and answer. To train on it:
    tba train NEW --warm-start RUN --set reward_version=VERSION
    """
    from flows.config import default_store
    from flows.rescore import rescore
    from storage.errors import StoreError
    from storage.store import RunStore

    sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it: the function lies beside where one works
    try:
        root = default_store() if store is None else store if "://" in store else Path(store).absolute().as_uri()
        run_store = RunStore(root, run)
        if not run_store.exists("run.json"):
            raise ValueError(f"There is no run {run!r} in {root}.")
        version, num_scored = rescore(run_store, reward, version, typer.echo)
    except (StoreError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{num_scored:,} trajectories of run {run!r} scored by {reward}: reward version {version!r}.")
