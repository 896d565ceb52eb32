"""Memory that a run's processes need, from the model's files and the settings. Nothing is loaded.

A process needs the sum of its parts at its peak: weights and what belongs to them for the whole run, activations in the
middle of a step. docs/operating.md compares the sums with measured peaks.

Dimensions: N tokens of a pass, D width of the model, I of its MLP, L layers, V vocabulary, Q width of queries (heads x
head size), KV of keys and of values.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from tba.config import TrainSettings
from tba.model_files import tensors_of

Bytes = int
GIB = 1024**3
BUCKET = 4 * 50_000_000  # of gradients that DeepSpeed reduces together: reduce_bucket_size in infra/deepspeed
# Parts that a Trainer needs whatever its batches are.
CERTAIN = ("weights", "gradient", "moments of AdamW", "DeepSpeed's weights and bucket")
LOGIT_ROWS, KEPT_LOGITS = 512, 1 << 29  # rows of a chunk of logits, and bytes that are kept (tba/logprobs.py)
# Models with the norms of RMS_NORMS (tba/logprobs.py).
RMS_NORM_MODELS = ("llama", "mistral", "qwen2", "qwen3")
CAST_AGAIN_TOKENS = 1024  # of a pass, from which no bfloat16 copy of a weight is kept (tba/precision.py)
MLP_GRADIENTS = 5  # tensors [N, I] that the backward pass of one MLP has at once
PASS_TOKENS = 4096  # of the reference policy (tba/reference_policy.py)
SCORING = "a pass of the reference policy"
GATHERED = 1_000_000_000  # parameters that ZeRO-3 keeps gathered: DeepSpeed's stage3_max_live_parameters
# By public reports CUDA's context takes 0.5 to 0.6 GiB; the libraries' workspaces are added. Not measured here.
CUDA = GIB
# Measured on Linux: what Python, torch and this project's packages take before a model is loaded; and what they and a
# Searcher's engine, Prefect's client and a round's tensors take.
PROCESS, ENGINE_PROCESS = int(0.55 * GIB), int(1.7 * GIB)


@dataclass(frozen=True)
class Shape:
    """The shape of a model. Numbers of parameters count tied ones once."""

    num_parameters: int
    num_in_layers: int  # of these, in the matrices of layers
    num_sides: int  # rows and columns of these matrices: an adapter of rank 1 has so many parameters
    D: int
    I: int  # noqa: E741 - as in the module's docstring
    L: int
    V: int
    Q: int
    KV: int
    is_bfloat16: bool  # every parameter in its files
    has_query_norms: bool = False  # queries and keys have norms of their own, as in Qwen3
    computes_norms_again: bool = False  # in the backward pass (tba/recomputation.py)
    num_not_linear: int = 0  # of num_in_layers, in other modules than nn.Linear: these stay float32


_OF_A_LAYER = re.compile(r"(^|\.)(layers|h)\.\d+\.")
_OF_EXPERTS = re.compile(r"\.experts\.\d+\.")  # transformers has those of a layer in one parameter


class UnknownShape(ValueError):
    """A model's files do not tell its shape; the message names what is missing."""


