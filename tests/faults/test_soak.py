"""Claims about the harness of `make soak` (tests/faults/soak.py): it injects what it says, and reports what it must.

- one seed gives one schedule, another seed another; each kind comes about equally often, from the first minutes on
- the proxy passes requests on unchanged; of an armed fault exactly the next matching requests are hit, as the kind says
- a fault that nothing meets lapses
- a listing leaves an entry out only while that entry's put has not been answered
- a whole store has no fault in the account; a lost, changed, doubled or invalid shard is reported, so are a corrupted
  draw, the draw of a file that another writer put in spoiled, and a resume before the newest checkpoint
- a stall is the longest time between two steps without the outages; a kill of the Trainer begins a new one
- `tba verify` must name each spoiled file, and nothing else

Run: pytest tests/faults/test_soak.py
"""

import json
import socket
import threading
from collections import Counter
from dataclasses import replace
from urllib.parse import urlsplit

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from storage import ledger
from storage.schema import TRAJECTORY
from storage.shards import commit_shard, parquet_bytes, shard_path
from tests.faults import accounting, s3_proxy
from tests.faults.faulted_run import spoiled_file
from tests.faults.s3_proxy import S3Proxy
from tests.faults.schedule import KINDS, SPOILED_FILES, STORE_FAULTS, Event, schedule
from tests.faults.searcher import digest
from tests.storage.helpers import make_batch, make_shard

# --- the schedule -----------------------------------------------------------------------------------------------------


def test_one_seed_gives_one_schedule():
    assert schedule(1, 3600) == schedule(1, 3600) != schedule(2, 3600)
    shorter = schedule(1, 600)
    assert [replace(event, number=0) for event in shorter] == [
        replace(event, number=0) for event in schedule(1, 3600) if event.at_s < 600
    ]


def test_an_hour_has_faults_enough_of_every_kind():
    counts = Counter(event.kind for event in schedule(1, 3600))
    assert counts.keys() == set(KINDS) and counts.total() > 1500
    assert min(counts[kind] for kind in STORE_FAULTS) > 50
    assert len({event.kind for event in schedule(1, 72)}) >= 12, "what CI runs"


def test_kinds_can_be_chosen():
    assert {event.kind for event in schedule(1, 600, ("429", "Trainer killed"))} == {"429", "Trainer killed"}


# --- the proxy --------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(moto_url):
    """A client without retries; the bucket's name is in `bucket`."""
    return boto3.Session().client("s3", config=Config(retries={"max_attempts": 0}))


@pytest.fixture
def bucket(moto_url) -> str:
    return urlsplit(moto_url).netloc


@pytest.fixture
def proxy(moto, bucket):
    proxy = S3Proxy(moto["AWS_ENDPOINT_URL"], f"{bucket}/run")
    yield proxy
    proxy.close()


@pytest.fixture
def through(proxy, moto_url):
    once = Config(retries={"max_attempts": 0}, read_timeout=20, s3={"addressing_style": "path"})
    return boto3.Session().client("s3", endpoint_url=proxy.url, config=once)


def arm(proxy: S3Proxy, kind: str, target: str, times: int = 1, amount: float = 0.6) -> None:
    proxy.arm(Event(0, 0.0, kind, target, times, amount))


SHARD = "run/" + shard_path("s0", 0)


def put(client, bucket: str, key: str = SHARD, body: bytes = b"shard", **arguments):
    return client.put_object(Bucket=bucket, Key=key, Body=body, **arguments)


def get(client, bucket: str, key: str = SHARD) -> bytes:
    return client.get_object(Bucket=bucket, Key=key)["Body"].read()


@pytest.mark.s3
def test_requests_pass_unchanged(client, through, bucket):
    put(through, bucket, Metadata={"writer": "me"}, body=bytes(range(256)) * 1000)
    assert get(through, bucket) == get(client, bucket) == bytes(range(256)) * 1000
    assert through.head_object(Bucket=bucket, Key=SHARD)["Metadata"] == {"writer": "me"}
    with pytest.raises(ClientError, match="PreconditionFailed"):
        put(through, bucket, IfNoneMatch="*")
    assert [item["Key"] for item in through.list_objects_v2(Bucket=bucket)["Contents"]] == [SHARD]
    through.delete_object(Bucket=bucket, Key=SHARD)
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)


