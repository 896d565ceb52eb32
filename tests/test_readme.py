"""README.md tells the truth.

Claims
- it has at most 150 lines
- each of its `tba sql` examples is valid SQL over the views there are
- each `make` target that it names exists
- every `tba` command that it or docs/ prints is understood: command, arguments, options; those that only read also run

Run: pytest tests/test_readme.py
"""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from flows.cli.app import app
from storage.queries import query
from storage.store import RunStore
from tests.flows.prepared_run import prepare_run

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
READING = ("--help", "runs", "show", "sql", "watch")


def test_it_is_read_in_three_minutes():
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("statement", re.findall(r'tba sql \S+ "([^"]+)"', README))
def test_sql_examples_run(tmp_path, statement):
    assert query(RunStore(tmp_path.as_uri(), "empty"), statement).num_rows == 0


def test_make_targets_exist():
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)\b", README)) - {"nothing"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def printed_commands() -> list[str]:
    """Every `tba ...` of a code block, in README.md and docs/."""
    commands = []
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]:
        fenced = False
        for line in page.read_text().splitlines():
            fenced ^= line.startswith("```")
            if fenced or line.startswith("    "):
                parts = re.split(r"; |&& |\$ ", line.strip())
                commands += [part for part in parts if re.match(r"(\.venv/bin/)?tba [a-z-]", part)]
    return list(dict.fromkeys(commands))


def arguments(command: str) -> list[str]:
    """As a shell would hand them over, without a comment and without `> FILE` or `| ...`."""
    words = shlex.split(command, comments=True)[1:]
    ends = [words.index(sign) for sign in ("|", ">", "&") if sign in words]
    return words[: min(ends, default=len(words))]


def reading_commands() -> list[str]:
    return [command for command in printed_commands() if arguments(command)[0] in READING]


def test_there_are_commands():
    assert len(printed_commands()) >= 15


@pytest.mark.parametrize("command", printed_commands())
def test_every_printed_command_is_understood(command):
    name, *rest = arguments(command)
    if name != "--help":
        get_command(app).commands[name].make_context(name, rest)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A working folder whose store has every run that those commands name."""
    folder = tmp_path_factory.mktemp("prepared")
    named = {word for command in reading_commands() for word in arguments(command)[1:2] if not word.startswith("-")}
    for run in {"arithmetic", *named}:
        prepare_run((folder / ".tba").as_uri(), run, steps=42, finished=True)
    return folder


@pytest.mark.parametrize("command", reading_commands())
def test_printed_commands_that_only_read_run(command, prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    monkeypatch.delenv("TBA_STORE", raising=False)
    given = arguments(command)
    if "--store" in given:  # a store of somebody's
        del given[given.index("--store") : given.index("--store") + 2]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert result.stdout
