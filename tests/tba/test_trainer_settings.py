"""A training step takes every setting of `train` that decides it: the same steps by torch's AdamW on a second model.

python -m pytest tests/tba/test_trainer_settings.py
"""

import pytest
import torch

from tba.logprobs import load_policy, sequence_logprobs
from tba.objective import trajectory_balance_loss
from tests.tba.small_trainer import DRAWS, make_trainer

SETTINGS = {
    "steps": 10, "learning_rate": 1e-2, "warmup_steps": 4, "beta": 0.5, "beta_final": 0.1, "temperature": 2.0,
    "reward_tempering": 2.0, "fluency_temperature": 1.5, "adam_beta1": 0.6, "adam_beta2": 0.8, "weight_decay": 0.5,
    "gradient_clip": 0.05, "residual_weight": "plain",
}  # fmt: skip


def test_a_step_takes_each_setting_as_of_its_number(model_folder):
    trainer, policy = make_trainer(model_folder, **SETTINGS), load_policy(model_folder)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.6, 0.8), weight_decay=0.5, fused=True)
    sums = [[sum(tokens) for tokens in draw.reference_logprobs] for draw in DRAWS]
    reference = torch.tensor([[of[u] for u in draw.slot] for of, draw in zip(sums, DRAWS, strict=True)])  # [B, K]
    reward = torch.tensor([draw.reward for draw in DRAWS])  # [B, K]
    for step in (1, 2, 3):
        beta, T, g = 0.5 - 0.04 * (step - 1), 2 - 0.1 * (step - 1), 1 + 0.05 * (step - 1)
        optimizer.param_groups[0]["lr"] = 1e-2 * step / 4
        scored = sequence_logprobs(policy, [draw.group for draw in DRAWS], 2.0)
        logprob = torch.stack([of[draw.slot] for of, draw in zip(scored, DRAWS, strict=True)])
        optimizer.zero_grad()
        trajectory_balance_loss(logprob, reference / (g * T), reward / T, beta).backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.05).item()
        optimizer.step()
        found = trainer.train_step(DRAWS)
        assert norm > 0.05 and found["gradient_norm"] == pytest.approx(norm, rel=1e-4)
        assert (found["learning_rate"], found["beta"]) == pytest.approx((1e-2 * step / 4, beta))
    for (name, one), other in zip(trainer._policy.named_parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
