"""Claims about storage/ledger.py. Run: pytest tests/storage/test_ledger.py

- each entry is stored once, under its name, with exactly its schema's columns; wrong columns are refused by name
- a batch's staleness is in policy steps at the moment of training: 0 is on-policy
- attempts count up, and two Trainers that begin at once do not get one number
- an entry counts if no later attempt resumed from before its step
- a superseded Trainer is told before it writes
- a run is alive if its heartbeat goes on changing, or its process is on this machine; a dead one is not waited for
- a checkpoint counts once complete; old ones and half ones are deleted, the newest are kept
"""

import json
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from storage import attempts, checkpoints, ledger
from storage.errors import AlreadyExists, AlreadyTraining, DamagedRecord, NotFound, StoreError, Superseded
from storage.process_identity import Identity
from storage.schema import BATCH, EVALUATION, SEARCH_ROUND, SYNC, TRAINING_STEP, to_table
from tests.storage.helpers import NOON, OWNER, Sync, make_batch, make_search_round, make_training_step, start_python


def is_alive(store, watch_s: float) -> bool:
    return attempts.is_alive(store, attempts.newest_attempt(store), watch_s)


def read(store, path: str) -> pa.Table:
    return pq.read_table(pa.BufferReader(store.get(path)))


# --- entries


def test_a_batch_is_stored_without_tokens_and_with_its_staleness(store):
    ledger.record_batch(store, attempt=2, step=12, rows=make_batch(policy_steps=[11, 9]))
    table = read(store, "batches/attempt=00000002/step=00000012.parquet")
    assert table.schema.equals(BATCH)
    # step 12 trains the weights of policy step 11: those sampled the first row, and the second is two steps older
    assert table["staleness"].to_pylist() == [0, 2]
    assert table["attempt"].to_pylist() == [2, 2] and table["step"].to_pylist() == [12, 12]
    assert table["trajectory_id"].to_pylist() == ["s0-00000000-00000", "s0-00000000-00001"]
    with pytest.raises(AlreadyExists):
        ledger.record_batch(store, attempt=2, step=12, rows=make_batch(policy_steps=[11, 9]))


@pytest.mark.parametrize(
    ("record", "row", "path", "schema"),
    [
        (
            ledger.record_training_step,
            make_training_step(attempt=1, step=7),
            "metrics/training/attempt=00000001/step=00000007.parquet",
            TRAINING_STEP,
        ),
        (
            ledger.record_search_round,
            make_search_round("s0", 42),
            "metrics/search/searcher=s0/round=00000042.parquet",
            SEARCH_ROUND,
        ),
        (
            ledger.record_evaluation,
            {
                "attempt": 2,
                "policy_step": 40,
                "split": "heldout",
                "num_problems": 256,
                "accuracy": 0.5,
                "mean_response_tokens": 3.0,
                "seconds": 2.0,
                "created_at": NOON,
            },
            "metrics/evaluations/step=00000040-a0002.parquet",
            EVALUATION,
        ),
    ],
)
def test_an_entry_is_stored_once_with_its_columns(local_store, record, row, path, schema):
    record(local_store, row)
    table = read(local_store, path)
    assert table.schema.equals(schema) and table.to_pylist() == [row]
    with pytest.raises(AlreadyExists):
        record(local_store, row)


def test_wrong_columns_are_refused_by_name():
    row = make_search_round("s0", 0)
    del row["reward_mean"]
    with pytest.raises(ValueError, match=r"row 1 .*missing \['reward_mean'\], unknown \['reward_men'\]"):
        to_table([make_search_round("s0", 0), row | {"reward_men": 1.0}], SEARCH_ROUND)
    assert to_table([], SEARCH_ROUND).schema.equals(SEARCH_ROUND)


def test_evaluations_of_policies_that_a_resumed_trainer_undid_do_not_count(store):
    assert ledger.evaluations(store) == {}
    for attempt, resumed_from in ((1, 0), (2, 25)):
        attempts.start_attempt(store, resumed_from, OWNER)
        for step in ((20, 40), (40,))[attempt - 1]:
            row = {"attempt": attempt, "policy_step": step, "split": "heldout", "num_problems": 1}
            row |= {"accuracy": step / 100 + attempt, "mean_response_tokens": 1.0, "seconds": 2.0, "created_at": NOON}
            ledger.record_evaluation(store, row)
    store.put("metrics/evaluations/notes.txt", b"nothing reads this")
    found = ledger.evaluations(store)
    assert {step: ledger.accuracy(store, path, step) for step, path in found.items()} == {20: 1.2, 40: 2.4}


