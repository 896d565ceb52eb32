"""Claims about storage/verify.py: `tba verify` finds each fault and calls no good run bad.

A good run of two Searchers, a killed Trainer and its successor is made with the storage API; each test spoils one thing
in a copy. Run: pytest tests/storage/test_verify.py

- a good run has no fault, on a folder and on S3; nor has what a killed process leaves, nor a run just created
- each single fault is found and named by kind and file, and nothing else is reported
- a run that goes on meanwhile, its Trainer deleting old policies and checkpoints, has no fault either
- what a resumed Trainer undid counts as not trained; what has expired, or was taken over from another run, is no fault
"""

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from flows.config import RunConfig
from storage import attempts, checkpoints, kept_policies, ledger, policies, shards
from storage.buffer import ReplayBuffer
from storage.errors import NotFound
from storage.mop import SamplingSettings
from storage.schema import to_table
from storage.shards import parquet_bytes, shard_path
from storage.store import RunStore
from storage.verify import verify
from tests.storage.helpers import OWNER, make_search_round, make_shard, make_training_step

SAMPLING = SamplingSettings(prompts_per_batch=2, responses_per_prompt=2, capacity_per_prompt=50, min_size=4)
LATEST, BEST = "policies/latest.json", "policies/best.json"


def fingerprint(folder: Path) -> str:
    weights = load_file(folder / "model.safetensors")
    return hashlib.md5(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()


def publish(store: RunStore, folder: Path, step: int, attempt: int) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 8}))
    save_file({"weight": np.full(4, step + 100 * attempt, np.float32)}, folder / "model.safetensors")
    mark = fingerprint(folder)
    ref = policies.publish_policy(store, folder, policies.policy_ref(step, mark, attempt=attempt))
    assert kept_policies.hold_policy(store, ref, "s0")
    kept_policies.keep_if_best(store, ref, accuracy=0.5 if step % 3 == 0 else 0.25, num_problems=4)
    kept_policies.release_policy(store, "s0")
    kept_policies.prune_policies(store, keep=2)
    return mark


def make_run(store: RunStore, folder: Path) -> None:
    """Attempt 1 trains steps 1 to 4 with a checkpoint at 2; attempt 2 resumes there and trains steps 3 to 5."""
    store.create_run({"run": "run"})
    folder.mkdir()
    rounds = {"s0": 0, "s1": 0}
    for attempt, resumed_from, last in ((1, 0, 4), (2, 2, 5)):
        for _ in train(store, folder, rounds, attempt, resumed_from, last):
            pass


def train(
    store: RunStore, folder: Path, rounds: dict[str, int], attempt: int, resumed_from: int, last: int
) -> Iterator[None]:
    """One attempt, write by write. rounds: the next one of each Searcher. Checkpoints at steps 2, 5, 7, 10, ..."""
    attempts.start_attempt(store, resumed_from, OWNER)
    buffer = ReplayBuffer(store, SAMPLING, seed=0)
    buffer.rebuild(resumed_from)
    mark = publish(store, folder / "policy", resumed_from, attempt)
    for step in range(resumed_from + 1, last + 1):
        for searcher in rounds:
            shard = make_shard(searcher, rounds[searcher], policy_step=step - 1, policy_fingerprint=mark)
            yield shards.commit_shard(store, shard)
            yield ledger.record_search_round(store, make_search_round(searcher, rounds[searcher]))
            rounds[searcher] += 1
        yield buffer.sync(step, attempt)
        yield ledger.record_batch(store, attempt, step, buffer.draw(step))
        yield ledger.record_training_step(store, make_training_step(attempt, step))
        mark = publish(store, folder / "policy", step, attempt)
        if step % 5 in (0, 2):
            checkpoint(store, folder / "checkpoint", step, attempt)
            checkpoints.delete_checkpoints(store, keep=2, attempt=attempt)
        yield


def checkpoint(store: RunStore, folder: Path, step: int, attempt: int) -> None:
    folder.mkdir(exist_ok=True)
    save_file({"policy.weight": np.zeros(4, np.float32)}, folder / "trainer.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": step}))
    checkpoints.save_checkpoint(store, step, folder, attempt)


def test_steps_that_a_later_resume_undid_are_not_missing(good):
    """The checkpoint of step 5 was damaged, so the next attempt resumed from that of step 2."""
    for resumed_from in (5, 2):
        attempts.start_attempt(good, resumed_from, OWNER)
    assert "missing batch" not in {fault.kind for fault in verify(good, None).faults}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_run(RunStore((folder / "store").as_uri(), "run"), folder / "work")
    return folder / "store"


