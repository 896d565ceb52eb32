"""What the Trainer refuses to take in (storage/intake.py), and who sees it.

Claims
- a shard that is torn, of other columns, of a newer version, of another place, or with a bad row is refused as a whole,
  with its reasons; the others of the sync, and later rounds, are taken in
- a shard of an older version is read, with the values that its columns had before they came
- a refused round is recorded before anything can be drawn; a rebuilt buffer is the same and refuses nothing else
- a shard that was damaged after it was taken in does not keep a run from resuming
- an answer that was cut, or that a second reading does not repeat, refuses nothing
- a superseded Trainer refuses nothing, nor does one without memory to read a shard
- SQL, exports, new rounds, compaction, rescoring and reports leave out the refused; verify and the summary name them
- before the Trainer has met it, a torn shard does not break a query
- what no sync met is checked at the run's end

Run: pytest tests/storage/test_intake.py
"""

import json
import math
import re

import duckdb
import pyarrow as pa
import pytest

from storage import attempts, intake, ledger, queries, report_tables, shards, upkeep
from storage.errors import StoreUnreachable, Superseded
from storage.export import export
from storage.new_shards import new_shards
from storage.rules import Limits
from storage.schema import SCHEMA_VERSION, TRAJECTORY, to_table
from storage.shard_files import read_file, read_shards
from storage.shards import commit_shard, parquet_bytes, refusal_path, shard_path
from storage.store import RunStore
from storage.verify import verify
from tests.storage.buffer_runs import commit, distinct, new_buffer, new_store
from tests.storage.helpers import OWNER, make_shard, make_training_step


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(intake, "SECOND_READING_S", 0.0)


@pytest.fixture
def store(tmp_path) -> RunStore:
    return new_store(tmp_path / "store")


def spoiled(**columns) -> bytes:
    """Round 1 of s0, but for these values in its second row."""
    rows = make_shard("s0", 1).to_pylist(maps_as_pydicts="strict")
    rows[1] |= columns
    return parquet_bytes(to_table(rows, TRAJECTORY))


def newer() -> bytes:
    table = make_shard("s0", 1, schema_version=SCHEMA_VERSION + 1)
    return parquet_bytes(table.append_column("emotion", [["calm"] * 4]))


