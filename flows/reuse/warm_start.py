"""Warm start: a run's buffer begins with trajectories of other runs, or with demonstrations.

    warm_start/plan.json                            what is taken over, decided once, before the first shard
    trajectories/searcher=warm0/round=….parquet     of the first source, warm1 of the second: shards like any other
    warm_start/done.json                            how much it was; from here on the sources are not needed

They are copies, so the run is whole by itself, whatever becomes of its sources. Shards' names follow from the plan: a
copy that was interrupted goes on, and nothing counts twice. `policy_step` is 0, older than any policy of this run; the
fingerprint stays that of the weights that spoke. What asks a held-out problem of this run is left out.
"""

import contextlib
import hashlib
import json
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows.config import RunConfig, load_run
from infra.machine import code_version
from storage import quality, reward_versions, shards
from storage.errors import AlreadyExists, NotFound
from storage.reward_versions import replace_columns
from storage.schema import SCHEMA_VERSION, TRAJECTORY, to_table
from storage.store import RunStore, read_file
from tba.models import model_folder
from tba.tasks import load_task

PLAN, DONE = "warm_start/plan.json", "warm_start/done.json"
ROWS_PER_SHARD = 500  # of demonstrations: what is lost when their scoring is interrupted
SHARDS_AT_ONCE = 32  # of another run; the quality gate takes half a second, however many


def check_sources(store: RunStore, config: RunConfig) -> None:
    """Raises: ValueError, StoreError: a source is not there, or cannot be what this run begins with."""
    if not store.exists(DONE):
        for url in config.warm_start:
            open_source(url, config)


@task(name="warm-start", task_run_name="warm start", cache_policy=NO_CACHE, persist_result=False)
def take_over(store: RunStore, config: RunConfig) -> None:
    """Copies every source's trajectories into the run, once.

    Raises: ValueError: trajectories that do not pass the quality gate, or too few where no Searcher will add to them.
    """
    if not config.warm_start or store.exists(DONE):
        return
    sources = [open_source(url, config) for url in config.warm_start]
    copy, plan = Copy(store, config), make_plan(store, sources)
    taken = [
        {"url": source.url} | copy.all_of(source, f"warm{index}", parts)
        for index, (source, parts) in enumerate(zip(sources, plan, strict=True))
    ]
    num_trajectories = sum(source["num_trajectories"] for source in taken)
    if not config.searchers and num_trajectories < config.sampling.min_size:
        raise ValueError(
            f"warm_start: {num_trajectories} trajectories in all, but sampling.min_size is {config.sampling.min_size} "
            "and no Searcher will add to them: training could never begin. Start another run with a lower min_size, "
            "more sources, or searchers."
        )
    store.put(DONE, json.dumps(taken, indent=1).encode())
    get_run_logger().info("the buffer begins with %d trajectories: %s", num_trajectories, taken)


def make_plan(store: RunStore, sources: list) -> list[list]:
    """The parts of each source, in the order that numbers their shards. A source may grow; the plan stays."""
    plan = [{"url": source.url, "digest": source.digest, "parts": source.parts()} for source in sources]
    with contextlib.suppress(AlreadyExists):
        store.put_new(PLAN, json.dumps(plan).encode())
    planned = json.loads(store.get(PLAN))
    for source, recorded in zip(sources, planned, strict=True):
        if source.digest != recorded["digest"]:
            raise ValueError(
                f"warm_start: {source.url} has changed since a part of it was taken over. Put it back as it was, or "
                "start another run."
            )
    return [recorded["parts"] for recorded in planned]


def open_source(url: str, config: RunConfig):
    """The source behind a URL. Raises: ValueError, StoreError: see RunSource and FileSource."""
    return FileSource(url) if url.endswith(".parquet") else RunSource(url, config)


class RunSource:
    """Another run's trajectories, with the reward that is asked for."""

    digest = None  # shards are immutable

    def __init__(self, url: str, config: RunConfig) -> None:
        """Raises: ValueError: no such run, another model, or no such reward version."""
        self.url, self._version = url, config.reward_version
        root, _, run = url.rpartition("/")
        self._store = RunStore(root, run)
        try:
            theirs = load_run(self._store)
        except NotFound as error:
            raise ValueError(f"warm_start: there is no run {run!r} in {root}") from error
        if theirs.model != config.model:
            raise ValueError(
                f"warm_start: run {run!r} has model {theirs.model}, this one {config.model}: its tokens mean nothing "
                "here. Write prompt and response to a .parquet file, and name that as a source."
            )
        if self._version is not None and not reward_versions.has_version(self._store, self._version):
            raise ValueError(
                f"reward_version: run {run!r} has no rewards of version {self._version!r}; score it first: "
                f"tba rescore {run} --version {self._version} --reward ..."
            )
        # the reference's log-probabilities hold for one temperature of the objective
        self._is_for_other_temperature = theirs.train.temperature != config.train.temperature
        self.shards_at_once = 1 if self._is_for_other_temperature else SHARDS_AT_ONCE

    def parts(self) -> list[list]:
        return [
            [searcher, number] for searcher, rounds in shards.new_shards(self._store, {}).items() for number in rounds
        ]

    def read(self, part: list) -> pa.Table:
        searcher, number = part
        shard = shards.read_shards(self._store, searcher, [number])
        return shard if self._version is None else reward_versions.with_rewards(self._store, self._version, shard)

    def trajectories(self, rows: pa.Table, copy: "Copy") -> pa.Table:
        if self._is_for_other_temperature:
            tokens = (rows[name].to_pylist() for name in ("prompt_tokens", "response_tokens"))
            rows = replace_columns(rows, {"reference_logprobs": copy.reference.logprobs(*tokens, copy.temperature)})
        return rows


