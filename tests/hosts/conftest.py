"""A site of hosts, for the tests that run on one."""

import contextlib

import pytest

from tests.hosts.network import Network
from tests.hosts.site import Site, missing


@pytest.fixture
def site(tmp_path):
    if reason := missing():
        pytest.skip(reason)
    with contextlib.closing(Network(tmp_path)) as network, contextlib.closing(Site(network, tmp_path)) as site:
        site.start()
        yield site
