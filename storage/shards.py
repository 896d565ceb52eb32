"""Shards: trajectories on their way from Searchers to the replay buffer.

Before: flows/search.py validates a round; after: storage/buffer.py takes its shard in.

    trajectories/searcher=<id>/round=00000042.parquet       committed: immutable, one append-only log a Searcher
    quarantine/searcher=<id>/round=00000042-<uuid>.parquet  refused by the quality gate; reasons in a .json file
    quarantine/searcher=<id>/round=00000042.json            the committed shard was refused by the Trainer's intake: it
                                                            counts for no reader (storage/intake.py)
    trajectories/compacted/<id>-00000000-00000031.parquet   a block of rounds in one file. Once the file exists, it
                                                            counts, and the rounds' shards do not (storage/upkeep.py)
    expired/searcher=<id>/through=00000041.json             rounds that no longer count (storage/upkeep.py)

A Searcher's rounds have no gaps, from the first that has not expired: a round that the gate refused is repeated under
its number. So the new shards are those after the last round seen of each Searcher, and the cost of finding them is
proportional to their number. Each round is read from one file, so a reader sees each trajectory once.
"""

import json
import logging
import re
import uuid
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import NotFound, StoreError, StoreUnreachable, TornShard
from storage.paths import first_stray
from storage.schema import SCHEMA_VERSION, TRAJECTORY, as_trajectories, to_table
from storage.store import RunStore, transfer_all

logger = logging.getLogger(__name__)

# Readers infer a type from the folder's name, and it must be text: DuckDB turns searcher=7 into a number, and
# searcher=epoch into a date.
_SEARCHER = re.compile(r"(?!(?:epoch|infinity)(?![a-z0-9-]))[a-z][a-z0-9-]{0,31}")
# Block b is rounds 32 b to 32 b + 31. This is part of the format: blocks are the same for every writer, so no two
# files hold the same round.
ROUNDS_PER_BLOCK = 32
_COMPACTED = "trajectories/compacted"
_NAME = rf"(?P<searcher>{_SEARCHER.pattern})"
_SHARD_NAME = re.compile(rf"trajectories/searcher={_NAME}/round=(?P<round>[0-9]{{8}})\.parquet")
_MARK_NAME = re.compile(rf"expired/searcher={_NAME}/through=(?P<through>[0-9]{{8}})\.json")
_REFUSAL_NAME = re.compile(rf"quarantine/searcher={_NAME}/round=(?P<round>[0-9]{{8}})\.json")
_BLOCK_NAME = re.compile(rf"{_COMPACTED}/{_NAME}-(?P<first>[0-9]{{8}})-(?P<last>[0-9]{{8}})\.parquet")


def check_searcher_id(searcher: str) -> str:
    """Returns the id. Raises: ValueError: it cannot name a Searcher's log."""
    if not _SEARCHER.fullmatch(searcher):
        raise ValueError(
            f"searcher: got {searcher!r}; an id is 1 to 32 lowercase letters, digits or '-', begins with a letter and "
            "is not 'epoch' or 'infinity'. Choose another id."
        )
    return searcher


def trajectory_id(searcher: str, round_number: int, index: int) -> str:
    """The id of one row of a shard. A retried round has the same ids, so no trajectory counts twice."""
    return f"{searcher}-{round_number:08d}-{index:05d}"


def trajectory_ids(searchers: pa.ChunkedArray, rounds: pa.ChunkedArray, index: np.ndarray) -> pa.ChunkedArray:
    """trajectory_id of many rows; null if searcher or round is null."""
    numbers = pc.utf8_lpad(pc.cast(rounds, pa.string()), 8, "0")
    return pc.binary_join_element_wise(searchers, numbers, pc.utf8_lpad(pc.cast(index, pa.string()), 5, "0"), "-")


def round_of(trajectory_id: str) -> tuple[str, int]:
    """Searcher and round of a trajectory, which name its shard. Raises: ValueError: it is no trajectory's id."""
    searcher, number, _ = trajectory_id.rsplit("-", 2)
    return searcher, int(number)


def shard_path(searcher: str, round_number: int) -> str:
    return f"{_log(searcher)}/round={round_number:08d}.parquet"


def block_of(round_number: int) -> int:
    return round_number // ROUNDS_PER_BLOCK


def rounds_of(block: int) -> range:
    return range(block * ROUNDS_PER_BLOCK, (block + 1) * ROUNDS_PER_BLOCK)


