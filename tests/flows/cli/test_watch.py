"""`tba watch` in a real terminal (tmux), on a run whose heartbeat moves.

Claims
- at 80, 100 and 60 columns it shows the run's newest numbers, once, no line wider than the terminal
- it redraws in place: nothing scrolls away while it runs, and after a change of size nothing of the old size is left
- it reports and survives a silent Trainer and a store that is unreachable for a time; no library prints anything
- Ctrl-C ends it at once and without a word, also while it is still importing the Prefect client
- when the run is finished it prints the summary and ends

Run: pytest tests/flows/cli/test_watch.py -m slow
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage import attempts
from storage.status import stage_of
from storage.store import RunStore
from tests.flows.prepared_run import heartbeat, prepare_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed (apt-get install tmux)"),
]

REPOSITORY = Path(__file__).parents[3]
PATIENCE_S = 60  # a machine that does other things too


class Terminal:
    """A window of tmux, with a server of its own."""

    def __init__(self, folder: Path, command: list[str], width: int) -> None:
        self._tmux = ["tmux", "-u", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        environment = {"PYTHONPATH": str(REPOSITORY), "PREFECT_API_URL": "http://127.0.0.1:9/api", "LANG": "C.UTF-8"}
        settings = [part for name, value in environment.items() for part in ("-e", f"{name}={value}")]
        # the shell keeps the status: below pytest-xdist tmux was seen not to learn of it
        self._status = folder / "status"
        command = ["sh", "-c", '"$@"; echo $? > status', "sh", *command]
        self("new-session", "-d", "-x", str(width), "-y", "24", "-c", str(folder), *settings, *command)
        self("set-option", "-g", "remain-on-exit", "on")

    def __call__(self, *arguments: str) -> str:
        # readline, which pytest imports, sets these for every process it starts: the size would never change
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        command = [*self._tmux, *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    def lines(self) -> list[str]:
        """What is on the screen, without the empty lines below."""
        return self("capture-pane", "-p").rstrip("\n").splitlines()

    def num_scrolled_away(self) -> int:
        return int(self("display-message", "-p", "#{history_size}"))

    def resize(self, width: int) -> None:
        self("resize-window", "-x", str(width), "-y", "24")

    def wait_for(self, text: str) -> list[str]:
        deadline = time.monotonic() + PATIENCE_S
        while text not in "\n".join(lines := self.lines()):
            assert time.monotonic() < deadline, f"{text!r} did not come: {lines}"
            time.sleep(0.2)
        return lines

    def status_at_its_end(self) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while not (self._status.exists() and (status := self._status.read_text())):
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.2)
        return int(status)

    def wait_for_picture(self, width: int) -> None:
        """tmux breaks lines anew at once, and tells the program of its new size a quarter of a second later."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return assert_one_picture(self.lines(), width)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def wait_for_step(self, step: int) -> None:
        """Until it shows this step or a later one."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"(\d+)/10000", "\n".join(self.lines()))) or int(found[1]) < step:
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.2)


class Heart:
    """A Trainer's heartbeat, a step each time."""

    def __init__(self, store: RunStore) -> None:
        self._store, self._stop = store, threading.Event()
        self.step = 3
        self._thread = threading.Thread(target=self._beat_on)
        self._thread.start()

    def _beat_on(self) -> None:
        while not self._stop.wait(0.3):
            self.step += 1
            attempts.write_heartbeat(self._store, heartbeat(self.step, steps=10_000))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def store(tmp_path) -> RunStore:
    return prepare_run((tmp_path / "store").as_uri())


@pytest.fixture
def heart(store) -> Iterator[Heart]:
    heart = Heart(store)
    yield heart
    heart.stop()


@pytest.fixture
def terminal(tmp_path, store, heart) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "flows.cli", "watch", store.run, "--store", store.url]
    terminal = Terminal(tmp_path, command, width=80)
    yield terminal
    terminal("kill-server")


def assert_one_picture(lines: list[str], width: int) -> None:
    """The whole picture once and nothing else."""
    assert lines and max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert [line for line in lines if line.startswith("arithmetic: ")] == ["arithmetic: training"]
    for heading in ("step", "reward", "fresh", "buffer", "prompts", "staleness", "elapsed", "left"):
        assert text.count(heading) == 1, heading
    assert "12,345" in text and "1h 01m" in text and "0.25" in text
    assert len(lines) == (4 if width >= 80 else 6)


def test_watch_fits_every_width_in_place_to_the_end(store, heart, terminal):
    lines = terminal.wait_for("arithmetic: training")
    assert_one_picture(lines, 80)
    scrolled = terminal.num_scrolled_away()
    terminal.wait_for_step(heart.step + 4)
    assert_one_picture(terminal.lines(), 80)
    assert terminal.num_scrolled_away() == scrolled

    for width in (100, 60, 80):
        terminal.resize(width)
        terminal.wait_for_picture(width)
        terminal.wait_for_step(heart.step + 4)
        assert_one_picture(terminal.lines(), width)
    scrolled = terminal.num_scrolled_away()
    terminal.wait_for_step(heart.step + 4)
    assert terminal.num_scrolled_away() == scrolled

    heart.stop()
    folder = store.local_path("trainer")
    os.rename(folder, folder.with_name("moved"))
    folder.touch()
    terminal.wait_for("the store does not answer")
    folder.unlink()
    os.rename(folder.with_name("moved"), folder)
    terminal.wait_for("no heartbeat from the Trainer for")

    store.put("summary.json", b'{"run": "arithmetic", "steps": 80, "accuracy_after": 0.785}')
    assert terminal.status_at_its_end() == 0
    lines = terminal.wait_for("0.785")
    assert "Accuracy after training" in "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "Traceback" in line or "Warning" in line or "ERROR" in line]


def test_a_starting_trainer_says_what_the_run_waits_for():
    assert stage_of({"state": "starting", "step": 0}) == (
        "starting: the Trainer imports torch and loads the model (10 to 30 s)"
    )
    assert stage_of({"state": "waiting", "step": 0, "message": "too early"}) == "too early"
    assert stage_of({"state": "training", "step": 1}) == "training"


SLOW_PREFECT = """
import sys, time
class Slow:
    def find_spec(self, name, *_):
        if name == "prefect":
            open("importing", "w").close()
            time.sleep(120)
sys.meta_path.insert(0, Slow())
"""


def test_an_interrupt_during_imports_prints_nothing(tmp_path):
    prepare_run((tmp_path / ".tba").as_uri(), "run", steps=3)
    (tmp_path / "sitecustomize.py").write_text(SLOW_PREFECT)
    named = {"PREFECT_API_URL": "http://127.0.0.1:1/api"}  # otherwise there is no server to ask
    environment = os.environ | named | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    environment.pop("TBA_STORE", None)
    with open(tmp_path / "output", "w") as output:
        watch = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "watch", "run"],
            cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    deadline = time.monotonic() + PATIENCE_S
    while not ((tmp_path / "importing").exists() and (tmp_path / "output").read_text()):
        assert time.monotonic() < deadline and watch.poll() is None
        time.sleep(0.1)
    watch.send_signal(signal.SIGINT)
    assert watch.wait(PATIENCE_S) == 130
    shown = (tmp_path / "output").read_text()
    assert "step 3/80" in shown and "leaked" not in shown and "Traceback" not in shown
