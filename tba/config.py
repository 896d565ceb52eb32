"""Settings of the method. Each is a pydantic model, so a bad value is refused when a run is submitted, by name.

flows/config.py joins these with the buffer's settings (storage.buffer.Sampling) into the one configuration of a run.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tba.imports import check_function_name, is_function_name


class Settings(BaseModel):
    """Unknown names are errors (a misspelt setting must not be ignored) and values never change during a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskSettings(Settings):
    """The task: its prompts, and the reward of a response."""

    name: str = Field(
        "arithmetic",
        description="arithmetic, gsm8k, math, reasoning_gym, tldr, redteam, or dataset (a task of one's own).",
    )
    data: str | None = Field(
        None, description="JSONL or Parquet file, Hugging Face dataset, or module:function; None: the task's own data."
    )
    generator: str | None = Field(None, description="Generator of reasoning_gym, such as chain_sum; None: other tasks.")
    reward_model: str | None = Field(
        None,
        description="Reward model of tldr, a classifier with one label; None: ROUGE-L with the reference summary.",
    )
    gold_reward_model: str | None = Field(None, description="Reward model of tldr's win rate; None: reward_model.")
    victim: str = Field("smollm2-135m-instruct", description="Model that redteam attacks.")
    classifier: str | None = Field(
        None, description="Sequence classifier of toxicity for redteam; None: better-profanity's list of words."
    )
    rewards: tuple[str, ...] = Field(
        (), description="Reward functions in TRL's signature (module:function); task: the task's own; none: only that."
    )
    reward_weights: tuple[float, ...] | None = Field(None, description="Weight of each of the rewards; None: 1 each.")
    missing_eos_reward: float | None = Field(
        None, description="Reward of a response that is cut at the length limit; None: as of a finished one."
    )
    max_response_tokens: int | None = Field(
        None, ge=1, description="Longest response, in tokens; None: the task's own."
    )
    num_heldout: int = Field(256, ge=1, description="Held-out problems in an evaluation.")

    @field_validator("rewards", "reward_weights", mode="before")
    @classmethod
    def _as_a_list(cls, value: object) -> object:
        """From a command line: text with commas, not those in parentheses. From Python: functions, by their names."""
        if isinstance(value, str):
            value = [part.strip() for part in re.split(r",(?![^(]*\))", value) if part.strip()]
        if callable(value) or isinstance(value, (int, float)):
            value = [value]
        return [importable_name(part) if callable(part) else part for part in value] if value is not None else None

    @field_validator("data", mode="before")
    @classmethod
    def _data_by_name(cls, data: object) -> object:
        return importable_name(data) if callable(data) else data

    @model_validator(mode="after")
    def _functions_may_be_imported(self):
        for reward in self.rewards:
            if reward != "task":
                check_function_name(reward.partition("(")[0], "task.rewards")
        if self.data is not None and is_function_name(self.data):
            check_function_name(self.data, "task.data")
        return self

    @model_validator(mode="after")
    def _rewards_have_weights(self):
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards):
            raise ValueError(
                f"task.reward_weights has {len(self.reward_weights)} weights for {len(self.rewards)} task.rewards; "
                "give one for each, or none"
            )
        if self.name == "dataset" and (not self.rewards or "task" in self.rewards):
            raise ValueError(
                f"task.rewards is {self.rewards}, and the task dataset has no reward of its own: name functions in "
                "TRL's signature as module:function"
            )
        return self


