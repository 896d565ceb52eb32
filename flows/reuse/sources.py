"""The sources of a warm start: another run, or a Parquet file of demonstrations."""

import hashlib
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from flows.config import RunConfig, load_run
from infra.machine import code_version
from storage import intake, reward_versions, shards
from storage.errors import DamagedRecord, NotFound, StoreError, TornShard
from storage.new_shards import new_shards
from storage.reward_versions import replace_columns
from storage.rules import Limits
from storage.run_inputs import recorded_fingerprint
from storage.schema import SCHEMA_VERSION, TRAJECTORY, to_table
from storage.shard_files import read_many
from storage.store import RunStore, read_url

if TYPE_CHECKING:
    from tba.demonstrations import Demonstrations

log = logging.getLogger("tba.reuse")

ROWS_PER_SHARD = 500  # demonstrations in a shard; interrupted scoring loses at most one shard
SHARDS_AT_ONCE = 32  # another run's shards that are checked together, in about the time of one


def open_source(url: str, config: RunConfig):
    """The source behind a URL. Raises: ValueError, StoreError: see RunSource and FileSource."""
    return FileSource(url) if url.endswith(".parquet") else RunSource(url, config)


class RunSource:
    """Another run's trajectories, with the requested reward version."""

    digest = None  # shards are immutable

    def __init__(self, url: str, config: RunConfig) -> None:
        """Raises: ValueError: no such run, another model or task, or no such reward version."""
        self.url, self._version = url, config.reward_version
        root, _, run = url.rpartition("/")
        self._store = RunStore(root, run)
        try:
            theirs = load_run(self._store)
        except NotFound as error:
            raise ValueError(f"warm_start: there is no run {run!r} in {root}") from error
        if theirs.model != config.model:
            raise ValueError(
                f"warm_start: run {run!r} has model {theirs.model}, this one {config.model}: stored tokens "
                f"and reference log-probabilities are of that model. Give --model {theirs.model}, or name a .parquet "
                "file with the columns prompt and response, and reward if the task has no such prompts."
            )
        if theirs.task.generator != config.task.generator:
            raise ValueError(
                f"warm_start: run {run!r} has generator {theirs.task.generator}, this one {config.task.generator}: "
                "its prompts would be trained, and never sampled or evaluated. Name a run of the same generator, or a "
                ".parquet file of prompts, responses and rewards."
            )
        if theirs.task.name != config.task.name:
            raise ValueError(
                f"warm_start: run {run!r} has task {theirs.task.name}, this one {config.task.name}: its prompts would "
                f"be trained, and never sampled or evaluated. Give --task {theirs.task.name} with its task.* settings "
                "(run.json has them), or name a .parquet file of prompts, responses and rewards."
            )
        if self._version is not None and not reward_versions.has_version(self._store, self._version):
            raise ValueError(
                f"reward_version: run {run!r} has no rewards of version {self._version!r}; score it first: "
                f"{self._store.command(f'rescore {run} --version {self._version} --reward ...')}"
            )
        # stored reference log-probabilities are those at the other run's train.temperature
        self._has_other_reference = theirs.train.temperature != config.train.temperature

    def check_scored(self) -> None:
        """Raises: NotFound: shards have no rewards of the version."""
        if self._version is not None:
            reward_versions.check_scored(self._store, self._version, self._rounds)

    @cached_property
    def _rounds(self) -> dict[str, list[int]]:
        """Of each Searcher the rounds committed now: those that are checked are copied."""
        return new_shards(self._store, {})

    def reward_source(self) -> str | None:
        """What gave the rewards, as `RewardedTask.version` names it; None: unknown."""
        if self._version is not None:
            return reward_versions.source_of(self._store, self._version)
        return reward_versions.newest_version(self._store)

    @property
    def shards_at_once(self) -> int:
        return 1 if self._has_other_reference else SHARDS_AT_ONCE

    def compare_model(self, fingerprint: str) -> None:
        """fingerprint: of this run's model. If the other run's model of that name has other weights, the reference
        log-probabilities are computed again."""
        self._has_other_reference |= recorded_fingerprint(self._store) not in (None, fingerprint)

    def parts(self) -> list[list]:
        return [[searcher, number] for searcher, rounds in self._rounds.items() for number in rounds]

    def read(self, parts: list[list]) -> Iterator[pa.Table | None]:
        """The trajectories of each part; no rows if its shard or rewards are torn, or break a rule of the intake.

        None: the shard was deleted since the plan was made (the source's upkeep).
        """
        rounds: dict[str, list[int]] = {}  # as `parts` made them, each searcher's together and in order
        for searcher, number in parts:
            rounds.setdefault(searcher, []).append(number)
        for origin, shard in read_many(self._store, rounds):
            if isinstance(shard, NotFound):
                log.warning("warm start: a shard was deleted meanwhile and is left out: %s", shard)
                yield None
            else:
                yield self._usable(origin, shard)

    def _usable(self, origin: tuple[str, int], shard: pa.Table | StoreError) -> pa.Table:
        """A shard, or its error, with the rewards of the version. No rows: see `read`."""
        try:
            if isinstance(shard, StoreError):
                raise shard
            if self._version is not None:
                shard = reward_versions.with_rewards(self._store, self._version, shard)
        except (TornShard, DamagedRecord) as error:
            log.warning("warm start: a torn shard is left out: %s", error)
            return TRAJECTORY.empty_table()
        if reasons := intake.check({origin: shard}, Limits()):
            where = f"{shards.shard_path(*origin)} of {self.url}"
            log.warning("warm start: %s breaks rules and is left out: %s", where, "; ".join(reasons[origin]))
            return TRAJECTORY.empty_table()
        return shard

    def trajectories(self, rows: pa.Table, demonstrations: "Demonstrations") -> pa.Table:
        """The rows as they are to be stored, with reference log-probabilities of this run."""
        if self._has_other_reference:
            tokens = (rows[name].to_pylist() for name in ("prompt_tokens", "response_tokens"))
            rows = replace_columns(rows, {"reference_logprobs": demonstrations.reference_logprobs(*tokens)})
        return rows


