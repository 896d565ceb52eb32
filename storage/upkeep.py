"""Upkeep of the buffer: expires old trajectories and compacts small shards, each in two steps that are `grace` apart.

    expired/searcher=<id>/through=00000041.json             first step: rounds up to 41 no longer count
    trajectories/compacted/<id>-00000000-00000031.parquet   first step: counts instead of the shards of these rounds
    files that no longer count                              second step, a later call: deleted after `grace`
    expired/clock                                           a probe, written to read the store's clock

Ages are by the store's clock: the times at which it wrote a file and the probe. The clocks of Searchers and of this
machine may be wrong. A compacted file keeps the times at which its shards were written. If a store is copied, ages
begin at the copy.

Marked files get no new readers; existing readers have `grace` to finish. If a call is killed, each round counts in one
place or not at all, and the next call continues.

Only the oldest rounds of a searcher expire, and never its last one. So the remaining rounds have no gaps, and the next
round has the number that follows. In an unfinished run, the trajectories that a resume from a kept
checkpoint would draw as recent stay, and all later ones. The draw of an earlier step cannot be repeated once one of its
trajectories has expired; the ledger keeps the ids. Compaction changes neither rows nor the answers of queries.
"""

import json
import re
from collections import defaultdict
from contextlib import suppress
from datetime import datetime, timedelta

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector
from pydantic import AwareDatetime, TypeAdapter, ValidationError

from storage import checkpoints, queries
from storage.errors import AlreadyExists, NotFound, TornShard
from storage.shard_files import by_block, read_file
from storage.shards import (
    TrajectoryFile,
    block_of,
    block_path,
    committed_files,
    compacted_blocks,
    expired_through,
    files_named,
    lowered_to_whole_blocks,
    marked_through,
    origins_of,
    parquet_bytes,
    refused_rounds,
    rounds_of,
    shard_path,
)
from storage.sql import sql
from storage.store import RunStore, scans, transfer_all
from storage.summary import is_finished

# A block is compacted if its shards are at most this large together, because a reader holds a whole file in memory.
MAX_BLOCK_BYTES = 32 << 20
_REWARDS = re.compile(r"rewards/[^/]+/searcher=(?P<searcher>[^/]+)/round=(?P<round>[0-9]{8})\.parquet")
_WRITTEN_AT = b"written_at"  # in a compacted file's metadata: a JSON list of when each shard was written, in ISO 8601
_TIMES = TypeAdapter(list[AwareDatetime])
_CLOCK = "expired/clock"


@scans
def expire(store: RunStore, max_age: timedelta | None, keep: int | None, min_size: int) -> dict[str, int]:
    """Marks trajectories as expired that were committed longer than `max_age` ago or are beyond the newest `keep`.

    Only whole files expire, and the newest `min_size` trajectories stay. Returns per searcher the last round that
    expires now.
    """
    finished, steps, now = is_finished(store), checkpoints.list_checkpoints(store), store_time(store)
    before = None if max_age is None else now - max_age
    parameters = {"before": before, "keep": keep, "min_size": min_size, "finished": finished}
    parameters["checkpoint"] = steps[0].step if steps else None
    written = _written_table(store)

    def choose(connection) -> dict[str, int]:
        connection.register("written", written)
        return dict(connection.execute(sql("choose_expired"), parameters).fetchall())

    chosen = queries.ask(store, choose, ("trajectories", "syncs"))
    expired = expired_through(store)
    chosen = lowered_to_whole_blocks(chosen, compacted_blocks(files_named(store.list("trajectories"))))
    chosen = {searcher: last for searcher, last in chosen.items() if last > expired.get(searcher, -1)}
    for searcher, last in chosen.items():
        mark = {"at": now.isoformat(), "before": before and before.isoformat(), "keep": keep}
        with suppress(AlreadyExists):
            store.put_new_json(f"expired/searcher={searcher}/through={last:08d}.json", mark)
    return chosen


def compact(store: RunStore) -> int:
    """Writes each block of small shards as one file. Returns the number of files written.

    A block is left as it is if it is its searcher's last one, or if a round of it is missing, expired, refused or torn.
    """
    files, expired, num_files = files_named(store.list("trajectories")), expired_through(store), 0
    blocks, rounds, refused = compacted_blocks(files), defaultdict(list), refused_rounds(store)
    written = _written_at(store, "trajectories")  # after the listing: each listed shard is in it, or was deleted
    for file in files:
        if not file.is_compacted:
            rounds[file.searcher] += file.rounds
    for searcher, stored in rounds.items():
        for of_block in by_block(stored):
            block = block_of(of_block[0])
            if (
                block not in blocks.get(searcher, ())
                and of_block == list(rounds_of(block))
                and expired.get(searcher, -1) < of_block[0]
                and of_block[-1] < max(stored)
                and refused.get(searcher, set()).isdisjoint(of_block)
            ):
                num_files += _compact(store, searcher, block, written)
    return num_files


