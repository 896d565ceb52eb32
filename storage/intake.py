"""The Trainer's intake: which committed shards the replay buffer takes in.

Before: storage/new_shards.py finds the new rounds; after: storage/buffer.py indexes the accepted shards.

    quarantine/searcher=<id>/round=00000042.json    a refused shard: its path, the reasons, the process that refused it

A shard is accepted or refused as a whole. One round is the work of one engine and one reward function, so a bad row
makes its neighbours doubtful. With whole rounds the sync records, from which a buffer is rebuilt, stay ranges of
rounds. The shard's file is not moved. A refused round counts for no reader: not in SQL, exports, reports, rescoring,
warm starts or compaction (refused_rounds of storage/shards.py).

Only the Trainer refuses shards, so processes cannot disagree. The decision is stored before a later round can be drawn.
At the run's end the shards that no sync took in are checked, too. If the store does not answer, StoreUnreachable is
raised and the shard is not refused. A shard is refused only if a second reading confirms the fault.
"""

import logging
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from storage import ledger, policies
from storage.errors import AlreadyExists, DamagedRecord, StoreError, TornShard, UnsafePath
from storage.new_shards import new_shards
from storage.paths import LARGEST_NUMBER
from storage.rules import Limits, broken_in_each
from storage.shard_files import read_each, read_many
from storage.shards import origins_of, refusal_path, refused_rounds, shard_path
from storage.store import RunStore, transfer_all

ROUNDS_PER_CHECK = 64  # are checked together, which costs little more than a check of one
# Rounds of 1,024 responses with 8,192 tokens have 100 MB each. Some 64 rounds more are read ahead, however long.
BYTES_PER_CHECK = 256 << 20
Origin = tuple[str, int]  # searcher, round
SECOND_READING_S = 0.5  # before the second reading; a store seldom gives a wrong answer twice

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refusal:
    """A committed shard that is not trained on."""

    searcher: str
    round: int
    reasons: list[str]

    @property
    def shard(self) -> str:
        return shard_path(self.searcher, self.round)


@dataclass(frozen=True)
class _Reasons:
    """The part of a JSON file in quarantine/ that is read."""

    reasons: list[str]


def accept(
    store: RunStore,
    rounds: Mapping[str, Sequence[int]],
    limits: Limits,
    compacted: Mapping[str, Container[int]] | None = None,
) -> Iterator[tuple[list[pa.Table], list[Refusal]]]:
    """Reads and checks rounds by searcher, some at a time. Each time the shards to take in, in order, and the refusals
    of the others.

    compacted: as for shard_files.read_many. Raises: StoreUnreachable. NotFound: a shard does not exist.
    """
    for read in _groups(read_many(store, rounds, compacted)):
        reasons = check(read, limits)
        if reasons:
            time.sleep(SECOND_READING_S)
            again = {origin: read_each(store, origin[0], [origin[1]])[0] for origin in reasons}
            read, reasons = read | again, check(again, limits)
        refused = [Refusal(*origin, of_round) for origin, of_round in reasons.items()]
        for refusal in refused:
            logger.warning("%s is refused; training goes on without it: %s", refusal.shard, "; ".join(refusal.reasons))
        yield [table for origin, table in read.items() if origin not in reasons], refused


def _groups(reads: Iterable[tuple[Origin, pa.Table | StoreError]]) -> Iterator[dict[Origin, pa.Table | StoreError]]:
    """Up to `ROUNDS_PER_CHECK` rounds at a time, fewer where they have more than `BYTES_PER_CHECK`."""
    group, num_bytes = {}, 0
    for origin, read in reads:
        group[origin] = read
        num_bytes += read.nbytes if isinstance(read, pa.Table) else 0
        if len(group) == ROUNDS_PER_CHECK or num_bytes > BYTES_PER_CHECK:
            yield group
            group, num_bytes = {}, 0
    if group:
        yield group


