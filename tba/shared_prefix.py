"""One row of packed tokens for a batch of groups, and the attention for its layout.

A group is one prompt and its K responses. A prompt is computed once for its K responses. The common beginning of all
prompts (a system prompt, worked examples) is computed once for all of them, and that of a prompt's responses once for
these. Together they are a tree.

    [ common beginning | rest of prompt a | response 1 of a | new part of response 2 | … | rest of prompt b | … ]

A token's position is its depth in the tree. Only attention depends on the layout; all other operations work token by
token. `shared_prefix_attention` lets a prompt attend to itself and each response to its prompt and its own path.
Gradients through the shared parts are exact. A response's last token predicts nothing and is not computed; the prompt's
last token predicts the first token of all its responses.

Dimensions: N packed tokens, G groups, K responses of a group, C tokens of the common beginning, S further tokens of a
prompt, P = C + S, R response tokens (padded, in attention only), H heads, D head size, M response tokens scored.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from tba.product_attention import Places, ProductAttention, new_places, padded

ATTENTION = "tba_shared_prefix"  # its name in transformers
# A group up to this many tokens attends as a whole under a mask: many small calls cost more than the masked products.
WHOLE_TOKENS = 256
MAX_SCORES = 1 << 23  # of a response and key-value head, up to which they exist at once: in bfloat16 17 MB
# Responses of a large group, and small groups, attend in one call, padded to the longest, while that one is at most so
# much longer than the shortest. Padding costs memory and time; each further call costs a CPU time.
LONGER, MORE_TOKENS = 1.5, 64
Item = TypeVar("Item")


@dataclass(frozen=True)
class Group:
    """One prompt and its responses, as token ids. Responses differ in length; none is empty."""

    prompt: Sequence[int]
    responses: Sequence[Sequence[int]]

    @property
    def num_tokens(self) -> int:
        """Largest number of tokens of this group in the packed row; fewer if responses begin alike."""
        return len(self.prompt) + sum(len(response) - 1 for response in self.responses)

    def split(self, max_tokens: int) -> list["Group"]:
        """The prompt with as many of its responses at a time as fit, at least one."""
        parts, responses = [], []
        for response in self.responses:
            if responses and Group(self.prompt, [*responses, response]).num_tokens > max_tokens:
                parts.append(Group(self.prompt, responses))
                responses = []
            responses.append(response)
        return [*parts, Group(self.prompt, responses)]


def in_passes(items: Sequence[Item], num_tokens: Callable[[Item], int], max_tokens: int) -> Iterator[list[Item]]:
    """Whole items, such as groups: as many at a time as fit into `max_tokens`, at least one."""
    of_pass, tokens = [], 0
    for item in items:
        if of_pass and tokens + num_tokens(item) > max_tokens:
            yield of_pass
            of_pass, tokens = [], 0
        of_pass.append(item)
        tokens += num_tokens(item)
    if of_pass:
        yield of_pass


class Piece(NamedTuple):
    """Tokens that follow each other in the packed row: small groups, a large group's prompt, or its responses."""

    calls: list[Places]
    are_responses: bool  # which attend to the whole prompt; the others to the common beginning, and to themselves


@dataclass(frozen=True)
class Layout:
    sizes: list[int]  # tokens of the common beginning, then of each piece, in the packed row's order
    pieces: list[Piece]
    num_positions: int  # of the longest prompt with its longest response


@dataclass(frozen=True)
class Packed:
    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N]
    layout: Layout
    target_rows: Tensor  # [M] packed position whose hidden state predicts the m-th response token
    target_ids: Tensor  # [M]


def pack(groups: Sequence[Group], device: torch.device) -> Packed:
    """A group's shorter responses come first in the row. Raises: ValueError: an empty prompt or response."""
    for number, group in enumerate(groups):
        if not len(group.prompt) or not all(len(response) for response in group.responses):
            raise ValueError(f"group {number}: prompt and responses need at least one token each")
    C = _num_common([group.prompt for group in groups])
    input_ids, position_ids = list(groups[0].prompt[:C]), list(range(C))
    target_rows, target_ids, trees = [], [], []
    for group in groups:
        P, begin = len(group.prompt), len(input_ids)
        input_ids.extend(group.prompt[C:])
        position_ids.extend(range(C, P))
        last_of_prompt = len(input_ids) - 1
        rows: dict[tuple[int, int], int] = {}
        paths: list[list[int]] = [[]] * len(group.responses)
        shortest_first = sorted(range(len(paths)), key=lambda number: len(group.responses[number]))
        for number in shortest_first:
            paths[number] = _add_path(group.responses[number][:-1], last_of_prompt, rows, input_ids, position_ids)
        for path, response in zip(paths, group.responses, strict=True):
            target_rows.extend(path)
            target_ids.extend(response)
        own = [[row - begin for row in paths[number][1:]] for number in shortest_first]
        trees.append(_Tree(P - C, len(input_ids) - begin, own))
    return Packed(
        input_ids=torch.tensor([input_ids], device=device),
        position_ids=torch.tensor([position_ids], device=device),
        layout=_layout(C, trees, max(position_ids) + 1, device),
        target_rows=torch.tensor(target_rows, device=device),
        target_ids=torch.tensor(target_ids, device=device),
    )


