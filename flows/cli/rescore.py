"""`tba rescore`: stored trajectories scored by another reward."""

from typing import Annotated

import typer

from flows.cli.common import RunName, StoreOption, existing_run, fail, say

app = typer.Typer()


@app.command()
def rescore(
    run: RunName,
    reward: Annotated[
        str, typer.Option(help="Reward function in TRL's signature, as module:function; task: the run's own.")
    ],
    version: Annotated[
        str | None, typer.Option(help="Name of the new reward version; default: the function's name.")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Score a run's stored trajectories by another reward; the shards do not change.

    A repeated call scores the trajectories that were added since. The function is
    f(prompts, completions, **columns), and returns a list of numbers; columns are prompt_id, answer, completion_ids and
    those of the task's dataset. To train on the new rewards:
    tba train NEW --warm-start RUN --set reward_version=VERSION --set task.rewards=my_rewards:brief

    Example: tba rescore arithmetic --reward my_rewards:brief --version v2
    """
    from flows.reuse.rescore import rescore
    from storage.errors import StoreError

    try:
        version, num_scored = rescore(existing_run(run, store), reward, version, say)
    except (StoreError, ValueError) as error:
        fail(str(error), status=2)
    say(f"{num_scored:,} trajectories of run {run!r} scored by {reward}: reward version {version!r}.")
