"""How fast does a small policy learn, beside TRL's GRPOTrainer? `make bench-peers`: a page and a JSON file in OUT.

    OUT=/tmp/peers make bench-peers                                    # default: OUT=docs/results

All sides train the testbed's policy (tba/testbed.py) to add: 320 steps of 16 prompts x 8 responses, which the newest
policy samples by the same function from one seed, with AdamW, the same clipping and a constant step size. Each side has
its best step size, found with a seed of its own, and then ten seeds. TRL gets the samples through its `rollout_func`:

    trl_dr_grpo      its Dr. GRPO loss, without KL: the objective that this project's baseline dr_grpo is to equal
    trl_default      its loss and its scaling of advantages as they are by default, without KL
    dr_grpo, tb      this project's objectives

accuracy: greedy, on held-out sums. Mean reward: of all samples of a run, which is larger where learning is faster.
Seconds: of a run on one core, two runs at a time. TRL's loop is made for large models. So its seconds are mostly
overhead, and tell nothing of the time that it takes there.
"""

import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

from flows.compare.bench import TUNING_SEED, rates_to_try
from flows.compare.results import confidence_interval, file_name, hardware, table_lines, write_numbers
from infra.machine import code_version
from tba.config import TrainSettings

STEPS, SEEDS, CLIP, BETAS = 320, 10, 1.0, (0.9, 0.999)
TRL_LOSSES = {"trl_dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"}, "trl_default": {}}
OURS = {"dr_grpo": 0.0, "tb": 0.05}  # objective: beta
COMPARED_WITH = "trl_dr_grpo"


def ours(objective: str, rate: float, seed: int, first_policies: Path) -> dict:
    from tba import testbed

    settings = TrainSettings(
        objective=objective, beta=OURS[objective], steps=STEPS, learning_rate=rate,
        warmup_steps=0, learning_rate_schedule="constant", gradient_clip=CLIP,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1],
    )  # fmt: skip
    trained = testbed.train(testbed.first_policy(first_policies, seed), settings, 0, seed)
    return {"accuracy_after": trained.accuracy, "reward_mean": fmean(trained.curve)}


def trl(loss: dict, rate: float, seed: int, first_policies: Path) -> dict:
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
        PrinterCallback,
    )
    from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
    from trl import GRPOConfig, GRPOTrainer

    from tba import testbed, testbed_task
    from tests.benchmarks.bench_accuracy import TRL

    policy, generator, curve = testbed.first_policy(first_policies, seed), torch.Generator().manual_seed(seed), []

    class Layers(torch.nn.Module):
        """All but the output layer. Padding lies behind the responses, whose tokens do not attend to it."""

        def forward(self, input_ids: torch.Tensor, **_) -> BaseModelOutput:
            return BaseModelOutput(policy.hidden(input_ids)[0])  # [N, L, D]

    class Model(PreTrainedModel, GenerationMixin):
        config_class, base_model_prefix = PreTrainedConfig, "layers"

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.policy, self.layers = policy, Layers()

        def forward(self, input_ids: torch.Tensor, **_) -> CausalLMOutput:
            return CausalLMOutput(logits=policy(input_ids)[0])  # [N, L, V]

        def get_output_embeddings(self) -> torch.nn.Module:
            return policy.head

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict:
        """TRL's prompts stand for the sums that are drawn here, as by our side."""
        samples = testbed.sample_sums(policy, testbed.B, testbed.K, generator)
        curve.append(samples.reward)
        of_prompts = testbed_task.sums().prompts[samples.numbers].repeat_interleave(testbed.K, 0)
        lengths = testbed_task.is_token(samples.responses).sum(1).tolist()
        responses = [tokens[:n] for tokens, n in zip(samples.responses.tolist(), lengths, strict=True)]
        return {"prompt_ids": of_prompts.tolist(), "completion_ids": responses, "logprobs": None}

    characters = Tokenizer(models.WordLevel({each: number for number, each in enumerate(testbed_task.CHARACTERS)}, "="))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=Model(PreTrainedConfig(vocab_size=len(testbed_task.CHARACTERS), eos_token_id=testbed_task.END)),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="\n", pad_token="\n"),
            reward_funcs=lambda completion_ids, **_: curve[-1].tolist(),
            rollout_func=rollout,
            train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(testbed.B)]),
            args=GRPOConfig(
                **{name: value for name, value in TRL.items() if name != "loss_type"},
                **loss,
                output_dir=folder,
                bf16=False,
                per_device_train_batch_size=testbed.B * testbed.K,
                num_generations=testbed.K,
                max_completion_length=testbed_task.T,
                max_steps=STEPS,
                learning_rate=rate,
                adam_beta1=BETAS[0],
                adam_beta2=BETAS[1],
                weight_decay=TrainSettings().weight_decay,
                max_grad_norm=CLIP,
                seed=seed,
            ),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    assert len(curve) == STEPS
    return {"accuracy_after": testbed.accuracy(policy), "reward_mean": torch.stack(curve).mean().item()}


