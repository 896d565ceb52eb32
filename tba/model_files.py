"""The files of a model's folder in Hugging Face format, as far as they tell about it without loading it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

BESIDE_WEIGHTS = ["*.json", "*.txt", "*.model", "*.jinja"]  # a model's files: configuration, tokenizer, chat template
ADAPTER_CONFIG = "adapter_config.json"  # of a folder with adapters, as peft names it
NO_EXPERTS = "train.lora_rank: a mixture of experts cannot be trained by adapters here; leave the setting out"
_BUFFER = re.compile(r"(^|\.)(attention|attn)\.(bias|masked_bias)$|rotary_emb\.inv_freq$")  # in old checkpoints


def copy_beside_weights(source: Path, folder: Path) -> None:
    """Copies a model's configuration and tokenizer, without what describes its own weights: their list, or adapters."""
    for file in {file for pattern in BESIDE_WEIGHTS for file in source.glob(pattern)}:
        if file.is_file() and file.name != ADAPTER_CONFIG and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)


def is_mixture_of_experts(folder: Path) -> bool:
    """Whether a folder's config.json has a number of experts."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        return False
    return any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def weight_files(folder: Path) -> set[Path]:
    """The safetensors files that from_pretrained reads; a folder may have others."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        return {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
    return {single} if single.exists() else set()


def tensors_of(folder: Path) -> dict[str, Any]:
    """Shape and type of each parameter, by name, from the headers of these files. Raises: OSError, ValueError."""
    found = {}
    for file in sorted(weight_files(folder)):
        with open(file, "rb") as opened:
            found |= json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings") and "lm_head.weight"
    return {
        name: each for name, each in found.items() if name not in ("__metadata__", tied) and not _BUFFER.search(name)
    }
