"""`tba plan`: the memory that a run needs, and how long it would take with other numbers of Searchers."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import AsJson, StoreOption, complete_run, existing_run, fail, say, store_url

if TYPE_CHECKING:
    from rich.table import Table

    from flows.run.memory import MemoryPlan

app = typer.Typer()

SEEDS = 5  # simulated runs in a row's means


@app.command()
def plan(
    run: Annotated[
        str | None, typer.Argument(help="Name of a run; default: one that is not begun.", autocompletion=complete_run)
    ] = None,
    store: StoreOption = None,
    searchers: Annotated[
        list[int], typer.Option("--searchers", min=1, max=10_000, help="Number of Searchers; may be repeated.")
    ] = (1, 2, 4, 8, 16),
    model: Annotated[str | None, typer.Option(help="Model, as for tba train.")] = None,
    task: Annotated[str | None, typer.Option(help="Task, as for tba train.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Any other setting; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell the memory that a run needs and, of a run that has trained, its duration with other numbers of Searchers.

    Memory: of each process at its peak, from the model's shape and the settings. Nothing is loaded.

    Duration: a simulation, from the times that the run's ledger has. It gives every Searcher hardware of its own. The
    first row is the run so far, the others are whole runs. seconds: from the first round to the last step. waits: the
    share in which the Trainer waits for a batch. staleness: the age of the newest trajectories, in policy steps.
    turns / seconds: the estimated duration where Searchers and Trainer take turns, divided by seconds.

    Example: tba plan --model path/to/model --task gsm8k --set train.micro_batch_tokens=8192
    """
    from flows.cli.console import console

    given = {"model": model, "task.name": task, "store": store and store_url(store)}
    given = {key: value for key, value in given.items() if value is not None}
    is_planned = run is None or model is not None or task is not None or bool(settings)
    rows = [] if is_planned else _durations(run, store, searchers)
    memory = _memory(run, given, settings or [], is_planned)
    if as_json:
        processes = [asdict(process) | {"bytes": process.num_bytes} for process in memory.processes]
        found = {"memory": processes, "bytes_here": memory.machine.num_bytes, "files": memory.files}
        typer.echo(json.dumps(found | {"durations": rows}, indent=2))
        return
    console().print(_memory_table(memory))
    for line in [*memory.faults.values(), *memory.warnings]:
        say(f"WARNING: {line}", err=True)
    if rows:
        console().print(_table(rows))


def _memory(run: str | None, given: dict, settings: list[str], is_planned: bool) -> "MemoryPlan":
    from flows.cli.settings import config_of
    from flows.config import load_run
    from flows.plan.times import most_response_tokens
    from flows.run.memory import plan_memory
    from storage.errors import StoreError
    from tba.memory import UnknownShape

    try:
        if is_planned:
            config = config_of(given | ({"run": run} if run else {}), settings)
        else:
            run_store = existing_run(run, given.get("store"))
            return plan_memory(load_run(run_store), most_response_tokens(run_store))
        return plan_memory(config)
    except (StoreError, UnknownShape, ValueError, OSError, ImportError) as error:
        fail(str(error), status=2)


def _durations(run: str, store: str | None, searchers: list[int]) -> list[dict]:
    """The rows of the second table; none, and the reason on stderr, if the run is too young."""
    from dataclasses import replace
    from statistics import fmean

    from flows.config import load_run
    from flows.plan.simulator import Loop, simulate, synchronous_seconds
    from flows.plan.times import TooFewTimes, measured_outcome, measured_times, resumes
    from storage.errors import StoreError

    run_store = existing_run(run, store)
    try:
        times, measured, resumed = measured_times(run_store), measured_outcome(run_store), resumes(run_store)
        loop = Loop.of(load_run(run_store))
    except TooFewTimes as error:
        say(f"No durations: {error}", err=True)
        return []
    except StoreError as error:
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