def _compact(store: RunStore, searcher: str, block: int, written: dict[str, datetime]) -> bool:
    """Compacts one block. Returns whether a file was written."""
    tables, num_bytes = [], 0
    paths = [shard_path(searcher, number) for number in rounds_of(block)]
    for number, path in zip(rounds_of(block), paths, strict=True):
        try:
            table = read_file(store, path)
        except (NotFound, TornShard):  # verify and audit report it
            return False
        num_bytes += table.nbytes
        if num_bytes > MAX_BLOCK_BYTES or origins_of(table) != {(searcher, number)} or path not in written:
            return False
        tables.append(table)
    metadata = {_WRITTEN_AT: json.dumps([written[path].isoformat() for path in paths]).encode()}
    with suppress(AlreadyExists):  # another process wrote the same rows first
        store.put_new(
            block_path(searcher, block), parquet_bytes(pa.concat_tables(tables).replace_schema_metadata(metadata))
        )
        return True
    return False


def delete_superseded(store: RunStore, grace: timedelta) -> int:
    """Deletes files that have not counted for at least `grace`. Returns the number of deleted files of trajectories.

    They are: the files of expired rounds, with the rewards of these rounds by other versions; shards whose rows a whole
    compacted file has; and marks in expired/ that a later mark of the Searcher has replaced.
    """
    due = store_time(store) - grace
    marks = sorted(path for path, at in _written_at(store, "expired").items() if at <= due and marked_through([path]))
    files = files_named(store.list("trajectories"))
    expired = _due_rounds(files, marks)
    old = {file.path for file in files if file.rounds[-1] <= expired.get(file.searcher, -1)}
    old.update(_replaced_shards(store, files, due))
    named = [(path, _REWARDS.fullmatch(path)) for path in store.list("rewards")]
    rewards = {path for path, match in named if match and int(match["round"]) <= expired.get(match["searcher"], -1)}
    transfer_all(store.delete, old | rewards | _replaced_marks(marks, expired))  # another process may delete some, too
    return len(old)


def _due_rounds(files: list[TrajectoryFile], marks: list[str]) -> dict[str, int]:
    """Per Searcher the last round to delete, by these marks. A Searcher's last round is never marked here, so a mark of
    it is another program's.
    """
    newest: dict[str, int] = {}
    for file in files:
        newest[file.searcher] = max(file.rounds[-1], newest.get(file.searcher, -1))
    through = lowered_to_whole_blocks(marked_through(marks), compacted_blocks(files))
    return {searcher: last for searcher, last in through.items() if last < newest.get(searcher, -1)}


def _replaced_shards(store: RunStore, files: list[TrajectoryFile], due: datetime) -> list[str]:
    """Paths of the shards whose rows a compacted file has, if that file is whole and was written by `due`."""
    written, blocks, replaced = _written_at(store, "trajectories"), compacted_blocks(files), defaultdict(list)
    for file in files:
        if not file.is_compacted and file.block in blocks.get(file.searcher, ()):
            replaced[block_path(file.searcher, file.block)].append(file.path)
    whole = [path for path in replaced if path in written and written[path] <= due and _is_whole(store, path)]
    return [shard for path in whole for shard in replaced[path]]


def _replaced_marks(marks: list[str], expired: dict[str, int]) -> set[str]:
    """Of these marks, in order, all but the last one of each Searcher in `expired`."""
    last = {path.rpartition("/")[0]: path for path in marks}
    of_expired = (path for path in marks if path.split("/")[1].removeprefix("searcher=") in expired)
    return {path for path in of_expired if last[path.rpartition("/")[0]] != path}


def _is_whole(store: RunStore, path: str) -> bool:
    """Whether a compacted file is whole. The shards of a torn one, which verify and audit report, are never deleted."""
    try:
        read_file(store, path)
    except (NotFound, TornShard):
        return False
    return True


def store_time(store: RunStore) -> datetime:
    """Now, by the store's clock."""
    store.put(_CLOCK, b"")
    return _written_at(store, "expired")[_CLOCK]


def _written_at(store: RunStore, folder: str) -> dict[str, datetime]:
    """When each file of a folder was written, by the store's clock."""
    return {path: info.mtime for path, info in file_infos(store, folder).items()}


@scans
def file_infos(store: RunStore, folder: str) -> dict[str, FileInfo]:
    """By path, the size of each file of a folder, and when it was written by the store's clock."""
    filesystem, base = store.arrow_filesystem()
    found = filesystem.get_file_info(FileSelector(f"{base}/{folder}", allow_not_found=True, recursive=True))
    named = {}
    for info in found:
        with suppress(UnicodeDecodeError):  # another program's file
            named[info.path.removeprefix(f"{base}/")] = info
    return {path: info for path, info in named.items() if info.is_file}


def _written_table(store: RunStore) -> pa.Table:
    """searcher, round, committed_at: when the shard of each round that counts was written."""
    written, rows = _written_at(store, "trajectories"), []
    for file in committed_files(store):
        if file.path in written:
            times = _times_kept(store, file) if file.is_compacted else None
            times = times or [written[file.path]] * len(file.rounds)
            rows += zip([file.searcher] * len(file.rounds), file.rounds, times, strict=True)
    types = {"searcher": pa.string(), "round": pa.int64(), "committed_at": pa.timestamp("us", tz="UTC")}
    return pa.table(list(zip(*rows, strict=True)) or [[], [], []], pa.schema(types))


def _times_kept(store: RunStore, file: TrajectoryFile) -> list[datetime] | None:
    """When the shards of a compacted file were written; None: not recorded by an older version, or torn."""
    with suppress(TornShard, NotFound, ValidationError):
        recorded = (read_file(store, file.path).schema.metadata or {}).get(_WRITTEN_AT, b"null")
        times = _TIMES.validate_json(recorded)
        return times if len(times) == len(file.rounds) else None
    return None
