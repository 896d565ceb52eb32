"""In what precision matrix products run. Master weights are float32 and published weights bfloat16 everywhere.

A step of the policy is a tenth of the distance between two bfloat16 numbers, and a model that came in bfloat16 lies on
one: a CPU, where float32 is affordable, trains in it, and tba/weights.py rounds what is published so that small steps
arrive. A GPU trains under bfloat16 autocast, as is usual there.
"""

import torch

# Instructions that multiply bfloat16, by the names of torch.cpu.get_capabilities: x86's two, and ARM's.
BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")


def compute_dtype(device_type: str = "cpu") -> torch.dtype:
    """What the Trainer and the reference policy compute in."""
    return torch.float32 if device_type == "cpu" else torch.bfloat16


def serving_dtype(device_type: str = "cpu") -> torch.dtype:
    """What the engine computes in: bfloat16 where the device multiplies it in hardware, else float32.

    A CPU without such instructions emulates them: 12 GFLOP/s a core where float32 reaches 65 (a Skylake server).
    """
    if device_type == "cpu" and not any(map(torch.cpu.get_capabilities().get, BFLOAT16_INSTRUCTIONS)):
        return torch.float32
    return torch.bfloat16
