"""Claims about answers of S3 that are errors, cut short, or not S3's. Run: pytest tests/storage/test_wrong_answers.py

- a listing answered 200 with a page, nothing, or other XML is never read as empty: it is waited for, then an error
- a listing is sorted, without repetitions and earlier paths, whatever order the server lists in
- a put answered 200 by something that is not S3 was not stored
- an upload that the server no longer knows is repeated
- throttling, time-outs, 5xx, conflicts, cut bodies, expired credentials and a skewed clock are waited for, and named
- a fast read is one request, and yields nothing if that fails, which is told once
- a refusal waits for nothing and is named
- a put_new that is told 409 or 412 though nothing was stored is repeated, also where the server drops metadata
- after a HEAD without a reason, the reason is asked for
- credentials are read anew after they have expired
- Arrow's errors are those of every other operation, with the reason that its HEAD does not tell
- a wait ends at the limit that the environment names
"""

import pytest

from storage import checkpoints, patience
from storage.errors import AlreadyExists, StoreError, StoreUnreachable
from storage.export import export
from storage.patience import patience_s
from storage.queries import query
from storage.shards import commit_shard
from storage.store import RunStore
from tests.storage.helpers import make_shard
from tests.storage.wrong_answers import WrongAnswers, error, raw

pytestmark = pytest.mark.s3

OTHER_XML = b"<?xml version='1.0'?><Status><Ok>true</Ok></Status>"
NOT_A_LISTING = {
    "page": raw("200 OK", b"<html><body><p>Log in</p></body></html>", "text/html"),
    "nothing": raw("200 OK", b""),
    "other XML": raw("200 OK", OTHER_XML),
    "cut XML": raw("200 OK", b"<?xml version='1.0'?><ListBucketResult><Name>b</Name><Conte"),
    "no content": raw("204 No Content"),
    "other folder": raw(
        "200 OK",
        b"<?xml version='1.0'?><ListBucketResult><Name>b</Name><Prefix>else/where/</Prefix><KeyCount>0</KeyCount>"
        b"<IsTruncated>false</IsTruncated></ListBucketResult>",
    ),
    "endless": raw(
        "200 OK",
        b"<?xml version='1.0'?><ListBucketResult><Name>b</Name><KeyCount>0</KeyCount>"
        b"<IsTruncated>true</IsTruncated></ListBucketResult>",
    ),
}


