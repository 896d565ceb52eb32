"""The local stack: a Prefect server, the work pool `tba`, the deployments of prefect.yaml and a worker.

    up()      reuses the server that answers, else starts one on loopback; deploys; starts our worker if it is missing
    leave()   the end of `tba train`: stops the stack unless `tba up` or another `tba train` still uses it
    down()    stops exactly the processes that this project started

`tba up` starts daemons in sessions of their own. `tba train` without a running stack starts children in its own process
group, so that a SIGKILL to the group ends the whole stack, flow processes included (Prefect's process worker opens no
sessions). `.tba/.local/stack.json` records each started process with its start time, so that a process with a reused
pid is never signalled. A server that is started here requires an authentication string, which worker, deployments and
commands have (infra/server_access.py).
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from infra import prefect_server, server_access
from infra.machine import local_folder
from infra.prefect_server import StackError
from infra.processes import find_processes, listens, stop_processes
from infra.stack_state import State, locked_state, read_state, write_state
from storage.process_identity import Process

SERVER_START_TIMEOUT_S = 180  # 9 to 14 s on an idle machine of two cores; many times that while it is busy
HUNG_AFTER_S = 30  # without an answer; a busy machine's server may need more than one request's time
SERVER_TRIES = 3  # at a port that is free, until another process takes it
DEPLOY_TRIES = 3
ANSWER_TIMEOUT_S = 30  # of a deploying request, which is made three times; an idle server answers in milliseconds
WORKER_QUERY_S = 2  # a run of minutes should not wait for Prefect's default, 10 s
NO_WORKER_VARIABLE = "TBA_NO_WORKER"  # set: no worker is started here, because others run the flows
_DATABASE_VARIABLES = ("PREFECT_API_DATABASE_", "PREFECT_SERVER_DATABASE_")
STACK_VARIABLE = "TBA_STACK"  # the project's folder, in the environment of each process of its stack


def work_queue(project: Path) -> str:
    """This folder's own work queue: its worker does not run the flows of another folder on the same server."""
    name = re.sub(r"[^\w.-]", "-", project.name)  # Prefect refuses some characters
    return f"{name}-{zlib.crc32(bytes(project)):08x}"


def is_work_queue(name: str) -> bool:
    """Whether this is the name of some folder's work queue."""
    return re.fullmatch(r".*-[0-9a-f]{8}", name) is not None


def up(project: Path, *, keep: bool, say: Callable[[str], None] = print) -> str:
    """Starts the stack's missing parts; returns its API's URL. keep: as daemons, until down(); else as children, until
    leave().

    Raises: StackError: a part did not start; the processes that this call started are stopped."""
    with locked_state(local_folder(project)) as state:
        before = dict(state.processes)
        try:
            _bring_up(project, state, keep or state.keep, say)
        except BaseException:
            _stop_started(project, state, before)
            raise
        if keep:
            state.keep = True
        else:
            state.users.append(Process.current())
        return state.url


def _stop_started(project: Path, state: State, before: dict[str, Process]) -> None:
    """Stop the processes that are not in `before`."""
    started = {name for name, process in state.processes.items() if process != before.get(name)}
    if started == {"server"} and "worker" in state.processes:  # found alive, with its runs, when its server had died
        _stop_server(project, state, state.processes.pop("server"))
    elif "server" in started:
        _stop(project, state)
    elif started and (worker := state.processes.pop("worker").find()):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended; the error that is being raised has the reason
            stop_processes([*worker.children(recursive=True), worker])


def leave(project: Path, say: Callable[[str], None] = print) -> None:
    """Ends the use of an up(keep=False): stops the stack, unless it is still in use."""
    with locked_state(local_folder(project)) as state:
        state.users = [user for user in state.users if user.pid != os.getpid()]
        if state.processes and not state.keep and not state.users:
            with contextlib.suppress(OSError):  # a closed pipe, or a full disk: the stack is stopped nevertheless
                say("Stopping the local stack.")
            _stop(project, state)


