"""In what precision products of matrices run, and how float32 weights become bfloat16 ones.

Master weights are float32, published weights bfloat16. Products run in bfloat16 where the device multiplies it in
hardware, which is several times as fast, else in float32.

A model that came in bfloat16 lies on its grid, and a policy step is a tenth of the distance to the next point: rounded
to the nearest, what the Trainer computes with and what it publishes would stay the first policy for many steps. So each
weight has a place of its own between two points, drawn at random once, above which it is rounded up: a step arrives at
once, in as many weights as it is large. Always the same places: the Trainer computes with what Searchers are given.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Instructions that multiply bfloat16, by the names of torch.cpu.get_capabilities: x86's two, and ARM's.
BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")
NUM_PLACES = 1 << 20  # which all tensors take in turn


def default_device() -> str:
    """Where a model computes: this process' first GPU, or the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def compute_dtype(device_type: str = "cpu") -> torch.dtype:
    """What the Trainer, the reference policy and the engine compute in.

    A CPU without instructions for bfloat16 emulates them: 12 GFLOP/s a core where float32 reaches 65 (Skylake server).
    """
    if device_type == "cpu" and not any(map(torch.cpu.get_capabilities().get, BFLOAT16_INSTRUCTIONS)):
        return torch.float32
    return torch.bfloat16


def to_bfloat16(weight: Tensor) -> Tensor:
    """A float32 tensor as bfloat16: each number one of its two neighbours, right on average over all. Differentiable,
    as a cast is. What is on bfloat16's grid stays as it is."""
    return _ToBfloat16.apply(weight)


def bfloat16_linear(module: nn.Linear, hidden: Tensor) -> Tensor:
    """A forward pass; under bfloat16 autocast with `to_bfloat16` in place of its rounding to the nearest.

    Which is what other modules keep: GPT-2's Conv1D, and adapters, whose numbers are small and their grid fine.
    """
    cast = module.weight.dtype == torch.float32 and torch.is_autocast_enabled(hidden.device.type)
    return F.linear(hidden, to_bfloat16(module.weight) if cast else module.weight, module.bias)


class _ToBfloat16(torch.autograd.Function):
    """bfloat16 is the upper half of a float32: what is added to the lower carries over as often as that is large.

    In pieces, which take two or three times as long as a plain cast.
    """

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        rounded, places = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device), _places(weight.device)
        bits, upper = weight.detach().contiguous().view(-1).view(torch.int32), rounded.view(-1).view(torch.int16)
        for start in range(0, len(bits), len(places)):
            chunk = bits[start : start + len(places)]
            upper[start : start + len(places)] = (chunk + places[: len(chunk)]) >> 16
        return rounded

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.float()


@functools.cache
def _places(device: torch.device) -> Tensor:
    """int32 [NUM_PLACES], the same wherever it is called: what is added to the lower halves of numbers."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 1 << 16, (NUM_PLACES,), dtype=torch.int32, generator=generator).to(device)
