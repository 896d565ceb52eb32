"""The memory that a run's processes need on this machine: `tba plan`, and a check before a run (tba/memory.py)."""

import contextlib
import math
import os
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from flows.config import RunConfig
from flows.searcher.start import ENGINE_SHARE
from infra.gpus import gpu_bytes, gpu_places, num_gpus
from infra.machine import cpu_threads, has_bfloat16
from infra.memory import memory_bytes
from tba.memory import GIB, Machine, Pass, SearcherNeeds, Shape, certain, read_shape, searcher_parts, trainer_parts
from tba.models import model_folder
from tba.rewards import RewardedTask
from tba.tasks import load_task
from tba.tasks.base import Problem

NUM_PROMPTS = 50  # that are encoded to find the longest


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
    files: dict[str, int]  # bytes in the store: of a whole policy, of a checkpoint
    task: str
    lengths: "Lengths"  # of that task
    on_trainers_gpu: int = 0  # Searchers that share a GPU with a process of the Trainer
    gpus_of_searcher: int = 1

    @property
    def fault(self) -> str | None:
        """A sentence if the Trainer cannot fit here, whatever its batches are and whatever else runs here."""
        trainer = self.processes[0]
        number = 1 if self.machine.is_gpu else trainer.number  # that share the memory
        if number * certain(trainer.parts) <= self.machine.num_bytes:
            return None
        return f"{self._too_much(trainer)}. {self._remedy}"

    @property
    def warnings(self) -> list[str]:
        """Sentences about what may not fit: batches may be smaller, and Searchers on other machines."""
        trainer, searcher = self.processes
        found = []
        if self.fault is None and trainer.num_bytes > self.machine.num_bytes:
            found.append(f"{self._too_much(trainer)} if all responses are different and as long as allowed")
        if self.machine.is_gpu:
            found += self._warnings_of_searcher(searcher)
            together = trainer.num_bytes + self.on_trainers_gpu * searcher.num_bytes
            if not found and together > self.machine.num_bytes:
                found.append(
                    f"memory: a Trainer ({gib(trainer.num_bytes)}) and {self.on_trainers_gpu} x Searcher "
                    f"({gib(searcher.num_bytes)}) share a GPU of {gib(self.machine.num_bytes)}. Give the run another "
                    "GPU, or lower search.engine.gpu_memory_utilization"
                )
            return found
        together = sum(plan.number * plan.num_bytes for plan in self.processes)
        if found or together <= self.machine.num_bytes:
            return found
        each = " and ".join(f"{plan.number} x {plan.process} {gib(plan.num_bytes)}" for plan in self.processes)
        return [f"memory: {each} need {gib(together)} together, and this machine has {gib(self.machine.num_bytes)}"]

    def _warnings_of_searcher(self, searcher: ProcessPlan) -> list[str]:
        """On a GPU."""
        found, weights = [], searcher.parts["engine's weights"]
        if self.gpus_of_searcher > self.machine.num_gpus:
            found.append(
                f"a Searcher needs {self.gpus_of_searcher} GPUs (search.engine), and this machine has "
                f"{self.machine.num_gpus}: Searchers need another machine"
            )
        if searcher.num_bytes > self.machine.num_bytes:
            found.append(f"{self._too_much(searcher)}. {self._remedy_of_searcher(searcher)}")
        elif not searcher.parts["keys and values"]:
            found.append(
                f"memory: the engine's weights ({gib(weights)}) leave nothing of vLLM's share of a GPU here to keys "
                "and values: raise search.engine.gpu_memory_utilization or search.engine.tensor_parallel_size, or "
                "give the run another GPU"
            )
        return found

    def _remedy_of_searcher(self, searcher: ProcessPlan) -> str:
        without_cache = searcher.num_bytes - searcher.parts["keys and values"]
        lower = "lower search.engine.gpu_memory_utilization (kv_cache_memory_bytes where that is given)"
        if without_cache < self.machine.num_bytes:
            return f"{lower.capitalize()}, or spread the engine over GPUs by search.engine.tensor_parallel_size"
        if without_cache - searcher.parts["engine's weights"] < self.machine.num_bytes:
            return f"Spread the engine over GPUs by search.engine.tensor_parallel_size, and {lower}"
        return "The reference policy is whole on one GPU: take a smaller model, or GPUs with more memory"

    def _too_much(self, plan: ProcessPlan) -> str:
        parts = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in plan.parts.items())
        needs, has = gib(plan.num_bytes), gib(self.machine.num_bytes)
        if self.machine.is_gpu or plan.number == 1:
            device = "a GPU here" if self.machine.is_gpu else "this machine"
            return f"memory: the {plan.process} needs {needs} ({parts}), and {device} has {has}"
        return (
            f"memory: {plan.number} processes of the {plan.process} need {needs} each ({parts}), and this machine has "
            f"{has} for all"
        )

    @property
    def _remedy(self) -> str:
        over = "over GPUs or machines (train.processes, train.machines, train.zero_stage=3)"
        return (
            "Take a smaller model, train adapters (train.lora_rank), or shard weights, gradient and moments "
            f"{over if self.machine.is_gpu else 'over machines (train.machines, train.zero_stage=3)'}."
        )


@dataclass(frozen=True)
class Lengths:
    """Tokens of a task's longest prompt and response, and those with which all prompts begin."""

    prompt: int
    common: int
    response: int


