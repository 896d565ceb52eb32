"""tba rescore: scores stored trajectories by another reward, without engine, policy or Prefect."""

import contextlib
import re
import time
from collections.abc import Callable
from types import SimpleNamespace

from flows.config import RunConfig, load_run
from storage import reward_versions
from storage.errors import AlreadyExists
from storage.new_shards import new_shards
from storage.shard_files import each_shard
from storage.store import RunStore
from tba.rewards import TASK, RewardedTask, load_reward
from tba.tasks import load_task
from tba.tasks.base import Problem

PROGRESS_S = 5


def rescore(store: RunStore, reward: str, version: str | None, say: Callable[[str], None]) -> tuple[str, int]:
    """Scores every trajectory that has no reward of this version. Returns the version and the number scored.

    reward: module:function, or task for the run's own. version: None: the function's name; for the run's own reward,
    the task's version, with '-' for characters that a version cannot have. A repeated call scores only the missing
    trajectories. Torn shards are left out.
    Raises: ValueError: no such reward, or it fails on a trajectory. StoreError.
    """
    config = load_run(store)
    task = load_task(config.task, seed=config.seed) if reward == TASK else _problems_of(config, say)
    of_cut = config.task.missing_eos_reward
    rewarding = task if reward == TASK else RewardedTask(task, [(load_reward(reward), 1.0)], of_cut)
    if version is None and reward == TASK:
        version = re.sub(r"[^A-Za-z0-9._-]", "-", task.version)[:64]
    version = version or reward.partition(":")[2].partition("(")[0]
    problems = {problem.prompt_id: problem for problem in [*task.train, *task.heldout]}
    num_scored, num_unknown, said_at = 0, 0, time.monotonic()
    name = f"{task.name} {task.version}" if reward == TASK else reward
    about = version, name, rewarding.version, task.fingerprint
    reward_versions.check_reward(store, *about)
    for searcher, rounds in reward_versions.unscored_shards(store, version, new_shards(store, {})).items():
        for number, shard in each_shard(store, searcher, rounds):
            asked = list(zip(shard["prompt_id"].to_pylist(), shard["prompt"].to_pylist(), strict=True))
            of_rows = [problems.get(prompt_id) or Problem(prompt_id, prompt, None) for prompt_id, prompt in asked]
            unknown = [prompt_id for prompt_id, _ in asked if prompt_id not in problems]
            if reward == TASK and unknown:
                raise ValueError(
                    f"reward: task {task.name} has no prompt {unknown[0]!r} (round {number} of searcher "
                    f"{searcher}), so it cannot score its responses; give a module:function"
                )
            told = (shard[name].to_pylist() for name in ("response", "response_tokens", "finish_reason"))
            values = rewarding.score(of_rows, *told).rewards
            if not num_scored:  # not before: a reward that fails at once can be mended under the version's name
                reward_versions.begin_version(store, *about)
            with contextlib.suppress(AlreadyExists):  # another process scores the same version
                reward_versions.record_rewards(store, version, shard, values)
            num_scored, num_unknown = num_scored + shard.num_rows, num_unknown + len(unknown)
            if time.monotonic() - said_at > PROGRESS_S:
                said_at = time.monotonic()
                say(f"{num_scored:,} trajectories scored")
    if not num_scored:
        reward_versions.begin_version(store, *about)
    if num_unknown:
        say(
            f"WARNING: {num_unknown:,} of these trajectories have prompts that task {task.name} does not have now: "
            f"{reward} got no answer and no columns for them"
        )
    return version, num_scored


def _problems_of(config: RunConfig, say: Callable[[str], None]) -> RewardedTask:
    """The run's task without its rewards, for its answers and columns; without problems, if its data is not here."""
    try:
        return load_task(config.task.model_copy(update={"rewards": (), "reward_weights": None}), seed=config.seed)
    except ValueError as error:
        say(f"WARNING: the run's task does not load here ({error})")
        name = config.task.name
        return RewardedTask(
            SimpleNamespace(name=name, train=[], heldout=[], stop=(), max_response_tokens=0, version="")
        )
