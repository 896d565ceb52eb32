"""Shards: trajectories on their way from Searchers to the replay buffer.

Before: flows/search.py validates a round; after: storage/new_shards.py finds it.

    trajectories/searcher=<id>/round=00000042.parquet       committed: immutable, one append-only log a Searcher
    quarantine/searcher=<id>/round=00000042-<uuid>.parquet  refused by the quality gate; reasons in a .json file
    quarantine/searcher=<id>/round=00000042.json            the committed shard was refused by the Trainer's intake: it
                                                            counts for no reader (storage/intake.py)
    trajectories/compacted/<id>-00000000-00000031.parquet   a block of rounds in one file. Once the file exists, it
                                                            counts, and the rounds' shards do not (storage/upkeep.py)
    heads/<id>=00000042                                     its newest committed round (storage/new_shards.py)
    expired/searcher=<id>/through=00000041.json             rounds that no longer count (storage/upkeep.py)

A Searcher's rounds have no gaps, from the first that has not expired: a round that the gate refused is repeated under
its number. So the new shards are those after the last round seen of each Searcher, and the cost of finding them is
proportional to their number. Each round is read from one file, so a reader sees each trajectory once.
"""

import logging
import re
import uuid
from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.paths import first_stray
from storage.schema import SCHEMA_VERSION, TRAJECTORY, to_table
from storage.store import RunStore

logger = logging.getLogger(__name__)

# Readers infer a type from the folder's name, and it must be text: DuckDB turns searcher=7 into a number, and
# searcher=epoch into a date.
SEARCHER_ID = r"(?!(?:epoch|infinity)(?![a-z0-9-]))[a-z][a-z0-9-]{0,31}"
_SEARCHER = re.compile(SEARCHER_ID)
# Block b is rounds 32 b to 32 b + 31. This is part of the format: blocks are the same for every writer, so no two
# files hold the same round.
ROUNDS_PER_BLOCK = 32
COMPACTED = "trajectories/compacted"
# Columns of a shard that are compressed. The others have few values: their dictionaries are as small uncompressed, and
# are read sooner.
_COMPRESSED = (
    *("trajectory_id", "prompt_id", "prompt", "response", "rewards.key_value.key"),
    *(f"{field.name}.list.element" for field in TRAJECTORY if pa.types.is_list(field.type)),
)
_NAME = rf"(?P<searcher>{SEARCHER_ID})"
_SHARD_NAME = re.compile(rf"trajectories/searcher={_NAME}/round=(?P<round>[0-9]{{8}})\.parquet")
_MARK_NAME = re.compile(rf"expired/searcher={_NAME}/through=(?P<through>[0-9]{{8}})\.json")
_REFUSAL_NAME = re.compile(rf"quarantine/searcher={_NAME}/round=(?P<round>[0-9]{{8}})\.json")
HEAD_NAME = re.compile(rf"heads/{_NAME}=(?P<through>[0-9]{{8}})")
_BLOCK_NAME = re.compile(rf"{COMPACTED}/{_NAME}-(?P<first>[0-9]{{8}})-(?P<last>[0-9]{{8}})\.parquet")


WARM_START_PLAN = "warm_start/plan.json"  # a list of the sources


def warm_start_name(source: int) -> str:
    """The Searcher name of the copies that a warm start makes of its n-th source, counted from 0."""
    return f"warm{source}"


def is_warm_start_name(searcher: str) -> bool:
    return re.fullmatch(r"warm[0-9]+", searcher) is not None


def check_searcher_id(searcher: str) -> str:
    """Returns the id. Raises: ValueError: it cannot name a Searcher's log."""
    if not is_searcher_id(searcher):
        raise ValueError(
            f"searcher: got {searcher!r}; an id is 1 to 32 lowercase letters, digits or '-', begins with a letter and "
            "is not 'epoch' or 'infinity'. Choose another id."
        )
    return searcher


def is_searcher_id(text: str) -> bool:
    return bool(_SEARCHER.fullmatch(text))


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
    return f"{log_folder(searcher)}/round={round_number:08d}.parquet"


def block_of(round_number: int) -> int:
    return round_number // ROUNDS_PER_BLOCK


def rounds_of(block: int) -> range:
    return range(block * ROUNDS_PER_BLOCK, (block + 1) * ROUNDS_PER_BLOCK)


def block_path(searcher: str, block: int) -> str:
    rounds = rounds_of(block)
    return f"{COMPACTED}/{check_searcher_id(searcher)}-{rounds[0]:08d}-{rounds[-1]:08d}.parquet"


@dataclass(frozen=True)
class TrajectoryFile:
    """A shard or compacted file in trajectories/, with the facts in its name."""

    path: str
    searcher: str
    rounds: range  # that it holds
    is_compacted: bool

    @property
    def block(self) -> int:
        return block_of(self.rounds[0])


def files_named(paths: list[str]) -> list[TrajectoryFile]:
    """Shards and compacted files among the paths. Files with other names are never read."""
    files = []
    for path in paths:
        if match := _SHARD_NAME.fullmatch(path):
            number = int(match["round"])
            files.append(TrajectoryFile(path, match["searcher"], range(number, number + 1), is_compacted=False))
        elif match := _BLOCK_NAME.fullmatch(path):
            rounds = range(int(match["first"]), int(match["last"]) + 1)
            if rounds == rounds_of(block_of(rounds[0])):
                files.append(TrajectoryFile(path, match["searcher"], rounds, is_compacted=True))
    return files


def log_folder(searcher: str) -> str:
    return f"trajectories/searcher={check_searcher_id(searcher)}"


