"""Trajectory Balance in VarGrad form (arXiv 2503.18929, section 3 and App. A), with a tapered residual.

For a prompt x with K responses y_i, and log-probabilities summed over response tokens:

    log Z(x)   = mean_i [ log p_ref(y_i|x) + r(x, y_i) / beta - log p(y_i|x) ]          no gradient   (eq. 4)
    residual_i = log Z(x) + log p(y_i|x) - log p_ref(y_i|x) - r(x, y_i) / beta
    weight_i   = 1                                                where residual_i <= 0               (not in the paper)
                 min(1, p(y_i|x) / p_behavior(y_i|x))             where residual_i > 0, no gradient
    loss       = mean over x and i of (beta / 2) * weight_i * residual_i^2                            (eq. 5, scaled)

    p            the policy that is trained           policy_logprob     [B, K]
    p_behavior   the policy that sampled              behavior_logprob   [B, K]
    p_ref        the reference policy                 reference_logprob  [B, K]
    r            the reward                           reward             [B, K]
    beta         the KL coefficient
    B, K         prompts, responses to a prompt

The residual is -A / beta, with A the advantage (mean baseline) of the reward r - beta * (log p - log p_ref). So a
positive residual makes a response less likely. The paper's loss has weight 1: it lowers the probability of a
response at full strength long after the policy has stopped giving it, and overshoots in proportion to the age of the
samples and the step size. With the taper the weight falls with the response's probability under the policy.

The minimum does not move. It is p proportional to p_ref * exp(r / beta), whatever policy sampled the responses and
whatever the weights, as long as each is positive (docs/method.md has the proof): that is why replay is allowed.
On-policy each weight is 1, and the gradient is that of REINFORCE with a mean baseline and a KL penalty. The factor
beta / 2 makes it so; the plain square would be 2 / beta times as large, and beta anneals over orders of magnitude.
"""

import math

import torch
from torch import Tensor


def trajectory_balance_loss(
    policy_logprob: Tensor, reference_logprob: Tensor, reward: Tensor, beta: float, weight: Tensor | None = None
) -> Tensor:
    """The loss: a scalar, differentiable in `policy_logprob` only.

    Args: three float tensors [B, K] (log-probabilities in nats, summed over response tokens); beta > 0; weight [B, K],
        as `taper` returns it, or None: weight 1, as in the paper.
    Raises: ValueError: shapes differ or are not [B, K], K < 2, or beta <= 0.
    """
    residuals = residual(policy_logprob, reference_logprob, reward, beta)  # [B, K]
    squared = residuals.square() if weight is None else weight.detach() * residuals.square()
    return beta / 2 * squared.mean()


def residual(policy_logprob: Tensor, reference_logprob: Tensor, reward: Tensor, beta: float) -> Tensor:
    """The residual of each response, [B, K] in nats; differentiable in `policy_logprob` only."""
    log_z = log_partition(policy_logprob, reference_logprob, reward, beta).unsqueeze(1)  # [B, 1]
    return log_z + policy_logprob - reference_logprob.detach() - reward.detach() / beta


def taper(residuals: Tensor, policy_logprob: Tensor, behavior_logprob: Tensor) -> Tensor:
    """The weight of each squared residual, [B, K] between 0 and 1; no gradient.

    Args: residuals: [B, K]; policy_logprob, behavior_logprob: [B, K] in nats, summed over response tokens.
        The second is of the distribution that the response was drawn from, whatever its temperature, top-p or prompt.
    The asymmetry is that of TOPR (arXiv 2503.14286), there for REINFORCE.
    """
    ratio = (policy_logprob - behavior_logprob).detach().clamp(max=0).exp()  # min(1, p / p_behavior), [B, K]
    return torch.where(residuals.detach() > 0, ratio, 1.0)


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
