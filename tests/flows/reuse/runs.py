"""Small runs for the tests of stored trajectories that are used again. No engine runs."""

from pathlib import Path

from prefect.logging import disable_run_logger
from transformers import AutoTokenizer

from flows.config import RunConfig
from flows.reuse import warm_start
from flows.run.preflight import check_inputs
from storage import shards
from storage.queries import query
from storage.schema import TRAJECTORY, to_table
from storage.store import RunStore
from tba.config import TaskSettings
from tba.tasks import load_task
from tests.storage.helpers import make_shard

K = 4
TASK = load_task(TaskSettings(), seed=0)


def run_config(tmp_path: Path, model: Path, run: str, **changes) -> RunConfig:
    small = {
        "run": run,
        "store": (tmp_path / "store").as_uri(),
        "model": str(model),
        "searchers": 0,
        "sampling": {"prompts_per_batch": 4, "responses_per_prompt": K, "min_size": 8},
        "train": {"steps": 2, "checkpoint_interval": 1},
    }
    return RunConfig.model_validate(small | changes)


def new_run(tmp_path: Path, model: Path, run: str, num_shards: int = 2, prompts: int = 2, **changes) -> RunStore:
    """A run with shards of K responses to some problems of the task each; all rewards are 1."""
    config = run_config(tmp_path, model, run, **changes)
    store = RunStore(config.store, run)
    store.create_run(config.recorded())
    for number in range(num_shards):
        commit(store, model, number, TASK.train[number * prompts : (number + 1) * prompts])
    return store


def commit(store: RunStore, model: Path, number: int, problems: list) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = make_shard("s0", number, K * len(problems), reward=1.0, policy_step=30 + number).to_pylist()
    for index, row in enumerate(rows):
        problem = problems[index // K]
        text = f" {index % K}\n"
        row |= {"prompt_id": problem.prompt_id, "prompt": problem.prompt, "response": text}
        row |= {"prompt_tokens": tokenizer.encode(problem.prompt), "response_tokens": tokenizer.encode(text)}
        row |= {name: [-1.0] * 3 for name in ("behavior_logprobs", "reference_logprobs")}
    shards.commit_shard(store, to_table(rows, TRAJECTORY))


def begin(config: RunConfig) -> RunStore:
    """What the flow does before training."""
    store = RunStore(config.store, config.run)
    check_inputs(config)
    store.create_run(config.recorded())
    with disable_run_logger():
        warm_start.copy_sources(store, config)
    return store


def url(store: RunStore) -> str:
    return f"{store.url}/{store.run}"


def files(store: RunStore, folder: str) -> dict[str, bytes]:
    return {path: store.get(path) for path in store.list(folder)}


def rows_of(store: RunStore, statement: str) -> list[tuple]:
    return [tuple(row.values()) for row in query(store, statement).to_pylist()]


def silent(message: str) -> None:
    pass
