"""Claim: engines compute in bfloat16 where the device has instructions for it; training is float32 on any CPU.

python -m pytest tests/tba/test_precision.py
"""

import pytest
import torch

from tba.precision import compute_dtype, serving_dtype


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),  # Skylake
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),  # Cooper Lake, Zen 4
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": True}, torch.bfloat16),  # Sapphire Rapids
        ({}, torch.float32),  # unknown
    ],
)
def test_a_cpu_serves_in_what_it_multiplies_in_hardware_and_trains_in_float32(capabilities, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert serving_dtype("cpu") == dtype
    assert compute_dtype("cpu") == torch.float32


def test_a_gpu_computes_in_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert compute_dtype("cuda") == serving_dtype("cuda") == torch.bfloat16
