"""The backend for a store on S3. Only storage/store.py uses it; storage/local_folder.py is the other backend and states
the promises of both.
"""

import functools
import ipaddress
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow
import pyarrow.fs

from storage.errors import OddAnswer, error_code
from storage.patience import patience_s, patient

# Fields that every answer of S3 to these operations has. A proxy's page, an empty body and other XML lack them;
# botocore would take such an answer to a listing as an empty listing, and to a put as success.
_ALWAYS_THERE = {
    "ListObjectsV2": ("Name", "IsTruncated"),
    "GetObject": ("ETag",),
    "HeadObject": ("ETag",),
    "PutObject": ("ETag",),
    "UploadPart": ("ETag",),
    "CreateMultipartUpload": ("UploadId",),
    "CompleteMultipartUpload": ("ETag",),
}
# Tries of one request, by botocore and by s3fs, for a lost part of a large file; storage/patience.py repeats
# operations. A server that accepts connections and does not answer costs 15 s a try.
_TRIES = 2
_CONNECTIONS = 40  # at once: 32 reads of shards (storage/store.py), and other requests; botocore's default is 10

logger = logging.getLogger(__name__)


class S3Prefix:
    """Objects under `bucket/prefix`, through s3fs. Address and credentials come from AWS's environment and files."""

    def __init__(self, root: str, limit_s: float | None = None):
        """limit_s: how long an operation is repeated while its error may pass, in seconds; None: patience_s()."""
        self._root = root
        self.patience_s = patience_s() if limit_s is None else limit_s
        self._bucket, _, self._prefix = root.partition("/")
        self._warned = False
        self.renew()

    def renew(self) -> None:
        """Connects: a new instance of s3fs reads environment and files now; no keys or listings are cached."""
        fs = _connect()
        if _is_loopback(urlsplit(fs.s3.meta.endpoint_url).hostname):
            # Over http, client and server hash each byte for the signature, which is half the cost of a put. Between
            # two processes of one machine a checksum suffices, as over https.
            fs = _connect(s3={"payload_signing_enabled": False})
        if urlsplit(fs.s3.meta.endpoint_url).path.strip("/"):
            raise ValueError("AWS_ENDPOINT_URL has a path, which Arrow's client cannot use; give scheme, host and port")
        fs.s3.meta.events.register("after-call.s3", _check_answer)
        self._fs = fs
        for found in ("_credentials", "_arrow", "_obstore"):
            self.__dict__.pop(found, None)

    @patient("write")
    def put(self, path: str, data: bytes, check: Callable[[], object]) -> None:
        check()
        self._fs.pipe_file(f"{self._root}/{path}", data)

    def put_new(self, path: str, data: bytes) -> None:
        # A server that ignores create-if-absent would replace an object. This check leaves a moment in which it can.
        if self.exists(path):
            raise FileExistsError(path)
        self._create(path, data, uuid.uuid4().hex)

    @patient("create")
    def _create(self, path: str, data: bytes, mark: str) -> None:
        # if the answer to a put was lost, the repeated put finds its own object, which it recognises by the mark
        try:
            self._fs.pipe_file(f"{self._root}/{path}", data, mode="create", Metadata={"writer": mark})
        except OSError as error:
            if not _lost_the_race(error):
                raise
            try:
                is_ours = self._holds(path, data, mark)
            except FileNotFoundError:  # nothing was stored: S3 also refuses a put while another write is in progress
                raise error from error.__cause__
            if not is_ours:
                raise FileExistsError(path) from error

    def _holds(self, path: str, data: bytes, mark: str) -> bool:
        """Whether the object has this mark; on a server that drops marks, whether it has the data."""
        found = self._head(path).get("Metadata", {}).get("writer")
        return found == mark if found else self.get(path) == data

    def is_exclusive(self, probe: str) -> bool:
        """Writes, reads and removes an object. Returns whether the server honours create-if-absent."""
        self.put_new(probe, b"probe")
        try:
            self._create(probe, b"second probe", uuid.uuid4().hex)
            replaced = True
        except FileExistsError:
            replaced = self.get(probe) != b"probe"
        self.delete(probe)
        return not replaced

    @patient("upload")
    def put_file(self, path: str, local: Path) -> None:
        # s3fs would send ten parts of 50 MB at once, and other requests would wait for them: 17 s for a checkpoint
        self._fs.put_file(str(local), f"{self._root}/{path}", max_concurrency=2)

    @patient("read")
    def get(self, path: str) -> bytes:
        return self._fs.cat_file(f"{self._root}/{path}", max_concurrency=1)  # by default s3fs asks for the size first

    def get_fast(self, path: str) -> bytes | None:
        """The content, by obstore, in an eighth of s3fs's processor time and one request. It is not checked.

        None: it failed, and `get` says why. What comes may be a proxy's page.
        """
        import obstore

        try:
            return obstore.get(self._obstore, path).bytes().to_bytes()
        except (OSError, obstore.exceptions.BaseError) as error:
            if not isinstance(error, FileNotFoundError) and not self._warned:
                self._warned = True  # once: if it stays, every sync and query is slow, and nothing else tells
                logger.warning("obstore cannot read %s; s3fs reads in its place, which takes longer: %r", path, error)
            return None

    @patient("download")
    def get_file(self, path: str, local: Path) -> None:
        self._fs.get_file(f"{self._root}/{path}", str(local))

    def exists(self, path: str) -> bool:
        with suppress(FileNotFoundError):
            return bool(self._head(path))
        return False

    @patient("look up")
    def _head(self, path: str) -> dict:
        try:
            return self._fs.call_s3("head_object", Bucket=self._bucket, Key=self._key(path))
        except OSError as error:
            if error_code(error) not in ("400", "403"):
                raise
            # an answer to HEAD has no body with the reason, such as an expired token; an answer to GET has
            return self._fs.call_s3("get_object", Bucket=self._bucket, Key=self._key(path), Range="bytes=0-0")

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}".lstrip("/")

    @patient("list")
    def files(self, folder: str, start_after: str) -> list[str]:
        # StartAfter skips earlier paths on the server, at no cost. A server may ignore it, or list without an order.
        skip = {"StartAfter": self._key(start_after)} if start_after else {}
        start = len(self._key(""))
        paths = {item["Key"][start:] for page in self._pages(folder, **skip) for item in page.get("Contents", [])}
        return sorted(path for path in paths if path > start_after)

    @patient("list")
    def folders(self, folder: str) -> list[str]:
        prefix = self._key(f"{folder}/" if folder else "")
        pages = self._pages(folder, Delimiter="/")
        return sorted({item["Prefix"][len(prefix) : -1] for page in pages for item in page.get("CommonPrefixes", [])})

    def _pages(self, folder: str, **arguments) -> Iterator[dict]:
        prefix = self._key(f"{folder}/" if folder else "")
        while True:
            page = self._fs.call_s3("list_objects_v2", Bucket=self._bucket, Prefix=prefix, **arguments)
            names = [item["Key"] for item in page.get("Contents", [])]
            names += [item["Prefix"] for item in page.get("CommonPrefixes", [])]
            if not all(name.startswith(prefix) for name in (page.get("Prefix") or prefix, *names)):
                raise OddAnswer(f"the listing is not of {prefix}")
            yield page
            if not page["IsTruncated"]:
                return
            token, before = page.get("NextContinuationToken"), arguments.get("ContinuationToken")
            if token in (None, before):
                raise OddAnswer(f"the listing of {prefix} is not complete, but has no token for the next page")
            arguments["ContinuationToken"] = token

    @patient("delete")
    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):  # S3 deletes a missing object without an error; other servers may say 404
            self._fs.rm_file(f"{self._root}/{path}")

    def delete_folder(self, folder: str) -> None:
        for path in self.files(folder, ""):
            self.delete(path)
        self._abort_uploads(folder)

    def _abort_uploads(self, folder: str) -> None:
        """Deletes parts of files that killed processes were uploading: no listing shows them, and they are billed."""
        from botocore.exceptions import BotoCoreError

        with suppress(OSError, BotoCoreError):  # refused, or the server is away: the parts cost room and nothing else
            found = self._fs.call_s3("list_multipart_uploads", Bucket=self._bucket, Prefix=f"{self._key(folder)}/")
            for upload in found.get("Uploads", ()):
                self._fs.call_s3(
                    "abort_multipart_upload", Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )

    def arrow_filesystem(self) -> tuple[pyarrow.fs.FileSystem, str]:
        return self._arrow(self._credentials and self._credentials.get_frozen_credentials()), self._root

    @functools.cached_property
    def _credentials(self):
        """botocore's, from AWS's standard places, which it renews before they expire. None: there are none."""
        import botocore.session

        return botocore.session.Session().get_credentials()

    @functools.cached_property
    def _obstore(self):
        from obstore.store import S3Store

        found, credentials = self._fs.s3.meta, self._credentials

        def current() -> dict:
            now = credentials.get_frozen_credentials()
            keys = {"access_key_id": now.access_key, "secret_access_key": now.secret_key, "token": now.token}
            return keys | {"expires_at": datetime.now(UTC) + timedelta(minutes=5)}

        limits_s = {"connect_timeout": self._fs.connect_timeout, "read_timeout": self._fs.read_timeout, "timeout": 300}
        return S3Store(
            self._bucket,
            prefix=self._prefix,
            region=found.region_name,
            endpoint=found.endpoint_url,
            credential_provider=current if credentials else None,
            skip_signature=credentials is None,
            client_options={name: timedelta(seconds=limit_s) for name, limit_s in limits_s.items()}
            | {"allow_http": urlsplit(found.endpoint_url).scheme == "http"},
            retry_config={"max_retries": 0},
        )

    @functools.cached_property
    def _arrow(self) -> Callable[..., pyarrow.fs.FileSystem]:
        """Arrow's own client with these credentials of botocore's, the same one until they change.

        s3fs below Arrow deadlocks: pyarrow starts a scan with the interpreter's lock held and waits for a lock of
        Arrow's, whose holder waits for the interpreter's to open a file. Address, region and credentials are those
        that s3fs found. Arrow itself does not assume a profile's role.
        """
        found = self._fs.s3.meta
        address = urlsplit(found.endpoint_url)
        is_aws = address.netloc.endswith((".amazonaws.com", ".amazonaws.com.cn"))

        @functools.lru_cache(1)
        def client(credentials) -> pyarrow.fs.FileSystem:
            return pyarrow.fs.S3FileSystem(
                access_key=credentials and credentials.access_key,
                secret_key=credentials and credentials.secret_key,
                session_token=credentials and credentials.token,
                region=self._region() if is_aws else found.region_name,
                scheme=address.scheme,
                endpoint_override=None if is_aws else address.netloc,
                connect_timeout=self._fs.connect_timeout,
                request_timeout=self._fs.read_timeout,
                retry_strategy=pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=_TRIES),
            )

        return client

    def _region(self) -> str:
        """The bucket's region, to which botocore follows S3 from the configured one, and Arrow does not."""
        answer = self._fs.call_s3("head_bucket", Bucket=self._bucket)
        return answer.get("BucketRegion") or self._fs.s3.meta.region_name

    def local_path(self, path: str) -> None:
        return None