def _add_path(
    tokens: Sequence[int], last_of_prompt: int, rows: dict[tuple[int, int], int], ids: list[int], positions: list[int]
) -> list[int]:
    """Packs a response's tokens, except those that an earlier response of the group has packed.

    rows: packed position of each token of the group's responses, by that of the token before it and the token.
    Returns the packed positions of the prompt's last token and of the response's tokens.
    """
    path = [last_of_prompt]
    for token in tokens:
        key = path[-1], token
        if key not in rows:
            rows[key] = len(ids)
            ids.append(token)
            positions.append(positions[path[-1]] + 1)
        path.append(rows[key])
    return path


def _num_common(prompts: list[Sequence[int]]) -> int:
    """Length of all prompts' common beginning, without a prompt's last token, which predicts the responses' first."""
    if len(prompts) == 1:
        return 0
    limit = min(map(len, prompts)) - 1
    return next((n for n in range(limit) if len({prompt[n] for prompt in prompts}) > 1), limit)


@dataclass(frozen=True)
class _Tree:
    """A group behind the common beginning; its tokens count from 0."""

    S: int  # tokens of the prompt, which come first
    num_tokens: int
    # Each response's tokens, the shortest response first; those that it is the first to have come in order.
    paths: list[list[int]]


def _layout(C: int, trees: list[_Tree], num_positions: int, device: torch.device) -> Layout:
    sizes, pieces, small = [C], [], []

    def add(num_tokens: int, calls: list[Places], are_responses: bool = False) -> None:
        sizes.append(num_tokens)
        pieces.append(Piece(calls, are_responses))

    def attend_as_wholes() -> None:
        if small:
            add(sum(tree.num_tokens for tree in small), [_wholes(C, small, device)])
            small.clear()

    for tree in trees:
        sizes_of_small = [each.num_tokens for each in [*small, tree]]
        if max(sizes_of_small) > min(WHOLE_TOKENS, LONGER * min(sizes_of_small) + MORE_TOKENS):
            attend_as_wholes()
        if tree.num_tokens <= WHOLE_TOKENS:
            small.append(tree)
            continue
        add(tree.S, [_padded(C, [list(range(tree.S))], [[True] * tree.S], device)])
        if tree.num_tokens > tree.S:
            add(tree.num_tokens - tree.S, _apart(C, tree, device), are_responses=True)
    attend_as_wholes()
    return Layout(sizes, pieces, num_positions)


def _wholes(C: int, trees: list[_Tree], device: torch.device) -> Places:
    """A token of a response attends to its prompt and, on its own path, to what comes before it and to itself."""
    longest = max(tree.num_tokens for tree in trees)
    may_attend = torch.zeros(len(trees), 1, longest, C + longest, dtype=torch.bool)
    may_attend[..., :C] = True
    begin, bringing = 0, []
    for tree, of_tree in zip(trees, may_attend[:, 0], strict=True):
        n = tree.num_tokens
        bringing.append(list(range(begin, begin + n)))
        begin += n
        own = of_tree[:n, C : C + n]
        own[:, : tree.S] = True
        own[: tree.S, : tree.S].tril_()
        for path in tree.paths:
            rows = torch.tensor(path, dtype=torch.long)
            own[rows[:, None], rows] = torch.ones(len(path), len(path), dtype=torch.bool).tril()
        of_tree[n:] = True  # padding needs some weights; its results are dropped
    return _padded(C, bringing, [[True] * len(rows) for rows in bringing], device, may_attend)


def _apart(C: int, tree: _Tree, device: torch.device) -> list[Places]:
    newest, calls = tree.S - 1, []  # of each call: the responses that bring new tokens, and which of theirs are new
    for path in tree.paths:
        if path and path[-1] > newest:
            if not calls or len(path) > LONGER * len(calls[-1][0][0]) + MORE_TOKENS:
                calls.append(([], []))
            bringing, is_new = calls[-1]
            bringing.append([row - tree.S for row in path])
            is_new.append([row > newest for row in path])
            newest = path[-1]
    return [_padded(C + tree.S, bringing, is_new, device) for bringing, is_new in calls]


