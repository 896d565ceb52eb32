"""One Trainer works on a run (flows/trainer/__main__.py), with real processes that hold the run but train nothing.

Claims
- a run is claimed before anything heavy is imported
- of two Trainers started at once exactly one begins; the other says so, ends with its own status and writes nothing
- after a SIGKILL the next one begins at once
- a Trainer that froze while another took over ends when it wakes, and writes nothing more
- a Trainer that is told to end (SIGTERM) does so between two steps, and says that it can be resumed
- a Trainer whose flow is gone ends, unless it is stopping: then it saves first
- the flow does not retry where the run is another's, nor takes the Trainer of a machine with its name for its own
- a resume takes the newest whole checkpoint; a run that had one and has none that is whole does not begin at step 0

Run: pytest tests/flows/trainer/test_one_trainer.py
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from flows.config import RunConfig
from flows.train import attempt_of
from flows.trainer import ALREADY_TRAINING
from flows.trainer import __main__ as trainer_main
from flows.trainer.__main__ import learn
from storage import attempts, checkpoints, policies
from storage.process_identity import Identity
from storage.store import RunStore
from tests.storage.helpers import OWNER, start_python

# The real process but for training, and so without torch: it says when it is ready and begins on a line from us.
TRAINER = """
import sys, time
from types import SimpleNamespace
from flows.trainer import __main__, heartbeat

def train_run(store, config, attempt, heart, files):
    heart.tell("training", 1, {})
    print("training", flush=True)
    heart.stop.wait()
    return "stopped"

