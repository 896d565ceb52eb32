"""Fuzzing of everything that is parsed: what comes from a store, a command line or a user's configuration.

Claims
- whatever the bytes, texts or JSON values are, only declared errors come of them: StoreError, ValueError (pydantic's
  ValidationError is one), or a command that exits with a message and no traceback
- nothing hangs: an input takes DEADLINE_S at most, a test LIMIT_S
- at least NUM_INPUTS inputs were tried

Inputs are the same in each run. Run: make fuzz
"""

import contextlib
import faulthandler
import functools
import json
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from flows.cli import rescore, train
from flows.cli.app import app
from flows.cli.common import store_url
from flows.cli.settings import config_of
from flows.config import RunConfig, load_run, read_recorded
from storage import attempts, checkpoints, ledger, policies, quality, requests, shards, status, upkeep
from storage.buffer import ReplayBuffer, Sampling
from storage.errors import StoreError
from storage.schema import TRAJECTORY
from storage.store import RunStore, _parse_url, check_run_name
from storage.verify import verify
from tba.rewards import load_reward
from tests.faults.memory_store import memory_store
from tests.storage.helpers import OWNER, make_shard

NUM_INPUTS = 10_000
DEADLINE_S = 5.0  # on a machine that others keep busy; an input takes milliseconds
LIMIT_S = 240.0
DECLARED = (StoreError, ValueError)
tried: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def no_hang():
    """A loop in C answers no signal: after LIMIT_S the process ends with a traceback of where it was."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def fuzzed(num_inputs: int, **strategies) -> Callable:
    """The test with that many inputs, each counted and within the deadline."""

    def decorated(test: Callable) -> Callable:
        @functools.wraps(test)
        def counted(**arguments) -> None:
            tried[test.__name__] += 1
            with within(DEADLINE_S):
                test(**arguments)

        profile = settings(
            max_examples=num_inputs,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        return profile(given(**strategies)(counted))

    return decorated


@contextlib.contextmanager
def within(seconds: float):
    def too_slow(*_) -> None:
        raise AssertionError(f"an input took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, too_slow)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- inputs -----------------------------------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "0", "../../x", "NaN", "9" * 400, "\x1b[2J", "\ud800", "null"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def record_like(example: dict) -> st.SearchStrategy[bytes]:
    """JSON files that resemble the example: a value another one, a key gone or new, cut short, or any bytes."""
    others = st.dictionaries(st.sampled_from([*example, "other"]), JSON, max_size=3)
    lacking = st.sets(st.sampled_from(sorted(example)), max_size=2)
    changed = st.builds(
        lambda new, gone: json.dumps({k: v for k, v in (example | new).items() if k not in gone}).encode(),
        others,
        lacking,
    )
    cut = st.builds(lambda data, share: data[: int(share * len(data))], changed, st.floats(0, 1))
    return changed | cut | JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40)


SHARD = shards.parquet_bytes(make_shard("s0", 0))
_FOOTER = len(SHARD) - int.from_bytes(SHARD[-8:-4], "little") - 8  # where Parquet keeps what every reader parses first


@st.composite
def damaged_shards(draw) -> bytes:
    """Parquet files with bytes changed, gone or added: half of the places in the footer."""
    data = bytearray(SHARD)
    places = st.integers(0, len(data) - 1) | st.integers(_FOOTER, len(data) - 1)
    for place, value in draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=6)):
        data[place] = value
    start, end = sorted((draw(places), draw(places)))
    kept = draw(st.sampled_from([bytes(data), bytes(data[:end]), bytes(data[:start] + data[end:]), bytes(data + data)]))
    return draw(st.just(kept) | st.binary(max_size=60))


FLOATS = st.floats(width=32)
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1) | st.none(), max_size=4)
COLUMNS = {
    "reward": FLOATS | st.none(),
    "rewards": st.dictionaries(st.text(max_size=4), FLOATS | st.none(), max_size=2) | st.none(),
    "prompt_tokens": TOKENS | st.none(),
    "response_tokens": TOKENS | st.none(),
    "behavior_logprobs": st.lists(FLOATS | st.none(), max_size=4) | st.none(),
    "reference_logprobs": st.lists(FLOATS | st.none(), max_size=4) | st.none(),
    "policy_step": st.integers(-(2**63), 2**63 - 1) | st.none(),
    "policy_fingerprint": st.text(max_size=6) | st.none(),
    "temperature": FLOATS | st.none(),
    "top_p": FLOATS | st.none(),
    "round": st.integers(-(2**63), 2**63 - 1) | st.none(),
    "searcher": st.text(max_size=6) | st.none(),
    "trajectory_id": st.text(max_size=6) | st.none(),
    "prompt_id": st.text(max_size=6) | st.none(),
    "schema_version": st.integers(-(2**31), 2**31 - 1) | st.none(),
    "finish_reason": st.text(max_size=6) | st.none(),
}
CHANGED_COLUMNS = st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: COLUMNS[name] for name in names})
)
WORDS = st.text(max_size=30)
PATHS = WORDS | st.from_regex(
    r"trajectories/(searcher=[a-z0-9./-]{0,8}/round=\d{0,10}|compacted/[a-z0-9-]{0,30})\.parquet"
)
URLS = WORDS | st.builds(
    lambda *parts: "".join(parts),
    st.sampled_from(["file://", "file:///", "s3://", "S3://", "http://", "gs://", "://", "", "s3:", "file:/"]),
    st.sampled_from(["", "bucket", "KEY:SECRET@bucket", "[::1", "a b", "%00", "%2e%2e", "..", "bucket:99999"]),
    st.sampled_from(["", "/", "//p", "/a/b", "/[1]", "/\\", "?x=1", "#part", "/%2e%2e/x", "/\x00", "/é", "/a/../b"]),
)  # fmt: skip


# --- what comes from a store ------------------------------------------------------------------------------------------


@fuzzed(2500, data=damaged_shards())
def test_a_damaged_shard(data):
    path, store = shards.shard_path("s0", 0), memory_store()
    store.put(path, data)
    with contextlib.suppress(*DECLARED):
        quality.facts_of(shards.read_file(store, path), vocab_size=100)


@fuzzed(400, data=damaged_shards())
def test_a_damaged_compacted_file(data):
    path, store = shards.block_path("s0", 0), memory_store()
    store.put(path, data)
    with contextlib.suppress(*DECLARED):
        upkeep._compacted_at(store, path)
    with contextlib.suppress(*DECLARED):
        shards.read_shards(store, "s0", [0, 31])


@pytest.mark.xfail(strict=False, reason="issue 23, 4: what a shard's cells hold is not checked before it is trained on")
@fuzzed(300, columns=CHANGED_COLUMNS)
def test_a_whole_shard_of_odd_values_is_synced_and_drawn_or_refused(columns):
    store = memory_store()
    attempts.start_attempt(store, 0, OWNER)
    rows = make_shard("s0", 0).to_pylist()
    rows[1] |= columns
    store.put(shards.shard_path("s0", 0), shards.parquet_bytes(pa.Table.from_pylist(rows, TRAJECTORY)))
    with contextlib.suppress(*DECLARED):
        buffer = ReplayBuffer(store, Sampling(prompts_per_batch=1, responses_per_prompt=2, min_size=1), seed=0)
        buffer.sync(1, attempt=1)
        for row in buffer.draw(1).to_pylist():
            assert len(row["response_tokens"]) == len(row["behavior_logprobs"]) == len(row["reference_logprobs"]) > 0
            assert row["draw_probability"] > 0


@fuzzed(300, columns=CHANGED_COLUMNS)
def test_the_facts_of_odd_values(columns):
    rows = make_shard("s0", 0).to_pylist()
    rows[1] |= columns
    with contextlib.suppress(*DECLARED):
        quality.facts_of(pa.Table.from_pylist(rows, TRAJECTORY), vocab_size=100)


@fuzzed(800, path=PATHS)
def test_a_files_name(path):
    store = memory_store()
    store.put(path, SHARD)
    shards.files_named([path])
    shards.marked_through([path])
    for read in (shards.new_shards, lambda store, _: shards.committed_paths(store)):
        with contextlib.suppress(*DECLARED):
            read(store, {})
    with contextlib.suppress(*DECLARED):
        shards.round_of(path)


@fuzzed(300, name=WORDS)
def test_names_of_runs_searchers_and_folders(name):
    store = memory_store()
    for check in (check_run_name, shards.check_searcher_id, lambda name: RunStore("file:///a", name)):
        with contextlib.suppress(*DECLARED):
            check(name)
    store.put(f"trainer/{name}/state.json", b"{}")
    store.put(f"policies/{name}/policy.json", b"{}")
    checkpoints.list_checkpoints(store)
    with contextlib.suppress(*DECLARED):
        policies.prune_policies(store, keep=1)


NAMES = st.lists(
    st.sampled_from(["..", ".", "a", "", "b.json", "\\", "C:", "\x00", "~"]) | WORDS, min_size=1, max_size=6
)


@pytest.mark.xfail(strict=False, reason="issue 23, 9: a name in the bucket becomes a path outside the folder")
@fuzzed(400, names=NAMES)
def test_a_name_in_the_bucket_stays_in_the_folder_that_it_is_downloaded_to(names):
    store, folder = memory_store(), "policies/step=00000004"
    store.put(f"{folder}/{'/'.join(names)}", b"text")
    with tempfile.TemporaryDirectory() as outer:
        inner = Path(outer, *"abcdefgh")  # deeper than the names go up
        inner.mkdir(parents=True)
        with contextlib.suppress(*DECLARED):
            store.download_folder(folder, inner)
        written = [path for path in Path(outer).rglob("*") if path.is_file()]
        assert all(path.is_relative_to(inner) for path in written)


POLICY = {"step": 4, "path": "policies/step=00000004", "fingerprint": "f" * 32, "final": False, "attempt": 1,
          "published_at": "2026-01-01T00:00:00+00:00"}  # fmt: skip
BEST = POLICY | {"accuracy": 0.5, "num_problems": 8}
MANIFEST = {"step": 4, "fingerprint": "f" * 32, "attempt": 1, "files": {"config.json": 2}}
ATTEMPT = {"attempt": 1, "resumed_from": 0, "owner": OWNER, "created_at": "2026-01-01T00:00:00+00:00"}
BEAT = {"state": "training", "step": 3, "attempt": 1, "owner": OWNER, "at": "2026-01-01T00:00:00+00:00", "message": ""}
CONFIG = RunConfig(run="run").recorded()


def readers(*functions: Callable) -> Callable:
    def read_all(store) -> None:
        for function in functions:
            with contextlib.suppress(*DECLARED):
                function(store)

    return read_all


def fetched(store: RunStore) -> None:
    with tempfile.TemporaryDirectory() as cache:
        policies.fetch_policy(store, policies.PolicyRef(**POLICY), cache)


NO_PATH = pytest.mark.xfail(strict=False, reason="issue 23, 15: an entry of another shape is a TypeError or KeyError")
RECORDS = {
    "latest": (policies.LATEST, POLICY, readers(policies.latest_policy)),
    "best": (policies.BEST, BEST, readers(policies.best_policy)),
    "held": ("policies/held/s0.json", POLICY, readers(policies._evaluated)),
    "pruning": ("policies/pruning.json", {"0": "policies/step=00000004"}, readers(
        lambda store: policies.hold_policy(store, policies.PolicyRef(**POLICY), "s0"))),
    "manifest": (f"{POLICY['path']}/policy.json", MANIFEST, readers(
        policies.published_policies, lambda store: policies.prune_policies(store, 1), fetched)),
    "attempt": ("trainer/attempt=00000001.json", ATTEMPT, readers(
        attempts.list_attempts, attempts.latest_attempt, attempts.trainer, attempts.first_attempt_at,
        lambda store: attempts.run_is_alive(store, 0), ledger.evaluations)),
    "heartbeat": (attempts.HEARTBEAT, BEAT, readers(attempts.read_heartbeat, status.run_status)),
    "run.json": ("run.json", CONFIG, readers(
        load_run, lambda store: read_recorded(store.get("run.json")),
        lambda store: store.create_run(CONFIG, read_recorded))),
    "wanted searchers": (requests.SEARCHERS, {"wanted": 2}, readers(lambda store: requests.wanted_searchers(store, 1))),
    "stop": (requests.STOP, {"asked": 1}, readers(requests.take_back_stop)),
    "expired": ("expired/searcher=s0/through=00000003.json", {"at": "2026-01-01T00:00:00+00:00"}, readers(
        lambda store: upkeep._marked_at(store, "expired/searcher=s0/through=00000003.json"), shards.expired_through)),
    "summary": ("summary.json", {"steps": 3, "trajectories": 4}, readers(status.run_status)),
}  # fmt: skip
AWAITED = {"latest", "best", "held", "pruning", "manifest", "attempt", "heartbeat", "wanted searchers", "run.json",
           "expired", "summary"}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=NO_PATH) if n in AWAITED else n for n in RECORDS])
def test_a_record(name):
    path, example, read = RECORDS[name]

    @fuzzed(200, data=record_like(example))
    def a_record(data):
        store = memory_store()
        if path != "run.json":
            store.put("run.json", json.dumps(CONFIG).encode())
        store.put(path, data)
        read(store)

    a_record()


UNVERIFIED = {"attempt", "best", "latest", "manifest"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=NO_PATH) if n in UNVERIFIED else n for n in RECORDS])
def test_a_record_is_verified(name):
    """`tba verify` names what is broken, and goes on or ends with a message."""
    path, example, _ = RECORDS[name]

    @fuzzed(40, data=record_like(example))
    def a_record_verified(data):
        store = memory_store()
        store.put("run.json", json.dumps(CONFIG).encode())
        store.put(path, data)
        with contextlib.suppress(*DECLARED):
            verify(store, None)

    a_record_verified()


# --- what a user gives ------------------------------------------------------------------------------------------------

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
    for read in (_parse_url, lambda url: _parse_url(store_url(url))):
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


# The work of minutes, or without an end, behind arguments that were understood.
STUBS = {
    "flows.run.watcher.Watcher.look": _interrupted,
    "flows.searcher.start.start_searcher": _no_engine,
    "flows.compare.staleness.staleness": lambda *_: ("table.md", {}),
    "flows.compare.turns.turns": lambda *_: "table.md",
    "infra.doctor.examine": lambda *_: [],
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A working folder with a store of one small run. It has no prefect.yaml, so no command starts a server."""
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
    monkeypatch.setattr(rescore.sys, "path", list(rescore.sys.path))
    for name, stub in STUBS.items():
        monkeypatch.setattr(name, stub)
    runner = CliRunner()

    @fuzzed(60, arguments=ARGUMENTS)
    def the_arguments(arguments):
        done = runner.invoke(app, [command, *arguments], input="")
        assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
        assert done.exit_code in (0, 1, 2, 130), done.output
        assert "Traceback" not in done.output

    the_arguments()


def test_enough_was_tried(request):
    """Last in this file; without it where only some tests were chosen."""
    if len(request.session.items) < 2 + len(RECORDS) + len(COMMANDS):
        pytest.skip("only some of the tests run")
    assert tried.total() >= NUM_INPUTS, tried
