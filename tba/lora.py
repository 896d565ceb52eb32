"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: trained in place of the weights.

The matrices under them do not change. Those of a bfloat16 model stay in bfloat16, which is half of the memory. So a
policy is published as its adapters alone, in peft's format; the final one with the adapters merged into the weights.

Dimensions: r the adapters' rank, I inputs and O outputs of a layer. It adds scaling * B A to its matrix [O, I], with A
[r, I] and B [O, r].
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tba.memory import UnknownShape, read_shape
from tba.model_files import ADAPTER_CONFIG, NO_EXPERTS, tensors_of, weight_files
from tba.precision import compute_dtype, to_bfloat16
from tba.weights import fingerprint

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel

WEIGHTS = "adapter_model.safetensors"  # of a folder with adapters, as peft names it
PREFIX = "base_model.model."  # of the tensors' names in that file
# Of peft's settings, those that change what a tensor of the file means. Adapters with one of them are refused.
NOT_PLAIN = (
    "use_dora", "use_rslora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "rank_pattern",
    "alpha_pattern", "layer_replication", "modules_to_save", "alora_invocation_tokens",
)  # fmt: skip
BASE = "base"  # the key, in the file's metadata, of the fingerprint of the model under the adapters
SCALING = 2  # lora_alpha = 2 x rank is the usual choice: the learning rate then need not follow the rank


def dtype_of_weights(folder: str | Path) -> torch.dtype:
    """The type in which a model that gets adapters is loaded: bfloat16 if all parameters in its files are."""
    with suppress(UnknownShape):
        if read_shape(Path(folder)).is_bfloat16:
            return torch.bfloat16
    return torch.float32


def add(model: "PreTrainedModel", rank: int, seed: int) -> None:
    """Adds adapters to all linear layers except the head, in place, and freezes all other weights.

    Of a bfloat16 model everything but the matrices of linear layers under adapters becomes float32.

    The first matrix of each adapter is random, from `seed` alone; the second is 0, so that adapters have no effect at
    first. The global random state does not change.

    Raises: RuntimeError: peft is not installed. ValueError: the model is a mixture of experts.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise RuntimeError("train.lora_rank needs peft: pip install peft, or leave the setting out") from error
    config = LoraConfig(r=rank, lora_alpha=SCALING * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    adapted = [layer.base_layer for layer in model.modules() if hasattr(layer, "base_layer")]
    if not all(hasattr(layer, "weight") for layer in adapted):
        raise ValueError(NO_EXPERTS)
    # Only linear layers multiply float32 by bfloat16 (tba/precision.py); GPT-2's Conv1D does not.
    kept = {id(layer.weight) for layer in adapted if type(layer) is nn.Linear}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.float()


@torch.no_grad()
def merged(
    model: "PreTrainedModel", gathered: Callable[[list[Tensor]], AbstractContextManager] = nullcontext
) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of the model, with each adapter added to its layer's weight.

    One layer's weights at a time are inside `gathered`, which gathers weights that are sharded over devices. Use each
    tensor before taking the next.
    """
    layers = dict(model.named_modules())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in name:
            continue
        layer, _, kind = name.rpartition(".base_layer.")
        if layer and kind == "weight":
            with gathered(list(layers[layer].parameters())):
                yield f"{layer}.{kind}", tensor + layers[layer].get_delta_weight("default")
        else:
            with gathered([tensor]):
                yield (f"{layer}.{kind}" if layer else name), tensor


def can_publish_adapters_alone(model: "PreTrainedModel", folder: str | Path) -> bool:
    """Whether a policy can be published as its adapters alone, for engines that have the model in `folder`.

    Its matrices must be there by the same names, and in bfloat16, because engines round others in another way than the
    Trainer does. GPT-2's Conv1D has [I, O].
    """
    adapted = {name: layer.base_layer for name, layer in model.named_modules() if hasattr(layer, "base_layer")}
    if not adapted or any(type(layer) is not nn.Linear for layer in adapted.values()):
        return False
    types = {name: tensor["dtype"] for name, tensor in tensors_of(Path(folder)).items()}
    return all(types.get(f"{name}.weight") == "BF16" for name in adapted)