def not_text() -> bytes:
    table = make_shard("s0", 1)
    place = TRAJECTORY.get_field_index("prompt")
    bad = pa.StringArray.from_buffers(4, pa.array(range(5), pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe\xff\xfe"))
    return parquet_bytes(table.set_column(place, TRAJECTORY.field(place), bad))


WHOLE = parquet_bytes(make_shard("s0", 1))
BAD = {
    "empty": (b"", "not a whole Parquet file"),
    "cut": (WHOLE[:-100], "not a whole Parquet file"),
    "damaged inside": (WHOLE[:300] + bytes(200) + WHOLE[500:], "not a whole Parquet file"),
    "no Parquet": (b"<html>503</html>" * 10, "not a whole Parquet file"),
    "text that is none": (not_text(), "UTF8"),
    "foreign columns": (parquet_bytes(pa.table({"a": [1]})), "other columns"),
    "foreign type": (
        parquet_bytes(make_shard("s0", 1).set_column(8, "reward", [["a"] * 4])),
        "no reward: float; reward: string in excess",
    ),
    "a column twice": (
        parquet_bytes(make_shard("s0", 1).append_column("reward", [[0.0] * 4])),
        "reward: double in excess",
    ),
    "newer version": (
        newer(),
        f"schema version {SCHEMA_VERSION + 1}, .*reads versions up to {SCHEMA_VERSION}: upgrade tba",
    ),
    "no rows": (parquet_bytes(TRAJECTORY.empty_table()), "holds no trajectories"),
    "of another round": (parquet_bytes(make_shard("s0", 7)), r"its rows name \(searcher, round\) \[\('s0', 7\)\]"),
    "of another searcher": (parquet_bytes(make_shard("s1", 1)), r"its rows name \(searcher, round\) \[\('s1', 1\)\]"),
    "a NaN reward": (spoiled(reward=math.nan), "reward is finite: broken by 1 of 4"),
    "lists of other lengths": (
        spoiled(behavior_logprobs=[-0.5]),
        "behavior_logprobs has one value for each response token: broken by 1",
    ),
    "policy_step -5": (spoiled(policy_step=-5), "policy_step is a step of the run: .*'-5'"),
    "policy_step 2^62": (spoiled(policy_step=2**62), "policy_step is a step of the run: .*'4611686018427387904'"),
    "NaN temperature": (spoiled(temperature=math.nan), "temperature is finite and > 0: .*'nan'"),
    "empty fingerprint": (spoiled(policy_fingerprint=""), "policy_fingerprint is not empty"),
    "null list": (spoiled(response_tokens=None), "no column is null"),
}


def test_a_trainer_that_was_superseded_while_it_read_refuses_nothing(store, monkeypatch):
    store.put(shard_path("s0", 0), b"")
    check = intake.check

    def frozen(*given):
        reasons = check(*given)
        attempts.start_attempt(store, 0, OWNER, previous=1)
        monkeypatch.setattr(intake, "check", check)
        return reasons

    monkeypatch.setattr(intake, "check", frozen)
    with pytest.raises(Superseded):
        new_buffer(store).sync(1, attempt=1)
    assert store.list("quarantine") == []


def the_only_refusal(store: RunStore) -> intake.Refusal:
    (refusal,) = intake.refusals(store)
    return refusal


@pytest.mark.parametrize("name", BAD)
def test_a_bad_shard_is_refused_and_the_run_goes_on(store, tmp_path, caplog, name):
    data, reason = BAD[name]
    buffer = new_buffer(store, prompts_per_batch=2, responses_per_prompt=2)
    for number in (0, 2):
        commit_shard(store, make_shard("s0", number))
    commit_shard(store, make_shard("s1", 0))
    store.put(shard_path("s0", 1), data)
    assert buffer.sync(1, attempt=1).rounds == {"s0": [0, 2], "s1": [0]}
    refusal = the_only_refusal(store)
    assert (refusal.searcher, refusal.round) == ("s0", 1) and refusal.shard in caplog.text
    assert any(re.search(reason, of) for of in refusal.reasons), refusal.reasons
    assert store.get(shard_path("s0", 1)) == data, "the shard stays as it is"
    commit_shard(store, make_shard("s0", 3))
    assert buffer.sync(2, attempt=1).rounds == {"s0": [3]}
    assert all(math.isfinite(reward) for reward in buffer.draw(2)["reward"].to_pylist())
    everyone_leaves_it_out(store, tmp_path)


def everyone_leaves_it_out(store: RunStore, tmp_path) -> None:
    ids = {
        f"{name}-{number:08d}-{row:05d}"
        for name, number in (("s0", 0), ("s0", 2), ("s0", 3), ("s1", 0))
        for row in range(4)
    }
    counted = "SELECT trajectory_id FROM trajectories"
    assert set(queries.query(store, counted).column(0).to_pylist()) == ids
    assert report_tables.report_tables(store)["totals"]["num_trajectories"].to_pylist() == [16]
    assert new_shards(store, {}) == {"s0": [0, 2, 3], "s1": [0]}
    export(store, tmp_path / "run.duckdb")
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as reader:
        assert {name for (name,) in reader.execute(counted).fetchall()} == ids
    store.put("run.json", b"{}")
    named = {"refused shard", "unpublished policy", "broken pointer"}  # nobody published anything
    assert [fault.path for fault in verify(store, lambda _: "").faults if fault.kind == "refused shard"] == [
        shard_path("s0", 1)
    ]
    assert {fault.kind for fault in verify(store, lambda _: "").faults} <= named


def test_limits_of_the_run_are_kept(store):
    """Token ids inside the vocabulary, policies that the run can have."""
    buffer = new_buffer(store)
    buffer._limits = Limits(vocab_size=8, last_step=5)
    commit_shard(store, make_shard("s0", 0))
    commit_shard(store, make_shard("s0", 1, policy_step=6))
    commit_shard(store, make_shard("s0", 2, response_tokens=[8, 2]))
    assert buffer.sync(1, attempt=1).rounds == {"s0": [0]}
    assert [refusal.round for refusal in intake.refusals(store)] == [1, 2]


def test_limits_are_read_from_the_run(store):
    assert intake.limits_of(store) == Limits()
    store.put("run.json", b'{"train": {"steps": 40}}')
    store.put("policies/latest.json", b'{"path": "policies/step=00000000"}')
    store.put("policies/step=00000000/config.json", b'{"vocab_size": 8}')
    assert intake.limits_of(store) == Limits(vocab_size=8, last_step=40)
    store.put("policies/step=00000000/config.json", b'{"text_config": {"vocab_size": 9}}')
    assert intake.limits_of(store).vocab_size == 9
    store.put("policies/latest.json", b"")
    assert intake.limits_of(store) == Limits(last_step=40)


def test_a_shard_of_version_1_is_read_with_an_empty_system_prompt(store, tmp_path):
    old = make_shard("s0", 0, schema_version=1).drop_columns(
        ["system_prompt", "last_policy_step", "last_policy_fingerprint"]
    )
    store.put(shard_path("s0", 0), parquet_bytes(old))
    commit_shard(store, make_shard("s0", 1, system_prompt="Be brief."))
    assert read_shards(store, "s0", [0]).equals(make_shard("s0", 0, schema_version=1))
    buffer = new_buffer(store)
    assert buffer.sync(1, attempt=1).rounds == {"s0": [0, 1]} and intake.refusals(store) == []
    prompts = "SELECT DISTINCT round, system_prompt FROM trajectories ORDER BY round"
    assert [row["system_prompt"] for row in queries.query(store, prompts).to_pylist()] == ["", "Be brief."]
    export(store, tmp_path / "run.duckdb")
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as reader:
        assert reader.execute(prompts).fetchall() == [(0, ""), (1, "Be brief.")]


def test_a_shard_of_version_2_was_sampled_by_one_policy_each(store):
    old = make_shard("s0", 0, policy_step=3, policy_fingerprint="a" * 32, schema_version=2)
    store.put(shard_path("s0", 0), parquet_bytes(old.drop_columns(["last_policy_step", "last_policy_fingerprint"])))
    last = {"last_policy_step": 5, "last_policy_fingerprint": "b" * 32}
    commit_shard(store, make_shard("s0", 1, policy_step=4, policy_fingerprint="c" * 32, **last))
    assert read_shards(store, "s0", [0]).equals(old)
    found = "SELECT DISTINCT policy_step, last_policy_step, last_policy_fingerprint[1] FROM trajectories ORDER BY 1"
    assert [tuple(row.values()) for row in queries.query(store, found).to_pylist()] == [(3, 3, "a"), (4, 5, "b")]


def test_an_export_of_two_versions_ledgers_has_the_newer_ones_columns(store, tmp_path):
    old = pa.Table.from_pylist([make_training_step(1, 1)])
    store.put(
        "metrics/training/attempt=00000001/step=00000001.parquet", parquet_bytes(old.drop_columns(["publish_stall_s"]))
    )
    ledger.record_training_step(store, make_training_step(1, 2) | {"publish_stall_s": 3.0})
    stalls = "SELECT publish_stall_s FROM training_steps ORDER BY step"
    assert queries.query(store, stalls).column(0).to_pylist() == [None, 3.0]
    export(store, tmp_path / "run.duckdb")
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as reader:
        assert reader.execute(stalls).fetchall() == [(None,), (3.0,)]


SAMPLING = {"prompts_per_batch": 4, "responses_per_prompt": 4, "recent_probability": 0.5}


def test_a_rebuilt_buffer_is_the_same_and_goes_on(store):
    live = new_buffer(store, **SAMPLING)
    batches = []
    for sync in range(3):
        for number in range(3 * sync, 3 * sync + 3):
            commit(store, "s0", number, distinct("abcdefgh", 4, start=4 * number))
        store.put(shard_path("s0", 3 * sync + sync), b"torn")  # the first, the second, the last of the sync
        live.sync(sync + 1, attempt=1)
        batches.append(live.draw(sync + 1))
    for step in (3, 1, 2):
        rebuilt = new_buffer(store, **SAMPLING)
        rebuilt.rebuild(step)
        assert rebuilt.draw(step).equals(batches[step - 1])
    rebuilt.rebuild(3)
    before = intake.refusals(store)
    assert rebuilt.sync(4, attempt=1) is None and intake.refusals(store) == before
    assert [refusal.round for refusal in before] == [0, 4, 8]


def test_a_trainer_killed_between_refusal_and_sync_record_goes_on(store, monkeypatch):
    commit_shard(store, make_shard("s0", 0))
    store.put(shard_path("s0", 1), b"torn")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def killed(*_):
            raise KeyboardInterrupt

        patch.setattr(ledger, "record_sync", killed)
        new_buffer(store).sync(1, attempt=1)
    assert the_only_refusal(store).round == 1
    attempts.start_attempt(store, resumed_from=0, owner=OWNER)
    assert new_buffer(store).sync(1, attempt=2).rounds == {"s0": [0]}


def test_a_sync_with_nothing_but_bad_shards_takes_nothing_in_and_is_not_repeated(store, caplog):
    buffer = new_buffer(store)
    store.put(shard_path("s0", 0), b"torn")
    assert buffer.sync(1, attempt=1) is None and buffer.sync(1, attempt=1) is None
    assert store.list("syncs") == [] and len(intake.refusals(store)) == 1 and len(caplog.records) == 1
    commit_shard(store, make_shard("s0", 1))
    assert buffer.sync(1, attempt=1).rounds == {"s0": [1]}


def test_a_shard_damaged_after_it_was_taken_in_does_not_stop_a_resume(store):
    buffer = new_buffer(store)
    for number in range(2):
        commit_shard(store, make_shard("s0", number))
        buffer.sync(number + 1, attempt=1)
    store.put(shard_path("s0", 0), b"torn")
    resumed = new_buffer(store)
    resumed.rebuild(2)
    assert (resumed.num_trajectories, resumed.num_inserted, resumed.newest_sync) == (4, 8, 2)
    assert intake.refusals(store) == [], "a rebuild may be a reader's"
    attempts.start_attempt(store, resumed_from=2, owner=OWNER)
    assert resumed.sync(3, attempt=2) is None
    assert the_only_refusal(store).round == 0
    again = new_buffer(store)
    again.rebuild(2)
    assert again.draw(2).equals(resumed.draw(2))


@pytest.mark.parametrize("answer", [b"", WHOLE[:500], b"<html>busy</html>"])
def test_an_answer_that_was_cut_refuses_nothing(store, monkeypatch, answer):
    store.put(shard_path("s0", 1), WHOLE)
    real = store.get
    with monkeypatch.context() as patch, pytest.raises(StoreUnreachable, match="the answer was cut"):
        patch.setattr(store, "get", lambda path: answer if path == shard_path("s0", 1) else real(path))
        new_buffer(store).sync(1, attempt=1)
    assert intake.refusals(store) == []


def test_what_a_second_reading_does_not_repeat_refuses_nothing(store, monkeypatch):
    store.put(shard_path("s0", 1), WHOLE)
    real, answers = store.get, [bytes(len(WHOLE))]  # of the right length
    monkeypatch.setattr(
        store, "get", lambda path: answers.pop() if path.endswith(".parquet") and answers else real(path)
    )
    assert new_buffer(store).sync(1, attempt=1).rounds == {"s0": [1]}
    assert intake.refusals(store) == []


def test_a_forgotten_entry_of_a_listing_loses_no_shard(store, monkeypatch):
    for number in range(3):
        commit_shard(store, make_shard("s0", number))
    real = store.list

    def forgets(folder, **named):
        return [path for path in real(folder, **named) if path != shard_path("s0", 1)]

    monkeypatch.setattr(store, "list", forgets)
    assert new_shards(store, {}) == {"s0": [0, 1, 2]}
    assert new_buffer(store).sync(1, attempt=1).rounds == {"s0": [0, 1, 2]}


def test_a_torn_shard_that_nobody_met_yet_does_not_break_a_query(store, tmp_path, caplog):
    commit_shard(store, make_shard("s0", 0))
    store.put(shard_path("s0", 1), b"torn")
    assert queries.query(store, "SELECT count(*) AS n FROM trajectories").to_pylist() == [{"n": 4}]
    assert shard_path("s0", 1) in caplog.text and intake.refusals(store) == []
    export(store, tmp_path / "run.duckdb")
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as reader:
        assert reader.execute("SELECT count(*) FROM trajectories").fetchone() == (4,)
    with pytest.raises(duckdb.CatalogException):
        queries.query(store, "SELECT * FROM nothing")


def test_what_no_sync_met_is_checked_at_the_end(store):
    buffer = new_buffer(store)
    commit_shard(store, make_shard("s0", 0))
    buffer.sync(1, attempt=1)
    store.put(shard_path("s0", 1), spoiled(reward=math.nan))
    store.put(shard_path("s1", 0), b"torn")
    intake.refuse_rest(store)
    assert {refusal.shard for refusal in intake.refusals(store)} == {shard_path("s0", 1), shard_path("s1", 0)}
    intake.refuse_rest(store)
    assert len(store.list("quarantine")) == 2


def test_a_refused_round_in_a_compacted_file_does_not_count_and_its_block_is_not_compacted(
    store, tmp_path, monkeypatch
):
    monkeypatch.setattr(shards, "ROUNDS_PER_BLOCK", 2)
    for number in range(4):
        commit_shard(store, make_shard("s0", number, reward=math.nan if number in (1, 3) else 1.0))
    store.put("quarantine/searcher=s0/round=00000003.json", b"{}")
    commit_shard(store, make_shard("s0", 4))
    assert upkeep.compact(store) == 1, "of the first two, as an older version would have done"
    assert new_buffer(store).sync(1, attempt=1).rounds == {"s0": [0, 2, 4]}
    rounds = "SELECT round, count(*) FROM trajectories GROUP BY round ORDER BY round"
    assert [tuple(row.values()) for row in queries.query(store, rounds).to_pylist()] == [(0, 4), (2, 4), (4, 4)]
    export(store, tmp_path / "run.duckdb")
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as reader:
        assert reader.execute(rounds).fetchall() == [(0, 4), (2, 4), (4, 4)]


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"reasons": 3}', b"\xff"])
def test_a_torn_record_of_a_refusal_is_one_all_the_same(store, data):
    commit_shard(store, make_shard("s0", 0))
    store.put(refusal_path("s0", 0), data)
    assert new_shards(store, {}) == {}
    assert "is damaged" in the_only_refusal(store).reasons[0]


def test_the_record_says_who_refused_what(store):
    store.put(shard_path("s0", 0), b"torn")
    new_buffer(store).sync(5, attempt=1)
    record = json.loads(store.get("quarantine/searcher=s0/round=00000000.json"))
    assert record["shard"] == shard_path("s0", 0) and record["refused_by"] == "the Trainer, attempt 1, before step 5"
    assert set(record) == {"shard", "reasons", "refused_by", "at"}


def test_a_lack_of_memory_is_no_fault_of_a_shard(tmp_path, monkeypatch):
    store = new_store(tmp_path)
    commit_shard(store, make_shard("s0", 0))

    def lacks_memory(data: bytes) -> pa.Table:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    monkeypatch.setattr("storage.shard_files._read_whole", lacks_memory)
    with pytest.raises(MemoryError):
        read_file(store, shard_path("s0", 0))


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1, 1, 1]), (1 << 20, [3])])
def test_rounds_of_long_responses_are_checked_fewer_at_a_time(store, monkeypatch, limit, sizes):
    for number in range(3):
        commit_shard(store, make_shard("s0", number))
    monkeypatch.setattr(intake, "BYTES_PER_CHECK", limit)
    assert [len(tables) for tables, _ in intake.accept(store, {"s0": range(3)}, Limits(vocab_size=100))] == sizes
