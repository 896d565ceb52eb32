"""The local stack with a real Prefect server and worker; a stand-in flow takes the place of training.

Claims
- `tba up` on a taken port takes another one; a second up starts nothing new
- `tba train` in another project uses a server that is there, and leaves it running, its own worker stopped
- a worker in another folder runs the deployments of a folder that it does not have, as on another host
- a flow's Searchers and machines are in its own work queue, also after another folder has deployed to the server
- `tba up` keeps flow runs in a PostgreSQL that the environment names, and gives its URL to the server alone
- a flow that fails ends `tba train` with status 1, the reason and the worker's log
- Ctrl-C stops the flow run that this command submitted, and says how to resume
- a server of ours that stops answering while it is deployed to is replaced, and what it ran with it; but not while
  another `tba train` relies on it: then nothing is stopped, and the error says what to do
- a start that fails on a server that was there stops the worker that it started, nothing else
- a recycled pid (another start time) is never taken for ours; setting the clock makes no process another

Run: pytest tests/infra/test_stack.py -m slow
"""

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from prefect.client.schemas.actions import DeploymentUpdate

from flows.run import flow_runs
from infra import prefect_server, processes, stack, stack_state
from infra.prefect_server import StackError
from infra.processes import stop_processes
from infra.stack_state import locked_state, read_state
from storage.process_identity import Process
from tests import postgres
from tests.infra.project import make_project, processes_of, states, string_of, tba, unused_url, wait_for


@pytest.fixture
def project(tmp_path):
    project = make_project(tmp_path / "project")
    yield project
    stop_processes(processes_of(project))


@pytest.mark.slow
def test_a_taken_port_is_left_alone_and_a_second_up_starts_nothing(server, monkeypatch):
    project, url, taken = server
    monkeypatch.setenv("PREFECT_API_URL", url)
    assert f":{taken}/" not in url
    before = {process.pid for process in processes_of(project)}
    assert stack.up(project, keep=True) == url
    assert {process.pid for process in processes_of(project)} == before


@pytest.mark.slow
def test_train_uses_the_server_that_is_there_and_leaves_it(server, project):
    first, url, _ = server
    command = tba(project, "train", "quick", url=url, string=string_of(first))
    output, _ = command.communicate(timeout=240)
    assert command.returncode == 0, output
    assert f"Using the Prefect server at {url}" in output
    assert "step 3/4" in output and "0.750" in output  # progress, then the summary
    assert processes_of(project) == []
    assert prefect_server.version(url, settings=stack.credentials(first, url))

    again = tba(project, "train", "quick", url=url, string=string_of(first))
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0 and "finished" in output and "0.750" in output


@pytest.mark.slow
def test_a_worker_runs_flows_in_its_own_folder_wherever_they_were_deployed(server, tmp_path, monkeypatch):
    from prefect.deployments import run_deployment

    first, url, _ = server
    monkeypatch.setenv("PREFECT_API_URL", url)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", string_of(first))
    deployer, other = make_project(tmp_path / "deployer"), make_project(tmp_path / "other")
    queue = stack.work_queue(deployer)
    stack.up(deployer, keep=False)
    stack.leave(deployer)
    shutil.rmtree(deployer)
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", prefect_server.WORK_POOL]
    worker = subprocess.Popen([*command, "--work-queue", queue], cwd=other)
    try:
        with prefect_server.api(url, stack.credentials(first, url)) as client:
            config = {"store": (tmp_path / "store").as_uri(), "run": "elsewhere", "seed": 0}
            flow_run = run_deployment(
                prefect_server.DEPLOYMENT, parameters={"config": config}, timeout=240, client=client
            )
        assert flow_run.state.is_completed(), flow_run.state
    finally:
        worker.terminate()
        worker.wait()
    beat = json.loads((tmp_path / "store" / "elsewhere" / "trainer" / "heartbeat.json").read_text())
    assert beat["folder"] == str(other)


