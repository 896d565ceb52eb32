"""`tba profile`: where a training step's time and memory go."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def profile(
    model: Annotated[str, typer.Option(help="Embedded model's name, local folder or Hugging Face id.")] = (
        "smollm2-135m-instruct"
    ),
    prompts: Annotated[int, typer.Option(min=1, help="B: prompts in the batch.")] = 4,
    responses: Annotated[int, typer.Option(min=2, help="K: responses to a prompt.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 100,
    response_tokens: Annotated[int, typer.Option(min=1)] = 128,
    folder: Annotated[Path, typer.Option(help="Where trace.json and table.txt go.")] = Path(".tba/.local/profile"),
) -> None:
    """Profile one training step on random tokens: where its time and memory go, operation by operation.

    Example: tba profile --prompts 8 --responses 16
    """
    from tba.config import TrainSettings
    from tba.models import model_folder
    from tba.precision import default_device
    from tba.profile import profile_step, random_draws
    from tba.trainer import Trainer

    try:
        trainer = Trainer(model_folder(model), TrainSettings(), default_device())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    draws = random_draws(trainer.vocabulary, prompts, responses, prompt_tokens, response_tokens)
    typer.echo(profile_step(trainer, draws, folder))
    typer.echo(f"Trace: {folder / 'trace.json'} (open in ui.perfetto.dev). Table: {folder / 'table.txt'}.")
