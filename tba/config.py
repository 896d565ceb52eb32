"""Settings of the method. Each is a pydantic model, so a bad value is refused when a run is submitted, by name.

flows/config.py joins these with the buffer's settings (storage.buffer.Sampling) into the one configuration of a run.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Unknown names are errors (a misspelt setting must not be ignored) and values never change during a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskSettings(Settings):
    """What is asked and how a response is rewarded."""

    name: str = Field("arithmetic", description="Task: arithmetic or gsm8k.")
    data: str | None = Field(None, description="Local JSONL file or Hugging Face dataset; None: the task's own.")
    max_response_tokens: int | None = Field(None, ge=1, description="Longest response; None: the task's own.")
    num_heldout: int = Field(256, ge=1, description="Held-out problems in an evaluation.")


class SearchSettings(Settings):
    """How Searchers explore."""

    samples_per_prompt: int = Field(16, ge=2, description="S: responses sampled a prompt in a round.")
    prompts_per_round: int = Field(8, ge=1, description="Prompts in a round; a round is one shard.")
    temperature: float = Field(1.0, gt=0, description="Temperature that responses are sampled at.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus that responses are sampled from.")


class TrainSettings(Settings):
    """How the Trainer steps the policy. Loss: Trajectory Balance in VarGrad form (arXiv 2503.18929, eq. 4-5)."""

    steps: int = Field(80, ge=1, description="Policy steps to train for.")
    beta: float = Field(0.1, gt=0, description="KL coefficient: the target is p_ref * exp(reward / beta).")
    beta_final: float | None = Field(None, gt=0, description="beta goes there in a line; None: it stays.")
    beta_steps: int | None = Field(None, ge=1, description="Steps that beta takes to beta_final; None: all steps.")
    reference_reset_interval: int | None = Field(
        None, ge=1, description="Steps after which the policy becomes the reference (TBA'); None: never."
    )
    temperature: float = Field(1.0, gt=0, description="T that policy and reference logits are divided by.")
    learning_rate: float = Field(2e-5, gt=0, description="AdamW's step size, after warm-up.")
    warmup_steps: int = Field(10, ge=0, description="Steps over which the learning rate rises from zero.")
    learning_rate_schedule: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = Field(
        "linear", description="Of the learning rate after warm-up; the decay of the last one is a cosine."
    )
    decay_steps: int | None = Field(None, ge=1, description="Last steps, in which warmup-stable-decay decays.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    gradient_clip: float = Field(1.0, gt=0, description="Largest norm of the gradient; larger ones are scaled down.")
    micro_batch_tokens: int = Field(4096, ge=1, description="Tokens a forward pass holds; larger batches are split.")
    gradient_checkpointing: bool = Field(False, description="Less memory for a third more work.")
    lora_rank: int | None = Field(None, ge=1, description="Train low-rank adapters of this rank; None: all weights.")
    processes: int = Field(1, ge=1, description="Trainer processes, a device each. May change from resume to resume.")
    zero_stage: Literal[1, 2, 3] = Field(
        2, description="What they share out (DeepSpeed ZeRO): optimizer (1), gradients (2), weights (3), too."
    )
    sync_interval: int = Field(1, ge=1, description="k: steps between published policies, each followed by a sync.")
    checkpoint_interval: int = Field(20, ge=1, description="Steps between checkpoints that training resumes from.")

    @model_validator(mode="after")
    def _steps_and_their_schedule_go_together(self):
        stable = self.learning_rate_schedule == "warmup-stable-decay"
        if stable != (self.decay_steps is not None):
            raise ValueError(
                f"train.decay_steps is {self.decay_steps}, train.learning_rate_schedule {self.learning_rate_schedule}: "
                "warmup-stable-decay needs decay_steps, the others take none"
            )
        if self.beta_steps is not None and self.beta_final is None:
            raise ValueError(f"train.beta_steps is {self.beta_steps}, but train.beta_final is not set: set it, too")
        return self
