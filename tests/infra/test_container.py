"""infra/container/Containerfile, and the image that `make image` builds from it.

Claims
- it names no registry and no package index, and no default of an argument has an address
- what it copies exists and is not left out by .containerignore; every version comes from the two files that pin them
- dependencies are installed before the code is copied, and the final stage sees neither index nor certificates
- it ends as a user that is not root, whose working folder and model cache are that user's
- apart: the image, of a base that debootstrap made, trains the embedded model without a network; verify finds no fault

Run: pytest tests/infra/test_container.py; with -m apart the last one, which needs root and takes some 20 minutes
"""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FILE = REPOSITORY / "infra" / "container" / "Containerfile"
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
ADDRESS = re.compile(r"\w+://|\b[\w-]+(\.[\w-]+)*\.(com|dev|io|net|org)\b|\blocalhost\b")
LABEL = "org.opencontainers."  # the namespace of labels, which is no address
TOOLS = ("buildah", "debootstrap", "make", "podman", "runc")


def instructions() -> list[list[str]]:
    """[instruction, its text], in order; a continued line is one."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    return [line.split(maxsplit=1) for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def stages() -> dict[str, list[list[str]]]:
    """The instructions of each stage by its name; of the last one: "final"."""
    found = {}
    for name, text in instructions():
        if name == "FROM":
            found[text.split(" AS ")[1] if " AS " in text else "final"] = stage = []
        elif found:
            stage.append([name, text])
    return found


def texts(stage: str, instruction: str) -> list[str]:
    return [text for name, text in stages()[stage] if name == instruction]


def test_it_has_no_address():
    assert ADDRESS.search(FILE.read_text().replace(LABEL, "")) is None


@pytest.mark.parametrize("address", ["docker.io/debian", "https://" + "mirror/simple", "ghcr.io", "localhost/base"])
def test_addresses_are_recognised(address):
    assert ADDRESS.search(f"ARG BASE={address}")


def test_the_base_is_an_argument_and_index_and_wheels_have_no_default():
    assert texts("dependencies", "ARG") == ["EXTRA=cpu", "INDEX", "WHEELS"]
    assert [text.split()[0] for name, text in instructions() if name == "FROM"] == [
        "${BASE}",
        "python",
        "dependencies",
        "python",
    ]


def test_what_is_copied_from_the_checkout_exists_and_is_not_ignored():
    ignored = {line for line in (REPOSITORY / ".containerignore").read_text().splitlines() if not line.startswith("#")}
    copied = [text for name, text in instructions() if name == "COPY" and not text.startswith("--from")]
    for source in (source for text in copied for source in text.split()[:-1]):
        assert (REPOSITORY / source).exists(), source
        assert source not in ignored


def test_every_package_of_the_wheel_is_copied():
    packages = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    copied = {source for text in texts("wheel", "COPY") for source in text.split()[:-1]}
    assert {package.split(".")[0] for package in packages} <= copied


def test_versions_are_pinned():
    """Of each install from an index; the wheel itself comes without dependencies and without an index."""
    installs = [
        command
        for name, text in instructions()
        for command in text.split("&&")
        if name == "RUN" and re.search(r"\bpip install\b", command)
    ]
    uv, dependencies, wheel = installs
    assert "-c constraints.txt" in uv
    assert "-c constraints.txt" in dependencies and "--overrides overrides.txt" in dependencies
    assert "--offline" in wheel and "--no-deps" in wheel


def test_a_change_of_code_reinstalls_no_dependency():
    assert texts("dependencies", "COPY") == ["pyproject.toml infra/constraints.txt infra/overrides.txt ./"]
    final = [text for name, text in stages()["final"] if name in ("COPY", "RUN")]
    assert final[0].startswith("--from=dependencies ") and "from=wheel" not in final[0] and "from=wheel" in final[1]


def test_the_final_stage_sees_neither_index_nor_certificates():
    """The history of an image shows the arguments of its own stage."""
    for stage in ("python", "final"):
        text = " ".join(" ".join(each) for each in stages()[stage])
        assert not re.search(r"INDEX|WHEELS|secret", text), stage


def test_it_ends_as_a_user_with_a_fixed_uid_and_shows_the_help():
    assert re.search(r"useradd --uid 1000 .*--home-dir /work tba", FILE.read_text())
    final = stages()["final"]
    assert [text for name, text in final if name == "USER"] == ["1000:1000"]
    assert max(i for i, (name, _) in enumerate(final) if name == "RUN") < final.index(["USER", "1000:1000"])
    assert final[-1] == ["CMD", '["tba", "--help"]']
    assert "ENTRYPOINT" not in {name for name, _ in instructions()}  # Prefect's worker gives a whole command
    # With VOLUME, a pod that mounts a parent of the volume's folder would get that folder inside it, owned by root.
    assert "VOLUME" not in {name for name, _ in instructions()}


@pytest.fixture
def storage(tmp_path):
    """The environment in which buildah and podman keep images in a folder that is removed."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"not installed here: {', '.join(missing)}")
    if os.getuid() != 0:
        pytest.skip("debootstrap needs root")
    settings = tmp_path / "storage.conf"
    settings.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{tmp_path}/images"\nrunroot = "{tmp_path}/running"\n'
    )
    yield os.environ | {"CONTAINERS_STORAGE_CONF": str(settings)}
    for mounted in sorted((tmp_path / "images").glob("overlay*"), reverse=True):  # the driver's mount of its folder
        subprocess.run(["umount", "-l", mounted], capture_output=True)
    shutil.rmtree(tmp_path / "images", ignore_errors=True)


@pytest.mark.apart
@pytest.mark.timeout(3600)
def test_the_image_trains_and_verifies(storage):
    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=storage, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    image = ["BASE=localhost/bookworm", "IMAGE=localhost/tba:test", "EXTRA=cpu"]
    run("make", "image-base", *image)
    run("make", "image", *image)
    (inspected,) = json.loads(run("podman", "image", "inspect", "localhost/tba:test"))
    assert inspected["User"] == "1000:1000"
    assert inspected["Labels"]["org.opencontainers.image.version"] == VERSION
    assert not re.search(r"INDEX|WHEELS|secret", json.dumps(inspected["History"]))
    output = run("make", "image-check", *image)
    assert "Accuracy after training" in output
    assert re.search(r"^0 faults in [1-9][\d,]* trajectories of \d+ shards, 5 training steps", output, re.MULTILINE)
