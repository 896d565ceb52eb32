"""Does all of it run on a GPU, and how fast? `make gpu-check`: a line for each part, then one JSON object.

    make gpu-check                                        # on a machine with an NVIDIA GPU of 80 GB
    python -m tests.benchmarks.gpu_check --small          # the same parts with small shapes, also on a CPU
    python -m tests.benchmarks.gpu_check swap             # some parts

    train          the main job, `tba train`: accuracy, seconds, median training step
    generation_64  a Searcher with 64 sequences at once beside bare vLLM: tokens a second, load pause
    generation_256 the same with 256
    step           a training step of 4 prompts x 16 responses x 1,024 tokens beside TRL's: seconds, peak memory, and
                   mfu, useful FLOPs over what a large product reaches here, in bfloat16 where that is fast
    swap           a policy into the engine, whole, and rebuilt from a delta by which 0.8 % of the weights differ

generation and step take the shape of Qwen2.5-1.5B, swap that of Qwen2.5-7B, with random weights: nothing is fetched.
Each part has a process of its own and `LIMIT_S`. A part that fails is named, the others go on, and the exit status
is 1.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).parents[2]
LIMIT_S = {"train": 300, "generation_64": 300, "generation_256": 300, "step": 240, "swap": 420}  # estimates, doubled
# Of Qwen2.5; small: a shape with which each part takes seconds on a CPU.
SHAPES = {
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "small": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 49152, "tie_word_embeddings": True},
}  # fmt: skip
FOLDER_VARIABLE = "TBA_GPU_CHECK_FOLDER"  # of models that several parts use
ENDING_S = 20  # for what a part has started, after its limit
SMALL_SHARD_BYTES = 1_000_000  # several files, as a model above 5 GB has
CHANGED_SHARE = 0.008  # of the weights, between consecutive policies of a default run


def random_model(folder: Path, shape: str) -> Path:
    """A model of random bfloat16 weights, with the embedded model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from tba.models import embedded_model
    from tba.precision import default_device
    from tba.weights import write_weights

    folder.mkdir()
    config = Qwen2Config(**SHAPES[shape], dtype="bfloat16", max_position_embeddings=4096, eos_token_id=2)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    for file in embedded_model(PROJECT / ".tba" / ".local" / "models").glob("tokenizer*"):
        (folder / file.name).symlink_to(file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = set(model.all_tied_weights_keys)
    weights = {
        name: torch.empty(tensor.shape, dtype=torch.bfloat16, device=default_device()).normal_(0, 0.02).cpu()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    write_weights(weights, folder)
    return folder


def changed_model(base: Path, folder: Path) -> Path:
    """The same model with `CHANGED_SHARE` of its weights changed in the last bit."""
    import torch

    from tba.weights import read_weights, write_weights

    folder.mkdir()
    weights = {}
    for name, tensor in read_weights(base):
        bits = tensor.clone().view(torch.int16)
        places = torch.randint(bits.numel(), (int(CHANGED_SHARE * bits.numel()),))
        bits.view(-1)[places] ^= 1
        weights[name] = bits.view(torch.bfloat16)
    write_weights(weights, folder)
    for file in base.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):  # these were written above
            (folder / file.name).symlink_to(file)
    return folder


def train(is_small: bool) -> dict:
    from storage.queries import query
    from tests.benchmarks.bench_stability import measure
    from tests.benchmarks.default_run import default_run

    with default_run(0, ["--steps", "2"] if is_small else []) as store:
        found = measure(store)
        steps = query(store, "SELECT median(step_s) AS step_s FROM training_steps").to_pylist()
    return {name: found[name] for name in ("accuracy", "seconds_to_060", "wall_s")} | steps[0]


def generation(is_small: bool, num_sequences: int) -> dict:
    shape = "small" if is_small else "1.5B"
    model = Path(os.environ[FOLDER_VARIABLE], shape)  # one path for all parts: vLLM compiles anew for another one
    if not model.exists():
        random_model(model, shape)
    samples, longest = (2, 32) if is_small else (16, 1024)
    asked = {
        "PROMPTS": num_sequences // samples,
        "SAMPLES": samples,
        "LONGEST": longest,
        "ROUNDS": 2,
        "TURNS": 1,
        "MODEL": model,
    }
    said = run_module("tests.benchmarks.bench_search", environment={name: str(of) for name, of in asked.items()})
    return {name: said[name] for name in ("tokens_per_s", "tokens_per_s_ratio", "ratio_to_beside", "swap_pause_s")}


def step(is_small: bool) -> dict:
    from tba.precision import compute_dtype, default_device
    from tests.benchmarks import bench_trainer

    name = "short" if is_small else "gpu"
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder, "model"), "small" if is_small else "1.5B")
        found = {"ours": run_module("tests.benchmarks.bench_trainer", "ours", name, str(model))}
        if not is_small:
            try:
                found["trl"] = run_module("tests.benchmarks.bench_trainer", "trl", name, str(model))
            except RuntimeError as error:  # our figures count without it
                found["trl"] = {"failed": str(error)}
        flops = bench_trainer.useful_flops(model, bench_trainer.SHAPES[name])
    peak = bench_trainer.measured_peak_flops(str(compute_dtype(default_device())).removeprefix("torch."))
    return found | {"mfu": flops / found["ours"]["step_s"] / peak}


