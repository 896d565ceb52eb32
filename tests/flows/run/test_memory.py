"""The memory that a run needs, as `tba plan` tells it and as a run is refused.

- A model's shape is read from its files: parameters as they are, tied ones once, and the sides of what adapters change.
- The parts that follow from the number of parameters alone are those of the Trainer's tensors.
- Activations are, within 10 %, what autograd keeps of a real pass.
- A run whose Trainer's weights, gradient and moments do not fit is refused, with figures and the settings to change.
- What else may not fit is a warning. Searchers: test_searchers_memory.py.

make bench-memory compares whole processes with their peaks.
python -m pytest tests/flows/run/test_memory.py
"""

import contextlib
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, Qwen3Config
from typer.testing import CliRunner

from flows.cli.app import app
from flows.config import RunConfig
from flows.run import memory
from flows.run.memory import Lengths, largest_pass, plan_of
from flows.run.preflight import check_memory
from flows.trainer import ranks
from infra.machine import has_bfloat16
from infra.memory import memory_bytes
from tba import logprobs, lora, precision, reference_policy
from tba.config import TrainSettings
from tba.logprobs import Group, load_policy, response_logprobs
from tba.memory import (
    CAST_AGAIN_TOKENS,
    GIB,
    KEPT_LOGITS,
    LOGIT_ROWS,
    PASS_TOKENS,
    Machine,
    Pass,
    Shape,
    UnknownShape,
    certain,
    read_shape,
    trainer_parts,
)
from tba.precision import compute_dtype
from tba.trainer import Trainer

