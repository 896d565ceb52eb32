"""Log-probabilities of responses under a causal language model.

The tokens of all groups are in one packed row without padding, in which a shared prefix is computed once
(tba/shared_prefix.py). Of the [tokens, vocabulary] logits at most `KEPT_LOGITS` bytes and a chunk exist at once.

Dimensions: N packed tokens, K responses of a group, M response tokens scored, V vocabulary.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation

from tba.model_files import NEUTRAL, unsupported
from tba.precision import bfloat16_linear, cast, compute_dtype
from tba.recomputation import gated, rms_norm
from tba.shared_prefix import ATTENTION, Group, pack

LOGIT_ROWS = 512  # of a chunk that is not kept: 512 x 49,152 logits are 50 MB in bfloat16
KEPT_LOGITS = 1 << 29  # bytes of logits that are kept for the backward pass, at most
PRODUCT_ROWS = 8192  # of the output layer's gradient

# The expensive operations of a layer: products of matrices, and attention, unless tba/product_attention.py computes it.
PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._efficient_attention_forward.default,  # of a CausalBias
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]

# down_proj(act_fn(gate_proj(x)) * up_proj(x)), and nothing else.
GATED_MLPS = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"}
# A function of one tensor, cheap to compute again.
RMS_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}


def load_policy(
    folder: str | Path, dtype: torch.dtype = torch.float32, checkpointing: Literal["none", "cheap", "layers"] = "none"
) -> PreTrainedModel:
    """The model of a Hugging Face folder or id, ready for `response_logprobs`; dropout is off.

    `checkpointing`: activations that the backward pass computes again. "cheap": all but `PRODUCTS`, a
    third of the memory; "layers": all but each layer's input, for a third more work.
    Raises: ValueError: its attention or its logits are not supported here.
    """
    config = _without_dropout(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True
    )
    check_supported(model)
    model.set_attn_implementation(ATTENTION)
    model.eval()
    head = model.get_output_embeddings()
    hidden_size = model.config.get_text_config().hidden_size
    for module in model.modules():
        kind = type(module).__name__
        is_norm_of_layer = kind in RMS_NORMS and _size(module.weight) == hidden_size  # not of queries and keys
        if type(module) is torch.nn.Linear and module is not head:  # the head's product is in _TargetLogprobs
            module.forward = functools.partial(bfloat16_linear, module)
        elif is_norm_of_layer and checkpointing == "none":
            module.forward = functools.partial(rms_norm, module)
        elif is_norm_of_layer:
            module.forward = functools.partial(_narrow_norm, module.forward)
        elif kind in RMS_NORMS and checkpointing == "none":
            module.forward = functools.partial(
                checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
            )
        elif kind in GATED_MLPS and checkpointing == "none":
            module.forward = functools.partial(_gated_mlp, module)
    if checkpointing != "none":
        options = {"use_reentrant": False}
        if checkpointing == "cheap":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
        model.gradient_checkpointing_enable(options)
        model.train()  # transformers checkpoints only in training mode
    return model


def _without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration with every dropout, and every noise of a router, set to 0: training mode turns them on."""
    parts = [config, config.get_text_config(), *vars(config).values()]  # DBRX nests its dropouts
    for part in (part for part in parts if isinstance(part, PreTrainedConfig)):
        for name, value in vars(part).items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _gated_mlp(mlp: torch.nn.Module, hidden: Tensor) -> Tensor:
    """As transformers' MLP, but keeps two of four wide tensors for the backward pass. `gate` and `up` cost a product of
    matrices each and are kept; the other two are cheap and computed again."""
    gate, up, down_proj = mlp.gate_proj(hidden), mlp.up_proj(hidden), mlp.down_proj
    is_whole = not hasattr(down_proj.weight, "ds_id")  # ZeRO-3's hooks hand on a copy, without `AGAIN`
    if type(down_proj) is torch.nn.Linear and is_whole and type(mlp.act_fn) in (torch.nn.SiLU, SiLUActivation):
        return down_proj(gated(gate, up))

    def rest(gate: Tensor, up: Tensor) -> Tensor:
        return down_proj(mlp.act_fn(gate) * up)

    return checkpoint(rest, gate, up, use_reentrant=False, preserve_rng_state=False)


