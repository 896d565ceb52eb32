"""A site of hosts, for the tests that run on one."""

import pytest

from tests.hosts.network import Network
from tests.hosts.site import Site, missing


@pytest.fixture
def site(tmp_path):
    if reason := missing():
        pytest.skip(reason)
    network = Network(tmp_path)
    site = Site(network, tmp_path)
    try:
        site.start()
        yield site
    finally:
        site.close()
