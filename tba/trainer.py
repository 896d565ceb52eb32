"""The Trainer: steps the policy with the Trajectory Balance loss on batches drawn from the replay buffer.

Before: flows/trainer/experience.py makes a batch; after: flows/trainer/outbox.py records it and publishes the policy.
tba/training_loop.py has the loop around the step.

    produces      a policy every k steps
    consumes      batches: B prompts, K responses to each, sampled by any policy
    waits for     the buffer's first `min_size` trajectories; later only if the run limits rate or age of draws
    unblocks      the Searchers' first round; later rounds only in a synchronous run

Dimensions as in tba/batch.py.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba import baselines, lora, schedule
from tba.batch import Draw, Metrics, passes
from tba.config import TrainSettings
from tba.logprobs import load_policy, response_logprobs, sequence_logprobs
from tba.objective import log_partition, residual, taper, trajectory_balance_loss
from tba.precision import to_bfloat16
from tba.saved_state import SavedState, write_state
from tba.shared_prefix import Group
from tba.weights import as_in_a_checkpoint

# A step whose gradient is not finite is skipped and counted. After so many in a row the run ends, because the policy
# does not recover.
MAX_SKIPPED_IN_A_ROW = 10
NOTHING = [Group([0], [[0]])]  # the group that an empty pass scores

Result = TypeVar("Result")


class Trainer:
    """Policy, optimizer and training step. Master weights are float32; the learning rate follows from the step."""

    # Of several processes, which tba/zero_trainer.py sets: a context in which sharded weights are whole, and whether
    # this is the process that keeps copies.
    _gathered: Callable[[list[Tensor]], AbstractContextManager] = nullcontext
    _is_first = True

    def __init__(self, model: str | Path, settings: TrainSettings, device: str | None = None, seed: int = 0) -> None:
        """`device`: of the model; None: not moved, so that ZeRO-3 can shard it. `seed`: of the adapters."""
        self.settings = settings
        self.step = 0  # policy steps done
        self._skipped_in_a_row = 0
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="copier")
        self._copies: list[Future] = []
        # DeepSpeed was not tried with weights of two types.
        dtype = lora.dtype_of_weights(model) if settings.lora_rank and device else torch.float32
        self._policy = load_policy(model, dtype, settings.gradient_checkpointing)
        if device:
            self._policy.to(device)
        if settings.lora_rank:
            lora.add(self._policy, settings.lora_rank, seed)
        self._publishes_adapters = lora.can_publish_adapters_alone(self._policy, model)
        self._reference: PreTrainedModel | None = None  # None: stored log-probabilities are used, until a reset
        self._trained = {name: p for name, p in self._policy.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._trained.values(),
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        if device:
            self._allocate_moments()

    def _allocate_moments(self) -> None:
        """AdamW's state before the first step, as torch makes it in that step.

        Memory that stays is allocated before activations. Among them it would break up the memory that they free, and
        the next activations would need new memory.
        """
        for parameter in self._trained.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _allocate_gradient(self, num_passes: int) -> None:
        """For several passes: before the activations, as the moments. A single pass makes its gradient itself, but for
        the output layer's, to which input embeddings add when they are the same weight."""
        output = self._policy.get_output_embeddings().weight
        for parameter in self._trained.values():
            if num_passes > 1 or parameter is output:
                parameter.grad = torch.zeros_like(parameter)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return self._policy.config.get_text_config().vocab_size

    def train_step(self, draws: Sequence[Draw]) -> Metrics:
        """Trains one policy step. Returns its metrics.

        Raises: RuntimeError: the gradient was not finite in `MAX_SKIPPED_IN_A_ROW` consecutive steps.
        """
        started = time.monotonic()
        step = self.step + 1
        learning_rate, beta = schedule.learning_rate(self.settings, step), schedule.beta(self.settings, step)
        totals = self._gradient(draws, len(draws), beta)
        waited_s = self._await_copies()
        norm = self._apply_gradient(learning_rate)
        skipped = not math.isfinite(norm)
        self.step = step
        if self.settings.reference_reset_interval and step % self.settings.reference_reset_interval == 0:
            self._reset_reference()
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise RuntimeError(
                f"training: the gradient was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row, to step {self.step}; "
                "the policy has not changed in them. Start another run with a lower train.learning_rate or a "
                "higher train.beta; with --warm-start it begins with this run's trajectories."
            )
        return (
            {"log_z_mean": None, "residual_abs_mean": None, "tapered_share": None}  # baselines have no residual
            | _with_off_policy_metrics(totals)
            | {
                "gradient_norm": norm,
                "learning_rate": learning_rate,
                "beta": beta,
                "skipped": skipped,
                "step_s": time.monotonic() - started - waited_s,
                "copy_wait_s": waited_s,
                "num_response_tokens": sum(len(r) for draw in draws for r in draw.group.responses),
                "num_unique": sum(len(draw.group.responses) for draw in draws),
            }
        )

    def start_copy(self, read: Callable[[], Result]) -> "Future[Result]":
        """Runs `read`, which copies policy or optimizer, in another thread while the next step computes its gradient.

        That step waits for it before it changes them; `copy_wait_s` of its metrics has the seconds. On a GPU the copy
        and the gradient take turns.
        """
        self._copies = [each for each in self._copies if not each.done()]  # a finished one keeps its copy in memory
        self._copies.append(self._copier.submit(read))
        return self._copies[-1]

    def _await_copies(self) -> float:
        """Waits for the copies that `start_copy` began. Returns the seconds that it waited."""
        if not self._copies:
            return 0.0
        started = time.monotonic()
        wait(self._copies)
        self._copies.clear()
        return time.monotonic() - started

    def _gradient(
        self, draws: Sequence[Draw], num_draws: int, beta: float, at_least: tuple[int, int] = (0, 0)
    ) -> dict[str, float]:
        """Adds the gradient of these draws' part of the loss, a mean over `num_draws`. Returns their part of the
        metrics.

        A prompt whose responses exceed `micro_batch_tokens` is split. The mean over all K responses couples the parts,
        but only through numbers: log-probabilities without gradient give d loss / d log p of each response, and with
        these fixed the parts are independent. So the gradient is that of the whole group.

        `at_least`: numbers of passes without and with gradient; empty passes are added up to them.
        """
        whole, split = passes(draws, self.settings.micro_batch_tokens)
        self._allocate_gradient(len(whole) + sum(len(parts) for _, parts in split))
        totals: dict[str, float] = {}

        def loss_of(draws: Sequence[Draw], distinct: list[Tensor], parts: Sequence[Group]) -> Tensor:
            share = len(draws) / num_draws
            loss, metrics = self._loss(draws, distinct, self._reference_logprobs(draws, parts), beta)
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value * share
            return loss * share

        weighted = []  # parts, and d loss / d log p of their responses
        with torch.no_grad():
            fixed = [[self._score([part])[0] for part in parts] for _, parts in split]
            for _ in range(sum(len(parts) for _, parts in split), at_least[0]):
                self._score(NOTHING)
        for (draw, parts), of_parts in zip(split, fixed, strict=True):
            logprobs = torch.cat(of_parts).requires_grad_()  # [U]
            loss_of([draw], [logprobs], parts).backward()
            weighted += zip(parts, logprobs.grad.split([len(of_part) for of_part in of_parts]), strict=True)
        for micro_batch in whole:
            groups = [draw.group for draw in micro_batch]
            self._differentiate(loss_of(micro_batch, self._score(groups), groups))
        for part, weight in weighted:
            self._differentiate((self._score([part])[0] * weight).sum())
        for _ in range(len(whole) + len(weighted), at_least[1]):
            self._differentiate(self._score(NOTHING)[0].sum() * 0)
        return totals

    def _apply_gradient(self, learning_rate: float) -> float:
        """Clips the gradient and steps, unless it is not finite. Returns its norm before clipping."""
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = learning_rate
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), self.settings.gradient_clip).item()
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _loss(
        self, draws: Sequence[Draw], distinct: list[Tensor], reference_logprob: Tensor, beta: float
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of some draws, a mean over them, and its metrics.

        distinct: of each draw, the log-probabilities of its distinct responses [U]; for a baseline of all their tokens.
        reference_logprob: [B, K].
        """
        if not self.settings.is_trajectory_balance:
            return self._baseline_loss(draws, distinct, beta)
        device = distinct[0].device
        of_draws = zip(distinct, draws, strict=True)
        policy_logprob = torch.stack([logprobs[draw.slot] for logprobs, draw in of_draws])  # [B, K]
        behavior_logprob = _of_slots(draws, "behavior_logprobs").to(device)  # [B, K]
        reference_logprob = reference_logprob.to(device)  # [B, K]
        reward = torch.tensor([draw.reward for draw in draws], device=device)  # [B, K]
        reference_factor, reward_factor = schedule.tempering(self.settings, self.step + 1)
        terms = (policy_logprob, reference_logprob * reference_factor, reward * reward_factor, beta)
        with torch.no_grad():
            residuals = residual(*terms)  # [B, K]
            tapered = self.settings.residual_weight == "tapered"
            weight = taper(residuals, policy_logprob, behavior_logprob) if tapered else torch.ones_like(residuals)
        loss = trajectory_balance_loss(*terms, weight)
        with torch.no_grad():
            metrics = _ratio_metrics(draws, policy_logprob - behavior_logprob) | {
                "loss": loss.item(),
                "reward_mean": reward.mean().item(),
                "log_z_mean": log_partition(*terms).mean().item(),
                "residual_abs_mean": residuals.abs().mean().item(),
                "tapered_share": (weight < 1).float().mean().item(),
                "logprob_gap_mean": (policy_logprob - reference_logprob).mean().item(),
            }
        return loss, metrics

    def _baseline_loss(
        self, draws: Sequence[Draw], distinct: list[Tensor], beta: float
    ) -> tuple[Tensor, dict[str, float]]:
        terms = baselines.terms_of(draws, distinct)
        loss = baselines.LOSSES[self.settings.objective](terms, beta)
        policy = terms.policy.detach()
        metrics = _ratio_metrics(draws, (policy - terms.behavior).sum(-1)) | {
            "loss": loss.item(),
            "reward_mean": terms.reward.mean().item(),
            "logprob_gap_mean": (policy - terms.reference).sum(-1).mean().item(),
        }
        return loss, metrics

    def _score(self, groups: Sequence[Group]) -> list[Tensor]:
        """The policy's log-probability of each response: for each group [U]; for a baseline those of all tokens."""
        output_gradient = self._policy.get_output_embeddings().weight.grad  # None without gradient, or with ZeRO-3
        arguments = self._policy, groups, self.settings.temperature, output_gradient
        if not self.settings.is_trajectory_balance:
            return [torch.cat(of_group) for of_group in response_logprobs(*arguments)]
        return sequence_logprobs(*arguments)

    def _differentiate(self, loss: Tensor) -> None:
        loss.backward()

    def _reference_logprobs(self, draws: Sequence[Draw], parts: Sequence[Group]) -> Tensor:
        """[B, K]: the stored ones; after a reset of the reference, those of the policy that it was reset to."""
        if self._reference is None:
            return _of_slots(draws, "reference_logprobs")
        temperature = self.settings.temperature
        with torch.no_grad():
            if len(parts) == len(draws):
                of_parts = sequence_logprobs(self._reference, parts, temperature)
            else:  # one draw in several parts
                of_parts = [torch.cat([sequence_logprobs(self._reference, [part], temperature)[0] for part in parts])]
        return torch.stack([logprobs[draw.slot] for logprobs, draw in zip(of_parts, draws, strict=True)])

    def _reset_reference(self) -> None:
        """The current policy becomes the reference. Stored reference log-probabilities are not used after that."""
        if self._reference is None:
            self._reference = copy.deepcopy(self._policy).requires_grad_(False)
        with torch.no_grad():  # in place: two references at once may not fit
            torch._foreach_copy_(list(self._reference.parameters()), list(self._policy.parameters()))

    def weights(self, whole: bool = True) -> dict[str, Tensor]:
        """A copy of the policy's weights in bfloat16, as they are published, on the CPU; tied ones once.

        `whole`: False: if the policy can be published as its adapters alone, only these, in the type in which the
        Trainer multiplies by them.
        """
        tied, copies = set(self._policy.all_tied_weights_keys), {}
        if not whole and self._publishes_adapters:
            for name, tensor in lora.adapters(self._policy, self._gathered):
                if self._is_first:
                    copies[name] = tensor.to("cpu", copy=True)
            return copies
        for name, tensor in lora.merged(self._policy, self._gathered):
            if self._is_first and name not in tied:
                copies[name] = to_bfloat16(tensor.detach()).cpu()
        return as_in_a_checkpoint(self._policy, copies)

    @property
    def checkpoint_bytes(self) -> int:
        """Of what `save` writes: float32 weights and moments, and the reference after a reset."""
        # ds_numel: of a tensor whose shards ZeRO-3 spreads over processes
        numbers = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in self._trained.values())
        return 4 * numbers * (3 if self._reference is None else 4)

    def save(self, folder: Path) -> None:
        """Writes the state to resume from: weights, optimizer state, step (tba/saved_state.py)."""
        write_state(folder, self.step, self._state(), self._skipped_in_a_row)

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        of_reference = dict(self._reference.named_parameters()) if self._reference else {}
        for name, parameter in self._trained.items():
            yield f"policy.{name}", parameter
            for key, tensor in self._optimizer.state[parameter].items():
                yield f"{key}.{name}", tensor
            if of_reference:
                yield f"reference.{name}", of_reference[name]

    def load(self, folder: Path) -> None:
        """Restores the state that `save` wrote."""
        tensors = SavedState(folder)
        self._reference = None
        self._restore(tensors, "reference")  # through the policy, of which the reference is a copy
        if any(name.startswith("reference.") for name in tensors):
            self._reset_reference()
        self._restore(tensors, "policy")
        for name, parameter in self._trained.items():
            self._optimizer.state[parameter] = {
                key: tensors[f"{key}.{name}"].to(parameter.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{key}.{name}" in tensors  # none before the first step that was not skipped
            }
        self.step, self._skipped_in_a_row = tensors.step, tensors.skipped_in_a_row

    def _restore(self, tensors: SavedState, kind: str) -> None:
        with torch.no_grad():
            for name, parameter in self._trained.items():
                if f"{kind}.{name}" in tensors:
                    parameter.copy_(tensors[f"{kind}.{name}"])
                elif kind == "policy":
                    raise ValueError(f"the checkpoint has no weights {name}, so it is damaged or of another model")


def _of_slots(draws: Sequence[Draw], name: str) -> Tensor:
    """Log-probabilities as stored, summed over tokens: [B, K]."""
    sums = [[sum(tokens) for tokens in getattr(draw, name)] for draw in draws]
    return torch.tensor([[of_draw[place] for place in draw.slot] for of_draw, draw in zip(sums, draws, strict=True)])


def _ratio_metrics(draws: Sequence[Draw], log_ratio: Tensor) -> dict[str, float]:
    """Means over slots, for `_with_off_policy_metrics`. log_ratio: log p - log p_behavior of responses [B, K]."""
    ratio = log_ratio.clamp(-baselines.MAX_LOG_RATIO, baselines.MAX_LOG_RATIO).exp()
    length = torch.tensor([[len(draw.group.responses[place]) for place in draw.slot] for draw in draws])
    is_of_newest_policy = torch.tensor([[draw.is_of_newest_policy[place] for place in draw.slot] for draw in draws])
    disagreement = (log_ratio.cpu().abs() / length).where(is_of_newest_policy, 0.0)  # [B, K] nats a token
    return {
        "ratio_mean": ratio.mean().item(),
        "ratio_square_mean": ratio.square().mean().item(),
        "newest_policy_disagreement": disagreement.mean().item(),
        "newest_policy_slots": is_of_newest_policy.float().mean().item(),
    }


def _with_off_policy_metrics(totals: dict[str, float]) -> Metrics:
    """The metrics with `effective_sample_size` and `logprob_mismatch` in place of the four means of `_ratio_metrics`.

    The first is (mean ratio)^2 / mean ratio^2, the share of the batch that counts under importance weights (Kish). The
    second is the mean of |log ratio| a token over the slots that the batch's newest policy sampled.
    """
    of_ratios = ("ratio_mean", "ratio_square_mean", "newest_policy_disagreement", "newest_policy_slots")
    mean, square_mean, disagreement, newest_slots = map(totals.pop, of_ratios)
    return totals | {
        "effective_sample_size": mean**2 / square_mean,
        "logprob_mismatch": disagreement / newest_slots if newest_slots else None,
    }