def adapters(
    model: "PreTrainedModel", gathered: Callable[[list[Tensor]], AbstractContextManager] = nullcontext
) -> Iterator[tuple[str, Tensor]]:
    """Names, as in peft's files, and tensors of the adapters. gathered: as of `merged`.

    They are rounded to the nearest in the type of the Trainer's products, as these round them.
    """
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            with gathered([parameter]):
                rounded = parameter.detach().to(compute_dtype(parameter.device.type))
                yield PREFIX + name.replace(".default.", "."), rounded


def are_adapters(weights: Mapping[str, Tensor]) -> bool:
    """Whether a policy's tensors are its adapters alone."""
    return all(name.startswith(PREFIX) for name in weights)


def has_adapters(folder: str | Path) -> bool:
    """Whether a policy's folder has adapters in place of weights."""
    return (Path(folder) / WEIGHTS).exists()


def write_adapters(weights: dict[str, Tensor], base: Path, folder: Path, hub_id: str | None = None) -> None:
    """Writes a folder that vLLM loads, and with peft `from_pretrained`.

    base: the folder of the model under them; hub_id: its Hugging Face id, if it has one, for other machines.
    """
    layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in weights}  # q_proj, …
    rank = len(next(tensor for name, tensor in weights.items() if ".lora_A." in name))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub_id or str(base),
        "r": rank,
        "lora_alpha": SCALING * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(layers),
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2))
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt", BASE: base_fingerprint(str(base))})


@functools.cache
def base_fingerprint(base: str) -> str:
    """The fingerprint of the model in this folder. It is read once."""
    return fingerprint(base_weights(base))


def base_weights(base: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of the model in this folder, one at a time: those that `from_pretrained` reads."""
    names = tensors_of(Path(base))
    for file in sorted(weight_files(Path(base))):
        with safe_open(file, framework="pt") as opened:
            for name in names.keys() & set(opened.keys()):
                yield name, opened.get_tensor(name)


def check_base(base: str | Path, folder: str | Path) -> None:
    """Raises: ValueError: the adapters in `folder` were trained on another model than the one in `base`."""
    with safe_open(Path(folder) / WEIGHTS, framework="pt") as opened:
        wanted = (opened.metadata() or {}).get(BASE)
    if wanted is not None and wanted != base_fingerprint(str(base)):  # None: written by another program
        raise ValueError(f"{folder} has adapters of another model than {base}, whose files differ from the Trainer's")


def merged_weights(base: str | Path, folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of the model in `base` with the adapters of `folder` added.

    Rounded as published policies are, to bfloat16, where there are adapters. Raises: ValueError: the adapters are of
    another model, or no plain LoRA.
    """
    check_base(base, folder)
    config, parts = json.loads((Path(folder) / ADAPTER_CONFIG).read_text()), load_file(Path(folder) / WEIGHTS)
    odd = [name for name in NOT_PLAIN if config.get(name)]
    if isinstance(start := config.get("init_lora_weights"), str) and start != "gaussian":  # some change the model
        odd.append("init_lora_weights")
    if odd:
        raise ValueError(f"{folder} has adapters with {', '.join(odd)}, which tba cannot merge; merge them by peft")
    scaling = config["lora_alpha"] / config["r"]
    for name, weight in base_weights(base):
        of_layer = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
        down, up = (parts.pop(f"{of_layer}{side}.weight", None) for side in "AB")  # [r, I], [O, r]
        if down is not None:
            # In float64, so that all machines come to the same sum: this may be the model under another run's adapters.
            weight = to_bfloat16((weight.double() + scaling * (up.double() @ down.double())).float())
        yield name, weight
    if parts:
        raise ValueError(f"{folder}: {min(parts)} belongs to no weight of {base}")