CPU = Machine(is_gpu=False, has_bfloat16=False, num_bytes=16 * GIB)
SEVEN_B = Shape(7_000_000_000, 6_500_000_000, 2_000_000, 4096, 11008, 32, 32000, 4096, 4096, is_bfloat16=True)
SIZES = {"vocab_size": 90, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = SIZES | {"hidden_size": 64, "intermediate_size": 192, "num_key_value_heads": 2}
MODELS = {
    "llama": LlamaConfig(
        hidden_size=64, intermediate_size=192, num_key_value_heads=2, tie_word_embeddings=True, **SIZES
    ),
    "qwen3": Qwen3Config(hidden_size=64, intermediate_size=192, num_key_value_heads=2, head_dim=32, **SIZES),
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


def test_only_what_a_model_loads_counts(folder):
    shape, tensors = read_shape(folder), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    head, tail = dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:])
    save_file(head | {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 99, 99)}, folder / "a.safetensors")
    save_file(tail, folder / "b.safetensors")
    save_file(tensors, folder / "consolidated.safetensors")  # beside the shards in some repositories
    index = {"weight_map": dict.fromkeys(head, "a.safetensors") | dict.fromkeys(tail, "b.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_shape(folder) == shape


def test_a_folder_without_a_model_has_no_shape(tmp_path):
    with pytest.raises(UnknownShape, match=r"config\.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"d_model": 64}')
    with pytest.raises(UnknownShape, match="is no plain language model with weights"):
        read_shape(tmp_path)


def test_state_is_as_large_as_the_trainers_tensors(folder):
    trainer = Trainer(folder, TrainSettings(), "cpu")
    parts = trainer_parts(read_shape(folder), trainer.settings, Pass(100), CPU)
    weights = sum(p.nbytes for p in trainer._policy.parameters())
    moments = sum(s[key].nbytes for s in trainer._optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    assert (parts["weights"], parts["moments of AdamW"]) == (weights, moments)
    assert parts["gradient"] == weights


@pytest.mark.parametrize(
    ("config", "checkpointing", "lora_rank"),
    [("llama", "none", None), ("llama", "layers", None), ("llama", "none", 1), ("qwen3", "none", None)],
    ids=["none", "layers", "none, adapters", "norms of queries, wide heads"],
)
def test_activations_are_what_autograd_keeps(tmp_path, config, checkpointing, lora_rank):
    AutoModelForCausalLM.from_config(MODELS[config]).save_pretrained(tmp_path)
    model = load_policy(tmp_path, checkpointing=checkpointing)
    if lora_rank:
        lora.add(model, lora_rank, seed=0)
    groups = [Group(list(range(2, 40)), [[(7 * i + 3 * j) % 80 + 2 for j in range(64)] for i in range(8)])]
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        response_logprobs(model, groups, 1.0)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    num_tokens, here = groups[0].num_tokens, replace(CPU, has_bfloat16=has_bfloat16())
    settings = TrainSettings(gradient_checkpointing=checkpointing, lora_rank=lora_rank)
    planned = trainer_parts(read_shape(tmp_path), settings, Pass(num_tokens), here)["activations"]
    width, inner, of_keys, wide = 64, 192, 32, 2 if has_bfloat16() else 4
    apart = 3 if lora_rank and has_bfloat16() else 0  # inputs of adapters, which have copies of their own
    norms = 0 if checkpointing == "none" and not lora_rank else 2  # results that are kept
    operands = wide * ((2 + norms + apart) * width + 2 * of_keys + 2 * inner)
    again = 0 if checkpointing == "none" else 8 * width + operands
    in_backward = num_tokens * (5 * wide * inner + again)  # of one layer
    assert planned - in_backward == pytest.approx(found, rel=0.1)


def test_the_largest_pass_is_a_batch_or_the_limit_or_one_long_response():
    config = RunConfig()  # 16 prompts x 8 responses
    assert largest_pass(config, Lengths(20, 15, 8)).num_tokens == 15 + 16 * (5 + 8 * 8)
    assert largest_pass(config, Lengths(20, 15, 8), response_tokens=300).num_tokens == 15 + 16 * 5 + 300
    assert largest_pass(config, Lengths(100, 0, 512)).num_tokens == config.train.micro_batch_tokens
    assert largest_pass(config, Lengths(1000, 0, 8000)).num_tokens == 9000
    of_eight = RunConfig.model_validate({"train": {"processes": 4, "machines": 2}})
    whole_prompts = 15 + 2 * (5 + 8 * 8)  # for each process
    assert largest_pass(of_eight, Lengths(20, 15, 8)).num_tokens == whole_prompts


def test_options_of_a_run_are_refused_without_one():
    result = CliRunner().invoke(app, ["plan", "--searchers", "4"])
    assert (result.exit_code, "--set searchers=4" in result.stderr) == (2, True)


def test_what_cannot_fit_is_said_with_the_settings_to_change(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: CPU)
    plan = plan_of(RunConfig(), SEVEN_B, Lengths(200, 0, 512))
    assert plan.fault.startswith("memory: the Trainer needs 146.2 GiB (weights 26.1, gradient 26.1, moments")
    assert "this machine has 16.0 GiB" in plan.fault and "train.lora_rank" in plan.fault
    adapters = RunConfig.model_validate({"train": {"lora_rank": 16, "micro_batch_tokens": 512}})
    small = plan_of(adapters, SEVEN_B, Lengths(200, 0, 100))
    assert small.fault is None  # 15 GiB are certain; what a pass needs may be less
    assert small.warnings[0].endswith("if all responses are different and as long as allowed")


def test_processes_that_fit_alone_and_not_together_are_a_warning(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: CPU)
    small = read_shape(memory.model_folder("smollm2-135m-instruct"))
    assert plan_of(RunConfig(), small, Lengths(33, 20, 8)).warnings == []
    many = plan_of(RunConfig(searchers=8), small, Lengths(33, 20, 8))
    assert many.fault is None and "8 x Searcher" in many.warnings[0] and "together" in many.warnings[0]


def test_sharding_divides_the_state(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(True, True, 80 * GIB, num_gpus=9))
    one, eight = (
        plan_of(RunConfig.model_validate({"train": {"processes": n, "zero_stage": 3}}), SEVEN_B, Lengths(200, 0, 512))
        for n in (1, 8)
    )
    (trainer, searcher), (sharded, _) = one.processes, eight.processes
    assert "the Trainer needs" in one.fault and eight.fault is None and eight.warnings == []
    P = SEVEN_B.num_parameters
    # DeepSpeed copies its partition, in stage 2 it has two of the gradient; and a bucket of 5e7 gradients, with that of
    # the output layer whole; in stage 3 it keeps up to 1e9 weights gathered
    bucket = 4 * (50_000_000 + SEVEN_B.V * SEVEN_B.D)
    assert certain(trainer.parts) == 16 * P
    assert certain(sharded.parts) == (16 + 4) * P // 8 + bucket + 4 * 1_000_000_000
    stage_2 = plan_of(RunConfig.model_validate({"train": {"processes": 2, "zero_stage": 2}}), SEVEN_B, Lengths(2, 0, 2))
    assert certain(stage_2.processes[0].parts) == 4 * P + (8 + 8 + 4) * P // 2 + bucket
    assert searcher.parts["engine's weights"] + searcher.parts["keys and values"] == int(0.6 * 80 * GIB)


def test_processes_of_a_trainer_that_share_a_machine_are_added_up(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: replace(CPU, num_bytes=120 * GIB))
    one, two = (
        plan_of(RunConfig.model_validate({"train": {"processes": n, "zero_stage": 2}}), SEVEN_B, Lengths(2, 0, 2)).fault
        for n in (1, 2)
    )
    assert one is None and two.startswith("memory: 2 processes of the Trainer need ") and " GiB for all" in two


def test_only_a_trainer_that_cannot_fit_is_refused(monkeypatch):
    small = Machine(is_gpu=False, has_bfloat16=False, num_bytes=5 * GIB // 2)  # less than the engine and a pass need
    monkeypatch.setattr(memory, "this_machine", lambda: small)
    check_memory(RunConfig())
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(False, False, GIB))
    with pytest.raises(ValueError, match=r"memory: the Trainer needs .* \(weights 0\.5, .*this machine has 1\.0"):
        check_memory(RunConfig())
    check_memory(RunConfig.model_validate({"train": {"lora_rank": 4}}))


def test_fewer_gpus_than_trainer_processes_are_refused(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(True, True, 80 * GIB, num_gpus=2))
    two = RunConfig.model_validate({"train": {"processes": 2, "zero_stage": 2}})
    for num_here, is_enough in ((2, True), (1, False), (0, True)):  # without a GPU the processes share the cores
        monkeypatch.setattr("flows.run.preflight.num_gpus", lambda found=num_here: found)
        with contextlib.nullcontext() if is_enough else pytest.raises(ValueError, match=r"has 1 GPUs.* needs one"):
            check_memory(two)


def test_a_short_pass_that_is_left_over_has_copies_of_the_matrices():
    """At 2,048 tokens a pass of 7B: the copies of a short one, 13 GB, are more than what the long one has besides."""
    on_gpu, settings = Machine(True, True, 80 * GIB), RunConfig().train
    sizes = (512, 1023, 2048, 16_384)
    of = {n: trainer_parts(SEVEN_B, settings, Pass(n), on_gpu)["activations"] for n in sizes}
    of_token = of[16_384] / 16_384
    assert of[512] == 512 * of_token + 2 * SEVEN_B.num_in_layers
    assert of[2048] == of[1023] == 1023 * of_token + 2 * SEVEN_B.num_in_layers > 2048 * of_token


def test_a_long_prompt_is_copied_for_each_response_that_attends():
    on_gpu, settings = Machine(True, True, 80 * GIB), TrainSettings(gradient_checkpointing="layers")
    without, with_copies = (
        trainer_parts(SEVEN_B, settings, largest, on_gpu)["activations"]
        for largest in (Pass(4000), Pass(4000, num_responses=20, prompt=2000, response=100))
    )
    of_attention = 2 * 4 * SEVEN_B.Q * 20 * (2000 + 2 * 100)  # keys, values, both gradients; and of queries and results
    assert with_copies - without == of_attention - 4000 * 5 * 2 * SEVEN_B.I > 0
    config = RunConfig.model_validate({"train": {"micro_batch_tokens": 8000}})
    assert largest_pass(config, Lengths(1000, 0, 2000)) == Pass(8000, 3, 1000, 2000)


def test_deepspeed_has_the_output_layer_whole():
    on_gpu, head = Machine(True, True, 80 * GIB), 4 * SEVEN_B.V * SEVEN_B.D
    parts = {
        stage: trainer_parts(SEVEN_B, TrainSettings(processes=4, zero_stage=stage), Pass(100), on_gpu)[
            "DeepSpeed's weights and bucket"
        ]
        for stage in (1, 2, 3)
    }
    assert parts[2] - parts[1] == head and parts[3] - parts[2] == 4 * 1_000_000_000


def test_a_trainer_that_does_not_fit_on_the_machines_that_came_says_so(folder, monkeypatch):
    two = TrainSettings(machines=2, zero_stage=3)
    needed = certain(trainer_parts(read_shape(folder), TrainSettings(), Pass(1), Machine(True, True, GIB)))
    monkeypatch.setattr(ranks, "gpu_bytes", lambda: needed - 1)
    with pytest.raises(RuntimeError, match=r"1 of the Trainer's 2 machines came\. With so few each GPU needs"):
        ranks.check_memory(folder, two, num_machines=1)
    monkeypatch.setattr(ranks, "gpu_bytes", lambda: needed)
    ranks.check_memory(folder, two, num_machines=1)


def test_a_gpus_logits_have_their_softmax_beside_them():
    on_cpu, on_gpu = Machine(False, True, 80 * GIB), Machine(True, True, 80 * GIB)
    parts = [trainer_parts(SEVEN_B, RunConfig().train, Pass(4096), machine)["logits"] for machine in (on_cpu, on_gpu)]
    assert parts[1] - parts[0] == 2 * 4 * LOGIT_ROWS * SEVEN_B.V


def test_the_smallest_limit_of_a_container_or_a_job_is_the_memory(monkeypatch):
    monkeypatch.setattr("infra.memory.memory_limits", lambda: iter([(2_000_000, 5), (1_000_000, 7)]))
    assert memory_bytes() == 1_000_000
    monkeypatch.setattr("infra.memory.memory_limits", lambda: iter(()))
    assert memory_bytes() > GIB


def test_logits_are_planned_in_the_trainers_chunks():
    # Importing these from there would import torch.
    assert (LOGIT_ROWS, KEPT_LOGITS) == (logprobs.LOGIT_ROWS, logprobs.KEPT_LOGITS)
    assert CAST_AGAIN_TOKENS == precision.CAST_AGAIN_TOKENS
    assert PASS_TOKENS == reference_policy.PASS_TOKENS


def test_bfloat16_products_are_found_as_torch_finds_them():
    assert has_bfloat16() == (compute_dtype() == torch.bfloat16)


def test_a_checkpoint_has_the_reference_that_a_reset_made():
    resets = RunConfig.model_validate({"train": {"reference_reset_interval": 50}})
    without, with_it = (
        plan_of(config, SEVEN_B, Lengths(2, 0, 2)).files["a checkpoint"] for config in (RunConfig(), resets)
    )
    assert without == 12 * SEVEN_B.num_parameters and with_it == 16 * SEVEN_B.num_parameters


def test_the_command_tells_it_for_a_run_that_is_not_begun():
    result = CliRunner().invoke(app, ["plan", "--set", "train.lora_rank=4", "--json"])
    found = json.loads(result.stdout)
    assert [process["process"] for process in found["processes"]] == ["Trainer", "Searcher"]
    assert found["files"]["a policy, whole"] > found["files"]["a checkpoint"]  # of adapters
    assert found["fault"] is None and (found["task"], found["tokens"]["response"]) == ("arithmetic", 8)
    table = CliRunner().invoke(app, ["plan", "--set", "train.lora_rank=4"])
    assert "Planned for task arithmetic: prompts of up to" in table.stdout
    assert "moments of AdamW" in table.stdout


def test_a_run_that_exists_keeps_its_settings():
    result = CliRunner().invoke(app, ["plan", "arithmetic", "--set", "train.lora_rank=4"])
    assert result.exit_code == 2 and "Run 'arithmetic' has its settings" in result.stderr
