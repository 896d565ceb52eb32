"""`tba up` and `tba down`: the local stack."""

import typer

from flows.cli.common import fail, project_folder, say

app = typer.Typer()


@app.command()
def up() -> None:
    """Start the local stack (Prefect server, work pool, deployments, worker), or its missing parts.

    Example: tba up
    """
    from infra import stack

    project = project_folder()
    try:
        url = stack.up(project, keep=True, say=say)
    except stack.StackError as error:
        fail(str(error))
    page = f"{url.removesuffix('/api')}{stack.page_hint(project, url)}"
    say(f"The stack is up: {page}. `tba down` stops what was started here.")


@app.command()
def down() -> None:
    """Stop what `tba up` started, running flows included. A run that was training resumes with the next `tba train`.

    Example: tba down
    """
    from infra import stack

    stopped = stack.down(project_folder())
    say(f"Stopped: {', '.join(stopped)}." if stopped else "Nothing of this project's stack was running.")
