"""Settings of the method, as pydantic models: a bad value is refused by name when a run is submitted.

flows/config.py joins these with those of the buffer (storage.mop.SamplingSettings) into one configuration of a run.
"""

import difflib
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from tba.imports import check_function_name, is_function_name

# Arguments of vllm.LLM that the Searcher needs as they are, or that follow from other settings.
ENGINES_OWN = {
    "model": "model",
    "seed": "seed",
    "max_num_seqs": "search.prompts_per_round x search.samples_per_prompt, and is 1,024 at most",
    "max_model_len": "the longest prompt (task.max_prompt_tokens) and task.max_response_tokens",
    "logprobs_mode": None,
    "runner": None,
    "skip_tokenizer_init": None,
    "trust_remote_code": None,
    "worker_extension_cls": None,
}
# Arguments of vllm.LLM that may be given. Others name files, classes or addresses, and a run.json is other people's.
ENGINES_FREE = {
    "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size",
    "decode_context_parallel_size", "enable_expert_parallel", "dtype", "quantization", "kv_cache_dtype",
    "gpu_memory_utilization", "kv_cache_memory_bytes", "cpu_offload_gb", "block_size", "max_num_batched_tokens",
    "enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "async_scheduling",
    "disable_custom_all_reduce", "num_gpu_blocks_override", "scheduling_policy", "attention_backend",
    "disable_cascade_attn", "long_prefill_token_threshold", "moe_backend", "optimization_level",
    "performance_mode", "disable_sliding_window", "mamba_cache_dtype",
}  # fmt: skip
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
WHOLE_NUMBERS = (  # of these arguments
    *PARALLEL_SIZES, "decode_context_parallel_size", "kv_cache_memory_bytes", "block_size", "max_num_batched_tokens",
    "num_gpu_blocks_override",
)  # fmt: skip