@functools.cache
def _descriptions():
    """What AWS's services answer, by botocore. Read once: each reading takes a third of a second."""
    import botocore.session

    return botocore.session.get_session().get_component("data_loader")


def _connect(**config):
    import s3fs  # half a second, and a local store needs none of it
    from aiobotocore.session import get_session

    session = get_session()  # a new one looks for the credentials anew
    session.register_component("data_loader", _descriptions())
    config |= {"retries": {"total_max_attempts": _TRIES}, "max_pool_connections": _CONNECTIONS}
    fs = s3fs.S3FileSystem(session=session, use_listings_cache=False, skip_instance_cache=True, config_kwargs=config)
    fs.retries = _TRIES
    return fs


def _check_answer(http_response, parsed: dict, model, **_) -> None:
    """Raises OddAnswer if an answer lacks fields that S3's answers have. botocore calls it with each answer."""
    missing = [name for name in _ALWAYS_THERE.get(model.name, ()) if name not in parsed]
    if missing and http_response.status_code < 300:
        kind = http_response.headers.get("Content-Type")
        raise OddAnswer(f"the answer to {model.name} has no {missing[0]}; its Content-Type is {kind}")


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _lost_the_race(error: OSError) -> bool:
    """Whether a create-if-absent put failed because the object exists; stores report this in different ways."""
    # 409: another writer was in the middle of it
    codes = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")
    return isinstance(error, FileExistsError) or error_code(error) in codes
