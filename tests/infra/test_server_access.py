"""Who reaches the Prefect server that a stack starts: its own clients, and neither web pages nor other accounts.

Claims
- without the authentication string, or with another one, the API answers 401, on websockets too
- `tba watch`, `tba train` and `prefect deployment run` in the project's folder have the string; nobody copies it
- the string is in two files of mode 600 in a folder of mode 700, and on no command line, in no log, in no database
- a page of another origin, or of a name that resolves to this machine, starts no flow; the server's own page does after
  it was given the string once
- a server that has taken our port, before or after our server's time, is not told the string
- a server that an earlier version started without a string is refused, and the message says what to do
- only the folder's own settings name a server, not the active profile; an address that is no URL is no server
- a server of the user's own that wants a string gets PREFECT_API_AUTH_STRING; one that wants none is warned of

Run: pytest tests/infra/test_server_access.py -m slow
"""

import http.server
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from infra import doctor, prefect_server, server_access, stack, stack_state
from infra.processes import listens, stop_processes
from storage.process_identity import Process
from tests.browser import LAPTOP, browser
from tests.infra.project import make_project, processes_of, string_of, tba, unused_url, wait_for

CLOSE_POLL_S = 0.02  # the standard library's half a second passes at each end of a test
# What a page may send without asking (a "simple" request), and what needs the server's consent first.
ATTACKS = """(async () => {
  const body = JSON.stringify({state: {type: 'SCHEDULED'}, parameters: {config: {}}, name: 'attack'});
  const outcomes = [];
  for (const options of [
    {mode: 'no-cors', method: 'POST', body, headers: {'Content-Type': 'text/plain'}},
    {mode: 'no-cors', method: 'POST', body: new Blob([body])},
    {mode: 'cors', method: 'POST', body, headers: {'Content-Type': 'text/plain'}, credentials: 'include'},
    {mode: 'cors', method: 'POST', body, headers: {'Content-Type': 'application/json'}},
    {mode: 'cors', method: 'POST', body, headers: {'Authorization': 'Basic dGJhOng='}},
    {mode: 'cors', method: 'GET'},
  ]) {
    const url = options.method === 'GET' ? 'API/admin/version' : 'API/deployments/DEPLOYMENT/create_flow_run';
    try {
      const answer = await fetch(url, options);
      outcomes.push(answer.type === 'opaque' ? 'opaque' : answer.status);
    } catch { outcomes.push('refused'); }
  }
  return outcomes;
})()"""


@pytest.fixture
def project(tmp_path):
    project = make_project(tmp_path / "project")
    yield project
    stop_processes(processes_of(project))


