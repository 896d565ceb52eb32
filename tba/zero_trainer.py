"""The Trainer on many devices, one process each; DeepSpeed ZeRO shards optimizer (1), gradients (2) and weights (3).

The first process draws batches and writes results; the others follow it. It distributes whole prompts, balanced by
tokens; the loss is the mean over all prompts. All processes run equally many passes, because ZeRO-3 gathers weights and
ZeRO-2 sums gradients in each pass, and all processes must take part. Clipping and the test for finite gradients use
the norm of the whole gradient, so all processes decide alike. A checkpoint has the same
files as one device's, and resumes on any number.

Numerics are those of one device (tba/precision.py), with torch's AdamW; only the order of sums differs.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tba import lora
from tba.batch import Draw, Metrics, passes
from tba.config import TrainSettings
from tba.logprobs import load_policy, sequence_logprobs
from tba.saved_state import SavedState, write_state
from tba.shared_prefix import Group
from tba.trainer import Result, Trainer

# While the first process waits for a batch, the others wait for it. The death of a process is noticed at once.
PATIENCE = timedelta(days=7)
STATES = ("exp_avg", "exp_avg_sq")  # of AdamW, beside its count of steps


def _everywhere(method: Callable) -> Callable:
    """A method that all processes run as soon as the first one calls it."""

    @functools.wraps(method)
    def call(self: "ShardedTrainer", *arguments, **named):
        self._from_first((method.__name__, arguments, named))
        return method(self, *arguments, **named)

    return call


class ShardedTrainer(Trainer):
    """A Trainer whose processes share the work. The first one is used like a Trainer, the others only `follow`.

    Torch's environment variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) identify the process.
    """

    def __init__(self, model: str | Path, settings: TrainSettings, deepspeed_config: Path, seed: int) -> None:
        """Raises: RuntimeError: DeepSpeed is not installed."""
        try:
            import deepspeed
        except ImportError as error:
            raise RuntimeError("train.processes > 1 needs DeepSpeed: pip install deepspeed") from error
        from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

        config = json.loads(Path(deepspeed_config).read_text()) | {"gradient_clipping": settings.gradient_clip}
        self._plugin = DeepSpeedPlugin(hf_ds_config=config)
        accelerator = Accelerator(
            deepspeed_plugin=self._plugin,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
        )
        super().__init__(model, settings, seed=seed)
        # By the CPU: while the first process waits for a batch, NCCL would keep the others' GPUs busy with waiting.
        self._messages = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._folder, self._is_first, self._num_processes = model, dist.get_rank() == 0, dist.get_world_size()
        self._gathered = deepspeed.zero.GatheredParameters
        self._engine, _ = accelerator.prepare(_Scorer(self._policy, settings.temperature), self._optimizer)
        self._optimizer = self._engine.optimizer

    def follow(self) -> None:
        """Repeats the first process's calls until it closes."""
        while (call := self._from_first()) != "close":
            name, arguments, named = call
            getattr(type(self), name).__wrapped__(self, *arguments, **named)

    def close(self) -> None:
        """Lets the other processes end."""
        self._from_first("close")

    def _from_first(self, value: object = None) -> object:
        """The value that the first process passed, in all processes."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._messages)
        return values[0]

    @_everywhere
    def train_step(self, draws: Sequence[Draw]) -> Metrics:
        return super().train_step(draws)

    def _gradient(
        self, draws: Sequence[Draw], num_draws: int, beta: float, at_least: tuple[int, int] = (0, 0)
    ) -> dict[str, float]:
        by_process = distribute(draws, self._num_processes)
        needed = [_num_passes(own, self.settings.micro_batch_tokens) for own in by_process]
        at_least = tuple(map(max, zip(*needed, strict=True)))
        own = super()._gradient(by_process[dist.get_rank()], num_draws, beta, at_least)
        of_all = [None] * self._num_processes
        dist.all_gather_object(of_all, own, group=self._messages)
        return {name: sum(of.get(name, 0.0) for of in of_all) for name in {name for of in of_all for name in of}}

    def _allocate_gradient(self, num_passes: int) -> None:
        """DeepSpeed does."""

    def _score(self, groups: Sequence[Group]) -> list[Tensor]:
        return list(self._engine(groups).split([len(group.responses) for group in groups]))

    def _differentiate(self, loss: Tensor) -> None:
        # The engine takes the mean over processes. The loss is a mean over draws, so it needs the sum.
        self._engine.backward(loss * self._num_processes, scale_wrt_gas=False)

    def _apply_gradient(self, learning_rate: float) -> float:
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = learning_rate
        self._engine.step()  # clips; if the norm is not finite, it does not step, and reports infinity
        return float(self._engine.get_global_grad_norm())

    def start_copy(self, read: Callable[[], Result]) -> "Future[Result]":
        """At once, because all processes gather the weights together."""
        done: Future[Result] = Future()
        done.set_result(read())
        return done

    weights = _everywhere(Trainer.weights)

    @_everywhere
    def save(self, folder: Path) -> None:
        state = self._state()
        try:
            if self._is_first:
                on_cpu = ((name, tensor.to("cpu", copy=True)) for name, tensor in state)
                write_state(folder, self.step, on_cpu, self._skipped_in_a_row)
        finally:  # all processes gather every tensor, also where the first one's disk is full
            for _ in state:
                pass

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        of_reference = dict(self._reference.named_parameters()) if self._reference else {}
        for name, parameter in self._trained.items():
            yield f"policy.{name}", self._whole(parameter)
            if of_reference:
                yield f"reference.{name}", of_reference[name]
            if self._steps_taken():
                yield f"step.{name}", self._steps_taken()
                for key in STATES:
                    yield f"{key}.{name}", self._whole(parameter, key)

    @_everywhere
    def load(self, folder: Path) -> None:
        saved = SavedState(folder) if self._is_first else None
        names = set(self._from_first(list(saved) if self._is_first else None))
        device = self._policy.device
        self._reference = None

        def read(name: str, like: Tensor) -> Tensor:
            shape = getattr(like, "ds_shape", like.shape)
            tensor = saved[name].to(device) if self._is_first else torch.empty(shape, device=device)
            dist.broadcast(tensor, src=0)
            return tensor

        if any(name.startswith("step.") for name in names):
            step = next(name for name in sorted(names) if name.startswith("step."))
            for flat in self._shards():
                state = self._optimizer.state[flat]
                for key in STATES:  # those that are there stay: DeepSpeed has linked them to weights, once
                    state.setdefault(key, torch.zeros_like(flat))
                state["step"] = read(step, torch.zeros(()))
            if hasattr(self._optimizer, "_lazy_init_hp_params_optimizer_state"):  # ZeRO-1 and 2: links them to weights
                self._optimizer._lazy_init_hp_params_optimizer_state()
        if any(name.startswith("reference.") for name in names):
            self._reference = self._new_reference()
            for name, parameter in self._reference.named_parameters():
                if name in self._trained:
                    parameter.data.copy_(read(f"reference.{name}", parameter))
        for name, parameter in self._trained.items():
            self._set_whole(parameter, read(f"policy.{name}", parameter))
            for key in STATES:
                if f"{key}.{name}" in names:
                    self._set_whole(parameter, read(f"{key}.{name}", parameter), key)
        counts = (saved.step, saved.skipped_in_a_row) if self._is_first else None
        self.step, self._skipped_in_a_row = self._from_first(counts)

    def _reset_reference(self) -> None:
        """Each process holds the reference whole: it needs no optimizer state and no gradient."""
        if self._reference is None:
            self._reference = self._new_reference()
        for name, parameter in self._reference.named_parameters():  # in place: two references at once may not fit
            if name in self._trained:
                parameter.data.copy_(self._whole(self._trained[name]))

    def _new_reference(self) -> torch.nn.Module:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # with it, ZeRO-3 shards every model that is loaded
        reference = load_policy(self._folder)
        self._plugin.set_deepspeed_weakref()
        if self.settings.lora_rank:
            lora.add(reference, self.settings.lora_rank, seed=0)  # the policy's are copied into them
        return reference.to(self._policy.device).requires_grad_(False)

    def _shards(self) -> list[Tensor]:
        """The flat tensors that this process' optimizer steps."""
        if hasattr(self._optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3: between steps its groups are empty
            return self._optimizer.fp32_partitioned_groups_flat
        return [flat for group in self._optimizer.optimizer.param_groups for flat in group["params"]]

    def _steps_taken(self) -> Tensor | None:
        """AdamW's count of steps, without skipped ones; None before the first."""
        return next((self._optimizer.state[flat].get("step") for flat in self._shards()), None)

    @staticmethod
    def _whole(parameter: Tensor, state: str | None = None) -> Tensor:
        """The float32 master, or one of the optimizer's states, gathered from all processes."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, state) if state else safe_get_full_fp32_param(parameter)

    def _set_whole(self, parameter: Tensor, value: Tensor, state: str | None = None) -> None:
        from deepspeed import utils

        if hasattr(parameter, "ds_id"):  # sharded by ZeRO-3
            part = self._own_part(value, parameter.ds_tensor.numel())
            if state:
                utils.safe_set_local_optimizer_state(parameter, part, state)
            else:
                utils.safe_set_local_fp32_param(parameter, part)
        elif state:
            utils.safe_set_full_optimizer_state(parameter, value, state)
        else:
            utils.safe_set_full_fp32_param(parameter, value)
        if not state:
            with self._gathered([parameter], modifier_rank=0):
                parameter.data.copy_(value)

    @staticmethod
    def _own_part(value: Tensor, size: int) -> Tensor:
        """This process's part of a tensor that is sharded in parts of `size`. The last ones are padded.

        DeepSpeed's own setter of whole tensors fails where there is padding.
        """
        part = value.flatten()[size * dist.get_rank() :][:size]
        return torch.nn.functional.pad(part, (0, size - len(part)))


class _Scorer(torch.nn.Module):
    """The policy as the engine calls it: from groups to the log-probabilities of all their responses, [sum of U]."""

    def __init__(self, policy: torch.nn.Module, temperature: float) -> None:
        super().__init__()
        self.policy, self.temperature = policy, temperature

    def forward(self, groups: Sequence[Group]) -> Tensor:
        return torch.cat(sequence_logprobs(self.policy, groups, self.temperature))


def distribute(draws: Sequence[Draw], num_processes: int) -> list[list[Draw]]:
    """Whole draws by process: the longest first, each to the process with the fewest tokens. One may get none."""
    by_process: list[list[Draw]] = [[] for _ in range(num_processes)]
    tokens = [0] * num_processes
    for draw in sorted(draws, key=lambda draw: -draw.group.num_tokens):
        rank = tokens.index(min(tokens))
        by_process[rank].append(draw)
        tokens[rank] += draw.group.num_tokens
    return by_process


def _num_passes(draws: Sequence[Draw], max_tokens: int) -> tuple[int, int]:
    """Passes without and with gradient that these draws need."""
    whole, split = passes(draws, max_tokens)
    parts = sum(len(parts) for _, parts in split)
    return parts, len(whole) + parts
