"""A policy that is adapters alone: its files, and the engines that serve it.

- The Trainer's files are peft's: from_pretrained loads them, and computes what the Trainer computes. The final policy
  has them merged into the weights. A model with GPT-2's layers is published whole.
- A folder of adapters is a model for another run: they are merged once, into a folder beside other converted models.
- transformers' engine merges the adapters of each policy into the weights that it began with.
- vLLM serves them as adapters: log-probabilities are the Trainer's; a policy that comes in the middle of a batch leaves
  responses in flight with their own adapters. Merged weights may come between; then prompts in flight begin anew.
- vLLM is refused if it holds other adapters than the folder, and merges them on a CPU and where it has no room.

python -m pytest tests/tba/test_adapters.py
"""

import json
import shutil
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from tba import lora, vllm_engine
from tba.config import TrainSettings
from tba.engine import Response, Sampling, ServedPolicy
from tba.engines import make_engine
from tba.logprobs import Group, response_logprobs
from tba.models import resolve_model
from tba.trainer import Trainer
from tba.transformers_engine import TransformersEngine
from tba.vllm_engine import VllmEngine, _has_fast_adapter_kernels
from tba.weights import fingerprint, read_weights, write_weights
from tests.character_model import save_character_model
from tests.tba.engines import LIMITS, compute_in_float32, greedy_tokens, run_apart, sample, save_small_llama

pytest.importorskip("peft")

TEMPERATURE = 0.7
SERVED = {"enable_lora": True}  # also on a CPU
SAMPLING = Sampling(6, TEMPERATURE, 1.0, 12, [2])


def changed(trainer: Trainer, seed: int) -> None:
    """Gives the adapters an effect, which training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trainer._trained.items():
            if ".lora_B." in name:
                parameter.copy_((0.05 * torch.randn(parameter.shape, generator=generator)).bfloat16())


def written(trainer: Trainer, base: Path, folder: Path, *, whole: bool = False) -> Path:
    folder.mkdir(parents=True)
    weights = trainer.weights(whole)
    assert lora.are_adapters(weights) is not whole
    write_weights(weights, folder) if whole else lora.write_adapters(weights, base, folder)
    return folder


@pytest.fixture(scope="module")
def base(base, tmp_path_factory) -> Path:
    """A small model in place of the embedded one, whose tokenizer it has."""
    return save_small_llama(tmp_path_factory.mktemp("small") / "base", base)


@pytest.fixture
def half(tmp_path) -> Path:
    return save_character_model(tmp_path / "half", dtype="bfloat16")


def test_from_pretrained_loads_them_and_the_final_policy_has_them_merged(half, tmp_path):
    trainer = Trainer(half, TrainSettings(lora_rank=2), "cpu")
    changed(trainer, 0)
    folder, whole = written(trainer, half, tmp_path / "a"), written(trainer, half, tmp_path / "b", whole=True)
    (whole / "config.json").symlink_to(half / "config.json")
    prompt, dtype = torch.tensor([[3, 10, 12, 9, 6, 5]]), torch.float32
    trainer._policy.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = trainer._policy(prompt).logits
        loaded, merged, base = (
            AutoModelForCausalLM.from_pretrained(of, dtype=dtype)(prompt).logits for of in (folder, whole, half)
        )
    torch.testing.assert_close(loaded, expected, rtol=1e-4, atol=1e-5)
    assert (merged - expected).abs().max() < 0.02 < (base - expected).abs().max()  # rounded to bfloat16


def test_another_run_begins_with_them_merged(base, policies, tmp_path):
    named, cache = tmp_path / "named", tmp_path / "cache"
    shutil.copytree(policies["second"], named)
    for file in base.glob("*.json"):
        shutil.copy(file, named)
    folder = resolve_model(str(named), cache)
    assert folder.parent == cache and resolve_model(str(named), cache) == folder
    assert not (folder / "adapter_config.json").exists()
    found, expected = dict(read_weights(folder)), dict(read_weights(policies["merged"]))
    assert found.keys() == expected.keys()
    same = [(found[name] == expected[name]).float().mean().item() for name in found]
    assert min(same) > 0.999  # the sums are rounded in another order
    for change, reason in (
        ({"use_dora": True}, "adapters with use_dora, which tba cannot merge"),
        ({"init_lora_weights": "pissa"}, "adapters with init_lora_weights, which"),
        ({"base_model_name_or_path": str(named)}, "has adapters itself"),
    ):
        config = json.loads((policies["second"] / "adapter_config.json").read_text())
        (named / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=reason):
            resolve_model(str(named), cache)


def test_adapters_of_another_model_are_refused(base, policies, tmp_path):
    weights = dict(read_weights(base))
    weights["model.norm.weight"][0] += 1
    write_weights(weights, tmp_path)
    (tmp_path / "config.json").symlink_to(base / "config.json")
    with pytest.raises(ValueError, match="has adapters of another model than"):
        dict(lora.merged_weights(tmp_path, policies["first"]))


def test_models_in_float32_and_with_other_layers_are_published_whole(model_folder, tmp_path):
    assert not lora.are_adapters(Trainer(model_folder, TrainSettings(lora_rank=2), "cpu").weights(False))
    config = GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    trainer = Trainer(tmp_path, TrainSettings(lora_rank=2), "cpu")
    assert not lora.are_adapters(trainer.weights(False))
    assert not lora.are_adapters(Trainer(tmp_path, TrainSettings(), "cpu").weights(False))


@pytest.fixture(scope="module")
def policies(base, tmp_path_factory) -> dict[str, Path]:
    return policies_of(base, tmp_path_factory.mktemp("policies"))


def policies_of(base: Path, folder: Path) -> dict[str, Path]:
    """Two policies by adapters, and the second one merged."""
    trainer = Trainer(base, TrainSettings(lora_rank=4), "cpu")
    changed(trainer, 1)
    found = {"first": written(trainer, base, folder / "first")}
    changed(trainer, 2)
    found |= {"second": written(trainer, base, folder / "second")}
    return found | {"merged": written(trainer, base, folder / "merged", whole=True)}


@pytest.mark.slow
def test_transformers_merges_each_policys_adapters_into_the_first_weights(base, policies, tokens, tmp_path):
    engine = TransformersEngine(base, **LIMITS)
    engine.load(policies["merged"], 1)
    expected = greedy_tokens(engine, tokens)
    for name in ("first", "second"):
        served = engine.load(policies[name], 2)
        assert served == ServedPolicy(2, fingerprint(read_weights(policies[name])))
    assert greedy_tokens(engine, tokens) == expected
    lora.write_adapters({"base_model.model.other.lora_A.weight": torch.zeros(4, 4)}, base, tmp_path)
    with pytest.raises(ValueError, match=r"other\.lora_A\.weight belongs to no weight of"):
        engine.load(tmp_path, 3)


Pairs: TypeAlias = list[tuple[list[int], Response]]  # prompts, and a response to each


def sampled(engine, tokens: list[list[int]]) -> Pairs:
    found = sample(engine, tokens, SAMPLING)
    return [(prompt, response) for prompt, of in zip(tokens, found, strict=True) for response in of]


def check_logprobs(base: Path, folder: Path, pairs: Pairs) -> None:
    """The responses' log-probabilities are those of the policy in `folder`."""
    trainer = Trainer(base, TrainSettings(lora_rank=4), "cpu")
    with torch.no_grad():
        if lora.has_adapters(folder):
            weights = dict(read_weights(folder))
            for name, parameter in trainer._trained.items():
                parameter.copy_(weights[lora.PREFIX + name.replace(".default.", ".")])
        else:
            trainer._policy.load_state_dict(
                {name.replace("_proj.", "_proj.base_layer."): tensor for name, tensor in read_weights(folder)},
                strict=False,
            )
        groups = [Group(prompt, [response.tokens]) for prompt, response in pairs]
        expected = response_logprobs(trainer._policy, groups, TEMPERATURE)
    apart = [torch.tensor(response.logprobs) - of for (_, response), (of,) in zip(pairs, expected, strict=True)]
    assert torch.cat(apart).abs().max() < 0.02