@contextmanager
def serving(answer):
    """The port of an HTTP server on loopback of which `answer` is the handler's do_GET and do_POST."""
    methods = {"do_GET": answer, "do_POST": answer, "log_message": lambda *_: None}
    handler = type("Handler", (http.server.BaseHTTPRequestHandler,), methods)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(CLOSE_POLL_S,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def says(body: bytes, kind: str = "text/html", wanted: str | None = None, heard: list | None = None):
    """A handler: 200 and the body; 401 without the header `wanted`. Each Authorization header is kept in `heard`."""

    def answer(request) -> None:
        if heard is not None:
            heard.append(request.headers.get("Authorization"))
        allowed = wanted is None or request.headers.get("Authorization") == wanted
        request.send_response(200 if allowed else 401)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer


def attacks_on(url: str, deployment) -> str:
    return ATTACKS.replace("API", url).replace("DEPLOYMENT", str(deployment))


def all_flow_runs(project: Path, url: str) -> list:
    with prefect_server.api(url, stack.credentials(project, url)) as client:
        return client.read_flow_runs()


@pytest.mark.slow
def test_without_the_string_the_api_answers_401(server):
    project, url, _ = server
    paths = ("admin/version", "admin/settings", "health-not", "flow_runs/filter", "docs", "deployments/filter")
    for path in paths:
        for auth in (None, ("tba", "guess"), ("tba", "")):
            assert httpx.post(f"{url}/{path}", json={}, auth=auth).status_code == 401, path
            assert httpx.get(f"{url}/{path}", auth=auth).status_code == 401, path
    name, password = string_of(project).split(":")
    assert httpx.get(f"{url}/admin/version", auth=(name, password)).status_code == 200

    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    socket_url = url.replace("http", "ws")
    for path in ("events/in", "events/out", "logs/out"):
        with pytest.raises(WebSocketException):  # no subprotocol, then a wrong token
            connect(f"{socket_url}/{path}").recv()
        with pytest.raises(WebSocketException), connect(f"{socket_url}/{path}", subprotocols=["prefect"]) as guesser:
            guesser.send(json.dumps({"type": "auth", "token": "guess"}))
            guesser.recv()


@pytest.mark.slow
def test_the_string_is_private_and_in_no_command_log_or_database(server):
    project, _, _ = server
    folder, string = stack.local_folder(project), string_of(project)
    assert len(string) > 40 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in (server_access.STRING_FILE, server_access.SETTINGS_FILE):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    commands = [argument for process in processes_of(project) for argument in process.cmdline()]
    assert commands and not any(string.partition(":")[2] in argument for argument in commands)
    with_string = [
        file.name
        for file in project.rglob("*")
        if file.is_file() and not file.is_symlink() and string.partition(":")[2].encode() in file.read_bytes()
    ]
    assert sorted(with_string) == sorted([server_access.STRING_FILE, server_access.SETTINGS_FILE])
    assert list((folder / "prefect").glob("*.db"))  # which was read, too


@pytest.mark.slow
def test_commands_in_the_projects_folder_have_the_string(server):
    project, url, _ = server
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    config = {"run": "deployed", "store": (project / ".tba").as_uri(), "seed": 0}
    command = ["-m", "prefect", "deployment", "run", "tba/train", "--param", f"config={json.dumps(config)}", "--watch"]
    done = subprocess.run(
        [sys.executable, *command], cwd=project, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Completed" in done.stdout + done.stderr

    heartbeat = project / ".tba" / "watched" / "trainer" / "heartbeat.json"
    training = tba(project, "train", "watched", "--seed", "2", url=url)
    try:
        wait_for(lambda: heartbeat.exists() or training.poll() is not None)
        recorded = {"run": "watched", "seed": 2}  # the stand-in writes none
        (heartbeat.parents[1] / "run.json").write_text(json.dumps(recorded))
        watching = tba(project, "watch", "watched", url=url)
        with watching.stdout as lines:
            assert any("Prefect: " in line or "step 3/4" in line for line in lines), "it never spoke"
            watching.kill()
        from flows.run.watcher import ServerView
        from storage.store import RunStore

        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(project)
            view = ServerView(RunStore(config["store"], "watched"))
            wait_for(lambda: "watched running" in view.words, timeout_s=60)
            view.close()
    finally:
        training.terminate()  # as Ctrl-C
        training.communicate(timeout=240)


@pytest.mark.slow
def test_a_page_of_another_origin_starts_no_flow(server, tmp_path):
    project, url, _ = server
    with prefect_server.api(url, stack.credentials(project, url)) as client:
        deployment = client.read_deployment_by_name(prefect_server.DEPLOYMENT).id
    before = {run.id for run in all_flow_runs(project, url)}
    port = urlsplit(url).port
    rebound = "--host-resolver-rules=MAP rebound.test 127.0.0.1"
    with serving(says(b"<html>another origin</html>")) as other, browser(tmp_path / "profile", rebound) as tab:
        tab.open(f"http://127.0.0.1:{other}/", width=LAPTOP)
        outcomes = tab.result_of(attacks_on(url, deployment))
        assert set(outcomes) <= {"opaque", "refused"}, outcomes  # nothing can be read; what was sent is checked below
        tab.open(f"http://rebound.test:{port}/api/health", width=LAPTOP)
        outcomes = tab.result_of(attacks_on(f"http://rebound.test:{port}/api", deployment))
        assert set(outcomes) <= {401, "opaque"}, outcomes
        assert {run.id for run in all_flow_runs(project, url)} == before

        root = url.removesuffix("/api")
        tab.open(root, width=LAPTOP)
        tab.wait("document.querySelector('input[type=password]') !== null")
        tab.evaluate(f"""(() => {{
            const input = document.querySelector('input[type=password]');
            input.value = {string_of(project)!r};
            input.dispatchEvent(new Event('input', {{bubbles: true}}));
            document.querySelector('form button').click();
        }})()""")
        tab.wait("localStorage.getItem('prefect-password') && !document.querySelector('input[type=password]')")
        tab.open(f"{root}/deployments", width=LAPTOP)  # it does not ask again
        tab.wait("document.body.innerText.includes('train')")


@pytest.mark.slow
def test_only_our_own_origin_is_let_in(server):
    """Without a browser: the headers with which a server lets a page send and read."""
    _, url, _ = server
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    own = url.removesuffix("/api")
    for origin, allowed in ((own, own), ("http://evil.test", None), ("null", None), (f"{own}.evil.test", None)):
        for answer in (
            httpx.options(f"{url}/flow_runs/", headers={"Origin": origin, **ask}),
            httpx.get(f"{url}/health", headers={"Origin": origin}),
        ):
            assert answer.headers.get("Access-Control-Allow-Origin") == allowed, origin


def test_a_string_is_made_once_and_the_files_are_private(tmp_path):
    os.umask(mask := os.umask(0))
    try:
        os.umask(0)
        folder = tmp_path / ".tba" / ".local"
        folder.mkdir(parents=True, mode=0o777)
        folder.parent.chmod(0o755)
        server_access.make_private(folder)
        first = server_access.auth_string(folder)
        assert first == server_access.auth_string(folder) != server_access.auth_string(tmp_path)
        server_access.write_settings(folder, "http://127.0.0.1:1/api", first)
        assert first in (folder / "prefect.toml").read_text()
        server_access.write_settings(folder, "http://127.0.0.1:1/api", None)
        assert first not in (folder / "prefect.toml").read_text()
        assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(mask)


def test_a_folder_that_every_account_may_write_to_is_refused(tmp_path):
    (tmp_path / ".tba").mkdir()
    (tmp_path / ".tba").chmod(0o777)
    with pytest.raises(PermissionError, match="every account may write to it"):
        server_access.make_private(tmp_path / ".tba" / ".local")


def test_git_takes_nothing_of_the_folder(tmp_path):
    server_access.make_private(tmp_path / ".tba" / ".local")
    server_access.auth_string(tmp_path / ".tba" / ".local")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    status = subprocess.run(["git", "status", "--short"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert status.stdout == ""


def test_a_working_folder_gets_prefects_settings_unless_it_has_its_own(tmp_path):
    folder = tmp_path / ".tba" / ".local"
    server_access.make_private(folder)
    server_access.write_settings(folder, "http://127.0.0.1:1/api", "tba:x")
    server_access.link_settings(folder, tmp_path)
    server_access.link_settings(folder, tmp_path)
    assert "tba:x" in (tmp_path / "prefect.toml").read_text()
    assert not Path(os.readlink(tmp_path / "prefect.toml")).is_absolute()
    (tmp_path / "prefect.toml").unlink()
    (tmp_path / "prefect.toml").write_text("theirs")
    server_access.link_settings(folder, tmp_path)
    assert (tmp_path / "prefect.toml").read_text() == "theirs"


def pretend(project: Path, url: str, server: Process) -> None:
    """As if this process were the server that the project's stack started."""
    server_access.make_private(stack.local_folder(project))
    stack_state.write_state(
        stack.local_folder(project),
        stack_state.State(url=url, own_server=True, keep=True, processes={"server": server}),
    )


def test_another_process_at_our_port_is_not_told_the_string(project):
    """Our process lives, but another one listens."""
    heard = []
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        with serving(says(b'"3.7.7"', "application/json", heard=heard)) as port:
            url = f"http://127.0.0.1:{port}/api"
            pretend(project, url, Process.of(sleeper.pid))
            assert stack.credentials(project, url) == {} and not listens(Process.of(sleeper.pid).find(), port)
            prefect_server.version(url, settings=stack.credentials(project, url))
            pretend(project, url, Process.current())  # this process is the one that listens
            assert list(stack.credentials(project, url).values()) == [string_of(project)]
    finally:
        sleeper.kill()
        sleeper.wait()
    assert set(heard) == {None}
    assert stack.credentials(project, url) == {}  # nobody listens any more
    with temporary_settings({PREFECT_API_AUTH_STRING: string_of(project)}):  # as prefect.toml has it
        assert stack.credentials(project, "http://elsewhere:4200/api") == {PREFECT_API_AUTH_STRING: None}


def test_an_open_server_of_an_earlier_version_is_refused(project, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with serving(says(b'"3.7.7"', "application/json")) as port:
        url = f"http://127.0.0.1:{port}/api"
        pretend(project, url, Process.current())
        with pytest.raises(stack.StackError, match=r"without an authentication string.*`tba down`"):
            stack.up(project, keep=False, say=lambda _: None)
        monkeypatch.chdir(project)
        finding = doctor.check_server(project)
        assert finding.state == "warning" and "tba down" in finding.remedy
    (stack.local_folder(project) / "stack.json").unlink()


def test_a_server_of_ones_own_is_used_with_its_string_or_named(project, monkeypatch):
    monkeypatch.chdir(project)
    with serving(says(b'"3.7.7"', "application/json", wanted="Basic bWU6bWluZQ==")) as port:
        url = f"http://127.0.0.1:{port}/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        with pytest.raises(stack.StackError, match=r"asks for an authentication string.*Set PREFECT_API_AUTH_STRING"):
            prefect_server.find(None, lambda _: None, lambda _: {})
        assert "PREFECT_API_AUTH_STRING" in doctor.check_server(project).remedy
        with temporary_settings({PREFECT_API_AUTH_STRING: "me:mine"}):
            assert prefect_server.find(None, lambda _: None, lambda _: {}) == url


@pytest.mark.parametrize(
    ("source", "names", "undo"),
    [
        ("environment", "PREFECT_API_URL", "unset PREFECT_API_URL"),
        (".env", r"\.env", r"remove it from \.env"),
        ("stack", "this project's stack", "run `tba down`"),
    ],
)
def test_a_server_that_does_not_answer_is_named_by_where_its_url_comes_from(source, names, undo, project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(prefect_server, "version", lambda *_, **__: None)
    url = "http://192.0.2.1:4200/api"
    if source == "environment":
        monkeypatch.setenv("PREFECT_API_URL", url)
    elif source == ".env":
        Path(".env").write_text(f"PREFECT_API_URL={url}\n")
    ours = url if source == "stack" else None
    with pytest.raises(stack.StackError, match=f"The server of {names} is {url}.*Start that server, or {undo}"):
        prefect_server.find(ours, lambda _: None, lambda _: {})
    monkeypatch.setattr(stack, "running_url", lambda project: ours)
    assert re.search(undo, doctor.check_server(project).remedy)


def test_a_server_that_asks_for_nothing_is_warned_of():
    said = []
    with serving(says(b'"3.7.7"', "application/json")) as port:
        stack._refuse_open_server(stack_state.State(url=f"http://127.0.0.1:{port}/api"), said.append)
    assert "asks for no authentication string" in said[0]


def test_a_server_at_the_usual_port_that_nobody_named_is_not_used(project, monkeypatch):
    """Another account's server could hand our worker its own code to run."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.chdir(project)
    heard = []
    with serving(says(b'"3.7.7"', "application/json", heard=heard)) as port:
        url = f"http://127.0.0.1:{port}/api"
        server_access.make_private(stack.local_folder(project))
        server_access.write_settings(stack.local_folder(project), url, None)  # our server had this port once
        assert prefect_server.configured() is None
        assert prefect_server.find(None, lambda _: None, lambda _: {}) is None
    assert heard == []


def test_a_taken_port_is_seen():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listens(Process.current().find(), port)
    assert not listens(Process.current().find(), port)
    assert urlsplit(unused_url()).port


def test_the_active_profiles_server_is_not_taken_for_the_folders(tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "prefect.toml"
    file.write_text('[logging]\nlevel = "INFO"\n')
    with temporary_settings({PREFECT_API_URL: "https://profile.example/api"}):
        assert prefect_server.configured() is None
        file.write_text('[api]\nurl = "http://127.0.0.1:4321/api"\n')
        assert prefect_server.configured().url == "http://127.0.0.1:4321/api"
    file.write_text("[api")
    with pytest.raises(prefect_server.StackError, match=r"prefect\.toml cannot be read as Prefect's settings"):
        prefect_server.configured()


def test_an_address_that_is_no_url_answers_nothing():
    assert prefect_server.version("http://127.0.0.1:420O/api") is None
    assert not prefect_server.is_open("http://127.0.0.1:420O/api")
