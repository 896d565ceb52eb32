"""Fixtures that several folders of tests share: a run in a local store, and the same on an S3 server."""

import logging
import uuid

import pytest

from storage.store import RunStore


@pytest.fixture(scope="session")
def s3_server():
    """Address of a moto_server on a free loopback port; create-if-absent works on it as on AWS."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_url(s3_server, monkeypatch) -> str:
    """Root URL of a store in a new bucket, with AWS's environment variables set to reach it."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"test-{uuid.uuid4().hex}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/stores"


@pytest.fixture
def local_store(tmp_path) -> RunStore:
    return RunStore((tmp_path / "store").as_uri(), "run")


@pytest.fixture
def s3_store(s3_url) -> RunStore:
    return RunStore(s3_url, "run")


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def store(request) -> RunStore:
    """A new run, once in a local folder and once on the S3 server."""
    return request.getfixturevalue({"file": "local_store", "s3": "s3_store"}[request.param])


@pytest.fixture
def rms_norms_in_float64(monkeypatch):
    """Those of transformers compute in float32 whatever the weights are; a gradient's 1e-8 needs the real thing."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def forward(self, hidden):
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden.dtype)

    for norm in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)
