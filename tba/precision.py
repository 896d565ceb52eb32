"""The precision of matrix products, and the rounding of float32 weights to bfloat16.

Master weights are float32, published weights bfloat16. Products run in bfloat16 where the device multiplies it in
hardware, which is several times as fast, else in float32.

The weights of a bfloat16 model lie on bfloat16's grid, and a policy step is a tenth of the distance to the next point.
Rounded to the nearest, the weights of products and published policies would not change for many steps. So each weight
has a random threshold between two points, drawn once, above which it is rounded up. A step then changes a share of the
weights in proportion to its size, at once. The thresholds never change, so the Trainer's products have the weights that
Searchers are given.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tba.recomputation import AGAIN, Again

# Instructions that multiply bfloat16, by the names of torch.cpu.get_capabilities: x86's two, and ARM's.
BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")
NUM_THRESHOLDS = 1 << 20  # which all tensors use in turn
REPEATS_ON_GPU = 16  # of all thresholds in a piece: each piece takes three kernels
CAST_AGAIN_TOKENS = 1024  # from which to cast a weight again takes at most some 10 % of its products' time


def default_device() -> str:
    """The device of models: this process' first GPU, or the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def compute_dtype(device_type: str = "cpu") -> torch.dtype:
    """The type in which the Trainer, the reference policy and the engine compute.

    A CPU without instructions for bfloat16 emulates them: 12 GFLOP/s a core where float32 reaches 65 (Skylake server).
    NVIDIA's GPUs have them from compute capability 8.0 on; vLLM refuses bfloat16 on older ones.
    """
    if device_type == "cpu" and not any(map(torch.cpu.get_capabilities().get, BFLOAT16_INSTRUCTIONS)):
        return torch.float32
    if device_type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float32
    return torch.bfloat16


def to_bfloat16(weight: Tensor) -> Tensor:
    """A float32 tensor as bfloat16, rounded stochastically and without bias. Differentiable, as a cast is. Numbers on
    bfloat16's grid do not change.

    Raises: TypeError: the tensor is not float32.
    """
    if weight.dtype != torch.float32:
        raise TypeError(f"a weight is {weight.dtype}; master weights are torch.float32, from which bfloat16 is rounded")
    return _ToBfloat16.apply(weight)


def bfloat16_linear(module: nn.Linear, hidden: Tensor) -> Tensor:
    """A forward pass; under bfloat16 autocast with `to_bfloat16` in place of its rounding to the nearest.

    Other modules keep rounding to the nearest: GPT-2's Conv1D, and adapters, whose small numbers have a fine grid.
    Embeddings and norms compute with their float32 weights.
    """
    weight, dtype, again = module.weight, hidden.dtype, getattr(hidden, AGAIN, None)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.bfloat16
    elif again is None and (weight.dtype, dtype) != (torch.bfloat16, torch.float32):  # frozen, under an adapter
        return F.linear(hidden, weight, module.bias)
    return _Linear.apply(hidden.to(dtype), weight, None if module.bias is None else cast(module.bias, dtype), again)


class _Linear(torch.autograd.Function):
    """hidden @ weight.T + bias in hidden's type, with a weight of another. again: computes hidden again, or None.

    Of a long pass autograd keeps the weight as it is, and the backward pass casts it again: copies of all weights until
    then would take half as much memory as the weights. Of a short pass it keeps the bfloat16 copy, except of a weight
    that ZeRO-3 shards (ds_id): it gathers that one again for the backward pass, and would not free the whole copy.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, again: Again | None) -> Tensor:
        product_weight, ctx.dtype = cast(weight, hidden.dtype), weight.dtype
        is_short = hidden.shape[:-1].numel() < CAST_AGAIN_TOKENS and not hasattr(weight, "ds_id")
        keeps_copy = is_short and product_weight.nbytes < weight.nbytes
        kept = product_weight if keeps_copy else weight
        ctx.again = again if ctx.needs_input_grad[1] else None
        if ctx.again:
            ctx.again.will_be_used()
        ctx.save_for_backward(hidden if ctx.needs_input_grad[1] and not again else None, kept)
        return F.linear(hidden, product_weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        if ctx.again:
            hidden, ctx.again = ctx.again.take(), None
        return (
            gradient @ cast(weight, gradient.dtype) if needs_hidden else None,
            (rows.T @ hidden.flatten(0, -2)).to(ctx.dtype) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
            None,
        )


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in the type of its products: float32 becomes bfloat16 by `to_bfloat16`."""
    if (weight.dtype, dtype) == (torch.float32, torch.bfloat16):
        return to_bfloat16(weight)
    return weight.to(dtype)


class _ToBfloat16(torch.autograd.Function):
    """bfloat16 is the upper half of a float32. A random number added to the lower half carries over with a probability
    in proportion to the lower half.

    Computed in pieces; takes less than twice as long as a plain cast.
    """

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        rounded = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
        thresholds = _thresholds(weight.device)
        bits, upper = weight.detach().contiguous().view(-1).view(torch.int32), rounded.view(-1).view(torch.int16)
        sums = torch.empty_like(thresholds[: len(bits)])  # of every chunk: new memory for each costs as much as the sum
        for start in range(0, len(bits), len(thresholds)):
            chunk = bits[start : start + len(thresholds)]
            sum_ = torch.add(chunk, thresholds[: len(chunk)], out=sums[: len(chunk)])
            upper[start : start + len(thresholds)] = sum_.bitwise_right_shift_(16)
        return rounded

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.float()


@functools.cache
def _thresholds(device: torch.device) -> Tensor:
    """int32 [NUM_THRESHOLDS], on a GPU repeated; the same on every machine. They are added to the lower halves."""
    generator = torch.Generator().manual_seed(0)
    thresholds = torch.randint(0, 1 << 16, (NUM_THRESHOLDS,), dtype=torch.int32, generator=generator).to(device)
    return thresholds if device.type == "cpu" else thresholds.repeat(REPEATS_ON_GPU)