def check_vllm(base: Path, policies: dict[str, Path], tokens: list[list[int]]) -> None:
    """In float32, so that rounding hides nothing. The engine has room for 16 of 24 responses."""
    compute_in_float32()
    engine, prompts = make_engine(base, lora_rank=4, arguments=SERVED, **LIMITS), [*tokens, *tokens]
    served, steps = {}, 0

    def batch_with_a_change(before: str, after: str) -> dict[ServedPolicy, list]:
        nonlocal steps
        for name in (before, after):
            steps += 1
            served[name] = engine.load(policies[name], steps)
            assert served[name].fingerprint == fingerprint(read_weights(policies[name]))
            if name == before:
                short = engine.start(prompts[:1], [Sampling(1, TEMPERATURE, 1.0, 6, [2])], first=False)
                number = engine.start(prompts, [SAMPLING] * 4, first=False)
                assert not any(engine.step() for _ in range(5))
                pause = engine._pause

                def until_the_short_one_ended(pause=pause, name=f"{short}/0/0") -> None:
                    while not any(output.request_id == name for output in engine._finished):
                        engine._finished += engine._engine.step()
                    pause()

                engine._pause = until_the_short_one_ended
            else:
                engine._pause = pause
        found = {}
        while number not in found:
            found |= engine.step()
        assert short in found
        by_policy = {}
        for prompt, of in zip(prompts, found[number], strict=True):
            assert len(of) == 6
            for response in of:
                ((place, policy),) = response.policies
                assert place == 0
                by_policy.setdefault(policy, []).append((prompt, response))
        for name in (before, after):
            if pairs := by_policy.get(served[name]):
                check_logprobs(base, policies[name], pairs)
        return by_policy

    both = batch_with_a_change("first", "second")
    assert both.keys() == {served["first"], served["second"]} and len(both[served["first"]]) >= 12
    assert batch_with_a_change("second", "merged").keys() == {served["merged"]}
    assert batch_with_a_change("merged", "first").keys() == {served["first"]}
    check_refusal(engine, policies)


