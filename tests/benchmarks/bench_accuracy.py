"""How long until the policy adds? `make bench-accuracy`: `make train` beside TRL's GRPOTrainer, one after the other.

Both post-train the embedded SmolLM2-135M-Instruct on two-digit addition until the mean reward of what ten steps sampled
is 0.6; a table, then one JSON object. Ours is `tba train` with its defaults: a Searcher (vLLM) and the Trainer share
the cores. TRL's steps generate 4 prompts x 16 responses with transformers and learn from them by the Dr. GRPO loss; its
step size is constant and as large as ours is at most (no other was tried), its precision the machine's fastest
(bfloat16 autocast where that is multiplied in hardware), all cores are its own. Seconds are from the first round's
start, before which engines and models loaded; of ours only draws from the newest sync count, as replayed trajectories
are chosen.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

TARGET, STEPS, GIVE_UP_S = 0.6, 10, 1200
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


def ours() -> dict:
    from storage.inspect import query
    from storage.store import RunStore

    root = Path(tempfile.mkdtemp(prefix="bench-accuracy-")).as_uri()
    command = [sys.executable, "-m", "flows.cli", "train", "bench", "--store", root]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"tba train failed:\n{done.stdout[-3000:]}")
    steps = query(
        RunStore(root, "bench"),
        "SELECT avg(batches.reward) AS reward, "
        "any_value(epoch(ended_at - (SELECT min(started_at) FROM search_rounds))) AS seconds "
        "FROM batches JOIN training_steps USING (step) WHERE recent GROUP BY step ORDER BY step",
    ).to_pylist()
    return reached([(step["seconds"], step["reward"]) for step in steps])


def trl(folder: Path) -> dict:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tba.config import TrainSettings
    from tba.precision import compute_dtype
    from tba.tasks.arithmetic import Arithmetic

    problems = Arithmetic(data=None, seed=0).train
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokenizer.encode("\n"))[0]  # a line's end ends the response
    seen, started = [], time.monotonic()

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
            curve.append((elapsed, seen[-1]))
            control.should_training_stop = reached(curve)["seconds"] is not None or elapsed > GIVE_UP_S

    curve: list[tuple[float, float]] = []
    trainer = GRPOTrainer(
        model=str(folder),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems]),
        callbacks=[Clock()],
        args=GRPOConfig(
            **TRL,
            output_dir=tempfile.mkdtemp(),
            model_init_kwargs={"dtype": torch.float32},
            bf16=compute_dtype() == torch.bfloat16,
            per_device_train_batch_size=PROMPTS * RESPONSES,
            num_generations=RESPONSES,
            max_completion_length=Arithmetic.max_response_tokens,
            max_steps=200,
            learning_rate=TrainSettings().learning_rate,
        ),
    )
    trainer.train()
    return reached(curve)


def reached(curve: list[tuple[float, float]]) -> dict:
    """When the mean of the newest `STEPS` rewards first is `TARGET`: seconds and step; None: never, and its best."""
    means = [fmean(reward for _, reward in curve[max(0, end - STEPS) : end]) for end in range(1, len(curve) + 1)]
    for step in range(STEPS, len(curve) + 1):
        if means[step - 1] >= TARGET:
            return {"seconds": round(curve[step - 1][0], 1), "step": step, "best": means[step - 1]}
    return {"seconds": None, "step": len(curve), "best": max(means[STEPS - 1 :], default=None)}


def main() -> None:
    from tba.embedded import resolve_model

    folder = Path(resolve_model("smollm2-135m-instruct", Path.cwd() / ".tba" / ".local" / "models"))
    print(f"{'side':8}{'seconds':>10}{'step':>8}{'ten-step mean':>16}", flush=True)
    results = {}
    # TRL last: right after its eleven minutes ours' first steps took twice as long, files being read anew (LOG.md).
    for side, run in {"ours": ours, "trl": lambda: trl(folder)}.items():
        result = results[side] = run()
        print(f"{side:8}{result['seconds'] or 'never':>10}{result['step']:8}{result['best'] or 0:16.3f}", flush=True)
    both = results["ours"]["seconds"] and results["trl"]["seconds"]
    ratio = round(results["trl"]["seconds"] / results["ours"]["seconds"], 2) if both else None
    print(json.dumps({"target": TARGET, "ratio_vs_trl": ratio} | results))


if __name__ == "__main__":
    main()
