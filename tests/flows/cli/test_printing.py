"""What a model said, or a store holds, controls no terminal and no page.

Claims
- `tba sql` (table; CSV to a terminal), `tba show`, `runs`, `watch`, `verify` and errors print control characters,
  escape sequences and marks that reorder text as Python writes them; rich's markup in them is text
- CSV and JSON that no terminal gets are exact
- text, NaN and infinity in place of a number in a heartbeat or a summary are shown; a damaged record is an error
  without a traceback
- a time that Python cannot hold is text in `tba sql`, in a list an error without a traceback
- commands print by `say`, `styled` and `console` alone
- an artifact's description on Prefect's page shows a heartbeat's text as it is

Run: pytest tests/flows/cli/test_printing.py
"""

import contextlib
import csv
import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from flows.cli.console import COLUMNS, SUMMARY, PlainConsole, Progress, styled, summary_table
from flows.report.text import clip, printable
from flows.run.prefect_page_artifacts import _plain
from storage import attempts, ledger
from storage.errors import DamagedRecord
from storage.shards import commit_shard
from storage.store import RunStore
from storage.summary import read_summary
from tests.flows.prepared_run import heartbeat, prepare_run
from tests.storage.helpers import make_batch, make_search_round, make_shard, make_training_step

REPOSITORY = Path(__file__).parents[3]
# The window's title; a link; C1's form of the escape; the cursor up, the line cleared; text reordered; rich's markup.
HOSTILE = "\x1b]0;owned\x07\x1b]8;;http://evil\x1b\\x\x9b31m\x1b[1A\x1b[2K\r\u202e\x7f"
HOSTILE += "[red]a[/red] [link=http://e]b[/link] :smile:"
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u202e]")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A store with a run whose prompts, responses, ids and heartbeat are hostile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TBA_STORE", raising=False)
    store = prepare_run((tmp_path / ".tba").as_uri())
    attempts.write_heartbeat(store, heartbeat(3, message=HOSTILE, alarms={"entropy_low": HOSTILE}))
    commit_shard(
        store, make_shard("s1", 0, response=HOSTILE, prompt=HOSTILE, prompt_id=HOSTILE, reward_version=HOSTILE)
    )
    ledger.record_search_round(store, make_search_round("s1", 0))
    batch = make_batch([0, 0]).to_pylist()
    for index, row in enumerate(batch):
        row |= {"trajectory_id": f"s1-00000000-{index:04}", "prompt_id": HOSTILE}
    ledger.record_batch(store, 1, 4, make_batch([0, 0]).from_pylist(batch, make_batch([0, 0]).schema))
    ledger.record_training_step(store, make_training_step(1, 4))
    return tmp_path


def in_terminal(*arguments: str) -> str:
    """What `tba ...` sends to a terminal, without rich's own colours."""
    master, slave = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments], env=environment, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    sent = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the last process has closed it
            break
        if not part:
            break
        sent += part
    process.wait()
    os.close(master)
    return sent.decode()


def commands_in(sent: str) -> list[str]:
    """Characters that control a terminal, but for line ends and rich's own: styles, and the cursor it hides."""
    ours = re.sub(r"\r\n|\x1b\[[\d;]*m|\x1b\[\?25[lh]", "", sent)
    return re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", ours)


@pytest.mark.parametrize(
    "arguments",
    [
        ("sql", "arithmetic", "SELECT * FROM trajectories"),
        ("sql", "arithmetic", "SELECT response, prompt FROM trajectories", "--format", "csv"),
        ("sql", "arithmetic", "SELECT response, prompt FROM trajectories", "--format", "json"),
        ("sql", "arithmetic", "SELECT {'a': [response]} AS nested FROM trajectories", "--format", "csv"),
        ("sql", "arithmetic", f'SELECT response AS "{HOSTILE}" FROM trajectories'),
        ("sql", "arithmetic", "SELECT error(response) FROM trajectories WHERE searcher = 's1'"),
        ("show", "arithmetic", "4"),
        ("runs",),
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_no_command_reaches_a_terminal(root, arguments):
    sent = in_terminal(*arguments)
    assert commands_in(sent) == [], repr(sent)
    if arguments[0] in ("sql", "show") and "json" not in arguments:
        assert "\\x1b]0;owned\\x07" in sent.replace("\r\n", "").replace("\\\\", "\\") or "…" in sent


def test_markup_is_text(root):
    rows = CliRunner().invoke(app, ["sql", "arithmetic", "SELECT response FROM trajectories WHERE searcher = 's1'"])
    assert "[red]a[/red] [link=http://e]b[/link] :smile:" in rows.stdout
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=True, width=400)
    console.print(HOSTILE, styled(HOSTILE, "bold"))
    console.print(summary_table({"run": HOSTILE, "note": HOSTILE}))
    assert commands_in(out.getvalue()) == [] and out.getvalue().count("[red]a[/red]") == 5


def test_a_warning_about_a_hostile_name_controls_nothing(root):
    (root / ".tba" / "arithmetic" / "trajectories" / "searcher=s0" / "\x1b]0;owned\x07").symlink_to("/etc/passwd")
    sent = in_terminal("sql", "arithmetic", "SELECT count(*) FROM trajectories")
    assert commands_in(sent) == [] and "\\x1b]0;owned\\x07 is a symbolic link" in sent.replace("\r\n", ""), repr(sent)


def test_csv_and_json_are_exact_where_a_program_reads(root):
    query = ["sql", "arithmetic", "SELECT response FROM trajectories WHERE searcher = 's1'"]
    as_csv = CliRunner().invoke(app, [*query, "--format", "csv"]).stdout_bytes.decode()
    assert [row[0] for row in csv.reader(io.StringIO(as_csv, newline=""))][1:] == [HOSTILE] * 4
    assert [row["response"] for row in json.loads(CliRunner().invoke(app, [*query, "--json"]).stdout)] == [HOSTILE] * 4


def test_errors_and_faults_are_printable(root):
    store = RunStore((root / ".tba").as_uri(), "arithmetic")
    store.put("trajectories/searcher=s0/round=00000009.parquet", b"torn")
    for arguments in (
        ["sql", "arithmetic", f"SELECT '{HOSTILE}' + 1"],
        ["verify", "arithmetic"],
        ["show", HOSTILE, "1"],
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code in (1, 2) and not FORBIDDEN.search(result.output), arguments


def test_watch_prints_a_heartbeat_that_controls_nothing(root, monkeypatch):
    from flows.cli.console import Progress

    store = RunStore((root / ".tba").as_uri(), "arithmetic")
    summary = json.dumps({"run": "arithmetic", "steps": 80, "note": HOSTILE}).encode()
    monkeypatch.setattr(Progress, "wait", lambda *_: store.put("summary.json", summary))
    output = CliRunner().invoke(app, ["watch", "arithmetic"]).stdout
    assert "ALARM: \\x1b]0;owned" in output and not FORBIDDEN.search(output)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("a\tb\nc é 日本 👩‍👩‍👧", "a\tb\nc é 日本 👩‍👩‍👧"),
        ("\x1b[31m\x00\x07\r", "\\x1b[31m\\x00\\x07\\r"),
        ("\x85\x9b\u2028", "\\x85\\x9b\\u2028"),
        ("\u202e\u2066\u200f", "\\u202e\\u2066\\u200f"),
        ("\ud800", "\\ud800"),  # half a character cannot be sent
    ],
)
def test_printable(text, printed):
    assert printable(text) == printed and printable(printed) == printed
    assert clip(text) == printed


