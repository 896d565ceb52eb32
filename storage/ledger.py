"""The ledger: search rounds, syncs, draws, training steps and evaluations, one immutable Parquet file an entry.

Before: Trainer and Searchers record an entry each; after: storage/queries.py shows them as tables, and
storage/ledger_upkeep.py writes many of a folder as one file.

    syncs/attempt=00000001/sync=00000003.parquet             the rounds that a sync took in
    batches/attempt=00000001/step=00000012.parquet           the slots that a batch drew
    metrics/training/attempt=00000001/step=00000012.parquet  one training step
    metrics/search/searcher=<id>/round=00000042.parquet      one search round
    metrics/evaluations/step=00000000.parquet                one policy on held-out problems (of a 2nd attempt: -a0002)

A Trainer that resumes from a checkpoint undoes the steps that earlier attempts trained after it. So an entry of attempt
a for step t counts if no later attempt resumed from before t. Entries that do not count stay in the store.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.attempts import counts, list_attempts
from storage.errors import DamagedRecord, NotFound
from storage.fresh import Fresh
from storage.ledger_files import counting_parts, numbers_in
from storage.paths import LARGEST_NUMBER
from storage.schema import BATCH, EVALUATION, SEARCH_ROUND, SYNC, TRAINING_STEP, to_table
from storage.shards import check_searcher_id, parquet_bytes
from storage.store import RESTORE, RunStore, transfer_all

logger = logging.getLogger(__name__)

# By folder: columns that no entry may lack. Older versions recorded no attempt of evaluations.
NEEDED = {
    "batches": ("attempt", "step", "prompt_index", "trajectory_id", "recent", "draw_probability", "reward"),
    "metrics/training": ("attempt", "step", "started_at", "ended_at"),
    "metrics/search": ("searcher", "round", "started_at", "ended_at"),
    "metrics/evaluations": ("policy_step", "accuracy"),
    "syncs": tuple(name for name in SYNC.names if name != "num_trajectories"),  # which older versions did not record
    "rewards": ("trajectory_id", "reward"),
    "diversity": ("metric", "value"),
}
MOST_ROUNDS_IN_SYNC = 1_000_000  # of one Searcher; a larger number is damaged, and readers count up to it
_NUMBERS = {"attempt", "step", "sync", "round", "first_round", "last_round"}


@dataclass(frozen=True)
class Sync:
    """The trajectories that one sync took in."""

    number: int  # counts from 1
    step: int  # the first training step that could draw it
    attempt: int
    rounds: dict[str, list[int]]  # by searcher, in order
    fresh: Fresh  # sums over the trajectories

    @property
    def num_trajectories(self) -> int:
        return self.fresh.num_trajectories


def record_batch(store: RunStore, attempt: int, step: int, rows: pa.Table) -> None:
    """Records the batch of a training step: rows of ReplayBuffer.draw, without the columns that the shards hold."""
    ours = {"attempt": [attempt] * rows.num_rows, "step": [step] * rows.num_rows, "staleness": staleness(rows, step)}
    columns = [ours[name] if name in ours else rows[name] for name in BATCH.names]
    table = pa.table(columns, names=BATCH.names).cast(BATCH)
    store.put_new(batch_path(attempt, step), parquet_bytes(table))


def staleness(rows: pa.Table, step: int) -> pa.Array:
    """Staleness of each row of a batch, in policy steps: in step t, a response of policy step t - 1 has 0."""
    return pc.subtract(pa.scalar(step - 1, pa.int64()), rows["ages_from"])


def batch_path(attempt: int, step: int) -> str:
    return f"batches/attempt={attempt:08d}/step={step:08d}.parquet"


def record_training_step(store: RunStore, row: dict) -> None:
    """Records a training step. row: TRAINING_STEP columns."""
    path = f"metrics/training/attempt={row['attempt']:08d}/step={row['step']:08d}.parquet"
    store.put_new(path, parquet_bytes(to_table([row], TRAINING_STEP)))


def record_search_round(store: RunStore, row: dict) -> None:
    """Records a search round. row: SEARCH_ROUND columns."""
    path = f"metrics/search/searcher={check_searcher_id(row['searcher'])}/round={row['round']:08d}.parquet"
    store.put_new(path, parquet_bytes(to_table([row], SEARCH_ROUND)))


def record_evaluation(store: RunStore, row: dict) -> None:
    """Records an evaluation. row: EVALUATION columns. Raises: AlreadyExists: this policy was evaluated before."""
    of_attempt = f"-a{row['attempt']:04d}" if row["attempt"] > 1 else ""
    path = f"metrics/evaluations/step={row['policy_step']:08d}{of_attempt}.parquet"
    store.put_new(path, parquet_bytes(to_table([row], EVALUATION)))


def evaluations(store: RunStore) -> dict[int, str]:
    """Paths of the files with the evaluations that count, by policy step, in order."""
    resumes, found, folder = list_attempts(store), {}, "metrics/evaluations"
    for part in counting_parts(store, folder):
        try:
            steps = numbers_in(store, folder, part.path) if part.is_compacted else part.numbers
        except (DamagedRecord, NotFound) as error:  # its policies may be evaluated again; verify reports the file
            logger.warning("evaluations are left out: %s", error)
            continue
        attempt = int(part.group.removeprefix("attempt="))
        found |= {step: part.path for step in steps if counts(attempt, step, resumes)}
    return dict(sorted(found.items()))


def accuracy(store: RunStore, path: str, policy_step: int) -> float:
    """The accuracy of a policy's evaluation. path: of its file. Raises: DamagedRecord: it cannot be read."""
    rows = read_entry(store, path, EVALUATION, ["policy_step", "accuracy"])
    found = rows.filter(pc.equal(rows["policy_step"], policy_step))["accuracy"]
    if not found:
        where = f"{path} (run {store.run} in {store.url})"
        raise DamagedRecord(f"{where} has no row of policy step {policy_step}. Restore it, or remove it.")
    return found[0].as_py()


