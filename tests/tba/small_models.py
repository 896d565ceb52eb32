"""Models of six architectures with a few hundred weights, and groups of prompts with responses for them."""

from copy import deepcopy

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
)

from tba.logprobs import Group

SHAPE = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SPECIAL = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, **SPECIAL, num_key_value_heads=2),
    "qwen2": Qwen2Config(**SHAPE, **SPECIAL, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SHAPE, **SPECIAL, num_key_value_heads=2, head_dim=8),
    "gpt_neox": GPTNeoXConfig(**SHAPE, **SPECIAL),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, **SPECIAL),
    "seed_oss": SeedOssConfig(**SHAPE, **SPECIAL, num_key_value_heads=2, head_dim=8, residual_dropout=0.1),
}
TEMPERATURE = 0.7
# Responses that begin alike, one of them the beginning of others, one there twice.
TREE = [
    Group([5, 6], [[1, 2, 3, 4], [1, 2, 5], [1, 2], [7, 2, 3], [1, 2, 3, 9, 9], [1, 2, 5], [1, 2, 3]]),
    Group([5, 7], [[1], [1, 2], [1, 2, 3]]),
]


def model_of(architecture: str, attention: str) -> torch.nn.Module:
    """In float64, with random weights that are the same at each call."""
    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_config(deepcopy(CONFIGS[architecture]), attn_implementation="sdpa").double().eval()
    )
    model.set_attn_implementation(attention)
    return model
