"""A policy's weights as files: safetensors in and out, and the fingerprint that identifies the weights that sampled."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor

SHARD_BYTES = 5_000_000_000  # as on the Hugging Face Hub: several files travel at once

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel


def read_weights(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight in a Hugging Face folder, one at a time.

    Raises: FileNotFoundError: the folder holds no safetensors file.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no .safetensors file; a policy is a folder in Hugging Face format")
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dictionary
                yield name, weights.get_tensor(name)


def write_weights(weights: dict[str, Tensor], folder: str | Path) -> None:
    """The weights as safetensors that `from_pretrained` and vLLM load: one file, or several of `SHARD_BYTES`.

    The files' names and sizes follow from the weights' names and shapes, so those of two policies are alike.
    """
    save_torch_state_dict(weights, folder, max_shard_size=SHARD_BYTES)


def as_in_a_checkpoint(model: "PreTrainedModel", weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's weights as its checkpoints have them, which `from_pretrained` and vLLM read.

    They differ for a mixture of experts: in memory transformers has one tensor of all experts.
    """
    if not any(".experts." in name for name in weights):
        return weights
    from transformers.core_model_loading import revert_weight_conversion

    parts = revert_weight_conversion(model, weights)
    # safetensors refuses tensors that share memory
    return {name: part.clone() if _is_view(part) else part for name, part in parts.items()}


def _is_view(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """BLAKE3 over every tensor's name, type, shape and bytes, 32 hex digits; their order does not matter.

    BLAKE3 is cryptographic, and on one core seven times as fast as hashlib's BLAKE2. It has this process's share of
    threads. The Trainer computes it of every policy, each Searcher of every policy that it serves.
    """
    digests, whole = {}, blake3()
    for name, tensor in weights:
        about = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        digest = blake3(about, max_threads=torch.get_num_threads())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        digests[name] = digest.digest(16)
    for name in sorted(digests):
        whole.update(digests[name])
    return whole.hexdigest(16)