def read_shape(folder: Path) -> Shape:
    """Reads config.json and the headers of the safetensors files. Raises: UnknownShape."""
    try:
        config = json.loads((folder / "config.json").read_text())
        tensors = tensors_of(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UnknownShape(f"{folder} cannot be read, so the memory that it needs is not known: {error}") from error
    if "text_config" in config or not tensors:
        raise UnknownShape(f"{folder} is no plain language model with weights, so its memory is not known")

    def number(*names: str, instead: int | None = None) -> int:
        found = next((config[name] for name in names if config.get(name)), instead)
        if not isinstance(found, int):
            raise UnknownShape(f"{folder / 'config.json'} has no {names[0]}, so the memory that it needs is not known")
        return found

    D, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    matrices = {
        name: tensor for name, tensor in tensors.items() if _OF_A_LAYER.search(name) and len(tensor["shape"]) == 2
    }
    is_conv1d = config.get("model_type") == "gpt2"
    not_linear = [matrix for name, matrix in matrices.items() if is_conv1d or _OF_EXPERTS.search(name)]
    head_size = number("head_dim", instead=D // heads)
    return Shape(
        num_parameters=sum(math.prod(tensor["shape"]) for tensor in tensors.values()),
        num_in_layers=sum(math.prod(matrix["shape"]) for matrix in matrices.values()),
        num_sides=sum(sum(matrix["shape"]) for matrix in matrices.values()),
        D=D,
        I=number("intermediate_size", "n_inner", instead=4 * D),
        L=number("num_hidden_layers", "n_layer"),
        V=number("vocab_size"),
        Q=heads * head_size,
        KV=number("num_key_value_heads", instead=heads) * head_size,
        is_bfloat16=all(tensor["dtype"] == "BF16" for tensor in tensors.values()),
        has_query_norms=any("q_norm" in name for name in tensors),
        computes_norms_again=config.get("model_type") in RMS_NORM_MODELS,
        num_not_linear=sum(math.prod(matrix["shape"]) for matrix in not_linear),
    )


@dataclass(frozen=True)
class Machine:
    """The device of a process."""

    is_gpu: bool
    has_bfloat16: bool  # whether products run in bfloat16
    num_bytes: Bytes  # of a GPU, or of the machine's memory
    num_gpus: int = 0


@dataclass(frozen=True)
class Pass:
    """The largest forward pass of the Trainer."""

    num_tokens: int
    # of its largest group: responses that attend at once, and tokens of the prompt and of each
    num_responses: int = 0
    prompt: int = 0
    response: int = 0


def trainer_parts(shape: Shape, settings: TrainSettings, largest: Pass, machine: Machine) -> dict[str, Bytes]:
    """Of each device of the Trainer."""
    trained, frozen = shape.num_parameters, 0
    if settings.lora_rank:
        trained = settings.lora_rank * shape.num_sides
        frozen = 4 * shape.num_parameters
        if shape.is_bfloat16 and settings.num_processes == 1:
            in_file = shape.num_in_layers - shape.num_not_linear
            # On a CPU they are the mapped file, and the other weights' pages of it stay beside their float32 copies.
            frozen += (0 if machine.is_gpu else 2 * (shape.num_parameters - in_file)) - 2 * in_file
    size, stage = settings.num_processes, settings.zero_stage if settings.num_processes > 1 else 0
    gradient = 4 * trained // (size if stage >= 2 else 1)
    parts = {
        "weights": (frozen + 4 * trained) // (size if stage == 3 else 1),
        "gradient": 2 * gradient if stage == 2 else gradient,  # the partition of a pass, beside that of those before it
        "moments of AdamW": 8 * trained // size,
        "activations": _activations(shape, settings, largest, machine),
        "logits": _logits(shape, machine, kept_rows=largest.num_tokens),
    }
    if stage:  # it copies its partition of the weights, and has the output layer's gradient whole until it is reduced
        of_head = 4 * shape.V * shape.D if stage >= 2 and not settings.lora_rank else 0
        gathered = 4 * min(shape.num_parameters, GATHERED) if stage == 3 else 0
        parts["DeepSpeed's weights and bucket"] = 4 * trained // size + BUCKET + of_head + gathered
    if settings.reference_reset_interval:  # each process has it whole
        parts["reference after a reset"] = parts["weights"] if size == 1 else 4 * shape.num_parameters
    if machine.is_gpu:
        parts["largest tensor, copied for Searchers"] = 2 * shape.V * shape.D
        parts["CUDA"] = CUDA
    else:
        parts["copy for Searchers"] = 2 * shape.num_parameters
        parts["process"] = PROCESS
    return parts


def certain(parts: dict[str, Bytes]) -> Bytes:
    """The bytes that a Trainer needs whatever its batches are."""
    return sum(parts.get(name, 0) for name in CERTAIN)


def _activations(shape: Shape, settings: TrainSettings, largest: Pass, machine: Machine) -> Bytes:
    """Of a pass: the tensors that each layer keeps for the backward pass, and those of one layer's backward pass."""
    checkpointing = settings.gradient_checkpointing
    wide = 2 if machine.has_bfloat16 else 4  # bytes of an operand of a product
    inputs = 4 * shape.D  # of a norm, float32
    inputs_of_products = 2 * shape.D + 2 * shape.Q  # of q, k and v; of gate and up; of o; and q itself
    if shape.computes_norms_again and checkpointing == "none" and not settings.lora_rank:
        inputs_of_products -= 2 * shape.D
    if settings.lora_rank and machine.has_bfloat16:  # peft's adapters cast their inputs, each its own
        inputs_of_products += 3 * shape.D
    if shape.has_query_norms:
        inputs_of_products += shape.Q + shape.KV
    operands = wide * (inputs_of_products + 2 * shape.KV + 2 * shape.I)
    of_layer = {
        "none": 2 * inputs + operands,
        "cheap": inputs + operands,
        "layers": inputs,
    }[checkpointing]
    behind = 3 * inputs  # the last norm, and the rows that predict
    again = 0 if checkpointing == "none" else 2 * inputs + operands
    is_one = settings.num_processes == 1
    copies = 0  # of the matrices, in bfloat16, in a short pass
    if machine.has_bfloat16 and checkpointing != "layers" and (is_one or settings.zero_stage < 3):
        copies = 0 if settings.lora_rank and shape.is_bfloat16 and is_one else 2 * shape.num_in_layers
    of_token = shape.L * of_layer + behind + again + MLP_GRADIENTS * wide * shape.I
    # of the tokens that are left over, if not of all
    short_pass = copies + min(largest.num_tokens, CAST_AGAIN_TOKENS - 1) * of_token
    # Attention copies the prompt's keys and values for each response, for all heads. These copies, the queries and the
    # results each have a gradient as large. By then the MLP's gradients are freed.
    of_attention = 4 * wide * shape.Q * largest.num_responses * (largest.prompt + 2 * largest.response)
    more = max(0, of_attention - largest.num_tokens * MLP_GRADIENTS * wide * shape.I)
    return max(largest.num_tokens * of_token + more, short_pass)


def _logits(shape: Shape, machine: Machine, kept_rows: int = 0) -> Bytes:
    """Of a chunk of rows, and of the first of `kept_rows` for the backward pass; in bfloat16 also the output layer's
    rounded weight, on a GPU also the softmax in float32."""
    wide = 2 if machine.has_bfloat16 else 4
    of_all = wide * shape.V * kept_rows
    kept = min(KEPT_LOGITS, of_all)
    chunk = 0 if 0 < of_all <= KEPT_LOGITS else wide * shape.V * LOGIT_ROWS
    weight = wide * shape.V * shape.D if machine.has_bfloat16 else 0
    softmax = 2 * 4 * shape.V * LOGIT_ROWS if machine.is_gpu else 0  # its input and output
    return kept + chunk + weight + softmax


@dataclass(frozen=True)
class SearcherNeeds:
    """A Searcher's settings that its memory follows from, beside model and machine."""

    num_devices: int
    cache_bytes: Bytes  # of keys and values, on each device
    longest: int  # tokens of the longest prompt with its longest response
    merges_adapters: bool = False  # policies are adapters, which a CPU's engine merges
    scores_apart: bool = False  # by tba/reference_process.py


def searcher_parts(shape: Shape, machine: Machine, of: SearcherNeeds) -> dict[str, Bytes]:
    """Of each of its devices."""
    wide = 2 if machine.has_bfloat16 else 4
    loaded = wide + 2 + (2 if of.merges_adapters else 0)  # a policy's file, what is made of it, and what is merged
    parts = {
        "engine's weights": wide * shape.num_parameters // of.num_devices,
        "weights that are loaded": loaded * shape.num_parameters,
        "keys and values": of.cache_bytes,
        "reference policy": 4 * shape.num_parameters,  # until it is loaded
    }
    scoring = scoring_parts(shape, machine, of.longest)
    if machine.is_gpu:  # models are loaded by way of the machine's memory
        return parts | {"weights that are loaded": 0} | scoring
    parts["process"] = ENGINE_PROCESS
    if of.scores_apart:
        return parts | {SCORING: scoring[SCORING], "process of the reference policy": PROCESS}
    return parts  # one thread loads policies and scores, and a load takes more than a pass


def scoring_parts(shape: Shape, machine: Machine, longest: int) -> dict[str, Bytes]:
    """Of the reference policy, which a Searcher's first GPU has whole. longest: as of SearcherNeeds."""
    wide = 2 if machine.has_bfloat16 else 4
    in_linear = shape.num_in_layers - shape.num_not_linear
    of_token = 12 * shape.D + wide * (3 * shape.I + 2 * (shape.Q + shape.KV))  # of one layer
    return {
        "reference policy": wide * in_linear + 4 * (shape.num_parameters - in_linear),
        SCORING: max(PASS_TOKENS, longest) * of_token + _logits(shape, machine),
    }