def test_commands_print_by_say_and_console_alone():
    """`typer.echo` and `print` of JSON are exact; `Text` and `Console` are made in console.py."""
    for file in sorted((REPOSITORY / "flows").rglob("*.py")):
        source, name = file.read_text(), str(file.relative_to(REPOSITORY))
        if name == "flows/cli/console.py":
            continue
        assert not re.search(r"\bText\((?!Alignment)|\bConsole\(", source), f"{name}: use styled and console"
        if name != "flows/cli/common.py":
            others = re.findall(r"typer\.echo\((?!json)|(?<![\w.])print\((?!\))", source)
            assert not others, f"{name}: {others}; use say"


def test_a_heartbeats_text_is_no_markdown():
    assert _plain("<img src=x> [a](http://b) *c* `d`") == r"\<img src=x\> \[a\](http://b) \*c\* \`d\`"
    assert _plain("entropy is near zero. Raise search.temperature") == "entropy is near zero. Raise search.temperature"
    assert "\x1b" not in _plain(HOSTILE)


def test_times_beyond_pythons_are_printed(root):
    for form in ("table", "json", "csv"):
        query = "SELECT TIMESTAMP '290000-01-01' AS t, 42 AS n"
        done = CliRunner().invoke(app, ["sql", "arithmetic", query, "--format", form])
        assert done.exit_code == 0 and "42" in done.output, done.output
    done = CliRunner().invoke(app, ["sql", "arithmetic", "SELECT [TIMESTAMP '290000-01-01'] AS t"])
    assert done.exit_code == 2 and "out of range" in done.output


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_value_of_a_heartbeat_or_a_summary_breaks_the_display(root, is_terminal):
    store = RunStore((root / ".tba").as_uri(), "arithmetic")
    out = PlainConsole(file=io.StringIO(), force_terminal=is_terminal, width=100)
    for value in ("text", float("nan"), float("inf"), -5, 10**30, [1], {"a": 1}):
        for name in (*COLUMNS, "seconds_left", "alarms", "steps"):
            attempts.write_heartbeat(store, heartbeat(3, **{name: value}))
            with contextlib.suppress(DamagedRecord), Progress(out, "arithmetic") as progress:
                progress.show("training", attempts.read_heartbeat(store))
        for name in SUMMARY.keys() | {"refused_shards"}:
            store.put("summary.json", json.dumps({name: value}).encode())
            with contextlib.suppress(DamagedRecord):
                out.print(summary_table(read_summary(store)))
    assert "text" in out.file.getvalue()


@pytest.mark.parametrize("path", ["summary.json", "trainer/attempt=00000001.json"])
def test_a_damaged_record_ends_watch_without_a_traceback(root, path):
    store = RunStore((root / ".tba").as_uri(), "arithmetic")
    store.put("summary.json", b"{}")
    store.put(path, b"[")
    done = CliRunner().invoke(app, ["watch", "arithmetic"])
    assert done.exit_code == 1 and path in done.output, done.output


@pytest.mark.parametrize("name", ["prefect.flow_runs", "prefect.task_runs"])
def test_what_flows_log_is_printable(name, monkeypatch):
    """A worker in a terminal shows it, and so does Prefect's page."""
    lines, logger = [], logging.getLogger(name)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(logging.Formatter().format(record))
    monkeypatch.setattr(logger, "handlers", [handler])
    logger.warning("alarm of %s: %s", "a \x1b[2J run", "s3://key:secret@host/bucket")
    try:
        raise ValueError("\x1b]0;title\x07")
    except ValueError:
        logger.exception("failed")
    assert lines[0] == r"alarm of a \x1b[2J run: s3://…@host/bucket"
    assert "Traceback" in lines[1] and "\x1b" not in "".join(lines)
