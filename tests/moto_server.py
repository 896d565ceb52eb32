"""moto's S3 in a process of its own: flask, which it imports, has proxies that vLLM's start trips over."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from infra.local_s3 import free_ports

START_S = 60


@contextlib.contextmanager
def moto_server(**settings: str) -> Iterator[dict[str, str]]:
    """The environment variables that reach a new server on a free loopback port; `settings` are variables of its own.

    Raises: TimeoutError: it does not answer.
    """
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(
        command, env=os.environ | settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
    )
    try:
        wait_until_it_listens(server, port)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


def wait_until_it_listens(server: subprocess.Popen, port: int) -> None:
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"moto_server on port {port}: no answer in {START_S} s, exit status {server.poll()}")
