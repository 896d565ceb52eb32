"""The files of a model's folder in Hugging Face format, as far as they tell about it without loading it."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BESIDE_WEIGHTS = ["*.json", "*.txt", "*.model", "*.jinja"]  # a model's files: configuration, tokenizer, chat template
ADAPTER_CONFIG = "adapter_config.json"  # of a folder with adapters, as peft names it
NO_EXPERTS = "train.lora_rank: a mixture of experts cannot be trained by adapters here; leave the setting out"
# Settings of a model that change attention or logits, and the values that the Trainer supports.
NEUTRAL = {
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "logit_scale": (None, 1),
    "logits_soft_cap": (None, 0),
    "logits_scaling": (None, 1),
}
_BUFFER = re.compile(r"(^|\.)(attention|attn)\.(bias|masked_bias)$|rotary_emb\.inv_freq$")  # in old checkpoints


def copy_beside_weights(source: Path, folder: Path) -> None:
    """Copies a model's configuration and tokenizer, without what describes its own weights: their list, or adapters."""
    for file in {file for pattern in BESIDE_WEIGHTS for file in source.glob(pattern)}:
        if file.is_file() and file.name != ADAPTER_CONFIG and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)


def text_config(folder: Path) -> dict[str, Any]:
    """The language model's part of config.json; empty if there is no such file."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        return {}
    return config.get("text_config", config)


def end_tokens(folder: Path) -> list[int]:
    """Ids of the tokens that end a response by the folder's generation_config.json, such as the end of a turn."""
    try:
        found = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
    except FileNotFoundError:
        return []
    return found if isinstance(found, list) else [found] if isinstance(found, int) else []


def is_mixture_of_experts(folder: Path) -> bool:
    """Whether a folder's config.json has a number of experts."""
    return any(text_config(folder).get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Why the Trainer cannot compute with a model of this configuration; None: it can, as far as that tells."""
    for setting, neutral in NEUTRAL.items():
        if (value := config.get(setting)) not in neutral:
            return f"{setting} is {value}; scaled or capped logits are not supported"
    kinds = [config.get(setting) or [] for setting in ("layer_types", "block_types")]
    if other := set().union(*kinds) - {"full_attention", "sliding_attention", "attention"}:
        return f"its layers have {sorted(other)}; only softmax attention can share a prompt"
    return None


def with_window(folder: Path) -> dict[str, Any]:
    """The configuration of a folder's text model, with the sliding window and the kinds of layers that transformers
    takes: a file may name a window that is off, or leave the kinds out.
    """
    config = text_config(folder)
    if not config.get("sliding_window"):
        return config
    from transformers import AutoConfig

    try:
        read = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    except (OSError, ValueError):  # no model type that transformers knows
        return config
    return config | {name: getattr(read, name, None) for name in ("sliding_window", "layer_types")}


def context_length(config: Mapping[str, Any]) -> int | None:
    """Tokens of prompt and response together that the Trainer takes. None: the configuration does not tell, or scales
    positions. A sliding window is a limit, because the Trainer's attention has none (tba/shared_prefix.py).

    config: with the window as `with_window` has it.
    """
    kinds = config.get("layer_types") or ("sliding_attention",)
    window = config.get("sliding_window") if "sliding_attention" in kinds else None
    limits = [window and window + 1, _positions(config)]  # the last token attends to no other
    return min(filter(None, limits), default=None)


def _positions(config: Mapping[str, Any]) -> int | None:
    positions = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if positions.get("rope_type", "default") != "default" or "type" in positions:
        return None
    return config.get("max_position_embeddings") or config.get("n_positions")


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
