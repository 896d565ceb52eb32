"""Claims about storage/store.py, on a local folder and on S3. Run: pytest tests/storage/test_store.py

- put_new creates and never replaces; put replaces; what is not there is NotFound
- of processes that race to create one path exactly one wins, and its bytes are stored
- a put_new whose answer was lost finds its own object and succeeds; a rival's object is still AlreadyExists
- a listing is sorted, at any depth, starts where asked, shows other writers' files and no unfinished ones
- folders travel whole, the file that means "complete" last; deleting begins with it
- a store that cannot be reached or written is refused with the reason (tests/storage/test_outages.py has those that
  come back, and one that replaces what it must not)
- a run's name and a store's URL are checked; credentials in a URL are refused and not repeated
- create_run records once, and names every setting that differs
- pyarrow reads through arrow_filesystem, with the credentials and in the region that botocore finds
- what is put is signed, but for what stays on this machine
"""

import errno
import json
import os
import stat
import time
import uuid

import boto3
import pyarrow.dataset as ds
import pyarrow.fs
import pytest
from pyarrow.fs import PyFileSystem

from storage.errors import AlreadyExists, NotFound, RunConfigMismatch, StoreUnreachable
from storage.s3_prefix import S3Prefix
from storage.shards import commit_shard
from storage.store import RunStore
from tests.storage.helpers import make_shard, start_python


def test_put_new_never_replaces_and_put_does(store):
    store.put_new("a/b.json", b"first")
    with pytest.raises(AlreadyExists, match=r"a/b\.json"):
        store.put_new("a/b.json", b"first")
    assert store.get("a/b.json") == b"first"
    store.put("a/b.json", b"second")
    assert store.get("a/b.json") == b"second"


def test_what_is_not_there_is_not_found(store):
    assert not store.exists("a/b.json")
    store.delete("a/b.json")
    with pytest.raises(NotFound, match=r"a/b\.json"):
        store.get("a/b.json")
    with pytest.raises(NotFound, match="policies/step=1"):
        store.download_folder("policies/step=1", "unused")
    assert store.list("a") == [] and store.folders("a") == []


NUM_RACES = 20
RACE = """
import sys, time
from storage.errors import AlreadyExists
from storage.store import RunStore
store = RunStore(sys.argv[1], "run")
store.exists("race")  # connected before the start
print("ready", flush=True)
start = float(input())
for number in range(int(sys.argv[3])):
    time.sleep(max(0.0, start + number * 0.02 - time.time()))  # all at once
    try:
        store.put_new(f"race/{number:02d}", sys.argv[2].encode() * 100_000)
        print("won")
    except AlreadyExists:
        print("lost")
"""


def test_of_racing_writers_exactly_one_wins(store):
    racers = [start_python(RACE, store.url, name, str(NUM_RACES)) for name in "abc"]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 3
    start = time.time() + 0.1
    for racer in racers:
        racer.stdin.write(f"{start}\n")
        racer.stdin.flush()
    outcomes = [racer.communicate(timeout=60)[0].split() for racer in racers]
    for number, outcome in enumerate(zip(*outcomes, strict=True)):
        assert sorted(outcome) == ["lost", "lost", "won"]
        assert store.get(f"race/{number:02d}") == "abc"[outcome.index("won")].encode() * 100_000
    assert store.list("race") == [f"race/{number:02d}" for number in range(NUM_RACES)]


@pytest.mark.s3
def test_a_put_whose_answer_was_lost_finds_its_own_object(s3_store, monkeypatch):
    files = s3_store._files
    pipe_file = files._fs.pipe_file

    def answer_lost(path, data, **arguments):
        pipe_file(path, data, **arguments)
        pipe_file(path, data, **arguments)  # what s3fs does when the first answer does not come

    monkeypatch.setattr(files._fs, "pipe_file", answer_lost)
    s3_store.put_new("mine", b"data")
    with pytest.raises(AlreadyExists):
        s3_store.put_new("mine", b"data")


def test_a_folder_that_cannot_be_synced_at_once_makes_no_writer_lose_to_itself(local_store, monkeypatch):
    """A network file system's server is restarted after the file got its name."""
    fsync, failures = os.fsync, []

    def stale(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) and not failures:
            failures.append(OSError(errno.ESTALE, "stale"))
            raise failures[0]
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", stale)
    local_store.put_new("a/file", b"ours")
    assert failures and local_store.get("a/file") == b"ours"
    with pytest.raises(AlreadyExists):
        local_store.put_new("a/file", b"another's")