def block_path(searcher: str, block: int) -> str:
    rounds = rounds_of(block)
    return f"{_COMPACTED}/{check_searcher_id(searcher)}-{rounds[0]:08d}-{rounds[-1]:08d}.parquet"


@dataclass(frozen=True)
class File:
    """A file in trajectories/, with the facts in its name."""

    path: str
    searcher: str
    rounds: range  # that it holds
    is_compacted: bool

    @property
    def block(self) -> int:
        return block_of(self.rounds[0])


def files_named(paths: list[str]) -> list[File]:
    """Shards and compacted files among the paths. Files with other names are never read."""
    files = []
    for path in paths:
        if match := _SHARD_NAME.fullmatch(path):
            number = int(match["round"])
            files.append(File(path, match["searcher"], range(number, number + 1), is_compacted=False))
        elif match := _BLOCK_NAME.fullmatch(path):
            rounds = range(int(match["first"]), int(match["last"]) + 1)
            if rounds == rounds_of(block_of(rounds[0])):
                files.append(File(path, match["searcher"], rounds, is_compacted=True))
    return files


def _log(searcher: str) -> str:
    return f"trajectories/searcher={check_searcher_id(searcher)}"


def parquet_bytes(table: pa.Table) -> bytes:
    # dictionary encoding of tokens or log-probabilities is larger than the values, and takes longer than all the rest
    repeating = [field.name for field in table.schema if not pa.types.is_list(field.type)]
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=repeating)
    return sink.getvalue().to_pybytes()


def _origin(table: pa.Table) -> tuple[str, int]:
    """The searcher and round that all rows of a shard name. Raises: ValueError: they name several, or none."""
    origins = origins_of(table)
    if len(origins) != 1:
        raise ValueError(f"a shard holds the trajectories of one searcher and round, got {sorted(origins, key=str)}")
    return origins.pop()


def shard_of(trajectories: list[dict]) -> pa.Table:
    """A round's trajectories, in order, as its shard: each gets its id and the schema's version."""
    rows = [
        row | {"trajectory_id": trajectory_id(row["searcher"], row["round"], index), "schema_version": SCHEMA_VERSION}
        for index, row in enumerate(trajectories)
    ]
    return to_table(rows, TRAJECTORY)


def commit_shard(store: RunStore, table: pa.Table) -> str:
    """Makes a round's trajectories visible, whole or not at all. Returns the shard's path.

    table: TRAJECTORY columns, one searcher and round. Raises: AlreadyExists: the round was committed before.
    """
    path = shard_path(*_origin(table))
    store.put_new(path, parquet_bytes(table))
    return path


def quarantine_shard(store: RunStore, table: pa.Table, reasons: list[str]) -> str:
    """Stores a shard that the quality gate refused in quarantine/, where it does not count. Returns its path."""
    searcher, round_number = _origin(table)
    path = f"quarantine/searcher={check_searcher_id(searcher)}/round={round_number:08d}-{uuid.uuid4().hex}"
    store.put_new(f"{path}.parquet", parquet_bytes(table))
    store.put_new(f"{path}.json", json.dumps({"reasons": reasons}, indent=2).encode())
    return f"{path}.parquet"


def refusal_path(searcher: str, round_number: int) -> str:
    return f"quarantine/searcher={check_searcher_id(searcher)}/round={round_number:08d}.json"


def refused_rounds(store: RunStore) -> dict[str, set[int]]:
    """Per searcher the committed rounds that the Trainer's intake refused."""
    refused: dict[str, set[int]] = defaultdict(set)
    for path in store.list("quarantine"):
        if match := _REFUSAL_NAME.fullmatch(path):
            refused[match["searcher"]].add(int(match["round"]))
    return refused


def next_round(store: RunStore, searcher: str) -> int:
    """One past the searcher's last committed round; 0 if it has none."""
    of_blocks = {rounds_of(block)[-1] for block in _list_blocks(store).get(searcher, ())}
    rounds = of_blocks | {file.rounds[0] for file in files_named(store.list(_log(searcher)))}
    stray = first_stray(rounds, marked_through(store.list("expired")).get(searcher, -1))
    return max((number for number in rounds if number < stray), default=-1) + 1


def compacted_blocks(files: list[File]) -> dict[str, set[int]]:
    """Per searcher the blocks that have a compacted file."""
    blocks: dict[str, set[int]] = defaultdict(set)
    for file in files:
        if file.is_compacted:
            blocks[file.searcher].add(file.block)
    return blocks