class FileSource:
    """A Parquet file of demonstrations: prompt and response; other columns of a trajectory where there are."""

    shards_at_once = 1  # what the policy has scored is kept

    def __init__(self, url: str) -> None:
        """Raises: ValueError: not a Parquet file, or a column is missing or not text."""
        self.url = url
        data = read_file(url)
        self.digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        try:
            self._rows = pq.read_table(pa.BufferReader(data))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"warm_start: {url} is not a Parquet file ({error})") from error
        names = [name for name in self._rows.column_names if name in TRAJECTORY.names]
        self._rows = self._rows.select(names)
        for name in ("prompt", "response"):
            if name not in names:
                raise ValueError(f"warm_start: {url} has no column {name!r}, only {', '.join(names) or 'others'}")
            if not pa.types.is_string(self._rows[name].type) and not pa.types.is_large_string(self._rows[name].type):
                raise ValueError(f"warm_start: {url}: {name} is {self._rows[name].type}; it must be text")
            if self._rows[name].null_count:
                raise ValueError(f"warm_start: {url}: {name} is null in {self._rows[name].null_count} rows")
            self._rows = self._rows.set_column(names.index(name), name, self._rows[name].cast(pa.string()))
        tokens = {"prompt_tokens", "response_tokens"} & set(names)
        if len(tokens) == 1 or ("reference_logprobs" in names and not tokens):
            raise ValueError(
                f"warm_start: {url} must have prompt_tokens and response_tokens both, or neither, and "
                "reference_logprobs only with them: leave out what the policy's tokenizer and model can compute"
            )

    def parts(self) -> list[list]:
        return [[start, ROWS_PER_SHARD] for start in range(0, self._rows.num_rows, ROWS_PER_SHARD)]

    def read(self, part: list) -> pa.Table:
        return self._rows.slice(*part)

    def trajectories(self, rows: pa.Table, copy: "Copy") -> pa.Table:
        of_all = dict.fromkeys(TRAJECTORY.names) | {
            "policy_fingerprint": "demonstration",
            "temperature": 1.0,
            "top_p": 1.0,
            "system_prompt": "",
            "reward_version": "given",
            "code_version": code_version(),
            "schema_version": SCHEMA_VERSION,
            "created_at": datetime.now(UTC),
        }
        completed = copy.demonstrations.complete(rows.to_pylist())
        return to_table([of_all | {"rewards": {"given": row["reward"]}} | row for row in completed], TRAJECTORY)


class Copy:
    """Makes shards of a run from what its sources hold."""

    def __init__(self, store: RunStore, config: RunConfig) -> None:
        from transformers import AutoConfig, AutoTokenizer

        from tba.demonstrations import Demonstrations
        from tba.reference_policy import ReferencePolicy

        folder = model_folder(config.model)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        task_ = load_task(config.task, seed=config.seed, tokenizer=tokenizer)
        self._store = store
        self._vocab_size = AutoConfig.from_pretrained(folder).vocab_size
        self._heldout = pa.array([problem.prompt for problem in task_.heldout], pa.string())
        self.reference, self.temperature = ReferencePolicy(folder), config.train.temperature
        self.demonstrations = Demonstrations(task_, tokenizer, self.reference, self.temperature)

    def all_of(self, source: RunSource | FileSource, searcher: str, parts: list) -> dict:
        """Commits a source as the shards of a searcher of that name. Returns how much was taken and left out."""
        number = num_trajectories = num_heldout = 0
        made: list[pa.Table] = []
        for part in parts:
            rows = source.read(part)
            trainable = rows.filter(pc.invert(pc.is_in(rows["prompt"], value_set=self._heldout)))
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

    def _shard(self, source: RunSource | FileSource, rows: pa.Table, searcher: str, number: int) -> pa.Table:
        here = {
            "trajectory_id": [shards.trajectory_id(searcher, number, index) for index in range(rows.num_rows)],
            "searcher": [searcher] * rows.num_rows,
            "round": [number] * rows.num_rows,
            "policy_step": [0] * rows.num_rows,
        }
        return replace_columns(source.trajectories(rows, self), here)

    def _commit(self, source: RunSource | FileSource, made: list[pa.Table]) -> None:
        for shard, reasons in zip(made, quality.validate_shards(made, self._vocab_size), strict=True):
            if reasons:
                raise ValueError(f"warm_start: trajectories of {source.url} cannot be trained on: {'; '.join(reasons)}")
            with contextlib.suppress(AlreadyExists):  # another process starts the same run; only one will train it
                shards.commit_shard(self._store, shard)
