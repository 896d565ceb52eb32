"""The start of a stack without a real server: its deployments, and its server's port.

Claims
- a Prefect server whose database is locked (503) is asked again; another failure is returned at once
- a server that stays locked is given up after so many tries, with Prefect's own output
- a server whose port another process takes while it starts is started at another port; one that dies otherwise is not
- a worker is started, unless TBA_NO_WORKER says that others run the flows
- a working folder's prefect.yaml is deployed if it deploys tba/train, and else the package's own

Run: pytest tests/infra/test_deploy.py
"""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra import prefect_server, stack, stack_state

PACKAGED = Path(stack.__file__).with_name("prefect.yaml")
LOCKED = "Error while applying deployment: Server error '503 Service Unavailable' for url 'http://127.0.0.1/api'"


@pytest.fixture
def deploy(monkeypatch, tmp_path):
    """Deploys with a `prefect deploy` that fails with these errors in turn; returns the failure and the calls made."""

    def deployed(*errors: str):
        left, calls = list(errors), []

        def run(command, **_):
            calls.append(command)
            error = left.pop(0) if left else ""
            return subprocess.CompletedProcess(command, int(bool(error)), stdout="", stderr=error)

        monkeypatch.setattr(stack.subprocess, "run", run)
        return stack._deploy(tmp_path, stack_state.State(url="http://127.0.0.1:1/api")), len(calls)

    return deployed


def test_a_locked_server_is_asked_again(deploy):
    assert deploy(LOCKED) == (None, 2)
    assert deploy(LOCKED, LOCKED) == (None, 3)


def test_another_failure_is_returned_at_once(deploy):
    failure, calls = deploy("prefect.yaml: no such flow", LOCKED)
    assert "no such flow" in failure and calls == 1


def test_a_server_that_stays_locked_is_given_up(deploy):
    failure, calls = deploy(*[LOCKED] * 9)
    assert "503 Service Unavailable" in failure and calls == stack.DEPLOY_TRIES


@pytest.mark.parametrize("theirs", [None, "", "[]", "deployments: 3", "deployments: [{name: t, entrypoint: a.py:f}]"])
def test_a_folder_without_our_deployments_gets_the_packages(tmp_path, theirs):
    if theirs is not None:
        (tmp_path / "prefect.yaml").write_text(theirs)
    assert prefect_server.deployments_file(tmp_path) == PACKAGED


def test_a_folders_own_copy_is_deployed(tmp_path):
    own = tmp_path / "prefect.yaml"
    own.write_text(PACKAGED.read_text())
    assert prefect_server.deployments_file(tmp_path) == own


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "prefect.yaml").write_text("deployments: [")
    with pytest.raises(stack.StackError, match=r"prefect\.yaml is no YAML"):
        prefect_server.deployments_file(tmp_path)


@pytest.fixture
def start_server(monkeypatch, tmp_path):
    """Starts a server that dies at these ports, which then are taken or not; returns URL and lines that were shown."""

    def started(dies_at: set[int], is_taken: bool):
        stack.server_access.make_private(stack.local_folder(tmp_path))
        state, shown, taken = stack_state.State(), [], set()

        def start(project, state, name, command, keep, more):
            port = int(command[command.index("--port") + 1])
            if is_taken and port in dies_at:
                taken.add(port)
            return SimpleNamespace(find=lambda: None if port in dies_at else "alive")

        monkeypatch.setattr(stack, "_start", start)
        monkeypatch.setattr(stack, "_stop_workers", lambda *_: None)
        monkeypatch.setattr(stack, "is_ours", lambda project, url: not any(f":{port}/" in url for port in dies_at))
        monkeypatch.setattr(stack, "_version", lambda *_: "3.7.0")
        monkeypatch.setattr(stack.prefect_server, "configured", lambda: None)
        monkeypatch.setattr(stack.prefect_server, "free_port", lambda port: port + 1 if port in taken else port)
        stack._start_server(tmp_path, state, False, shown.append)
        return state.url, shown

    return started


def test_a_server_whose_port_is_taken_meanwhile_gets_another(start_server):
    url, shown = start_server({4200, 4201}, is_taken=True)
    assert url == "http://127.0.0.1:4202/api"
    assert shown[-1] == "Port 4200 is taken by another process; the server has port 4202."
    with pytest.raises(stack.StackError, match="did not start"):
        start_server({4200, 4201, 4202}, is_taken=True)


def test_a_server_that_dies_is_not_started_again(start_server):
    with pytest.raises(stack.StackError, match="did not start"):
        start_server({4200}, is_taken=False)


@pytest.mark.parametrize("started", [True, False])
def test_a_worker_is_started_unless_others_run_the_flows(monkeypatch, tmp_path, started):
    url, names = "http://elsewhere:4200/api", []
    monkeypatch.setattr(stack.prefect_server, "find", lambda *_: url)
    monkeypatch.setattr(stack.prefect_server, "create_work_pool", lambda *_: "process")
    monkeypatch.setattr(stack, "_refuse_open_server", lambda *_: None)
    monkeypatch.setattr(stack, "_deploy", lambda *_: None)
    monkeypatch.setattr(stack, "_start", lambda project, state, name, command, keep: names.append(name))
    monkeypatch.setenv(stack.NO_WORKER_VARIABLE, "" if started else "1")
    assert stack.up(tmp_path, keep=False, say=lambda _: None) == url
    assert names == ["worker"] * started