class Settings(BaseModel):
    """Base of the settings. Unknown names are errors, so that no misspelt setting is ignored; values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TaskSettings(Settings):
    """The task: its prompts, and the reward of a response."""

    name: str = Field(
        "arithmetic",
        description="Task: arithmetic, gsm8k, math, reasoning_gym, tldr, redteam, or dataset (a task of one's own).",
    )
    data: str | None = Field(
        None,
        description="JSONL or Parquet file, folder, Hugging Face dataset, or module:function; None: the task's own.",
    )
    generator: str | None = Field(
        None, description="Generator of reasoning_gym, such as chain_sum; None for other tasks."
    )
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
        (), description="Reward functions in TRL's signature (module:function), or task: the task's own; none: task."
    )
    reward_weights: tuple[float, ...] | None = Field(
        None, description="Weights of task.rewards, in their order; None: 1 each."
    )
    missing_eos_reward: float | None = Field(
        None, description="Reward of a response that is cut at the length limit; None: no special reward."
    )
    max_response_tokens: int | None = Field(
        None, ge=1, description="Length limit of a response, in tokens; None: the task's own."
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Longer prompts are left out, training's and held-out ones; in tokens; None: none is."
    )
    num_heldout: int = Field(256, ge=1, description="Largest number of held-out problems in an evaluation.")

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
    if module == "__main__":
        module = _main_module()
    if not module or not name.isidentifier():
        raise ValueError(
            f"{function!r} cannot be imported by other processes; define it at the top of a module's file, which is in "
            "the working folder or installed"
        )
    return f"{module}:{name}"


def _main_module() -> str | None:
    """The name by which processes that begin in the working folder import the program that was started here.

    None: it is a notebook, a prompt, or a file elsewhere.
    """
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None):  # python -m package.module
        return main.__spec__.name
    file = Path(getattr(main, "__file__", None) or "").resolve()
    if file.suffix != ".py" or not file.is_relative_to(Path.cwd()):
        return None
    return ".".join(file.relative_to(Path.cwd()).with_suffix("").parts)


class SearchSettings(Settings):
    """How Searchers sample responses."""

    samples_per_prompt: int = Field(8, ge=2, description="S: responses sampled for each prompt of a round.")
    prompts_per_round: int = Field(24, ge=1, description="Number of prompts in a round; a round is one shard.")
    temperature: float = Field(1.0, gt=0, description="Temperature at which responses are sampled.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Probability mass of the nucleus that tokens are sampled from; 1: all tokens."
    )
    near_duplicate_distance: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Below this edit distance over summed lengths, the worse of two responses is dropped; None: off.",
    )
    exploration_probability: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Probability, for each prompt, of a random temperature, of a random top_p, and of a system prompt.",
    )
    exploration_temperature: tuple[float, float] = Field(
        (0.7, 1.1), description="Lowest and highest random temperature; uniform between them."
    )
    exploration_top_p: tuple[float, float] = Field(
        (0.7, 1.0), description="Lowest and highest random top_p; uniform between them."
    )
    system_prompts: tuple[str, ...] = Field(
        (), description="System prompts for exploration, one drawn at random; not in training; none: no system prompt."
    )

    engine: dict[str, JsonValue] = Field(
        {},
        description="Arguments of vllm.LLM (a list is in tba/config.py): tensor_parallel_size, quantization, …",
    )

    @field_validator("engine")
    @classmethod
    def _engine_keeps_its_own(cls, engine: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name, value in engine.items():
            if name in ENGINES_OWN:
                setting = ENGINES_OWN[name]
                raise ValueError(f"search.engine: {name} " + (f"is {setting}" if setting else "cannot be changed"))
            if name not in ENGINES_FREE:
                close = difflib.get_close_matches(name, ENGINES_FREE) or sorted(ENGINES_FREE)
                raise ValueError(f"search.engine: argument {name} may not be given; allowed: {', '.join(close)}")
            if not isinstance(value, bool | int | float | str):
                raise ValueError(f"search.engine: {name} is {value!r:.80}; give a number or a word")
        for name in WHOLE_NUMBERS:
            if not (type(engine.get(name, 1)) is int and engine.get(name, 1) >= 1):
                raise ValueError(f"search.engine: {name} is {engine[name]!r}; give a whole number of at least 1")
        if type(share := engine.get("gpu_memory_utilization", 1)) not in (int, float) or not 0 < share <= 1:
            raise ValueError(f"search.engine: gpu_memory_utilization is {share!r}; give a number above 0, at most 1")
        return engine

    @property
    def num_devices(self) -> int:
        """GPUs of each Searcher; on a CPU processes."""
        return math.prod(self.engine.get(name, 1) for name in PARALLEL_SIZES)

    @model_validator(mode="after")
    def _system_prompts_are_drawn(self):
        if self.system_prompts and not self.exploration_probability:
            raise ValueError(
                f"search.system_prompts has {len(self.system_prompts)}, but search.exploration_probability is 0: none "
                "would be drawn; set search.exploration_probability, too"
            )
        if "" in self.system_prompts:
            raise ValueError(
                "search.system_prompts: one is empty; leave it out: prompts without exploration have no system prompt"
            )
        return self

    @model_validator(mode="after")
    def _ranges_are_ranges(self):
        for name, most in (("exploration_temperature", float("inf")), ("exploration_top_p", 1.0)):
            low, high = getattr(self, name)
            if not 0 < low <= high <= most:
                raise ValueError(
                    f"search.{name}: got {low}, {high}; give the lowest and highest value: 0 < low <= high <= {most}"
                )
        return self


class TrainSettings(Settings):
    """How the Trainer steps the policy. Loss: Trajectory Balance in VarGrad form (arXiv 2503.18929, eq. 4-5)."""

    objective: Literal["tb", "tba_prime", "dr_grpo", "rloo", "prox_rloo", "online_dpo"] = Field(
        "tb",
        description="Trajectory Balance (tb); with a moving reference and draws from the newest sync alone "
        "(tba_prime); or a baseline.",
    )
    residual_weight: Literal["tapered", "plain"] = Field(
        "tapered",
        description="Weight of a positive residual, with tb and tba_prime; tapered: min(1, policy / behavior "
        "probability); plain: 1, as in the paper.",
    )
    steps: int = Field(120, ge=1, description="Policy steps of the run.")
    beta: float = Field(
        0.05, ge=0, description="KL coefficient, in units of reward per nat; the target is p_ref * exp(reward / beta)."
    )
    beta_final: float | None = Field(None, gt=0, description="Final beta, reached linearly; None: beta is constant.")
    beta_steps: int | None = Field(
        None,
        ge=1,
        description="Steps in which beta changes linearly; the next one is the first with beta_final. None: all.",
    )
    reference_reset_interval: int | None = Field(
        None, ge=1, description="Policy steps between resets of the reference to the policy (TBA'); None: no resets."
    )
    reward_tempering: float = Field(
        1.0,
        ge=1,
        description="First h of the target exp((log p_ref / g + r / beta) / h); falls linearly to 1; 1: no tempering.",
    )
    reward_tempering_steps: int | None = Field(
        None, ge=1, description="Policy steps in which reward_tempering falls to 1; None: all steps."
    )
    fluency_temperature: float = Field(
        1.0,
        gt=0,
        description="Final g of the target in train.reward_tempering, reached linearly from 1; for red-teaming.",
    )
    fluency_steps: int | None = Field(
        None, ge=1, description="Policy steps until fluency_temperature is reached; None: all steps."
    )
    temperature: float = Field(
        1.0, gt=0, description="T: temperature of the objective, by which policy and reference logits are divided."
    )
    learning_rate: float = Field(1e-5, gt=0, description="AdamW's step size after warm-up.")
    warmup_steps: int = Field(5, ge=0, description="Policy steps in which the learning rate rises from zero.")
    learning_rate_schedule: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = Field(
        "linear", description="Schedule of the learning rate after warm-up; warmup-stable-decay decays by a cosine."
    )
    decay_steps: int | None = Field(
        None, ge=1, description="Length of warmup-stable-decay's decay, in policy steps; None for other schedules."
    )
    adam_beta1: float = Field(
        0.7, ge=0, lt=1, description="AdamW's decay rate of the mean gradient; low, because stale samples add momentum."
    )
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's decay rate of the mean squared gradient.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    gradient_clip: float = Field(
        1.0, gt=0, description="Largest norm of the gradient; a larger gradient is scaled down to it."
    )
    micro_batch_tokens: int = Field(
        4096, ge=1, description="Largest number of tokens in a forward pass; may change at a resume."
    )
    gradient_checkpointing: Literal["none", "cheap", "layers"] = Field(
        "none",
        description=(
            "Activations computed again: none; cheap: all but matrix products and attention; layers: all. May change "
            "at a resume."
        ),
    )
    lora_rank: int | None = Field(
        None, ge=1, description="Rank of the low-rank adapters that are trained; None: all weights are trained."
    )
    processes: int = Field(
        1, ge=1, description="Trainer processes of each machine, one device each; may change at a resume."
    )
    machines: int = Field(
        1,
        ge=1,
        description="Machines of the Trainer; it goes on with fewer if they do not come. May change at a resume.",
    )
    zero_stage: int = Field(
        2, ge=1, le=3, description="DeepSpeed ZeRO stage; 1 shards the optimizer, 2 also gradients, 3 also weights."
    )
    sync_interval: int = Field(
        2,
        ge=1,
        description="k: policy steps between published policies, more if the store is slow; a sync precedes each.",
    )
    checkpoint_interval: int = Field(50, ge=1, description="Policy steps between checkpoints.")

    @property
    def num_processes(self) -> int:
        """Trainer processes of all machines."""
        return self.processes * self.machines

    @property
    def is_trajectory_balance(self) -> bool:
        """Whether the objective is Trajectory Balance, and not one of the baselines."""
        return self.objective in ("tb", "tba_prime")

    @model_validator(mode="after")
    def _schedules_are_whole(self):
        stable = self.learning_rate_schedule == "warmup-stable-decay"
        if stable != (self.decay_steps is not None):
            raise ValueError(
                f"train.decay_steps is {self.decay_steps}, train.learning_rate_schedule {self.learning_rate_schedule}: "
                "warmup-stable-decay needs decay_steps, other schedules have none"
            )
        if self.beta_steps is not None and self.beta_final is None:
            raise ValueError(f"train.beta_steps is {self.beta_steps}, but train.beta_final is not set; set it, too")
        return self

    @model_validator(mode="after")
    def _settings_are_of_the_objective(self):
        if self.beta == 0 and self.objective not in ("rloo", "prox_rloo", "dr_grpo"):
            raise ValueError(f"train.beta is 0, and {self.objective} divides by it; give a number greater than 0")
        if self.objective == "tba_prime" and self.reference_reset_interval is None:
            raise ValueError("train.objective: tba_prime resets its reference; set train.reference_reset_interval (50)")
        for name, usual, part in (
            ("reference_reset_interval", None, "reference that moves"),
            ("reward_tempering", 1, "target to temper"),
            ("fluency_temperature", 1, "target to temper"),
            ("residual_weight", "tapered", "residual"),
        ):
            if getattr(self, name) != usual and not self.is_trajectory_balance:
                raise ValueError(f"train.{name}: {self.objective} has no {part}, only tb and tba_prime; leave it out")
        return self

    @model_validator(mode="after")
    def _devices_can_share_the_work(self):
        if self.num_processes > 1 and self.zero_stage == 3 and self.gradient_checkpointing == "cheap":
            raise ValueError(
                "train.gradient_checkpointing is cheap with train.zero_stage 3, which gathers weights elsewhere when a "
                "layer is computed again; use none or layers"
            )
        if self.num_processes > 1 and not self.is_trajectory_balance:
            raise ValueError(f"train.processes, train.machines: {self.objective} trains on one device; set both to 1")
        return self