def test_a_folder_that_repeats_the_link_meets_its_own_file(local_store, monkeypatch):
    """A network file system whose answer was lost; and one that cannot remove the temporary file."""
    link = os.link

    def link_twice(*names: str, **folders: int) -> None:
        link(*names, **folders)
        link(*names, **folders)

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(os, "link", link_twice)
    monkeypatch.setattr(os, "unlink", stale)
    local_store.put_new("a/file", b"ours")
    assert local_store.get("a/file") == b"ours" and local_store.list("a") == ["a/file"]
    with pytest.raises(AlreadyExists):
        local_store.put_new("a/file", b"another's")


def test_a_file_system_without_hard_links_is_named(local_store, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreUnreachable, match="has no hard links, by which a file is created only once"):
        local_store.check_writable()


def test_a_deleted_folder_leaves_no_half_of_an_upload(moto_store):
    """Of a file that a killed process was uploading."""
    s3 = moto_store._files
    begin = {"Bucket": s3._bucket, "Key": s3._key("trainer/step=00000010/weights")}
    s3._fs.call_s3("create_multipart_upload", **begin)
    s3._fs.call_s3("create_multipart_upload", **begin | {"Key": s3._key("trainer/step=00000020/weights")})
    moto_store.put("trainer/step=00000010/state.json", b"{}")
    moto_store.delete_folder("trainer/step=00000010", first="state.json")
    left = s3._fs.call_s3("list_multipart_uploads", Bucket=s3._bucket)["Uploads"]
    assert [upload["Key"] for upload in left] == [s3._key("trainer/step=00000020/weights")]


def test_a_listing_is_sorted_deep_and_starts_where_asked(store):
    for path in ("b/2", "a/1", "b/x/1", "b/1", "bc/1"):
        store.put(path, b"")
    assert store.list("b") == ["b/1", "b/2", "b/x/1"]
    assert store.list("b", start_after="b/1") == ["b/2", "b/x/1"]
    assert store.list("") == ["a/1", "b/1", "b/2", "b/x/1", "bc/1"]
    assert store.folders("") == ["a", "b", "bc"]
    assert store.folders("b") == ["x"]


def test_a_listing_shows_what_another_writer_put(store):
    other = RunStore(store.url, store.run)
    assert store.list("a") == []
    other.put_new("a/1", b"")
    assert store.list("a") == ["a/1"]


@pytest.mark.s3
def test_an_s3_listing_longer_than_a_page_is_whole(moto_store):
    paths = [f"a/{number}" for number in range(7)]
    for path in paths:
        moto_store.put(path, b"")
    assert moto_store.list("a") == paths
    assert moto_store.list("a", start_after="a/2") == paths[3:]
    for number in range(5):
        moto_store.put(f"f/{number}/x", b"")
    assert moto_store.folders("f") == ["0", "1", "2", "3", "4"]


def test_unfinished_files_of_a_killed_writer_are_not_listed(local_store, tmp_path):
    local_store.put("a/1", b"")
    (tmp_path / "store/run/a/.tmp-0123").write_bytes(b"half")
    assert local_store.list("a") == ["a/1"]


def test_a_folder_travels_whole_and_its_completion_mark_last(store, tmp_path, monkeypatch):
    local = tmp_path / "local"
    (local / "deep").mkdir(parents=True)
    (local / "deep/weights").write_bytes(b"w" * 1000)
    (local / "a-done").write_bytes(b"done")  # sorts first
    order = []
    put_file = store._files.put_file
    monkeypatch.setattr(store._files, "put_file", lambda path, file: (order.append(path), put_file(path, file)))
    store.upload_folder(local, "folder", last="a-done")
    assert order == ["folder/deep/weights", "folder/a-done"]
    store.download_folder("folder", tmp_path / "copy")
    assert (tmp_path / "copy/deep/weights").read_bytes() == b"w" * 1000
    assert (tmp_path / "copy/a-done").read_bytes() == b"done"


def test_deleting_a_folder_begins_with_its_completion_mark(store, monkeypatch):
    store.put("folder/weights", b"w")
    store.put("folder/z-done", b"done")
    seen = []
    delete_folder = store._files.delete_folder
    monkeypatch.setattr(
        store._files, "delete_folder", lambda folder: (seen.extend(store.list(folder)), delete_folder(folder))
    )
    store.delete_folder("folder", first="z-done")
    assert seen == ["folder/weights"]
    assert store.list("folder") == [] and store.folders("") == []


def test_a_writable_store_is_left_as_it_was(store):
    assert store.check_writable() is None  # nothing to warn of
    assert RunStore(store.url, "run").list("") == []


def test_a_folder_that_cannot_be_made_is_unreachable(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreUnreachable, match=r"store: cannot write to file://.*file/store"):
        RunStore((tmp_path / "file/store").as_uri(), "run").check_writable()