def _list_blocks(store: RunStore) -> dict[str, set[int]]:
    return compacted_blocks(files_named(store.list(_COMPACTED)))


def expired_through(store: RunStore) -> dict[str, int]:
    """Per searcher the last expired round; searchers without expired rounds are left out."""
    return whole_blocks(marked_through(store.list("expired")), _list_blocks(store))


def marked_through(marks: list[str]) -> dict[str, int]:
    """Per searcher the last round of some marks in expired/."""
    through: dict[str, int] = {}
    for path in marks:  # in order, so that a searcher's last mark counts
        if match := _MARK_NAME.fullmatch(path):
            through[match["searcher"]] = int(match["through"])
    return through


def whole_blocks(through: dict[str, int], blocks: dict[str, set[int]]) -> dict[str, int]:
    """Last rounds to expire, lowered so that no compacted file is cut: a file counts as a whole or not at all."""
    lowered = {
        searcher: rounds_of(block_of(last + 1))[0] - 1 if block_of(last + 1) in blocks.get(searcher, ()) else last
        for searcher, last in through.items()
    }
    return {searcher: last for searcher, last in lowered.items() if last >= 0}


def stray_files(files: list[File], marked: dict[str, int]) -> set[File]:
    """Files that no reader reads, because their rounds are far beyond the searcher's others. marked: marked_through."""
    firsts: dict[str, list[int]] = defaultdict(list)
    for file in files:
        firsts[file.searcher].append(file.rounds[0])
    stray = {searcher: first_stray(numbers, marked.get(searcher, -1)) for searcher, numbers in firsts.items()}
    return {file for file in files if file.rounds[0] >= stray[file.searcher]}


def committed_files(store: RunStore, unreadable: Container[str] = ()) -> list[File]:
    """All files that count: each round that has not expired and was not refused lies in one of them.

    A compacted file with some refused rounds counts, too. unreadable: paths of files to treat as missing.
    """
    files = [file for file in files_named(store.list("trajectories")) if file.path not in unreadable]
    blocks = compacted_blocks(files)
    marked = marked_through(store.list("expired"))
    expired, refused, stray = whole_blocks(marked, blocks), refused_rounds(store), stray_files(files, marked)
    return [
        file
        for file in files
        if file not in stray
        and file.rounds[0] > expired.get(file.searcher, -1)
        and (file.is_compacted or file.block not in blocks.get(file.searcher, ()))
        and not refused.get(file.searcher, set()).issuperset(file.rounds)
    ]


def new_shards(store: RunStore, seen: dict[str, int]) -> dict[str, list[int]]:
    """Per searcher the committed rounds after `seen[searcher]`, in order; of a searcher not in `seen` all that count.

    Refused rounds, and searchers without new rounds, are left out. A round that is missing before listed ones is looked
    up by its path, so that an incomplete listing does not lose it.
    """
    marked = marked_through(store.list("expired"))

    def listed_after_seen(searcher: str) -> list[int]:
        last = max(seen.get(searcher, -1), marked.get(searcher, -1))
        start_after = shard_path(searcher, last) if last >= 0 else None
        return [file.rounds[0] for file in files_named(store.list(_log(searcher), start_after=start_after))]

    names = [name.removeprefix("searcher=") for name in store.folders("trajectories") if name.startswith("searcher=")]
    searchers = [name for name in names if _SEARCHER.fullmatch(name)]
    listed = dict(zip(searchers, transfer_all(listed_after_seen, searchers), strict=True))
    blocks = _list_blocks(store)  # listed after the shards: a shard deleted before it was listed is in a compacted file
    expired = whole_blocks(marked, blocks)
    new = {}
    for searcher, rounds in listed.items():
        last = max(seen.get(searcher, -1), expired.get(searcher, -1))
        compacted = (number for block in blocks.get(searcher, ()) for number in rounds_of(block) if number > last)
        listed_or_compacted = {*rounds, *compacted}
        stray = first_stray(listed_or_compacted, last)
        new[searcher] = {number for number in listed_or_compacted if number < stray}
        new[searcher] |= _unlisted(store, searcher, last + 1, new[searcher])
    refused = refused_rounds(store) if any(new.values()) else {}
    left = {searcher: sorted(rounds - refused.get(searcher, set())) for searcher, rounds in new.items()}
    return {searcher: rounds for searcher, rounds in left.items() if rounds}