@pytest.fixture
def good(made, tmp_path) -> RunStore:
    """A copy of the good run, to spoil."""
    shutil.copytree(made, tmp_path / "copy")
    return RunStore((tmp_path / "copy").as_uri(), "run")


def faults(store: RunStore) -> list[tuple[str, str]]:
    return [(fault.kind, fault.path) for fault in verify(store, fingerprint).faults]


def test_a_good_run_has_no_fault(good):
    report = verify(good, fingerprint)
    assert report.faults == []
    # 7 steps were trained, 2 of them undone; every step had a shard of 4 from both Searchers
    assert (report.num_shards, report.num_trajectories, report.num_steps) == (14, 56, 5)
    assert report.num_policies == 9  # of steps 0 to 4, and of 2 to 5
    kept = [path.split("/")[1] for path in good.list("policies") if path.endswith(".safetensors")]
    assert kept == ["step=00000003-a0002", "step=00000004-a0002", "step=00000005-a0002"]  # the best one, the newest two


class LiveStore(RunStore):
    """A run that goes on by a few writes at every read."""

    def __init__(self, url: str, writes: Iterator[None], writes_a_read: int) -> None:
        super().__init__(url, "run")
        self._writes, self._num = writes, writes_a_read

    def _go_on(self) -> None:
        if threading.current_thread() is threading.main_thread():  # writing takes the threads that read in parallel
            for _ in range(self._num):
                next(self._writes)

    def list(self, *arguments, **named) -> list[str]:
        self._go_on()
        return super().list(*arguments, **named)

    def get(self, path: str) -> bytes:
        self._go_on()
        return super().get(path)


@pytest.mark.parametrize("writes_a_read", [1, 10])  # a step has 8
def test_a_run_that_goes_on_has_no_fault(good, tmp_path, writes_a_read):
    (tmp_path / "work").mkdir()
    writes = train(good, tmp_path / "work", {"s0": 7, "s1": 7}, attempt=3, resumed_from=5, last=10**6)
    live = LiveStore(good.url, writes, writes_a_read)
    report = verify(live, fingerprint)
    assert report.faults == []
    assert report.num_steps < len(good.list("batches")) - 2, "it did go on"


@pytest.mark.s3
def test_a_good_run_on_s3_has_no_fault(s3_store, tmp_path):
    make_run(s3_store, tmp_path / "work")
    assert faults(s3_store) == []
    s3_store.put(f"{policies.latest_policy(s3_store).path}/model.safetensors", b"half")
    s3_store.put("trainer/step=00000005-a0002/trainer.safetensors", b"half")
    assert [kind for kind, _ in faults(s3_store)] == ["damaged policy", "damaged checkpoint"]


def test_a_run_just_created_has_no_fault_and_one_that_is_not_there_is_an_error(local_store):
    with pytest.raises(NotFound):
        verify(local_store, fingerprint)
    local_store.create_run({"run": "run"})
    assert faults(local_store) == []


def test_what_killed_processes_leave_is_no_fault(good):
    good.put("policies/step=00000006-a0002/model.safetensors", b"half a policy")
    good.put("trainer/step=00000006-a0002/trainer.safetensors", b"half a checkpoint")
    shards.quarantine_shard(good, make_shard("s0", 7, reward=float("nan")), ["reward is finite"])
    shards.commit_shard(good, make_shard("s1", 7, policy_step=5, policy_fingerprint=newest_fingerprint(good)))
    good.delete("metrics/search/searcher=s0/round=00000006.parquet")  # killed between shard and ledger
    assert faults(good) == []


def test_what_expired_is_not_missed_but_what_follows_it_is(good):
    good.put("expired/searcher=s0/through=00000002.json", b"{}")
    good.delete(S0[0])
    good.delete(S0[2])
    assert faults(good) == []
    good.delete(S0[3])
    assert ("missing round", S0[3]) in faults(good)


def test_what_another_runs_policies_sampled_is_no_fault_where_the_run_says_so(good):
    path = shards.commit_shard(good, make_shard("warm0", 0, policy_fingerprint="e" * 32))
    assert faults(good) == [("unpublished policy", path)]
    good.put("warm_start/plan.json", b'[{"url": "file:///other/run"}]')
    assert faults(good) == []


