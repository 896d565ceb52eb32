"""A profiled step leaves a trace and a table.

python -m pytest tests/benchmarks/test_profile_trainer.py
"""

import json

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from tba.config import TrainSettings
from tba.trainer import Trainer
from tests.benchmarks.profile_trainer import profile_step, random_draws


def test_a_profiled_step_leaves_a_trace_and_a_table(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2)).save_pretrained(
        tmp_path
    )
    trainer = Trainer(tmp_path, TrainSettings())
    draws = random_draws(trainer.vocabulary_size, prompts=2, responses=3, prompt_tokens=4, response_tokens=5)
    table = profile_step(trainer, draws, tmp_path / "profile")
    assert "aten::mm" in table and table == (tmp_path / "profile" / "table.txt").read_text()
    assert json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]
