"""`tba verify`: checks that a run's store is whole."""

import json

import typer

from flows.cli.common import AsJson, RunName, StoreOption, existing_run, fail, say

app = typer.Typer()


@app.command()
def verify(
    run: RunName,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Check a run's store, during or after the run: every shard, ledger entry, policy and checkpoint.

    Exit status 0: no fault. 1: there are faults, and each is named.

    Example: tba verify arithmetic
    """
    from dataclasses import asdict

    from storage.errors import StoreError
    from storage.verify import verify as prove
    from tba.weights import fingerprint, read_weights

    try:
        report = prove(existing_run(run, store), lambda folder: fingerprint(read_weights(folder)))
    except (StoreError, ValueError) as error:
        fail(str(error), status=2)
    if as_json:
        typer.echo(json.dumps({"run": run} | asdict(report), indent=1))
    else:
        for fault in report.faults:
            say(f"{fault.kind}: {fault.path}: {fault.message}")
        say(
            f"{len(report.faults)} faults in {report.num_trajectories} trajectories of {report.num_shards} shards, "
            f"{report.num_steps} training steps, {report.num_policies} published policies."
        )
    raise typer.Exit(1 if report.faults else 0)