def down(project: Path) -> list[str]:
    """Stops this project's stack, even if it is in use. Returns the names of its processes that ran."""
    if not local_folder(project).exists():
        return []
    with locked_state(local_folder(project)) as state:
        names = sorted(state.processes)
        _stop(project, state)
        state.keep = False
        return names


def check(project: Path) -> None:
    """Raises: StackError: a process of the stack has died."""
    state = read_state(local_folder(project))
    for name, process in state.processes.items():
        if process.find() is None:
            raise StackError(f"The Prefect {name} (pid {process.pid}) has died.\n{log_tail(project, name)}")


def running_url(project: Path) -> str | None:
    """The API of the server that this project's stack uses; None if no process of the stack runs."""
    state = read_state(local_folder(project))
    return state.url if any(process.find() for process in state.processes.values()) else None


def is_ours(project: Path, url: str) -> bool:
    """Whether the server at this URL is the one that this project's stack started."""
    state = read_state(local_folder(project))
    server = state.processes.get("server")
    process = server.find() if server and state.url == url else None
    return process is not None and listens(process, urlsplit(url).port)


def credentials(project: Path, url: str) -> dict:
    """Settings of Prefect's client for the server at this URL: our authentication string, if the server is ours.

    For another server they are the user's own settings, and never our string."""
    from prefect.settings import PREFECT_API_AUTH_STRING

    if is_ours(project, url):
        return {PREFECT_API_AUTH_STRING: server_access.auth_string(local_folder(project))}
    ours = server_access.known_string(local_folder(project))  # prefect.toml has it while our server runs
    return {PREFECT_API_AUTH_STRING: None} if ours and PREFECT_API_AUTH_STRING.value() == ours else {}


def page_hint(project: Path, url: str) -> str:
    """How to open the page of the server at this URL, in parentheses; empty if the server is not ours."""
    file = local_folder(project) / server_access.STRING_FILE
    return f" (the page asks once for the string in {file})" if is_ours(project, url) else ""


def log_tail(project: Path, name: str, num_lines: int = 30) -> str:
    """The last lines of the log of `server` or `worker` (the worker's carries its flows' output), and its path."""
    path = local_folder(project) / f"{name}.log"
    lines = path.read_text(errors="replace").splitlines()[-num_lines:] if path.exists() else []
    return "\n".join([f"--- the last lines of {path}", *lines])


# --- starting ---------------------------------------------------------------------------------------------------------


def _bring_up(project: Path, state: State, keep: bool, say: Callable[[str], None], again: bool = True) -> None:
    ours = state.url if state.processes else None
    url = prefect_server.find(ours, say, partial(credentials, project)) or _late_answer(project, state)
    if url is None:
        if "worker" in state.processes and not state.own_server:
            raise StackError(
                f"The Prefect server at {state.url}, which this project did not start, does not answer, and the worker "
                "here runs flows for it. Start that server and repeat the command, or run `tba down`: runs resume."
            )
        if "server" in state.processes:  # alive, yet it does not answer
            _stop_hung(project, state, say)
        _start_server(project, state, keep, say)
    else:
        say(f"Using the Prefect server at {url}.")
        state.url, state.own_server = url, "server" in state.processes
        if not state.own_server and (local_folder(project) / server_access.SETTINGS_FILE).exists():
            server_access.write_settings(local_folder(project), url, None)  # the string of a server of ours that died
        _refuse_open_server(state, say)
    pool_type = prefect_server.create_work_pool(state.url, credentials(project, state.url))
    has_others = pool_type != "process" or os.environ.get(NO_WORKER_VARIABLE)  # other types have workers of their own
    if "worker" not in state.processes and not has_others:
        name = f"{work_queue(project)}@{socket.gethostname()}"
        command = ["worker", "start", "--pool", prefect_server.WORK_POOL, "--type", "process", "--name", name]
        command += ["--work-queue", work_queue(project), "--work-queue", "default"]
        _start(project, state, "worker", command, keep)
    failure = _deploy(project, state)  # while the worker starts: each takes about four seconds, most of it imports
    if failure and again and state.own_server and _version(project, state.url) is None:
        # Prefect 3.7's server can hang for ever if it reads automations while one is created (Prefect's issue 23055).
        # 3.8.6 does not, but its worker opens sessions, so a kill of our process group would leave flows running.
        _stop_hung(project, state, say)
        return _bring_up(project, state, keep, say, again=False)
    if failure:
        raise StackError(failure)
    if (worker := state.processes.get("worker")) and worker.find() is None:
        raise StackError(f"The Prefect worker died while starting.\n{log_tail(project, 'worker')}")


