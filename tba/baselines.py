"""Objectives that Trajectory Balance is compared with, in one interface: log-probabilities and rewards in, loss out.

    rloo         REINFORCE, leave-one-out baseline, no off-policy correction      (Ahmadian et al., arXiv 2402.14740)
    prox_rloo    the same with a clipped importance ratio of whole responses, as TRL's RLOOTrainer has it
    dr_grpo      mean baseline, clipped importance ratio of each token            (Liu et al., arXiv 2503.20783)
    online_dpo   the best response against the worst one                          (Guo et al., arXiv 2402.04792)

The reward of both RLOO forms is r - beta * (log p_behavior - log p_ref); Dr. GRPO adds beta * KL by token. Where TRL
has the objective, the loss is TRL's (its Dr. GRPO divides by the length limit, too: a constant, which AdamW ignores).

    p            the policy that is trained                 policy      [B, K, T]
    p_behavior   the policy that sampled                    behavior    [B, K, T]
    p_ref        the reference policy                       reference   [B, K, T]

B prompts, K responses to a prompt, T tokens of the longest response. `is_token` is False behind a response's end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tba.batch import Draw

MAX_LOG_RATIO = 20.0  # nats: a larger ratio counts as this one; the square of its exp is finite in float32
CLIP = 0.2  # importance ratios count between 1 - CLIP and 1 + CLIP, as in TRL and PPO


@dataclass(frozen=True)
class Terms:
    """The inputs of a loss."""

    policy: Tensor  # [B, K, T] with gradient; like behavior and reference, 0 behind a response's end
    behavior: Tensor  # [B, K, T]
    reference: Tensor  # [B, K, T]
    is_token: Tensor  # [B, K, T]
    reward: Tensor  # [B, K]


def terms_of(draws: Sequence[Draw], policy_logprobs: list[Tensor]) -> Terms:
    """The inputs of a loss. policy_logprobs: for each prompt, its distinct responses' tokens, concatenated."""
    device = policy_logprobs[0].device
    policy = []
    for draw, flat in zip(draws, policy_logprobs, strict=True):
        of_response = flat.split([len(tokens) for tokens in draw.behavior_logprobs])
        policy += [of_response[place] for place in draw.slot]
    behavior, reference = (
        [torch.tensor(getattr(draw, name)[place], device=device) for draw in draws for place in draw.slot]
        for name in ("behavior_logprobs", "reference_logprobs")
    )
    B, T = len(draws), max(len(tokens) for tokens in policy)

    def padded(rows: list[Tensor]) -> Tensor:
        return torch.stack([F.pad(row, (0, T - len(row))) for row in rows]).view(B, -1, T)

    return Terms(
        padded(policy),
        padded(behavior),
        padded(reference),
        padded([torch.ones(len(row), dtype=torch.bool, device=device) for row in policy]),
        torch.tensor([draw.reward for draw in draws], device=device),
    )


def rloo_loss(terms: Terms, beta: float) -> Tensor:
    """REINFORCE with the mean of the other responses' rewards as baseline."""
    return -(leave_one_out(penalised_reward(terms, beta)) * terms.policy.sum(-1)).mean()


def prox_rloo_loss(terms: Terms, beta: float) -> Tensor:
    """RLOO's advantage times the clipped ratio of whole responses."""
    advantage = leave_one_out(penalised_reward(terms, beta))  # [B, K]
    return -_clipped((terms.policy - terms.behavior).sum(-1), advantage).mean()


def dr_grpo_loss(terms: Terms, beta: float) -> Tensor:
    """The advantage times the clipped ratio of each token, summed over tokens, mean over responses."""
    advantage = (terms.reward - terms.reward.mean(1, keepdim=True)).unsqueeze(-1)  # [B, K, 1]
    gap = (terms.reference - terms.policy).clamp(max=MAX_LOG_RATIO)
    kl = gap.exp() - gap - 1  # the estimate that is never negative, [B, K, T]
    per_token = beta * kl - _clipped(terms.policy - terms.behavior, advantage)
    return torch.where(terms.is_token, per_token, 0.0).sum(-1).mean()


def online_dpo_loss(terms: Terms, beta: float) -> Tensor:
    """DPO on the best and the worst response to each prompt; 0 for prompts whose responses have equal rewards."""
    margin = beta * (terms.policy - terms.reference).sum(-1)  # [B, K]
    best, worst = terms.reward.argmax(1, keepdim=True), terms.reward.argmin(1, keepdim=True)  # [B, 1]
    differs = (terms.reward.gather(1, best) > terms.reward.gather(1, worst)).float()
    return -(F.logsigmoid(margin.gather(1, best) - margin.gather(1, worst)) * differs).mean()


LOSSES: dict[str, Callable[[Terms, float], Tensor]] = {
    "dr_grpo": dr_grpo_loss,
    "online_dpo": online_dpo_loss,
    "prox_rloo": prox_rloo_loss,
    "rloo": rloo_loss,
}


def penalised_reward(terms: Terms, beta: float) -> Tensor:
    """The reward less beta times the log-ratio of behaviour and reference, [B, K]."""
    return terms.reward - beta * (terms.behavior - terms.reference).sum(-1)


def leave_one_out(reward: Tensor) -> Tensor:
    """Each response's reward less the mean of the others', [B, K]."""
    K = reward.shape[1]
    return (reward - reward.mean(1, keepdim=True)) * K / (K - 1)


def _clipped(log_ratio: Tensor, advantage: Tensor) -> Tensor:
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    return torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
