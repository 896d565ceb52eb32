"""Compacts the ledger: writes many small entries of a group as one file, in two steps that are `grace` apart.

First step: a compacted file is written, and counts instead of the entries whose rows it holds
(storage/ledger_files.py). Second step, a later call: these entries are deleted. If a call is killed, each entry counts
once, and the next call continues. Entries that cannot be read stay as they are; `tba verify` names them.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import groupby

import pyarrow as pa

from storage import ledger_files
from storage.errors import AlreadyExists, DamagedRecord, NotFound
from storage.ledger import NEEDED, read_entry
from storage.ledger_files import KEYS, Part, compacted_path, counting_parts, covers_of, parts_named
from storage.queries import STORED
from storage.shards import parquet_bytes
from storage.store import RunStore, transfer_all
from storage.upkeep import file_infos, store_time

COLUMNS = dict(STORED.values())  # by folder
# Files are written together if they are at most this large in all: a reader holds a whole file in memory.
MAX_BYTES = 32 << 20


def compact_ledger(store: RunStore) -> int:
    """Writes entries and narrow compacted files as the widest that they fill. Returns the number of files written.

    The newest entries of a group, which are becoming more, are left as they are.
    """
    num_files = 0
    for folder in KEYS:
        while written := _compact_folder(store, folder):  # what was too large as entries is small when compacted
            num_files += written
    return num_files


def _compact_folder(store: RunStore, folder: str) -> int:
    sizes = {path: info.size for path, info in file_infos(store, folder).items()}
    groups = defaultdict(list)
    for part in counting_parts(store, folder, sizes):
        groups[part.group].append(part)
    blocks = [block for parts in groups.values() for block in _blocks(parts, sizes)]
    return sum(_write(store, folder, numbers, of_block) for numbers, of_block in blocks)


def _blocks(parts: list[Part], sizes: dict[str, int]) -> Iterator[tuple[range, list[Part]]]:
    """The numbers of each compacted file to write, the widest first, with the files to write as one.

    Entries that came after their block was compacted are left for a wider one.
    """
    newest = max(part.numbers[-1] for part in parts)
    for width in reversed(ledger_files.WIDTHS):
        left: list[Part] = []
        for block, group in groupby(parts, key=lambda part: part.numbers[0] // width):
            of_block, numbers = list(group), range(block * width, (block + 1) * width)
            if max(len(part.numbers) for part in of_block) >= width:
                continue
            # a whole narrow block later: entries come nearly in order
            is_closed = numbers[-1] + ledger_files.WIDTHS[0] <= newest
            if is_closed and len(of_block) > 1 and sum(sizes[part.path] for part in of_block) <= MAX_BYTES:
                yield numbers, of_block
            else:
                left += of_block
        parts = left


def _write(store: RunStore, folder: str, numbers: range, parts: list[Part]) -> bool:
    """Writes files of one group as one file. Returns whether a file was written."""

    def read(part: Part) -> pa.Table | None:
        with suppress(NotFound, DamagedRecord):
            rows = read_entry(store, part.path, COLUMNS[folder], NEEDED[folder], is_copied=True)
            if _is_of(rows, folder, part):
                return pa.concat_tables([COLUMNS[folder].empty_table(), rows], promote_options="default")
        return None

    tables = transfer_all(read, parts)
    if any(table is None and part.is_compacted for part, table in zip(parts, tables, strict=True)):
        return False  # its rows would no longer count
    rows = pa.concat_tables([COLUMNS[folder].empty_table(), *(table for table in tables if table is not None)])
    with suppress(AlreadyExists):  # another process wrote it first
        if rows.num_rows:
            store.put_new(compacted_path(folder, parts[0].group, numbers), parquet_bytes(rows))
            return True
    return False


def _is_of(rows: pa.Table, folder: str, part: Part) -> bool:
    """Whether a file's rows are of the group and the numbers in its name."""
    group, number = KEYS[folder]
    named = part.group.split("=")[1]
    groups = set(rows[group].unique().to_pylist()) if group in rows.column_names else {None}
    expected = {named} if group == "searcher" else {int(named)}
    if folder == "metrics/evaluations":  # older versions recorded no attempt
        expected |= {None} if int(named) == 1 else set()
    return groups <= expected and set(rows[number].unique().to_pylist()) <= set(part.numbers)


def delete_compacted(store: RunStore, grace: timedelta) -> int:
    """Deletes files whose rows a compacted file has held for at least `grace`. Returns their number."""
    due, num_files = store_time(store) - grace, 0
    for folder in KEYS:
        infos = file_infos(store, folder)
        parts = parts_named(folder, infos)
        counting, replaced = set(counting_parts(store, folder, infos)), defaultdict(list)
        for part, cover in covers_of(parts).items():
            if part not in counting and cover in counting and infos[cover.path].mtime <= due:
                replaced[cover].append(part.path)
        for cover, paths in replaced.items():
            with suppress(NotFound, DamagedRecord):  # it must be whole to the last row
                read_entry(store, cover.path, COLUMNS[folder], NEEDED[folder])
                transfer_all(store.delete, paths)
                num_files += len(paths)
    return num_files
