"""The ledger: what was searched, taken in, drawn, trained and measured, one immutable Parquet file an entry.

    trainer/attempt=00000001.json                            one life of the Trainer, and where it resumed from
    trainer/step=00000100/                                   checkpoint, whole once its state.json is there
    trainer/heartbeat.json                                   the live Trainer's newest sign of life
    syncs/attempt=00000001/sync=00000003.parquet             the rounds that a sync took in
    batches/attempt=00000001/step=00000012.parquet           the slots that a batch drew
    metrics/training/attempt=00000001/step=00000012.parquet  one training step
    metrics/search/searcher=<id>/round=00000042.parquet      one search round
    metrics/evaluations/step=00000000.parquet                one policy on held-out problems (of a 2nd attempt: -a0002)

A resumed Trainer starts from a checkpoint, and what its predecessors did after that checkpoint is undone: an entry of
attempt a at step t counts if no later attempt resumed from before t. Entries that do not count are kept.
"""

import json
import re
import socket
import time
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import AlreadyExists, AlreadyTraining, NotFound, Superseded
from storage.process_identity import Process
from storage.schema import BATCH, EVALUATION, SEARCH_ROUND, SYNC, TRAINING_STEP, to_table
from storage.shards import check_searcher_id, parquet_bytes
from storage.store import RunStore, transfer_all

HEARTBEAT = "trainer/heartbeat.json"
_CHECKPOINT_COMPLETE = "state.json"
_CHECKPOINT_NAME = re.compile(r"step=(?P<step>\d{8})")
_EVALUATION_NAME = re.compile(r"metrics/evaluations/step=(?P<step>\d{8})(-a(?P<attempt>\d{4}))?\.parquet")
_POLL_S = 0.2


# --- entries ----------------------------------------------------------------------------------------------------------


def record_batch(store: RunStore, attempt: int, step: int, rows: pa.Table) -> None:
    """The batch of a training step, as ReplayBuffer.draw returned it; what the shards hold of it is left out."""
    ours = {"attempt": [attempt] * rows.num_rows, "step": [step] * rows.num_rows, "staleness": staleness(rows, step)}
    columns = [ours[name] if name in ours else rows[name] for name in BATCH.names]
    table = pa.table(columns, names=BATCH.names).cast(BATCH)
    store.put_new(batch_path(attempt, step), parquet_bytes(table))


def staleness(rows: pa.Table, step: int) -> pa.Array:
    """Of each row of a batch, in policy steps. Step t changes the policy of step t - 1: what that one sampled has 0."""
    return pc.subtract(pa.scalar(step - 1, pa.int64()), rows["ages_from"])


def batch_path(attempt: int, step: int) -> str:
    return f"batches/attempt={attempt:08d}/step={step:08d}.parquet"


def record_training_step(store: RunStore, row: dict) -> None:
    """row: TRAINING_STEP columns."""
    path = f"metrics/training/attempt={row['attempt']:08d}/step={row['step']:08d}.parquet"
    store.put_new(path, parquet_bytes(to_table([row], TRAINING_STEP)))


def record_search_round(store: RunStore, row: dict) -> None:
    """row: SEARCH_ROUND columns."""
    path = f"metrics/search/searcher={check_searcher_id(row['searcher'])}/round={row['round']:08d}.parquet"
    store.put_new(path, parquet_bytes(to_table([row], SEARCH_ROUND)))


def record_evaluation(store: RunStore, row: dict) -> None:
    """row: EVALUATION columns. AlreadyExists if that attempt's policy of that step was evaluated before."""
    of_attempt = f"-a{row['attempt']:04d}" if row["attempt"] > 1 else ""
    path = f"metrics/evaluations/step={row['policy_step']:08d}{of_attempt}.parquet"
    store.put_new(path, parquet_bytes(to_table([row], EVALUATION)))


def evaluations(store: RunStore) -> dict[int, str]:
    """By policy step the evaluations that count: their paths, in order."""
    resumes, found = attempts(store), {}
    for path in store.list("metrics/evaluations"):
        if match := _EVALUATION_NAME.fullmatch(path):
            step, attempt = int(match["step"]), int(match["attempt"] or 1)
            if counts(attempt, step, resumes):
                found[step] = path
    return found


