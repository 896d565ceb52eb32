"""What a forward pass keeps for the backward pass, and what the backward pass computes again (tba/recomputation.py).

- What a longer prompt adds to memory does not grow with its responses; of a gated MLP's wide tensors two are kept.
- In bfloat16 a long pass keeps no weight, and a norm's result for no product.
- The backward pass multiplies no layer's product again.

python -m pytest tests/tba/test_recomputation.py
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tba import logprobs, precision, shared_prefix
from tba.logprobs import Group, load_policy, response_logprobs, sequence_logprobs
from tests.tba.small_models import TEMPERATURE, TREE, model_of

pytestmark = pytest.mark.usefixtures("rms_norms_in_float64")


def kept_for_backward(model, group: Group) -> dict[int, torch.Tensor]:
    """The distinct tensors, parameters apart, that a forward pass keeps for the backward pass, by address."""
    kept, parameters = {}, {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        response_logprobs(model, [group], TEMPERATURE)
    return kept


def test_a_prompt_is_kept_once_for_all_its_responses(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tba.logprobs.compute_dtype", lambda device: torch.float32
    )  # no weight is kept in bfloat16, too
    monkeypatch.setattr(shared_prefix, "WHOLE_TOKENS", 0)
    model_of("llama", "sdpa").save_pretrained(tmp_path)
    model = load_policy(tmp_path)

    def bytes_kept(prompt_tokens: int, num_responses: int) -> int:
        group = Group([5] * prompt_tokens, [[number, 6, 7] for number in range(8, 8 + num_responses)])
        return sum(tensor.untyped_storage().nbytes() for tensor in kept_for_backward(model, group).values())

    of_one = bytes_kept(80, 1) - bytes_kept(40, 1)
    assert 0 < bytes_kept(80, 16) - bytes_kept(40, 16) < 1.2 * of_one  # a mask of 2 x P is kept, too
    wide = [tensor for tensor in kept_for_backward(model, TREE[0]).values() if tensor.shape[-1] == 48]
    assert len(wide) == 2 * 2  # gate and up, of two layers


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_in_bfloat16_a_long_pass_keeps_no_weight_and_an_input_once_for_all_its_products(
    architecture, tmp_path, monkeypatch
):
    monkeypatch.setattr(logprobs, "compute_dtype", lambda device: torch.bfloat16)  # on any CPU
    monkeypatch.setattr(precision, "CAST_AGAIN_TOKENS", 0)
    monkeypatch.setattr(shared_prefix, "WHOLE_TOKENS", 0)
    model_of(architecture, "sdpa").float().save_pretrained(tmp_path)
    model = load_policy(tmp_path)
    kept = kept_for_backward(model, Group([5] * 40, [[number, 6, 7] for number in range(8, 16)])).values()
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    assert not [tensor.shape for tensor in kept if tuple(tensor.shape) in shapes]
    hidden = [tensor for tensor in kept if tensor.shape == (1, 40 + 8 * 2, 32)]
    # Of two layers: two norms' inputs, and the last norm's; the result of attention, for one product. The norms'
    # results, for three products and for two, are computed again.
    assert sum(tensor.dtype == torch.float32 for tensor in hidden) == 2 * 2 + 1
    assert sum(tensor.dtype == torch.bfloat16 for tensor in hidden) == 2


class CountedProducts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_backward_pass_multiplies_no_layer_again(architecture, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(logprobs, "compute_dtype", lambda device: dtype)  # on any CPU
    model_of(architecture, "sdpa").float().save_pretrained(tmp_path)
    model = load_policy(tmp_path)
    scored = torch.cat(sequence_logprobs(model, TREE, TEMPERATURE)).sum()
    with CountedProducts() as backward:
        scored.backward()
    # Queries, keys, values, attention's results, gate, up and down of two layers, and the output layer. Each has a
    # gradient of its input and one of its weight.
    assert backward.count == 2 * (2 * 7 + 1)
