"""Trajectory Balance in VarGrad form (arXiv 2503.18929, eq. 4-5 and App. A)."""

from torch import Tensor


def log_partition(policy_logprob: Tensor, reference_logprob: Tensor, reward: Tensor, beta: float) -> Tensor:
    return (reference_logprob + reward / beta - policy_logprob).detach().mean(dim=1)


def residual(policy_logprob: Tensor, reference_logprob: Tensor, reward: Tensor, beta: float) -> Tensor:
    log_z = log_partition(policy_logprob, reference_logprob, reward, beta)
    return log_z.unsqueeze(1) + policy_logprob - reference_logprob - reward / beta


def trajectory_balance_loss(policy_logprob: Tensor, reference_logprob: Tensor, reward: Tensor, beta: float) -> Tensor:
    return beta**2 / 2 * residual(policy_logprob, reference_logprob, reward, beta).square().mean()
