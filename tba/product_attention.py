"""Attention on a CPU: of responses, each to its prompt and causally to itself; of prompts; and of small groups.

Products of matrices for each response and key-value head. In bfloat16 they take 0.3 to 0.6 of the time of torch's fused
attention, in float32 0.7 to 1.4 (docs/LOG.md). The scores of a few responses at a time exist, and the backward pass
computes them again.

Dimensions: n tokens of the responses, which follow each other without padding; K' responses, R tokens of each, padded;
P tokens before each, T = P + R; H query heads, H' key-value heads, D head size (of values E). What is said of a
response holds for a prompt alone, and for a small group, too.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SCORES = 1 << 20  # that exist at once, at most, unless one response and key-value head have more


@dataclass(frozen=True)
class Places:
    """Where the tokens of responses are in a padded table."""

    rows: Tensor  # [K', R] which of the n tokens each place has
    new: Tensor  # [m] places, flattened, of tokens that no earlier response has
    again: Tensor  # [.] places of tokens that an earlier response has, too; the other places are padding
    may_attend: Tensor  # [R, T], or of small groups [K', 1, R, T]; all P tokens before are attended to


class ProductAttention(torch.autograd.Function):
    """Attention of the m new tokens: [m, H, E].

    forward's q: [n, H, D], scaled; k: [n, H', D]; v: [n, H', E]; prompt_k: [P, H', D]; prompt_v: [P, H', E], all of one
    type. No other tensor is kept for the backward pass.
    """

    @staticmethod
    def forward(ctx, q, k, v, prompt_k, prompt_v, places):  # noqa: PLR0913 - ctx is no argument
        ctx.save_for_backward(q, k, v, prompt_k, prompt_v)
        ctx.places = places
        q, k, v = _by_head((q, k, v, prompt_k, prompt_v), places)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        for part, weights in _weights(q, k, places.may_attend):
            torch.bmm(weights, v[part], out=out[part])
        return new_places(_by_place(out, places), places)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        places = ctx.places
        inputs = ctx.saved_tensors  # once: under checkpointing torch refuses a second time
        num_tokens, P = len(inputs[0]), len(inputs[-1])
        q, k, v = _by_head(inputs, places)
        of_places = gradient
        if len(places.new) < places.rows.numel():
            of_places = gradient.new_zeros(places.rows.numel(), *gradient.shape[1:])
            of_places[places.new] = gradient
        of_out = _queries_by_head(of_places.unflatten(0, places.rows.shape), v)
        of_q, of_k, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for part, weights in _weights(q, k, places.may_attend):
            torch.bmm(weights.mT, of_out[part], out=of_v[part])
            of_weights = of_out[part] @ v[part].mT
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            torch.bmm(of_scores, k[part], out=of_q[part])
            torch.bmm(of_scores.mT, q[part], out=of_k[part])
        # [K', T, H', D or E]
        of_k, of_v = (each.view(len(places.rows), -1, *each.shape[1:]).transpose(1, 2) for each in (of_k, of_v))
        return (
            _by_token(_by_place(of_q, places), places, num_tokens),
            _by_token(of_k[:, P:].flatten(0, 1), places, num_tokens),
            _by_token(of_v[:, P:].flatten(0, 1), places, num_tokens),
            of_k[:, :P].sum(0),
            of_v[:, :P].sum(0),
            None,
        )


def _by_head(inputs: Sequence[Tensor], places: Places) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [K' H', (H / H') R, D], keys [K' H', T, D] and values [K' H', T, E]. inputs: as of `forward`."""
    *of_tokens, prompt_k, prompt_v = inputs
    q, k, v = (padded(each, places) for each in of_tokens)
    k, v = (
        torch.cat([prompt.expand(len(each), -1, -1, -1), each], dim=1).transpose(1, 2).flatten(0, 1)
        for prompt, each in ((prompt_k, k), (prompt_v, v))
    )
    return _queries_by_head(q, k), k, v


def padded(of_tokens: Tensor, places: Places) -> Tensor:
    """[n, .., ..] as [K', R, .., ..]: without a copy if each token has one place."""
    if len(of_tokens) == len(places.new) == places.rows.numel():
        return of_tokens.unflatten(0, places.rows.shape)
    return of_tokens[places.rows]


def new_places(of_places: Tensor, places: Places) -> Tensor:
    """[K' R, .., ..] as [m, .., ..]."""
    return of_places if len(places.new) == len(of_places) else of_places[places.new]


def _queries_by_head(q: Tensor, k: Tensor) -> Tensor:
    """[K', R, H, D] as [K' H', (H / H') R, D]: the query heads of a key-value head are in one matrix."""
    K, D = len(q), q.shape[-1]
    return q.unflatten(2, (len(k) // K, -1)).permute(0, 2, 3, 1, 4).reshape(len(k), -1, D)


def _by_place(by_head: Tensor, places: Places) -> Tensor:
    """[K' H', (H / H') R, E] as [K' R, H, E]."""
    K, R = places.rows.shape
    return by_head.view(K, -1, R, by_head.shape[-1]).transpose(1, 2).flatten(0, 1)


def _by_token(of_places: Tensor, places: Places, num_tokens: int) -> Tensor:
    """Sums over the places of each token: [K' R, .., ..] to [n, .., ..]. Padding has no gradient."""
    rows, of_tokens = places.rows.flatten(), new_places(of_places, places)
    if len(of_tokens) < num_tokens:  # other responses have tokens, too
        of_tokens = of_places.new_zeros(num_tokens, *of_places.shape[1:])
        of_tokens[rows[places.new]] = of_places[places.new]
    if len(places.again):
        of_tokens.index_add_(0, rows[places.again], of_places[places.again])
    return of_tokens


def _weights(q: Tensor, k: Tensor, may_attend: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The weights of attention, [.., (H / H') R, T], of as many responses and key-value heads at a time as `SCORES`."""
    R = may_attend.shape[-2]
    among = may_attend[..., -R:]
    unless = torch.zeros(among.shape, dtype=q.dtype).masked_fill_(~among, -math.inf)
    is_shared, num_heads = may_attend.dim() == 2, len(q) // len(may_attend)
    size = max(1, SCORES // (q.shape[1] * k.shape[1]))
    for start in range(0, len(q), size):
        part = slice(start, start + size)
        scores = q[part] @ k[part].mT
        of_part = unless if is_shared else unless[torch.arange(start, start + len(scores)) // num_heads]
        scores.unflatten(1, (-1, R))[..., -R:].add_(of_part)
        yield part, scores.softmax(-1)  # in bfloat16 it is computed in float32