def plan_memory(config: RunConfig, response_tokens: int | None = None) -> MemoryPlan:
    """response_tokens: of a batch's different responses; None: the most that can be.

    Raises: UnknownShape: the model's files do not tell its shape.
    """
    folder = model_folder(config.model)
    tokenizer = tokenizer_of(folder)
    task = load_task(config.task, seed=config.seed, tokenizer=tokenizer)
    return plan_of(config, read_shape(folder), lengths(config, task, tokenizer), response_tokens)


def tokenizer_of(folder: Path):
    """The policy's tokenizer, from tokenizer.json if it exists: AutoTokenizer imports torch (ten seconds)."""
    if (folder / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast as Tokenizer
    else:
        from transformers import AutoTokenizer as Tokenizer
    return Tokenizer.from_pretrained(folder)


def lengths(config: RunConfig, task: RewardedTask, tokenizer) -> Lengths:
    prompts = [problem.encode(tokenizer) for problem in longest(task.train)]
    common = sum(1 for _ in takewhile(lambda at: at[0] == at[1], zip(min(prompts), max(prompts), strict=False)))
    limit = config.task.max_response_tokens or task.max_response_tokens
    return Lengths(max(map(len, prompts)), common, limit)


def longest(problems: list[Problem]) -> list[Problem]:
    """A few of the longest prompts, by their letters."""
    return sorted(problems, key=lambda problem: len(problem.prompt))[-NUM_PROMPTS:]


def plan_of(config: RunConfig, shape: Shape, of_task: Lengths, response_tokens: int | None = None) -> MemoryPlan:
    machine, largest = this_machine(), largest_pass(config, of_task, response_tokens)
    trainer = ProcessPlan("Trainer", config.train.processes, trainer_parts(shape, config.train, largest, machine))
    has_cores = cpu_threads(config.searchers + config.train.processes) > 1 and not config.synchronous
    # other policies are published whole
    by_adapters = bool(config.train.lora_rank) and shape.is_bfloat16 and not shape.num_not_linear
    needs = SearcherNeeds(
        config.search.num_devices, _cache(config, shape, machine), of_task.prompt + of_task.response,
        merges_adapters=by_adapters, scores_apart=has_cores,
    )  # fmt: skip
    number = config.searchers * (1 if machine.is_gpu else needs.num_devices)
    searcher = ProcessPlan("Searcher", number, searcher_parts(shape, machine, needs))
    trained = config.train.lora_rank * shape.num_sides if config.train.lora_rank else shape.num_parameters
    of_checkpoint = 16 if config.train.reference_reset_interval else 12  # the reference, after a reset
    files = {"a policy, whole": 2 * shape.num_parameters, "a checkpoint": of_checkpoint * trained}
    if by_adapters:
        files["a policy's adapters"] = (2 if machine.has_bfloat16 else 4) * trained
    shared = _searchers_by_gpu(config, machine) if machine.is_gpu else Counter()
    on_trainers = max((shared[gpu] for gpu in range(config.train.processes)), default=0)
    return MemoryPlan(
        [trainer, searcher], machine, files, config.task.name, of_task, on_trainers, config.search.num_devices
    )


def largest_pass(config: RunConfig, of_task: Lengths, response_tokens: int | None = None) -> Pass:
    """The Trainer's largest pass. Without `response_tokens` all responses are different and the longest."""
    K, num_processes = config.sampling.responses_per_prompt, config.train.num_processes
    B = math.ceil(config.sampling.prompts_per_batch / num_processes)  # each process has whole prompts
    of_responses = B * K * of_task.response if response_tokens is None else math.ceil(response_tokens / num_processes)
    batch = of_task.common + B * (of_task.prompt - of_task.common) + of_responses
    num_tokens = max(min(batch, config.train.micro_batch_tokens), of_task.prompt + of_task.response)
    fitting = (num_tokens - of_task.prompt) // of_task.response
    return Pass(num_tokens, min(K, max(1, fitting)), of_task.prompt, of_task.response)


def this_machine() -> Machine:
    if (on_gpu := gpu_bytes()) is None:
        return Machine(False, has_bfloat16(), memory_bytes())
    from tba.precision import compute_dtype

    return Machine(True, compute_dtype("cuda").itemsize == 2, on_gpu, num_gpus())


def _cache(config: RunConfig, shape: Shape, machine: Machine) -> int:
    """Bytes of the engine's keys and values: on a GPU what its share leaves beside the weights."""
    if not machine.is_gpu:
        with contextlib.suppress(ValueError):
            return int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 1) * GIB)
        return GIB
    num_processes = Counter(range(config.train.processes)) + _searchers_by_gpu(config, machine)
    if given := config.search.engine.get("kv_cache_memory_bytes"):  # then vLLM has no share
        return given
    share = config.search.engine.get("gpu_memory_utilization", ENGINE_SHARE / max(num_processes.values()))
    wide = 2 if machine.has_bfloat16 else 4
    return max(0, int(share * machine.num_bytes) - wide * shape.num_parameters // config.search.num_devices)


def _searchers_by_gpu(config: RunConfig, machine: Machine) -> Counter[int]:
    """Numbers of Searchers by GPU, if all of them run on this machine."""
    return Counter(gpu_places(machine.num_gpus, config.searchers, config.train.processes, config.search.num_devices))


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