@pytest.fixture
def wrong(moto_url, moto, monkeypatch):
    """A store behind a server that may answer wrongly. Requests are repeated as often as ever, with shorter pauses."""
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    server = WrongAnswers(moto["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    store = RunStore(moto_url, "run")
    store.put("a/1", b"one")
    store.put("a/2", b"two")
    yield store, server
    server.close()


def is_listing(request) -> bool:
    return request.is_listing


@pytest.mark.parametrize("kind", NOT_A_LISTING)
def test_a_listing_that_is_none_is_never_empty(wrong, kind):
    store, server = wrong
    server.times(5, NOT_A_LISTING[kind], is_listing)
    assert store.list("a") == ["a/1", "a/2"]
    server.times(5, NOT_A_LISTING[kind], is_listing)
    assert store.folders("") == ["a"]
    store._files.patience_s = 0
    server.times(99, NOT_A_LISTING[kind], is_listing)
    for read in (store.list, store.folders):
        with pytest.raises(StoreUnreachable, match=r"cannot list a \(run run in s3://.*(not S3's.*proxy|away)"):
            read("a")


def listing(*keys: str, prefix: str) -> bytes:
    contents = "".join(f"<Contents><Key>{prefix}{key}</Key><Size>1</Size></Contents>" for key in keys)
    text = f"<?xml version='1.0'?><ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>{contents}"
    return raw("200 OK", f"{text}</ListBucketResult>".encode())


def test_a_listing_is_sorted_and_begins_where_asked_on_any_server(wrong):
    store, server = wrong
    server.times(1, listing("a/3", "a/1", "a/2", "a/3", prefix="stores/run/"), is_listing)
    assert store.list("a", start_after="a/1") == ["a/2", "a/3"]


def test_keys_that_cannot_be_a_path_are_left_out(wrong, tmp_path):
    store, server = wrong
    bad = ("a/", "a//x", "a/../../../x", "a/./x", "a/x\\y", "a/x\x85y")
    answer = listing("a/1", *bad, prefix="stores/run/")
    server.times(1, answer, is_listing)
    assert store.list("a") == ["a/1"]
    server.times(1, answer, is_listing)
    store.download_folder("a", tmp_path / "deep/copy")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "deep/copy/1"]


PAGE = raw("200 OK", b"<html>Log in</html>", "text/html")


def test_a_put_or_get_answered_by_something_else_is_repeated(wrong):
    store, server = wrong
    server.times(3, PAGE, lambda request: request.method == "PUT")
    store.put("b", b"data")
    server.times(3, PAGE, lambda request: request.method == "GET")
    assert store.get("b") == b"data"
    server.times(3, PAGE, lambda request: request.method == "HEAD")
    assert not store.exists("c")


def test_an_upload_whose_last_answer_was_lost_is_repeated(wrong, tmp_path):
    """The client repeats the last request, and the server does not know the upload any more."""
    store, server = wrong
    (tmp_path / "folder").mkdir()
    with open(tmp_path / "folder" / "large", "wb") as file:
        file.truncate(100 << 20)  # s3fs sends it in parts

    def is_last(request) -> bool:
        return request.method == "POST" and "uploadId" in request.path

    server.times(1, error("404 Not Found", "NoSuchUpload"), is_last)
    store.upload_folder(tmp_path / "folder", "copy")
    assert sum(map(is_last, server.seen)) == 2
    assert store._files._head("copy/large")["ContentLength"] == 100 << 20


PASSING = {
    "429": raw("429 Too Many Requests"),
    "429 with a code": error("429 Too Many Requests", "TooManyRequests"),
    "slow down": error("503 Slow Down", "SlowDown"),
    "500": error("500 Internal Server Error", "InternalError"),
    "502 page": raw("502 Bad Gateway", b"<html>bad gateway</html>", "text/html"),
    "time-out": error("400 Bad Request", "RequestTimeout"),
    "conflict": error("409 Conflict", "OperationAborted"),
    "cut body": raw("200 OK", b"on", length=3),
    "expired": error("400 Bad Request", "ExpiredToken"),
    "skewed": error("403 Forbidden", "RequestTimeTooSkewed"),
    "full": error("507 Insufficient Storage", "XMinioStorageFull"),
}
MESSAGES = {
    "cut body": "cut short",
    "expired": "credentials have expired; renew them",
    "skewed": "clock",
    "full": "no room is left",
    "time-out": "no answer in time",
}


@pytest.mark.parametrize("kind", PASSING)
def test_a_fault_that_may_pass_is_waited_for_and_named(wrong, kind):
    store, server = wrong

    def is_get(request) -> bool:
        return request.method == "GET"

    server.times(5, PASSING[kind], is_get)
    assert store.get("a/1") == b"one"
    server.times(99, PASSING[kind], is_get)
    store._files.patience_s = 0
    with pytest.raises(StoreError, match=rf"cannot read a/1 \(run run in .*{MESSAGES.get(kind, 'away or overloaded')}"):
        store.get("a/1")


def test_a_fast_read_is_one_request(wrong):
    store, server = wrong
    before = len(server.seen)
    assert store.get_fast("a/1") == b"one"
    assert len(server.seen) == before + 1


@pytest.mark.parametrize("kind", PASSING)
def test_a_fast_read_that_fails_yields_nothing(wrong, caplog, kind):
    store, server = wrong
    server.times(99, PASSING[kind])
    assert store.get_fast("a/1") is store.get_fast("a/2") is None
    (told,) = [record.getMessage() for record in caplog.records if "obstore" in record.getMessage()]
    assert "a/1" in told


def test_a_fast_read_of_a_missing_file_is_no_failure(wrong, caplog):
    store, _ = wrong
    assert store.get_fast("a/3") is None and not caplog.records


@pytest.mark.parametrize("kind", ["cut body", "slow down"])
def test_a_download_is_whole(wrong, tmp_path, kind):
    store, server = wrong
    server.times(5, PASSING[kind], lambda request: request.method == "GET" and not request.is_listing)
    store.download_folder("a", tmp_path / "copy")
    assert (tmp_path / "copy/1").read_bytes() == b"one"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (error("403 Forbidden", "AccessDenied"), "permission denied"),
        (error("403 Forbidden", "SignatureDoesNotMatch"), "credentials are wrong"),
        (error("403 Forbidden", "InvalidAccessKeyId"), "credentials are wrong"),
        (error("404 Not Found", "NoSuchBucket"), "bucket does not exist"),
        (error("501 Not Implemented", "NotImplemented"), "refused"),
    ],
)
def test_a_refusal_waits_for_nothing(wrong, answer, message):
    store, server = wrong
    server.times(999, answer)
    store._files.patience_s = 300
    before = len(server.seen)
    with pytest.raises(StoreError, match=f"cannot read a/1 .*{message}"):
        store.get("a/1")
    assert len(server.seen) - before <= 2


CONFLICTS = {
    "409": error("409 Conflict", "ConditionalRequestConflict"),
    "412": error("412 Precondition Failed", "PreconditionFailed"),
    "412 without a body": raw("412 Precondition Failed"),
}


def is_put(request) -> bool:
    return request.method == "PUT"


