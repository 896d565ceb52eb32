"""Results that are not kept for the backward pass: products of matrices compute them again, once for all of them.

They are those of RMS norms and of gated activations. Their inputs are kept anyway, and they are cheap.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

AGAIN = "tba_again"  # attribute of a result: its `Again`


class Again:
    """A result, computed again in the backward pass."""

    def __init__(self, compute: Callable[[], Tensor], uses: int = 0) -> None:
        self._compute, self._uses = compute, uses
        self._result: Tensor | None = None

    def will_be_used(self) -> None:
        """Counts one more product that will take the result."""
        self._uses += 1

    def take(self) -> Tensor:
        """The result. It is kept until its last use."""
        result = self._compute() if self._result is None else self._result
        self._uses -= 1
        self._result = result if self._uses else None
        return result


def rms_norm(module: nn.Module, hidden: Tensor) -> Tensor:
    """The forward pass of one of transformers' RMS norms, of [.., D]. Computed at least in float32.

    The result has the type of the products that take it. Autocast would give each a copy of its own to keep.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    result, factor = _RmsNorm.apply(hidden, module.weight, module.variance_epsilon, dtype)
    if torch.is_grad_enabled():
        again = functools.partial(_scaled, hidden.detach(), factor, module.weight.detach(), dtype)
        setattr(result, AGAIN, Again(again))
    return result


class _RmsNorm(torch.autograd.Function):
    """Returns hidden * factor * weight, and factor = 1 / sqrt(mean hidden^2 + epsilon) [.., 1]."""

    @staticmethod
    def forward(ctx, hidden, weight, epsilon, dtype):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=wide)
        factor = norm.square_().div_(hidden.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, factor, weight)
        ctx.mark_non_differentiable(factor)
        return _scaled(hidden, factor, weight, dtype), factor

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, _):
        hidden, factor, weight = ctx.saved_tensors
        normed, of_normed = hidden * factor, gradient * weight
        of_weight = (gradient * normed).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        along = (of_normed * normed).mean(-1, keepdim=True)
        of_hidden = of_normed.addcmul_(normed, along, value=-1).mul_(factor)
        return of_hidden.to(hidden.dtype), of_weight, None, None


def _scaled(hidden: Tensor, factor: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (hidden * factor).mul_(weight).to(dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of the shape of both. Keeps these two."""
    activated = Again(functools.partial(F.silu, gate.detach()), uses=2)  # by the product behind it, and by `_Gated`
    result = _Gated.apply(gate, up, activated)
    if torch.is_grad_enabled():
        setattr(result, AGAIN, Again(lambda: activated.take() * up.detach()))
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activated):
        ctx.save_for_backward(gate, up)
        ctx.activated = activated
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        activated, ctx.activated = ctx.activated, None  # it holds the gate
        of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return of_gate, gradient * activated.take(), None
