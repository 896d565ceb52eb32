"""Claims about infra/machine.py. Run: pytest tests/infra/test_machine.py

- threads are divided among processes, within a container's limit of cores
- results name the processor, or the architecture where the system does not name one
- torch's compiled code lies in a folder that no other account can have made
- the code's version is the checkout's commit, and of an installed wheel the wheel's version, also if the wheel lies
  in another project's checkout
"""

import os
import platform
import stat
import subprocess
from importlib import metadata
from pathlib import Path

from infra import machine


def test_results_name_the_processor(tmp_path):
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nmodel\t\t: 85\nmodel name\t: A Processor @ 2.50GHz\nflags\t\t: fpu\n")
    assert machine.processor_name(listing) == "A Processor @ 2.50GHz"
    listing.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")  # as on ARM
    assert machine.processor_name(listing) == machine.processor_name(tmp_path / "missing") == platform.machine() != ""


def test_compiled_code_is_kept_in_a_private_folder_unless_the_user_names_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/named")
    machine.keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/named"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    machine.keep_compiled_code_private()
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.is_relative_to(tmp_path) and stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_code_version_is_the_commit_of_this_checkout_and_no_others(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    commit = ["git", "-C", tmp_path, *author, "commit", "-q", "--allow-empty", "-m", "theirs"]
    subprocess.run(commit, check=True)
    site_packages = tmp_path / "venv" / "site-packages"
    site_packages.mkdir(parents=True)
    monkeypatch.setattr(machine, "CHECKOUT", site_packages)
    assert machine.code_version() == f"tba {metadata.version('tba')}"
    monkeypatch.setattr(machine, "CHECKOUT", tmp_path)
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert head.stdout.startswith(machine.code_version())


def test_threads_are_shared_among_processes_and_never_none(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine, "core_limit", lambda: 4)
    assert [machine.cpu_threads(number) for number in (1, 2, 3, 9)] == [4, 2, 1, 1]
