"""Fixtures that several tests of tba share."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tba.models import embedded_model
from tests.tba.engines import PROMPTS


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base() -> Path:
    return embedded_model(Path(__file__).parents[2] / ".tba" / ".local" / "models")


@pytest.fixture(scope="module")
def tokens(base) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]