def test_an_evaluation_of_another_policy_is_a_damaged_record(store):
    row = {"attempt": 1, "policy_step": 20, "split": "heldout", "num_problems": 1, "accuracy": 0.5}
    ledger.record_evaluation(store, row | {"mean_response_tokens": 1.0, "seconds": 2.0, "created_at": NOON})
    store.put("metrics/evaluations/step=00000012.parquet", store.get("metrics/evaluations/step=00000020.parquet"))
    with pytest.raises(DamagedRecord, match=r"step=00000012\.parquet \(run .*has no row of policy step 12"):
        ledger.accuracy(store, "metrics/evaluations/step=00000012.parquet", 12)


def test_syncs_come_in_order_though_one_was_compacted_later(store, monkeypatch):
    attempts.start_attempt(store, 0, OWNER)
    for number in range(1, 5):
        ledger.record_sync(store, Sync(number, number, 1, {"s0": [number]}))
    parts = ledger.counting_parts(store, "syncs")
    monkeypatch.setattr(ledger, "counting_parts", lambda *_: [*parts[1:], parts[0]])
    assert [row["sync"] for row in ledger.effective_syncs(store, 9)] == [1, 2, 3, 4]


# --- attempts and what counts


def test_attempts_count_up_and_remember_when_the_first_began(store):
    with pytest.raises(NotFound):
        attempts.first_attempt_at(store)
    assert attempts.latest_attempt(store) == 0
    before = datetime.now(UTC)
    assert [attempts.start_attempt(store, step, OWNER) for step in (0, 20)] == [1, 2]
    assert attempts.latest_attempt(store) == 2
    assert before <= attempts.first_attempt_at(store) <= datetime.now(UTC)
    assert [(record.attempt, record.resumed_from) for record in attempts.list_attempts(store)] == [
        (1, 0),
        (2, 20),
    ]


def test_two_trainers_that_begin_at_once_do_not_get_one_number(store):
    looked = [attempts.refuse_live_trainer(store, watch_s=0) for _ in range(2)]  # both, before either wrote
    assert attempts.start_attempt(store, 0, OWNER, previous=looked[0]) == 1
    with pytest.raises(AlreadyTraining, match=r"live Trainer: attempt 1, host elsewhere, pid 1"):
        attempts.start_attempt(store, 0, OWNER, previous=looked[1])
    assert attempts.latest_attempt(store) == 1


def test_a_superseded_trainer_is_told(store):
    first = attempts.start_attempt(store, 0, OWNER)
    attempts.check_not_superseded(store, first)
    second = attempts.start_attempt(store, 0, OWNER)
    with pytest.raises(Superseded, match=r"attempt 1 .* attempt 2 has begun"):
        attempts.check_not_superseded(store, first)
    attempts.check_not_superseded(store, second)


def test_an_entry_counts_if_no_later_attempt_resumed_from_before_its_step(store):
    # attempt 1: steps 1 to 30. Attempt 2 resumed from 20, went to 50. Attempt 3 resumed from 40.
    for resumed_from in (0, 20, 40):
        attempts.start_attempt(store, resumed_from, OWNER)
    syncs = [
        Sync(1, 0, 1, {"s0": [0, 1, 2]}),
        Sync(2, 20, 1, {"s0": [3]}),
        Sync(3, 22, 1, {"s0": [4], "s1": [0]}),  # undone by attempt 2
        Sync(3, 21, 2, {"s0": [4, 5], "s1": [0]}),  # which took in more
        Sync(4, 41, 2, {"s1": [1]}),  # undone by attempt 3
        Sync(4, 42, 3, {"s1": [1, 2]}),
    ]
    for sync in syncs:
        ledger.record_sync(store, sync)

    def taken_in(step: int) -> list[tuple]:
        names = ("sync", "searcher", "first_round", "last_round")
        return [tuple(row[name] for name in names) for row in ledger.effective_syncs(store, step)]

    first = [(1, "s0", 0, 2), (2, "s0", 3, 3)]
    second = [(3, "s0", 4, 5), (3, "s1", 0, 0)]
    assert taken_in(1000) == [*first, *second, (4, "s1", 1, 2)]
    assert taken_in(40) == first + second
    assert taken_in(19) == first[:1]
    assert read(store, "syncs/attempt=00000001/sync=00000003.parquet").schema.equals(SYNC)


# --- signs of life


def test_a_run_that_never_trained_is_not_alive(local_store):
    assert not is_alive(local_store, watch_s=60)


