"""Fuzzing of what is read from a store.

Claims
- whatever the bytes, names and JSON values are, only declared errors come of them: StoreError, ValueError
  (pydantic's ValidationError is one)
- nothing hangs: an input takes DEADLINE_S at most, a test LIMIT_S
- at least 5,000 inputs are tried

Inputs are the same in each run. Run: make fuzz
"""

import contextlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from hypothesis import strategies as st

from flows.config import RunConfig, load_run, read_recorded
from storage import (
    attempts,
    checkpoints,
    intake,
    kept_policies,
    ledger,
    policies,
    requests,
    rules,
    shards,
    status,
    upkeep,
)
from storage.buffer import NotEnoughExperience, ReplayBuffer
from storage.mop import SamplingSettings
from storage.new_shards import new_shards
from storage.reward_versions import begin_version
from storage.schema import TRAJECTORY
from storage.shard_files import read_file, read_shards
from storage.shards import WARM_START_PLAN
from storage.store import RunStore, check_run_name
from storage.verify import verify
from tests.faults.fuzzing import DECLARED, JSON, WORDS, fuzzed, no_hang, tried  # noqa: F401, no_hang is a fixture
from tests.faults.memory_store import memory_store
from tests.storage.helpers import OWNER, make_shard

pytestmark = pytest.mark.slow

LIMITS = rules.Limits(vocab_size=100)
DEEP = [b"[" * 100_000, b'{"a":' * 100_000]  # no parser may recurse into these


