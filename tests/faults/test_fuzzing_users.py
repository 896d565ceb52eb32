"""Fuzzing of what a user gives: configurations, URLs, names of rewards, arguments of commands.

Claims
- whatever the texts and JSON values are, only declared errors come of them: StoreError, ValueError
  (pydantic's ValidationError is one); or a command ends with a message, without a traceback
- nothing hangs: an input takes DEADLINE_S at most, a test LIMIT_S
- at least 5,000 inputs are tried

Inputs are the same in each run. Run: make fuzz
"""

import contextlib
import sys

import pytest
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from flows.cli import train
from flows.cli.app import app
from flows.cli.common import store_url
from flows.cli.settings import config_of
from flows.config import RunConfig
from infra.stack import StackError
from storage import attempts, shards
from storage.store import RunStore
from storage.store_url import parse_store_url
from tba.rewards import load_reward
from tests.faults.fuzzing import DECLARED, JSON, WORDS, fuzzed, no_hang, tried  # noqa: F401, no_hang is a fixture
from tests.storage.helpers import OWNER, make_shard

pytestmark = pytest.mark.slow

CONFIG = RunConfig(run="run").recorded()
URLS = WORDS | st.builds(
    lambda *parts: "".join(parts),
    st.sampled_from(["file://", "file:///", "s3://", "S3://", "http://", "gs://", "://", "", "s3:", "file:/"]),
    st.sampled_from(["", "bucket", "KEY:SECRET@bucket", "[::1", "a b", "%00", "%2e%2e", "..", "bucket:99999"]),
    st.sampled_from(["", "/", "//p", "/a/b", "/[1]", "/\\", "?x=1", "#part", "/%2e%2e/x", "/\x00", "/é", "/a/../b"]),
)  # fmt: skip
KEYS = [
    *CONFIG,
    *(f"{part}.{name}" for part in ("task", "search", "sampling", "train") for name in CONFIG[part]),
]


def nested(values: dict[str, object]) -> dict:
    found: dict = {}
    for key, value in values.items():
        part, _, name = key.partition(".")
        if name and isinstance(found.setdefault(part, {}), dict):
            found[part][name] = value
        elif not name:
            found[part] = value
    return found


LIKELY = JSON | st.integers(-3, 200) | st.floats(-2, 2) | st.sampled_from(["tb", "rloo", "dataset", "task", "a:b", []])


@fuzzed(2500, values=st.dictionaries(st.sampled_from(KEYS), LIKELY, max_size=6).map(nested) | JSON)
def test_a_configuration(values):
    with contextlib.suppress(ValidationError):
        config = RunConfig.model_validate(values)
        assert RunConfig(**config.recorded(), store=config.store) == config.model_copy(), "it is not read as written"


@fuzzed(
    500, given_settings=st.lists(st.builds("{}={}".format, st.sampled_from(KEYS) | WORDS, WORDS) | WORDS, max_size=3)
)
def test_settings_of_a_command_line(given_settings):
    with contextlib.suppress(train.typer.Exit):
        config_of({}, given_settings)


@fuzzed(1200, url=URLS)
def test_the_url_of_a_store(url):
    for read in (parse_store_url, lambda url: parse_store_url(store_url(url))):
        with contextlib.suppress(*DECLARED):
            read(url)


# No name that a module has: an import runs code, which is not ours to fuzz.
SPECS = WORDS | st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["math", "no_such_module", "json.decoder", "", ".", "..a", "tests", "a/b", "1", "mäth", "\x00"]),
    st.sampled_from([":", "::", ".", "", " : "]),
    st.sampled_from(["sqrt", "pi", "no_such", "JSONDecoder", "", "a.b", "sqrt(", "sqrt()", "sqrt(x=1)", "sqrt(1+1)"]),
    st.sampled_from(["", ")", "(a=[1,", "(__import__('os'))", "\n", "()()"]),
)


@fuzzed(800, spec=SPECS.filter(lambda spec: not spec.startswith(("this", "antigravity"))))
def test_the_name_of_a_reward(spec):
    with contextlib.suppress(ValueError):
        load_reward(spec)


# --- commands ---------------------------------------------------------------------------------------------------------

OPTIONS = ("--json", "--store", "--format", "--output", "--sample", "--embedded", "--success-reward", "--version",
           "--reward", "--set", "--help", "--steps", "--searchers", "--seed", "--task", "--data", "--seeds",
           "--samples", "--newest", "-x", "--")  # fmt: skip
GIVEN = ("run", "none", "0", "1", "-1", "+1", "SELECT 1", "csv", "staleness", "task", "math:sqrt", "train.beta=0.1")
# No slash: a command may write to a file that is named.
ARGUMENTS = st.lists(st.sampled_from(GIVEN + OPTIONS) | WORDS.map(lambda word: word.replace("/", "|")), max_size=4)
COMMANDS = ("runs", "show", "sql", "verify", "export", "report", "diversity", "rescore", "searchers", "stop", "watch",
            "evaluate", "train", "compare", "up", "down", "doctor", "no-such-command")  # fmt: skip


def _interrupted(*_):
    raise KeyboardInterrupt


def _no_engine(*_):
    raise ValueError("no engine is started for this")


def _no_stack(*_, **__):
    raise StackError("no server is started here")


def _no_model(*_):
    raise ValueError("no model is loaded here")


# The work of minutes, or without an end, behind arguments that were understood.
STUBS = {
    "flows.run.watcher.Watcher.look": _interrupted,
    "flows.searcher.start.start_searcher": _no_engine,
    "flows.compare.study_page.run_study": lambda *_: ("page.md", {}),
    "flows.compare.turns.turns": lambda *_: "table.md",
    "infra.doctor.examine": lambda *_: [],
    "infra.stack.up": _no_stack,
    "infra.stack.down": lambda *_: [],
    "flows.run.preflight.check_inputs": _no_model,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A working folder with a store of one small run."""
    folder = tmp_path_factory.mktemp("project")
    store = RunStore((folder / ".tba").as_uri(), "run")
    store.create_run(RunConfig(run="run").recorded())
    shards.commit_shard(store, make_shard("s0", 0))
    attempts.start_attempt(store, 0, OWNER)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_the_arguments_of_a_command(command, project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, stub in STUBS.items():
        monkeypatch.setattr(name, stub)
    runner = CliRunner()
    runner.invoke(app, [command, "run"])  # imports take seconds

    @fuzzed(60, arguments=ARGUMENTS)
    def the_arguments(arguments):
        done = runner.invoke(app, [command, *arguments], input="")
        assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
        assert done.exit_code in (0, 1, 2, 130), done.output
        assert "Traceback" not in done.output

    the_arguments()


def test_enough_was_tried(request):
    """Last in this file; skipped where only some tests were chosen."""
    if sum(item.module.__name__ == __name__ for item in request.session.items) < len(COMMANDS) + 5:
        pytest.skip("only some of the tests run")
    assert tried[__name__] >= 5_000
