"""A project whose flows are stand-ins, `tba` in it, and what its stack runs."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from infra import prefect_server, server_access, stack
from infra.processes import find_processes

REPOSITORY = Path(__file__).parents[2]

# Trains in no time, except: seed 1 fails, seed 2 hangs.
STAND_IN_TRAIN = """
import json, time, urllib.parse
from pathlib import Path
from prefect import flow

@flow(name="tba")
def tba(config: dict) -> None:
    run = Path(urllib.parse.urlsplit(config["store"]).path) / config["run"]
    (run / "trainer").mkdir(parents=True, exist_ok=True)
    beat = run / "trainer" / "heartbeat.json"
    state = {"state": "training", "step": 3, "steps": 4, "reward_mean": 0.5, "folder": str(Path.cwd())}
    beat.write_text(json.dumps(state))
    if config["seed"] == 1:
        raise ValueError("the stand-in was told to fail")
    if config["seed"] == 2:
        time.sleep(600)
    time.sleep(2)
    (run / "summary.json").write_text(json.dumps({"run": config["run"], "steps": 4, "accuracy_after": 0.75}))
"""
# Of every other deployment: it does nothing.
STAND_IN = """
from prefect import flow

@flow(name="{name}")
def {function}(store: str, run: str) -> None:
    pass
"""
# The command without the input check, which needs a model.
COMMAND = """
import sys, types
passes = lambda config: []
sys.modules["flows.run.preflight"] = types.SimpleNamespace(check_inputs_in_a_process=passes, check_memory=passes)
from flows.cli.app import main
main()
"""


def make_project(folder: Path) -> Path:
    (folder / "flows").mkdir(parents=True)
    settings = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())
    settings["deployments"] = [each for each in settings["deployments"] if "parameters" not in each]  # no presets
    deployments = re.sub(
        r"entrypoint: flows\.(\w+):", r"entrypoint: flows/\1.py:", yaml.safe_dump(settings, sort_keys=False)
    )
    (folder / "prefect.yaml").write_text(deployments)
    shutil.copy(REPOSITORY / "prefect.toml", folder, follow_symlinks=False)
    entrypoints = set(re.findall(r"entrypoint: (\S+):(\w+)", deployments))
    for file, function in entrypoints:
        (folder / file).write_text(STAND_IN.format(name=Path(file).stem, function=function))
    (folder / "flows" / "train.py").write_text(STAND_IN_TRAIN)
    return folder


def string_of(project: Path) -> str:
    """The authentication string of the server that this project's stack started."""
    return server_access.auth_string(stack.local_folder(project))


def tba(project: Path, *arguments: str, url: str, string: str | None = None) -> subprocess.Popen:
    """`tba ...` in the project's folder, as the leader of a process group as a shell's job is.

    string: the authentication string of another project's server."""
    script = project / "command" / "run_tba.py"  # its folder, not the project's, is first on its import path
    script.parent.mkdir(exist_ok=True)
    script.write_text(COMMAND)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PREFECT_API_URL": url}
    if string:
        environment["PREFECT_API_AUTH_STRING"] = string
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/api"


def wait_for(condition, timeout_s: float = 240):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.2)
    raise TimeoutError


def processes_of(project: Path) -> list[psutil.Process]:
    return find_processes(stack.STACK_VARIABLE, str(project))


def states(project: Path, url: str, run: str) -> list[str]:
    """The names of the states of the flow runs of tba/train that trained this run, in order of start."""
    from prefect.client.schemas.filters import FlowRunFilter

    with prefect_server.api(url, stack.credentials(project, url)) as client:
        flow_runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(name={"any_": [run]}))
    return [r.state_name for r in sorted(flow_runs, key=lambda r: r.created)]
