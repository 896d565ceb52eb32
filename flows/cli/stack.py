"""`tba up` and `tba down`: the local stack."""

import typer

from flows.cli.common import fail, project_folder, say

app = typer.Typer()


@app.command()
def up() -> None:
    """Start the local stack, or its missing parts: Prefect server, work pool, deployments, worker.

    Example: tba up
    """
    from infra import stack

    project = project_folder()
    try:
        url = stack.up(project, keep=True, say=say)
    except (stack.StackError, OSError) as error:  # OSError: as of a full disk
        fail(str(error))
    page = f"{url.removesuffix('/api')}{stack.page_hint(project, url)}"
    say(f"The stack is up: {page}. `tba down` stops the processes that were started here.")


@app.command()
def down() -> None:
    """Stop this folder's server, worker and flows, whichever command started them.

    The next `tba train` resumes a run that was training.

    Example: tba down
    """
    from infra import stack

    try:
        stopped = stack.down(project_folder())
    except (stack.StackError, OSError) as error:
        fail(str(error))
    say(f"Stopped: {', '.join(stopped)}." if stopped else "No process of this project's stack was running.")
