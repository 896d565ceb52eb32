"""README.md tells the truth.

Claims
- its tree names every file of the repository (but `__init__.py`), each with a remark, and nothing else
- each of its `tba sql` examples is valid SQL over the views there are
- each `make` target and `tba` command that it names exists

Run: pytest tests/test_readme.py
"""

import re
import subprocess
from pathlib import Path

import pytest

from storage.inspect import query
from storage.store import RunStore

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()


def tree() -> dict[str, str]:
    """Path -> remark, from the indented listing: four columns a level, folders end with a slash."""
    listing = README.split("<!-- tree: begin")[1].split("-->\n", 1)[1].split("<!-- tree: end")[0]
    remarks, folders = {}, []
    for line in filter(str.strip, listing.splitlines()):
        indent = len(line) - len(line.lstrip()) - 4
        assert indent >= 0 and indent % 4 == 0, line
        name, _, remark = line.strip().partition(" ")
        folders = folders[: indent // 4]
        if name.endswith("/"):
            folders.append(name)
        else:
            remarks["".join(folders) + name] = remark.strip()
    return remarks


def repository_files() -> set[str]:
    """Tracked files, and those that would be if all were added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    present = {path for path in listed.stdout.splitlines() if (REPOSITORY / path).exists()}
    return {path for path in present if Path(path).name != "__init__.py"}


def test_the_tree_names_every_file_and_no_other():
    named, there = set(tree()), repository_files()
    assert not there - named, "in the repository, but not in the README's tree"
    assert not named - there, "in the README's tree, but not in the repository"


def test_every_file_in_the_tree_has_a_remark():
    assert [path for path, remark in tree().items() if not remark] == []


@pytest.mark.parametrize("statement", re.findall(r'tba sql \S+ "([^"]+)"', README))
def test_sql_examples_run(tmp_path, statement):
    assert query(RunStore(tmp_path.as_uri(), "empty"), statement).num_rows == 0


def test_commands_exist():
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)\b", README)) - {"nothing"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    cli = "".join(file.read_text() for file in (REPOSITORY / "flows").glob("cli*.py"))
    for command in set(re.findall(r"\btba (up|down|train|sql|[a-z]+) ", README)):
        assert f"def {command}(" in cli, command