sys.modules["flows.trainer.session"] = SimpleNamespace(train_run=train_run)
heartbeat.HEARTBEAT_S = 0.5
print("ready", flush=True)
input()
sys.exit(__main__.main(*sys.argv[1:]))
"""
START_S = 60  # of a busy machine


@pytest.fixture
def store(tmp_path) -> RunStore:
    store = RunStore(tmp_path.as_uri(), "run")
    store.create_run(RunConfig(run="run").recorded())
    return store


@pytest.fixture
def start(store):
    """start() -> a Trainer's process that waits for the word to begin."""
    processes = []

    def start(parent: int | None = None) -> subprocess.Popen:
        processes.append(start_python(TRAINER, store.url, store.run, str(parent or os.getpid())))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def begin(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def contents(store: RunStore) -> dict[str, bytes]:
    return {path: store.get(path) for path in store.list("")}


def test_of_two_started_at_once_one_begins_and_the_next_follows_a_kill_at_once(store, start):
    trainers = [start() for _ in range(3)]
    for process in trainers:
        assert process.stdout.readline() == "ready\n"
    first_two, third = trainers[:2], trainers[2]
    for process in first_two:
        begin(process)
    deadline = time.monotonic() + START_S
    while all(process.poll() is None for process in first_two):
        assert time.monotonic() < deadline, "both train"
        time.sleep(0.1)
    winner, loser = sorted(first_two, key=lambda process: process.poll() is not None)
    assert loser.returncode == ALREADY_TRAINING
    assert winner.stdout.readline() == "training\n" and winner.poll() is None
    assert attempts.newest_attempt(store).owner.pid == winner.pid
    assert store.list("") == ["run.json", "trainer/attempt=00000001.json", attempts.HEARTBEAT]
    assert json.loads(store.get(attempts.HEARTBEAT))["owner"]["pid"] == winner.pid

    winner.send_signal(signal.SIGKILL)
    winner.wait()
    killed_at = time.monotonic()
    begin(third)
    assert third.stdout.readline() == "training\n"
    assert time.monotonic() - killed_at < 5
    assert (attempts.latest_attempt(store), attempts.newest_attempt(store).owner.pid) == (2, third.pid)

    third.send_signal(signal.SIGTERM)
    assert third.wait(timeout=START_S) == 0
    beat = json.loads(store.get(attempts.HEARTBEAT))
    assert (beat["state"], beat["step"]) == ("stopped", 1)


def test_a_run_is_claimed_before_anything_heavy_is_imported():
    """The flow starts Searchers as soon as the run is claimed; torch takes ten seconds."""
    python = start_python(
        "import sys, flows.trainer.__main__; print({'torch', 'transformers', 'accelerate'} & set(sys.modules))"
    )
    assert python.communicate()[0] == "set()\n"


def test_a_frozen_trainer_ends_when_it_wakes_and_writes_no_more(store, start):
    frozen = start()
    begin(frozen)
    while not store.exists(attempts.HEARTBEAT):
        time.sleep(0.1)
    frozen.send_signal(signal.SIGSTOP)
    attempts.start_attempt(store, 0, OWNER)  # on another machine, which saw no heartbeat
    before = contents(store)
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait(timeout=START_S) == 1
    assert contents(store) == before


def test_a_trainer_whose_flow_is_gone_ends(store, start):
    flow = subprocess.Popen(["true"])
    flow.wait()
    orphan = start(parent=flow.pid)
    begin(orphan)
    assert orphan.wait(timeout=START_S) == 1
    assert not store.exists(attempts.HEARTBEAT)


def test_a_trainer_that_is_stopping_saves_although_its_flow_is_gone(store):
    """Ctrl-C in a terminal reaches the worker, too, which kills the flow at once. A step is in one operation of torch,
    until whose end the main thread runs no handler of a signal."""
    step = "threading.Timer(1, setattr, [os, 'getppid', lambda: 1]).start(); pbkdf2_hmac('sha256', b'', b'', 8_000_000)"
    script = "import os, threading\nfrom hashlib import pbkdf2_hmac\n" + TRAINER.replace("heart.stop.wait()", step)
    trainer = start_python(script, store.url, store.run, str(os.getpid()))
    begin(trainer)
    assert [trainer.stdout.readline() for _ in range(2)] == ["ready\n", "training\n"]
    trainer.send_signal(signal.SIGINT)
    assert trainer.wait(timeout=START_S) == 0
    assert attempts.read_heartbeat(store)["state"] == "stopped"


@pytest.fixture
def resumed(store, monkeypatch):
    """resumed() -> the path of the checkpoint that a Trainer resumes from, which trains nothing; "": it begins at 0."""
    taken = []
    session = SimpleNamespace(train_run=lambda *given: (taken.append(given[-1]), "stopped")[1])
    monkeypatch.setitem(sys.modules, "flows.trainer.session", session)
    monkeypatch.setattr(trainer_main, "stop_by_signals", lambda stop: None)
    monkeypatch.setattr(attempts, "is_alive", lambda *_: False)  # this process, which was each Trainer

    def resumed() -> str:
        learn(store.url, store.run, os.getppid())
        record, files = attempts.newest_attempt(store), taken[-1]
        assert attempts.read_heartbeat(store)["step"] == record.resumed_from, "`tba runs` shows it"
        if record.checkpoint:
            assert json.loads((Path(files.name) / "state.json").read_text())["step"] == record.resumed_from
        else:
            assert files is None and record.resumed_from == 0
        return record.checkpoint

    return resumed


def save_checkpoint(store: RunStore, folder: Path, step: int, attempt: int) -> str:
    folder.mkdir(exist_ok=True)
    save_file({"weight": np.zeros(4, np.float32)}, folder / "trainer.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": step}))
    checkpoints.save_checkpoint(store, step, folder, attempt)
    return checkpoints.checkpoint_path(step, attempt)


def test_a_run_resumes_from_its_newest_whole_checkpoint(store, resumed, tmp_path):
    assert resumed() == ""
    whole, torn = (save_checkpoint(store, tmp_path / "checkpoint", step, 1) for step in (50, 100))
    store.put(f"{torn}/trainer.safetensors", b"")
    assert resumed() == whole
    assert attempts.newest_attempt(store).resumed_from == 50
    save_checkpoint(store, tmp_path / "checkpoint", 100, 2)
    assert resumed() == "trainer/step=00000100-a0002"