@pytest.mark.s3
@pytest.mark.parametrize(
    "half", [b"Content-Length: 5\r\n\r\nsha", b"Transfer-Encoding: chunked\r\n\r\n5\r\nsha"], ids=["whole", "chunked"]
)
def test_a_client_that_dies_in_the_middle_of_a_put_stores_nothing(half, proxy, client, bucket):
    """S3 stores nothing of such a request; passed on as it is, it would be a whole put of fewer bytes."""
    address = urlsplit(proxy.url)
    with socket.create_connection((address.hostname, address.port)) as dying:
        dying.sendall(f"PUT /{bucket}/{SHARD} HTTP/1.1\r\nHost: {address.netloc}\r\n".encode() + half)
        dying.shutdown(socket.SHUT_WR)
        assert dying.recv(1) == b""  # the proxy has ended the connection, without an answer
    assert "Contents" not in client.list_objects_v2(Bucket=bucket) and not proxy.stored


REFUSALS = {
    "500": "InternalError",
    "503 SlowDown": "SlowDown",
    "429": "TooManyRequests",
    "409 conflict, nothing stored": "ConditionalRequestConflict",
    "skewed clock": "RequestTimeTooSkewed",
    "403 ExpiredToken": "ExpiredToken",
}


@pytest.mark.s3
def test_a_fault_that_nothing_meets_lapses(proxy, through, bucket, monkeypatch):
    arm(proxy, "500", "shard put", times=2)
    with pytest.raises(ClientError):
        put(through, bucket)
    monkeypatch.setattr(s3_proxy, "LONGEST_ARMED_S", 0.0)
    proxy.disarm()
    arm(proxy, "500", "shard put")
    put(through, bucket)
    assert proxy.hits == {0: 1}


@pytest.mark.s3
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_has_s3s_code_and_stores_nothing(kind, proxy, client, through, bucket):
    arm(proxy, kind, "shard put", times=2)
    put(through, bucket, key="run/run.json")  # of another target
    put(through, bucket, key="elsewhere/" + shard_path("s0", 0))  # of another run
    for _ in range(2):
        with pytest.raises(ClientError, match=REFUSALS[kind]):
            put(through, bucket, IfNoneMatch="*")
    put(through, bucket, IfNoneMatch="*")
    assert proxy.hits[0] == 2 and get(client, bucket) == b"shard"


@pytest.mark.s3
@pytest.mark.parametrize(
    ("kind", "is_stored"), [("cut before the request", False), ("cut after the store did it", True)]
)
def test_a_connection_is_cut_before_or_after(kind, is_stored, proxy, client, through, bucket):
    arm(proxy, kind, "shard put")
    with pytest.raises(BotoCoreError):
        put(through, bucket)
    assert ("Contents" in client.list_objects_v2(Bucket=bucket)) == is_stored


@pytest.mark.s3
def test_a_body_is_cut_short(proxy, through, bucket):
    put(through, bucket, body=bytes(1000))
    arm(proxy, "body cut short", "shard get")
    with pytest.raises(BotoCoreError):
        get(through, bucket)
    assert get(through, bucket) == bytes(1000)


@pytest.mark.s3
@pytest.mark.parametrize("kind", ["412 after it was stored", "412, and metadata dropped"])
def test_a_412_follows_a_put_that_was_stored(kind, proxy, through, bucket):
    arm(proxy, kind, "shard put")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        put(through, bucket, IfNoneMatch="*", Metadata={"writer": "me"})
    found = through.head_object(Bucket=bucket, Key=SHARD)["Metadata"]
    assert get(through, bucket) == b"shard" and found == ({} if "metadata" in kind else {"writer": "me"})


@pytest.mark.s3
@pytest.mark.parametrize("amount", [0.2, 0.8])
def test_a_request_is_duplicated(amount, proxy, through, bucket):
    arm(proxy, "duplicated request", "shard put", amount=amount)
    if amount < 0.5:
        put(through, bucket, IfNoneMatch="*")
    else:
        with pytest.raises(ClientError, match="PreconditionFailed"):
            put(through, bucket, IfNoneMatch="*")
    assert get(through, bucket) == b"shard" and len(proxy.stored) == 1


@pytest.mark.s3
def test_a_request_is_held_back_behind_later_ones(proxy, client, through, bucket):
    arm(proxy, "held back behind later ones", "shard put")
    late = threading.Thread(target=put, args=(through, bucket))
    late.start()
    for number in range(4):
        put(through, bucket, key=f"run/metrics/{number}")
    late.join()
    assert [key for _, key in proxy.stored][-1] == shard_path("s0", 0)


