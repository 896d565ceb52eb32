"""`tba plan`: the memory that a run needs, and how long it would take with other numbers of Searchers."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import AsJson, StoreOption, complete_run, existing_run, fail, say

if TYPE_CHECKING:
    from rich.table import Table

    from flows.run.memory import MemoryPlan

app = typer.Typer()

SEEDS = 5  # simulated runs in a row's means


@app.command()
def plan(
    run: Annotated[
        str | None,
        typer.Argument(help="Name of a run that has trained; none: a new run.", autocompletion=complete_run),
    ] = None,
    store: StoreOption = None,
    searchers: Annotated[
        list[int] | None,
        typer.Option(min=1, max=10_000, help="Of RUN: a number of Searchers; repeatable; default: 1, 2, 4, 8, 16."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model, as for tba train.")] = None,
    task: Annotated[str | None, typer.Option(help="Task, as for tba train.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Any other setting; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell the memory that a new run would need, or the duration of a RUN with other numbers of Searchers.

    Memory: of each process at its peak, from the model's shape, the task's lengths and the settings. Without --task the
    plan is for arithmetic, whose responses have 8 tokens. No weights are loaded; a model of the Hugging Face Hub is
    downloaded.

    Duration: a simulation, from the times that the ledger of RUN has. It gives every Searcher hardware of its own. The
    first row is the run so far, the others are whole runs. seconds: from the first round to the last step. waits: the
    share in which the Trainer waits for a batch. staleness: the age of the newest trajectories, in policy steps.
    turns / seconds: the estimated duration where Searchers and Trainer take turns, divided by seconds.

    Example: tba plan --model path/to/model --task gsm8k --set task.data=train.jsonl
    """
    from flows.cli.console import console

    given = {key: value for key, value in {"model": model, "task.name": task}.items() if value is not None}
    if run is not None and (given or settings):
        fail(f"Run {run!r} has its settings. To plan another run, leave its name out.", status=2)
    if run is None and (searchers or store):
        fail("--searchers and --store are of a RUN. A new run with four Searchers: --set searchers=4", status=2)
    if run is not None:
        rows = _durations(run, store, searchers or [1, 2, 4, 8, 16])
        typer.echo(json.dumps(rows, indent=2)) if as_json else console().print(_table(rows))
        return
    memory = _memory(given, settings or [])
    typer.echo(json.dumps(_as_dict(memory), indent=2)) if as_json else _print_memory(memory)


def _as_dict(memory: "MemoryPlan") -> dict:
    processes = [asdict(process) | {"bytes": process.num_bytes} for process in memory.processes]
    return {
        "task": memory.task,
        "tokens": asdict(memory.lengths),
        "processes": processes,
        "bytes_here": memory.machine.num_bytes,
        "files": memory.files,
        "fault": memory.fault,
        "warnings": memory.warnings,
    }


def _print_memory(memory: "MemoryPlan") -> None:
    from flows.cli.console import console

    prompt, response = memory.lengths.prompt, memory.lengths.response
    say(f"Planned for task {memory.task}: prompts of up to {prompt} tokens, responses of up to {response}.")
    console().print(_memory_table(memory))
    for line in [*([memory.fault] if memory.fault else []), *memory.warnings]:
        say(f"WARNING: {line}", err=True)


def _memory(given: dict, settings: list[str]) -> "MemoryPlan":
    from flows.cli.settings import config_of
    from flows.run.memory import plan_memory
    from storage.errors import StoreError

    try:
        return plan_memory(config_of(given, settings, is_new=True))
    except (StoreError, ValueError, OSError, ImportError) as error:
        fail(str(error), status=2)


def _durations(run: str, store: str | None, searchers: list[int]) -> list[dict]:
    """A row for each number of Searchers. Exits if the run is too young, or has settings that are not simulated."""
    from dataclasses import replace
    from statistics import fmean

    from flows.config import load_run
    from flows.plan.simulator import Loop, simulate, synchronous_seconds
    from flows.plan.times import measured_outcome, measured_times, resumes, round_size
    from storage.errors import StoreError

    run_store = existing_run(run, store)
    try:
        loop = Loop.of(load_run(run_store), round_size(run_store))
        times, measured, resumed = measured_times(run_store), measured_outcome(run_store), resumes(run_store)
    except (StoreError, ValueError) as error:
        fail(str(error), status=2)
    if resumed:
        say(f"Run {run!r} was resumed {len(resumed)} times; the first row has the time in between, too.", err=True)
    rows = [{"kind": "measured"} | asdict(measured)]
    for number in dict.fromkeys([measured.searchers, *searchers]):
        planned = replace(loop, searchers=number)
        outcomes = [asdict(simulate(times, planned, seed)) for seed in range(SEEDS)]
        means = {key: fmean(outcome[key] for outcome in outcomes) for key in outcomes[0]}
        ratio = synchronous_seconds(times, planned) / means["seconds"]
        rows.append({"kind": "simulated", **means, "searchers": number, "ratio_to_turns": ratio})
    return rows


def _memory_table(memory: "MemoryPlan") -> "Table":
    from rich.table import Table

    from flows.run.memory import gib

    table = Table("process", "part", "memory")
    for process in memory.processes:
        for name, num_bytes in process.parts.items():
            table.add_row(process.process, name, gib(num_bytes))
        table.add_row(process.process, f"in all, each of {process.number}", gib(process.num_bytes))
        table.add_section()
    device = "each GPU here" if memory.machine.is_gpu else "this machine"
    table.add_row(device, "", gib(memory.machine.num_bytes))
    for name, num_bytes in memory.files.items():
        table.add_row("store", name, gib(num_bytes))
    return table


def _table(rows: list[dict]) -> "Table":
    from rich.table import Table

    table = Table("searchers", "", "seconds", "waits", "trajectories", "staleness", "turns / seconds")
    for row in rows:
        ratio = f"{row['ratio_to_turns']:.2f}" if "ratio_to_turns" in row else ""
        table.add_row(
            str(row["searchers"]),
            row["kind"],
            f"{row['seconds']:.0f}",
            f"{row['trainer_wait_share']:.0%}",
            f"{row['num_trajectories']:.0f}",
            "–" if row["fresh_staleness"] is None else f"{row['fresh_staleness']:.1f}",
            ratio,
        )
    return table