def test_a_checkpoint_with_wrong_bytes_is_not_resumed_from(store, resumed, tmp_path, caplog):
    resumed()
    older, newer = (save_checkpoint(store, tmp_path / "checkpoint", step, 1) for step in (50, 100))
    weights = store.get(f"{newer}/trainer.safetensors")
    store.put(f"{newer}/trainer.safetensors", weights[:-1] + b"\1")
    assert resumed() == older
    assert attempts.newest_attempt(store).resumed_from == 50
    assert f"checkpoint {newer} of run run in {store.url} is damaged: trainer.safetensors" in caplog.text
    store.put(f"{older}/trainer.safetensors", weights[:-1] + b"\1")
    with pytest.raises(RuntimeError, match=r"has trained 50 steps, but no checkpoint .*--warm-start run"):
        resumed()
    assert store.exists(f"{older}/state.json")


def test_a_checkpoint_that_a_cut_off_trainer_saves_before_the_claim_is_resumed_from(
    store, resumed, tmp_path, monkeypatch
):
    """It has deleted the one that was chosen."""
    assert resumed() == ""
    chosen = save_checkpoint(store, tmp_path / "checkpoint", 50, 1)
    start_attempt = attempts.start_attempt

    def late(*arguments, **named) -> int:
        save_checkpoint(store, tmp_path / "checkpoint", 100, 1)
        store.delete_folder(chosen, first="state.json")
        return start_attempt(*arguments, **named)

    monkeypatch.setattr(attempts, "start_attempt", late)
    assert resumed() == checkpoints.checkpoint_path(100, 1)
    record = attempts.read_attempt(store, 2)
    assert (record.resumed_from, record.checkpoint) == (100, checkpoints.checkpoint_path(100, 1))
    assert [found.step for found in checkpoints.list_checkpoints(store)] == [100]


def test_a_run_that_lost_its_checkpoints_does_not_begin_at_step_0(store, resumed, tmp_path):
    resumed()
    whole = save_checkpoint(store, tmp_path / "checkpoint", 50, 1)
    weights = store.get(f"{whole}/trainer.safetensors")
    store.put(f"{whole}/trainer.safetensors", b"")  # before any resume
    with pytest.raises(RuntimeError, match="has trained 50 steps, but no checkpoint"):
        resumed()
    assert attempts.latest_attempt(store) == 1
    store.put(f"{whole}/trainer.safetensors", weights)
    assert resumed() == whole
    store.put(f"{whole}/state.json", b"")
    with pytest.raises(RuntimeError, match=r"has trained 50 steps, but no checkpoint .*--warm-start run"):
        resumed()
    assert attempts.latest_attempt(store) == 2


def test_a_run_far_behind_its_first_checkpoint_does_not_begin_at_step_0(store, resumed, tmp_path):
    interval = RunConfig().train.checkpoint_interval
    (tmp_path / "policy").mkdir()
    for step, may_begin in ((2 * interval, True), (2 * interval + 1, False)):
        ref = policies.policy_ref(step, f"{step:032d}", attempt=attempts.latest_attempt(store) or 1)
        policies.publish_policy(store, tmp_path / "policy", ref)
        if may_begin:
            assert resumed() == ""
        else:
            with pytest.raises(RuntimeError, match="is not begun again at step 0"):
                resumed()


def test_a_flow_does_not_take_a_namesakes_trainer_for_its_own(store):
    """Pods share names of hosts and pids."""
    attempts.start_attempt(store, 0, replace(Identity.current(), boot_id="another"))
    assert attempt_of(store, os.getpid()) is None
    attempts.start_attempt(store, 0, Identity.current())
    assert attempt_of(store, os.getpid()) == 2 and attempt_of(store, os.getppid()) is None