def _unlisted(store: RunStore, searcher: str, first: int, listed: set[int]) -> set[int]:
    """Stored rounds from `first` on that a listing lacks, though it has later ones."""
    missing = set(range(first, max(listed))) - listed if listed else set()
    is_there = transfer_all(lambda number: store.exists(shard_path(searcher, number)), missing) if missing else []
    return {number for number, found in zip(missing, is_there, strict=True) if found}


def read_shards(store: RunStore, searcher: str, rounds: Sequence[int]) -> pa.Table:
    """The trajectories of some rounds of a searcher, in that order. Raises: NotFound, TornShard."""
    return pa.concat_tables([TRAJECTORY.empty_table(), *map(_raised, read_each(store, searcher, rounds))])


def each_shard(store: RunStore, searcher: str, rounds: Sequence[int]) -> Iterator[tuple[int, pa.Table]]:
    """Each of some rounds in order, with its trajectories. A torn shard is left out, with a warning."""
    for of_block in by_block(rounds):
        for number, read in zip(of_block, read_each(store, searcher, of_block), strict=True):
            if isinstance(read, TornShard):
                logger.warning("a torn shard is left out: %s", read)
            else:
                yield number, _raised(read)


def _raised(read: pa.Table | StoreError) -> pa.Table:
    if isinstance(read, StoreError):
        raise read
    return read


def read_each(store: RunStore, searcher: str, rounds: Sequence[int]) -> list[pa.Table | StoreError]:
    """The trajectories of each of some rounds of a searcher, or the error of reading them: NotFound, TornShard.

    A compacted file is read once for each call, so pass the rounds of a block together (by_block).
    """
    blocks = {block for block in set(map(block_of, rounds)) if store.exists(block_path(searcher, block))}
    rounds_at: dict[str, list[int]] = defaultdict(list)
    for number in rounds:
        block = block_of(number)
        rounds_at[block_path(searcher, block) if block in blocks else shard_path(searcher, number)].append(number)

    def read(path: str) -> dict[int, pa.Table | StoreError]:
        try:
            table = read_file(store, path)
        except (NotFound, TornShard) as error:
            if path.startswith(_COMPACTED):  # its shards exist until the compacted file could be read
                return {number: _read_shard(store, searcher, number) or error for number in rounds_at[path]}
            return dict.fromkeys(rounds_at[path], error)
        if not path.startswith(_COMPACTED):
            return {rounds_at[path][0]: table}
        return {number: table.filter(pc.equal(table["round"], number)) for number in rounds_at[path]}

    found = {}
    for tables in transfer_all(read, rounds_at):
        found |= tables
    return [found[number] for number in rounds]


def _read_shard(store: RunStore, searcher: str, number: int) -> pa.Table | None:
    with suppress(NotFound, TornShard):
        return read_file(store, shard_path(searcher, number))
    return None


def by_block(rounds: Iterable[int]) -> Iterator[list[int]]:
    """Rounds in order, grouped by block: the rounds to read together."""
    for _, of_block in groupby(sorted(rounds), block_of):
        yield list(of_block)


def read_file(store: RunStore, path: str) -> pa.Table:
    """A shard, or a compacted file with all rounds of its name, in this version's columns.

    Raises: TornShard: it is neither, or of a newer version. StoreUnreachable: the store sent fewer or more bytes than
    it holds. NotFound.
    """
    data, where = store.get(path), f"{path} of run {store.run} in {store.url}"
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read()
        table.validate(full=True)  # finds invalid text, and lists that end outside their values
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        _check_size(store, path, data)
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


def _check_size(store: RunStore, path: str, data: bytes) -> None:
    """Raises: StoreUnreachable: the store holds another number of bytes, so the answer was cut, not the file."""
    filesystem, base = store.arrow_filesystem()
    size = store.scan(lambda: filesystem.get_file_info(f"{base}/{path}").size)
    if size is not None and size != len(data):
        raise StoreUnreachable(
            f"cannot read {path} (run {store.run} in {store.url}): the answer was cut: {len(data)} of {size} bytes came"
        )


def origins_of(table: pa.Table) -> set[tuple[str, int]]:
    """The (searcher, round) pairs that rows of shards name."""
    pairs = table.select(["searcher", "round"]).group_by(["searcher", "round"]).aggregate([])
    return set(zip(pairs["searcher"].to_pylist(), pairs["round"].to_pylist(), strict=True))
