"""How fast is a training step, beside TRL's GRPOTrainer? `make bench-trainer`: a table, then one JSON object.

    FLOAT32=1 make bench-trainer    # products in float32 on any processor

Both sides train the embedded SmolLM2-135M-Instruct on the same batches, with float32 weights, the same fused AdamW,
clipping and number of steps, and products in the machine's fastest type: bfloat16 where it is multiplied in hardware,
else float32. Neither is told to checkpoint gradients. Ours allocates memory as a run's Trainer does.

    short    4 prompts of 40 tokens, 16 responses of 6 tokens each
    long     4 prompts of 100 tokens, 16 responses of 128 tokens each

Tokens are random, the last one ends the response, and rewards are 0 or 1. Generation is left out: TRL gets the
responses through its `rollout_func`, and its step is timed from the forward pass to the optimizer's end. A forward pass
of TRL holds one prompt's 16 responses, because a whole long batch would need more than 24 GB by our estimate. One of
ours holds 2200 tokens at most: a whole short batch, or one prompt of a long one with its 16 responses.

Each shape and side has a process of its own. Both sides of a shape take turns, a step each, because the speed of a
shared machine changes within seconds by up to a factor of two (docs/LOG.md). First steps do not count.

    ratio_vs_trl_*            TRL's seconds over ours: geometric mean of the pairs
    *_interval                its 95 % interval
    peak_mb_long              the process' largest resident memory
    publish_stall_share       time for which training stood still for a policy, over the time of the steps; a policy is
                              published every second step, to a local folder
    publishing_step_s_mean    a step then, with the writing beside it
    flops_share_long          of each long step, its useful FLOPs a second over those of products of matrices

The products are of the fastest size from 512 to 4,096 rows and columns, in the type of the step's, over a second: the
mean of those just before and just after the step. Useful FLOPs are 6 x weights in matrix products x tokens, each
prompt's once, plus attention's (4 x hidden size for each pair of tokens that attend, 3 x for the backward pass), plus
the head's for the tokens that are scored. Recomputation, the optimizer and casts count as nothing.
"""

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")

NUM_PROMPTS, NUM_RESPONSES, LEARNING_RATE, CLIP = 4, 16, 1e-5, 1.0


@dataclass(frozen=True)
class Shape:
    prompt_tokens: int
    response_tokens: int
    steps: int


SHAPES = {"short": Shape(40, 6, 9), "long": Shape(100, 128, 4), "gpu": Shape(128, 1024, 4)}  # gpu: gpu_check.py's
SIDES = ["ours", "trl"]
PUBLISHING_STEPS = 8
IN_TURN, WAITS = "BENCH_IN_TURN", "waits for its turn"


def make_groups(shape: Shape, end: int, vocabulary: int) -> list[tuple[list[int], list[list[int]], list[float]]]:
    """A prompt, its responses and their rewards, of random tokens; the same in every process."""
    import numpy as np

    random = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return random.integers(100, vocabulary, count).tolist()

    def responses() -> list[list[int]]:
        return [[*tokens(shape.response_tokens - 1), end] for _ in range(NUM_RESPONSES)]

    return [
        (tokens(shape.prompt_tokens), responses(), random.integers(0, 2, NUM_RESPONSES).astype(float).tolist())
        for _ in range(NUM_PROMPTS)
    ]


def await_turn() -> None:
    """Before each step: waits until the other side has done its own, if there is one."""
    if IN_TURN in os.environ:
        print(WAITS, flush=True)
        if not sys.stdin.readline():
            sys.exit("the benchmark has ended")


