"""The addition task for a model that knows its characters alone: what the tests of many devices train."""

import functools
import random
from pathlib import Path

from tba.batch import Draw
from tba.logprobs import Group
from tba.tasks.arithmetic import Arithmetic
from tba.tasks.base import Problem
from tests.character_model import ARITHMETIC

END = len(ARITHMETIC)


def tiny_llama(folder: Path) -> Path:
    """A Llama of two layers with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=END + 1, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def batch(step: int, num_prompts: int, num_responses: int = 4) -> list[Draw]:
    """Sums, and answers of some other policy: half of them right, their lengths uneven, one of them cut at a token."""
    chance = random.Random(step)
    return [_draw(problem, chance, num_responses) for problem in chance.sample(problems(), num_prompts)]


@functools.cache
def problems() -> list[Problem]:
    return Arithmetic(seed=0).train


def tokens(text: str) -> list[int]:
    return [ARITHMETIC.index(character) for character in text]


def _draw(problem: Problem, chance: random.Random, num_responses: int) -> Draw:
    wrong = [[*tokens(f" {chance.randrange(200)}"), END] for _ in range(num_responses - num_responses // 2 - 1)]
    right = [[*tokens(f" {problem.answer}"), END]] * (num_responses // 2)
    responses = [*right, *wrong, tokens(" ")]
    return Draw(
        group=Group(tokens(problem.prompt), responses),
        slot=list(range(num_responses)),
        reward=[float(response in right) for response in responses],
        behavior_logprobs=[[-2.0] * len(response) for response in responses],
        reference_logprobs=[[-3.0] * len(response) for response in responses],
        is_of_newest_policy=[True] * num_responses,
    )
