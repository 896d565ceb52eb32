"""Trajectory Balance in VarGrad form (arXiv 2503.18929, section 3 and App. A).

For a prompt x with K responses y_i, and log-probabilities summed over response tokens:

    log Z(x)   = mean_i [ log p_ref(y_i|x) + r(x, y_i) / beta - log p(y_i|x) ]          no gradient   (eq. 4)
    residual_i = log Z(x) + log p(y_i|x) - log p_ref(y_i|x) - r(x, y_i) / beta
    loss       = mean over x and i of (beta^2 / 2) * residual_i^2                                     (eq. 5, scaled)

    p      the policy that is trained         policy_logprob     [B, K]
    p_ref  the reference policy               reference_logprob  [B, K]
    r      the reward                         reward             [B, K]
    beta   the KL coefficient
    B, K   prompts, responses to a prompt

The loss is 0 exactly at p proportional to p_ref * exp(r / beta), whatever policy sampled the responses: that is why
replay is allowed. The residual is -A / beta, with A the advantage (mean baseline) of the reward r - beta * (log p -
log p_ref): on-policy the gradient is beta times REINFORCE's. Without the factor beta^2 / 2 it would be 2 / beta
times it, and beta anneals over orders of magnitude.
"""

import math

from torch import Tensor


def trajectory_balance_loss(policy_logprob: Tensor, reference_logprob: Tensor, reward: Tensor, beta: float) -> Tensor:
    """The loss: a scalar, differentiable in `policy_logprob` only.

    Args: three float tensors [B, K] (log-probabilities in nats, summed over response tokens); beta > 0.
    Raises: ValueError: shapes differ or are not [B, K], K < 2, or beta <= 0.
    """
    error = residual(policy_logprob, reference_logprob, reward, beta)  # [B, K]
    return beta**2 / 2 * error.square().mean()


def residual(policy_logprob: Tensor, reference_logprob: Tensor, reward: Tensor, beta: float) -> Tensor:
    """How far each response is from balance, [B, K] in nats; differentiable in `policy_logprob` only."""
    log_z = log_partition(policy_logprob, reference_logprob, reward, beta).unsqueeze(1)  # [B, 1]
    return log_z + policy_logprob - reference_logprob.detach() - reward.detach() / beta


def log_partition(policy_logprob: Tensor, reference_logprob: Tensor, reward: Tensor, beta: float) -> Tensor:
    """VarGrad's estimate of log Z(x), [B] in nats; no gradient."""
    _check(policy_logprob, reference_logprob, reward, beta)
    return (reference_logprob + reward / beta - policy_logprob).detach().mean(dim=1)


def _check(policy_logprob: Tensor, reference_logprob: Tensor, reward: Tensor, beta: float) -> None:
    shape = policy_logprob.shape
    if len(shape) != 2 or shape[1] < 2 or not shape == reference_logprob.shape == reward.shape:
        raise ValueError(
            f"trajectory balance: got policy_logprob {list(shape)}, reference_logprob {list(reference_logprob.shape)}, "
            f"reward {list(reward.shape)}; all three are [B, K], B prompts by K >= 2 responses"
        )
    if not 0 < beta < math.inf:
        raise ValueError(f"trajectory balance: got beta={beta}; the KL coefficient is greater than 0")
