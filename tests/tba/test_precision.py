"""In what precision products run, and how weights become bfloat16 (tba/precision.py).

- Products run in bfloat16 where the device has instructions for it.
- Float32 weights become one of the two neighbours, right on average, so that steps far smaller than the distance
  between neighbours arrive. To the nearest they would not, which the test shows too.
- What is on bfloat16's grid stays as it is, and rounding is the same each time.
- A policy computes with the weights that it publishes.

pytest tests/tba/test_precision.py
"""

from types import SimpleNamespace

import pytest
import torch

from tba import logprobs, precision
from tba.logprobs import Group, load_policy, sequence_logprobs
from tba.precision import compute_dtype, to_bfloat16
from tests.tba.addition import tiny_llama


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),  # Skylake
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),  # Cooper Lake, Zen 4
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": True}, torch.bfloat16),  # Sapphire Rapids
        ({}, torch.float32),  # unknown
    ],
)
def test_a_cpu_computes_in_what_it_multiplies_in_hardware(capabilities, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert compute_dtype("cpu") == dtype


@pytest.mark.parametrize(("major", "dtype"), [(9, torch.bfloat16), (8, torch.bfloat16), (7, torch.float32)])
def test_a_gpu_computes_in_what_it_multiplies_in_hardware(major, dtype, monkeypatch):
    """By its compute capability, as vLLM asks for it."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    assert compute_dtype("cuda") == dtype


@pytest.fixture
def few_thresholds(monkeypatch):
    """Tensors longer and shorter than what they are rounded by."""
    monkeypatch.setattr(precision, "NUM_THRESHOLDS", 10_007)
    precision._thresholds.cache_clear()
    yield
    precision._thresholds.cache_clear()


def test_a_step_far_below_the_grid_arrives_on_average(few_thresholds):
    before = torch.tensor([0.05, -0.05, 1.0, -3.0e-6]).bfloat16().float().repeat(5001, 1)  # [5001, 4]
    grid = (before.abs() * 2**-7).clamp(min=1e-12)
    after = before + 0.1 * grid
    assert (after.bfloat16() == before.bfloat16()).all(), "to the nearest, nothing moves"
    rounded = to_bfloat16(after).float()
    assert ((rounded - after).abs() <= grid).all()
    moved = ((rounded - before) / (after - before)).mean(dim=0)  # of each column: 1 where it is right on average
    # A share of at least 5 % of 5,001 places has a standard error of 6 %.
    torch.testing.assert_close(moved, torch.ones(4), rtol=0, atol=0.25)


def test_what_is_on_the_grid_stays_and_rounding_is_the_same_each_time():
    on_grid = torch.tensor([[0.0, -1.5, 1e-20], [3.0e38, -(2.0**-126), 0.1]]).bfloat16()
    assert torch.equal(to_bfloat16(on_grid.float()), on_grid)
    between = torch.linspace(-1, 1, 999)
    assert torch.equal(to_bfloat16(between), to_bfloat16(between.clone()))
    assert torch.equal(to_bfloat16(between.view(3, 333).T), to_bfloat16(between.view(3, 333).T.contiguous()))


def test_what_is_not_a_master_weight_is_refused():
    with pytest.raises(TypeError, match="master weights"):
        to_bfloat16(torch.zeros(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("cast_again_tokens", [0, 1024], ids=["long pass", "short pass"])
def test_a_policy_computes_with_the_weights_that_it_publishes(cast_again_tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "CAST_AGAIN_TOKENS", cast_again_tokens)
    monkeypatch.setattr(logprobs, "compute_dtype", lambda device: torch.bfloat16)  # on any CPU
    model = load_policy(tiny_llama(tmp_path))
    products = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert any((to_bfloat16(module.weight) != module.weight.bfloat16()).any() for module in products)
    groups = [Group([3, 1, 4], [[1, 5], [9, 2, 6]])]
    before = sequence_logprobs(model, groups, 1.0)[0]
    before.sum().backward()
    gradients = [module.weight.grad.clone() for module in products]
    embedding = model.get_input_embeddings().weight.detach().clone()  # looked up in float32, and the head's weight
    with torch.no_grad():
        for module in products:
            module.weight.copy_(to_bfloat16(module.weight))
            module.weight.grad = None
        model.set_input_embeddings(torch.nn.Embedding.from_pretrained(embedding))
    after = sequence_logprobs(model, groups, 1.0)[0]
    assert torch.equal(before, after)
    after.sum().backward()
    for module, gradient in zip(products[:-1], gradients[:-1], strict=True):
        assert torch.equal(module.weight.grad, gradient) and gradient.dtype == torch.float32
