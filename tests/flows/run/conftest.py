"""The stack that the tests of infra/ share, for Prefect's page."""

from tests.infra.conftest import server  # noqa: F401 - a fixture
