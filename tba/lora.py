"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: trained in place of the weights, published merged into them.

The matrices under them do not change. Those of a bfloat16 model stay in bfloat16, which is half of the memory.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.memory import UnknownShape, read_shape
from tba.models import NO_EXPERTS


def dtype_of_weights(folder: str | Path) -> torch.dtype:
    """The type in which a model that gets adapters is loaded: bfloat16 if all parameters in its files are."""
    with suppress(UnknownShape):
        if read_shape(Path(folder)).is_bfloat16:
            return torch.bfloat16
    return torch.float32


def add(model: PreTrainedModel, rank: int, seed: int) -> None:
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
    # lora_alpha = 2 x rank is the usual choice: the learning rate then need not follow the rank.
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
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
    model: PreTrainedModel, gathered: Callable[[list[Tensor]], AbstractContextManager] = nullcontext
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
