"""The engine that samples: vLLM if it is installed, else transformers' generate.

Before: flows/searcher/start.py starts a Searcher; after: tba/vllm_engine.py or tba/transformers_engine.py.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

from tba.engine import Engine, EngineOptions
from tba.model_files import is_mixture_of_experts
from tba.precision import default_device


def make_engine(
    folder: Path,
    *,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    lora_rank: int | None = None,
    **options: Unpack[EngineOptions],
) -> Engine:
    """An engine for policies of the shape in `folder`. No policy is served until `load`.

    arguments: further ones of vllm.LLM. lora_rank: of the policies that are adapters of the model in `folder`; None:
    all are whole. Raises: ValueError: vLLM has to take the arguments, and is not used.
    """
    if importlib.util.find_spec("vllm") and not _is_mixture_on_a_cpu(folder):
        from tba.vllm_engine import VllmEngine

        return VllmEngine(folder, arguments=arguments, lora_rank=lora_rank, **options)
    if unknown := set(arguments) - {"gpu_memory_utilization"}:
        raise ValueError(
            f"search.engine: {', '.join(sorted(unknown))} are arguments of vLLM, which is not installed, or not used "
            "because the model is a mixture of experts and this machine has no GPU"
        )
    from tba.transformers_engine import TransformersEngine

    return TransformersEngine(folder, **options)


def _is_mixture_on_a_cpu(folder: Path) -> bool:
    """vLLM 0.32's CPU backend samples from other experts than it was given: log-probabilities are 2 to 10 nats off."""
    return default_device() == "cpu" and is_mixture_of_experts(folder)