def check(read: Mapping[tuple[str, int], pa.Table | StoreError], limits: Limits) -> dict[tuple[str, int], list[str]]:
    """The reasons for refusal of each (searcher, round) that is not trained on. Raises: NotFound: one is missing."""
    reasons: dict[tuple[str, int], list[str]] = {}
    for origin, table in read.items():
        if isinstance(table, TornShard):
            reasons[origin] = [str(table)]
        elif isinstance(table, StoreError):
            raise table
    whole = {origin: table for origin, table in read.items() if origin not in reasons}
    for origin in _misnamed(whole):
        found = sorted(origins_of(whole.pop(origin)), key=str)
        reasons[origin] = [f"its rows name (searcher, round) {found}"]
    rules = zip(whole, broken_in_each(list(whole.values()), limits), strict=True)
    return reasons | {origin: of_round for origin, of_round in rules if of_round}


def _misnamed(shards: Mapping[tuple[str, int], pa.Table]) -> set[tuple[str, int]]:
    """The (searcher, round) of shards with rows that name another one, or none."""
    if not shards:
        return set()
    names = pa.concat_tables([shard.select(["searcher", "round"]) for shard in shards.values()])
    lengths = [shard.num_rows for shard in shards.values()]
    index = np.repeat(np.arange(len(shards)), lengths)  # [rows]: of the row's shard
    searchers, rounds = (np.array(of_all, object) for of_all in zip(*shards, strict=True))
    is_right = (names["searcher"].to_numpy() == searchers[index]) & (names["round"].to_numpy() == rounds[index])
    origins = list(shards)
    return {origins[number] for number in set(index[~is_right].tolist())}


def refuse(store: RunStore, refused: Iterable[Refusal], by: str) -> None:
    """Records refusals. by: the process that refuses, in words."""
    for refusal in refused:
        record = {"shard": refusal.shard, "reasons": refusal.reasons, "refused_by": by}
        record["at"] = datetime.now(UTC).isoformat()
        with suppress(AlreadyExists):  # an earlier attempt of the Trainer came to the same decision
            store.put_new_json(refusal_path(refusal.searcher, refusal.round), record)


def refusals(store: RunStore) -> list[Refusal]:
    """The recorded refusals, by searcher in order."""
    origins = [(searcher, number) for searcher, rounds in refused_rounds(store).items() for number in sorted(rounds)]
    return transfer_all(lambda origin: Refusal(*origin, recorded_reasons(store, refusal_path(*origin))), origins)


def recorded_reasons(store: RunStore, path: str) -> list[str]:
    """The reasons in a JSON file in quarantine/."""
    try:
        found = store.read_json(path, _Reasons)
    except DamagedRecord as error:
        return [f"the record of the reasons is damaged: {error}"]
    return found.reasons if found else ["the record of the reasons does not exist"]  # its writer was killed


def refuse_rest(store: RunStore) -> None:
    """Checks the shards that no sync took in, and refuses bad ones. Only for a trained run, which syncs no more."""
    seen: dict[str, int] = {}
    with suppress(DamagedRecord):  # then all are checked once more
        seen = {row["searcher"]: row["last_round"] for row in ledger.effective_syncs(store, LARGEST_NUMBER)}
    limits = limits_of(store)
    for _, refused in accept(store, new_shards(store, seen), limits):
        refuse(store, refused, "the run, at its end")


def limits_of(store: RunStore) -> Limits:
    """Limits from the configuration and the newest policy of a run; an unknown limit does not apply."""
    known = Limits()
    unknown = (DamagedRecord, UnsafePath, ValueError, TypeError, KeyError, AttributeError, OverflowError)
    with suppress(*unknown):
        known = replace(known, last_step=int(store.read_json("run.json")["train"]["steps"]))
    with suppress(*unknown):
        config = store.read_json(f"{store.read_json(policies.LATEST)['path']}/config.json")
        known = replace(known, vocab_size=int(config.get("text_config", config)["vocab_size"]))
    return known