@pytest.fixture(autouse=True, scope="module")
def no_pause():
    """A store in memory answers the second reading as the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intake, "SECOND_READING_S", 0.0)
        patch.setattr("storage.verify._BETWEEN_WRITES_S", 0.0)
        yield


def record_like(example: dict) -> st.SearchStrategy[bytes]:
    """JSON files that resemble the example: a value another one, a key gone or new, cut short, or any bytes."""
    others = st.dictionaries(st.sampled_from([*example, "other"]), JSON, max_size=3)
    lacking = st.sets(st.sampled_from(sorted(example)), max_size=2)
    changed = st.builds(
        lambda new, gone: json.dumps({k: v for k, v in (example | new).items() if k not in gone}).encode(),
        others,
        lacking,
    )
    cut = st.builds(lambda data, share: data[: int(share * len(data))], changed, st.floats(0, 1))
    other = JSON.map(lambda value: json.dumps(value).encode()) | st.sampled_from(DEEP)
    return changed | cut | other | st.binary(max_size=40)


SHARD = shards.parquet_bytes(make_shard("s0", 0))
_FOOTER = len(SHARD) - int.from_bytes(SHARD[-8:-4], "little") - 8  # where Parquet keeps what every reader parses first


def damaged_shard(seed: int) -> bytes:
    """A Parquet file with bytes changed, gone or added: half of the places in the footer.

    Of a seed: Hypothesis takes longer to draw that many numbers than a reader takes for the file."""
    random, data = Random(seed), bytearray(SHARD)

    def place() -> int:
        return random.randrange(random.choice([0, _FOOTER]), len(SHARD))

    for _ in range(random.randrange(7)):
        data[place()] = random.choice([0, 1, 127, 128, 255, *random.randbytes(5)])
    start, end = sorted((place(), place()))
    kept = random.choice([data, data[:end], data[:start] + data[end:], data + data])
    return random.choice([bytes(kept), random.randbytes(random.randrange(61))])


DAMAGED_SHARDS = st.integers(0, 2**64 - 1).map(damaged_shard)
FLOATS = st.floats(width=32)
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1) | st.none(), max_size=4)
COLUMNS = {
    "reward": FLOATS | st.none(),
    "rewards": st.dictionaries(st.text(max_size=4), FLOATS | st.none(), max_size=2) | st.none(),
    "prompt_tokens": TOKENS | st.none(),
    "response_tokens": TOKENS | st.none(),
    "behavior_logprobs": st.lists(FLOATS | st.none(), max_size=4) | st.none(),
    "reference_logprobs": st.lists(FLOATS | st.none(), max_size=4) | st.none(),
    "policy_step": st.integers(-(2**63), 2**63 - 1) | st.none(),
    "policy_fingerprint": st.text(max_size=6) | st.none(),
    "temperature": FLOATS | st.none(),
    "top_p": FLOATS | st.none(),
    "round": st.integers(-(2**63), 2**63 - 1) | st.none(),
    "searcher": st.text(max_size=6) | st.none(),
    "trajectory_id": st.text(max_size=6) | st.none(),
    "prompt_id": st.text(max_size=6) | st.none(),
    "schema_version": st.integers(-(2**31), 2**31 - 1) | st.none(),
    "finish_reason": st.text(max_size=6) | st.none(),
}
CHANGED_COLUMNS = st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: COLUMNS[name] for name in names})
)
PATHS = WORDS | st.from_regex(
    r"trajectories/(searcher=[a-z0-9./-]{0,8}/round=\d{0,10}|compacted/[a-z0-9-]{0,30})\.parquet"
)


@fuzzed(3500, data=DAMAGED_SHARDS)
def test_a_damaged_shard(data):
    path, store = shards.shard_path("s0", 0), memory_store()
    store.put(path, data)
    with contextlib.suppress(*DECLARED):
        rules.broken(rules.facts_of(read_file(store, path), LIMITS))


@fuzzed(400, data=DAMAGED_SHARDS)
def test_a_damaged_compacted_file(data):
    path, store = shards.block_path("s0", 0), memory_store()
    store.put(path, data)
    with contextlib.suppress(*DECLARED):
        upkeep._written_table(store)
    with contextlib.suppress(*DECLARED):
        read_shards(store, "s0", [0, 31])


BLOCK = pa.concat_tables(make_shard("s0", number) for number in shards.rounds_of(0))


@fuzzed(200, times=JSON.map(json.dumps) | WORDS | st.lists(WORDS, min_size=32, max_size=32).map(json.dumps))
def test_the_times_in_a_compacted_file(times):
    store, metadata = memory_store(), {upkeep._WRITTEN_AT: times.encode("utf-8", "replace")}
    store.put(shards.block_path("s0", 0), shards.parquet_bytes(BLOCK.replace_schema_metadata(metadata)))
    assert upkeep._written_table(store).num_rows == len(shards.rounds_of(0))


@fuzzed(300, columns=CHANGED_COLUMNS)
def test_a_whole_shard_of_odd_values_is_synced_and_drawn_or_refused(columns):
    store = memory_store()
    attempts.start_attempt(store, 0, OWNER)
    rows = make_shard("s0", 0).to_pylist()
    rows[1] |= columns
    store.put(shards.shard_path("s0", 0), shards.parquet_bytes(pa.Table.from_pylist(rows, TRAJECTORY)))
    with contextlib.suppress(*DECLARED, NotEnoughExperience):  # the only shard is refused
        buffer = ReplayBuffer(store, SamplingSettings(prompts_per_batch=1, responses_per_prompt=2, min_size=1), seed=0)
        buffer.sync(1, attempt=1)
        for row in buffer.draw(1).to_pylist():
            assert len(row["response_tokens"]) == len(row["behavior_logprobs"]) == len(row["reference_logprobs"]) > 0
            assert row["draw_probability"] > 0


@fuzzed(300, columns=CHANGED_COLUMNS)
def test_the_facts_of_odd_values(columns):
    rows = make_shard("s0", 0).to_pylist()
    rows[1] |= columns
    with contextlib.suppress(*DECLARED):
        rules.broken(rules.facts_of(pa.Table.from_pylist(rows, TRAJECTORY), LIMITS))


@fuzzed(800, path=PATHS)
def test_a_files_name(path):
    store = memory_store()
    store._files.data[path] = SHARD  # whoever has the bucket can give any name
    shards.files_named([path])
    shards.marked_through([path])
    for read in (new_shards, lambda store, _: shards.committed_files(store)):
        with contextlib.suppress(*DECLARED):
            read(store, {})
    with contextlib.suppress(*DECLARED):
        shards.round_of(path)


@fuzzed(300, name=WORDS)
def test_names_of_runs_searchers_and_folders(name):
    store = memory_store()
    for check in (check_run_name, shards.check_searcher_id, lambda name: RunStore("file:///a", name)):
        with contextlib.suppress(*DECLARED):
            check(name)
    store._files.data |= {f"trainer/{name}/state.json": b"{}", f"policies/{name}/policy.json": b"{}"}
    checkpoints.list_checkpoints(store)
    with contextlib.suppress(*DECLARED):
        kept_policies.prune_policies(store, keep=1)


NAMES = st.lists(
    st.sampled_from(["..", ".", "a", "", "b.json", "\\", "C:", "\x00", "~"]) | WORDS, min_size=1, max_size=6
)


@fuzzed(400, names=NAMES)
def test_a_name_in_the_bucket_stays_in_the_folder_that_it_is_downloaded_to(names):
    store, folder = memory_store(), "policies/step=00000004"
    store._files.data[f"{folder}/{'/'.join(names)}"] = b"text"
    with tempfile.TemporaryDirectory() as outer:
        inner = Path(outer, *"abcdefgh")  # deeper than the names go up
        inner.mkdir(parents=True)
        with contextlib.suppress(*DECLARED):
            store.download_folder(folder, inner)
        written = [path for path in Path(outer).rglob("*") if path.is_file()]
        assert all(path.is_relative_to(inner) for path in written)


POLICY = {"step": 4, "path": "policies/step=00000004", "fingerprint": "f" * 32, "final": False, "attempt": 1,
          "published_at": "2026-01-01T00:00:00+00:00"}  # fmt: skip
BEST = POLICY | {"accuracy": 0.5, "num_problems": 8}
MANIFEST = {"step": 4, "fingerprint": "f" * 32, "attempt": 1, "files": {"config.json": 2}}
CHAIN = {"step": 4, "fingerprint": "f" * 32, "attempt": 1, "files": {"model.safetensors": 2}, "whole": False,
         "digests": {"model.safetensors": "0" * 64},
         "chain": [{"path": "policies/step=00000002", "fingerprint": "e" * 32, "whole": True}]}  # fmt: skip
ATTEMPT = {"attempt": 1, "resumed_from": 0, "owner": asdict(OWNER), "created_at": "2026-01-01T00:00:00+00:00"}
BEAT = {
    "state": "training",
    "step": 3,
    "attempt": 1,
    "owner": asdict(OWNER),
    "at": "2026-01-01T00:00:00+00:00",
    "message": "",
}
REFUSAL = {"shard": shards.shard_path("s0", 0), "reasons": ["reward is finite"], "refused_by": "attempt 1"}
CONFIG = RunConfig(run="run").recorded()


def readers(*functions: Callable) -> Callable:
    def read_all(store) -> None:
        for function in functions:
            with contextlib.suppress(*DECLARED):
                function(store)

    return read_all


def fetched(store: RunStore) -> None:
    with tempfile.TemporaryDirectory() as cache:
        policies.fetch_policy(store, policies.PolicyRef(**POLICY), cache)


RECORDS = {
    "latest": (policies.LATEST, POLICY, readers(policies.latest_policy, intake.limits_of)),
    "best": (kept_policies.BEST, BEST, readers(kept_policies.best_policy)),
    "held": ("policies/held/s0.json", POLICY, readers(kept_policies._evaluated)),
    "pruning": ("policies/pruning.json", {"0": "policies/step=00000004"}, readers(
        lambda store: kept_policies.hold_policy(store, policies.PolicyRef(**POLICY), "s0"))),
    "manifest": (f"{POLICY['path']}/policy.json", MANIFEST, readers(
        policies.published_policies, lambda store: kept_policies.prune_policies(store, 1), fetched)),
    "chain": (f"{POLICY['path']}/policy.json", CHAIN, readers(
        policies.published_policies, lambda store: kept_policies.prune_policies(store, 1), fetched,
        lambda store: policies.is_stored(store, policies.PolicyRef(**POLICY)),
        lambda store: kept_policies.keep_if_best(store, policies.PolicyRef(**POLICY), 0.5, 8))),
    "attempt": ("trainer/attempt=00000001.json", ATTEMPT, readers(
        attempts.list_attempts, attempts.latest_attempt, attempts.newest_attempt, attempts.first_attempt_at,
        lambda store: attempts.is_alive(store, attempts.newest_attempt(store), watch_s=0), ledger.evaluations)),
    "heartbeat": (attempts.HEARTBEAT, BEAT, readers(attempts.read_heartbeat, status.run_status)),
    "run.json": ("run.json", CONFIG, readers(
        load_run, intake.limits_of, lambda store: read_recorded(store.get("run.json")),
        lambda store: store.create_run(CONFIG, read_recorded))),
    "wanted searchers": (requests.SEARCHERS, {"wanted": 2}, readers(lambda store: requests.wanted_searchers(store, 1))),
    "stop": (requests.STOP, {"asked": 1}, readers(requests.take_back_stop)),
    "refusal": (shards.refusal_path("s0", 0), REFUSAL, readers(intake.refusals)),
    "reward version": ("rewards/v2/version.json", {"version": "v2", "reward": "math:sqrt"}, readers(
        lambda store: begin_version(store, "v2", "math:sqrt", source=""))),
    "warm start": (WARM_START_PLAN, {"run": "other"}, readers(
        lambda store: store.read_json(WARM_START_PLAN, list[dict]))),
    "summary": ("summary.json", {"steps": 3, "trajectories": 4}, readers(status.run_status)),
}  # fmt: skip


def read_with(name: str, num_inputs: int, read: Callable) -> None:
    """Reads runs whose record of that name is like the example."""
    path, example, _ = RECORDS[name]

    @fuzzed(num_inputs, data=record_like(example))
    def a_record(data):
        store = memory_store()
        store.put("run.json", json.dumps(CONFIG).encode())
        store.put(path, data)
        read(store)

    a_record()


@pytest.mark.parametrize("name", RECORDS)
def test_a_record(name):
    read_with(name, 200, RECORDS[name][2])


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_verified(name):
    """`tba verify` names what is broken, and goes on or ends with a message."""
    read_with(name, 40, readers(lambda store: verify(store, None)))


def test_enough_was_tried(request):
    """Last in this file; skipped where only some tests were chosen."""
    if sum(item.module.__name__ == __name__ for item in request.session.items) < 2 * len(RECORDS) + 7:
        pytest.skip("only some of the tests run")
    assert tried[__name__] >= 5_000