def check_refusal(engine, policies: dict[str, Path]) -> None:
    """One matrix of one adapter differs; then the policy is pruned; then it comes whole."""
    from vllm.v1.worker.gpu_worker import Worker

    add = Worker.add_lora

    def damaged(worker, request) -> bool:
        added = add(worker, request)
        manager = worker.model_runner.lora_manager._adapter_manager
        layer = manager.modules["model.layers.1.mlp.gate_up_proj"]
        layer.lora_b_stacked[1][manager.lora_index_to_id.index(request.lora_int_id), 0, 0, 0] += 1
        return added

    Worker.add_lora = damaged
    with pytest.raises(RuntimeError, match=r"adapter of model\.layers\.1\.mlp\.up_proj differs"):
        engine.load(policies["second"], 9)
    Worker.add_lora = add
    with pytest.raises(FileNotFoundError):
        engine.load(policies["first"] / "pruned", 10)
    assert engine.load(policies["second"], 11).step == 11


def test_responses_go_on_beginning_while_many_policies_are_in_flight(monkeypatch):
    """vLLM has no memory for a further policy's adapters, so they begin with the newest one that it has."""
    monkeypatch.setattr(vllm_engine, "ADAPTERS_IN_FLIGHT", 2)
    monkeypatch.setattr(VllmEngine, "_parameters", lambda self, sampling: None)
    begun = []
    engine = VllmEngine.__new__(VllmEngine)
    engine._engine = SimpleNamespace(
        get_num_unfinished_requests=lambda: len(engine._asked),
        add_request=lambda name, asked, _, lora_request: begun.append((asked["cache_salt"], lora_request.lora_int_id)),
    )
    engine._max_sequences, engine._asked, engine._policies, engine._waiting = 8, {}, [], deque()

    def load_and_ask(number: int) -> None:
        engine._policies.append(ServedPolicy(number, str(number)))
        engine._adapters = SimpleNamespace(lora_int_id=number)
        engine._waiting.append((f"{number}/0/0", [5], SAMPLING))
        engine._fill()

    for number in (1, 2, 3):
        load_and_ask(number)
    assert begun == [("0", 1), ("1", 2), ("1", 2)] and engine._asked["3/0/0"].beginning.policy.step == 2
    del engine._asked["1/0/0"]
    load_and_ask(4)
    assert begun[-1] == ("3", 4)


@pytest.mark.slow
def test_vllm_serves_adapters_beside_the_weights(base, policies, tokens):
    run_apart(check_vllm, base, policies, tokens)


def check_merging(base: Path, policies: dict[str, Path], tokens: list[list[int]]) -> None:
    compute_in_float32()
    rank = 1024  # more than vLLM has room for
    engine = make_engine(base, lora_rank=rank, arguments=SERVED, **LIMITS)
    for name in ("first", "second"):
        served = engine.load(policies[name], 1)
        assert served.fingerprint == fingerprint(read_weights(policies[name]))
    check_logprobs(base, policies["merged"], sampled(engine, tokens))


def test_vllm_serves_adapters_where_it_has_fast_kernels():
    assert _has_fast_adapter_kernels(is_cpu=False, dtype=torch.bfloat16) and not _has_fast_adapter_kernels(
        is_cpu=False, dtype="float32"
    )
    assert not _has_fast_adapter_kernels(is_cpu=True, dtype=torch.bfloat16)


@pytest.mark.slow
def test_vllm_merges_adapters_that_it_has_no_room_for(base, policies, tokens):
    run_apart(check_merging, base, policies, tokens)


def check_two_processes(base: Path, policies: dict[str, Path], tokens: list[list[int]]) -> None:
    """Each worker has a part of each matrix."""
    compute_in_float32()
    arguments = SERVED | {"tensor_parallel_size": 2}
    engine = make_engine(base, lora_rank=4, **LIMITS | {"threads": 1}, arguments=arguments)
    for name in ("first", "merged", "second"):
        engine.load(policies[name], 1)
        check_logprobs(base, policies[name], sampled(engine, tokens))
    with pytest.raises(FileNotFoundError):
        engine.load(policies["first"] / "pruned", 2)
    engine.load(policies["first"], 3)  # no worker waits for another one's answer


@pytest.mark.apart  # a minute and a half; test_engine.py has two processes in CI
@pytest.mark.skipif(torch.cuda.is_available(), reason="two CPU processes; a machine may have one GPU")
def test_vllm_serves_adapters_that_two_processes_share(base, policies, tokens):
    run_apart(check_two_processes, base, policies, tokens)
