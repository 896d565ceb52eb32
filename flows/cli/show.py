"""`tba show`: the batch of a training step."""

from collections.abc import Iterator
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import AsJson, RunName, StoreOption, existing_run, fail

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer()

# Columns of the training ledger that are shown of a step.
STEP_FACTS = ("started_at", "attempt", "loss", "reward_mean", "log_z_mean", "logprob_gap_mean", "gradient_norm", "beta",
              "learning_rate")  # fmt: skip


@app.command()
def show(
    run: RunName,
    step: Annotated[int, typer.Argument(min=1, help="A training step.")],
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Show the batch that trained a step: each prompt, and the responses that were drawn for it.

    slots: how many of the prompt's K slots the response fills. probability: of being drawn first. staleness: policy
    steps between the weights that sampled it and those trained. policy: step and fingerprint of the weights that
    sampled it. recent: drawn from the newest sync.

    Example: tba show arithmetic 42
    """
    import duckdb

    from flows.cli.console import console, json_text
    from storage.errors import StoreError

    run_store = existing_run(run, store)
    from storage.queries import ask, query, show_batch

    try:
        rows = show_batch(run_store, step).to_pylist()
        of_step = "SELECT * FROM training_steps WHERE step = ?"
        facts = ask(run_store, lambda reader: reader.sql(of_step, params=[step]).to_arrow_table(), ["training_steps"])
        trained = None if rows else query(run_store, "SELECT max(step) FROM training_steps").column(0)[0].as_py()
    except (StoreError, OverflowError, duckdb.Error) as error:
        fail(str(error), status=2)
    if not rows:
        known = f"steps 1 to {trained} were trained" if trained else "no step was trained yet"
        fail(f"Run {run!r} has no step {step}: {known}.", status=2)
    facts = next(iter(facts.to_pylist()), {})
    if as_json:
        typer.echo(json_text({"run": run, "step": step, "facts": facts, "batch": rows}))
        return
    out = console()
    for part in _batch_parts(run, step, facts, rows):
        out.print(part)


def _batch_parts(run: str, step: int, facts: dict, rows: list[dict]) -> "Iterator[RenderableType]":
    from rich.table import Table
    from rich.text import Text

    from flows.cli.console import styled

    yield styled(f"Run {run}, step {step}", "bold")
    yield styled("   ".join(f"{name} {_short(facts[name])}" for name in STEP_FACTS if facts.get(name) is not None))
    for index, of_prompt in groupby(rows, key=lambda row: row["prompt_index"]):
        group = list(of_prompt)
        table = Table(box=None, padding=(0, 1))
        for heading in ("slots", "reward", "probability", "staleness", "policy"):
            table.add_column(heading, justify="right", no_wrap=True, header_style="dim")
        table.add_column("", no_wrap=True)
        table.add_column("response", overflow="fold", header_style="dim")
        for row in group:
            mark = (row["policy_fingerprint"] or "")[:6]
            response = styled("(expired)", "dim") if row["response"] is None else _line(row["response"])
            table.add_row(
                str(row["times"]),
                f"{row['reward']:.3g}",
                f"{row['draw_probability']:.3f}",
                str(row["staleness"]),
                Text.assemble(styled(str(row["policy_step"])), styled(f" {mark}", "dim")),
                styled("recent", "cyan") if row["recent"] else "",
                response,
            )
        yield styled(f"\nPrompt {index}: {group[0]['prompt_id']}", "bold")
        yield styled(next((row["prompt"] for row in group if row["prompt"]), "(expired)"), "cyan")
        yield table


def _line(response: str) -> str:
    """The response on one line, as Python would write it."""
    return repr(response)[1:-1]


def _short(value: object) -> str:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
