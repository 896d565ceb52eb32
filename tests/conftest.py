"""Fixtures that several folders of tests share: a run in a local store, and the same on an S3 server."""

import functools
import getpass
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator

import pytest

from infra.local_s3 import LocalS3, LocalS3Error
from storage.store import RunStore
from tests.moto_server import moto_server

# A shell that starts the tests in the background has them ignore it, and the processes that they start inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)


# torch's own default: else each test's project would compile anew
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")

# Files that take minutes each. They begin first, so that no worker is idle at the end.
LONGEST = (
    "test_end_to_end.py", "test_engine.py", "test_stack.py", "test_gpu_check.py", "test_zero_trainer.py",
    "test_testbed.py", "test_adapters.py", "test_reference_process.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session")
def local_s3(tmp_path_factory) -> Iterator[tuple[LocalS3, dict[str, str]]]:
    """Ceph's radosgw, and the environment variables that reach it."""
    server = LocalS3(tmp_path_factory.mktemp("local-s3"))
    try:
        try:
            environment = server.start()
        except LocalS3Error as error:
            pytest.skip(f"no radosgw here: {error}")
        yield server, environment
    finally:
        server.stop()
        shutil.rmtree(server.folder)


@pytest.fixture(scope="session")
def moto() -> Iterator[dict[str, str]]:
    """The environment variables that reach a moto_server on a free loopback port."""
    with moto_server() as environment:
        yield environment


@pytest.fixture(scope="session")
def moto_with_short_pages() -> Iterator[dict[str, str]]:
    """The same for a server whose listings have pages of two entries."""
    with moto_server(MOTO_S3_DEFAULT_MAX_KEYS="2") as environment:
        yield environment


@functools.cache
def s3_client(**settings: str):
    """One for each server: making a client takes a tenth of a second."""
    import boto3

    return boto3.Session().client("s3", **settings)


def new_bucket(environment: dict[str, str], monkeypatch) -> str:
    """Root URL of a store in a new bucket, with the environment variables set that reach it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"test-{uuid.uuid4().hex}"
    client = s3_client(
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_DEFAULT_REGION"],
    )
    client.create_bucket(Bucket=bucket)
    return f"s3://{bucket}/stores"


@pytest.fixture
def moto_url(moto, monkeypatch) -> str:
    return new_bucket(moto, monkeypatch)


@pytest.fixture
def radosgw_url(local_s3, monkeypatch) -> str:
    return new_bucket(local_s3[1], monkeypatch)


@pytest.fixture(params=["moto", "radosgw"])
def s3_url(request) -> str:
    """Root URL of a store on an S3 server, once each kind; create-if-absent works on both as on AWS."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def local_store(tmp_path) -> RunStore:
    return RunStore((tmp_path / "store").as_uri(), "run")


@pytest.fixture
def s3_store(s3_url) -> RunStore:
    return RunStore(s3_url, "run")


@pytest.fixture
def moto_store(moto_with_short_pages, monkeypatch) -> RunStore:
    """For what only this server's tests can set: here a page of a listing holds two entries."""
    return RunStore(new_bucket(moto_with_short_pages, monkeypatch), "run")


def pytest_xdist_make_scheduler(config, log):
    """With --dist loadscope, tests of infra/ are one group, not one a module: they share a Prefect server.

    So are tests on radosgw, which share its cluster.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if "radosgw" in nodeid.rpartition("[")[2] or "test_outages.py" in nodeid:
                return "radosgw"
            return "tests/infra" if nodeid.startswith("tests/infra/") else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadscope" else None


S3 = [pytest.param(kind, marks=pytest.mark.s3) for kind in ("moto", "radosgw")]


@pytest.fixture(params=["file", *S3])
def store(request) -> RunStore:
    """A new run, once in a local folder and once on each S3 server."""
    if request.param == "file":
        return request.getfixturevalue("local_store")
    return RunStore(request.getfixturevalue(f"{request.param}_url"), "run")


@pytest.fixture
def rms_norms_in_float64(monkeypatch):
    """Those of transformers compute in float32 whatever the weights are; a gradient's 1e-8 needs the real thing."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
    from transformers.models.seed_oss.modeling_seed_oss import SeedOssRMSNorm

    def forward(self, hidden):
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden.dtype)

    for norm in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, SeedOssRMSNorm):
        monkeypatch.setattr(norm, "forward", forward)


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """Temporary files lie on a file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk needs root and mount: {mounted.stderr.strip()}")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)  # a word file may still be open