def _narrow_norm(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """A norm's result in the type of the products that take it. Autocast would give each a copy of its own to keep."""
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        return forward(hidden).to(torch.get_autocast_dtype(device_type))
    return forward(hidden)


def _size(weight: Tensor) -> int:
    """Of a vector, which ZeRO-3 may have sharded already."""
    return getattr(weight, "ds_shape", weight.shape)[0]


def check_supported(model: PreTrainedModel) -> None:
    """Raises: ValueError: the model's attention or logits are not supported here; the message names the setting."""
    name, config = type(model).__name__, model.config.get_text_config()
    if not model.is_backend_compatible():
        raise ValueError(
            f"model {name}: it does not use transformers' attention interface, which a prompt shared by its responses "
            "needs. Llama, Qwen2, Qwen3, Mistral, GPT-NeoX and GPT-2 do."
        )
    # to_dict leaves out what a configuration computes, as MiniCPM3's does with logits_scaling
    if fault := unsupported({name: getattr(config, name, None) for name in NEUTRAL} | config.to_dict()):
        raise ValueError(f"model {name}: {fault}")
    if getattr(model, "lm_head", None) not in (None, model.get_output_embeddings()):
        raise ValueError(f"model {name}: it has layers between its last hidden state and its output layer")


def response_logprobs(
    model: PreTrainedModel, groups: Sequence[Group], temperature: float, output_gradient: Tensor | None = None
) -> list[list[Tensor]]:
    """log p(token | prompt, earlier tokens) of every response token, logits divided by `temperature` (natural logs).

    `output_gradient`: the output layer's gradient, to which the backward pass adds in place. Autograd is handed none,
    neither by the output layer nor by input embeddings of the same weight, so that there are never two of them.
    Returns for each group, for each of its responses, a float32 tensor [number of response tokens]. Differentiable.
    Raises: ValueError: an empty prompt or response.
    """
    device = model.device
    packed = pack(groups, device)
    compute = compute_dtype(device.type) if model.dtype == torch.float32 else model.dtype
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()

    def embed(input_ids: Tensor) -> Tensor:
        return _Embedding.apply(input_ids, embedding.weight, embedding.padding_idx, output_gradient)

    is_tied = type(embedding) is torch.nn.Embedding and embedding.weight is head.weight
    with contextlib.ExitStack() as stack:
        if compute != model.dtype:
            stack.enter_context(torch.autocast(device.type, compute))
        if is_tied and output_gradient is not None:
            stack.enter_context(_replaced(embedding, embed))
        hidden = model.base_model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, tba_layout=packed.layout
        ).last_hidden_state[0]  # [N, hidden]
    rows, target_index = packed.target_rows.unique(return_inverse=True)
    targets = torch.stack([target_index, packed.target_ids])  # [2, M]

    def score(hidden: Tensor) -> Tensor:
        return _TargetLogprobs.apply(
            hidden, head.weight, head.bias, targets, _Scoring(temperature, compute, output_gradient)
        )

    with _replaced(head, score):
        logprobs = head(hidden[rows])  # [M]
    lengths = [[len(response) for response in group.responses] for group in groups]
    by_group = logprobs.split([sum(of_group) for of_group in lengths])
    return [list(flat.split(of_group)) for flat, of_group in zip(by_group, lengths, strict=True)]


