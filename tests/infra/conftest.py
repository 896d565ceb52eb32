"""Fixtures that the tests of infra/ share: a project with a stack, started once."""

import shutil
import socket

import pytest
from prefect.context import SettingsContext, get_settings_context
from prefect.settings import Settings

from infra import stack
from tests.infra.project import make_project, processes_of


@pytest.fixture(autouse=True)
def no_server_of_this_folder(tmp_path_factory, monkeypatch):
    """Prefect reads prefect.toml of the working folder, where a run that trains here has its server's address."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    context = get_settings_context()
    with SettingsContext(profile=context.profile, settings=Settings()):
        yield


# Not for the other packages' tests: it takes a tenth of a core. tests/conftest.py keeps this package in one process.
@pytest.fixture(scope="package")
def server(tmp_path_factory):
    """A project with a stack that was started on a taken port: (project, URL, the port that was taken)."""
    project = make_project(tmp_path_factory.mktemp("first"))
    with pytest.MonkeyPatch.context() as patch, socket.socket() as occupant:
        occupant.bind(("127.0.0.1", 0))
        taken = occupant.getsockname()[1]
        patch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{taken}/api")
        url = stack.up(project, keep=True)
        patch.undo()
        try:
            yield project, url, taken
        finally:
            assert stack.down(project) == ["server", "worker"]
            assert processes_of(project) == []
            assert not (stack.local_folder(project) / "stack.json").exists()
            shutil.rmtree(project)