def test_a_run_whose_warm_start_goes_on_has_no_policy_yet(local_store):
    local_store.create_run(RunConfig(run="run").recorded())
    local_store.put("warm_start/plan.json", b'[{"url": "file:///other/run"}]')
    shards.commit_shard(local_store, make_shard("warm0", 0, policy_fingerprint="e" * 32))
    assert faults(local_store) == []


def newest_fingerprint(store: RunStore) -> str:
    return policies.latest_policy(store).fingerprint


def rewrite(store: RunStore, path: str, change: Callable[[list[dict]], object]) -> None:
    """Replace a shard or ledger entry by one with `change` applied to its rows."""
    table = pq.ParquetFile(store.local_path(path)).read()
    rows = table.to_pylist(maps_as_pydicts="strict")
    change(rows)
    store.put(path, parquet_bytes(to_table(rows, table.schema)))


def edit_json(store: RunStore, file: str, /, **values) -> None:
    store.put(file, json.dumps(json.loads(store.get(file)) | values).encode())


def flip_a_weight(store: RunStore, path: str) -> None:
    data = bytearray(store.get(path))
    data[-1] ^= 1
    store.put(path, bytes(data))


S0 = [shard_path("s0", number) for number in range(8)]
NEWEST = "policies/step=00000005-a0002"
KEPT = "policies/step=00000003-a0002"
PRUNED = "policies/step=00000001"
BATCH = "batches/attempt=00000002/step=00000005.parquet"
SYNC = "syncs/attempt=00000002/sync=00000005.parquet"
CHECKPOINT = "trainer/step=00000005-a0002"
RECORDS = ["run.json", "data.json", "warm_start/plan.json", "policies/pruning.json", "policies/held/s7.json"]
STRAY = [
    "trajectories/.DS_Store",
    "trajectories/searcher=Foo/round=00000000.parquet",
    "trajectories/searcher=s0/round=00000003.parquet.bad",
    "expired/searcher=s0/notes.txt",
    "policies/.DS_Store",
    "trainer/step=00000005-a0002.bak/state.json",
]

# S0[4] is a shard that nothing was trained on, S0[6] one of BATCH's.