def swap(is_small: bool) -> dict:
    from storage.file_delta import apply_deltas, write_delta
    from tba import weights
    from tba.engine import Sampling
    from tba.engines import make_engine

    def timed(work, *arguments) -> float:
        began = time.monotonic()
        work(*arguments)
        return time.monotonic() - began

    if is_small:
        weights.SHARD_BYTES = SMALL_SHARD_BYTES
    with tempfile.TemporaryDirectory() as folder:
        first = random_model(Path(folder, "first"), "small" if is_small else "7B")
        second = changed_model(first, Path(folder, "second"))
        before = sorted(first.glob("*.safetensors"))
        deltas = [Path(folder, f"{file.stem}.delta") for file in before]
        engine = make_engine(
            first, max_tokens=256, max_sequences=16, seed=0, threads=2, arguments={"gpu_memory_utilization": 0.6}
        )
        load_first_s = timed(engine.load, first, 0)
        engine.start([[5, 6, 7]] * 8, [Sampling(1, 1.0, 1.0, 128, [])] * 8, first=False)
        engine.step()
        load_s = timed(lambda: (engine.load(second, 2), engine.step()))
        write_delta_s = sum(
            timed(write_delta, file, second / file.name, delta) for file, delta in zip(before, deltas, strict=True)
        )
        apply_delta_s = sum(
            timed(apply_deltas, file, [delta], Path(folder, "rebuilt"))
            for file, delta in zip(before, deltas, strict=True)
        )
        num_bytes, delta_bytes = (sum(file.stat().st_size for file in files) for files in (before, deltas))
        return {
            "weights_gb": num_bytes / 1e9,
            "num_files": len(before),
            "load_first_s": load_first_s,
            "load_s": load_s,
            "delta_share": delta_bytes / num_bytes,
            "write_delta_s": write_delta_s,
            "apply_delta_s": apply_delta_s,
        }


PARTS = {
    "train": train,
    "generation_64": lambda is_small: generation(is_small, 4 if is_small else 64),
    "generation_256": lambda is_small: generation(is_small, 8 if is_small else 256),
    "step": step,
    "swap": swap,
}


def run_module(module: str, *arguments: str, environment: dict[str, str] | None = None, limit_s: float | None = None):
    """The JSON of the last line that has one. Raises: RuntimeError: it failed, or ran for longer than the limit."""
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = os.environ | (environment or {})
    with subprocess.Popen(command, cwd=PROJECT, env=environment, process_group=0, **pipes) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except BaseException as error:
            process.terminate()  # a part ends what it has started, which has a group of its own, by this same line
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=ENDING_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # an engine's processes
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            said, _ = process.communicate()
            raise RuntimeError(f"{module} did not end in {limit_s:.0f} s:\n{said[-3000:]}") from None
    if process.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{said[-3000:]}")
    found = [line for line in said.splitlines() if line.startswith("{")]  # libraries may warn behind the last one
    if not found:
        raise RuntimeError(f"{module} {' '.join(arguments)} printed no result:\n{said[-3000:]}")
    return json.loads(found[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--small", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one part, in this process
    asked = parser.parse_args()
    if asked.here:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        print(json.dumps(PARTS[asked.parts[0]](asked.small)))
        return
    found, small = {}, ["--small"] if asked.small else []
    with tempfile.TemporaryDirectory() as folder:
        for part in asked.parts or PARTS:
            began = time.monotonic()
            given = {"environment": {FOLDER_VARIABLE: folder}, "limit_s": LIMIT_S[part]}
            try:
                found[part] = run_module(__spec__.name, part, "--here", *small, **given)
            except (RuntimeError, ValueError) as error:
                found[part] = {"failed": str(error)}
            print(f"{part} ({time.monotonic() - began:.0f} s): {json.dumps(found[part])}", flush=True)
    print(json.dumps({"device": device(), "parts": found}))
    sys.exit(any("failed" in result for result in found.values()))


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
