"""Shards: trajectories on their way from Searchers to the replay buffer.

    trajectories/searcher=<id>/round=00000042.parquet       committed: immutable, one append-only log a Searcher
    quarantine/searcher=<id>/round=00000042-<uuid>.parquet  refused by the quality gate; the .json beside it says why
    expired/searcher=<id>/through=00000041.json             rounds that no longer count (storage/expiry.py)

A Searcher's rounds have no gaps, from the first that has not expired: a round that went to quarantine is tried again
under its number. So what is new is what follows the last round seen of each Searcher, and finding it costs in
proportion to what is new.
"""

import json
import re
import uuid

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import TornShard
from storage.schema import TRAJECTORY
from storage.store import RunStore, transfer_all

# The folder's name must read as text to whoever infers types from it: DuckDB turns searcher=7 into a number, and
# searcher=epoch into a date.
_SEARCHER = re.compile(r"(?!(?:epoch|infinity)$)[a-z][a-z0-9-]{0,31}")


def check_searcher_id(searcher: str) -> str:
    """The id, if it can name a Searcher's log. ValueError otherwise."""
    if not _SEARCHER.fullmatch(searcher):
        raise ValueError(
            f"searcher: got {searcher!r}; an id is 1 to 32 lowercase letters, digits or '-', begins with a letter and "
            "is not 'epoch' or 'infinity'. Choose another id."
        )
    return searcher


def trajectory_id(searcher: str, round_number: int, index: int) -> str:
    """The id of one row of a shard: the same whenever the round is retried, so that no trajectory counts twice."""
    return f"{searcher}-{round_number:08d}-{index:05d}"


def round_of(trajectory_id: str) -> tuple[str, int]:
    """Searcher and round of a trajectory: the shard that it is in."""
    searcher, number, _ = trajectory_id.rsplit("-", 2)
    return searcher, int(number)


def shard_path(searcher: str, round_number: int) -> str:
    return f"{_log(searcher)}/round={round_number:08d}.parquet"


def _log(searcher: str) -> str:
    return f"trajectories/searcher={check_searcher_id(searcher)}"


def _round_number(path: str) -> int:
    return int(path.rpartition("round=")[2].removesuffix(".parquet"))


def parquet_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _origin(table: pa.Table) -> tuple[str, int]:
    """The one searcher and round that all rows of a shard name. ValueError otherwise."""
    origins = set(zip(table["searcher"].to_pylist(), table["round"].to_pylist(), strict=True))
    if len(origins) != 1:
        raise ValueError(f"a shard holds the trajectories of one searcher and round, got {sorted(origins, key=str)}")
    return origins.pop()


def commit_shard(store: RunStore, table: pa.Table) -> str:
    """Make a round's trajectories visible, whole or not at all. Returns the shard's path.

    table: TRAJECTORY columns, one searcher and round. AlreadyExists if that round was committed before.
    """
    path = shard_path(*_origin(table))
    store.put_new(path, parquet_bytes(table))
    return path


def quarantine_shard(store: RunStore, table: pa.Table, reasons: list[str]) -> str:
    """Set aside a shard that the quality gate refused, where nothing trains on it. Returns its path."""
    searcher, round_number = _origin(table)
    path = f"quarantine/searcher={check_searcher_id(searcher)}/round={round_number:08d}-{uuid.uuid4().hex}"
    store.put_new(f"{path}.parquet", parquet_bytes(table))
    store.put_new(f"{path}.json", json.dumps({"reasons": reasons}, indent=2).encode())
    return f"{path}.parquet"


def next_round(store: RunStore, searcher: str) -> int:
    """One past the searcher's last committed round; 0 if it has none."""
    paths = store.list(_log(searcher))
    return _round_number(paths[-1]) + 1 if paths else 0


def expired_through(store: RunStore) -> dict[str, int]:
    """Per searcher the last expired round; searchers without expired rounds are left out."""
    through: dict[str, int] = {}
    for path in store.list("expired"):  # in order: a searcher's last one wins
        _, searcher, name = path.split("/")
        through[searcher.removeprefix("searcher=")] = int(name.removeprefix("through=").removesuffix(".json"))
    return through


def committed_paths(store: RunStore) -> list[str]:
    """Paths of all shards that count."""
    expired = {_log(searcher): number for searcher, number in expired_through(store).items()}
    return [
        path for path in store.list("trajectories") if _round_number(path) > expired.get(path.rpartition("/")[0], -1)
    ]


def new_shards(store: RunStore, seen: dict[str, int]) -> dict[str, list[int]]:
    """Per searcher the committed rounds after `seen[searcher]`, in order; of a searcher not in `seen` all that count.

    Searchers with nothing new are left out.
    """
    expired = expired_through(store)
    seen = expired | {searcher: max(number, expired.get(searcher, -1)) for searcher, number in seen.items()}

    def rounds_after_seen(searcher: str) -> list[int]:
        start_after = shard_path(searcher, seen[searcher]) if searcher in seen else None
        return [_round_number(path) for path in store.list(_log(searcher), start_after=start_after)]

    searchers = [name.removeprefix("searcher=") for name in store.folders("trajectories")]
    rounds = transfer_all(rounds_after_seen, searchers)
    return {searcher: new for searcher, new in zip(searchers, rounds, strict=True) if new}


def read_shards(store: RunStore, searcher: str, rounds: list[int]) -> pa.Table:
    """The trajectories of some rounds of a searcher, in that order. TornShard names a file that is not a shard."""
    if not rounds:
        return TRAJECTORY.empty_table()
    return pa.concat_tables(transfer_all(lambda number: _read_shard(store, shard_path(searcher, number)), rounds))


def _read_shard(store: RunStore, path: str) -> pa.Table:
    data = store.get(path)
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read()
    except (pa.ArrowException, OSError) as error:
        raise TornShard(
            f"{path} of run {store.run} in {store.url} is not a whole Parquet file ({error}); every shard is written "
            "in one step, so the store lost or changed it. Restore it, or move it away to go on without it."
        ) from error
    if not table.schema.equals(TRAJECTORY):
        raise TornShard(
            f"{path} of run {store.run} in {store.url} has other columns than a shard of this version: "
            f"{', '.join(map(str, set(table.schema) ^ set(TRAJECTORY)))}. Read it with the version that wrote it."
        )
    return table