FAULTS: dict[str, tuple[Callable[[RunStore], object], list[tuple[str, str]]]] = {
    "truncated shard": (lambda s: s.put(S0[4], s.get(S0[4])[:-100]), [("torn shard", S0[4])]),
    "emptied shard": (lambda s: s.put(S0[4], b""), [("torn shard", S0[4])]),
    "flipped bytes in a shard": (
        lambda s: s.put(S0[4], s.get(S0[4])[:200] + bytes(40) + s.get(S0[4])[240:]),
        [("torn shard", S0[4])],
    ),
    "missing round": (
        lambda s: s.delete(S0[4]),
        [("missing round", S0[4]), ("sync without shards", "syncs/attempt=00000002/sync=00000003.parquet")],
    ),
    "missing last round": (
        lambda s: s.delete(S0[6]),
        [("unknown trajectory", BATCH), ("sync without shards", SYNC)],
    ),
    "shard copied to the next round": (
        lambda s: s.put(S0[7], s.get(S0[6])),
        [("misplaced shard", S0[7]), ("duplicate trajectory", "trajectories")],
    ),
    "shard copied to another Searcher": (
        lambda s: s.put(shard_path("s2", 0), s.get(S0[0])),
        [("misplaced shard", shard_path("s2", 0)), ("duplicate trajectory", "trajectories")],
    ),
    "reward is NaN": (
        lambda s: rewrite(s, S0[3], lambda rows: rows[1].update(reward=float("nan"))),
        [("invalid shard", S0[3])],
    ),
    "token outside the vocabulary": (
        lambda s: rewrite(s, S0[3], lambda rows: rows[0].update(response_tokens=[4, 8])),
        [("invalid shard", S0[3])],
    ),
    "stray file": (
        lambda s: s.put("trajectories/searcher=s0/notes.txt", b"?"),
        [("stray file", "trajectories/searcher=s0/notes.txt")],
    ),
    "stray files of all kinds": (
        lambda s: [s.put(path, b"?") for path in STRAY],
        [("stray file", path) for path in STRAY if path.startswith("trajectories")],
    ),
    "policy nobody published": (
        lambda s: rewrite(s, S0[3], lambda rows: [row.update(policy_fingerprint="e" * 32) for row in rows]),
        [("unpublished policy", S0[3])],
    ),
    "ledger row of an unknown id": (
        lambda s: rewrite(s, BATCH, lambda rows: rows[0].update(trajectory_id="s9-00000000-00000")),
        [("unknown trajectory", BATCH)],
    ),
    "lost batch": (lambda s: s.delete(BATCH), [("missing batch", "batches")]),
    "lost batch in the middle": (
        lambda s: s.delete("batches/attempt=00000002/step=00000004.parquet"),
        [("missing batch", "batches"), ("missing batch", "batches")],
    ),
    "torn ledger entry": (
        lambda s: s.put("metrics/training/attempt=00000002/step=00000004.parquet", b"PAR1"),
        [("torn ledger entry", "metrics/training/attempt=00000002/step=00000004.parquet")],
    ),
    "lost sync": (
        lambda s: s.delete("syncs/attempt=00000002/sync=00000004.parquet"),
        [("sync out of order", SYNC)] * 2,
    ),
    "edited weights": (lambda s: flip_a_weight(s, f"{NEWEST}/model.safetensors"), [("changed weights", NEWEST)]),
    "truncated weights": (
        lambda s: s.put(f"{NEWEST}/model.safetensors", b"ha"),
        [("damaged policy", NEWEST)],
    ),
    "weights of the right size that do not load": (
        lambda s: s.put(f"{NEWEST}/model.safetensors", bytes(len(s.get(f"{NEWEST}/model.safetensors")))),
        [("damaged policy", NEWEST)],
    ),
    "policy without its configuration": (
        lambda s: s.delete(f"{NEWEST}/config.json"),
        [("damaged policy", NEWEST)],
    ),
    "fingerprint of a pruned policy edited": (
        lambda s: edit_json(s, f"{PRUNED}/policy.json", fingerprint="e" * 32),
        [("unpublished policy", S0[1])],
    ),
    "pointer to nothing": (
        lambda s: edit_json(s, LATEST, path="policies/step=00000009"),
        [("broken pointer", LATEST)],
    ),
    "pointer to a pruned policy": (lambda s: edit_json(s, LATEST, path=PRUNED), [("broken pointer", LATEST)]),
    "pointer of another fingerprint": (
        lambda s: edit_json(s, LATEST, fingerprint="e" * 32),
        [("broken pointer", LATEST)],
    ),
    "best policy pruned": (lambda s: edit_json(s, BEST, path=PRUNED), [("broken pointer", BEST)]),
    "best policy deleted": (
        lambda s: s.delete_folder(KEPT, first="policy.json"),
        [("broken pointer", BEST), ("unpublished policy", shard_path("s0", 5))],
    ),
    "best policy without its weights": (
        lambda s: s.delete(f"{KEPT}/model.safetensors"),
        [("damaged policy", KEPT)],
    ),
    "best policy without an accuracy": (
        lambda s: s.put(BEST, s.get(LATEST)),
        [("broken pointer", BEST)],
    ),
    "pointer that is no JSON": (lambda s: s.put(LATEST, b"{"), [("broken pointer", LATEST)]),
    "pointer without a path": (lambda s: s.put(LATEST, b"{}"), [("broken pointer", LATEST)]),
    "torn manifest": (
        lambda s: s.put(f"{NEWEST}/policy.json", b'{"step": 5'),
        [("torn record", f"{NEWEST}/policy.json")],
    ),
    "torn attempts": (
        lambda s: [s.put(f"trainer/attempt=0000000{number}.json", text) for number, text in ((1, b"{}"), (2, b"[]"))],
        [("torn record", f"trainer/attempt=0000000{number}.json") for number in (1, 2)],
    ),
    "records of a start, a Searcher and pruning": (
        lambda s: [s.put(path, b"{") for path in RECORDS],
        [("torn record", path) for path in RECORDS],
    ),
    "lost pointer": (lambda s: s.delete(LATEST), [("broken pointer", LATEST)]),
    "truncated checkpoint": (
        lambda s: s.put(f"{CHECKPOINT}/trainer.safetensors", s.get(f"{CHECKPOINT}/trainer.safetensors")[:-1]),
        [("damaged checkpoint", f"{CHECKPOINT}/trainer.safetensors")],
    ),
    "checkpoint of another step": (
        lambda s: edit_json(s, f"{CHECKPOINT}/state.json", step=4),
        [("damaged checkpoint", CHECKPOINT)],
    ),
    "checkpoint without weights": (
        lambda s: s.delete(f"{CHECKPOINT}/trainer.safetensors"),
        [("damaged checkpoint", CHECKPOINT)],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(good, name):
    spoil, expected = FAULTS[name]
    spoil(good)
    assert faults(good) == expected