def _start_server(project: Path, state: State, keep: bool, say: Callable[[str], None]) -> None:
    folder = local_folder(project)
    preferred = _port_of_survivors(state, say)
    if preferred is None:
        own = prefect_server.configured()
        preferred = (own and prefect_server.is_loopback(own.url) and urlsplit(own.url).port) or 4200
        _stop_workers(project, None)  # their server no longer runs
        state.processes.clear()
    string, port = server_access.auth_string(folder), prefect_server.free_port(preferred)
    for tries_left in reversed(range(SERVER_TRIES)):
        state.url, state.own_server = f"http://127.0.0.1:{port}/api", True
        say(f"Starting a Prefect server at {state.url} (about ten seconds).")
        command = ["server", "start", "--host", "127.0.0.1", "--port", str(port), "--analytics-off"]
        more = server_access.server_environment(state.url, string) | _database_settings()
        process = _start(project, state, "server", command, keep, more)
        if _answers(project, state, process):
            break
        taken, port = port, prefect_server.free_port(port)
        if process.find() or port == taken or not tries_left:
            raise StackError(f"The Prefect server did not start.\n{log_tail(project, 'server')}")
        # another folder's server, started at the same time, was faster
    server_access.write_settings(folder, state.url, string)
    server_access.link_settings(folder, project)
    if port != preferred:
        say(f"Port {preferred} is taken by another process; the server has port {port}.")


def _port_of_survivors(state: State, say: Callable[[str], None]) -> int | None:
    """The port of our server that died, for the next one, if the worker lives: its runs find that one there."""
    worker, port = state.processes.get("worker"), state.own_server and urlsplit(state.url).port
    if worker is None or worker.find() is None or not port or prefect_server.free_port(port) != port:
        return None
    say("The Prefect server died. The worker and its runs go on.")
    return port


def _late_answer(project: Path, state: State) -> str | None:
    """The URL of our living server, if it answers within `HUNG_AFTER_S`."""
    server, deadline = state.processes.get("server"), time.monotonic() + HUNG_AFTER_S
    while server is not None and server.find() is not None and time.monotonic() < deadline:
        if _version(project, state.url) is not None:
            return state.url
        time.sleep(0.2)
    return None


def _answers(project: Path, state: State, server: Process) -> bool:
    """Whether our server came up; false once it has died, or after SERVER_START_TIMEOUT_S."""
    deadline = time.monotonic() + SERVER_START_TIMEOUT_S
    while not is_ours(project, state.url) or _version(project, state.url) is None:
        if server.find() is None or time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _refuse_open_server(state: State, say: Callable[[str], None]) -> None:
    """Raises: StackError: our server answers without an authentication string. Warns of another server that does."""
    if not prefect_server.is_open(state.url):
        return
    if state.own_server:
        raise StackError(
            f"The Prefect server of this project at {state.url} was started by an earlier version of tba, without an "
            "authentication string: web pages and other accounts of this machine could start flows. Run `tba down`, "
            "then this command again. Runs that it stops resume by the same `tba train`."
        )
    say(
        f"WARNING: {state.url} asks for no authentication string: anyone who reaches it can run code here "
        "(docs/security.md)."
    )


