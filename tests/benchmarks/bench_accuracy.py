"""How long until the policy adds? `make bench-accuracy`: `make train` by seed, beside TRL's GRPOTrainer, one by one.

    SEEDS=0,1 make bench-accuracy                                      # default: SEEDS=0,1,2,3,4

Both post-train the embedded SmolLM2-135M-Instruct on two-digit addition until the mean reward of the newest 640 sampled
responses is 0.6; a table, then one JSON object. These are ten of TRL's steps and four of our rounds. Every sampled
response counts; what ours draws to learn from is chosen, and is not measured.

Ours is `tba train` with its defaults, stopped there: a Searcher (vLLM) and the Trainer share the cores. TRL's steps
generate 4 prompts x 16 responses with transformers and learn from them by the Dr. GRPO loss; its step size is constant
and as large as ours is at most (no other was tried), its precision the machine's fastest (bfloat16 autocast where that
is multiplied in hardware), all cores are its own. Seconds are from the first round's start, before which engines and
models loaded.
"""

import json
import math
import os
import signal
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

from storage.store import RunStore
from tests.benchmarks.bench_stability import integers
from tests.benchmarks.default_run import TARGET, Sample, default_run, reached, sampled

GIVE_UP_S = 1200
PROMPTS, RESPONSES = 4, 16
# Of every TRL run that ours is measured beside: its objective, and nothing but training.
TRL = {
    "use_cpu": True,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch_fused",
    "loss_type": "dr_grpo",
    "beta": 0.0,
    "temperature": 1.0,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


def ours(seed: int) -> dict:
    began = time.monotonic()

    def enough(store: RunStore) -> bool:
        return time.monotonic() - began > GIVE_UP_S or reached(sampled(store))["seconds"] is not None

    with default_run(seed, enough=enough) as store:
        return reached(sampled(store))


def use_one_gpu() -> None:
    """Leaves this process one GPU at most: TRL's trainers refuse several in a process. Before CUDA starts."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def trl(folder: Path) -> dict:
    use_one_gpu()
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tba.config import TrainSettings
    from tba.precision import compute_dtype, default_device
    from tba.tasks.arithmetic import Arithmetic

    problems = Arithmetic(seed=0).train
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokenizer.encode("\n"))[0]  # a line's end ends the response
    seen, samples, started = [], [], time.monotonic()

    def reward(completion_ids: list[list[int]], answer: list[str], **_) -> list[float]:
        rewards = [
            float(tokens[-1] == tokenizer.eos_token_id and tokenizer.decode(tokens[:-1]).strip() == right)
            for tokens, right in zip(completion_ids, answer, strict=True)
        ]
        seen.append(fmean(rewards))
        return rewards

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            nonlocal started
            started = time.monotonic()

        def on_step_end(self, args, state, control, **_):
            elapsed = time.monotonic() - started
            samples.append(Sample(elapsed, PROMPTS * RESPONSES, seen[-1]))
            control.should_training_stop = reached(samples)["seconds"] is not None or elapsed > GIVE_UP_S

    trainer = GRPOTrainer(
        model=str(folder),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems]),
        callbacks=[Clock()],
        args=GRPOConfig(
            **TRL | {"use_cpu": not torch.cuda.is_available()},
            output_dir=tempfile.mkdtemp(),
            model_init_kwargs={"dtype": torch.float32},
            bf16=compute_dtype(default_device()) == torch.bfloat16,
            per_device_train_batch_size=PROMPTS * RESPONSES,
            num_generations=RESPONSES,
            max_completion_length=Arithmetic.max_response_tokens,
            max_steps=200,
            learning_rate=TrainSettings().learning_rate,
        ),
    )
    trainer.train()
    return reached(samples)


def main() -> None:
    from tba.models import resolve_model

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the run that is on, as Ctrl-C does
    folder = Path(resolve_model("smollm2-135m-instruct", Path.cwd() / ".tba" / ".local" / "models"))
    sides = {f"ours, seed {seed}": lambda seed=seed: ours(seed) for seed in integers("SEEDS", "0,1,2,3,4")}
    # TRL last: right after its eleven minutes ours' first steps took twice as long, files being read anew (LOG.md).
    sides["TRL"] = lambda: trl(folder)
    print(f"{'side':14}{'seconds':>10}{'responses':>11}{'best mean':>11}", flush=True)
    seconds = []
    for side, run in sides.items():
        result = run()
        seconds.append(result["seconds"])
        cells = f"{result['seconds'] or 'never':>10}{result['responses']:11}{result['best'] or 0:11.3f}"
        print(f"{side:14}{cells}", flush=True)
    print(json.dumps({"target": TARGET} | compare(seconds[:-1], seconds[-1])))


def compare(ours: list[float | None], trl: float | None) -> dict:
    """None is a run that did not reach the target: later than any that did."""
    middle = median(math.inf if seconds is None else seconds for seconds in ours)
    return {
        "ours_seconds": ours,
        "ours_median_seconds": middle if middle < math.inf else None,
        "trl_seconds": trl,
        "ratio_vs_trl": round(trl / middle, 2) if trl and middle < math.inf else None,
    }


if __name__ == "__main__":
    main()