@pytest.mark.slow
def test_a_child_is_in_its_parents_queue_whichever_folder_deployed_last(server, monkeypatch):
    """Unless its deployment was given another queue than tba/train's."""
    project, url, _ = server
    searcher = "search/searcher"
    parent = SimpleNamespace(flow=None, flow_run=SimpleNamespace(work_queue_name="of-an-earlier-folder"))
    assert flow_runs.queue_of_child(searcher) is None, "the flow was called without a server"
    monkeypatch.setattr("prefect.context.FlowRunContext.get", lambda: parent)
    with prefect_server.api(url, stack.credentials(project, url)) as client:
        deployment = client.read_deployment_by_name(searcher)
        by_last = deployment.work_queue_name  # of this project's folder, or of a test's that deployed after it
        assert by_last == client.read_deployment_by_name(prefect_server.DEPLOYMENT).work_queue_name
        assert flow_runs.queue_of_child(searcher) == "of-an-earlier-folder"
        client.update_deployment(deployment.id, DeploymentUpdate(work_queue_name="large-gpus"))
        try:
            assert flow_runs.queue_of_child(searcher) is None
        finally:
            client.update_deployment(deployment.id, DeploymentUpdate(work_queue_name=by_last))


@pytest.mark.slow
def test_a_server_that_died_is_started_again_beside_the_runs_that_it_left(server, monkeypatch):
    project, url, _ = server
    monkeypatch.setenv("PREFECT_API_URL", url)
    said = []
    flow = subprocess.Popen(["sleep", "600"], env={**os.environ, stack.STACK_VARIABLE: str(project)})
    worker = stack_state.read_state(stack.local_folder(project)).processes["worker"].find()
    stop_processes([stack_state.read_state(stack.local_folder(project)).processes["server"].find()])
    with monkeypatch.context() as patch, pytest.raises(stack.StackError, match="refused"):
        patch.setattr(stack, "_deploy", lambda *_: "refused")
        stack.up(project, keep=True)
    assert flow.poll() is None and worker.is_running() and not stack.is_ours(project, url)  # the new server alone ends
    assert stack.up(project, keep=True, say=said.append) == url
    assert "The Prefect server died. The worker and its runs go on." in said
    assert (
        flow.poll() is None and stack_state.read_state(stack.local_folder(project)).processes["worker"].find() == worker
    )
    with prefect_server.api(url, stack.credentials(project, url)) as client:
        assert client.read_deployment_by_name(prefect_server.DEPLOYMENT).work_queue_name == stack.work_queue(project)
    stop_processes([psutil.Process(flow.pid)])


def test_a_living_server_has_more_than_one_requests_time_to_answer(project, monkeypatch):
    answers = [None, None, "3.7.7"]
    monkeypatch.setattr(stack, "_version", lambda *_: answers.pop(0) if answers else None)
    living = stack_state.State("http://127.0.0.1:1/api", True, processes={"server": Process.of(os.getpid())})
    assert stack._late_answer(project, living) == living.url and not answers
    monkeypatch.setattr(stack, "HUNG_AFTER_S", 0.5)
    assert stack._late_answer(project, living) is None
    assert stack._late_answer(project, stack_state.State("http://127.0.0.1:1/api")) is None


def test_a_silent_server_of_the_users_own_costs_no_running_flow(project, monkeypatch):
    """The worker here runs flows for it. It may be restarting."""
    worker, url = (
        subprocess.Popen(["sleep", "600"], env=os.environ | {stack.STACK_VARIABLE: str(project)}),
        unused_url(),
    )
    try:
        with locked_state(stack.local_folder(project)) as state:
            state.url, state.processes, state.keep = url, {"worker": Process.of(worker.pid)}, True
        monkeypatch.setenv("PREFECT_API_URL", url)
        with pytest.raises(StackError, match=r"did not start, does not answer, and the worker here runs flows for it"):
            stack.up(project, keep=True, say=lambda _: None)
        assert worker.poll() is None
    finally:
        worker.kill()
        worker.wait()


