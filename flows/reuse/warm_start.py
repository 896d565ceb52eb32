"""Warm start: a run's buffer begins with trajectories of other runs, or with demonstrations.

    warm_start/plan.json                            the parts to copy, decided once, before the first shard
    trajectories/searcher=warm0/round=….parquet     copies from the first source; warm1: the second source
    warm_start/done.json                            the number of trajectories copied; the sources are no longer needed

The run has copies, so it does not need its sources afterwards. The plan determines the shards' names, so an interrupted
copy continues, and no trajectory counts twice. A copy's policy steps are 0, that of the run's first policy; the
fingerprint stays that of the policy that sampled the response. Trajectories of this run's held-out problems are left
out.
"""

import contextlib
import json

import pyarrow as pa
import pyarrow.compute as pc
from prefect import get_run_logger, task

from flows.config import RunConfig
from flows.reuse.sources import FileSource, RunSource, open_source
from storage import shards
from storage.errors import AlreadyExists
from storage.reward_versions import replace_columns
from storage.rules import Limits, broken_in_each
from storage.run_inputs import check_model
from storage.shards import files_named, is_warm_start_name
from storage.store import RunStore
from tba.models import model_folder
from tba.tasks import load_task
from tba.tasks.rows import digest

PLAN, DONE = shards.WARM_START_PLAN, "warm_start/done.json"


def check_sources(store: RunStore, config: RunConfig) -> list[RunSource | FileSource]:
    """The sources that are still to be copied. Raises: ValueError, StoreError: one is missing or does not fit."""
    return [] if store.exists(DONE) else open_sources(store, config)


def other_rewards(sources: list[RunSource | FileSource], version: str) -> list[str]:
    """A warning for each run among the sources whose rewards are not of this version, that of the run's Searchers."""
    found = ((source.url, source.reward_source()) for source in sources)
    return [
        f"the trajectories of {url} have rewards of {theirs!r}, and this run's Searchers will give rewards of "
        f"{version!r}: the loss compares both. Give the task.* settings of those rewards, as --set "
        "task.rewards=module:function, or --searchers 0"
        for url, theirs in found
        if theirs not in (None, version)
    ]


def open_sources(store: RunStore, config: RunConfig) -> list[RunSource | FileSource]:
    """Raises: ValueError, StoreError: a source is missing or does not fit this run."""
    sources = [open_source(url, config) for url in config.warm_start]
    if not store.exists(PLAN):  # a source that grows later may have shards that are not scored, and not in the plan
        for source in sources:
            source.check_scored()
    return sources


def copy_sources(store: RunStore, config: RunConfig) -> None:
    """Copies every source's trajectories into the run, unless that has been done.

    Raises: ValueError: trajectories fail the quality gate, or are too few for a run without Searchers.
    """
    if not config.warm_start or store.exists(DONE):
        return
    sources = open_sources(store, config)
    copy, plan = Copy(store, config), make_plan(store, sources)
    taken = [
        {"url": source.url} | copy.all_of(source, shards.warm_start_name(index), parts)
        for index, (source, parts) in enumerate(zip(sources, plan, strict=True))
    ]
    num_trajectories = sum(source["num_trajectories"] for source in taken)
    if not config.searchers:
        check_enough(config, num_trajectories)
    store.put_json(DONE, taken)
    get_run_logger().info("the buffer begins with %d trajectories: %s", num_trajectories, taken)


copy_sources_task = task(name="warm-start", task_run_name="warm start", persist_result=False)(copy_sources)


def check_enough(config: RunConfig, num_trajectories: int) -> None:
    """Raises: ValueError: without Searchers, training would wait for ever for more, or newer, trajectories."""
    sampling, steps = config.sampling, config.train.steps
    draws = steps * sampling.prompts_per_batch * sampling.responses_per_prompt
    if num_trajectories < sampling.min_size:
        fault, remedy = f"sampling.min_size is {sampling.min_size}", "a lower sampling.min_size"
    elif sampling.samples_per_insert is not None and draws > sampling.samples_per_insert * num_trajectories:
        fault = f"{steps} steps draw {draws}, and sampling.samples_per_insert is {sampling.samples_per_insert:g}"
        remedy = "a higher sampling.samples_per_insert, fewer train.steps"
    elif sampling.max_age is not None and steps > sampling.max_age + 1:
        fault = f"they count as sampled by policy 0, train.steps is {steps}, and sampling.max_age {sampling.max_age}"
        remedy = "a higher sampling.max_age, fewer train.steps"
    else:
        return
    raise ValueError(
        f"warm_start: the sources have {num_trajectories} trajectories, {fault}, and searchers is 0: training would "
        f"wait for ever. Start another run with {remedy}, more sources, or Searchers."
    )


