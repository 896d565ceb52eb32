"""`tba sql`: answers one query, or opens a prompt for many."""

import contextlib
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import AsJson, RunName, StoreOption, existing_run, fail, say

if TYPE_CHECKING:
    from storage.store import RunStore

app = typer.Typer()

HISTORY_LINES = 1000


class Format(StrEnum):
    table = "table"
    json = "json"
    csv = "csv"


@app.command()
def sql(
    run: RunName,
    query: Annotated[
        str | None,
        typer.Argument(help="SQL query; without it: a prompt in a terminal, else standard input.", show_default=False),
    ] = None,
    store: StoreOption = None,
    form: Annotated[Format, typer.Option("--format", help="Format of the printed rows.")] = Format.table,
    as_json: AsJson = False,
) -> None:
    """Query a run's replay buffer and training ledger in SQL, read-only, during or after the run.

    SHOW TABLES lists the views (trajectories, batches, search_rounds, training_steps, …); DESCRIBE <view> its columns.

    Example: tba sql arithmetic "SELECT policy_step, avg(reward) FROM trajectories GROUP BY 1 ORDER BY 1"
    """
    run_store = existing_run(run, store)
    form = Format.json if as_json else form
    if query is None and sys.stdin is None:
        fail("No query was given, and standard input is closed.", status=2)
    if query is None and sys.stdin.isatty():
        _prompt(run_store, form)
    elif reason := _answer(run_store, sys.stdin.read() if query is None else query, form):
        fail(reason, status=2)


def _prompt(store: "RunStore", form: Format) -> None:
    """Reads typed queries and answers each."""
    say(f"Run {store.run!r}, read-only. End a query with ';'. SHOW TABLES; lists the views. \\q or Ctrl-D leaves.")
    with _history():
        for statement in statements():
            try:
                reason = _answer(store, statement, form)
            except KeyboardInterrupt:
                reason = "The query was interrupted."
            except RuntimeError as error:  # DuckDB's, after Ctrl-C
                reason = str(error)
            if reason:
                say(reason, err=True)


def statements() -> Iterator[str]:
    """Typed statements, each up to a line that ends with `;`, until \\q or Ctrl-D. Ctrl-C drops an unfinished one."""
    lines: list[str] = []
    while True:
        try:
            line = input("  ...> " if lines else "tba> ")
        except KeyboardInterrupt:
            print()
            lines.clear()
            continue
        except EOFError:
            print()
            return
        if line.strip() == "\\q":
            return
        lines += [line] if line.strip() or lines else []
        if line.rstrip().endswith(";"):
            yield "\n".join(lines)
            lines.clear()


def _answer(store: "RunStore", statement: str, form: Format) -> str | None:
    """Prints a query's rows. Returns the reason if the query failed. Each query reads the current files."""
    import duckdb

    from flows.cli.console import print_table
    from storage.errors import StoreError
    from storage.queries import query

    try:
        print_table(query(store, statement), form)
    except KeyError as error:
        return f"a row of the answer has the key {error} twice"
    except (StoreError, ValueError, OverflowError, TypeError, RecursionError, duckdb.Error) as error:
        return str(error)
    return None


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Line editing, with a history in this project's folder."""
    import readline

    from infra.machine import local_folder

    file = local_folder() / "sql_history"
    readline.set_history_length(HISTORY_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
