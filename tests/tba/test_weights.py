"""Weights as they are published (tba/weights.py).

- Float32 weights become bfloat16: one of the two neighbours, right on average, so that steps far smaller than the
  distance between neighbours reach the Searchers. To the nearest they would not, which the test shows too.
- What is on bfloat16's grid stays as it is, equal seeds round alike, bfloat16 weights pass.

pytest tests/tba/test_weights.py
"""

import torch

from tba import weights
from tba.weights import to_bfloat16


def test_a_step_far_below_the_grid_arrives_on_average(monkeypatch):
    monkeypatch.setattr(weights, "NOISE", 1000)  # tensors longer and shorter than the noise
    before = torch.tensor([0.05, -0.05, 1.0, -3.0e-6]).bfloat16().float().repeat(5001, 1)  # [5001, 4]
    grid = (before.abs() * 2**-7).clamp(min=1e-12)
    after = before + 0.1 * grid
    assert (after.bfloat16() == before.bfloat16()).all(), "to the nearest, nothing moves"
    rounded = torch.stack([to_bfloat16({"w": after}, seed)["w"].float() for seed in range(5)])
    assert ((rounded - after).abs() <= grid).all()
    moved = ((rounded - before) / (after - before)).mean(dim=(0, 1))  # of each column: 1 where it is right on average
    # 25,005 draws of a share of at least 5 % have a standard error of 3 %; each noise value is used for 25 of them.
    torch.testing.assert_close(moved, torch.ones(4), rtol=0, atol=0.25)


def test_what_is_on_the_grid_stays_and_equal_seeds_round_alike():
    on_grid = torch.tensor([[0.0, -1.5, 1e-20], [3.0e38, -(2.0**-126), 0.1]]).bfloat16()
    assert torch.equal(to_bfloat16({"w": on_grid.float()}, 0)["w"], on_grid)
    between = torch.linspace(-1, 1, 999)
    first, again, other = (to_bfloat16({"w": between}, seed)["w"] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert to_bfloat16({"w": on_grid}, 3)["w"] is on_grid