@pytest.mark.s3
def test_a_bucket_that_does_not_exist_is_unreachable(s3_url):
    with pytest.raises(StoreUnreachable, match="its bucket does not exist"):
        RunStore("s3://no-such-bucket/x", "run").check_writable()


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_unreachable(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # the discard port: nothing listens
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-id-to-hide")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-to-hide")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StoreUnreachable, match="AWS_ENDPOINT_URL") as failure:
        RunStore("s3://bucket/x", "run").check_writable()
    assert "hide" not in str(failure.value)


@pytest.mark.parametrize("run", ["", "a/b", "..", "a..b", ".hidden", "-a", "a b", "a\n", "ä", "x" * 65])
def test_a_bad_run_name_is_refused(run):
    with pytest.raises(ValueError, match="run: got"):
        RunStore("file:///tmp", run)


@pytest.mark.parametrize("url", ["/tmp/store", "file://relative", "file://", "gs://bucket", "s3://", "", "C:\\store"])
def test_a_url_of_no_known_kind_is_refused(url):
    with pytest.raises(ValueError, match="store: got"):
        RunStore(url, "run")


def test_credentials_in_a_url_are_refused_and_not_repeated():
    with pytest.raises(ValueError, match="credentials") as failure:
        RunStore("s3://id:secret@bucket", "run")
    assert "secret" not in str(failure.value)


@pytest.mark.parametrize(
    ("host", "signs"),
    [("127.0.0.1", False), ("[::1]", False), ("localhost", False), ("10.0.0.7", True), ("localhost.example", True)],
)
def test_only_what_stays_on_this_machine_goes_unsigned(monkeypatch, host, signs):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:9")
    store = RunStore("s3://bucket", "run")
    settings = store._files._fs.s3.meta.config.s3 or {}
    assert settings.get("payload_signing_enabled", True) == signs


def test_a_folder_with_a_space_is_found(tmp_path):
    RunStore((tmp_path / "my store").as_uri(), "run").put("a", b"1")  # …/my%20store
    assert (tmp_path / "my store/run/a").read_bytes() == b"1"


def test_create_run_records_once_and_names_what_differs(store):
    config = {"seed": 0, "train": {"beta": 0.1, "steps": 10}}
    store.check_config(config)  # no run yet: nothing to differ from
    assert store.create_run(config) == config
    assert store.create_run(json.loads(json.dumps(config))) == config
    with pytest.raises(RunConfigMismatch) as failure:
        store.create_run({"seed": 1, "train": {"beta": 0.2, "steps": 10}})
    assert "seed is 0, but 1 is given; train.beta is 0.1, but 0.2 is given." in str(failure.value)
    assert "steps" not in str(failure.value)
    assert json.loads(store.get("run.json")) == config


def test_pyarrow_reads_through_arrow_filesystem(store):
    path = commit_shard(store, make_shard(num_rows=5))
    filesystem, base = store.arrow_filesystem()
    assert ds.dataset(f"{base}/{path}", filesystem=filesystem).count_rows() == 5
    assert not isinstance(filesystem, PyFileSystem), "a scan through Python can deadlock (storage/s3_prefix.py)"


def test_arrow_has_the_credentials_of_a_profiles_role(moto_url, tmp_path, monkeypatch):
    """Arrow itself assumes no role. boto3's clients, s3fs and obstore do."""
    keys = "aws_access_key_id = base\naws_secret_access_key = secret\n"
    role = "role_arn = arn:aws:iam::123456789012:role/trainer\nsource_profile = base\n"
    (tmp_path / "config").write_text(f"[profile base]\n{keys}[profile mine]\n{role}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    made, made_by = [], pyarrow.fs.S3FileSystem
    monkeypatch.setattr(pyarrow.fs, "S3FileSystem", lambda **given: made.append(given) or made_by(**given))
    store = RunStore(moto_url, "run")
    path = commit_shard(store, make_shard(num_rows=5))
    filesystem, base = store.arrow_filesystem()
    assert ds.dataset(f"{base}/{path}", filesystem=filesystem).count_rows() == 5
    assert store.arrow_filesystem()[0] is filesystem and len(made) == 1
    assert made[0]["access_key"] not in ("base", None) and made[0]["session_token"]


def test_a_bucket_of_another_region_is_found(moto, monkeypatch):
    for name, value in moto.items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{uuid.uuid4().hex}"
    boto3.client("s3").create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    assert S3Prefix(f"{bucket}/runs")._region() == "eu-west-1" != moto["AWS_DEFAULT_REGION"]


def test_an_endpoint_with_a_path_is_refused(moto, monkeypatch):
    for name, value in moto.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"{moto['AWS_ENDPOINT_URL']}/s3")
    with pytest.raises(ValueError, match="AWS_ENDPOINT_URL has a path"):
        RunStore("s3://bucket/runs", "run")
