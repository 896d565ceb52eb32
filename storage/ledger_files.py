"""The ledger's files: one an entry, until upkeep writes many of a group as one (storage/ledger_upkeep.py).

    batches/attempt=00000001/step=00000012.parquet                         an entry: its group, then its number
    batches/compacted/attempt=00000001-00000064-00000127.parquet           the entries of the group with these numbers
    metrics/search/compacted/searcher=s0-00000000-00001023.parquet         the widest file counts, not those inside
    metrics/evaluations/compacted/attempt=00000001-00000000-00000063.parquet

An entry counts unless a compacted file holds its number. So one that is written late, or could not be read when the
others were compacted, still counts.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import DamagedRecord, NotFound
from storage.paths import LARGEST_NUMBER
from storage.store import RESTORE, RunStore, transfer_all

# Numbers in a compacted file, narrowest first: a run of 100,000 steps has 7 of the widest, 16 of each other at most.
# This is part of the format: files of one width do not overlap.
WIDTHS = (64, 1_024, 16_384)

# A Searcher's name is as in shards.SEARCHER_ID but for its lookahead, which DuckDB lacks: an export has these patterns.
_OF_ATTEMPT, _OF_SEARCHER = r"attempt=[0-9]{8}", r"searcher=[a-z][a-z0-9-]{0,31}"
# By folder: the names of entries. Files with other names, such as copies, are never read.
NAMES = {
    "batches": rf"(?P<group>{_OF_ATTEMPT})/step=(?P<number>[0-9]{{8}})",
    "metrics/training": rf"(?P<group>{_OF_ATTEMPT})/step=(?P<number>[0-9]{{8}})",
    "metrics/search": rf"(?P<group>{_OF_SEARCHER})/round=(?P<number>[0-9]{{8}})",
    "metrics/evaluations": r"step=(?P<number>[0-9]{8})(-a(?P<attempt>[0-9]{4,}))?",
    "syncs": rf"(?P<group>{_OF_ATTEMPT})/sync=(?P<number>[0-9]{{8}})",
    "rewards": rf"[^/]+/{_OF_SEARCHER}/round=[0-9]{{8}}",
    "diversity": r"measured=[^/]+",
}
# By folder that upkeep compacts: the columns that name a row's group and its number.
KEYS = {
    "batches": ("attempt", "step"),
    "metrics/training": ("attempt", "step"),
    "metrics/search": ("searcher", "round"),
    "metrics/evaluations": ("attempt", "policy_step"),
    "syncs": ("attempt", "sync"),
}
COMPACTED_NAME = rf"compacted/(?P<group>{_OF_ATTEMPT}|{_OF_SEARCHER})-(?P<first>[0-9]{{8}})-(?P<last>[0-9]{{8}})"


@dataclass(frozen=True)
class Part:
    """A file of the ledger, with the facts in its name."""

    path: str
    group: str
    numbers: range  # that it may hold; one: it is an entry

    @property
    def is_compacted(self) -> bool:
        return len(self.numbers) > 1


def is_entry(folder: str, path: str) -> bool:
    """Whether a path in a folder of the ledger has an entry's name."""
    return bool(re.fullmatch(rf"{folder}/{NAMES[folder]}\.parquet", path))


def parts_named(folder: str, paths: Iterable[str]) -> list[Part]:
    """Entries and compacted files among the paths, in the order of their groups and numbers."""
    is_entry, is_compacted = (re.compile(rf"{folder}/{name}\.parquet") for name in (NAMES[folder], COMPACTED_NAME))
    found = []
    for path in paths:
        if match := is_entry.fullmatch(path):
            named = match.groupdict()
            group = named["group"] if "group" in named else f"attempt={int(named['attempt'] or 1):08d}"
            found.append(Part(path, group, range(int(named["number"]), int(named["number"]) + 1)))
        elif match := is_compacted.fullmatch(path):
            numbers = range(int(match["first"]), int(match["last"]) + 1)
            if len(numbers) in WIDTHS and numbers[0] % len(numbers) == 0:
                found.append(Part(path, match["group"], numbers))
    return sorted(found, key=lambda part: (part.group, part.numbers[0], part.numbers[-1]))


def compacted_path(folder: str, group: str, numbers: range) -> str:
    return f"{folder}/compacted/{group}-{numbers[0]:08d}-{numbers[-1]:08d}.parquet"


def covers_of(parts: list[Part]) -> dict[Part, Part]:
    """For each file the widest compacted file of its group that covers its numbers; files without one are left out."""
    compacted = {(part.group, part.numbers[0], len(part.numbers)): part for part in parts if part.is_compacted}
    covers = {}
    for part in parts:
        for width in WIDTHS:  # the widest last
            first = part.numbers[0] // width * width
            if width > len(part.numbers) and (cover := compacted.get((part.group, first, width))):
                covers[part] = cover
    return covers


def counting_parts(store: RunStore, folder: str, paths: Iterable[str] | None = None) -> list[Part]:
    """The files of a folder of the ledger that count: each entry's rows are in one of them.

    paths: of the folder's files; None: those stored now. Reads a compacted file only if entries that it may hold are
    stored, too. One that cannot be read, or was deleted since it was listed, replaces no other file.
    """
    parts = parts_named(folder, store.list(folder) if paths is None else paths)
    covers = covers_of(parts)
    inside: dict[Part, list[Part]] = defaultdict(list)
    for part, cover in covers.items():
        inside[cover].append(part)

    def read(cover: Part) -> set[int] | None:
        try:
            return numbers_in(store, folder, cover.path)
        except (DamagedRecord, NotFound):
            return None

    held = dict(zip(inside, transfer_all(read, inside), strict=True))
    unread = [cover for cover, numbers in held.items() if numbers is None]
    if unread:
        rest = [part.path for part in parts if part not in unread]
        return counting_parts(store, folder, rest)
    return [
        part for part in parts if part not in covers or not (part.is_compacted or part.numbers[0] in held[covers[part]])
    ]


def numbers_in(store: RunStore, folder: str, path: str) -> set[int]:
    """The numbers of the entries in a compacted file. Raises: NotFound. DamagedRecord: it cannot be read."""
    column, data = KEYS[folder][1], store.get(path)
    try:
        numbers = set(pq.ParquetFile(pa.BufferReader(data)).read([column])[column].unique().to_pylist())
        if odd := [number for number in numbers if not isinstance(number, int) or not 0 <= number <= LARGEST_NUMBER]:
            raise ValueError(f"{column} has {odd[0]!r}, which is no number of an entry")
        return numbers
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DamagedRecord(
            f"cannot read {path} (run {store.run} in {store.url}): {type(error).__name__}: {error}. {RESTORE}"
        ) from error
