"""The wheel alone trains: installed, and used in a folder that is no checkout.

Claims
- a wheel of what git tracks, unpacked, runs `tba train` to its end in an empty folder, then verify, sql and report
- the code version of what it stores is the wheel's; `prefect` in that folder gets its settings; git ignores runs

The dependencies are this environment's. A wheel in an environment of its own is tried by hand (docs/operating.md).
Run: pytest tests/test_wheel.py -m apart
"""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from infra.local_s3 import free_ports
from tests.character_model import save_character_model

REPOSITORY = Path(__file__).parents[1]
WITHOUT_VLLM = "import sys\n\nsys.modules['vllm'] = None\n"
SMALL = ["--steps", "2", "--set", "task.num_heldout=8", "--set", "trackers="]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the content of a wheel that was built of the tracked files."""
    source, wheels, unpacked = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "unpacked"))
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(lambda name: os.path.lexists(REPOSITORY / name), listed.stdout.splitlines()):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name, follow_symlinks=False)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels, source]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = wheels.glob("tba-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    return unpacked


@pytest.mark.apart
def test_it_trains_in_a_folder_that_is_no_checkout(installed, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (installed / "sitecustomize.py").write_text(WITHOUT_VLLM)  # what Python compiles there is not in the folder
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    save_character_model(tmp_path / "model")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "TBA_"))} | {
        "PYTHONPATH": str(installed),
        "PREFECT_API_URL": f"http://127.0.0.1:{free_ports(1)[0]}/api",
    }

    def tba(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "flows.cli", *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    assert "Accuracy after training" in tba("train", "w", "--model", str(tmp_path / "model"), *SMALL)
    assert tba("verify", "w").startswith("0 faults in ")
    versions = tba("sql", "w", "SELECT DISTINCT code_version FROM trajectories", "--format", "csv")
    assert versions.splitlines()[1:] == [f"tba {metadata.version('tba')}"]
    assert tba("report", "w").strip().endswith("report.html")
    assert tba("down").startswith("No process of this project's stack was running")
    untracked = subprocess.run(["git", "status", "--short"], cwd=folder, capture_output=True, text=True, check=True)
    assert untracked.stdout.split() == ["??", "prefect.toml"]
