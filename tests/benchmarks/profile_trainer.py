"""Time and memory of a training step by operation: a torch profiler trace and a table, of random tokens.

python -m tests.benchmarks.profile_trainer --prompts 8 --responses 16       # --help lists the options
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch.profiler import profile

from tba.batch import Draw
from tba.config import TrainSettings
from tba.logprobs import Group
from tba.models import model_folder
from tba.precision import default_device
from tba.trainer import Trainer

WARM_UP_STEPS = 2  # the first allocates the optimizer's state, the second runs with warm caches
ROWS = 40  # of the table; further rows are noise


def profile_step(trainer: Trainer, draws: Sequence[Draw], folder: Path) -> str:
    """Steps the trainer on the draws, the last time under the profiler.

    Writes `trace.json` (for chrome://tracing or Perfetto) and `table.txt` into the folder. Returns the table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(WARM_UP_STEPS):
        trainer.train_step(draws)
    with profile(profile_memory=True) as profiler:
        trainer.train_step(draws)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=60)
    (folder / "table.txt").write_text(table)
    return table


def random_draws(vocabulary: int, prompts: int, responses: int, prompt_tokens: int, response_tokens: int) -> list[Draw]:
    """A batch of random tokens, every second response rewarded: time and memory depend on the shape alone."""
    generator = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> list:
        return torch.randint(vocabulary, shape, generator=generator).tolist()

    return [
        Draw(
            group=Group(tokens(prompt_tokens), tokens(responses, response_tokens)),
            slot=list(range(responses)),
            reward=[float(number % 2) for number in range(responses)],
            behavior_logprobs=[[-4.0] * response_tokens] * responses,
            reference_logprobs=[[-4.0] * response_tokens] * responses,
            is_of_newest_policy=[True] * responses,
        )
        for _ in range(prompts)
    ]


def main(
    model: Annotated[str, typer.Option(help="Embedded model's name, local folder or Hugging Face id.")] = (
        "smollm2-135m-instruct"
    ),
    prompts: Annotated[int, typer.Option(min=1, help="B: prompts in the batch.")] = 4,
    responses: Annotated[int, typer.Option(min=2, help="K: responses to a prompt.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 100,
    response_tokens: Annotated[int, typer.Option(min=1)] = 128,
    folder: Annotated[Path, typer.Option(help="Folder for trace.json and table.txt.")] = Path(".tba/.local/profile"),
) -> None:
    """Profile one training step."""
    trainer = Trainer(model_folder(model), TrainSettings(), default_device())
    draws = random_draws(trainer.vocabulary_size, prompts, responses, prompt_tokens, response_tokens)
    print(profile_step(trainer, draws, folder))
    print(f"Trace: {folder / 'trace.json'} (open in ui.perfetto.dev). Table: {folder / 'table.txt'}.")


if __name__ == "__main__":
    typer.run(main)
