"""tba evaluate: measures a run's best policy."""

import contextlib
import json
import sys
from typing import Annotated

import typer

from flows.cli.common import AsJson, RunName, StoreOption, existing_run, fail, say

app = typer.Typer()


@app.command()
def evaluate(
    run: RunName,
    samples: Annotated[
        int, typer.Option(min=0, help="Samples of each problem, for pass@k; with redteam: number of attacks.")
    ] = 0,
    problems: Annotated[
        int | None, typer.Option(min=1, help="Number of held-out problems; default: task.num_heldout.")
    ] = None,
    newest: Annotated[bool, typer.Option("--newest", help="Evaluate the newest policy, not the best.")] = False,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run's best policy on held-out problems: greedy accuracy, and pass@k with --samples.

    The best policy is the one with the highest accuracy that training measured; before the first measurement, the
    newest policy is evaluated. tldr with a reward model: also the win rate against the reference summaries. redteam:
    the attack success rate. The run's store keeps the figures under evaluations/. The deployment
    evaluate/policy does the same on a worker.

    Example: tba evaluate arithmetic --samples 16
    """
    run_store = existing_run(run, store)
    from prefect.logging import disable_run_logger

    from flows.config import load_run
    from flows.evaluate import check, measure_policy
    from flows.searcher.start import EVALUATE, start_searcher
    from storage.errors import StoreError

    try:
        config = load_run(run_store)
        check(run_store, config, samples)
        with disable_run_logger(), contextlib.redirect_stdout(sys.stderr):  # rewards may print
            searcher = start_searcher(config, EVALUATE, 0)
            problems = problems or config.task.num_heldout
            figures = measure_policy(run_store, config, searcher, problems, samples, newest)
    except (StoreError, ValueError, ImportError) as error:
        fail(str(error), status=2)
    except (RuntimeError, OSError) as error:  # of the engine, which has loaded
        fail(str(error))
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        say(f"{name:22} {value:.4f}" if isinstance(value, float) else f"{name:22} {value}")
