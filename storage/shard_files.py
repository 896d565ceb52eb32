"""Reads shards and compacted files.

Before: storage/new_shards.py finds the rounds; after: storage/intake.py checks their rows.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import NotFound, StoreError, StoreUnreachable, TornShard
from storage.schema import TRAJECTORY, as_trajectories
from storage.shards import COMPACTED, block_of, block_path, files_named, origins_of, shard_path
from storage.store import RunStore, transfer_all, transfer_each

_SMALL_BYTES = 1 << 20  # Arrow's threads only cost time in a smaller file (measured with files of 90 kB)

# Few, because more would keep a Trainer's draws waiting for cores and interpreter. Threads of their own, because one
# thread parses many files in a row in less time than the 32 readers in turns (docs/LOG.md, 2026-11-27).
_PARSERS = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), thread_name_prefix="parser")

logger = logging.getLogger(__name__)


def read_shards(store: RunStore, searcher: str, rounds: Sequence[int]) -> pa.Table:
    """The trajectories of some rounds of a searcher, in that order. Raises: NotFound, TornShard."""
    return pa.concat_tables([TRAJECTORY.empty_table(), *map(_raised, read_each(store, searcher, rounds))])


def each_shard(store: RunStore, searcher: str, rounds: Sequence[int]) -> Iterator[tuple[int, pa.Table]]:
    """Each of some rounds in order, with its trajectories. With a warning, torn shards are left out, and those that
    upkeep has deleted since the rounds were listed.
    """
    for of_block in by_block(rounds):
        for number, read in zip(of_block, read_each(store, searcher, of_block), strict=True):
            if isinstance(read, TornShard | NotFound):
                logger.warning("a shard is left out: %s", read)
            else:
                yield number, _raised(read)


def _raised(read: pa.Table | StoreError) -> pa.Table:
    if isinstance(read, StoreError):
        raise read
    return read


def read_each(
    store: RunStore, searcher: str, rounds: Sequence[int], compacted: Container[int] | None = None
) -> list[pa.Table | StoreError]:
    """The trajectories of each of some rounds of a searcher, or the error of reading them: NotFound, TornShard.

    A compacted file is read once for each call, so pass the rounds of a block together (by_block).
    compacted: the searcher's blocks that are known to have a compacted file; None: each block is looked up.
    """
    if compacted is None:
        compacted = {block for block in set(map(block_of, rounds)) if store.exists(block_path(searcher, block))}
    rounds_at: dict[str, list[int]] = defaultdict(list)
    for number in rounds:
        block = block_of(number)
        rounds_at[block_path(searcher, block) if block in compacted else shard_path(searcher, number)].append(number)

    def read(path: str) -> dict[int, pa.Table | StoreError]:
        try:
            table = read_file(store, path)
        except (NotFound, TornShard) as error:
            return {number: _of_other_file(store, path, searcher, number) or error for number in rounds_at[path]}
        return {number: _of_round(table, path, number) for number in rounds_at[path]}

    found = {}
    for tables in transfer_all(read, rounds_at):
        found |= tables
    return [found[number] for number in rounds]


def _of_round(table: pa.Table, path: str, number: int) -> pa.Table:
    return table.filter(pc.equal(table["round"], number)) if path.startswith(COMPACTED) else table


def _of_other_file(store: RunStore, path: str, searcher: str, number: int) -> pa.Table | None:
    """A round whose file at `path` cannot be read: upkeep deletes shards after the compacted file could be read."""
    other = shard_path(searcher, number) if path.startswith(COMPACTED) else block_path(searcher, block_of(number))
    with suppress(NotFound, TornShard):
        return _of_round(read_file(store, other), other, number)
    return None


def read_many(
    store: RunStore, rounds: Mapping[str, Sequence[int]], compacted: Mapping[str, Container[int]] | None = None
) -> Iterator[tuple[tuple[str, int], pa.Table | StoreError]]:
    """Each of some searchers' rounds: ((searcher, round), its trajectories, or the error of reading them).

    Files are read ahead, some 64 rounds at most. compacted: as for read_each, by searcher.
    """
    groups = [(searcher, of_block) for searcher, of_searcher in rounds.items() for of_block in by_block(of_searcher)]

    def read(group: tuple[str, list[int]]) -> list[pa.Table | StoreError]:
        return read_each(store, *group, compacted if compacted is None else compacted.get(group[0], ()))

    tables = transfer_each(read, groups, size=lambda group: len(group[1]))
    for (searcher, of_block), of_group in zip(groups, tables, strict=True):
        yield from zip([(searcher, number) for number in of_block], of_group, strict=True)


def by_block(rounds: Iterable[int]) -> Iterator[list[int]]:
    """Rounds in order, grouped by block: the rounds to read together."""
    for _, of_block in groupby(sorted(rounds), block_of):
        yield list(of_block)


def read_file(store: RunStore, path: str) -> pa.Table:
    """A shard, or a compacted file with all rounds of its name, in this version's columns.

    Raises: TornShard: it is neither, or of a newer version. StoreUnreachable: the store sent fewer or more bytes than
    it holds. NotFound.
    """
    if (data := store.get_fast(path)) is not None:
        with suppress(TornShard):
            return _parse(store, path, data)
    data = store.get(path)
    try:
        return _parse(store, path, data)
    except TornShard:
        _check_size(store, path, data)
        raise


def _parse(store: RunStore, path: str, data: bytes) -> pa.Table:
    """As read_file, of a file's content."""
    where = f"{path} of run {store.run} in {store.url}"
    try:
        table = _PARSERS.submit(_read_whole, data).result()
    except MemoryError:  # Arrow's own is an ArrowException, too; the file may be whole
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TornShard(
            f"{where} is not a whole Parquet file ({error}); every shard is written in one step, so the store lost or "
            "changed it"
        ) from error
    try:
        table = as_trajectories(table)
    except ValueError as error:
        raise TornShard(f"{where} {error}") from error
    if not table.num_rows:
        raise TornShard(f"{where} holds no trajectories")
    (file,) = files_named([path])
    if file.is_compacted and origins_of(table) != {(file.searcher, number) for number in file.rounds}:
        raise TornShard(f"{where} holds other rounds than its name")
    return table


def _read_whole(data: bytes) -> pa.Table:
    table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=len(data) > _SMALL_BYTES)
    table.validate(full=True)  # finds invalid text, and lists that end outside their values
    return table


def _check_size(store: RunStore, path: str, data: bytes) -> None:
    """Raises: StoreUnreachable: the store holds another number of bytes, so the answer was cut, not the file."""
    filesystem, base = store.arrow_filesystem()
    size = store.scan(lambda: filesystem.get_file_info(f"{base}/{path}").size)
    if size is not None and size != len(data):
        raise StoreUnreachable(
            f"cannot read {path} (run {store.run} in {store.url}): the answer was cut: {len(data)} of {size} bytes came"
        )


def origin_of(shard: pa.Table) -> tuple[str, int]:
    """(searcher, round) of a shard, all of whose rows name the same."""
    return shard["searcher"][0].as_py(), shard["round"][0].as_py()
