"""The objective against independent references.

- residual = -A / beta, with A the mean-baseline advantage of the KL-penalised reward (float64, 1e-9).
- On-policy its gradient is that of mean-baseline REINFORCE with KL-penalised reward, tapered or not.
- From uniform, stale, mixed and adversarial samples on an enumerable toy the tapered loss converges to p_ref *
  exp(r / beta) / Z; plain REINFORCE without importance weights does not, nor does a form whose minimum is elsewhere.
- The loss over all pairs of responses (contrastive balance) has the plain loss's gradient, but for a factor.
- The taper weighs what is to become less likely by min(1, p / p_behavior), and nothing else.
- The gradient does not depend on how prompts are split into micro-batches.
- Only policy_logprob gets a gradient; wrong shapes and beta <= 0 are refused.

python -m pytest tests/tba/test_objective.py
"""

import itertools
from collections.abc import Callable

import pytest
import torch

from tba.objective import log_partition, residual, taper, trajectory_balance_loss


def random_batch(B: int, K: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, reference = (-5 * torch.rand(B, K, generator=generator, dtype=torch.float64) for _ in range(2))
    return policy.requires_grad_(), reference, torch.rand(B, K, generator=generator, dtype=torch.float64)


def advantages(policy, reference, reward, beta):
    """Written out a response at a time: r - beta * log(p / p_ref), less its prompt's mean."""
    rows = []
    for p_row, ref_row, r_row in zip(policy.tolist(), reference.tolist(), reward.tolist(), strict=True):
        penalised = [r - beta * (p - ref) for p, ref, r in zip(p_row, ref_row, r_row, strict=True)]
        rows.append([value - sum(penalised) / len(penalised) for value in penalised])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.004, 0.1, 1.0])
def test_residual_is_minus_advantage_over_beta(beta):
    policy, reference, reward = random_batch(3, 5)
    expected = -advantages(policy, reference, reward, beta) / beta
    torch.testing.assert_close(residual(policy, reference, reward, beta), expected, rtol=0, atol=1e-9)


def test_the_loss_of_a_worked_example():
    # beta 1/2; r/beta = (2, 0); d = p - p_ref = (1, 0): log Z = mean(2 - 1, 0 - 0) = 1/2.
    # residuals 1/2 + 1 - 2 = -1/2 and 1/2 + 0 - 0 = 1/2; loss = (1/2 / 2) * mean(1/4, 1/4) = 1/16.
    policy, reference = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-2.0, -3.0]])
    reward = torch.tensor([[1.0, 0.0]])
    assert log_partition(policy, reference, reward, 0.5).tolist() == [0.5]
    assert trajectory_balance_loss(policy, reference, reward, 0.5).item() == pytest.approx(1 / 16)


