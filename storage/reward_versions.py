"""Reward versions: stored trajectories scored again by another reward, while the shards stay as they are.

    rewards/<version>/version.json                            the reward function of this version
    rewards/<version>/searcher=<id>/round=00000042.parquet    a reward for each trajectory of that shard, in its order

A shard's rewards are written once, in one file. So scoring may be interrupted and repeated, also after Searchers have
committed more shards: only shards without a file are scored.
"""

import re
from datetime import UTC, datetime

import pyarrow as pa

from storage.errors import AlreadyExists, NotFound, TornShard
from storage.ledger import NEEDED, read_entry
from storage.schema import REWARD, TRAJECTORY
from storage.shard_files import origin_of, read_each, read_shards
from storage.shards import check_searcher_id, files_named, is_warm_start_name, parquet_bytes
from storage.store import RunStore

VERSION = "version.json"
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_version(version: str) -> str:
    """Returns the name. Raises: ValueError: a reward version cannot have it."""
    if not _VERSION.fullmatch(version):
        raise ValueError(
            f"reward version: got {version!r}; a name has 1 to 64 letters, digits, '.', '_' or '-' and begins with a "
            "letter or digit, because it becomes a folder. Choose another name."
        )
    return version


def check_reward(store: RunStore, version: str, reward: str, source: str, data: str = "") -> None:
    """Checks that no other reward scores this version. source: a digest of the reward's source.

    data: a digest of the problems that the reward looks up, with their answers; "": they are unknown.
    Raises: ValueError: another reward does, or an earlier source of this one, or by other answers; versions are never
    mixed.
    """
    recorded = store.read_json(f"rewards/{check_version(version)}/{VERSION}", dict[str, str])
    if recorded is None:
        return
    if (scored_by := recorded.get("reward")) != reward:
        raise ValueError(
            f"reward version {version!r} of run {store.run} was scored by {scored_by}; {reward} cannot continue it. "
            "Choose another version."
        )
    if recorded.get("source", source) != source:
        raise ValueError(
            f"reward version {version!r} of run {store.run} was scored by {reward} before its source, or "
            "task.missing_eos_reward, was changed. Choose another version."
        )
    if recorded.get("data", data) != data:  # older versions did not record it
        raise ValueError(
            f"reward version {version!r} of run {store.run} was scored by {reward} with other problems or answers, or "
            "one of both machines lacks the task's data. Choose another version."
        )


def begin_version(store: RunStore, version: str, reward: str, source: str, data: str = "") -> None:
    """Records that `reward` scores this version. Raises: ValueError: as check_reward."""
    try:
        path = f"rewards/{check_version(version)}/{VERSION}"
        store.put_new_json(path, {"version": version, "reward": reward, "source": source, "data": data})
    except AlreadyExists:
        check_reward(store, version, reward, source, data)


def has_version(store: RunStore, version: str) -> bool:
    return store.exists(f"rewards/{check_version(version)}/{VERSION}")


def source_of(store: RunStore, version: str) -> str | None:
    """The digest of the source of the reward that scores this version; None: no reward does."""
    return (store.read_json(f"rewards/{check_version(version)}/{VERSION}", dict[str, str]) or {}).get("source")


def newest_version(store: RunStore) -> str | None:
    """The version of the rewards in the newest round of the run's own Searchers; None: no such round can be read."""
    own = [file for file in files_named(store.list("trajectories")) if not is_warm_start_name(file.searcher)]
    newest = max(own, key=lambda file: file.rounds[-1], default=None)
    if newest is None:
        return None
    try:
        return read_shards(store, newest.searcher, newest.rounds[-1:])["reward_version"][-1].as_py()
    except (NotFound, TornShard, IndexError):
        return None


def unscored_shards(store: RunStore, version: str, committed: dict[str, list[int]]) -> dict[str, list[int]]:
    """Per searcher those of its committed rounds that have no rewards of this version, in order."""
    scored = set(store.list(f"rewards/{check_version(version)}"))
    return {
        searcher: [number for number in rounds if _path(version, searcher, number) not in scored]
        for searcher, rounds in committed.items()
    }


def check_scored(store: RunStore, version: str, committed: dict[str, list[int]]) -> None:
    """Looks at each searcher's newest of these committed shards that has no file of rewards of this version.

    Raises: NotFound: it was not sampled with this version either, so it has no such rewards.
    """
    for searcher, rounds in unscored_shards(store, version, committed).items():
        for shard in read_each(store, searcher, rounds[-1:]):
            if isinstance(shard, pa.Table):
                with_rewards(store, version, shard)


def record_rewards(store: RunStore, version: str, shard: pa.Table, rewards: list[float]) -> None:
    """Records the rewards of a shard's trajectories, in its order. Raises: AlreadyExists: they were recorded before."""
    now = pa.scalar(datetime.now(UTC), REWARD.field("created_at").type)
    columns = [shard["trajectory_id"], pa.repeat(version, len(rewards)), rewards, pa.repeat(now, len(rewards))]
    table = pa.table(columns, names=REWARD.names).cast(REWARD)
    searcher, number = origin_of(shard)
    store.put_new(_path(version, searcher, number), parquet_bytes(table))


def with_rewards(store: RunStore, version: str, shard: pa.Table) -> pa.Table:
    """The shard with the rewards of this version in place of the sampled ones.

    A shard that was sampled, or copied, with this version is returned unchanged, unless it was scored again since.
    Raises: NotFound: the shard was not scored. TornShard: the rewards are of other trajectories.
    """
    searcher, number = origin_of(shard)
    path = _path(version, searcher, number)
    try:
        scored = read_entry(store, path, REWARD, NEEDED["rewards"])
    except NotFound as error:
        if set(shard["reward_version"].to_pylist()) == {version}:
            return shard
        raise NotFound(
            f"round {number} of searcher {searcher} of run {store.run} in {store.url} has no rewards of version "
            f"{version!r}. Score it first: {store.command(f'rescore {store.run} --version {version} --reward ...')}"
        ) from error
    if not scored["trajectory_id"].equals(shard["trajectory_id"]):
        raise TornShard(f"{path} of run {store.run} in {store.url} holds rewards of other trajectories than its shard")
    rewards = scored["reward"].to_pylist()
    replaced = {
        "reward": rewards,
        "rewards": [[(version, reward)] for reward in rewards],
        "reward_version": [version] * len(rewards),
    }
    return replace_columns(shard, replaced)


def replace_columns(shard: pa.Table, columns: dict[str, list]) -> pa.Table:
    """The trajectories with other values in some columns."""
    for name, values in columns.items():
        place, field = TRAJECTORY.get_field_index(name), TRAJECTORY.field(name)
        shard = shard.set_column(place, field, pa.array(values, field.type))
    return shard


def _path(version: str, searcher: str, number: int) -> str:
    return f"rewards/{version}/searcher={check_searcher_id(searcher)}/round={number:08d}.parquet"