def record_sync(store: RunStore, sync: Sync) -> None:
    """Records a sync: one row for each searcher; if rounds are missing between, one for each stretch without gaps."""
    rows = [
        {
            "attempt": sync.attempt,
            "sync": sync.number,
            "step": sync.step,
            "searcher": searcher,
            "first_round": stretch[0],
            "last_round": stretch[-1],
            "num_trajectories": sync.num_trajectories,
        }
        for searcher, rounds in sync.rounds.items()
        for stretch in _stretches(rounds)
    ]
    path = f"syncs/attempt={sync.attempt:08d}/sync={sync.number:08d}.parquet"
    store.put_new(path, parquet_bytes(to_table(rows, SYNC)))


def _stretches(numbers: list[int]) -> list[list[int]]:
    """Numbers in order, split at gaps."""
    by_offset = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    return [[number for _, number in stretch] for _, stretch in by_offset]


def effective_syncs(store: RunStore, step: int) -> list[dict]:
    """SYNC rows up to `step` that count, in the order of syncs. Raises: DamagedRecord: one cannot be read."""
    resumes = list_attempts(store)

    def read(path: str) -> list[dict]:
        return read_entry(store, path, SYNC, NEEDED["syncs"]).to_pylist()

    paths = [part.path for part in counting_parts(store, "syncs")]
    rows = [row for rows in transfer_all(read, paths) for row in rows]
    rows.sort(key=lambda row: (row["attempt"], row["sync"]))  # an entry may be newer than the file of those around it
    return [row for row in rows if row["step"] <= step and counts(row["attempt"], row["step"], resumes)]


def read_entry(
    store: RunStore, path: str, columns: pa.Schema, needed: Iterable[str], *, is_copied: bool = False
) -> pa.Table:
    """An entry, or a compacted file of entries, with those of `columns` that it has: older versions recorded fewer.

    is_copied: it will be deleted, so it must have no column besides, as newer versions record.
    Raises: DamagedRecord: it is no Parquet file, has no row, or lacks a value of a column in `needed`. NotFound.
    """
    try:
        table = pq.ParquetFile(pa.BufferReader(store.get(path))).read(use_threads=False)
        table.validate(full=True)
        lacking = [name for name in needed if name not in table.column_names or table[name].null_count]
        if lacking or not table.num_rows:
            raise ValueError(f"it has {table.num_rows} rows, and lacks values of {', '.join(lacking) or 'all columns'}")
        if is_copied and (more := set(table.column_names) - set(columns.names)):
            raise ValueError(f"it has the column {min(more)} of a newer version")
        fields = [columns.field(name) for name in table.column_names if name in columns.names]
        table = table.select([field.name for field in fields]).cast(pa.schema(fields))
        for name in _NUMBERS & set(table.column_names):  # readers count up to them
            if (least := pc.min(table[name]).as_py()) is not None and not (
                least >= 0 and pc.max(table[name]).as_py() <= LARGEST_NUMBER
            ):
                raise ValueError(f"{name} is not from 0 to {LARGEST_NUMBER}")
        spans = pc.subtract(table["last_round"], table["first_round"]) if columns == SYNC else None
        if spans is not None and pc.max(spans).as_py() > MOST_ROUNDS_IN_SYNC:
            raise ValueError(f"a sync took in more than {MOST_ROUNDS_IN_SYNC:,} rounds of a Searcher")
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DamagedRecord(
            f"cannot read {path} (run {store.run} in {store.url}): it is empty, cut short or not of this program "
            f"({type(error).__name__}: {error}). {RESTORE}"
        ) from error
    return table