def test_a_server_is_stopped_though_the_disk_is_full(project, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    server = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(stack.server_access, "write_settings", full)
    state = stack_state.State("http://127.0.0.1:1/api", True, processes={"server": Process.of(server.pid)})
    with pytest.raises(OSError, match="no space left"):
        stack._stop(project, state)
    assert server.wait(30) is not None


def test_the_stack_is_left_though_nothing_can_be_said(project, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "no space left")

    server = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(stack.server_access, "write_settings", lambda *_: None)
    with locked_state(stack.local_folder(project)) as state:
        state.users, state.processes = [Process.current()], {"server": Process.of(server.pid)}
    stack.leave(project, say=full)
    assert server.wait(30) is not None


def test_the_string_of_a_server_that_died_is_not_sent_to_another(project, monkeypatch):
    """prefect's commands in the project's folder read it from prefect.toml."""
    folder, other = stack.local_folder(project), "http://192.0.2.1:4200/api"
    stack.server_access.make_private(folder)
    stack.server_access.write_settings(folder, "http://127.0.0.1:1/api", stack.server_access.auth_string(folder))
    monkeypatch.setattr(stack.prefect_server, "find", lambda *_: other)
    monkeypatch.setattr(stack.prefect_server, "is_open", lambda _: False)
    monkeypatch.setattr(
        stack.prefect_server, "create_work_pool", lambda *_: pytest.fail((folder / "prefect.toml").read_text())
    )
    with pytest.raises(pytest.fail.Exception) as written:
        stack.up(project, keep=True, say=lambda _: None)
    assert "auth_string" not in str(written.value) and other in str(written.value)


def test_a_folder_that_is_not_ours_is_named(tmp_path):
    (tmp_path / ".tba").write_text("a file where the folder would be")  # root, as which tests may run, may write all
    with (
        pytest.raises(StackError, match=r"/\.tba/\.local cannot be written to"),
        locked_state(tmp_path / ".tba/.local"),
    ):
        pass
    with pytest.raises(StackError, match=r"stack\.json cannot be read"):
        read_state(tmp_path / ".tba" / ".local")


def test_a_folders_queue_has_a_name_that_prefect_takes():
    assert re.fullmatch(r"R-D--1--[0-9a-f]{8}", stack.work_queue(Path("/home/R&D <1%")))
    assert stack.work_queue(Path("/a/mine")) != stack.work_queue(Path("/b/mine"))


@pytest.fixture
def database():
    """The URL of a PostgreSQL server, and its folder."""
    if reason := postgres.missing():
        pytest.skip(reason)
    folder, port = Path(tempfile.mkdtemp(dir="/tmp")), prefect_server.free_port(5432)
    try:
        for command in postgres.start_commands(folder, port):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        yield postgres.url(port)
        subprocess.run(postgres.stop_command(folder), check=True, stdout=subprocess.DEVNULL)
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.apart  # tests/hosts, which CI runs, has a server on PostgreSQL
def test_up_uses_a_postgresql_that_the_environment_names(database, project, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", unused_url())
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", database)
    url = stack.up(project, keep=True)
    try:
        environments = [process.environ() for process in processes_of(project)]
        servers = [each for each in environments if "PREFECT_SERVER_API_AUTH_STRING" in each]
        assert servers and all(each["PREFECT_API_DATABASE_CONNECTION_URL"] == database for each in servers)
        others = [each for each in environments if each not in servers]
        assert others and database not in [value for each in others for value in each.values()]
        output, _ = tba(project, "train", "quick", url=url, string=string_of(project)).communicate(timeout=240)
        assert "0.750" in output, output
        assert asyncio.run(_names_of_flow_runs(database)) == ["quick"]
        assert not list(stack.local_folder(project).rglob("prefect.db"))
    finally:
        stack.down(project)


async def _names_of_flow_runs(database: str) -> list[str]:
    import asyncpg

    connection = await asyncpg.connect(database.replace("+asyncpg", ""))
    try:
        return [row["name"] for row in await connection.fetch("SELECT name FROM flow_run")]
    finally:
        await connection.close()


@pytest.mark.slow
def test_a_failed_flow_is_told_with_its_reason(server):
    project, url, _ = server
    command = tba(project, "train", "broken", "--seed", "1", url=url)
    output, _ = command.communicate(timeout=240)
    assert command.returncode == 1
    assert "the stand-in was told to fail" in output
    assert "worker.log" in output
    wait_for(lambda: len(processes_of(project)) == 2)  # server and worker: the flow's process ends, too


@pytest.mark.slow
def test_interrupting_stops_the_flow_run_and_says_how_to_resume(server, monkeypatch):
    project, url, _ = server
    monkeypatch.setenv("PREFECT_API_URL", url)
    command = tba(project, "train", "patient", "--seed", "2", url=url)
    heartbeat = project / ".tba" / "patient" / "trainer" / "heartbeat.json"
    wait_for(lambda: heartbeat.exists() or command.poll() is not None)
    assert command.poll() is None, command.communicate()[0]
    before = {process.pid for process in stack_state.read_state(stack.local_folder(project)).processes.values()}
    command.send_signal(signal.SIGINT)
    output, _ = command.communicate(timeout=240)
    assert command.returncode == 130
    assert "tba train patient --seed 2" in output
    assert {process.pid for process in processes_of(project)} == before  # the stack that was there, and no flow
    assert states(project, url, "patient") == ["Cancelled"]


@pytest.mark.slow
def test_a_failed_start_stops_what_it_started_and_a_hanging_server_is_replaced_unless_a_run_waits(project, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", unused_url())
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 3)
    url = stack.up(project, keep=True)
    monkeypatch.setattr(stack, "ANSWER_TIMEOUT_S", 2)
    monkeypatch.setattr(stack, "HUNG_AFTER_S", 3)
    before = set(processes_of(project))
    hung = stack_state.read_state(stack.local_folder(project)).processes["server"].find()

    flow = subprocess.Popen(["sleep", "600"], env={**os.environ, stack.STACK_VARIABLE: str(project)})
    before.add(psutil.Process(flow.pid))

    hung.suspend()
    with stack_state.locked_state(stack.local_folder(project)) as state:
        state.users.append(Process.of(flow.pid))
    with monkeypatch.context() as patch, pytest.raises(stack.StackError, match=rf"\(pid {flow.pid}\) waits for it"):
        patch.setattr(prefect_server, "VERSION_TIMEOUT_S", 2)
        stack.up(project, keep=False)
    assert set(processes_of(project)) == before
    with stack_state.locked_state(stack.local_folder(project)) as state:
        state.users.clear()

    hung.resume()
    deploy, said = stack._deploy, []
    stop_processes([stack_state.read_state(stack.local_folder(project)).processes["worker"].find()])
    monkeypatch.setattr(stack, "_deploy", lambda *_: "refused")
    with pytest.raises(stack.StackError, match="refused"):
        stack.up(project, keep=False)
    assert set(processes_of(project)) == {hung, psutil.Process(flow.pid)}  # only the worker was this start's

    def hang_and_deploy(project: Path, state: stack_state.State) -> str | None:
        if hung.is_running():
            hung.suspend()
            monkeypatch.setattr(prefect_server, "VERSION_TIMEOUT_S", 2)
        return deploy(project, state)

    monkeypatch.setattr(stack, "_deploy", hang_and_deploy)
    assert stack.up(project, keep=False, say=said.append) == url
    assert any("The Prefect server does not answer any more. Starting another" in line for line in said)
    assert not before & set(processes_of(project))
    with prefect_server.api(url, stack.credentials(project, url)) as client:
        assert client.read_deployment_by_name(prefect_server.DEPLOYMENT).work_queue_name == stack.work_queue(project)
    stack.leave(project)
    assert stack.down(project) == ["server", "worker"]  # `tba up` had asked for it
    assert not processes_of(project)
