"""Shared parts of the commands: arguments for run and store, output, exit with a reason."""

from pathlib import Path
from typing import Annotated

import typer

from flows.report.text import printable, without_secrets


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of runs for the shell's completion: of the store named in the same line, else of the default store."""
    from storage.store import list_runs

    try:
        return [run for run in list_runs(store_url(ctx.params.get("store"))) if run.startswith(incomplete)]
    except Exception:  # completion cannot show an error
        return []


def not_empty(store: str | None) -> str | None:
    """Refuses an empty --store, such as --store "$S3_URL" with S3_URL not set: no other store is meant then."""
    if store == "":
        fail("--store: got an empty text; name a store by URL or folder, or leave the option out", status=2)
    return store


RunName = Annotated[str, typer.Argument(help="Name of the run.", autocompletion=complete_run)]
StoreOption = Annotated[
    str | None,
    typer.Option(help="Store of the runs, as URL or folder; default: TBA_STORE, else .tba/ here.", callback=not_empty),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def store_url(store: str | None) -> str:
    """The root URL of a store given as URL or folder; None: the default store."""
    from storage.store_url import as_url, default_store

    return default_store() if store is None else as_url(store)


def existing_run(run: str, store: str | None):
    """The run's store. Exits with status 2 if there is no such run."""
    from storage.errors import StoreError
    from storage.store import RunStore, list_runs

    url = store_url(store)
    try:
        run_store = RunStore(url, run)
        if run_store.exists("run.json"):
            return run_store
        there = list_runs(url)
    except (StoreError, ValueError) as error:
        fail(str(error), status=2)
    fail(f"There is no run {run!r} in {url}. Runs there: {', '.join(there) or 'none'}.", status=2)


def say(message: str, err: bool = False) -> None:
    """Prints a line, with control characters escaped: text of a store or a model must not control the terminal. It is
    printed without the credentials of URLs."""
    typer.echo(printable(without_secrets(message)), err=err)


def fail(message: str, status: int = 1):
    """Prints the reason to standard error and exits with this status."""
    say(message, err=True)
    raise typer.Exit(status)


def project_folder() -> Path:
    """The working folder: `.tba/` in it keeps the local stack and, by default, runs.

    Flows import from the working folder first. Exits where it has a package that takes the place of one of tba's."""
    import flows

    folder, home = Path.cwd(), Path(flows.__file__).parents[1]
    for package in ("flows", "infra", "storage", "tba"):
        for own in (folder / package / "__init__.py", folder / f"{package}.py"):
            if own.exists() and not own.samefile(home / package / "__init__.py"):
                fail(
                    f"{own} would be imported in place of tba's own package {package!r}, which is in {home}. Rename "
                    "it, or run tba in another folder.",
                    status=2,
                )
    return folder
