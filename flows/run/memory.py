"""The memory that a run's processes need on this machine: `tba plan`, and a check before a run (tba/memory.py)."""

import os
from dataclasses import dataclass
from itertools import takewhile

from flows.config import RunConfig
from infra.machine import gpu_bytes, has_bfloat16, memory_bytes
from tba.memory import GIB, Machine, Shape, read_shape, searcher_parts, trainer_parts
from tba.models import model_folder
from tba.rewards import RewardedTask
from tba.tasks import load_task

# The planned sums were within this share of measured peaks (docs/operating.md). A run is refused beyond it only.
ERROR = 0.15
NUM_PROMPTS = 1000  # of which the longest counts
ENGINE_SHARE = 0.6  # vLLM's share of a Searcher's GPU memory (flows/searcher/start.py)


@dataclass(frozen=True)
class ProcessPlan:
    """What one process needs at its peak."""

    process: str  # Trainer or Searcher
    number: int  # of such processes
    parts: dict[str, int]  # bytes, by name

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPlan:
    """What a run needs, and what this machine has."""

    processes: list[ProcessPlan]
    machine: Machine
    num_tokens: int  # of the Trainer's largest pass
    files: dict[str, int]  # bytes in the store: of a whole policy, of a checkpoint

    @property
    def faults(self) -> dict[str, str]:
        """By process, a sentence for each that cannot fit here, whatever else runs here."""
        too_large = [plan for plan in self.processes if (1 - ERROR) * plan.num_bytes > self.machine.num_bytes]
        return {plan.process: self._fault(plan) for plan in too_large}

    @property
    def warnings(self) -> list[str]:
        """A sentence if each process fits by itself, and all of them together do not."""
        together = sum(plan.number * plan.num_bytes for plan in self.processes)
        if self.machine.is_gpu or self.faults or (1 - ERROR) * together <= self.machine.num_bytes:
            return []
        each = " and ".join(f"{plan.number} x {plan.process} {gib(plan.num_bytes)}" for plan in self.processes)
        return [f"memory: {each} need {gib(together)} together, and this machine has {gib(self.machine.num_bytes)}"]

    def _fault(self, plan: ProcessPlan) -> str:
        device = "a GPU here" if self.machine.is_gpu else "this machine"
        return (
            f"memory: the {plan.process} needs {gib(plan.num_bytes)} ({_in_words(plan.parts)}), and {device} has "
            f"{gib(self.machine.num_bytes)}. {self._remedy(plan)}"
        )

    def _remedy(self, plan: ProcessPlan) -> str:
        if plan.process == "Searcher":
            return "Take a smaller model, or a lower search.engine.gpu_memory_utilization."
        return (
            f"Lower train.micro_batch_tokens (its largest pass has {self.num_tokens} tokens), set "
            "train.gradient_checkpointing=layers, train adapters (train.lora_rank), or shard the state over devices "
            "(train.processes, train.zero_stage=3)."
        )


@dataclass(frozen=True)
class Lengths:
    """Tokens of a task's longest prompt and response, and those with which all prompts begin."""

    prompt: int
    common: int
    response: int


def plan_memory(config: RunConfig, response_tokens: int | None = None) -> MemoryPlan:
    """response_tokens: of a batch's different responses, as the run has had them; None: the most that can be.

    Raises: UnknownShape: the model's files do not tell its shape.
    """
    from transformers import AutoTokenizer

    folder = model_folder(config.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = load_task(config.task, seed=config.seed, tokenizer=tokenizer)
    return plan_of(config, read_shape(folder), lengths(config, task, tokenizer), response_tokens)


def lengths(config: RunConfig, task: RewardedTask, tokenizer) -> Lengths:
    """Of the first `NUM_PROMPTS` prompts."""
    prompts = [problem.encode(tokenizer) for problem in task.train[:NUM_PROMPTS]]
    common = sum(1 for _ in takewhile(lambda at: at[0] == at[1], zip(min(prompts), max(prompts), strict=False)))
    limit = config.task.max_response_tokens or task.max_response_tokens
    return Lengths(max(map(len, prompts)), common, limit)


def plan_of(config: RunConfig, shape: Shape, of_task: Lengths, response_tokens: int | None = None) -> MemoryPlan:
    machine, num_tokens = this_machine(), largest_pass(config, of_task, response_tokens)
    trainer = ProcessPlan(
        "Trainer", config.train.num_processes, trainer_parts(shape, config.train, num_tokens, machine)
    )
    searcher = ProcessPlan("Searcher", config.searchers, searcher_parts(shape, machine, _cache(config, shape, machine)))
    trained = config.train.lora_rank * shape.num_sides if config.train.lora_rank else shape.num_parameters
    files = {"a policy, whole": 2 * shape.num_parameters, "a checkpoint": 12 * trained}
    return MemoryPlan([trainer, searcher], machine, num_tokens, files)


def largest_pass(config: RunConfig, of_task: Lengths, response_tokens: int | None = None) -> int:
    """Tokens of the Trainer's largest pass. Without `response_tokens` all responses are different and the longest."""
    B, K = config.sampling.prompts_per_batch, config.sampling.responses_per_prompt
    of_responses = B * K * of_task.response if response_tokens is None else response_tokens
    batch = of_task.common + B * (of_task.prompt - of_task.common) + of_responses
    return max(min(batch, config.train.micro_batch_tokens), of_task.prompt + of_task.response)


def this_machine() -> Machine:
    on_gpu = gpu_bytes()
    return Machine(on_gpu is not None, on_gpu is not None or has_bfloat16(), on_gpu or memory_bytes())


def _cache(config: RunConfig, shape: Shape, machine: Machine) -> int:
    """Bytes of the engine's keys and values: on a GPU what its share leaves beside the weights."""
    if not machine.is_gpu:
        return int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB
    share = config.search.engine.get("gpu_memory_utilization", ENGINE_SHARE)
    return max(0, int(share * machine.num_bytes) - 2 * shape.num_parameters)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _in_words(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in parts.items())