def make_plan(store: RunStore, sources: list) -> list[list]:
    """The parts of each source, in the order of their shards. If a source grows later, the plan stays.

    Raises: ValueError: a file has changed since its first trajectories were copied.
    """
    plan = [{"url": source.url, "digest": source.digest, "parts": source.parts()} for source in sources]
    with contextlib.suppress(AlreadyExists):
        store.put_new(PLAN, json.dumps(plan).encode())  # long: without indentation
    planned = store.read_json(PLAN, list[dict])
    changed = [source.url for source, of in zip(sources, planned, strict=True) if source.digest != of["digest"]]
    copies = [file for file in files_named(store.list("trajectories")) if is_warm_start_name(file.searcher)]
    if changed and copies:
        raise ValueError(
            f"warm_start: {changed[0]} has changed since the copy began. Restore the file, or start another run."
        )
    if changed:  # a file whose first trajectories were refused has been mended
        store.put_json(PLAN, planned := plan)
    return [recorded["parts"] for recorded in planned]


class Copy:
    """Makes shards of a run from its sources' trajectories."""

    def __init__(self, store: RunStore, config: RunConfig) -> None:
        from transformers import AutoConfig, AutoTokenizer

        from tba.demonstrations import Demonstrations
        from tba.lora import base_fingerprint
        from tba.reference_policy import ReferencePolicy

        folder = model_folder(config.model)
        self._fingerprint = base_fingerprint(str(folder))
        check_model(store, config.model, self._fingerprint)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        task_ = load_task(config.task, seed=config.seed, tokenizer=tokenizer)
        self._store = store
        self._limits = Limits(AutoConfig.from_pretrained(folder).get_text_config().vocab_size, config.train.steps)
        self._heldout = {
            name: pa.array([getattr(problem, name) for problem in task_.heldout], pa.string())
            for name in ("prompt", "prompt_id")
        }
        self._texts = {problem.prompt_id: problem.prompt for problem in task_.train}
        self._demonstrations = Demonstrations(task_, tokenizer, ReferencePolicy(folder), config.train.temperature)

    def all_of(self, source: RunSource | FileSource, searcher: str, parts: list) -> dict:
        """Commits a source as the shards of a searcher of that name. Returns the numbers taken and left out."""
        source.compare_model(self._fingerprint)
        number = num_trajectories = num_heldout = 0
        made: list[pa.Table] = []
        for rows in source.read(parts):
            if rows is None:  # deleted; an interrupted copy may have it already
                number += self._store.exists(shards.shard_path(searcher, number))
                continue
            trainable = self._with_own_ids(self._without_heldout(rows))
            num_trajectories += trainable.num_rows
            num_heldout += rows.num_rows - trainable.num_rows
            if trainable.num_rows:  # rounds have no gaps
                if not self._store.exists(shards.shard_path(searcher, number)):
                    made.append(self._shard(source, trainable, searcher, number))
                number += 1
            if len(made) == source.shards_at_once:
                self._commit(source, made)
                made = []
        self._commit(source, made)
        return {"searcher": searcher, "num_trajectories": num_trajectories, "num_heldout_left_out": num_heldout}

    def _without_heldout(self, rows: pa.Table) -> pa.Table:
        for name in _text_columns(rows, "prompt", "prompt_id"):
            rows = rows.filter(pc.invert(pc.is_in(rows[name].cast(pa.string()), value_set=self._heldout[name])))
        return rows

    def _with_own_ids(self, rows: pa.Table) -> pa.Table:
        """Gives a prompt a new id, made from its text, if its id belongs to another text.

        The buffer tells prompts apart by their ids, and the loss compares responses to one prompt.
        """
        if not _text_columns(rows, "prompt_id"):
            return rows
        pairs = zip(rows["prompt_id"].to_pylist(), rows["prompt"].to_pylist(), strict=True)
        ids = [name if self._texts.setdefault(name, text) == text else digest(text) for name, text in pairs]
        return rows.set_column(rows.column_names.index("prompt_id"), "prompt_id", pa.array(ids, pa.string()))

    def _shard(self, source: RunSource | FileSource, rows: pa.Table, searcher: str, number: int) -> pa.Table:
        here = {
            "trajectory_id": [shards.trajectory_id(searcher, number, index) for index in range(rows.num_rows)],
            "searcher": [searcher] * rows.num_rows,
            "round": [number] * rows.num_rows,
            "policy_step": [0] * rows.num_rows,
            "last_policy_step": [0] * rows.num_rows,
        }
        return replace_columns(source.trajectories(rows, self._demonstrations), here)

    def _commit(self, source: RunSource | FileSource, made: list[pa.Table]) -> None:
        for shard, reasons in zip(made, broken_in_each(made, self._limits), strict=True):
            if reasons:
                raise ValueError(f"warm_start: trajectories of {source.url} fail validation: {'; '.join(reasons)}")
            with contextlib.suppress(AlreadyExists):  # another process starts the same run; only one will train it
                shards.commit_shard(self._store, shard)


def _text_columns(rows: pa.Table, *names: str) -> list[str]:
    """Those of the columns that the rows have as text. A file may lack them, or have others; it is checked later."""
    types = {name: rows.schema.field(name).type for name in names if name in rows.column_names}
    return [name for name, kind in types.items() if pa.types.is_string(kind) or pa.types.is_large_string(kind)]