def accuracy(store: RunStore, path: str) -> float:
    """path: of an evaluation."""
    return pq.ParquetFile(pa.BufferReader(store.get(path))).read()["accuracy"][0].as_py()


def record_sync(store: RunStore, sync: Any) -> None:
    """sync: a storage.buffer.Sync that took something in; `rounds` of each searcher are in order.

    One row for all of them, or, where a torn shard was moved away, one for each stretch without gaps.
    """
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
    """Numbers in order, cut where one is missing."""
    by_offset = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    return [[number for _, number in stretch] for _, stretch in by_offset]


def effective_syncs(store: RunStore, step: int) -> list[dict]:
    """SYNC rows up to `step` that count, in the order of syncs."""
    resumes = attempts(store)

    def read(path: str) -> list[dict]:
        return pq.read_table(pa.BufferReader(store.get(path))).to_pylist()

    rows = [row for rows in transfer_all(read, store.list("syncs")) for row in rows]
    return [row for row in rows if row["step"] <= step and counts(row["attempt"], row["step"], resumes)]


def counts(attempt: int, step: int, resumes: list[dict]) -> bool:
    """Whether no later attempt resumed from before that step."""
    return all(step <= later["resumed_from"] for later in resumes if later["attempt"] > attempt)


# --- attempts ---------------------------------------------------------------------------------------------------------


def start_attempt(store: RunStore, resumed_from: int, owner: dict, *, previous: int | None = None) -> int:
    """Begin a life of the Trainer at a checkpoint's step (0: from scratch). Returns its number; they count from 1.

    owner: who trains, as this_process tells. previous: the attempt that refuse_live_trainer found to be over; None: the
    latest. AlreadyTraining if another Trainer has begun since. The number fences: a later attempt takes the run over,
    and what an earlier one writes after that does not count.
    """
    attempt = (latest_attempt(store) if previous is None else previous) + 1
    record = {
        "attempt": attempt,
        "resumed_from": resumed_from,
        "owner": owner,
        "created_at": datetime.now(UTC).isoformat(),
    }
    try:
        store.put_new(_attempt_path(attempt), json.dumps(record, indent=2).encode())
    except AlreadyExists:
        raise _already_training(store, json.loads(store.get(_attempt_path(attempt)))) from None
    return attempt


def refuse_live_trainer(store: RunStore, watch_s: float) -> int:
    """The latest attempt's number, 0 if there is none. AlreadyTraining if its Trainer is alive (run_is_alive)."""
    latest = attempts(store)[-1:]
    if run_is_alive(store, watch_s):
        raise _already_training(store, attempts(store)[-1])
    return latest[0]["attempt"] if latest else 0


def _already_training(store: RunStore, record: dict) -> AlreadyTraining:
    owner = record["owner"]
    return AlreadyTraining(
        f"run {store.run} in {store.url} has a live Trainer: attempt {record['attempt']}, host {owner['host']}, pid "
        f"{owner['pid']}. Nothing was written. Follow that one, or stop it and start again: the run resumes."
    )


def check_not_superseded(store: RunStore, attempt: int) -> None:
    """Superseded if a later attempt has begun. Cheap: one look-up, so that a Trainer asks before each write."""
    if store.exists(_attempt_path(attempt + 1)):
        raise Superseded(
            f"attempt {attempt} at run {store.run} writes no more: attempt {latest_attempt(store)} has begun, so "
            "another Trainer has taken over."
        )


def latest_attempt(store: RunStore) -> int:
    """The newest attempt's number; 0 before the first."""
    return max((record["attempt"] for record in attempts(store)), default=0)


def attempts(store: RunStore) -> list[dict]:
    """Every attempt's record (attempt, resumed_from, owner, created_at), oldest first."""
    paths = [path for path in store.list("trainer") if path.startswith("trainer/attempt=")]
    return [json.loads(store.get(path)) for path in paths]


