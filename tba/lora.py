"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: trained in place of the weights, published merged into them.

The matrices under them do not change. Those of a bfloat16 model stay in bfloat16, which is half of the memory.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel


def dtype_of_weights(model: str | Path) -> torch.dtype:
    """The type in which a model that gets adapters is loaded: bfloat16 if its checkpoint has it, else float32."""
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    return torch.bfloat16 if config.get_text_config().dtype == torch.bfloat16 else torch.float32


def add(model: PreTrainedModel, rank: int, seed: int) -> None:
    """Adds adapters to all linear layers except the head, in place, and freezes all other weights.

    Of a bfloat16 model everything but the matrices under adapters becomes float32.

    The first matrix of each adapter is random, from `seed` alone; the second is 0, so that adapters have no effect at
    first. The global random state does not change.

    Raises: RuntimeError: peft is not installed.
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
    adapted = {id(layer.base_layer.weight) for layer in model.modules() if hasattr(layer, "base_layer")}
    for parameter in model.parameters():
        if id(parameter) not in adapted:
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
