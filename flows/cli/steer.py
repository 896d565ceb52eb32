"""`tba stop` and `tba searchers`: requests to a running run, from any machine that sees its store."""

import json
import re
import time
from typing import Annotated

import typer

from flows.cli.common import AsJson, RunName, StoreOption, existing_run, fail, say

app = typer.Typer()

POLL_S = 1.0
STOP_PATIENCE_S = 600.0  # time for a step, a checkpoint and a policy on a slow store


@app.command()
def stop(run: RunName, store: StoreOption = None) -> None:
    """Stop a run: the Trainer finishes its step, saves and publishes; then the Searchers and the flow end.

    Waits until the Trainer has stopped. Ctrl-C ends the waiting, not the request. The same `tba train` resumes the run.

    Example: tba stop arithmetic
    """
    from storage import requests
    from storage.attempts import ENDED, read_heartbeat
    from storage.errors import StoreError
    from storage.status import has_live_trainer

    run_store = existing_run(run, store)
    try:
        is_alive = has_live_trainer(run_store, read_heartbeat(run_store) or {})
    except StoreError as error:
        fail(str(error), status=2)
    if not is_alive:
        fail(
            f"Run {run!r} has no live Trainer, so there is nothing to stop. Ctrl-C in its `tba train`, or "
            "Cancel on Prefect's page, ends a run that is still starting.",
            status=2,
        )
    try:
        requests.ask_to_stop(run_store)
        say(f"Asked the Trainer of run {run!r} to stop after its step.")
        deadline = time.monotonic() + STOP_PATIENCE_S
        while (beat := read_heartbeat(run_store) or {}).get("state") not in ENDED:
            if time.monotonic() > deadline:
                watch = run_store.command(f"watch {run}")
                fail(f"The Trainer has not stopped within {STOP_PATIENCE_S:.0f} s. `{watch}` shows its state.")
            if not has_live_trainer(run_store, beat):
                fail(
                    "The Trainer died before it could stop. If its flow starts another, that one stops after a step; "
                    "otherwise the next `tba train` resumes from the last checkpoint."
                )
            time.sleep(POLL_S)
    except StoreError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if beat["state"] == "failed":
        fail(
            f"The Trainer failed at step {beat['step']}: {beat.get('message')}\n"
            "If its flow starts another, that one stops after a step."
        )
    again = "" if beat["state"] == "finished" else " The same `tba train` resumes it."
    say(f"Run {run!r} {beat['state']} at step {beat['step']}.{again}")


@app.command(context_settings={"ignore_unknown_options": True})  # -1 is no option
def searchers(
    run: RunName,
    change: Annotated[str, typer.Argument(metavar="+N|-N", help="Number of Searchers to add or remove.")],
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Change the number of a run's Searchers, now or, if it does not train now, when it is resumed.

    A new Searcher joins when its engine has loaded. A leaving one first commits the rounds that it has sampled.

    Example: tba searchers arithmetic +1
    """
    from flows.config import load_run
    from storage import requests
    from storage.attempts import read_heartbeat
    from storage.errors import StoreError
    from storage.status import has_live_trainer
    from storage.summary import is_finished

    run_store = existing_run(run, store)
    by = int(change) if re.fullmatch(r"[+-][0-9]{1,4}", change) else 0
    if by == 0:
        fail(f"change: got {change!r}; write a number of Searchers with its sign, such as +1 or -1", status=2)
    try:
        recorded = load_run(run_store)
        if recorded.synchronous:
            fail(f"change: run {run!r} is synchronous: one Searcher and the Trainer take turns", status=2)
        before = requests.wanted_or_configured(run_store, recorded.searchers)
        wanted = before + by
        if wanted < (least := min(1, recorded.searchers)):
            why = ", because the last one evaluates the final policy" if least else ""
            fail(
                f"change: got {change}, but run {run!r} has {before} Searchers; at least {least} must stay{why}",
                status=2,
            )
        if wanted > (most := requests.MOST_SEARCHERS):
            fail(f"change: got {change}, but a run has at most {most} Searchers", status=2)
        if is_finished(run_store):
            fail(f"Run {run!r} is finished.", status=2)
        requests.want_searchers(run_store, wanted)
        alive = has_live_trainer(run_store, read_heartbeat(run_store) or {})
    except StoreError as error:
        fail(str(error), status=2)
    if as_json:
        typer.echo(json.dumps({"run": run, "before": before, "wanted": wanted, "alive": alive}))
        return
    when = "within seconds" if alive else "when the next `tba train` resumes the run, which has no live Trainer now"
    plural = "" if wanted == 1 else "s"
    say(f"Run {run!r} will have {wanted} Searcher{plural} (before: {before}). This takes effect {when}.")
