"""Claims about the URL of a store. Run: pytest tests/storage/test_store_url.py

- a folder, and a bucket with or without a prefix, are stores
- a URL that other programs would read otherwise is refused: empty parts, parameters, fragments, control characters
- a URL that lacks its slashes is no folder of this machine
- credentials are refused wherever they stand, and never repeated; nor are a signature and a token
"""

import pytest

from flows.cli.common import store_url
from flows.config import RunConfig
from storage.errors import NotFound
from storage.store import RunStore, read_url
from storage.store_url import one_spelling, parse_store_url


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("file:///a/b", ("file", "/a/b")),
        ("file:///a%20b/%3F", ("file", "/a b/?")),
        ("file:///home/me@work:1/[1]/", ("file", "/home/me@work:1/[1]")),
        ("s3://b", ("s3", "b")),
        ("s3://my.bucket-1/", ("s3", "my.bucket-1")),
        ("s3://bucket/pre@fix:1/ü/x=1", ("s3", "bucket/pre@fix:1/ü/x=1")),
    ],
)
def test_what_a_store_is(url, root):
    assert parse_store_url(url) == root


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("s3://b/p/", "s3://b/p"),
        ("s3://b/", "s3://b"),
        ("file:///a/b/", "file:///a/b"),
        ("file:///a/x/../b", "file:///a/b"),
        ("file:///a%20b", "file:///a%20b"),
    ],
)
def test_a_store_has_one_spelling(url, same, monkeypatch):
    assert one_spelling(url) == same == RunConfig(run="run", store=url).store
    monkeypatch.setenv("TBA_STORE", url)
    assert RunConfig(run="run").store == same


def test_the_variable_takes_a_folder_too(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TBA_STORE", "runs")
    assert RunConfig(run="run").store == (tmp_path / "runs").as_uri()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://b//p", "got 's3://b//p'.*no empty part"),
        ("s3://b/p//q", "no empty part"),
        ("s3://b/../p", "no empty part"),
        ("s3://b/./p", "no empty part"),
        ("s3://b/p\\q", "backslash"),
        ("s3://b/p?versionId=1", "got 's3://b/p' with '[?]' or '#' after it.*%3F"),
        ("s3://b/p#x", "got 's3://b/p' with"),
        ("file:///a?b", "%3F"),
        ("file:///a#b", "%23"),
        ("s3://b/p\n", "control character"),
        ("s3://b\t/p", "control character"),
        (" s3://b/p", "begins or ends with a space"),
        ("s3://b ucket/p", "a bucket's name has letters"),
        ("s3://-b/p", "a bucket's name"),
        ("s3://[/p", "cannot be read"),
    ],
)
def test_a_url_that_others_read_otherwise_is_refused(url, message):
    with pytest.raises(ValueError, match=f"^store: .*{message}.*"):
        RunStore(url, "run")


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:sec-ret@bucket/p",
        "s3://AKIA:sec/ret@bucket/p",
        "s3://AKIA:sec-ret/p",
        "s3://:sec-ret@bucket",
        "s3://sec-ret@bucket",
        "https://AKIA:sec-ret@s3.example/bucket",
        "https://s3.example:9000/sec-ret",
        "file://me:sec-ret@host/folder",
        "gs://b/p?X-Amz-Signature=sec-ret",
        "s3://b/p?X-Amz-Security-Token=sec-ret#x",
        "s3:/AKIA:sec-ret@bucket/p",
        "s3:AKIA:sec-ret@bucket",
        "s3:///AKIA:sec-ret@bucket",
        "AKIA:sec-ret@bucket/p",
        "s3://AKIA%3Asec-ret%40bucket/p",
        "s3://bucket;AKIA=sec-ret/p",
        "s3://AKIA:sec-ret\u2100@b/p",  # urlsplit's own message repeats the host
    ],
)
def test_a_secret_is_refused_and_not_repeated(url):
    with pytest.raises(ValueError) as failure:
        RunStore(url, "run")
    told = []
    error = failure.value
    while error is not None and not error.__suppress_context__:
        told.append(str(error))
        error = error.__cause__ or error.__context__
    told.append(str(failure.value))
    assert not any("sec" in text or "ret" in text.replace("secret", "") or "AKIA" in text for text in told)


def test_a_file_with_a_space_is_read(tmp_path):
    (tmp_path / "my rows.parquet").write_bytes(b"rows")
    assert read_url((tmp_path / "my rows.parquet").as_uri()) == b"rows"
    (tmp_path / "snapshots").mkdir()  # as in the cache of the Hugging Face Hub
    (tmp_path / "snapshots" / "link.parquet").symlink_to("../my rows.parquet")
    assert read_url((tmp_path / "snapshots" / "link.parquet").as_uri()) == b"rows"
    with pytest.raises(NotFound, match="my%20other"):
        read_url((tmp_path / "my other").as_uri())


def test_a_url_without_its_slashes_names_no_folder():
    for url in ("s3:/bucket/prefix", "s3:bucket", "S3:/bucket", "file:relative"):
        with pytest.raises(ValueError, match="a store is file:///"):
            RunStore(store_url(url), "run")
