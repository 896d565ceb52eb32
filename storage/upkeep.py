"""Upkeep of the buffer: old trajectories expire, small shards become one file. Each in two steps, `grace` apart.

    expired/searcher=<id>/through=00000041.json             first step: rounds up to 41 no longer count
    trajectories/compacted/<id>-00000000-00000031.parquet   first step: counts instead of the shards of these rounds
    files that no longer count                              second step, a later call: deleted after `grace`

Marked files get no new readers; existing readers have `grace` to finish. If a call is killed, each round counts in one
place or not at all, and the next call continues.

Only the oldest rounds of a searcher expire, and never its last one. So the remaining rounds have no gaps, and the next
round has the number that follows. In a run that is not finished, all trajectories stay that a resume from a kept
checkpoint would draw as recent, and all later ones. The draw of an earlier step cannot be repeated once one of its
trajectories has expired; the ledger keeps the ids. Compaction changes no row and no query's answer.
"""

import json
import re
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pyarrow as pa

from storage import checkpoints, queries
from storage.errors import AlreadyExists, NotFound, TornShard
from storage.shards import (
    block_of,
    block_path,
    by_block,
    compacted_blocks,
    expired_through,
    files_named,
    marked_through,
    origins_of,
    parquet_bytes,
    read_file,
    rounds_of,
    shard_path,
    whole_blocks,
)
from storage.sql import sql
from storage.store import RunStore, scans, transfer_all
from storage.summary import is_finished

# A block is compacted if its shards are at most this large together, because a reader holds a whole file in memory.
MAX_BLOCK_BYTES = 32 << 20
_REWARDS = re.compile(r"rewards/[^/]+/searcher=(?P<searcher>[^/]+)/round=(?P<round>\d{8})\.parquet")
_COMPACTED_AT = b"compacted_at"  # in a compacted file's metadata: when, in ISO 8601


@scans
def expire(store: RunStore, before: datetime | None, keep: int | None, min_size: int) -> dict[str, int]:
    """Mark as expired the trajectories committed before `before`, and those beyond the newest `keep`.

    Whole files only; the newest `min_size` trajectories stay in any case. Returns per searcher the last round of those
    that expire now.
    """
    finished, steps = is_finished(store), checkpoints.list_checkpoints(store)
    parameters = {"before": before, "keep": keep, "min_size": min_size, "finished": finished}
    parameters["checkpoint"] = steps[0] if steps else None
    with queries.connect(store) as connection:
        chosen = dict(connection.execute(sql("choose_expired"), parameters).fetchall())
    expired = expired_through(store)
    chosen = whole_blocks(chosen, compacted_blocks(files_named(store.list("trajectories"))))
    chosen = {searcher: last for searcher, last in chosen.items() if last > expired.get(searcher, -1)}
    for searcher, last in chosen.items():
        mark = {"at": datetime.now(UTC).isoformat(), "before": before and before.isoformat(), "keep": keep}
        with suppress(AlreadyExists):
            store.put_new(f"expired/searcher={searcher}/through={last:08d}.json", json.dumps(mark).encode())
    return chosen


def compact(store: RunStore) -> int:
    """Write each block of small shards as one file. Returns how many files were written.

    A block whose searcher has not gone beyond it, or of which a round is missing, expired or broken, stays as it is.
    """
    files, expired, num_files = files_named(store.list("trajectories")), expired_through(store), 0
    blocks, rounds = compacted_blocks(files), defaultdict(list)
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
            ):
                num_files += _compact(store, searcher, block)
    return num_files


def _compact(store: RunStore, searcher: str, block: int) -> bool:
    """Whether a file was written."""
    tables, num_bytes = [], 0
    for number in rounds_of(block):
        try:
            table = read_file(store, shard_path(searcher, number))
        except (NotFound, TornShard):  # verify and audit name it
            return False
        num_bytes += table.nbytes
        if num_bytes > MAX_BLOCK_BYTES or origins_of(table) != {(searcher, number)}:
            return False
        tables.append(table)
    metadata = {_COMPACTED_AT: datetime.now(UTC).isoformat().encode()}
    with suppress(AlreadyExists):  # another process wrote the same rows first
        store.put_new(
            block_path(searcher, block), parquet_bytes(pa.concat_tables(tables).replace_schema_metadata(metadata))
        )
        return True
    return False


def delete_superseded(store: RunStore, grace: timedelta) -> int:
    """Delete files that expired, and shards that were compacted, at least `grace` ago; their rewards, too.

    Returns the number of deleted files of trajectories.
    """
    due = datetime.now(UTC) - grace
    files = files_named(store.list("trajectories"))
    blocks = compacted_blocks(files)
    marks = [path for path in store.list("expired") if _marked_at(store, path) <= due]
    expired = whole_blocks(marked_through(marks), blocks)
    replaced = [file for file in files if not file.is_compacted and file.block in blocks.get(file.searcher, ())]
    replacements = {block_path(file.searcher, file.block) for file in replaced}
    due_replacements = {path for path in replacements if _compacted_at(store, path) <= due}
    paths = [file.path for file in replaced if block_path(file.searcher, file.block) in due_replacements]
    paths += [file.path for file in files if file.rounds[-1] <= expired.get(file.searcher, -1)]
    num_files = len(set(paths))
    for path in store.list("rewards"):
        if (match := _REWARDS.fullmatch(path)) and int(match["round"]) <= expired.get(match["searcher"], -1):
            paths.append(path)

    def delete(path: str) -> None:
        with suppress(NotFound):  # another process deleted it first
            store.delete(path)

    transfer_all(delete, set(paths))
    return num_files


def _marked_at(store: RunStore, path: str) -> datetime:
    return datetime.fromisoformat(json.loads(store.get(path))["at"])


def _compacted_at(store: RunStore, path: str) -> datetime:
    """Reads the whole file: if it is broken, which verify and audit report, its shards are never deleted."""
    try:
        return datetime.fromisoformat(read_file(store, path).schema.metadata[_COMPACTED_AT].decode())
    except TornShard:
        return datetime.max.replace(tzinfo=UTC)