@pytest.mark.s3
@pytest.mark.parametrize("kind", ["listing is HTML", "listing is empty"])
def test_a_listing_answers_200_and_holds_nothing(kind, proxy, through, bucket):
    put(through, bucket)
    arm(proxy, kind, "listing")
    first, second = (through.list_objects_v2(Bucket=bucket, Prefix="run/") for _ in range(2))
    assert "Contents" not in first and first["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert len(second["Contents"]) == 1


@pytest.mark.s3
def test_a_listing_leaves_out_only_what_has_not_been_answered(proxy, client, through, bucket):
    put(through, bucket, key="run/" + shard_path("s0", 1))
    arm(proxy, "listing lags behind a put", "shard put")
    answered = threading.Thread(target=put, args=(through, bucket))
    answered.start()
    while len(proxy.stored) < 2:
        pass
    assert answered.is_alive()
    during = through.list_objects_v2(Bucket=bucket, Prefix="run/")["Contents"]
    answered.join()
    after = through.list_objects_v2(Bucket=bucket, Prefix="run/")["Contents"]
    assert [item["Key"] for item in during] == ["run/" + shard_path("s0", 1)] and len(after) == 2


# --- the account ------------------------------------------------------------------------------------------------------

SHAPE, VOCABULARY = (1, 3), 100


@pytest.fixture
def run(local_store):
    """Objects of a run: three shards of four rows and a batch of three slots; and what was acknowledged."""
    acknowledged = []
    for number in range(3):
        shard = make_shard("s0", number)
        path = commit_shard(local_store, shard)
        acknowledged.append({"path": path, "rows": 4, "digest": digest(shard)})
    batch = make_batch([0, 0, 0])
    rewards = pa.array([0.0, 1.0, 0.0], pa.float32())
    batch = batch.set_column(batch.schema.get_field_index("reward"), "reward", rewards)
    prompts = ["p0", "p1", "p0"]
    ledger.record_batch(
        local_store, 1, 1, batch.set_column(batch.schema.get_field_index("prompt_id"), "prompt_id", [prompts])
    )
    return {path: local_store.get(path) for path in local_store.list("")}, acknowledged


def accounted(run, spoiled=()) -> accounting.Account:
    objects, acknowledged = run
    return accounting.account(objects, acknowledged, list(spoiled), SHAPE, VOCABULARY)


def test_a_whole_store_has_no_fault(run):
    assert accounted(run) == accounting.Account(acknowledged=12, draws=3)


def test_a_dropped_shard_is_reported(run):
    del run[0][shard_path("s0", 1)]
    found = accounted(run)
    assert found.lost == 4 and any(f"lost: {shard_path('s0', 1)}" in fault for fault in found.faults)


def test_a_changed_shard_is_reported(run):
    run[0][shard_path("s0", 1)] = parquet_bytes(make_shard("s0", 1, reward=0.5))
    found = accounted(run)
    assert found.lost == 4 and "other ones than were acknowledged" in found.faults[0]


def test_a_trajectory_that_is_there_twice_is_reported(run):
    run[0][shard_path("s0", 3)] = run[0][shard_path("s0", 2)]
    found = accounted(run)
    assert found.twice == 4 and "s0-00000002-00000 is stored 2 times" in found.faults


ODD = {
    "reward": float("nan"),
    "rewards": {"exact": float("inf")},
    "behavior_logprobs": [-0.5],
    "reference_logprobs": [0.5, -1.0],
    "response_tokens": [],
    "prompt_tokens": [VOCABULARY],
    "policy_step": -5,
    "policy_fingerprint": "",
    "temperature": float("nan"),
    "searcher": "s1",
    "prompt_id": None,
}


@pytest.mark.parametrize("column", ODD)
def test_an_invalid_row_and_its_draw_are_reported(run, column):
    objects, acknowledged = run
    rows = [row | {column: ODD[column]} for row in make_shard("s0", 0).to_pylist()]
    shard = pa.Table.from_pylist(rows, TRAJECTORY)
    objects[shard_path("s0", 0)] = parquet_bytes(shard)
    acknowledged[0]["digest"] = digest(shard)
    found = accounted(run)
    assert found.invalid_draws == 3 and len(found.faults) == 4 + 3, "each row, each draw"


def test_a_draw_of_a_spoiled_file_is_reported(run):
    assert accounted(run, spoiled=[shard_path("s0", 0)]).invalid_draws == 3


CORRUPTED = {
    "reward": 0.5,
    "policy_step": 7,
    "prompt_id": "p9",
    "trajectory_id": "s9-00000000-00000",
    "draw_probability": float("nan"),
    "step": 2,
}


@pytest.mark.parametrize("column", CORRUPTED)
def test_a_corrupted_draw_is_reported(run, column):
    objects, _ = run
    path = ledger.batch_path(1, 1)
    rows = pq.read_table(pa.BufferReader(objects[path])).to_pylist()
    rows[1][column] = CORRUPTED[column]
    objects[path] = parquet_bytes(pa.Table.from_pylist(rows))
    found = accounted(run)
    assert found.invalid_draws == 1 and len(found.faults) == 1


def test_a_missing_slot_is_reported(run):
    objects, _ = run
    path = ledger.batch_path(1, 1)
    objects[path] = parquet_bytes(pq.read_table(pa.BufferReader(objects[path])).slice(1))
    assert "2 slots, expected each of 1 x 3 once" in accounted(run).faults[0]


def test_a_resume_before_the_newest_checkpoint_is_reported():
    attempt = {"attempt": 2, "resumed_from": 0, "created_at": "1970-01-01T00:01:40+00:00"}
    objects = {"trainer/attempt=00000002.json": json.dumps(attempt).encode()}
    stored = [(50.0, "trainer/step=00000020-a0001/state.json"), (99.0, "trainer/step=00000040-a0001/state.json")]
    (fault,) = accounting.resumed_too_early(objects, stored)
    assert "from step 0, but step 20 had a checkpoint" in fault  # that of step 40 may have come after the attempt
    objects = {path: data.replace(b'"resumed_from": 0', b'"resumed_from": 20') for path, data in objects.items()}
    assert accounting.resumed_too_early(objects, stored) == []
    # Attempt 2 undid what attempt 1 stored beyond step 20, so attempt 3 does not go on from there.
    third = {"attempt": 3, "resumed_from": 20, "created_at": "1970-01-01T01:00:00+00:00"}
    objects["trainer/attempt=00000003.json"] = json.dumps(third).encode()
    assert accounting.resumed_too_early(objects, stored) == []
    (fault,) = accounting.resumed_too_early(objects, [*stored, (200.0, "trainer/step=00000030-a0002/state.json")])
    assert "attempt=00000003.json resumed from step 20, but step 30" in fault


def test_a_stall_is_the_longest_time_between_two_steps_or_kills_without_outages():
    ends = [0.0, 1.0, 11.0, 12.0]
    assert accounting.longest_stall(ends, 13.0, []) == 10.0
    assert accounting.longest_stall(ends, 13.0, [(2.0, 5.0), (4.0, 9.0), (50.0, 60.0)]) == 3.0
    assert accounting.longest_stall(ends, 40.0, []) == 28.0, "it trains no more"
    assert accounting.longest_stall(ends, 13.0, [], kills=[4.0, 5.0, 99.0]) == 6.0


@pytest.mark.parametrize("kind", SPOILED_FILES)
def test_a_spoiled_file_is_what_it_says(kind):
    data = spoiled_file(kind, "w3", 0.5)
    if kind == "shard with a NaN reward":
        assert pq.read_table(pa.BufferReader(data))["reward"].to_pylist() != [0.0, 1.0, 0.0, 1.0]
    elif kind == "shard of another schema":
        assert "mood" in pq.read_table(pa.BufferReader(data)).schema.names
    else:
        with pytest.raises(pa.ArrowException):
            pq.read_table(pa.BufferReader(data))


def test_verify_must_name_each_spoiled_file_and_nothing_else():
    spoiled = ["trajectories/searcher=w3/round=00000000.parquet"]
    named = {"kind": "torn shard", "path": "quarantine/searcher=w3/round=00000000-1f.parquet", "message": "cut"}
    other = {"kind": "missing batch", "path": "batches", "message": "step 4"}
    assert accounting.judge([named], spoiled, 1) == [] == accounting.judge([], [], 0)
    assert "does not name searcher=w3/round=00000000" in accounting.judge([], spoiled, 0)[0]
    assert accounting.judge([named, other], spoiled, 1) == ["verify: missing batch: batches: step 4"]
    assert accounting.judge([], [], 2) == ["verify ended with status 2"]
