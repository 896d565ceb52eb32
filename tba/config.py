"""Settings of the method. Each is a pydantic model, so a bad value is refused when a run is submitted, by name.

flows/config.py joins these with the buffer's settings (storage.buffer.Sampling) into the one configuration of a run.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Settings(BaseModel):
    """Unknown names are errors (a misspelt setting must not be ignored) and values never change during a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskSettings(Settings):
    """What is asked and how a response is rewarded."""

    name: str = Field(
        "arithmetic", description="arithmetic, gsm8k, math, reasoning_gym, tldr, redteam, or dataset (one's own)."
    )
    data: str | None = Field(
        None, description="JSONL or Parquet file, Hugging Face dataset or module:function; None: the task's own."
    )
    generator: str | None = Field(None, description="Of reasoning_gym: which of its generators, such as chain_sum.")
    reward_model: str | None = Field(
        None, description="Of tldr: a sequence classifier of one label; None: ROUGE-L with the reference summary."
    )
    gold_reward_model: str | None = Field(
        None, description="Of tldr's evaluation: the reward model whose preference counts; None: as reward_model."
    )
    victim: str = Field("smollm2-135m-instruct", description="Of redteam: the model that is asked.")
    classifier: str | None = Field(
        None, description="Of redteam: a sequence classifier of toxicity; None: better-profanity's list of words."
    )
    rewards: tuple[str, ...] = Field(
        (), description="Functions in TRL's signature, module:function, or task: the task's own; none: only that."
    )
    reward_weights: tuple[float, ...] | None = Field(None, description="Of each of the rewards; None: all 1.")
    missing_eos_reward: float | None = Field(
        None, description="Reward of a response that is cut at the length limit; None: what it is worth."
    )
    max_response_tokens: int | None = Field(None, ge=1, description="Longest response; None: the task's own.")
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
    """`module:function`, by which other processes find a Python object that was given in its place.

    Raises: ValueError: it has no such name: a lambda, a method, a function inside another.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module == "__main__":  # the file that was run: imported by its name elsewhere
        module = Path(getattr(sys.modules["__main__"], "__file__", "")).stem
    if not module or not name.isidentifier():
        raise ValueError(f"{function!r} cannot be imported by other processes; define it at the top of a module's file")
    return f"{module}:{name}"


class SearchSettings(Settings):
    """How Searchers explore."""

    samples_per_prompt: int = Field(16, ge=2, description="S: responses sampled a prompt in a round.")
    prompts_per_round: int = Field(12, ge=1, description="Prompts in a round; a round is one shard.")
    temperature: float = Field(1.0, gt=0, description="Temperature that responses are sampled at.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus that responses are sampled from.")
    near_duplicate_distance: float | None = Field(
        None, gt=0, lt=1, description="Responses within this share of their edit distance of better ones are dropped."
    )
    exploration_probability: float = Field(
        0.0,
        ge=0,
        le=1,
        description="That a prompt's temperature is drawn anew; so, independently, top_p, system prompt.",
    )
    exploration_temperature: tuple[float, float] = Field(
        (0.7, 1.1), description="Range that a drawn temperature is uniform in."
    )
    exploration_top_p: tuple[float, float] = Field((0.7, 1.0), description="Range that a drawn top_p is uniform in.")
    system_prompts: tuple[str, ...] = Field(
        (), description="Of which one is drawn to sample behind; training does not see it. None: no system prompts."
    )

    @model_validator(mode="after")
    def _system_prompts_are_drawn(self):
        if self.system_prompts and not self.exploration_probability:
            raise ValueError(
                f"search.system_prompts has {len(self.system_prompts)}, and search.exploration_probability is 0: none "
                "would ever be drawn; set that, too"
            )
        if "" in self.system_prompts:
            raise ValueError("search.system_prompts: one is empty; a prompt that is not explored has none anyway")
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
        "tb", description="Trajectory Balance, the same with a moving reference and no replay, or a baseline."
    )
    residual_weight: Literal["tapered", "plain"] = Field(
        "tapered",
        description="Of tb and tba_prime: tapered weighs what is to become less likely by min(1, policy / behavior) "
        "probability; plain counts it whole, as the paper does.",
    )
    steps: int = Field(120, ge=1, description="Policy steps to train for.")
    beta: float = Field(0.05, ge=0, description="KL coefficient: the target is p_ref * exp(reward / beta).")
    beta_final: float | None = Field(None, gt=0, description="beta goes there in a line; None: it stays.")
    beta_steps: int | None = Field(None, ge=1, description="Steps that beta takes to beta_final; None: all steps.")
    reference_reset_interval: int | None = Field(
        None, ge=1, description="Steps after which the policy becomes the reference (TBA'); None: never."
    )
    reward_tempering: float = Field(
        1.0, ge=1, description="What the log of the target is divided by at first; it falls to 1 in a line."
    )
    reward_tempering_steps: int | None = Field(None, ge=1, description="Steps that this takes; None: all steps.")
    fluency_temperature: float = Field(
        1.0, gt=0, description="What the target's log p_ref is divided by at last; from 1 in a line. Red-teaming."
    )
    fluency_steps: int | None = Field(None, ge=1, description="Steps that this takes; None: all steps.")
    temperature: float = Field(1.0, gt=0, description="T that policy and reference logits are divided by.")
    learning_rate: float = Field(1e-5, gt=0, description="AdamW's step size, after warm-up.")
    warmup_steps: int = Field(5, ge=0, description="Steps over which the learning rate rises from zero.")
    learning_rate_schedule: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = Field(
        "linear", description="Of the learning rate after warm-up; the decay of the last one is a cosine."
    )
    decay_steps: int | None = Field(None, ge=1, description="Last steps, in which warmup-stable-decay decays.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the mean of gradients.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's decay of the mean of squared gradients.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    gradient_clip: float = Field(1.0, gt=0, description="Largest norm of the gradient; larger ones are scaled down.")
    micro_batch_tokens: int = Field(4096, ge=1, description="Tokens a forward pass holds; larger batches are split.")
    gradient_checkpointing: Literal["none", "cheap", "layers"] = Field(
        "none",
        description="What is computed again and not kept: all but matrix products and attention, or whole layers.",
    )
    lora_rank: int | None = Field(None, ge=1, description="Train low-rank adapters of this rank; None: all weights.")
    processes: int = Field(1, ge=1, description="Trainer processes, a device each. May change from resume to resume.")
    zero_stage: Literal[1, 2, 3] = Field(
        2, description="What they share out (DeepSpeed ZeRO): optimizer (1), gradients (2), weights (3), too."
    )
    sync_interval: int = Field(2, ge=1, description="k: steps between published policies, each followed by a sync.")
    checkpoint_interval: int = Field(25, ge=1, description="Steps between checkpoints that training resumes from.")

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