def importable_name(function: Callable) -> str:
    """`module:function`, the name by which other processes import a function that was passed as an object.

    Raises: ValueError: it has no such name: a lambda, a method, a function inside another.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module == "__main__":  # the file that was run: other processes import it by its name
        module = Path(getattr(sys.modules["__main__"], "__file__", "")).stem
    if not module or not name.isidentifier():
        raise ValueError(f"{function!r} cannot be imported by other processes; define it at the top of a module's file")
    return f"{module}:{name}"


class SearchSettings(Settings):
    """How Searchers sample responses."""

    samples_per_prompt: int = Field(8, ge=2, description="S: responses sampled for each prompt of a round.")
    prompts_per_round: int = Field(24, ge=1, description="Prompts in a round, which is one shard.")
    temperature: float = Field(1.0, gt=0, description="Temperature of sampling.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Probability mass of the nucleus that tokens are sampled from; 1: all tokens."
    )
    near_duplicate_distance: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Edit distance, as a share of both lengths' sum, below which the worse response is dropped.",
    )
    exploration_probability: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Probability of resampling a prompt's temperature; independently top_p and the system prompt.",
    )
    exploration_temperature: tuple[float, float] = Field(
        (0.7, 1.1), description="Lowest and highest resampled temperature; uniform between them."
    )
    exploration_top_p: tuple[float, float] = Field(
        (0.7, 1.0), description="Lowest and highest resampled top_p; uniform between them."
    )
    system_prompts: tuple[str, ...] = Field(
        (), description="System prompts to sample behind, one drawn at random; not in training; none: no system prompt."
    )

    @model_validator(mode="after")
    def _system_prompts_are_drawn(self):
        if self.system_prompts and not self.exploration_probability:
            raise ValueError(
                f"search.system_prompts has {len(self.system_prompts)}, and search.exploration_probability is 0: none "
                "would ever be drawn; set it, too"
            )
        if "" in self.system_prompts:
            raise ValueError(
                "search.system_prompts: one is empty; leave it out, because a prompt that is not explored has none"
            )
        return self

    @model_validator(mode="after")
    def _ranges_are_ranges(self):
        for name, most in (("exploration_temperature", float("inf")), ("exploration_top_p", 1.0)):
            low, high = getattr(self, name)
            if not 0 < low <= high <= most:
                raise ValueError(
                    f"search.{name}: got {low}, {high}; it is a low and a high end, 0 < low <= high <= {most}"
                )
        return self


class TrainSettings(Settings):
    """How the Trainer steps the policy. Loss: Trajectory Balance in VarGrad form (arXiv 2503.18929, eq. 4-5)."""

    objective: Literal["tb", "tba_prime", "dr_grpo", "rloo", "prox_rloo", "online_dpo"] = Field(
        "tb",
        description="Trajectory Balance (tb), with a moving reference and no replay (tba_prime), or a baseline.",
    )
    residual_weight: Literal["tapered", "plain"] = Field(
        "tapered",
        description="Weight of a positive residual, with tb and tba_prime: min(1, policy / behavior probability) for "
        "tapered, 1 for plain (as in the paper).",
    )
    steps: int = Field(120, ge=1, description="Policy steps of the run.")
    beta: float = Field(
        0.05, ge=0, description="KL coefficient, in units of reward a nat: the target is p_ref * exp(reward / beta)."
    )
    beta_final: float | None = Field(None, gt=0, description="Final beta, reached linearly; None: beta is constant.")
    beta_steps: int | None = Field(None, ge=1, description="Steps from beta to beta_final; None: all steps.")
    reference_reset_interval: int | None = Field(
        None, ge=1, description="Steps after which the policy becomes the reference (TBA'); None: never."
    )
    reward_tempering: float = Field(
        1.0, ge=1, description="Initial divisor of the target's logarithm, which falls linearly to 1; 1: no tempering."
    )
    reward_tempering_steps: int | None = Field(
        None, ge=1, description="Steps in which reward_tempering falls to 1; None: all steps."
    )
    fluency_temperature: float = Field(
        1.0,
        gt=0,
        description="Final divisor of log p_ref in the target, from 1 linearly, for red-teaming.",
    )
    fluency_steps: int | None = Field(
        None, ge=1, description="Steps in which fluency_temperature is reached; None: all steps."
    )
    temperature: float = Field(
        1.0, gt=0, description="T, the temperature of the objective: policy and reference logits are divided by it."
    )
    learning_rate: float = Field(1e-5, gt=0, description="AdamW's step size after warm-up.")
    warmup_steps: int = Field(5, ge=0, description="Steps in which the learning rate rises from zero.")
    learning_rate_schedule: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = Field(
        "linear", description="Schedule of the learning rate after warm-up; warmup-stable-decay decays by a cosine."
    )
    decay_steps: int | None = Field(
        None, ge=1, description="Length of warmup-stable-decay's decay, in steps; None: other schedules."
    )
    adam_beta1: float = Field(
        0.7, ge=0, lt=1, description="AdamW's decay rate of the mean gradient; low, because stale samples add momentum."
    )
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's decay rate of the mean squared gradient.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    gradient_clip: float = Field(1.0, gt=0, description="Largest norm of the gradient; larger ones are scaled down.")
    micro_batch_tokens: int = Field(4096, ge=1, description="Tokens of the largest forward pass.")
    gradient_checkpointing: Literal["none", "cheap", "layers"] = Field(
        "none",
        description="Activations computed again: none; all but matrix products and attention (cheap); all (layers).",
    )
    lora_rank: int | None = Field(
        None, ge=1, description="Rank of trained low-rank adapters; None: all weights are trained."
    )
    processes: int = Field(1, ge=1, description="Trainer processes, one device each; may change at a resume.")
    zero_stage: Literal[1, 2, 3] = Field(
        2, description="DeepSpeed ZeRO stage: shards the optimizer (1), also gradients (2), also weights (3)."
    )
    sync_interval: int = Field(2, ge=1, description="k: steps between published policies; a sync follows each.")
    checkpoint_interval: int = Field(25, ge=1, description="Steps between checkpoints.")

    @model_validator(mode="after")
    def _steps_and_their_schedule_go_together(self):
        stable = self.learning_rate_schedule == "warmup-stable-decay"
        if stable != (self.decay_steps is not None):
            raise ValueError(
                f"train.decay_steps is {self.decay_steps}, train.learning_rate_schedule {self.learning_rate_schedule}: "
                "warmup-stable-decay needs decay_steps, the others take none"
            )
        if self.beta == 0 and self.objective not in ("rloo", "prox_rloo", "dr_grpo"):
            raise ValueError(f"train.beta is 0, and {self.objective} divides by it: it must be greater than 0")
        if self.reference_reset_interval is not None and self.objective not in ("tb", "tba_prime"):
            raise ValueError(
                f"train.reference_reset_interval is {self.reference_reset_interval} with {self.objective}: only tb and "
                "tba_prime have a reference that moves; leave it out"
            )
        if self.processes > 1 and self.zero_stage == 3 and self.gradient_checkpointing == "cheap":
            raise ValueError(
                "train.gradient_checkpointing is cheap with train.zero_stage 3, which gathers weights elsewhere when a "
                "layer is computed again; use none or layers"
            )
        if self.processes > 1 and self.objective not in ("tb", "tba_prime"):
            raise ValueError(
                f"train.processes is {self.processes} with {self.objective}: baselines train on one device; set it to 1"
            )
        tempered = self.reward_tempering != 1 or self.fluency_temperature != 1
        if tempered and self.objective not in ("tb", "tba_prime"):
            raise ValueError(
                f"train.reward_tempering is {self.reward_tempering} and train.fluency_temperature "
                f"{self.fluency_temperature} with {self.objective}: only tb and tba_prime have a target to temper; "
                "leave both at 1"
            )
        if self.residual_weight == "plain" and self.objective not in ("tb", "tba_prime"):
            raise ValueError(
                f"train.residual_weight is plain with {self.objective}: only tb and tba_prime have a residual; leave "
                "it out"
            )
        if self.objective == "tba_prime" and self.reference_reset_interval is None:
            raise ValueError("train.objective: tba_prime resets its reference; set train.reference_reset_interval (50)")
        if self.beta_steps is not None and self.beta_final is None:
            raise ValueError(f"train.beta_steps is {self.beta_steps}, but train.beta_final is not set: set it, too")
        return self
