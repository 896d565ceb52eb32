"""A Searcher's start: engine, task and reference policy."""

import hashlib
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import task

from flows.config import RunConfig
from infra.gpus import GPU_START, free_share, take_gpus
from infra.machine import code_version, cpu_threads, keep_compiled_code_private
from infra.memory import keep_freed_memory
from infra.places import alone_here, num_places, take_place
from storage import attempts, machines
from storage.run_inputs import check_data, check_model, check_scorers
from storage.store import RunStore
from tba.models import model_folder

if TYPE_CHECKING:  # importing these takes torch's seconds
    from tba.rewards import RewardedTask
    from tba.searcher import Searcher

# vLLM's share of a Searcher's GPU memory; the rest is for the reference policy, a victim, and a reward model. On a CPU
# VLLM_CPU_KVCACHE_SPACE decides.
ENGINE_SHARE = 0.6
EVALUATE = "evaluate"  # in place of a Searcher's name: the process of `tba evaluate`, which does not record its data


def start_searcher(config: RunConfig, name: str, next_round: int, *, begins_ahead: bool = False) -> "Searcher":
    """Loads task, engine and reference policy, which takes seconds to minutes.

    begins_ahead: the caller samples rounds ahead if `samples_ahead`, so on a CPU the reference policy scores beside it.
    """
    num_devices = config.search.num_devices
    threads = max(1, searcher_threads(config) // num_devices)
    _set_environment(threads)
    gpu_share = take_gpus(*place_on_machine(config), num_devices)
    from transformers import AutoTokenizer

    from tba.engines import make_engine
    from tba.precision import default_device
    from tba.reference_policy import ReferencePolicy
    from tba.reference_process import ReferenceProcess
    from tba.searcher import Models, Searcher, SearcherIdentity
    from tba.tasks import load_task

    folder = model_folder(config.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task_ = load_task(config.task, seed=config.seed, tokenizer=tokenizer)
    _check_inputs(config, folder, task_, records=name != EVALUATE)
    max_response_tokens = config.task.max_response_tokens or task_.max_response_tokens
    prompts = [problem.encode(tokenizer) for problem in [*task_.train, *task_.heldout]]
    prompts += [problem.encode(tokenizer, system) for system in config.search.system_prompts for problem in task_.train]
    scores_apart = begins_ahead and default_device() == "cpu" and samples_ahead(config)
    # vLLM measures how a GPU's free memory changes while it starts, so processes that share one start in turn.
    with alone_here(GPU_START) if gpu_share < 1 else nullcontext():
        engine = make_engine(
            folder,
            max_tokens=max(map(len, prompts)) + max_response_tokens,
            max_sequences=min(config.search.prompts_per_round, len(task_.train)) * config.search.samples_per_prompt,
            seed=_seed(f"{config.seed}/{name}/{next_round}"),
            threads=threads,
            arguments={"gpu_memory_utilization": ENGINE_SHARE * free_share(gpu_share)} | config.search.engine,
            lora_rank=config.train.lora_rank,
        )
        reference = ReferenceProcess(folder, keep_freed_memory) if scores_apart else ReferencePolicy(folder)
        return Searcher(
            SearcherIdentity(name, config.seed, code_version()),
            task_,
            Models(tokenizer, engine, reference),
            config.search,
            max_response_tokens=max_response_tokens,
            temperature=config.train.temperature,
        )


def _check_inputs(config: RunConfig, folder: Path, task: "RewardedTask", records: bool) -> None:
    """folder: the model's. Raises: RunConfigMismatch: other models or problems than the run began with."""
    from tba.lora import base_fingerprint
    from tba.tasks import scorers_fingerprint

    store = RunStore(config.store, config.run)
    check_model(store, config.model, base_fingerprint(str(folder)))
    check_data(store, task.fingerprint, records=records)
    if scorers := scorers_fingerprint(config.task):
        check_scorers(store, scorers, records=records)


def _set_environment(threads: int) -> None:
    """Before torch is imported."""
    os.environ |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    keep_compiled_code_private()


def _seed(text: str) -> int:
    """Not the run's seed alone: different Searchers, and restarts of one, need different random numbers."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


def searcher_threads(config: RunConfig) -> int:
    """CPU threads of each Searcher on this machine; a Trainer beside them has as many, unless they take turns."""
    _, num_searchers, num_trainers = place_on_machine(config)
    return cpu_threads(num_searchers if config.synchronous else num_searchers + num_trainers)


def samples_ahead(config: RunConfig) -> bool:
    """Whether the engine samples the next rounds while a round is scored.

    Not if engine and scoring share one core. They would only slow each other down, and the Trainer, which learns from
    the same responses later (docs/LOG.md, 2026-11-25).
    """
    from tba.precision import default_device

    return not config.synchronous and (default_device() != "cpu" or searcher_threads(config) > 1)


start_searcher_task = task(task_run_name="start", persist_result=False)(start_searcher)


def num_trainer_processes_here(store: RunStore) -> int:
    """Processes of the Trainer on this machine, whether it is the Trainer's first one or a further one."""
    if (newest := attempts.newest_attempt(store)) is None:
        return 0
    first = newest.processes if newest.owner.is_here() else 0
    return first + machines.num_processes_here(store, newest.attempt)


def place_on_machine(config: RunConfig) -> tuple[int, int, int]:
    """This Searcher's place among the run's on this machine, from 0; the numbers of Searchers and Trainer processes.

    Beside the Trainer all of the run's Searchers are expected, although some may not have started yet. On another
    machine, only Searchers that have started count.
    """
    group = hashlib.blake2b(f"{config.store}/{config.run}".encode(), digest_size=8).hexdigest()
    place, num_trainers = take_place(group), num_trainer_processes_here(RunStore(config.store, config.run))
    return place, max(num_places(group), place + 1, config.searchers if num_trainers else 1), num_trainers
