"""`tba up` and `tba down`: the local stack."""

import typer

from flows.cli.common import fail, project_folder

app = typer.Typer()


@app.command()
def up() -> None:
    """Start the local stack (Prefect server, work pool, deployments, worker), or its missing parts.

    Example: tba up
    """
    from infra import stack

    try:
        url = stack.up(project_folder(), keep=True, say=typer.echo)
    except stack.StackError as error:
        fail(str(error))
    typer.echo(f"The stack is up: {url.removesuffix('/api')}. `tba down` stops what was started here.")


@app.command()
def down() -> None:
    """Stop what `tba up` started, running flows included. A run that was training resumes with the next `tba train`.

    Example: tba down
    """
    from infra import stack

    stopped = stack.down(project_folder())
    typer.echo(f"Stopped: {', '.join(stopped)}." if stopped else "Nothing of this project's stack was running.")