def _version(project: Path, url: str) -> str | None:
    return prefect_server.version(url, settings=credentials(project, url))


def _deploy(project: Path, state: State) -> str | None:
    """Deploys prefect.yaml. Returns the failure in words, or None.

    Prefect answers 503 while another of its writes locks its SQLite file; on a busy machine that takes longer than its
    client retries. So the deployment, which may be repeated, is tried `DEPLOY_TRIES` times.
    """
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    command += ["--prefect-file", str(prefect_server.deployments_file(project))]
    environment = _environment(project, state)
    environment |= {"PREFECT_API_REQUEST_TIMEOUT": str(ANSWER_TIMEOUT_S), "PREFECT_CLIENT_MAX_RETRIES": "2"}
    for _ in range(DEPLOY_TRIES):
        done = subprocess.run(
            command, cwd=project, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if not done.returncode:
            return None
        if "503 Service Unavailable" not in done.stdout + done.stderr:
            break
    return f"`prefect deploy --all` failed.\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def _start(
    project: Path, state: State, name: str, command: list[str], keep: bool, more: dict[str, str] | None = None
) -> Process:
    """Starts `prefect <command>`, which logs to <name>.log, and records it at once. more: environment variables."""
    with open(local_folder(project) / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", *command],
            cwd=project,
            env=_environment(project, state) | (more or {}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=keep,
        )
    state.processes[name] = started = Process.of(process.pid)
    write_state(local_folder(project), state)
    return started


def _database_settings() -> dict[str, str]:
    """The settings of a database of the user's own, which only the server gets: its URL may have a password."""
    return {name: value for name, value in os.environ.items() if name.startswith(_DATABASE_VARIABLES)}


def _environment(project: Path, state: State) -> dict[str, str]:
    """The environment of the stack's processes."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in _database_settings()},
        "PREFECT_API_URL": state.url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_WORKER_QUERY_SECONDS": str(WORKER_QUERY_S),
        # flows import this project's packages, whatever folder the worker opens their processes in
        "PYTHONPATH": os.pathsep.join(filter(None, (str(project), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",  # logs are read while they are written
        "TBA_WORK_QUEUE": work_queue(project),  # read by prefect.yaml
        STACK_VARIABLE: str(project),
    }
    if state.own_server:  # another server may need credentials in the user's own PREFECT_HOME
        folder = local_folder(project)
        environment["PREFECT_HOME"] = str(folder / "prefect")
        environment["PREFECT_API_AUTH_STRING"] = server_access.auth_string(folder)
    return environment


def _stop_hung(project: Path, state: State, say: Callable[[str], None]) -> None:
    """Stops our hung server and the stack. Raises: StackError: another `tba train` uses it."""
    if state.users:
        raise StackError(
            f"This project's Prefect server does not answer, and `tba train` (pid {state.users[0].pid}) waits for it. "
            f"Run `tba down`; runs resume by the same `tba train`.\n{log_tail(project, 'server')}"
        )
    say("The Prefect server does not answer any more. Starting another; its runs resume by the same `tba train`.")
    _stop(project, state)


# --- stopping ---------------------------------------------------------------------------------------------------------


def _stop(project: Path, state: State) -> None:
    """Stops worker and flows, then the server, so that flows can report their end."""
    entry = state.processes.pop("server", None)
    _stop_workers(project, entry)
    state.processes.clear()
    _stop_server(project, state, entry)


def _stop_server(project: Path, state: State, entry: Process | None) -> None:
    try:
        if state.own_server:  # clients must not send the string to a later process at this port
            server_access.write_settings(local_folder(project), state.url, None)
    finally:  # also on a full disk
        if entry and (process := entry.find()):
            stop_processes([process])


def _stop_workers(project: Path, spared: Process | None) -> None:
    """Stops all processes of the stack except `spared`, the server; also orphaned flow processes and their children."""
    processes = find_processes(STACK_VARIABLE, str(project))
    stop_processes([process for process in processes if spared is None or process.pid != spared.pid])