@pytest.mark.parametrize("kind", CONFLICTS)
def test_a_conflict_where_nothing_was_stored_is_repeated(wrong, kind):
    store, server = wrong
    server.times(3, CONFLICTS[kind], is_put)
    store.put_new("new", b"data")
    assert store.get("new") == b"data"
    with pytest.raises(AlreadyExists):
        store.put_new("new", b"data")


@pytest.mark.parametrize("drops", ["", "x-amz-meta"])
def test_a_put_new_that_was_stored_and_answered_otherwise_is_ours(wrong, drops):
    store, server = wrong
    lost = [True]

    def stored_but_lost(request):
        if request.method == "PUT" and lost.pop() if lost else False:
            server.forward(request)
            return raw("500 Internal Server Error")
        return server.forward(request, drop_headers=drops)

    server.wrong = stored_but_lost
    store.put_new("new", b"data")
    assert not lost and store.get("new") == b"data"


def test_a_rival_wins_on_a_server_that_drops_metadata(wrong, monkeypatch):
    store, server = wrong
    monkeypatch.setattr(store._files, "exists", lambda path: False)  # both looked before either had put
    server.wrong = lambda request: server.forward(request, drop_headers="x-amz-meta")
    with pytest.raises(AlreadyExists):
        store.put_new("a/1", b"not one")
    assert store.get("a/1") == b"one"


def test_the_reason_of_a_bare_head_is_asked_for(wrong):
    store, server = wrong
    store._files.patience_s = 0

    def expired(request):
        return raw("400 Bad Request") if request.method == "HEAD" else PASSING["expired"]

    server.wrong = expired
    with pytest.raises(StoreUnreachable, match=r"cannot look up a/1 .*credentials have expired"):
        store.exists("a/1")


def test_expired_credentials_are_read_anew(wrong, monkeypatch):
    store, server = wrong

    def wrong_key(request):
        return None if "Credential=new-key/" in request.headers["authorization"] else PASSING["expired"]

    assert store.get_fast("a/1") == b"one"
    server.wrong = wrong_key
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new-key")  # what a changed file of AWS's is for a process that goes on
    assert store.get_fast("a/1") is None
    assert store.get("a/1") == store.get_fast("a/1") == b"one"


@pytest.fixture
def wrong_run(wrong):
    """A run with a shard and a checkpoint; after `fail` Arrow's requests get that answer."""
    store, server = wrong
    store.put("run.json", b"{}")
    commit_shard(store, make_shard())
    store.put("trainer/step=00000001/state.json", b'{"step": 1}')
    store.put("trainer/step=00000001/trainer.safetensors", (2).to_bytes(8, "little") + b"{}")

    def fail(answer: bytes, number: int) -> None:
        left = [number]

        def wrong(request):
            # s3fs lists what Arrow then reads; of run.json it asks for the reason
            if left[0] and ("aws-sdk-cpp" in request.headers["user-agent"] or request.path.endswith("run.json")):
                left[0] -= 1
                return answer
            return None

        server.wrong = wrong

    return store, fail


READS = {
    "sql": lambda store, folder: query(store, "SELECT count(*) FROM trajectories"),
    "export": lambda store, folder: export(store, folder / "run.duckdb"),
    "checkpoint": lambda store, folder: checkpoints.checkpoint_faults(
        store, checkpoints.Checkpoint(1, 1, "trainer/step=00000001")
    ),
}


@pytest.mark.parametrize("read", READS)
def test_arrow_errors_are_named_and_waited_for(wrong_run, tmp_path, read):
    store, fail = wrong_run
    for answer, message in {
        error("403 Forbidden", "AccessDenied"): "permission denied",
        error("400 Bad Request", "ExpiredToken"): "credentials have expired",
        error("403 Forbidden", "RequestTimeTooSkewed"): "clock",
        error("503 Slow Down", "SlowDown"): "away or overloaded",
        raw("429 Too Many Requests"): "away or overloaded",
    }.items():
        fail(answer, 999)
        store._files.patience_s = 0
        with pytest.raises(StoreUnreachable, match=f"cannot read files of run run in s3://.*{message}"):
            READS[read](store, tmp_path)
        if message != "permission denied":
            fail(answer, 3)
            store._files.patience_s = 60
            READS[read](store, tmp_path)


def test_the_limit_is_in_the_environment(monkeypatch, tmp_path):
    assert patience_s() == 120
    monkeypatch.setenv("TBA_STORE_PATIENCE_MINUTES", "1.5")
    assert RunStore(tmp_path.as_uri(), "run")._files.patience_s == 90
    for bad in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv("TBA_STORE_PATIENCE_MINUTES", bad)
        with pytest.raises(ValueError, match=f"TBA_STORE_PATIENCE_MINUTES: got '{bad}'.*in minutes"):
            RunStore(tmp_path.as_uri(), "run")