class FileSource:
    """A Parquet file of demonstrations: prompt and response, and optional columns of a trajectory."""

    shards_at_once = 1  # each scored shard is committed at once

    def __init__(self, url: str) -> None:
        """Raises: ValueError: not a Parquet file, or a column is missing or not text."""
        self.url = url
        data = read_url(url)
        self.digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        try:
            self._rows = pq.read_table(pa.BufferReader(data))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"warm_start: {url} is not a Parquet file ({error})") from error
        names = [name for name in self._rows.column_names if name in TRAJECTORY.names]
        self._rows = self._rows.select(names)
        for name in ("prompt", "response"):
            if name not in names:
                raise ValueError(
                    f"warm_start: {url} has no column {name!r}, only {', '.join(names) or 'columns of no trajectory'}"
                )
            if not pa.types.is_string(self._rows[name].type) and not pa.types.is_large_string(self._rows[name].type):
                raise ValueError(f"warm_start: {url}: {name} is {self._rows[name].type}; it must be text")
            if self._rows[name].null_count:
                raise ValueError(f"warm_start: {url}: {name} is null in {self._rows[name].null_count} rows")
            self._rows = self._rows.set_column(names.index(name), name, self._rows[name].cast(pa.string()))
        tokens = {"prompt_tokens", "response_tokens"} & set(names)
        for place, name in enumerate(names):
            given, wanted = self._rows[name], TRAJECTORY.field(name).type
            if pa.types.is_map(wanted):  # `rewards`, which files have as other types, too
                continue
            try:
                self._rows = self._rows.set_column(place, name, given.cast(wanted))
            except pa.ArrowException as error:
                raise ValueError(f"warm_start: {url}: {name} is {given.type}, not {wanted}") from error
        if len(tokens) == 1 or ("reference_logprobs" in names and not tokens):
            raise ValueError(
                f"warm_start: {url} must have both of prompt_tokens and response_tokens or neither, and "
                "reference_logprobs only with both; missing columns are computed, so leave these out"
            )

    def check_scored(self) -> None:
        """A file has its rewards, or the task's."""

    def reward_source(self) -> None:
        """A file does not tell."""

    def compare_model(self, fingerprint: str) -> None:
        """A file has no model."""

    def parts(self) -> list[list]:
        return [[start, ROWS_PER_SHARD] for start in range(0, self._rows.num_rows, ROWS_PER_SHARD)]

    def read(self, parts: list[list]) -> Iterator[pa.Table]:
        return (self._rows.slice(*part) for part in parts)

    def trajectories(self, rows: pa.Table, demonstrations: "Demonstrations") -> pa.Table:
        """The rows as they are to be stored, with the columns that the file lacks."""
        of_all = dict.fromkeys(TRAJECTORY.names) | {
            "policy_fingerprint": "demonstration",
            "last_policy_fingerprint": "demonstration",
            "temperature": 1.0,
            "top_p": 1.0,
            "system_prompt": "",
            "reward_version": "given",
            "code_version": code_version(),
            "schema_version": SCHEMA_VERSION,
            "created_at": datetime.now(UTC),
        }
        completed = demonstrations.complete(rows.to_pylist())
        return to_table([of_all | {"rewards": {"given": row["reward"]}} | row for row in completed], TRAJECTORY)