def test_on_policy_the_gradient_is_reinforce_with_a_mean_baseline_and_a_kl_penalty():
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(0)
    reward, beta = torch.rand(6, dtype=torch.float64), 0.3
    samples = torch.multinomial(logits.detach().softmax(0), 64, replacement=True)
    logprob = logits.log_softmax(0)[samples]
    loss = trajectory_balance_loss(logprob[None], reference[samples][None], reward[samples][None], beta)
    (ours,) = torch.autograd.grad(loss, logits, retain_graph=True)

    # REINFORCE by its own formula: minus the mean of advantage * (one-hot(y) - p), where one-hot(y) - p is the gradient
    # of log softmax at y.
    p = logits.detach().softmax(0)
    penalised = (reward - beta * (p.log() - reference))[samples]
    advantage = penalised - penalised.mean()
    theirs = -((torch.eye(6, dtype=torch.float64)[samples] - p) * advantage[:, None]).mean(0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    tapered = tapered_loss(logprob[None], reference[samples][None], reward[samples][None], beta, logprob[None])
    torch.testing.assert_close(torch.autograd.grad(tapered, logits)[0], theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("K", [2, 8])
def test_the_loss_over_all_pairs_has_the_same_gradient_but_for_a_factor(K):
    """Contrastive balance needs no log Z: both responses of a pair have the same one. Summed pair by pair here."""
    beta, (policy, reference, reward) = 0.3, random_batch(3, K)
    pairs = list(itertools.combinations(range(K), 2))
    losses = []
    for p_row, ref_row, r_row in zip(policy, reference, reward, strict=True):
        imbalance = p_row - ref_row - r_row / beta  # [K]
        losses += [(imbalance[i] - imbalance[j]) ** 2 / len(pairs) for i, j in pairs]
    (of_pairs,) = torch.autograd.grad(beta / 2 * sum(losses) / len(policy), policy)
    (ours,) = torch.autograd.grad(trajectory_balance_loss(policy, reference, reward, beta), policy)
    torch.testing.assert_close(of_pairs, ours * 2 * K / (K - 1), rtol=1e-9, atol=1e-12)


def tapered_loss(policy, reference, reward, beta, behavior):
    """The loss as the Trainer computes it by default."""
    return trajectory_balance_loss(
        policy, reference, reward, beta, taper(residual(policy, reference, reward, beta), policy, behavior)
    )


def ratio_on_reward_loss(policy, reference, reward, beta, behavior):
    """Looks alike, and its minimum is elsewhere: the ratio weighs the reward in place of the squared residual."""
    ratio = (policy - behavior).detach().exp().clamp(max=1)
    return trajectory_balance_loss(policy, reference, reward * ratio, beta)


def test_the_taper_of_a_worked_example():
    # Residuals -1, 1, 1, 1; p / p_behavior = 1/4, 1/4, 4, 1: only the second response is pushed down and has left.
    log4 = torch.tensor(4.0).log().item()
    policy, behavior = torch.tensor([[-3.0, -3, -3, -3]]), torch.tensor([[log4 - 3, log4 - 3, -log4 - 3, -3]])
    weight = taper(torch.tensor([[-1.0, 1, 1, 1]]), policy.requires_grad_(), behavior)
    torch.testing.assert_close(weight, torch.tensor([[1.0, 0.25, 1, 1]]))
    assert not weight.requires_grad


class Toy:
    """All 64 sequences of three tokens out of four, under a tabular autoregressive policy."""

    def __init__(self) -> None:
        self.sequences = list(itertools.product(range(4), repeat=3))
        torch.manual_seed(1)
        self.reference = self.log_probabilities(self.random_tables(0.5))
        # Rugged: reward for sums divisible by three, and for ending as it began.
        self.reward = torch.tensor(
            [(sum(s) % 3 == 0) + 0.5 * (s[0] == s[2]) for s in self.sequences], dtype=torch.float64
        )
        self.beta = 0.5
        self.target = (self.reference + self.reward / self.beta).softmax(0)

    @staticmethod
    def random_tables(scale: float) -> list[torch.Tensor]:
        return [scale * torch.randn(4**n, 4, dtype=torch.float64) for n in range(3)]

    def log_probabilities(self, tables: list[torch.Tensor]) -> torch.Tensor:
        """[..., 64]: of each sequence. tables: [..., 4**n, 4] for n = 0, 1, 2."""
        return self.token_logprobs(tables).sum(0)

    def token_logprobs(self, tables: list[torch.Tensor]) -> torch.Tensor:
        """[3, ..., 64]: by place, the log-softmax of the row that the earlier tokens pick."""
        logs = [table.log_softmax(-1) for table in tables]
        a, b, c = torch.tensor(self.sequences).T
        return torch.stack([logs[0][..., 0, a], logs[1][..., a, b], logs[2][..., 4 * a + b, c]])

    def train(self, cases: list[tuple[Callable, str]], steps: int = 3000) -> list[float]:
        """Total variation between the target and policies trained on batches of 16 responses: one by each case's loss
        and samples, all C of them side by side.

        samples: "uniform"; "stale", of the policy 100 steps before; "mixed", each token of another policy: of 100
        steps before, of 50, and of now; "adversarial", of exp(-r / 2 beta), which prefers what the target avoids. None
        is the policy's or the target's distribution.
        """
        torch.manual_seed(2)
        tables = [table.expand(len(cases), -1, -1).clone().requires_grad_() for table in self.random_tables(0.1)]
        optimizer = torch.optim.Adam(tables, lr=0.03)
        earlier = []
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / steps)
            by_token = self.token_logprobs(tables)  # [3, C, 64]
            earlier = [*earlier, by_token.detach()][-100:]
            of_samples = {
                "uniform": torch.zeros(len(cases), 64).double().log_softmax(-1),
                "stale": earlier[0].sum(0),
                "mixed": earlier[0][0] + earlier[len(earlier) // 2][1] + earlier[-1][2],
                "adversarial": (-self.reward / self.beta / 2).log_softmax(0).expand(len(cases), -1),
            }  # [C, 64] each
            behavior = torch.stack([of_samples[samples][case] for case, (_, samples) in enumerate(cases)])
            drawn = torch.multinomial(behavior.exp(), 16, replacement=True)  # [C, 16]
            batches = zip(
                by_token.sum(0).gather(1, drawn)[:, None],
                self.reference[drawn][:, None],
                self.reward[drawn][:, None],
                behavior.gather(1, drawn)[:, None],
                strict=True,
            )  # of each case, [1, 16]
            losses = [
                loss_of(policy, reference, reward, self.beta, of_sample)
                for (loss_of, _), (policy, reference, reward, of_sample) in zip(cases, batches, strict=True)
            ]
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
        return ((self.log_probabilities(tables).exp() - self.target).abs().sum(-1) / 2).tolist()


def plain_loss(policy, reference, reward, beta, behavior):
    return trajectory_balance_loss(policy, reference, reward, beta)


def reinforce_loss(policy, reference, reward, beta, behavior):
    """Plain REINFORCE with a mean baseline. (With the KL penalty in its reward it has our gradient.)"""
    return -((reward - reward.mean(1, keepdim=True)) * policy).mean()


@pytest.mark.slow
def test_off_policy_samples_lead_to_the_target_distribution_by_this_loss_and_not_by_others():
    by_tapered = ["uniform", "stale", "mixed", "adversarial"]
    cases = [(tapered_loss, samples) for samples in by_tapered]
    cases += [(plain_loss, "uniform"), (reinforce_loss, "uniform"), (ratio_on_reward_loss, "uniform")]
    *tapered, plain, by_reinforce, by_ratio = Toy().train(cases)
    assert all(distance < 0.02 for distance in tapered), dict(zip(by_tapered, tapered, strict=True))
    assert plain < 0.02
    assert by_reinforce > 0.2 and by_ratio > 0.05


def test_the_target_has_no_loss_whatever_was_sampled():
    toy = Toy()
    loss = trajectory_balance_loss(toy.target.log()[None], toy.reference[None], toy.reward[None], toy.beta)
    assert loss.item() < 1e-24


def test_the_gradient_does_not_depend_on_the_micro_batches():
    policy, reference, reward = random_batch(6, 4)
    (whole,) = torch.autograd.grad(trajectory_balance_loss(policy, reference, reward, 0.1), policy)
    parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    split = sum(
        trajectory_balance_loss(policy[part], reference[part], reward[part], 0.1) * (part.stop - part.start) / 6
        for part in parts
    )
    torch.testing.assert_close(torch.autograd.grad(split, policy)[0], whole, rtol=0, atol=1e-15)


def test_the_gradient_is_the_advantage_whatever_beta():
    # With p = p_ref, A = r - mean r: beta is nowhere in the gradient.
    policy, _, reward = random_batch(2, 4)
    for beta in (0.004, 1.0):
        loss = trajectory_balance_loss(policy, policy.detach(), reward, beta)
        expected = -(reward - reward.mean(1, keepdim=True)) / 8
        torch.testing.assert_close(torch.autograd.grad(loss, policy)[0], expected, rtol=0, atol=1e-12)


def test_only_the_policy_gets_a_gradient():
    policy, reference, reward = (tensor.detach().requires_grad_() for tensor in random_batch(2, 3))
    trajectory_balance_loss(policy, reference, reward, 0.1).backward()
    assert policy.grad is not None and reference.grad is None and reward.grad is None


@pytest.mark.parametrize("shapes", [[(2, 3), (2, 3), (3, 2)], [(6,), (6,), (6,)], [(2, 1), (2, 1), (2, 1)]])
def test_wrong_shapes_are_refused(shapes):
    with pytest.raises(ValueError, match=r"all three are \[B, K\]"):
        trajectory_balance_loss(*(torch.zeros(shape) for shape in shapes), 0.1)


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan"), float("inf")])
def test_beta_is_positive(beta):
    with pytest.raises(ValueError, match="beta"):
        trajectory_balance_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), beta)
