"""Checks before a run starts: the task and its data, the model, the store, the run's configuration."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from multiprocessing import get_context

from flows.config import RunConfig
from flows.reuse.warm_start import check_sources, other_rewards
from flows.run.memory import Lengths, lengths, longest, plan_of, tokenizer_of
from flows.trainer.trackers import check_trackers
from infra.gpus import num_gpus
from storage.reward_versions import newest_version
from storage.run_inputs import check_data
from storage.store import RunStore
from storage.summary import is_finished
from tba.config import SearchSettings, TaskSettings
from tba.memory import UnknownShape, read_shape
from tba.model_files import (
    NO_EXPERTS,
    context_length,
    is_mixture_of_experts,
    text_config,
    unsupported,
    with_window,
)
from tba.models import model_folder
from tba.rewards import RewardedTask
from tba.tasks import READ_BY, TASKS, load_task
from tba.tasks.tldr import judge


def check_inputs_in_a_process(config: RunConfig) -> list[str]:
    """`check_inputs` in a process that ends with it, so that a model which a user's reward loads leaves the memory.

    Raises: as check_inputs. ValueError: that process was killed, or a user's function ended it."""
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(check_inputs, config).result()
    except BrokenProcessPool as error:
        raise ValueError(
            "the process that tries data and rewards ended early: it was killed, perhaps for lack of memory, or one of "
            "your functions ended it; its output is above"
        ) from error


def check_inputs(config: RunConfig) -> list[str]:
    """Checks the inputs of a run. Returns warnings about possible faults later in the run.

    Raises: ValueError, storage.errors.StoreError: the run cannot work; the message names the fault and the remedy."""
    store = RunStore(config.store, config.run)
    warnings = [warning] if (warning := store.check_writable()) else []
    store.check_config(config.recorded(), config.read_recorded)
    is_new = not store.exists("run.json")  # an older run goes on as it is
    if is_new:
        check_effects(config)
        check_temperatures(config)
        warnings += pointless_settings(config, store)
    sources = check_sources(store, config)
    check_trackers(config.trackers)
    check_packages(config)
    with _keeping_paths(config.run, is_new):
        folder = model_folder(config.model)
    if fault := unsupported(text_config(folder)):
        raise ValueError(f"model {config.model}: {fault}")
    if config.train.lora_rank and is_mixture_of_experts(folder):
        raise ValueError(NO_EXPERTS)
    tokenizer = tokenizer_of(folder)
    with _keeping_paths(config.run, is_new):
        task = load_task(config.task, seed=config.seed, tokenizer=tokenizer)
    if not is_finished(store):
        check_data(store, task.fingerprint, records=False)
    task.check(tokenizer)
    if is_new and config.task.gold_reward_model is not None:  # read after training, when it cannot be changed any more
        judge(config.task.gold_reward_model, "task.gold_reward_model").check()
    if task.num_left_out:
        num_all, limit = task.num_left_out + len(task.train) + len(task.heldout), config.task.max_prompt_tokens
        warnings.append(f"task.max_prompt_tokens is {limit}: {task.num_left_out} of {num_all} prompts are left out")
    if len(task.train) < config.sampling.prompts_per_batch:
        raise ValueError(
            f"task {config.task.name} has {len(task.train)} training problems, but sampling.prompts_per_batch (B) is "
            f"{config.sampling.prompts_per_batch}, and a batch draws B distinct prompts: lower it"
            + (", or give more data" if config.task.name in READ_BY["data"] else "")
        )
    if warning := changed_reward(store, task.version):
        warnings.append(warning)
    if is_new and config.searchers:
        warnings += other_rewards(sources, task.version)
    check_rounds(config, len(task.train))
    if is_new:
        check_age(config)
        check_context(config, task, tokenizer, context_length(with_window(folder)))
    with contextlib.suppress(UnknownShape):
        warnings += plan_of(config, read_shape(folder), lengths(config, task, tokenizer)).warnings
    return warnings


@contextlib.contextmanager
def _keeping_paths(run: str, is_new: bool) -> Iterator[None]:
    """Adds to an error of model or data that an existing run has one place for each."""
    try:
        yield
    except ValueError as error:
        if is_new:
            raise
        raise ValueError(
            f"{str(error).removesuffix('.')}. Run {run!r} keeps the paths of its model and data; if one was moved, put "
            "it, or a link to it, where it was"
        ) from error


def pointless_settings(config: RunConfig, store: RunStore) -> list[str]:
    """Warnings: no Searcher samples for the run; the reference is never reset."""
    found = []
    if not config.searchers and not config.warm_start:
        found.append(f"searchers is 0: training waits until `{store.command(f'searchers {config.run} +1')}` adds one")
    if (interval := config.train.reference_reset_interval or 0) >= config.train.steps:
        found.append(
            f"train.reference_reset_interval is {interval} and train.steps {config.train.steps}: the reference is "
            "never reset before a step"
        )
    return found


def changed_reward(store: RunStore, version: str) -> str | None:
    """A warning if the newest round of the run's own Searchers has rewards of another version."""
    stored = newest_version(store)
    if stored in (None, version):
        return None
    return (
        f"the reward has changed: stored trajectories have rewards of version {stored!r}, new ones will have "
        f"{version!r}, and a batch mixes them, as the choice of the best policy does. To give "
        "all of them the new reward: "
        f"{store.command(f'rescore {store.run} --reward task --version NAME')}, then "
        f"{store.command(f'train NEW --warm-start {store.run} --set reward_version=NAME')}, with the same --model and "
        "task.* settings"
    )


