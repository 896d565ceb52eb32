"""A testbed whose training runs take seconds: a small policy learns to add, from samples of an enforced age.

Step t trains on B prompts x K responses. The policy of step max(0, t - 1 - lag) samples them, without replay, unless
another `Experience` is given. The objectives are the Trainer's own (tba.objective, tba.baselines), as are schedule,
optimizer and clipping; sampling and scoring are written for this one small policy.

The policy is a transformer of 27,000 parameters whose tokens are characters. It writes the last digit of a sum first.
Its pretraining uses answers of which most forget a carry, so two fifths of its answers to held-out sums are correct.
After supervised training on correct answers alone it answers nearly all. Pretraining and runs are seeded: on one
machine and one thread the same code gives the same runs.

Dimensions: B prompts, K responses to each, U <= B * K distinct ones, N responses of any prompts, P prompt tokens, T
response tokens at most, V characters, D width, H heads.
"""

import copy
import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tba import baselines, schedule
from tba.config import TrainSettings
from tba.objective import residual, taper, trajectory_balance_loss
from tba.testbed_task import CHARACTERS, END, NUM_TRAIN, REWARDS, P, T, is_token, sums

B, K = 16, 8  # unless an Experience has others
WIDTH, LAYERS, HEADS = 32, 2, 4
# Shares in pretraining of the right answer; of answers that forget the carry to the tens, to the hundreds, and both;
# and of numbers that are 1 to 9 above the right answer.
ANSWER_SHARES = (0.05, 0.15, 0.15, 0.64, *9 * (0.01 / 9,))
PRETRAINING_STEPS, PRETRAINING_RATE, SUMS_PER_STEP = 2400, 3e-3, 128


class Block(nn.Module):
    """Pre-norm attention and MLP. Also returns keys and values, for the tokens that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None):
        """x: [N, L, D]; past: keys and values [N, H, earlier, D / H] of what is before x, which is then one token."""
        N, L, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(N, L, 3, HEADS, -1).permute(2, 0, 3, 1, 4)  # [N, H, L, D / H]
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(attended.transpose(1, 2).reshape(N, L, WIDTH))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)))), (k, v)


class Policy(nn.Module):
    """The small policy."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(P + T, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, x: Tensor, start: int = 0, past: list | None = None):
        """Tokens [N, L] from place `start` on, to logits [N, L, V] and each layer's keys and values."""
        hidden, new = self.hidden(x, start, past)
        return self.head(hidden), new

    def hidden(self, x: Tensor, start: int = 0, past: list | None = None):
        """As `forward`, but the states [N, L, D] that the output layer gets."""
        hidden, new = self.token(x) + self.place.weight[start : start + x.shape[1]], []
        for number, block in enumerate(self.blocks):
            hidden, kept = block(hidden, past[number] if past else None)
            new.append(kept)
        return self.norm(hidden), new


class LogPartition(nn.Module):
    """log Z of a prompt, learned (arXiv 2201.13259): linear in the state at its end, to which no gradient goes."""

    def __init__(self, first_guess: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.constant_(self.linear.bias, first_guess)

    def forward(self, policy: Policy, prompts: Tensor) -> Tensor:
        """[B, P] to [B] nats."""
        with torch.no_grad():
            states, _ = policy.hidden(prompts)
        return self.linear(states[:, -1]).squeeze(-1)


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor, num_samples: int, generator: torch.Generator | None = None):
    """Responses to prompts [n, P], and log-probabilities: both [n * num_samples, T]. Greedy without a generator."""
    logits, kept = policy(prompts)
    logprobs = F.log_softmax(logits[:, -1], -1).repeat_interleave(num_samples, 0)
    past = [tuple(part.repeat_interleave(num_samples, 0) for part in layer) for layer in kept]
    tokens, chosen = [], []
    for place in range(T):
        token = logprobs.exp().multinomial(1, generator=generator) if generator else logprobs.argmax(-1, keepdim=True)
        tokens.append(token)
        chosen.append(logprobs.gather(1, token))
        if place < T - 1:
            logits, past = policy(token, P + place, past)
            logprobs = F.log_softmax(logits[:, -1], -1)
    return torch.cat(tokens, 1), torch.cat(chosen, 1)


def score(policy: Policy, prompts: Tensor, responses: Tensor) -> Tensor:
    """Log-probability of each token of a response to the prompt at its place: [U, T], of [U, P] and [U, T]."""
    logits, _ = policy(torch.cat([prompts, responses[:, :-1]], 1))
    logprobs = F.log_softmax(logits[:, P - 1 :], -1)  # [U, T, V]
    return logprobs.gather(2, responses.unsqueeze(2)).squeeze(2)


