"""What tests of engines share: prompts, limits, sampling to the end, a process of one's own."""

import importlib.util
import multiprocessing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import tba.logprobs
import tba.transformers_engine
import tba.vllm_engine
from tba.engine import Response, Sampling

PROMPTS = ["24 + 17 = 41\n63 + 21 = 84\n58 + 36 = 94\n46 + 39 =", "24 + 17 = 41\n63 + 21 = 84\n11 + 12 ="]
NEWLINE = 198
GREEDY = Sampling(1, 0.0, 1.0, 8, [2, NEWLINE])
LIMITS = dict(max_tokens=64, max_sequences=16, seed=0, threads=1)  # tests run side by side


def greedy_tokens(engine, tokens) -> list[list[int]]:
    return [only.tokens for (only,) in sample(engine, tokens, GREEDY)]


def sample(engine, tokens: list[list[int]], sampling: Sampling) -> list[list[Response]]:
    number, found = engine.start(tokens, [sampling] * len(tokens), first=False), {}
    while not found:
        found = engine.step()
    return found[number]


def save_small_llama(folder: Path, tokenizer: Path) -> Path:
    """Writes a Llama of two layers with random weights, which two workers can share. tokenizer: the folder of one."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for file in tokenizer.glob("tokenizer*"):
        (folder / file.name).symlink_to(file)
    return folder


def run_apart(check, *arguments) -> None:
    """In a process of its own: vLLM's start looks into every module, and the web server of other tests refuses that."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; transformers' generate is used instead")
    process = multiprocessing.get_context("spawn").Process(target=check, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0, "its traceback is in the captured output"


def compute_in_float32() -> None:
    """In this process, also where log-probabilities are computed again: rounding hides nothing."""
    for module in (tba.logprobs, tba.transformers_engine, tba.vllm_engine):
        module.compute_dtype = lambda *_: torch.float32