def trainer(store: RunStore) -> tuple[str, int] | None:
    """Host and process of the latest attempt's Trainer; None before the first."""
    latest = attempts(store)[-1:]
    return (latest[0]["owner"]["host"], latest[0]["owner"]["pid"]) if latest else None


def first_attempt_at(store: RunStore) -> datetime:
    """When training began. NotFound before that."""
    return datetime.fromisoformat(json.loads(store.get(_attempt_path(1)))["created_at"])


def _attempt_path(attempt: int) -> str:
    return f"trainer/attempt={attempt:08d}.json"


# --- signs of life ----------------------------------------------------------------------------------------------------


def heartbeat(store: RunStore, beat: dict) -> None:
    """Replace the sign of life. beat: JSON values, different each time."""
    store.put(HEARTBEAT, json.dumps(beat).encode())


def run_is_alive(store: RunStore, watch_s: float) -> bool:
    """Whether a Trainer works on the run.

    A process of this machine does while it is there; of another machine, if its heartbeat changes in `watch_s`.
    Compares no clocks. Takes up to `watch_s`, none where the process is known to be dead.
    """
    records = attempts(store)
    if not records:
        return False
    owner = records[-1]["owner"]
    beats = {_heartbeat_bytes(store)}
    deadline = time.monotonic() + watch_s
    while not _is_gone(owner):
        beats.add(_heartbeat_bytes(store))
        if len(beats) > 2:  # one change may be the last words of a Trainer that lost its flow
            return True
        if time.monotonic() > deadline:
            return owner["host"] == socket.gethostname()  # there, but silent: it starts, or hangs
        time.sleep(_POLL_S)
    return False


def _heartbeat_bytes(store: RunStore) -> bytes | None:
    try:
        return store.get(HEARTBEAT)
    except NotFound:
        return None


def this_process() -> dict:
    """Who writes: enough to tell on the same machine whether it still lives."""
    return {"host": socket.gethostname()} | asdict(Process.current())


def _is_gone(owner: dict) -> bool:
    """Whether the process is surely dead. On another machine that cannot be known."""
    return owner["host"] == socket.gethostname() and Process(owner["pid"], owner["started"]).find() is None


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint_path(step: int) -> str:
    return f"trainer/step={step:08d}"


def save_checkpoint(store: RunStore, step: int, local_folder: str | Path) -> None:
    """Upload a checkpoint's folder; it counts once its state.json, copied last, is there."""
    store.upload_folder(local_folder, checkpoint_path(step), last=_CHECKPOINT_COMPLETE)


def list_checkpoints(store: RunStore) -> list[int]:
    """Steps of the complete checkpoints, in order."""
    return [
        step for step in _checkpoint_steps(store) if store.exists(f"{checkpoint_path(step)}/{_CHECKPOINT_COMPLETE}")
    ]


def delete_checkpoints(store: RunStore, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints, and what is left of incomplete ones before them."""
    kept = list_checkpoints(store)[-keep:]
    for step in _checkpoint_steps(store):
        if kept and step < kept[0]:
            store.delete_folder(checkpoint_path(step), first=_CHECKPOINT_COMPLETE)


def _checkpoint_steps(store: RunStore) -> list[int]:
    names = map(_CHECKPOINT_NAME.fullmatch, store.folders("trainer"))
    return [int(name["step"]) for name in names if name]  # of folders named otherwise nothing is read


def broken_safetensors(store: RunStore, path: str) -> str | None:
    """Why the file cannot be whole, from its header and size alone: a checkpoint is several times the weights."""
    filesystem, base = store.arrow_filesystem()
    with filesystem.open_input_file(f"{base}/{path}") as file:
        size = file.size()
        header_length = int.from_bytes(file.read_at(min(8, size), 0), "little")
        try:
            header = json.loads(file.read_at(min(header_length, size - 8), 8) if size > 8 else b"")
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"its header cannot be read ({error!r})"
        expected = 8 + header_length + max(ends, default=0)
        return None if size == expected else f"it has {size} bytes, its header says {expected}"