def accuracy(policy: Policy, reward: str = "exact") -> float:
    """Share of held-out sums whose greedy response has the whole reward."""
    numbers = sums().heldout
    responses, _ = sample(policy, sums().prompts[numbers], 1)
    return (REWARDS[reward](responses, numbers) == 1).float().mean().item()


def pretraining_version() -> str:
    """Eight digits that change with the settings of the first policies' pretraining."""
    settings = repr((ANSWER_SHARES, PRETRAINING_STEPS, PRETRAINING_RATE, SUMS_PER_STEP))
    return hashlib.sha256(settings.encode()).hexdigest()[:8]


def first_policy_file(folder: Path, seed: int) -> Path:
    return folder / f"first_policy_{pretraining_version()}_{seed}.safetensors"


def first_policy(folder: Path, seed: int) -> Policy:
    """The first policy of a seed's runs: read from a file in `folder`, or trained in half a minute and written there.

    Several processes may ask for it at once.
    """
    policy, file = Policy(), first_policy_file(folder, seed)
    if file.exists():
        policy.load_state_dict(load_file(file))
        return policy
    policy = pretraining(ANSWER_SHARES, seed, PRETRAINING_STEPS)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        save_file(policy.state_dict(), written := Path(unfinished) / file.name)
        written.replace(file)
    return policy


def pretraining(answer_shares: tuple[float, ...], seed: int, steps: int) -> Policy:
    """Supervised training from scratch, on answers of each kind by its share.

    It has a fixed length: where an accuracy is reached first, policies of different seeds differ in what they learn.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), PRETRAINING_RATE, weight_decay=0.0, fused=True)
    for step in range(steps):
        numbers = sums().train[torch.randint(NUM_TRAIN, (SUMS_PER_STEP,), generator=generator)]
        kinds = torch.tensor(answer_shares).multinomial(SUMS_PER_STEP, replacement=True, generator=generator)
        answers = sums().answers[kinds, numbers]
        logprobs = score(policy, sums().prompts[numbers], answers)
        optimizer.param_groups[0]["lr"] = PRETRAINING_RATE * min(1, (step + 1) / 50) * (1 - step / steps)
        optimizer.zero_grad()
        (-(logprobs * is_token(answers)).sum() / SUMS_PER_STEP).backward()
        optimizer.step()
    return policy


@dataclass(frozen=True)
class Samples:
    """Responses to B prompts, K to each, prompt by prompt."""

    numbers: Tensor  # [B] of sums
    responses: Tensor  # [B * K, T]; END behind a response's end
    behavior: Tensor  # [B * K, T] log-probabilities when sampled
    reward: Tensor  # [B * K]


# What a step trains on, from the policy that samples, the step's number and the run's random numbers.
Experience: TypeAlias = Callable[[Policy, int, torch.Generator], Samples]


def sample_sums(
    policy: Policy, num_prompts: int, num_samples: int, generator: torch.Generator, reward: str = "exact"
) -> Samples:
    """Responses to that many sums, drawn at random with replacement."""
    numbers = sums().train[torch.randint(NUM_TRAIN, (num_prompts,), generator=generator)]
    responses, behavior = sample(policy, sums().prompts[numbers], num_samples, generator)
    responses = responses.where(is_token(responses), END)
    return Samples(numbers, responses, behavior, REWARDS[reward](responses, numbers.repeat_interleave(num_samples)))


def newest(policy: Policy, step: int, generator: torch.Generator) -> Samples:
    """The Experience without replay."""
    return sample_sums(policy, B, K, generator)


@dataclass(frozen=True)
class Variant:
    """What a run of the testbed has beside a run's settings."""

    reward: str = "exact"  # of REWARDS; the experience's
    # Step size of a learned log Z, as a multiple of the policy's; None: log Z is estimated from the K responses.
    log_z_rate: float | None = None


@dataclass(frozen=True)
class Trained:
    """The result of a run."""

    accuracy: float
    # Of K responses that the last policy samples to a held-out prompt, at temperature 1.
    num_distinct: float
    num_distinct_right: float  # with the whole reward
    curve: list[float]  # mean reward of each step's batch


