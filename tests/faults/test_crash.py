"""Claims about crashes, by the harness of `make crash-matrix` (tests/faults/matrix.py), whose subset this is.

- Trainer and S3 gateway of a real run on radosgw are killed, each at another point of the checkpoint cycle;
  the same command resumes, every acknowledged trajectory is there once, and `tba verify` finds no fault (-m apart)
- a gateway that answers 503 for 30 s, a disk that is full for 30 s: the run waits and goes on, with the same outcome
  (-m apart)
- the harness reports a shard that was dropped on purpose, one that is there twice, and one with fewer rows

python -m pytest tests/faults/test_crash.py -m "apart or not apart"
"""

import contextlib
import subprocess
import time
from urllib.parse import urlsplit

import pytest

from storage.shards import commit_shard, parquet_bytes, shard_path
from tests.faults.fault_proxy import FaultProxy
from tests.faults.matrix import CrashTest, account, proof, restart, run_matrix
from tests.storage.helpers import make_shard

# The parts that touch what is trained on; the others take as long as these together.
SUBSET = [
    ("trainer", "policy published"),
    ("gateway", "checkpoint saved"),
]
OUTAGE_S = 30.0


@pytest.mark.apart
@pytest.mark.s3
def test_killed_the_run_goes_on_and_every_acknowledged_trajectory_is_there_once(tmp_path, local_s3, radosgw_url):
    gateway, _ = local_s3
    test = CrashTest(tmp_path, radosgw_url, {"gateway": lambda: restart(gateway)})
    try:
        assert run_matrix(test, SUBSET) == []
    finally:
        test.stop()
    result = account(test.store, test.acknowledged)
    assert result.faults == proof(test.store) == [] and result.found == result.acknowledged > 0

    dropped = shard_path("s0", max(test.acknowledged))
    test.store.delete(dropped)
    assert f"lost: {dropped} was acknowledged" in account(test.store, test.acknowledged).faults


@pytest.mark.apart
@pytest.mark.s3
def test_a_gateway_that_answers_503_for_30_s_loses_nothing(tmp_path, local_s3, radosgw_url, monkeypatch):
    address = urlsplit(local_s3[0].endpoint)
    proxy = FaultProxy(address.hostname, address.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)

    def answer_503() -> None:
        proxy.failing.set()
        time.sleep(OUTAGE_S)
        proxy.failing.clear()

    waits_and_goes_on(CrashTest(tmp_path, radosgw_url, {"503": answer_503}))


@pytest.fixture
def disk(tmp_path):
    """A file system in memory, a little larger than what the run keeps."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk needs root and mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.apart
def test_a_disk_that_is_full_for_30_s_loses_nothing(tmp_path, disk):
    ballast = disk / "ballast"

    def fill() -> None:
        with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        time.sleep(OUTAGE_S)
        ballast.unlink()

    waits_and_goes_on(CrashTest(tmp_path, (disk / "store").as_uri(), {"full disk": fill}))


def waits_and_goes_on(test: CrashTest) -> None:
    """Its one outage comes twice. No process ends: the command is given once."""
    (outage,) = test.outages
    try:
        assert run_matrix(test, [(outage, "checkpoint saved"), (outage, "between checkpoints")]) == []
    finally:
        test.stop()
    assert account(test.store, test.acknowledged).faults == proof(test.store) == []
    assert test.resumes == 1, "the run ended, and had to be resumed"
    assert "retrying" in (test.project / ".tba" / ".local" / "worker.log").read_text()


@pytest.fixture
def acknowledged(local_store) -> dict[int, int]:
    """Three committed rounds of four."""
    for number in range(3):
        commit_shard(local_store, make_shard("s0", number))
    return dict.fromkeys(range(3), 4)


def test_a_whole_run_has_no_fault(local_store, acknowledged):
    result = account(local_store, acknowledged)
    assert (result.acknowledged, result.found, result.faults) == (12, 12, [])


@pytest.mark.parametrize(("dropped", "fault"), [(2, "lost: "), (1, "rounds have gaps: [1]")])
def test_a_dropped_shard_is_reported(local_store, acknowledged, dropped, fault):
    local_store.delete(shard_path("s0", dropped))
    result = account(local_store, acknowledged)
    assert result.found == 8
    assert any(fault in line for line in result.faults)


def test_a_shard_that_is_there_twice_is_reported(local_store, acknowledged):
    local_store.put(shard_path("s0", 3), parquet_bytes(make_shard("s0", 2)))
    assert "s0-00000002-00000 is there 2 times" in account(local_store, acknowledged).faults


def test_a_shard_that_lost_rows_is_reported(local_store, acknowledged):
    local_store.put(shard_path("s0", 2), parquet_bytes(make_shard("s0", 2, num_rows=3)))
    result = account(local_store, acknowledged)
    assert result.found == 11
    assert result.faults == [f"{shard_path('s0', 2)}: 3 rows, 4 were acknowledged"]