@contextlib.contextmanager
def _replaced(module: torch.nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Calls of the module run `forward`, its hooks included: ZeRO-3 gathers a module's weights in them."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


class _Embedding(torch.autograd.Function):
    """As `nn.Embedding`, but adds the weight's gradient to `total` in place. ids: [1, N]; returns [1, N, hidden]."""

    @staticmethod
    def forward(ctx, ids, weight, padding_idx, total):
        ctx.save_for_backward(ids)
        ctx.padding_idx, ctx.total = padding_idx, total
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (ids,) = ctx.saved_tensors
        if ctx.padding_idx is not None:  # as in torch, this token's embedding does not learn
            gradient = gradient.masked_fill((ids == ctx.padding_idx).unsqueeze(-1), 0)
        ctx.total.index_add_(0, ids.flatten(), gradient.flatten(0, 1).to(ctx.total.dtype))
        return None, None, None, None


def sequence_logprobs(
    model: PreTrainedModel, groups: Sequence[Group], temperature: float, output_gradient: Tensor | None = None
) -> list[Tensor]:
    """log p(response | prompt): `response_logprobs` summed over tokens; for each group a float32 tensor [K]."""
    scored = response_logprobs(model, groups, temperature, output_gradient)
    return [torch.stack([tokens.sum() for tokens in of_group]) for of_group in scored]


class _Scoring(NamedTuple):
    temperature: float
    dtype: torch.dtype  # of products
    total: Tensor | None  # the weight's gradient so far, to which the new one is added; None: that is returned


class _TargetLogprobs(torch.autograd.Function):
    """log softmax((hidden @ weight.T + bias) / temperature) at the targets: [M] in float32 or wider.

    targets: [2, M], of each the row of `hidden` that predicts it and its token.

    The [rows, V] logits are computed in chunks of rows. The backward pass turns them into their gradient in place. The
    first ones are kept for it, and others computed again. The softmax is at least float32; on a CPU it is
    computed by parts that stay in a cache. The weight's gradient is summed over chunks in the weight's type.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scoring):
        ctx.save_for_backward(hidden, weight, bias, targets)
        output_layer = _OutputLayer(weight, bias, scoring.dtype)
        logprobs = hidden.new_empty(targets.shape[1], dtype=torch.promote_types(scoring.dtype, torch.float32))
        ctx.scoring, ctx.kept = scoring, None
        num_kept = output_layer.num_kept(len(hidden)) if any(ctx.needs_input_grad) else 0
        for rows, of_chunk in _chunks(len(hidden), targets[0], LOGIT_ROWS, num_kept):
            index, ids = targets[:, of_chunk] - targets.new_tensor([[rows.start], [0]])
            logits = output_layer.logits(hidden[rows])
            for part, of_part in _chunks(len(logits), index, _softmax_rows(logits)):
                wide = _divided(logits[part].to(logprobs.dtype), scoring.temperature).log_softmax(-1)
                logprobs[of_chunk[of_part]] = wide[index[of_part] - part.start, ids[of_part]]
            if rows.stop <= num_kept:
                ctx.kept = logits
            del logits  # before the next chunk's exist
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        hidden, weight, bias, targets = ctx.saved_tensors
        (temperature, dtype, total), kept = ctx.scoring, ctx.kept
        ctx.kept = None
        output_layer = _OutputLayer(weight, bias, dtype)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] and total is None else None
        total = of_weight if total is None else total
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for rows, of_chunk in _chunks(len(hidden), targets[0], LOGIT_ROWS, 0 if kept is None else len(kept)):
            index, ids = targets[:, of_chunk] - targets.new_tensor([[rows.start], [0]])
            logits = output_layer.logits(hidden[rows]) if kept is None else kept
            kept = None  # it was the first chunk
            for part, of_part in _chunks(len(logits), index, _softmax_rows(logits)):
                at = index[of_part] - part.start, ids[of_part]
                of_targets = gradient[of_chunk[of_part]] / temperature
                wide = _divided(logits[part].to(gradient.dtype), temperature).softmax(-1)
                of_rows = wide.new_zeros(len(wide)).index_add_(0, at[0], of_targets)
                wide.mul_(of_rows.neg().unsqueeze(1)).index_put_(at, of_targets, accumulate=True)
                logits[part] = wide  # now their gradient
            of_hidden[rows] = logits @ output_layer.weight
            if total is not None:
                _add_product(total, logits.T, hidden[rows].to(dtype))
            if of_bias is not None:
                of_bias += logits.sum(0)
            del logits
        return of_hidden, of_weight, of_bias, None, None


def _chunks(num_rows: int, target_index: Tensor, size: int, first: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """The `first` rows, then `size` at a time; of each chunk also which targets it predicts."""
    starts = [*([0] if first else []), *range(first, num_rows, size)]
    for start, end in itertools.pairwise([*starts, num_rows]):
        yield slice(start, end), ((target_index >= start) & (target_index < end)).nonzero().squeeze(1)


def _divided(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature


def _softmax_rows(logits: Tensor) -> int:
    """Rows whose softmax is computed at once: on a CPU 4 MB of float32."""
    return max(1, (1 << 20) // logits.shape[1]) if logits.device.type == "cpu" else LOGIT_ROWS


class _OutputLayer:
    """A model's last layer."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.weight = cast(weight, dtype)
        self._bias = None if bias is None else cast(bias, dtype)

    def num_kept(self, num_rows: int) -> int:
        """How many rows' logits are kept for the backward pass."""
        return min(num_rows, KEPT_LOGITS // (len(self.weight) * self.weight.itemsize))

    def logits(self, rows: Tensor) -> Tensor:
        """[chunk, V]."""
        rows, weight, bias = rows.to(self.weight.dtype), self.weight, self._bias
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
            # oneDNN's, as in compiled models. MKL's, of F.linear, is slow for so many outputs on an AMD EPYC
            # (docs/LOG.md).
            bias = None if bias is None else bias.contiguous()
            return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return F.linear(rows, weight, bias)


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one @ other, by parts: the whole product would be half as large as the output layer."""
    for part, rows in zip(total.split(PRODUCT_ROWS), one.split(PRODUCT_ROWS), strict=True):
        part.addmm_(rows, other) if rows.dtype == part.dtype else part.add_(rows @ other)
