"""What is in the repository installs anywhere.

Claims
- no tracked file has the address of a package registry, and there is no lock file (they carry addresses)
- constraints are names and exact versions, and pin every direct dependency; every imported package is one
- every package, SQL file, template and DeepSpeed file reaches the wheel

Run: pytest tests/test_packaging.py
"""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())

REGISTRY = re.compile(
    r"https?://[^\s\"'<>)]*/(simple|whl|pypi)\b"  # an index
    r"|https?://[^\s\"'<>)]*(pythonhosted|pypi)[.\w]*"  # the public one's hosts
    r"|(index-url|find-links|PIP_FIND_LINKS|UV_INDEX)\s*[=\s]\s*[\"']?(https?:|file:|/)"  # an option with an address
)
LOCK_FILES = {"uv.lock", "poetry.lock", "Pipfile.lock", "pdm.lock", "package-lock.json"}


def tracked_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [REPOSITORY / path for path in listed.stdout.splitlines() if (REPOSITORY / path).is_file()]


def test_no_tracked_file_has_a_registry_address():
    found = {}
    for path in tracked_files():
        if match := REGISTRY.search(path.read_text(errors="ignore")):
            found[str(path)] = match.group()
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "registry = 'https://" + "pkg.example.com/simple'",
        "url = https://" + "files.pythonhosted.org/packages/x.whl",
        "--index-url" + " https://mirror.example.com/",
        "PIP_FIND_LINKS" + "=/somewhere/wheels",
    ],
)
def test_registry_addresses_are_recognised(line):
    assert REGISTRY.search(line)


def test_there_is_no_lock_file():
    assert [path for path in tracked_files() if path.name in LOCK_FILES] == []


def constraints() -> dict[str, str]:
    lines = (REPOSITORY / "infra" / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_constraints_are_names_and_exact_versions():
    for name, version in constraints().items():
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name), name
        # no local part such as +cpu: it fits CPU and CUDA
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), (name, version)


def declared() -> set[str]:
    """Names of the packages that pyproject.toml asks for, in all extras but dev."""
    project = PROJECT["project"]
    extras = [names for extra, names in project["optional-dependencies"].items() if extra != "dev"]
    return {re.match(r"[A-Za-z0-9._-]+", requirement).group() for requirement in sum(extras, project["dependencies"])}


def test_every_direct_dependency_is_pinned():
    assert declared() - set(constraints()) == set()


def test_every_imported_package_is_declared():
    """One that comes with another package may go with that one's next version."""
    packages, unknown = packages_distributions(), {}
    of_project = {"flows", "infra", "storage", "tba", *sys.stdlib_module_names}
    for path in (
        path for folder in ("flows", "infra", "storage", "tba") for path in (REPOSITORY / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else names
            for name in {name.split(".")[0] for name in names if name} - of_project:
                brings = {re.sub("[._]", "-", found.lower()) for found in packages.get(name, [name])}
                if not brings & declared():
                    unknown[name] = str(path.relative_to(REPOSITORY))
    assert unknown == {}


def of_makefile(path: Path) -> bool:
    return path.suffix == ".txt" or path.parts[:2] == ("infra", "container")


def test_every_module_and_data_file_reaches_the_wheel():
    """Of infra/ that is not what only the Makefile reads: constraints, overrides and the container."""
    packages = PROJECT["tool"]["setuptools"]["packages"]
    data = {
        folder / pattern
        for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items()
        for folder in [Path(package.replace(".", "/"))]
        for pattern in patterns
    }
    for path in (path.relative_to(REPOSITORY) for path in tracked_files()):
        if path.parts[0] in ("flows", "infra", "storage", "tba") and path.suffix == ".py":
            assert ".".join(path.parent.parts) in packages, path
        elif path.parts[0] in ("flows", "infra", "storage", "tba") and not of_makefile(path):
            assert any(path.match(str(pattern)) for pattern in data), path
