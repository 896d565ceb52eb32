"""A Searcher's start: engine, task and reference policy."""

import hashlib
import os
import re
import socket

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.config import RunConfig
from infra.machine import code_version, cpu_threads, take_gpu
from storage import attempts, quality
from storage.store import RunStore
from tba.models import model_folder


@task(task_run_name="start", cache_policy=NO_CACHE, persist_result=False)
def start_searcher(config: RunConfig, name: str, next_round: int):
    """Loads engine and reference policy (seconds to minutes)."""
    threads = cpu_threads(config.searchers if config.synchronous else config.searchers + 1)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is imported
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gpu_share = take_gpu(*place_among_gpus(config, name))
    from transformers import AutoTokenizer

    from tba.engine import make_engine
    from tba.searcher import Searcher, SearcherSettings
    from tba.tasks import load_task

    folder = model_folder(config.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task_ = load_task(config.task, seed=config.seed, tokenizer=tokenizer)
    max_response_tokens = config.task.max_response_tokens or task_.max_response_tokens
    quality.load_suite()  # seconds of imports: now, and not while a first shard waits for them
    prompts = tokenizer([problem.prompt for problem in [*task_.train, *task_.heldout]])["input_ids"]
    prompts += [problem.encode(tokenizer, system) for system in config.search.system_prompts for problem in task_.train]
    engine = make_engine(
        folder,
        max_tokens=max(map(len, prompts)) + max_response_tokens,
        max_sequences=config.search.prompts_per_round * config.search.samples_per_prompt,
        # Not the run's seed alone: Searchers, and lives of one Searcher, must not sample alike.
        seed=int.from_bytes(hashlib.blake2b(f"{config.seed}/{name}/{next_round}".encode(), digest_size=4).digest()),
        threads=threads,
        gpu_share=gpu_share,
    )
    return Searcher(
        name,
        task_,
        tokenizer,
        engine,
        folder,
        SearcherSettings(
            config.search, max_response_tokens, config.train.temperature, config.seed, code_version=code_version()
        ),
    )


def place_among_gpus(config: RunConfig, name: str) -> tuple[int, int]:
    """Which of the run's processes a Searcher is, and of how many: its Trainer's are the first where that is here."""
    owner = attempts.trainer(RunStore(config.store, config.run))
    trainers = config.train.processes if owner and owner[0] == socket.gethostname() else 0
    number = re.search(r"\d+$", name)
    return trainers + (int(number[0]) if number else config.searchers), trainers + max(config.searchers, 1)
