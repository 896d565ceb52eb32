"""Claims about stores that fail for a while, or replace what they must not. Run: pytest tests/storage/test_outages.py

- a gateway that answers 503, one that hangs up, and one that is killed and comes back, are waited for; nothing is lost
  or written twice
- patience ends with an error that says what is wrong; a store's own refusal, and a run's first look, wait for nothing
- a full disk is waited for; a file that did not fit leaves nothing behind; the error says that no room is left
- a second start of the local S3 is refused, and the one that runs goes on
- a store without create-if-absent (rclone's) is warned of; a retried round is still refused there, and of two writers
  in the same moment the trajectories that stay are counted once
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from infra.local_s3 import free_ports
from storage import attempts
from storage.buffer import ReplayBuffer
from storage.errors import AlreadyExists, NotFound, StoreFull, StoreUnreachable
from storage.mop import SamplingSettings
from storage.patience import patience_s
from storage.shard_files import read_shards
from storage.shards import commit_shard, shard_path
from storage.store import RunStore
from tests.faults.fault_proxy import FaultProxy
from tests.storage.helpers import OWNER, make_shard

OUTAGE_S = 2.0


@pytest.fixture
def flaky(s3_url, monkeypatch):
    """A store behind a proxy that can be told to fail."""
    address = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    proxy = FaultProxy(address.hostname, address.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own repeats: what waits here is ours
    yield RunStore(s3_url, "run"), proxy
    proxy.close()


@pytest.mark.s3
def test_a_gateway_that_answers_503_is_waited_for(flaky, caplog):
    store, proxy = flaky
    commit_shard(store, make_shard("s0", 0))
    proxy.failing.set()
    threading.Timer(OUTAGE_S, proxy.failing.clear).start()
    started = time.monotonic()
    commit_shard(store, make_shard("s0", 1))
    assert time.monotonic() - started > OUTAGE_S / 2
    assert f"store: cannot look up {shard_path('s0', 1)} now, retrying: the store is away or overloaded" in caplog.text
    for number in (0, 1):
        assert read_shards(store, "s0", [number]).equals(make_shard("s0", number))
        with pytest.raises(AlreadyExists):
            commit_shard(store, make_shard("s0", number))


@pytest.mark.s3
def test_a_gateway_that_closes_connections_without_an_answer_is_waited_for(flaky):
    store, proxy = flaky
    proxy.cutting.set()
    threading.Timer(2 * OUTAGE_S, proxy.cutting.clear).start()  # longer than s3fs tries on by itself
    store.put("a", b"1")
    assert store.get("a") == b"1"


@pytest.mark.s3
def test_patience_ends_with_an_error_and_a_refusal_waits_for_nothing(flaky):
    store, proxy = flaky
    store._files.patience_s = 300.0
    started = time.monotonic()
    with pytest.raises(NotFound):
        store.get("nothing")
    assert time.monotonic() - started < 100, "the answer came, and was waited for all the same"
    store._files.patience_s = 1.0
    proxy.failing.set()
    with pytest.raises(StoreUnreachable, match=r"cannot write a \(run run in s3://.*the store is away"):
        store.put("a", b"")
    started = time.monotonic()
    with pytest.raises(StoreUnreachable, match="store: cannot write to"):
        store.check_writable()
    assert time.monotonic() - started < 60, "a run's start waited as a running one does"


@pytest.mark.s3
def test_a_second_start_of_the_local_s3_leaves_the_one_that_runs_alone(radosgw_url, local_s3):
    script = Path(__file__).parents[2] / "infra" / "local_s3.py"
    command = [sys.executable, script, "start", "--folder", local_s3[0].folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "it runs already" in done.stderr and not done.stdout
    RunStore(radosgw_url, "run").put("whole", b"there")


@pytest.mark.s3
def test_a_gateway_that_is_killed_and_comes_back_is_waited_for(radosgw_url, local_s3):
    gateway, _ = local_s3
    store = RunStore(radosgw_url, "run")
    committed, stop = [], threading.Event()

    def write() -> None:
        while not stop.is_set():
            commit_shard(store, make_shard("s0", len(committed)))
            committed.append(len(committed))

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(2):
        before = len(committed)
        while len(committed) < before + 5:
            time.sleep(0.01)
        gateway.kill_gateway()
        gateway.start_gateway()
    stop.set()
    writer.join()
    assert store.list("trajectories") == [shard_path("s0", number) for number in committed]
    for number in committed:
        assert read_shards(store, "s0", [number]).equals(make_shard("s0", number))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk needs root and mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_waited_for_and_named(small_disk, caplog):
    store = RunStore(small_disk.as_uri(), "run")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1 << 19))
    big = os.urandom(700_000)
    store._files.patience_s = 0.5
    with pytest.raises(StoreFull, match=r"cannot create big .* no room is left"):
        store.put_new("big", big)
    assert store.list("") == [] and list((small_disk / "run").iterdir()) == []  # no half file takes what room there is
    store._files.patience_s = patience_s()
    threading.Timer(1.0, ballast.unlink).start()
    store.put_new("big", big)
    assert store.get("big") == big
    assert "retrying" in caplog.text


@pytest.fixture(scope="module")
def rclone_url(tmp_path_factory):
    """A store that does not honour create-if-absent: the second put silently wins."""
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "bucket").mkdir()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    rclone = Path(sys.executable).with_name("rclone")
    server = subprocess.Popen([rclone, "serve", "s3", folder, "--addr", address, "--auth-key", "test,test-secret"])
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{address}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        RunStore("s3://bucket", "run").exists("up")  # waits until it answers
        yield "s3://bucket"
    server.kill()
    server.wait()


SAMPLING = SamplingSettings(prompts_per_batch=1, responses_per_prompt=2, min_size=1)


@pytest.mark.s3
def test_a_store_without_create_if_absent_is_warned_of(rclone_url):
    assert "does not honour create-if-absent" in RunStore(rclone_url, "run").check_writable()
    assert RunStore(rclone_url, "run").list("") == []


@pytest.mark.s3
def test_there_a_retried_round_is_still_refused(rclone_url):
    store = RunStore(rclone_url, "retried")
    commit_shard(store, make_shard("s0", 0, reward=1.0))
    with pytest.raises(AlreadyExists):
        commit_shard(store, make_shard("s0", 0, reward=0.0))
    assert set(read_shards(store, "s0", [0])["reward"].to_pylist()) == {1.0}


@pytest.mark.s3
def test_there_two_writers_of_one_round_in_the_same_moment_count_once(rclone_url, monkeypatch):
    store = RunStore(rclone_url, "raced")
    attempts.start_attempt(store, resumed_from=0, owner=OWNER)
    buffer = ReplayBuffer(store, SAMPLING, seed=0)
    monkeypatch.setattr(store._files, "exists", lambda path: False)  # both looked before either had put
    commit_shard(store, make_shard("s0", 0, reward=1.0))
    assert buffer.sync(1, attempt=1).num_trajectories == 4
    commit_shard(store, make_shard("s0", 0, reward=0.0))  # the later one replaces the earlier, after it was taken in
    assert buffer.sync(2, attempt=1) is None
    commit_shard(store, make_shard("s0", 1, prompt_id="p0"))
    assert buffer.sync(2, attempt=1).num_trajectories == 4
    rebuilt = ReplayBuffer(store, SAMPLING, seed=0)
    rebuilt.rebuild(2)
    assert rebuilt.num_trajectories == buffer.num_trajectories
    ids = read_shards(store, "s0", [0, 1])["trajectory_id"].to_pylist()
    assert len(ids) == len(set(ids)) == 8
