"""The memory that a run's Searchers need: engine, keys and values, reference policy. The Trainer's: test_memory.py.

- Processes that share a GPU share its memory. A Searcher that a GPU cannot hold is a warning that names the settings.
- Keys and values have what vLLM's share leaves, the given size, or on a CPU what vLLM reads.
- The reference policy is planned as it is loaded, and its passes with the longest response.

python -m pytest tests/flows/run/test_searchers_memory.py
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from flows.config import RunConfig
from flows.run import memory
from flows.run.memory import Lengths, plan_of
from tba import reference_policy
from tba.memory import GIB, Machine, Shape, read_shape, scoring_parts
from tests.flows.run.test_memory import CPU, MODELS, SEVEN_B, SIZES


@pytest.mark.parametrize(("num_gpus", "share"), [(2, 1), (1, 2)])
def test_processes_that_share_a_gpu_share_its_memory(num_gpus, share, monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(True, True, 24 * GIB, num_gpus))
    small = read_shape(memory.model_folder("smollm2-135m-instruct"))
    fits = plan_of(RunConfig(searchers=1), small, Lengths(33, 20, 8))
    parts = fits.processes[1].parts
    assert parts["engine's weights"] + parts["keys and values"] == int(0.6 / share * 24 * GIB) and not fits.warnings
    engine = {"search": {"engine": {"gpu_memory_utilization": 0.9}}}
    found = plan_of(RunConfig.model_validate(engine), small, Lengths(33, 20, 8)).warnings
    assert [("share a GPU of 24.0 GiB" in warning) for warning in found] == [True] * (share - 1)


def test_a_searcher_that_a_gpu_cannot_hold_is_a_warning(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(True, True, 32 * GIB, num_gpus=9))
    sharded = {"train": {"processes": 8, "zero_stage": 3}}
    found = plan_of(RunConfig.model_validate(sharded), SEVEN_B, Lengths(200, 0, 512)).warnings[-1]
    assert found.startswith("memory: the Searcher needs 34.1 GiB") and "search.engine.gpu_memory_utilization" in found
    less = sharded | {"search": {"engine": {"gpu_memory_utilization": 0.4}}}
    too_little = plan_of(RunConfig.model_validate(less), SEVEN_B, Lengths(200, 0, 512)).warnings[-1]
    assert too_little.startswith("memory: the engine's weights (13.0 GiB) leave nothing of vLLM's share")  # 12.8
    less["search"]["engine"]["gpu_memory_utilization"] = 0.45
    enough = plan_of(RunConfig.model_validate(less), SEVEN_B, Lengths(200, 0, 512)).warnings
    assert not any("engine's weights" in warning or "the Searcher needs" in warning for warning in enough)


def test_a_searcher_whose_reference_or_engine_needs_other_gpus_is_a_warning(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(True, True, 80 * GIB, num_gpus=2))
    seventy = Shape(70_000_000_000, 68_000_000_000, 9_000_000, 8192, 28672, 80, 128256, 8192, 1024, is_bfloat16=True)
    wide = RunConfig.model_validate(
        {"train": {"lora_rank": 16}, "search": {"engine": {"tensor_parallel_size": 4}}, "searchers": 1}
    )
    few, large = plan_of(wide, seventy, Lengths(200, 0, 512)).warnings[-2:]
    assert few.startswith("a Searcher needs 4 GPUs (search.engine), and this machine has 2")
    assert large.endswith("The reference policy is whole on one GPU: take a smaller model, or GPUs with more memory")


def test_an_engine_that_computes_in_float32_has_its_share_too(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(True, False, 80 * GIB, num_gpus=2))
    parts = plan_of(RunConfig(searchers=1), SEVEN_B, Lengths(2, 0, 2)).processes[1].parts
    assert parts["engine's weights"] + parts["keys and values"] == int(0.6 * 80 * GIB)


def test_responses_longer_than_a_pass_of_the_reference_count_whole(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(True, True, 80 * GIB, num_gpus=2))
    short, long = (
        plan_of(RunConfig(), SEVEN_B, Lengths(96, 0, tokens)).processes[1].parts["a pass of the reference policy"]
        for tokens in (4000, 16_000)
    )
    of_token = 12 * SEVEN_B.D + 2 * (3 * SEVEN_B.I + 2 * (SEVEN_B.Q + SEVEN_B.KV))
    assert long - short == 12_000 * of_token


@pytest.mark.parametrize("config", ["gpt2", "llama", "experts"])
def test_matrices_that_stay_float32_count_so(config, tmp_path, monkeypatch):
    experts = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=192, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        num_key_value_heads=2, **SIZES,
    )  # fmt: skip
    AutoModelForCausalLM.from_config((MODELS | {"experts": experts})[config]).save_pretrained(tmp_path)
    monkeypatch.setattr(reference_policy, "compute_dtype", lambda device: torch.bfloat16)
    found = sum(p.nbytes for p in reference_policy.ReferencePolicy(tmp_path)._model.parameters())
    planned = scoring_parts(read_shape(tmp_path), Machine(True, True, GIB), longest=1)["reference policy"]
    assert planned == pytest.approx(found, rel=0.01)


def test_the_engines_cache_is_as_vllm_reads_it(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: CPU)
    found = []
    for value in ("", "2", "0.5", "much"):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", value)
        found.append(plan_of(RunConfig(), SEVEN_B, Lengths(2, 0, 2)).processes[1].parts["keys and values"])
    assert found == [GIB, 2 * GIB, GIB // 2, GIB]


@pytest.mark.parametrize(("cores", "synchronous", "apart"), [(2, False, False), (4, False, True), (4, True, False)])
def test_the_reference_policys_own_process_counts(monkeypatch, cores, synchronous, apart):
    monkeypatch.setattr(memory, "this_machine", lambda: CPU)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(cores))
    searcher = plan_of(RunConfig(searchers=1, synchronous=synchronous), SEVEN_B, Lengths(2, 0, 2)).processes[1]
    own = {"process of the reference policy", "a pass of the reference policy"}
    assert own & searcher.parts.keys() == (own if apart else set())


def test_adapters_that_a_cpus_engine_merges_count(monkeypatch):
    plans = []
    for machine, rank in ((CPU, None), (CPU, 16), (Machine(True, True, 80 * GIB, num_gpus=2), 16)):
        monkeypatch.setattr(memory, "this_machine", lambda of=machine: of)
        config = RunConfig.model_validate({"train": {"lora_rank": rank}})
        plans.append(plan_of(config, SEVEN_B, Lengths(2, 0, 2)).processes[1].parts["weights that are loaded"])
    whole, merged, on_gpu = plans
    assert merged - whole == 2 * SEVEN_B.num_parameters and on_gpu == 0


def test_a_cache_of_given_size_is_planned_as_it_is(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: Machine(True, True, 80 * GIB, num_gpus=2))
    config = RunConfig.model_validate({"search": {"engine": {"kv_cache_memory_bytes": 4 * GIB}}})
    parts = plan_of(config, SEVEN_B, Lengths(2, 0, 2)).processes[1].parts
    assert parts["keys and values"] == 4 * GIB and parts["a pass of the reference policy"] > 0
