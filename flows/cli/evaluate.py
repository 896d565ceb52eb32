"""tba evaluate: measures a run's best policy."""

import json
from typing import Annotated

import typer

from flows.cli.common import AsJson, RunName, StoreOption, existing_run, fail, say

app = typer.Typer()


@app.command()
def evaluate(
    run: RunName,
    samples: Annotated[int, typer.Option(min=0, help="Of each problem, for pass@k; of redteam: attacks.")] = 0,
    problems: Annotated[int | None, typer.Option(min=1, help="Held-out problems; default: the run's setting.")] = None,
    newest: Annotated[bool, typer.Option("--newest", help="The newest policy instead of the best.")] = False,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run's best policy on held-out problems, here and now: greedy, and pass@k of --samples.

    The best policy has the highest accuracy that training measured; before the first measurement it is the newest.

    tldr: also the win rate against the reference summaries. redteam: the attack success rate. The figures stay in the
    run's store, under evaluations/. `prefect deployment run evaluate/policy` does the same on a worker.

    Example: tba evaluate arithmetic --samples 16
    """
    run_store = existing_run(run, store)
    from prefect.logging import disable_run_logger

    from flows.config import load_run
    from flows.evaluate import measure_policy
    from flows.searcher.start import start_searcher
    from storage.errors import StoreError

    try:
        config = load_run(run_store)
        with disable_run_logger():
            searcher = start_searcher(config, "evaluate", 0)
            problems = problems or config.task.num_heldout
            figures = measure_policy(run_store, config, searcher, problems, samples, newest)
    except (StoreError, ValueError, RuntimeError) as error:
        fail(str(error), status=2)
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        say(f"{name:22} {value:.4f}" if isinstance(value, float) else f"{name:22} {value}")