def parquet_bytes(table: pa.Table, codec: str = "zstd") -> bytes:
    """A table as a Parquet file. codec: zstd, or lz4 for files that are read soon: larger, and faster to read."""
    # dictionary encoding of tokens or log-probabilities is larger than the values, and takes longer than all the rest
    repeating = [field.name for field in table.schema if not pa.types.is_list(field.type)]
    compression = dict.fromkeys(_COMPRESSED, codec) if table.schema.equals(TRAJECTORY) else codec
    sink = pa.BufferOutputStream()
    has_metadata = table.schema.metadata is not None  # Arrow stores metadata in its copy of the schema, 2 kB
    pq.write_table(table, sink, compression=compression, use_dictionary=repeating, store_schema=has_metadata)
    return sink.getvalue().to_pybytes()


def origins_of(table: pa.Table) -> set[tuple[str, int]]:
    """The (searcher, round) pairs that rows of shards name."""
    pairs = table.select(["searcher", "round"]).group_by(["searcher", "round"]).aggregate([])
    return set(zip(pairs["searcher"].to_pylist(), pairs["round"].to_pylist(), strict=True))


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
    searcher, round_number = _origin(table)
    path = shard_path(searcher, round_number)
    store.put_new(path, parquet_bytes(table, "lz4"))
    advance_head(store, searcher, round_number)
    return path


def advance_head(store: RunStore, searcher: str, round_number: int) -> None:
    """Says that this round of a searcher and all before it are committed, for storage/new_shards.py."""
    store.put(head_path(searcher, round_number), b"")
    if round_number:
        store.delete(head_path(searcher, round_number - 1))


def head_path(searcher: str, round_number: int) -> str:
    return f"heads/{check_searcher_id(searcher)}={round_number:08d}"


def quarantine_shard(store: RunStore, table: pa.Table, reasons: list[str]) -> str:
    """Stores a shard that the quality gate refused in quarantine/, where it does not count. Returns its path."""
    searcher, round_number = _origin(table)
    path = f"quarantine/searcher={check_searcher_id(searcher)}/round={round_number:08d}-{uuid.uuid4().hex}"
    store.put_new(f"{path}.parquet", parquet_bytes(table))
    store.put_new_json(f"{path}.json", {"reasons": reasons})
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
    of_blocks = {rounds_of(block)[-1] for block in list_blocks(store).get(searcher, ())}
    rounds = of_blocks | {file.rounds[0] for file in files_named(store.list(log_folder(searcher)))}
    stray = first_stray(rounds, marked_through(store.list("expired")).get(searcher, -1))
    return max((number for number in rounds if number < stray), default=-1) + 1


def compacted_blocks(files: list[TrajectoryFile]) -> dict[str, set[int]]:
    """Per searcher the blocks that have a compacted file."""
    blocks: dict[str, set[int]] = defaultdict(set)
    for file in files:
        if file.is_compacted:
            blocks[file.searcher].add(file.block)
    return blocks


def list_blocks(store: RunStore) -> dict[str, set[int]]:
    return compacted_blocks(files_named(store.list(COMPACTED)))


def expired_through(store: RunStore) -> dict[str, int]:
    """Per searcher the last expired round; searchers without expired rounds are left out."""
    return lowered_to_whole_blocks(marked_through(store.list("expired")), list_blocks(store))


def marked_through(marks: list[str]) -> dict[str, int]:
    """Per searcher the last round of some marks in expired/."""
    through: dict[str, int] = {}
    for path in marks:  # in order, so that a searcher's last mark counts
        if match := _MARK_NAME.fullmatch(path):
            through[match["searcher"]] = int(match["through"])
    return through


def lowered_to_whole_blocks(through: dict[str, int], blocks: dict[str, set[int]]) -> dict[str, int]:
    """Last rounds to expire, lowered so that no compacted file is cut: a file counts as a whole or not at all."""
    lowered = {
        searcher: rounds_of(block_of(last + 1))[0] - 1 if block_of(last + 1) in blocks.get(searcher, ()) else last
        for searcher, last in through.items()
    }
    return {searcher: last for searcher, last in lowered.items() if last >= 0}


def stray_files(files: list[TrajectoryFile], marked: dict[str, int]) -> set[TrajectoryFile]:
    """Files that no reader reads, because their rounds are far beyond the searcher's others. marked: marked_through."""
    firsts: dict[str, list[int]] = defaultdict(list)
    for file in files:
        firsts[file.searcher].append(file.rounds[0])
    stray = {searcher: first_stray(numbers, marked.get(searcher, -1)) for searcher, numbers in firsts.items()}
    return {file for file in files if file.rounds[0] >= stray[file.searcher]}


def committed_files(store: RunStore, unreadable: Container[str] = ()) -> list[TrajectoryFile]:
    """All files that count: each round that has not expired and was not refused lies in one of them.

    A compacted file with some refused rounds counts, too. unreadable: paths of files to treat as missing.
    """
    files = [file for file in files_named(store.list("trajectories")) if file.path not in unreadable]
    blocks = compacted_blocks(files)
    marked = marked_through(store.list("expired"))
    expired, refused, stray = lowered_to_whole_blocks(marked, blocks), refused_rounds(store), stray_files(files, marked)
    return [
        file
        for file in files
        if file not in stray
        and file.rounds[0] > expired.get(file.searcher, -1)
        and (file.is_compacted or file.block not in blocks.get(file.searcher, ()))
        and not refused.get(file.searcher, set()).issuperset(file.rounds)
    ]
