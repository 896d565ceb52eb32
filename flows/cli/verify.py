"""The part of the command line that works on stored data: `tba rescore`, `tba verify`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import AsJson, RunName, StoreOption, existing_run

app = typer.Typer()


@app.command()
def rescore(
    run: RunName,
    reward: Annotated[str, typer.Option(help="module:function in TRL's signature, or task: the task's own, as it is.")],
    version: Annotated[str | None, typer.Option(help="Name of the new version; default: the function's.")] = None,
    store: StoreOption = None,
) -> None:
    """Score a run's stored trajectories by another reward; the shards stay as they are. Repeat it to score what came.

    The function: f(prompts, completions, **columns) -> list[float], with columns prompt_id and answer. To train on it:
    tba train NEW --warm-start RUN --set reward_version=VERSION

    Example: tba rescore arithmetic --reward my_rewards:brief --version v2
    """
    from flows.reuse.rescore import rescore
    from storage.errors import StoreError

    sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it: the function lies beside where one works
    try:
        version, num_scored = rescore(existing_run(run, store), reward, version, typer.echo)
    except (StoreError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{num_scored:,} trajectories of run {run!r} scored by {reward}: reward version {version!r}.")


@app.command()
def verify(
    run: RunName,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Prove a run's store, during or after the run: every shard, ledger entry, policy and checkpoint.

    Exit status 0: all of it is whole and agrees. 1: each fault is named.

    Example: tba verify arithmetic
    """
    from dataclasses import asdict

    from storage.errors import StoreError
    from storage.verify import verify as prove
    from tba.weights import fingerprint, read_weights

    try:
        report = prove(existing_run(run, store), lambda folder: fingerprint(read_weights(folder)))
    except (StoreError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps({"run": run} | asdict(report), indent=1))
    else:
        for fault in report.faults:
            typer.echo(f"{fault.kind}: {fault.path}: {fault.message}")
        typer.echo(
            f"{len(report.faults)} faults in {report.num_trajectories} trajectories of {report.num_shards} shards, "
            f"{report.num_steps} training steps, {report.num_policies} published policies."
        )
    raise typer.Exit(1 if report.faults else 0)
