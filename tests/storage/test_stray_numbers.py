"""Files of other programs whose names have numbers far beyond a run's. Run: pytest tests/storage/test_stray_numbers.py

- a shard or compacted file far beyond a Searcher's rounds is read by nobody; the Searcher's next rounds are taken in
- verify names it, in a moment; a run whose old rounds have expired or were compacted keeps its later ones
- the record of an attempt far beyond the others counts for nobody, and is looked for by nobody
"""

import duckdb
import pytest

from storage import attempts, queries, shards, verify
from storage.buffer import ReplayBuffer
from storage.export import export
from storage.mop import SamplingSettings
from storage.new_shards import new_shards
from storage.paths import first_stray
from storage.shards import commit_shard, next_round, parquet_bytes
from storage.status import run_status
from tests.flows.prepared_run import prepare_run
from tests.storage.helpers import make_shard

STRAYS = ["trajectories/searcher=s0/round=99999999.parquet", "trajectories/compacted/s0-99999968-99999999.parquet"]


@pytest.fixture
def run(tmp_path):
    return prepare_run((tmp_path / "store").as_uri())


@pytest.mark.parametrize("path", STRAYS)
@pytest.mark.parametrize("data", [b"junk", parquet_bytes(make_shard("s0", 99_999_999))])
def test_a_shard_far_beyond_is_read_by_nobody(run, path, data, tmp_path):
    buffer = ReplayBuffer(run, SamplingSettings(prompts_per_batch=1, responses_per_prompt=2, min_size=1), seed=0)
    buffer.sync(1, attempt=1)
    run.put(path, data)
    assert buffer.sync(2, attempt=1) is None
    assert next_round(run, "s0") == 2
    commit_shard(run, make_shard("s0", 2))
    assert buffer.sync(2, attempt=1).rounds == {"s0": [2]}
    assert queries.query(run, "SELECT max(round) AS r FROM trajectories")["r"].to_pylist() == [2]
    export(run, tmp_path / "run.duckdb")
    with duckdb.connect(tmp_path / "run.duckdb", read_only=True) as database:
        assert database.execute("SELECT max(round) FROM trajectories").fetchone() == (2,)
    assert ("stray file", path) in [(fault.kind, fault.path) for fault in verify.verify(run, None).faults]


def test_later_rounds_of_a_long_run_count(run):
    run.put("expired/searcher=s0/through=00004999.json", b"{}")
    commit_shard(run, make_shard("s0", 5000))
    assert new_shards(run, {}) == {"s0": [5000]} and next_round(run, "s0") == 5001
    assert [file.rounds[0] for file in shards.committed_files(run)] == [5000]


def test_an_attempt_far_beyond_counts_for_nobody(run):
    run.put("trainer/attempt=99999999.json", run.get("trainer/attempt=00000001.json"))
    assert attempts.latest_attempt(run) == 1
    assert run_status(run).step == 3


def test_what_is_far_beyond():
    assert first_stray([3, 1, 2, 900], after=0) == float("inf")
    assert first_stray([1, 2, 1003, 5], after=0) == float("inf")
    assert first_stray([1, 2, 5000, 5001], after=0) == 5000