def _padded(
    P: int, bringing: list[list[int]], is_new: list[list[bool]], device: torch.device, may_attend: Tensor | None = None
) -> Places:
    R = max(map(len, bringing))
    # Padding lies behind a response's tokens, so causal attention keeps it from them. It repeats the whole response,
    # because many copies of one row would have their gradients added one after another on a GPU.
    rows = torch.tensor([(path * (R // len(path) + 1))[:R] for path in bringing], device=device)
    places = [(number * R + at, flag) for number, flags in enumerate(is_new) for at, flag in enumerate(flags)]
    new, again = ([place for place, flag in places if flag is wanted] for wanted in (True, False))
    new, again = (torch.tensor(each, dtype=torch.long, device=device) for each in (new, again))
    return Places(rows, new, again, _causal_behind(P, R, device) if may_attend is None else may_attend.to(device))


def _causal_behind(num_before: int, num: int, device: torch.device) -> Tensor:
    """[num, num_before + num]: each token attends to all `num_before` tokens, and causally among the `num`.

    On a GPU in the form that flash attention takes. torch cannot make one inside a layer whose activations are
    checkpointed selectively.
    """
    if device.type == "cuda":
        return causal_lower_right(num, num_before + num)
    return torch.ones(num, num_before + num, dtype=torch.bool, device=device).tril(num_before)


def shared_prefix_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, H', N, D] with H' key-value heads
    value: Tensor,  # [1, H', N, D]
    attention_mask: Tensor | None,
    tba_layout: Layout,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention of the packed row: within a prompt, and of each response to its prompt and itself. [1, N, H, D]

    Raises: ValueError: attention of a kind that is not supported.
    """
    if attention_mask is not None:
        raise ValueError("attention with a mask of the model's own is not supported")
    _check_kind(tba_layout, kwargs)
    scaling, repeat = kwargs.get("scaling") or query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
    on_cpu = query.device.type == "cpu"
    # [N, H or H', D]; rotary embeddings made queries and keys float32, and their products are in the values' type.
    query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))

    # Split once: a slice for each piece would cost a gradient of the whole row for each.
    common, *parts = zip(*(x.split(tba_layout.sizes) for x in (query, key, value)), strict=True)
    # In the packed row's order.
    outputs = [_attend(*(x[None] for x in common), scaling, is_causal=True)[0]] if tba_layout.sizes[0] else []
    for number, (piece, part) in enumerate(zip(tba_layout.pieces, parts, strict=True)):
        behind = common[1:]  # keys and values [P, H', D]
        if piece.are_responses:
            behind = [torch.cat(each) for each in zip(common[1:], parts[number - 1][1:], strict=True)]
        scaled = part[0] * scaling if on_cpu else None
        for places in piece.calls:
            K, R = places.rows.shape
            if on_cpu and repeat * R * (len(behind[0]) + R) <= MAX_SCORES:
                outputs.append(ProductAttention.apply(scaled, *part[1:], *behind, places))
            elif K > 1 and len(behind[0]):  # copies of what is before each are made again for the backward pass
                options = {"use_reentrant": False, "preserve_rng_state": False}
                outputs.append(checkpoint(_attend_fused, part, behind, places, scaling, **options))
            else:
                outputs.append(_attend_fused(part, behind, places, scaling))
    return torch.cat(outputs).unsqueeze(0), None


def _attend_fused(part: Sequence[Tensor], behind: Sequence[Tensor], places: Places, scaling: float) -> Tensor:
    """As `ProductAttention`. part: its q, not scaled, k and v; behind: its prompt_k and prompt_v."""
    q, k, v = (padded(x, places) for x in part)  # [K', R, H or H', D] each
    k, v = (  # [K', P + R, H', D]
        torch.cat([before.expand(len(q), -1, -1, -1), x], dim=1) for before, x in zip(behind, (k, v), strict=True)
    )
    return new_places(_attend(q, k, v, scaling, attn_mask=places.may_attend).flatten(0, 1), places)


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float, **masking) -> Tensor:
    """[K', tokens, H or H', D] each -> [K', tokens, H, D]"""
    repeat = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeat, dim=2) if repeat > 1 else x for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scaling, **masking).transpose(1, 2)


def _check_kind(layout: Layout, given: dict) -> None:
    """given: a model's further arguments of its attention. Raises: ValueError: it is of a kind not supported."""
    if given.get("softcap") or given.get("s_aux") is not None:
        raise ValueError("attention with capped logits or sinks is not supported")
    window = given.get("sliding_window")
    if window and layout.num_positions > window:
        raise ValueError(
            f"a prompt and its response have {layout.num_positions + 1} tokens, and this model's sliding window is "
            f"{window}: attention within a window is not supported. Use shorter prompts or responses "
            "(task.max_response_tokens), or another model."
        )


AttentionInterface.register(ATTENTION, shared_prefix_attention)
# On Hopper and later torch would take cuDNN's. By public reports it plans each new shape for tens of milliseconds and
# keeps all plans; here the shapes differ in every step. Not measured: no GPU was at hand.
torch.backends.cuda.enable_cudnn_sdp(False)