def train(
    first: Policy,
    settings: TrainSettings,
    lag: int,
    seed: int,
    experience: Experience = newest,
    variant: Variant = Variant(),
) -> Trained:
    """One run of `settings.steps` steps with responses of the policy `lag` steps before."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference, behavior = (copy.deepcopy(first) for _ in range(3))
    log_z = LogPartition(accuracy(first, reward=variant.reward) / settings.beta) if variant.log_z_rate else None
    optimizer = _optimizer(policy, log_z, settings, variant.log_z_rate)
    earlier, curve = [_weights(policy)], []  # of the last lag + 1 policies, the oldest first
    for step in range(1, settings.steps + 1):
        with torch.no_grad():
            torch._foreach_copy_(list(behavior.parameters()), earlier[0])
        samples = experience(behavior, step, generator)
        terms, beta = _terms(policy, reference, samples), schedule.beta(settings, step)
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(settings, step) * group["times"]
        optimizer.zero_grad()
        _loss(terms, settings, beta, log_z and log_z(policy, sums().prompts[samples.numbers])).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), settings.gradient_clip)
        optimizer.step()
        if settings.reference_reset_interval and step % settings.reference_reset_interval == 0:
            reference = copy.deepcopy(policy)
        earlier = [*earlier, _weights(policy)][-lag - 1 :]
        curve.append(terms.reward.mean().item())
    return Trained(accuracy(policy, reward=variant.reward), *_num_distinct(policy, variant.reward), curve)


def _optimizer(
    policy: Policy, log_z: LogPartition | None, settings: TrainSettings, log_z_rate: float | None
) -> torch.optim.Optimizer:
    """Each group's `times` is its step size as a multiple of the policy's."""
    groups = [{"params": policy.parameters(), "times": 1}]
    if log_z is not None:
        groups.append({"params": log_z.parameters(), "times": log_z_rate, "weight_decay": 0.0})
    betas = (settings.adam_beta1, settings.adam_beta2)
    return torch.optim.AdamW(groups, betas=betas, weight_decay=settings.weight_decay, fused=True)


def _num_distinct(policy: Policy, reward: str, num_prompts: int = 512) -> tuple[float, float]:
    numbers = sums().heldout[:num_prompts]
    responses, _ = sample(policy, sums().prompts[numbers], K, torch.Generator().manual_seed(0))
    responses = responses.where(is_token(responses), END)
    _, slot = _distinct(_with_prompt(responses, num_prompts))
    right = REWARDS[reward](responses[slot], numbers[slot // K]) == 1
    return len(slot) / num_prompts, right.sum().item() / num_prompts


def _weights(policy: Policy) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters()]


def _terms(policy: Policy, reference: Policy, samples: Samples) -> baselines.Terms:
    num_prompts = len(samples.numbers)
    of_prompt = torch.arange(num_prompts).repeat_interleave(len(samples.responses) // num_prompts)
    place, slot = _distinct(_with_prompt(samples.responses, num_prompts))  # each response is computed once
    distinct = sums().prompts[samples.numbers[of_prompt[slot]]], samples.responses[slot]
    with torch.no_grad():
        by_reference = score(reference, *distinct)[place]
    by_policy, counts = score(policy, *distinct)[place], is_token(samples.responses)
    of_responses = (
        logprobs.where(counts, 0.0).view(num_prompts, -1, T) for logprobs in (by_policy, samples.behavior, by_reference)
    )
    of_prompts = (num_prompts, -1)
    return baselines.Terms(*of_responses, counts.view(*of_prompts, T), samples.reward.view(of_prompts))


def _with_prompt(responses: Tensor, num_prompts: int) -> Tensor:
    """Responses [B * K, T] behind the place of their prompt: [B * K, 1 + T]."""
    of_prompt = torch.arange(num_prompts).repeat_interleave(len(responses) // num_prompts)
    return torch.cat([of_prompt.unsqueeze(1), responses], 1)


def _distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Index of each row among the U distinct rows [N], and the place of each of these [U]. rows: small numbers."""
    codes = (rows * (rows.max().item() + 1) ** torch.arange(rows.shape[1])).sum(1)
    distinct, place = codes.unique(return_inverse=True)
    slot = torch.empty_like(distinct).scatter_(0, place, torch.arange(len(rows)))
    return place, slot


def _loss(terms: baselines.Terms, settings: TrainSettings, beta: float, log_z: Tensor | None) -> Tensor:
    """log_z: [B] nats, learned, with gradient; None: estimated from the K responses."""
    if not settings.is_trajectory_balance:
        return baselines.LOSSES[settings.objective](terms, beta)
    policy, behavior, reference = (logprobs.sum(-1) for logprobs in (terms.policy, terms.behavior, terms.reference))
    if log_z is not None:
        return _learned_loss(policy, behavior, log_z.unsqueeze(1) - reference - terms.reward / beta, settings, beta)
    weight = None
    if settings.residual_weight == "tapered":
        weight = taper(residual(policy, reference, terms.reward, beta), policy, behavior)
    return trajectory_balance_loss(policy, reference, terms.reward, beta, weight)


def _learned_loss(policy: Tensor, behavior: Tensor, rest: Tensor, settings: TrainSettings, beta: float) -> Tensor:
    """trajectory_balance_loss with a log Z that is learned. rest: the residuals without `policy`, [B, K] nats."""
    error = policy + rest
    weight = taper(error, policy, behavior) if settings.residual_weight == "tapered" else torch.ones_like(error)
    return beta / 2 * (weight * error.square()).mean()