def check_packages(config: RunConfig) -> None:
    """Raises: ValueError: a package is not installed that a setting needs."""
    if config.train.num_processes > 1 and find_spec("deepspeed") is None:
        raise ValueError(
            f"train.processes is {config.train.processes} and train.machines {config.train.machines}, but DeepSpeed is "
            "not installed; install it, or tba's extra deepspeed, or leave the settings out"
        )
    if config.train.lora_rank and find_spec("peft") is None:
        raise ValueError(
            f"train.lora_rank is {config.train.lora_rank}, but peft is not installed; "
            "install it, or tba's extra lora, or leave the setting out"
        )
    if config.search.near_duplicate_distance and find_spec("rapidfuzz") is None:
        raise ValueError(
            f"search.near_duplicate_distance is {config.search.near_duplicate_distance}, but rapidfuzz is not "
            "installed; install it, or tba's extra tasks, or leave the setting out"
        )


def check_effects(config: RunConfig) -> None:
    """Raises: ValueError: a setting would have no effect."""
    name, usual = config.task.name, TaskSettings()
    for setting, tasks in READ_BY.items():
        value = getattr(config.task, setting)
        if name in TASKS and name not in tasks and value != getattr(usual, setting):
            raise ValueError(
                f"task.{setting} is {value!r}, but task {name} does not use it: name a task that does "
                f"(--task {' or '.join(tasks)}), or leave it out"
            )
    train, sampling = config.train, config.sampling
    for setting, value, needed, is_set in (
        ("sampling.uniform_fraction", sampling.uniform_fraction, "sampling.reward_temperature",
         sampling.reward_temperature is not None),
        ("train.reward_tempering_steps", train.reward_tempering_steps, "train.reward_tempering",
         train.reward_tempering != 1),
        ("train.fluency_steps", train.fluency_steps, "train.fluency_temperature", train.fluency_temperature != 1),
        *(
            (f"search.{setting}", value, "search.exploration_probability", config.search.exploration_probability > 0)
            for setting in ("exploration_temperature", "exploration_top_p")
            if (value := getattr(config.search, setting)) != getattr(SearchSettings(), setting)
        ),
    ):  # fmt: skip
        if value and not is_set:
            raise ValueError(f"{setting} is {value}, but has no effect without {needed}: set both, or leave it out")


def check_temperatures(config: RunConfig) -> None:
    """Raises: ValueError: vLLM refuses a temperature, or takes another one. Older runs with such ones can be read."""
    explored = zip(("lowest", "highest"), config.search.exploration_temperature, strict=True)
    named = {f"search.exploration_temperature ({which})": value for which, value in explored}
    for name, value in (named | {"search.temperature": config.search.temperature}).items():
        if not 0.01 <= value <= 2:
            raise ValueError(f"{name} is {value}; vLLM samples at 0.01 <= temperature <= 2")


def check_rounds(config: RunConfig, num_problems: int) -> None:
    """Raises: ValueError: the Trainer of a synchronous run could not begin with one round."""
    if not config.synchronous:
        return
    distance = config.search.near_duplicate_distance
    num_prompts = min(config.search.prompts_per_round, num_problems)
    # of a prompt's responses at least one is no near-duplicate
    num_certain = num_prompts * (1 if distance else config.search.samples_per_prompt)
    if num_certain < config.sampling.min_size:
        kept = ", of which near-duplicates are dropped," if distance else ""
        raise ValueError(
            f"synchronous: a round has {num_prompts} prompts, and {num_certain} trajectories{kept} are certain, but "
            f"sampling.min_size is {config.sampling.min_size}: training might never start; lower it to {num_certain}"
        )


def check_age(config: RunConfig) -> None:
    """Raises: ValueError: a step would need a policy that is published after it, so training would wait for ever."""
    max_age, interval = config.sampling.max_age, config.train.sync_interval
    only_copies = config.warm_start and not config.searchers  # flows/reuse/warm_start.py knows more about them
    if max_age is not None and not only_copies and max_age + 1 < min(interval, config.train.steps):
        raise ValueError(
            f"sampling.max_age is {max_age}, but train.sync_interval is {interval}: then step {max_age + 2} "
            f"needs a policy that is published only after step {interval}, so training would wait for ever; raise "
            f"sampling.max_age to {interval - 1}, or lower train.sync_interval to {max_age + 1}"
        )


def check_context(config: RunConfig, task: RewardedTask, tokenizer, limit: int | None) -> None:
    """Raises: ValueError: prompt and response have more than `limit` tokens, which the model takes."""
    if limit is None:
        return
    systems = ["", *config.search.system_prompts]
    prompt = max(
        len(problem.encode(tokenizer, system))
        for problem in longest([*task.train, *task.heldout])
        for system in systems
    )
    response = config.task.max_response_tokens or task.max_response_tokens
    if prompt + response > limit:
        raise ValueError(
            f"the longest prompt has {prompt} tokens and a response may have {response}, but the model's context is "
            f"{limit} tokens: lower task.max_response_tokens, or leave long prompts out by task.max_prompt_tokens"
        )


def check_memory(config: RunConfig) -> None:
    """Raises: ValueError: the Trainer's weights, gradient and moments alone do not fit on this machine, or it has GPUs,
    but not one for each of its Trainer processes."""
    if 0 < (num_here := num_gpus()) < config.train.processes:
        raise ValueError(
            f"train.processes is {config.train.processes}, and this machine has {num_here} GPUs: each process of the "
            f"Trainer needs one; give train.processes={num_here}"
        )
    with contextlib.suppress(UnknownShape):
        shape = read_shape(model_folder(config.model))
        if fault := plan_of(config, shape, Lengths(prompt=1, common=0, response=1)).fault:
            raise ValueError(fault)