def step_ours(folder: Path, shape: Shape) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of each long one its FLOPs a second over those of products before it and after it."""
    from tba.precision import compute_dtype, default_device

    trainer, draws = our_trainer(folder, shape, shape.steps)
    seconds, shares, flops = [], [], useful_flops(folder, shape)
    precision = str(compute_dtype(default_device())).removeprefix("torch.")
    for _ in range(shape.steps):
        await_turn()
        before = measured_peak_flops(precision) if shape == SHAPES["long"] else None
        seconds.append(trainer.train_step(draws)["step_s"])
        if before:
            shares.append(flops / seconds[-1] / ((before + measured_peak_flops(precision)) / 2))
    return seconds, shares


def our_trainer(folder: Path, shape: Shape, steps: int) -> tuple:
    from transformers import AutoConfig

    from tba.batch import Draw
    from tba.config import TrainSettings
    from tba.logprobs import Group
    from tba.precision import default_device
    from tba.trainer import Trainer

    config = AutoConfig.from_pretrained(folder)
    settings = TrainSettings(
        steps=steps, learning_rate=LEARNING_RATE, warmup_steps=0, gradient_clip=CLIP,
        micro_batch_tokens=max(2200, shape.prompt_tokens + NUM_RESPONSES * shape.response_tokens),
        sync_interval=2, checkpoint_interval=steps,
    )  # fmt: skip
    return Trainer(folder, settings, default_device()), [
        Draw(
            Group(prompt, responses),
            list(range(NUM_RESPONSES)),
            rewards,
            behavior_logprobs=[[-4.0] * len(response) for response in responses],
            reference_logprobs=[[-4.0] * len(response) for response in responses],
            is_of_newest_policy=[True] * NUM_RESPONSES,
        )
        for prompt, responses, rewards in make_groups(shape, config.eos_token_id, config.vocab_size)
    ]


def publish_ours(folder: Path, shape: Shape) -> dict:
    """Our loop with its real outbox, on a local folder: a policy every second step."""
    from flows.config import RunConfig
    from flows.trainer.alarms import RunAlarms
    from flows.trainer.heartbeat import Heartbeat
    from flows.trainer.outbox import StoreOutbox
    from storage.store import RunStore
    from tba.batch import Batch
    from tba.training_loop import train

    steps = []

    class Outbox(StoreOutbox):
        def record(self, step, batch, metrics):
            steps.append(metrics)

        def checkpoint(self, step, trainer):
            pass

    class Experience:
        def sync(self, step):
            pass

        def draw(self, step):
            return Batch(draws, {}, None)

    trainer, draws = our_trainer(folder, shape, PUBLISHING_STEPS)
    store = RunStore(Path(tempfile.mkdtemp()).as_uri(), "bench")
    heart = Heartbeat(store, RunConfig(), 1, os.getppid())
    outbox = Outbox(store, RunConfig(), 1, folder, heart, RunAlarms())
    train(trainer, Experience(), outbox)
    outbox.close()
    heart.end("finished")
    steps = steps[2:]  # the first step is slow, and the first policy is published before it
    return {
        "step_s": sum(step["step_s"] for step in steps) / len(steps),
        "publish_stall_share": sum(step["publish_stall_s"] for step in steps) / sum(step["step_s"] for step in steps),
        "publish_stall_s": max(step["publish_stall_s"] for step in steps),
    }


def step_trl(folder: Path, shape: Shape) -> list[float]:
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tba.precision import compute_dtype, default_device
    from tests.benchmarks.bench_accuracy import TRL, use_one_gpu

    use_one_gpu()

    config = AutoConfig.from_pretrained(folder)
    groups = make_groups(shape, config.eos_token_id, config.vocab_size)
    reward_of = {
        tuple(response): reward for _, of, rewards in groups for response, reward in zip(of, rewards, strict=True)
    }

    def rollout(prompts: list[str], trainer) -> dict:
        """TRL asks for each prompt NUM_RESPONSES times running; it names a prompt by its number."""
        asked = [groups[int(prompt)] for prompt in prompts]
        responses = [of[place % NUM_RESPONSES] for place, (_, of, _) in enumerate(asked)]
        return {"prompt_ids": [prompt for prompt, _, _ in asked], "completion_ids": responses, "logprobs": None}

    def reward(completion_ids: list[list[int]], **_) -> list[float]:
        return [reward_of[tuple(response)] for response in completion_ids]

    class Clock(TrainerCallback):
        """A step of TRL's loop holds the rollout and the rewards, so the clock starts behind them."""

        def __init__(self) -> None:
            self.seconds, self.started = [], None

        def on_step_begin(self, *_, **__) -> None:
            await_turn()

        def on_step_end(self, *_, **__) -> None:
            self.seconds.append(time.monotonic() - self.started)
            self.started = None

    clock = Clock()

    class TimedTrainer(GRPOTrainer):
        def compute_loss(self, *arguments, **options):
            clock.started = clock.started or time.monotonic()
            return super().compute_loss(*arguments, **options)

    trainer = TimedTrainer(
        model=str(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=reward,
        rollout_func=rollout,
        train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(NUM_PROMPTS)]),
        callbacks=[clock],
        args=GRPOConfig(
            **TRL | {"use_cpu": not torch.cuda.is_available()},
            output_dir=tempfile.mkdtemp(),
            model_init_kwargs={"dtype": torch.float32},
            bf16=compute_dtype(default_device()) == torch.bfloat16,
            per_device_train_batch_size=NUM_RESPONSES,
            gradient_accumulation_steps=NUM_PROMPTS,
            num_generations=NUM_RESPONSES,
            max_completion_length=shape.response_tokens,
            max_steps=shape.steps,
            shuffle_dataset=False,
            learning_rate=LEARNING_RATE,
            max_grad_norm=CLIP,
        ),
    )
    trainer.train()
    return clock.seconds


