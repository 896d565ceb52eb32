"""The memory that a run needs, as `tba plan` tells it and as a run is refused.

- A model's shape is read from its files: parameters as they are, tied ones once, and the sides of what adapters change.
- The parts that follow from the number of parameters alone are those of the Trainer's tensors.
- Activations are, within 10 %, what autograd keeps of a real pass.
- A run whose Trainer cannot fit is refused before any work, with the figures and the settings to change.

make bench-memory compares whole processes with their peaks.
python -m pytest tests/flows/run/test_memory.py
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, Qwen3Config
from typer.testing import CliRunner

from flows.cli.app import app
from flows.config import RunConfig
from flows.run import memory
from flows.run.memory import Lengths, largest_pass, plan_of
from flows.run.preflight import check_inputs
from tba import lora
from tba.config import TrainSettings
from tba.logprobs import Group, load_policy, response_logprobs
from tba.memory import GIB, Machine, Shape, UnknownShape, read_shape, trainer_parts
from tba.trainer import Trainer

CPU = Machine(is_gpu=False, has_bfloat16=False, num_bytes=16 * GIB)
SEVEN_B = Shape(7_000_000_000, 6_500_000_000, 2_000_000, 4096, 11008, 32, 32000, 4096, is_bfloat16=True)
SIZES = {"vocab_size": 90, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = SIZES | {"hidden_size": 64, "intermediate_size": 192, "num_key_value_heads": 2}
MODELS = {
    "llama": LlamaConfig(
        hidden_size=64, intermediate_size=192, num_key_value_heads=2, tie_word_embeddings=True, **SIZES
    ),
    "qwen3": Qwen3Config(hidden_size=64, intermediate_size=192, num_key_value_heads=2, head_dim=16, **SIZES),
    "gpt-neox": GPTNeoXConfig(hidden_size=64, intermediate_size=256, **SIZES),
    "gpt2": GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=90, bos_token_id=0, eos_token_id=0),
}


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    AutoModelForCausalLM.from_config(MODELS[request.param]).save_pretrained(tmp_path)
    return tmp_path


def test_a_shape_is_read_from_files(folder):
    shape, model = read_shape(folder), load_policy(folder)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert (shape.D, shape.L, shape.V, shape.is_bfloat16) == (64, 3, 90, False)
    pytest.importorskip("peft")
    lora.add(model, 2, seed=0)
    assert 2 * shape.num_sides == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_folder_without_a_model_has_no_shape(tmp_path):
    with pytest.raises(UnknownShape, match=r"config\.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"d_model": 64}')
    with pytest.raises(UnknownShape, match="has no hidden_size"):
        read_shape(tmp_path)


def test_state_is_as_large_as_the_trainers_tensors(folder):
    trainer = Trainer(folder, TrainSettings(), "cpu")
    parts = trainer_parts(read_shape(folder), trainer.settings, 100, CPU)
    weights = sum(p.nbytes for p in trainer._policy.parameters())
    moments = sum(s[key].nbytes for s in trainer._optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    assert (parts["weights"], parts["moments of AdamW"]) == (weights, moments)
    assert parts["gradient"] == weights


@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_activations_are_what_autograd_keeps(tmp_path, checkpointing):
    AutoModelForCausalLM.from_config(MODELS["llama"]).save_pretrained(tmp_path)
    model = load_policy(tmp_path, checkpointing=checkpointing)
    groups = [Group(list(range(2, 40)), [[(7 * i + 3 * j) % 80 + 2 for j in range(64)] for i in range(8)])]
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        response_logprobs(model, groups, 1.0)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    num_tokens = groups[0].num_tokens
    planned = [
        trainer_parts(read_shape(tmp_path), TrainSettings(gradient_checkpointing=checkpointing), n, CPU)["activations"]
        for n in (0, num_tokens)
    ]
    width, inner, of_keys = 64, 192, 32
    again = 0 if checkpointing == "none" else 6 * width + 2 * of_keys + 2 * inner
    in_backward = 4 * num_tokens * (5 * inner + again)  # of one layer
    assert planned[1] - planned[0] - in_backward == pytest.approx(found, rel=0.1)


def test_the_largest_pass_is_a_batch_or_the_limit_or_one_long_response():
    config = RunConfig()  # 16 prompts x 8 responses
    assert largest_pass(config, Lengths(20, 15, 8)) == 15 + 16 * (5 + 8 * 8)
    assert largest_pass(config, Lengths(20, 15, 8), response_tokens=300) == 15 + 16 * 5 + 300
    assert largest_pass(config, Lengths(100, 0, 512)) == config.train.micro_batch_tokens
    assert largest_pass(config, Lengths(1000, 0, 8000)) == 9000


def test_what_cannot_fit_is_said_with_the_settings_to_change(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: CPU)
    plan = plan_of(RunConfig(), SEVEN_B, Lengths(200, 0, 512))
    fault, other = plan.faults["Trainer"], plan.faults["Searcher"]
    assert "the Trainer needs 1" in fault and "this machine has 16.0 GiB" in fault
    assert "train.micro_batch_tokens (its largest pass has 4096 tokens)" in fault and "train.lora_rank" in fault
    assert "the Searcher needs" in other and "Take a smaller model" in other
    adapters = RunConfig.model_validate({"train": {"lora_rank": 16}})
    assert plan_of(adapters, SEVEN_B, Lengths(200, 0, 512)).processes[0].num_bytes < 0.4 * plan.processes[0].num_bytes


def test_sharding_divides_the_state(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(is_gpu=True, has_bfloat16=True, num_bytes=80 * GIB))
    one, eight = (
        plan_of(RunConfig.model_validate({"train": {"processes": n, "zero_stage": 3}}), SEVEN_B, Lengths(200, 0, 512))
        for n in (1, 8)
    )
    (trainer, searcher), (sharded, _) = one.processes, eight.processes
    assert "the Trainer needs" in one.faults["Trainer"] and eight.faults == {}
    state = ("weights", "gradient", "moments of AdamW")
    assert sum(trainer.parts[name] for name in state) == 8 * sum(sharded.parts[name] for name in state)
    assert searcher.parts["engine's weights"] + searcher.parts["keys and values"] == int(0.6 * 80 * GIB)


def test_a_run_that_cannot_fit_is_refused_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(False, False, GIB))
    config = RunConfig(store=(tmp_path / "store").as_uri())
    with pytest.raises(
        ValueError, match=r"memory: the Trainer needs \d\.\d GiB \(weights 0\.5, .*this machine has 1\.0"
    ):
        check_inputs(config)
    assert not (tmp_path / "store" / config.run).exists()


def test_the_command_tells_it_for_a_run_that_is_not_begun(tmp_path):
    result = CliRunner().invoke(app, ["plan", "--set", "train.lora_rank=4", "--json"])
    found = json.loads(result.stdout)
    assert [process["process"] for process in found["memory"]] == ["Trainer", "Searcher"] and found["durations"] == []
    assert found["files"]["a policy, whole"] > found["files"]["a checkpoint"]  # of adapters
