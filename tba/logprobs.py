"""Log-probabilities of responses under a causal language model.

The tokens of all groups are in one packed row without padding, in which a shared prefix is computed once
(tba/shared_prefix.py). The [tokens, vocabulary] logits are never all in memory at once.

Dimensions: N packed tokens, K responses of a group, M response tokens scored, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tba.model_files import unsupported
from tba.precision import bfloat16_linear, compute_dtype, to_bfloat16
from tba.shared_prefix import ATTENTION, Group, pack

# Rows of logits that exist at once: 512 x 49,152 float32 is 100 MB, and larger chunks were no faster.
LOGIT_ROWS = 512

# The expensive operations of a layer: products of matrices, and attention.
PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
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
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, trust_remote_code=False)
    check_supported(model)
    model.set_attn_implementation(ATTENTION)
    model.eval()
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is torch.nn.Linear and module is not head:  # the head's product is in _TargetLogprobs
            module.forward = functools.partial(bfloat16_linear, module)
    if checkpointing == "none":
        for module in model.modules():
            if type(module).__name__ in GATED_MLPS:
                module.forward = functools.partial(_gated_mlp, module)
            if type(module).__name__ in RMS_NORMS:
                module.forward = functools.partial(
                    checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
                )
    else:
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

    def rest(gate: Tensor, up: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(gate) * up)

    return checkpoint(rest, mlp.gate_proj(hidden), mlp.up_proj(hidden), use_reentrant=False, preserve_rng_state=False)


def check_supported(model: PreTrainedModel) -> None:
    """Raises: ValueError: the model's attention or logits are not supported here; the message names the setting."""
    name, config = type(model).__name__, model.config.get_text_config()
    if not model._supports_attention_backend:
        raise ValueError(
            f"model {name}: it does not use transformers' attention interface, which a prompt shared by its responses "
            "needs. Llama, Qwen2, Qwen3, Mistral, GPT-NeoX and GPT-2 do."
        )
    if fault := unsupported(config.to_dict()):
        raise ValueError(f"model {name}: {fault}")
    if getattr(model, "lm_head", None) not in (None, model.get_output_embeddings()):
        raise ValueError(f"model {name}: it has layers between its last hidden state and its output layer")


def response_logprobs(model: PreTrainedModel, groups: Sequence[Group], temperature: float) -> list[list[Tensor]]:
    """log p(token | prompt, earlier tokens) of every response token, logits divided by `temperature` (natural logs).

    Returns for each group, for each of its responses, a float32 tensor [number of response tokens]. Differentiable.
    Raises: ValueError: an empty prompt or response.
    """
    device = model.device
    packed = pack(groups, device)
    compute = compute_dtype(device.type) if model.dtype == torch.float32 else model.dtype
    with torch.autocast(device.type, compute) if compute != model.dtype else contextlib.nullcontext():
        hidden = model.base_model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, tba_layout=packed.layout
        ).last_hidden_state[0]  # [N, hidden]
    rows, target_index = packed.target_rows.unique(return_inverse=True)
    targets = torch.stack([target_index, packed.target_ids])  # [2, M]
    head = model.get_output_embeddings()

    def score(hidden: Tensor) -> Tensor:
        return _TargetLogprobs.apply(hidden, head.weight, head.bias, targets, temperature, compute)

    logprobs = _call_as(head, score, hidden[rows])  # [M]
    lengths = [[len(response) for response in group.responses] for group in groups]
    by_group = logprobs.split([sum(of_group) for of_group in lengths])
    return [list(flat.split(of_group)) for flat, of_group in zip(by_group, lengths, strict=True)]


def _call_as(module: torch.nn.Module, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Runs `forward` in place of the module's own, hooks included: ZeRO-3 gathers a module's weights in them."""
    module.forward = forward
    try:
        return module(hidden)
    finally:
        del module.forward


def sequence_logprobs(model: PreTrainedModel, groups: Sequence[Group], temperature: float) -> list[Tensor]:
    """log p(response | prompt): `response_logprobs` summed over tokens; for each group a float32 tensor [K]."""
    return [
        torch.stack([tokens.sum() for tokens in of_group]) for of_group in response_logprobs(model, groups, temperature)
    ]


class _TargetLogprobs(torch.autograd.Function):
    """log softmax((hidden @ weight.T + bias) / temperature) at the targets: [M] in float32 or wider.

    targets: [2, M], of each the row of `hidden` that predicts it and its token.

    The [rows, V] logits are computed in chunks of rows, again in the backward pass (a single chunk is kept for it), and
    turned into their gradient in place. Matrix products run in `dtype`; the weight's gradient is summed
    over chunks in its own.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, dtype):  # noqa: PLR0913 - ctx is no argument
        ctx.save_for_backward(hidden, weight, bias, targets)
        target_index, target_ids = targets
        ctx.temperature, ctx.dtype, ctx.only_chunk = temperature, dtype, None
        weight = _cast(weight, dtype)
        logprobs = hidden.new_empty(len(target_ids), dtype=torch.promote_types(dtype, torch.float32))
        for start, here in _chunks(len(hidden), target_index):
            logits = _logits(hidden[start : start + LOGIT_ROWS], weight, bias, temperature).log_softmax(-1)
            logprobs[here] = logits[target_index[here] - start, target_ids[here]]
        if any(ctx.needs_input_grad) and len(hidden) <= LOGIT_ROWS:
            ctx.only_chunk = logits
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        hidden, weight, bias, (target_index, target_ids) = ctx.saved_tensors
        cast, needs_weight = _cast(weight, ctx.dtype), ctx.needs_input_grad[1]
        of_hidden = torch.empty_like(hidden)
        of_weight = None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for start, here in _chunks(len(hidden), target_index):
            rows, index = hidden[start : start + LOGIT_ROWS], target_index[here] - start
            if ctx.only_chunk is None:
                of_logits = _logits(rows, cast, bias, ctx.temperature).softmax(-1)  # [chunk, V]
            else:
                of_logits, ctx.only_chunk = ctx.only_chunk.exp_(), None
            of_row = of_logits.new_zeros(len(rows)).index_add_(0, index, gradient[here])
            of_logits.mul_(of_row.neg().unsqueeze(1))
            of_logits.index_put_((index, target_ids[here]), gradient[here], accumulate=True)
            of_logits = of_logits.div_(ctx.temperature).to(ctx.dtype)
            of_hidden[start : start + LOGIT_ROWS] = of_logits @ cast
            if needs_weight:
                of_weight = _add_product(of_weight, of_logits.T, rows.to(ctx.dtype), weight.dtype)
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return of_hidden, of_weight, of_bias, None, None, None


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return to_bfloat16(weight) if (weight.dtype, dtype) == (torch.float32, torch.bfloat16) else weight.to(dtype)


def _add_product(total: Tensor | None, one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """total + one @ other in `dtype`, in place: both are as large as the output layer."""
    if total is None:
        return (one @ other).to(dtype)
    return total.addmm_(one, other) if one.dtype == dtype else total.add_((one @ other).to(dtype))


def _chunks(num_rows: int, target_index: Tensor) -> Iterator[tuple[int, Tensor]]:
    """First row of each chunk, and which targets its rows predict."""
    for start in range(0, num_rows, LOGIT_ROWS):
        yield start, ((target_index >= start) & (target_index < start + LOGIT_ROWS)).nonzero().squeeze(1)


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = F.linear(rows.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)