def run_case(side: str, shape: Shape, folder: Path) -> dict:
    """In a process of its own: seconds of the steps but the first; peak memory, resident or of the GPU."""
    import torch

    from infra.memory import keep_freed_memory
    from tba import precision
    from tba.precision import default_device

    torch.set_num_threads(2)
    if os.environ.get("FLOAT32"):
        precision.BFLOAT16_INSTRUCTIONS = ()
    if side != "trl" and default_device() == "cpu":
        keep_freed_memory()
    if side == "publish":
        return publish_ours(folder, shape)
    seconds, shares = step_ours(folder, shape) if side == "ours" else (step_trl(folder, shape), None)
    assert len(seconds) == shape.steps
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if torch.cuda.is_available():
        peak_mb = torch.cuda.max_memory_allocated() / 2**20
    # The fastest step: other programs on the machine can only add to it.
    return {"step_s": min(seconds[1:]), "seconds": seconds[1:], "peak_mb": peak_mb, "shares": shares and shares[1:]}


def measured_peak_flops(precision: str) -> float:
    """FLOPs a second of matrix products on these cores, or on the GPU: of the fastest size, the mean of a second."""
    import torch

    from tba.precision import default_device

    torch.set_num_threads(2)
    best, products = 0.0, 2
    for size in (512, 1024, 2048, 4096, *([8192] if torch.cuda.is_available() else [])):
        if products == 1:  # bfloat16 emulated without AVX-512: 4,096 would take eleven minutes
            break
        one, other = (torch.randn(size, size, device=default_device()).to(getattr(torch, precision)) for _ in range(2))
        one @ other  # the first one of a size takes longer
        products, seconds, started = 0, 0.0, time.monotonic()
        while seconds < 1:
            (one @ other)[0, 0].item()  # waits for the product
            products, seconds = products + 1, time.monotonic() - started
        best = max(best, products * 2 * size**3 / seconds)
    return best


def useful_flops(folder: Path, shape: Shape) -> float:
    """Of one of our steps, forward and backward; what counts is said at the top."""
    config = json.loads((folder / "config.json").read_text())
    hidden, head_size = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    keys = 2 * config["num_key_value_heads"] * head_size
    weights = hidden * (2 * hidden + keys + 3 * config["intermediate_size"])  # of a layer, in matrix products
    P, R = shape.prompt_tokens, shape.response_tokens - 1  # a response's last token is only predicted
    tokens = P + NUM_RESPONSES * R
    pairs = P * (P + 1) / 2 + NUM_RESPONSES * (R * P + R * (R + 1) / 2)
    layers = config["num_hidden_layers"] * (2 * weights * tokens + 4 * hidden * pairs)
    head = 2 * hidden * config["vocab_size"] * (1 + NUM_RESPONSES * R)
    return 3 * NUM_PROMPTS * (layers + head)