def test_a_trainer_whose_process_is_dead_is_not_waited_for(local_store):
    process = start_python("pass")
    process.wait()
    attempts.start_attempt(local_store, 0, replace(Identity.current(), pid=process.pid, started=0.0))
    attempts.write_heartbeat(local_store, {"step": 1})
    began = time.monotonic()
    assert not is_alive(local_store, watch_s=60)
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_a_trainer_of_another_machine_is_alive_if_its_heartbeat_goes_on_changing(local_store):
    attempts.start_attempt(local_store, 0, OWNER)
    attempts.write_heartbeat(local_store, {"step": 1})
    assert not is_alive(local_store, watch_s=0.5)
    once = threading.Timer(0.3, attempts.write_heartbeat, (local_store, {"step": 2}))
    once.start()
    assert not is_alive(local_store, watch_s=1.5), "one beat may be the last"
    beats = [threading.Timer(0.3 * n, attempts.write_heartbeat, (local_store, {"step": 2 + n})) for n in (1, 2, 3)]
    for beat in beats:
        beat.start()
    assert is_alive(local_store, watch_s=30)
    for beat in beats:
        beat.join()


def test_a_trainer_of_this_machine_is_alive_while_its_process_is_there(local_store):
    process = start_python(
        "import json; from dataclasses import asdict; from storage.process_identity import Identity; "
        "print(json.dumps(asdict(Identity.current())), flush=True); input()"
    )
    attempts.start_attempt(local_store, 0, Identity(**json.loads(process.stdout.readline())))
    assert is_alive(local_store, watch_s=0.5), "it has not spoken yet"
    end = threading.Timer(0.5, process.communicate, ("\n",))
    end.start()
    assert not is_alive(local_store, watch_s=60), "it ended while it was watched"
    end.join()


def test_setting_the_clock_makes_no_trainer_another(local_store, monkeypatch):
    attempts.start_attempt(local_store, 0, Identity.current())
    booted = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: booted + 3600)  # as /proc/stat has it from then on
    assert is_alive(local_store, watch_s=0.5)


def test_another_process_under_the_pid_is_not_the_trainer(local_store):
    attempts.start_attempt(local_store, 0, replace(Identity.current(), started=0.0))
    assert not is_alive(local_store, watch_s=60)


# --- checkpoints


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(step) -> the local folder of one."""

    def checkpoint(step: int) -> Path:
        (tmp_path / "checkpoint").mkdir(exist_ok=True)
        save_file({"weight": np.zeros(4, np.float32)}, tmp_path / "checkpoint/trainer.safetensors")
        (tmp_path / "checkpoint/state.json").write_text(json.dumps({"step": step}))
        return tmp_path / "checkpoint"

    return checkpoint


def test_a_checkpoint_counts_once_complete(store, checkpoint, monkeypatch):
    assert checkpoints.list_checkpoints(store) == []
    store.put("trainer/step=00000020/trainer.safetensors", b"half")  # its Trainer was killed
    assert checkpoints.list_checkpoints(store) == []
    put_file = store._files.put_file

    def dies_at_the_weights(path, local):
        if path.endswith(".safetensors"):
            raise OSError("the network went away")
        put_file(path, local)

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="network went away"):
        patch.setattr(store._files, "put_file", dies_at_the_weights)
        checkpoints.save_checkpoint(store, 20, checkpoint(20), 1)
    assert checkpoints.list_checkpoints(store) == []
    checkpoints.save_checkpoint(store, 20, checkpoint(20), 1)
    (found,) = checkpoints.list_checkpoints(store)
    assert (found.step, found.attempt, found.path) == (20, 1, checkpoints.checkpoint_path(20, 1))
    assert checkpoints.checkpoint_faults(store, found) == []


def test_the_newest_checkpoints_are_kept(store, checkpoint):
    attempts.start_attempt(store, 0, OWNER)
    checkpoints.delete_checkpoints(store, keep=2, attempt=1)  # none yet
    for step in (20, 40, 60):
        checkpoints.save_checkpoint(store, step, checkpoint(step), 1)
    store.put("trainer/step=00000030-a0001/trainer.safetensors", b"half")
    store.put("trainer/step=00000080-a0001/trainer.safetensors", b"on its way")
    checkpoints.delete_checkpoints(store, keep=2, attempt=1)
    assert [found.step for found in checkpoints.list_checkpoints(store)] == [40, 60]
    assert store.folders("trainer") == ["step=00000040-a0001", "step=00000060-a0001", "step=00000080-a0001"]
    assert attempts.latest_attempt(store) == 1
