"""Where the time and the memory of a training step go: a torch profiler trace and a table."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import profile

from tba.batch import Draw
from tba.logprobs import Group
from tba.trainer import Trainer

WARM_UP_STEPS = 2  # the first allocates the optimizer's state, the second finds everything warm
ROWS = 40  # of the table; what comes behind is noise


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
            is_fresh=[True] * responses,
        )
        for _ in range(prompts)
    ]