def run(side: str, rate: float, seed: int, first_policies: Path) -> dict:
    """One run, in this process, on one thread."""
    import torch

    torch.set_num_threads(1)
    started = time.monotonic()
    if side in TRL_LOSSES:
        found = trl(TRL_LOSSES[side], rate, seed, first_policies)
    else:
        found = ours(side, rate, seed, first_policies)
    return {"arm": f"{side}-lag0", "seed": seed, "learning_rate": rate, **found, "seconds": time.monotonic() - started}


def best_rate(pool: ProcessPoolExecutor, side: str, first_policies: Path) -> float:
    found = {}
    while rates := rates_to_try(found):
        of_rates = [pool.submit(run, side, rate, TUNING_SEED, first_policies) for rate in rates]
        found |= {rate: future.result()["accuracy_after"] for rate, future in zip(rates, of_rates, strict=True)}
    return max(found, key=found.get)


def write(out: Path, runs: dict[str, list[dict]]) -> Path:
    """The page, and the numbers beside it."""
    about = {
        "policy": "of the testbed",
        "steps": STEPS,
        "seeds": SEEDS,
        "commit": code_version(),
        **hardware(of_model=False),
    }
    others = [side for side in runs if side != COMPARED_WITH]

    def values(side: str, measure: str) -> list[float]:
        return [each[measure] for each in runs[side]]

    def ahead(side: str, measure: str) -> str:
        pairs = zip(values(side, measure), values(COMPARED_WITH, measure), strict=True)
        return str(confidence_interval([one - other for one, other in pairs], len(others)))

    measures = ("accuracy_after", "reward_mean", "seconds")
    headings = ["Accuracy", "Mean reward of all samples", "Seconds"]
    lines = [
        "# This project's objectives beside TRL's GRPOTrainer, on the testbed",
        "",
        *(f"- {name}: {fact}" for name, fact in about.items()),
        "",
        *table_lines(
            ["Side", "Step size", *headings],
            [
                [side, f"{of[0]['learning_rate']:.2g}", *(confidence_interval(values(side, each)) for each in measures)]
                for side, of in runs.items()
            ],
        ),
        "",
        f"Minus {COMPARED_WITH}, paired by seed; the intervals of a column hold together with 95 %:",
        "",
        *table_lines(
            ["Side", *headings[:2]], [[side, *(ahead(side, each) for each in measures[:2])] for side in others]
        ),
    ]
    out.mkdir(parents=True, exist_ok=True)
    page = out / f"{file_name('peers', about)}.md"
    page.write_text("\n".join(lines) + "\n")
    write_numbers(page.with_suffix(".json"), about, [each for of in runs.values() for each in of])
    return page


def main() -> None:
    runs = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool,
    ):
        first_policies = Path(folder)
        for side in [*OURS, *TRL_LOSSES]:
            rate = best_rate(pool, side, first_policies)
            futures = [pool.submit(run, side, rate, seed, first_policies) for seed in range(SEEDS)]
            runs[side] = [future.result() for future in futures]
            print(side, f"step size {rate:.2g}", confidence_interval([of["accuracy_after"] for of in runs[side]]))
    print(write(Path(os.environ.get("OUT", "docs/results")), runs))


if __name__ == "__main__":
    main()