class Case:
    """A side and a shape, in a process of its own."""

    def __init__(self, side: str, name: str, folder: Path, environment: dict[str, str]) -> None:
        from infra.memory import tensor_environment

        self._errors = Path(tempfile.mkdtemp(), f"{side}-{name}.log")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.bench_trainer", side, name, str(folder)],
            env=os.environ | ({} if side == "trl" else tensor_environment()) | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors.open("w"),
            text=True,
        )

    def take_turn(self) -> None:
        print(file=self._process.stdin, flush=True)

    def until_it_waits(self) -> dict | None:
        """Its result when it has ended; None: it waits for its turn."""
        line = ""
        for line in self._process.stdout:
            if line.strip() == WAITS:
                return None
        if self._process.wait():
            sys.exit(f"{self._errors.stem} failed:\n{self._errors.read_text()[-3000:]}")
        return json.loads(line)


def in_turn(name: str, folder: Path) -> list[dict]:
    """The results of both sides, which take turns in going first."""
    cases = [Case(side, name, folder, {IN_TURN: "1"}) for side in SIDES]
    results = [case.until_it_waits() for case in cases]
    for number in range(SHAPES[name].steps):
        for side in (0, 1) if number % 2 else (1, 0):
            cases[side].take_turn()
            results[side] = cases[side].until_it_waits()
    return results


def main() -> None:
    from tba.intervals import half_width
    from tba.models import resolve_model

    folder = Path(resolve_model("smollm2-135m-instruct", Path.cwd() / ".tba" / ".local" / "models"))
    found, figures = {}, {}
    print(f"{'side':12}{'shape':8}{'step s':>10}{'tokens/s':>10}{'peak MB':>10}", flush=True)
    for name in ("short", "long"):
        found[name] = in_turn(name, folder)
        scored = NUM_PROMPTS * NUM_RESPONSES * SHAPES[name].response_tokens
        for side, result in zip(SIDES, found[name], strict=True):
            mean = statistics.mean(result["seconds"])
            print(f"{side:12}{name:8}{mean:10.2f}{scored / mean:10.0f}{result['peak_mb']:10.0f}", flush=True)
        ours, trl = (result["seconds"] for result in found[name])
        logs = [math.log(other / one) for one, other in zip(ours, trl, strict=True)]
        middle, half = statistics.mean(logs), half_width(logs)
        figures |= {
            f"ratio_vs_trl_{name}": round(math.exp(middle), 2),
            f"ratio_vs_trl_{name}_interval": [round(math.exp(each), 2) for each in (middle - half, middle + half)],
            f"step_s_{name}": [round(each, 3) for each in ours],
            f"trl_step_s_{name}": [round(each, 3) for each in trl],
        }
    publish = Case("publish", "short", folder, {}).until_it_waits()
    ours, trl = found["long"]
    figures |= {
        "publish_stall_s": round(publish["publish_stall_s"], 3),
        "publish_stall_share": round(publish["publish_stall_share"], 4),
        "publishing_step_s_mean": round(publish["step_s"], 3),
        "peak_mb_long": round(ours["peak_mb"]),
        "trl_peak_mb_long": round(trl["peak_mb"]),
        "useful_tflops_long": round(useful_flops(folder, SHAPES["long"]) / 1e12, 3),
        "peak_bf16_gflops": round(measured_peak_flops("bfloat16") / 1e9),
        "peak_float32_gflops": round(measured_peak_flops("float32") / 1e9),
        "flops_share_long": [round(share, 3) for share in ours["shares"]],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        side, name, folder = sys.argv[1:]
        print(json.dumps(run_case(side, SHAPES[name], Path(folder))))
    else:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TMPDIR"] = tempfile.tempdir = folder  # of the sides' processes, too
            main()
