"""The shards' part of `tba verify` (storage/verify.py)."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.errors import DamagedRecord, NotFound, StoreError, TornShard
from storage.intake import refusals
from storage.rules import Limits, broken_in_each
from storage.shard_files import by_block, read_each, read_file
from storage.shards import (
    WARM_START_PLAN,
    TrajectoryFile,
    block_path,
    compacted_blocks,
    expired_through,
    files_named,
    origins_of,
    refused_rounds,
    shard_path,
    stray_files,
    warm_start_name,
)
from storage.store import RunStore, transfer_all

NUM_EXAMPLES = 3  # ids that a fault quotes


@dataclass(frozen=True)
class Fault:
    """One fault of a run's store."""

    kind: str  # in two words, such as "missing round"
    path: str  # inside the run
    message: str


@dataclass
class Shards:
    """Facts about the shards for the other checks."""

    rounds: dict[str, list[int]] = field(default_factory=dict)  # by searcher, the rounds that are stored
    expired: dict[str, int] = field(default_factory=dict)  # by searcher, the last round whose shard may be deleted
    ids: list[pa.ChunkedArray] = field(default_factory=list)  # trajectory ids, an array a shard
    refused: dict[str, set[int]] = field(default_factory=dict)  # by searcher, the rounds that do not count
    copied: set[str] = field(default_factory=set)  # searchers that are copies of a warm start's sources
    policies: dict[tuple, str] = field(default_factory=dict)  # (policy_step, fingerprint): a shard that it sampled

    def all_ids(self) -> pa.ChunkedArray:
        return pa.chunked_array([chunk for ids in self.ids for chunk in ids.chunks], pa.string())


def check_shards(store: RunStore, limits: Limits | None, faults: list[Fault]) -> Shards:
    """Checks all shards; appends to `faults`. limits: for the rules; None: values in the shards are not checked."""
    found, rounds_of = Shards(), defaultdict(set)
    paths = store.list("trajectories")
    files = files_named(paths)
    for path in sorted(set(paths) - {file.path for file in files}):
        faults.append(Fault("stray file", path, "its name is not a shard's, so it is not read"))
    found.expired = expired_through(store)  # after the listing: a shard is marked long before it is deleted
    stray = stray_files(files, found.expired)
    for file in sorted(stray, key=lambda file: file.path):
        faults.append(
            Fault("stray file", file.path, "its rounds are far beyond the searcher's others, so it is not read")
        )
    files = [file for file in files if file not in stray]
    for file in files:
        rounds_of[file.searcher].update(file.rounds)
    found.refused = refused_rounds(store)
    faults += [
        Fault("refused shard", of.shard, f"the Trainer refused it: {'; '.join(of.reasons)}") for of in refusals(store)
    ]
    with suppress(DamagedRecord):  # `verify` names it
        sources = store.read_json(WARM_START_PLAN, list[dict]) or []
        found.copied = {warm_start_name(index) for index in range(len(sources))}
    for searcher, rounds in rounds_of.items():
        for missing in sorted(set(range(found.expired.get(searcher, -1) + 1, max(rounds))) - rounds):
            path = shard_path(searcher, missing)
            faults.append(
                Fault("missing round", path, f"{searcher} has committed round {max(rounds)}, but this round is missing")
            )
        found.rounds[searcher] = sorted(rounds)
        for of_block in by_block(rounds - found.refused.get(searcher, set())):  # bounds memory
            _check_some_shards(store, searcher, of_block, limits, found, faults)
    blocks = compacted_blocks(files)
    replaced = defaultdict(list)  # shards by the block whose compacted file has their rows
    for file in files:
        if not file.is_compacted and file.block in blocks.get(file.searcher, ()):
            replaced[file.searcher, file.block].append(file)
    for of_block in transfer_all(lambda of_block: _changed_copies(store, of_block), replaced.values()):
        faults += of_block
    replacements = sorted(block_path(*of_block) for of_block in replaced)
    faults += filter(None, transfer_all(lambda path: _torn(store, path), replacements))
    return found


def _torn(store: RunStore, path: str) -> Fault | None:
    """The fault of a torn compacted file. read_each would read its shards instead, while these exist."""
    try:
        read_file(store, path)
    except TornShard as error:
        return Fault("torn shard", path, str(error))


def _changed_copies(store: RunStore, of_block: list[TrajectoryFile]) -> list[Fault]:
    """The faults of one block's shards, which will be deleted because a compacted file has their rows."""
    counting = read_each(store, of_block[0].searcher, [number for file in of_block for number in file.rounds])
    found = [_changed_copy(store, file, rows) for file, rows in zip(of_block, counting, strict=True)]
    return [fault for fault in found if fault]


def _changed_copy(store: RunStore, file: TrajectoryFile, counting: pa.Table | StoreError) -> Fault | None:
    """counting: the rows of the compacted file, which the shard must have, too."""
    try:
        shard = read_file(store, file.path)
    except NotFound:
        return None  # it was deleted since it was listed
    except TornShard as error:
        return Fault("torn shard", file.path, str(error))
    if isinstance(counting, pa.Table) and not shard.equals(counting):
        return Fault("changed copy", file.path, "the compacted file that replaces it has other rows")


def _check_some_shards(
    store: RunStore, searcher: str, rounds: list[int], limits: Limits | None, found: Shards, faults: list[Fault]
) -> None:
    tables = dict(zip(rounds, read_each(store, searcher, rounds), strict=True))
    faults += [
        Fault("torn shard", shard_path(searcher, number), str(error))
        for number, error in tables.items()
        if isinstance(error, TornShard)  # NotFound: it expired since it was listed
    ]
    tables = {number: table for number, table in tables.items() if isinstance(table, pa.Table)}
    reasons = broken_in_each(list(tables.values()), limits) if limits else [[]] * len(tables)
    for (number, table), broken in zip(tables.items(), reasons, strict=True):
        path = shard_path(searcher, number)
        faults += [Fault("invalid shard", path, rule) for rule in broken]
        if (origins := origins_of(table)) - {(searcher, number)}:
            faults.append(Fault("misplaced shard", path, f"its rows name (searcher, round) {sorted(origins, key=str)}"))
        found.ids.append(table["trajectory_id"])
        if searcher in found.copied:
            continue  # sampled by another run's policies
        for which in ("", "last_"):
            columns = [f"{which}policy_step", f"{which}policy_fingerprint"]
            for policy in table.group_by(columns).aggregate([]).select(columns).to_pylist():
                found.policies.setdefault(tuple(policy.values()), path)


def duplicates(shards: Shards) -> Iterator[Fault]:
    """Ids that are stored twice. Halves of their md5 are compared first: a set of all ids takes twice the memory."""
    ids = shards.all_ids().drop_null()  # a null breaks a rule
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.register("ids", pa.table({"id": ids}))
        halves = connection.sql("SELECT md5_number_upper(id) AS half FROM ids").fetchnumpy()["half"]
    in_order = np.sort(halves)
    repeated = in_order[1:][in_order[1:] == in_order[:-1]]
    if not len(repeated):
        return
    counts = ids.filter(pa.array(np.isin(halves, repeated))).value_counts()
    twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
    if twice:
        yield Fault("duplicate trajectory", "trajectories", f"{some(twice)}: more than once in the shards")


def some(ids: list[str]) -> str:
    """`a, b, c and 7 more`."""
    more = f" and {len(ids) - NUM_EXAMPLES} more" if len(ids) > NUM_EXAMPLES else ""
    return ", ".join(map(str, ids[:NUM_EXAMPLES])) + more
