"""`tba train` without a server, and the arguments of other commands.

Claims
- bad input ends with status 2 and one line a mistake (field, value got, rule), before anything is started or written
- options and --set come together in one RunConfig; a run is called after its task; local paths become absolute
- a finished run prints its summary and starts nothing
- a refused input, or a Trainer unknown to Prefect, ends the command before it submits
- a Prefect server that fails, and a damaged summary, are one line
- a second Ctrl-C waits until the run is stopped; signals are heard again after it; it tells how many steps are lost
- a heartbeat that cannot be read is shown, and the run is followed on
- a flow run that took the run over is followed in the place of the first one, and Ctrl-C stops it
- right after `tba stop`, while the flow run still ends, it waits for that and resumes; one that resumes is followed

Run: pytest tests/flows/cli/test_train.py
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace
from uuid import uuid4

import httpx
import pytest
import typer
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed, Crashed, Running
from typer.testing import CliRunner

from flows.cli import train
from flows.cli.app import app
from flows.cli.train import _refuse_live_trainer
from flows.config import RunConfig
from flows.run import flow_runs
from infra import prefect_server, stack
from storage import attempts
from storage.process_identity import Identity
from storage.store import RunStore


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project's folder as working folder, with a stack that must not be started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TBA_STORE", raising=False)
    monkeypatch.setattr(stack, "up", lambda *_, **__: pytest.fail("the stack was started"))
    return tmp_path


@pytest.fixture
def checked(monkeypatch):
    """The configurations that were handed to the input check, which finds nothing here: the real one needs a model."""
    configs = []
    monkeypatch.setitem(
        sys.modules,
        "flows.run.preflight",
        SimpleNamespace(check_inputs_in_a_process=lambda config: configs.append(config) or []),
    )
    return configs


def tba(*arguments: str):
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["../elsewhere"], "run: got '../elsewhere'"),
        (["a/b"], "run: got 'a/b'"),
        (["--steps", "0"], "train.steps: got 0; Input should be greater than or equal to 1"),
        (["--set", "train.beta=0"], "train.beta is 0, and tb divides by it; give a number greater than 0"),
        (["--set", "train=5"], "train: got '5'; it is a group of settings: name one of objective, "),
        (["--set", "train.beta=much"], "train.beta: got 'much'; Input should be a valid number"),
        (["--set", "sampling.recent_probability=1.5"], "sampling.recent_probability: got '1.5'"),
        (["--set", "sampling.responses_per_prompt=30"], "sampling.responses_per_prompt (K) is 30"),
        (["--set", "train.betta=1"], "train.betta: there is no such setting; settings of this group: objective, resid"),
        (["--set", "betta=1"], "betta: there is no such setting; settings of this group: run, store"),
        (["--set", "beta=0.1"], "beta: there is no such setting; there is train.beta"),
        (
            ["--set", "search.exploration_top_p=0.8,1"],
            "search.exploration_top_p: got '0.8,1'; give a list, such as [0.8,1]",
        ),
        (
            ["--data", "s3://bucket/train.json"],
            "task.data: got 's3://bucket/train.json'; write module:function, such as",
        ),
        (["--set", "train.beta"], "--set train.beta: has no '='"),
        (["--set", "x=" + "[" * 100_000], "--set x=[[["),
        (["--set", "search.engine.a=" + "[" * 100_000], "--set search.engine.a=[[["),
        (
            ["--set", "task.missing_eos_reward=nan"],
            "task.missing_eos_reward: got 'nan'; Input should be a finite number",
        ),
        (["--set", 'search.engine.cpu_offload_gb="\ud800"'], "a setting cannot be written to run.json"),
        (
            ["--set", "search.engine.block_size=abc"],
            "search.engine: block_size is 'abc'; give a whole number of at least 1",
        ),
        (
            ["--set", "search.engine.gpu_memory_utilization=90"],
            "search.engine: gpu_memory_utilization is 90; give a number above 0, at most 1",
        ),
        (
            ["--set", "search.engine.gpu_memory_utilization=0,9"],
            "search.engine: gpu_memory_utilization is '0,9'; give a number above 0, at most 1",
        ),
        (["--set", "warm_start=s3://KEY:SECRET@bucket/run"], "warm_start: got 's3://…@bucket/run'"),
        (["--set", "s3://KEY:SE/CRET@bucket/run"], "--set s3://…@bucket/run: has no '='"),
        (
            ["--set", "search.exploration_top_p=[0.8"],
            "--set search.exploration_top_p=[0.8: is not JSON; write a list as",
        ),
        (["--searchers", "2", "--set", "searchers.more=1"], "--set searchers.more: searchers is a setting"),
    ],
)
def test_bad_input_is_one_line_before_any_work(project, checked, arguments, message):
    result = tba("train", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message) and "SECRET" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not checked
    assert list(project.iterdir()) == []


@pytest.mark.parametrize("command", [["train"], ["verify", "run"], ["sql", "run", "SELECT 1"], ["runs"], ["compare"]])
def test_an_empty_store_is_no_store(project, checked, command):
    result = tba(*command, "--store", "")
    assert result.exit_code == 2
    assert result.stderr.startswith("--store: got an empty text") and len(result.stderr.splitlines()) == 1


def test_every_mistake_is_told_at_once(project, checked):
    result = tba("train", "--steps", "0", "--set", "train.beta=-1")
    assert len(result.stderr.splitlines()) == 2


def test_options_and_settings_come_together(project, checked):
    (project / "problems.jsonl").touch()
    store = RunStore((project / "runs").as_uri(), "gsm8k")
    store.put("summary.json", b'{"run": "gsm8k"}')
    options = "--task gsm8k --data problems.jsonl --store runs --model org/name --steps 7 --seed 3"
    prompts = '["Think, then answer.", "Be brief."]'
    explored = ["--set", "search.exploration_probability=0.3", "--set", f"search.system_prompts={prompts}"]
    tba("train", *options.split(), "--set", "train.beta=0.2", "--set", "sampling.reward_temperature=null", *explored)
    (config,) = checked
    assert config.search.system_prompts == ("Think, then answer.", "Be brief.")
    assert (config.run, config.task.name) == ("gsm8k", "gsm8k")
    assert config.task.data == str(project / "problems.jsonl")
    assert config.store == (project / "runs").as_uri()
    assert config.model == "org/name"  # no such folder here, so it is left as it is
    assert (config.train.steps, config.seed, config.train.beta) == (7, 3, 0.2)
    assert config.sampling.reward_temperature is None
    tba(
        "train",
        "--store",
        "runs",
        "--set",
        "task.data=problems.jsonl",
        "--set",
        'task={"name": "gsm8k", "victim": "runs"}',
    )
    assert (checked[1].task.data, checked[1].task.victim) == (config.task.data, str(project / "runs"))


@pytest.mark.parametrize("first", [True, False])
def test_a_group_as_an_object_keeps_what_was_set_in_it(project, checked, first):
    store = RunStore((project / ".tba").as_uri(), "gsm8k")
    store.put("summary.json", b'{"run": "gsm8k"}')
    groups = ["--set", 'train={"beta": 0.1}', "--set", 'search={"engine": {"dtype": "float16"}}']
    parts = ["--set", "train.weight_decay=0.5", "--set", "search.engine.block_size=32", "--set", "train.beta=0.2"]
    tba("train", "--task", "gsm8k", "--steps", "7", *(groups + parts if first else parts + groups))
    (config,) = checked
    assert (config.task.name, config.train.steps, config.train.weight_decay) == ("gsm8k", 7, 0.5)
    assert config.search.engine == {"dtype": "float16", "block_size": 32}
    assert config.train.beta == (0.2 if first else 0.1)  # the later one
    twice = ["--set", 'train={"beta": 0.1}', "--set", "train.beta=0.3", "--set", 'train={"weight_decay": 0.5}']
    tba("train", "gsm8k", *twice)
    assert (checked[1].train.beta, checked[1].train.weight_decay) == (0.3, 0.5)


def test_a_finished_run_prints_its_summary_and_starts_nothing(project, checked):
    summary = {"run": "done", "accuracy_before": 0.36, "accuracy_after": 0.8125, "staleness_max": 4}
    RunStore((project / ".tba").as_uri(), "done").put("summary.json", json.dumps(summary).encode())
    result = tba("train", "done")
    assert result.exit_code == 0
    assert "'done' is finished" in result.stdout
    assert "0.812" in result.stdout and "0.360" in result.stdout


def test_what_the_check_refuses_is_the_message(project, monkeypatch):
    def refuse(config):
        raise ValueError("task: got 'chess'; known tasks: arithmetic, gsm8k")

    monkeypatch.setitem(sys.modules, "flows.run.preflight", SimpleNamespace(check_inputs_in_a_process=refuse))
    result = tba("train", "--task", "chess")
    assert (result.exit_code, result.stderr) == (2, "task: got 'chess'; known tasks: arithmetic, gsm8k\n")


def test_what_the_check_warns_of_is_printed(project, monkeypatch):
    RunStore((project / ".tba").as_uri(), "done").put("summary.json", json.dumps({"run": "done"}).encode())
    warns = SimpleNamespace(
        check_inputs_in_a_process=lambda config: ["store: s3://bucket does not honour create-if-absent"]
    )
    monkeypatch.setitem(sys.modules, "flows.run.preflight", warns)
    result = tba("train", "done")
    assert (result.exit_code, result.stderr) == (0, "WARNING: store: s3://bucket does not honour create-if-absent\n")


def test_a_live_trainer_that_prefect_does_not_know_is_named(project, capsys):
    store = RunStore((project / ".tba").as_uri(), "elsewhere")
    owner = Identity.current()
    attempts.start_attempt(store, 0, owner)
    stop = threading.Event()

    def beat():
        while not stop.wait(0.1):
            attempts.write_heartbeat(store, {"at": time.time(), "owner": asdict(owner)})

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(typer.Exit) as exit_:
        _refuse_live_trainer(store)
    stop.set()
    thread.join()
    assert exit_.value.exit_code == 1
    assert f"pid {os.getpid()}" in capsys.readouterr().err


def test_a_second_interrupt_waits_until_the_run_is_stopped(project, monkeypatch):
    """Else it would train on under a stack that stays."""
    stopped = []

    def cancel(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        stopped.append("run")

    def follow(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stack, "up", lambda *_, **__: "http://127.0.0.1:1/api")
    monkeypatch.setattr(stack, "leave", lambda *_, **__: stopped.append("stack"))
    monkeypatch.setattr(prefect_server, "api", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(flow_runs, "live_run", lambda *_: None)
    monkeypatch.setattr(flow_runs, "mark_crashed", lambda *_: 0)
    monkeypatch.setattr(flow_runs, "submit", lambda *_: SimpleNamespace(id=uuid4()))
    monkeypatch.setattr(flow_runs, "cancel", cancel)
    monkeypatch.setattr(train, "_follow", follow)
    config = RunConfig(store=(project / ".tba").as_uri())
    with pytest.raises((typer.Exit, KeyboardInterrupt)) as exit_:
        train._train(project, config, RunStore(config.store, config.run))
    assert stopped == ["run", "stack"]
    assert exit_.value.exit_code == 130


def test_the_steps_behind_the_newest_checkpoint_are_told(project, monkeypatch):
    store = RunStore((project / ".tba").as_uri(), "some")
    assert train._unsaved(store) == ""  # before the first heartbeat
    attempts.write_heartbeat(store, {"state": "training", "step": 7})
    assert "checkpoint is of step 0, so 7 steps are trained again; `tba stop` saves" in train._unsaved(store)
    attempts.write_heartbeat(store, {"state": "finished", "step": 7})
    assert train._unsaved(store) == ""
    attempts.write_heartbeat(store, {"state": "training", "step": 7})
    monkeypatch.setattr("storage.checkpoints.list_checkpoints", lambda store: [SimpleNamespace(step=n) for n in (5, 7)])
    assert train._unsaved(store) == ""
    store.put(attempts.HEARTBEAT, b"{")
    assert train._unsaved(store) == ""


def test_a_heartbeat_that_cannot_be_read_ends_no_run(tmp_path, monkeypatch, capsys):
    """The next one of a living Trainer replaces it."""
    store, states = RunStore(tmp_path.as_uri(), "some"), [Running(), Running(), Completed()]
    store.put(attempts.HEARTBEAT, b"{")
    monkeypatch.setattr(
        "flows.cli.console.Progress.wait", lambda *_: attempts.write_heartbeat(store, {"step": 1, "state": "x"})
    )
    assert train._follow(SimpleNamespace(state=lambda: states.pop(0)), store, None).is_completed()
    assert "the heartbeat cannot be read: cannot read trainer/heartbeat.json" in capsys.readouterr().out


def test_signals_are_heard_again_after_a_failure():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), train._uninterrupted():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_flow_run_that_took_a_run_over_is_followed(project, monkeypatch, capsys):
    first, second = SimpleNamespace(id=uuid4()), SimpleNamespace(id=uuid4())
    ends, followed = {first.id: Crashed(), second.id: Completed()}, []
    live = iter([None, second])

    def follow(view: train.FlowRunView, *_: object):
        followed.append(view._flow_run)
        if view._flow_run.id not in ends:
            raise KeyboardInterrupt
        return ends[view._flow_run.id]

    monkeypatch.setattr(stack, "up", lambda *_, **__: "http://elsewhere:1/api")
    monkeypatch.setattr(stack, "leave", lambda *_, **__: None)
    monkeypatch.setattr(prefect_server, "api", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(flow_runs, "live_run", lambda *_: next(live))
    monkeypatch.setattr(flow_runs, "mark_crashed", lambda *_: 0)
    monkeypatch.setattr(flow_runs, "submit", lambda *_: first)
    monkeypatch.setattr(train, "_follow", follow)
    monkeypatch.setattr(train, "_tell_end", lambda *_: None)
    config = RunConfig(store=(project / ".tba").as_uri())
    train._train(project, config, RunStore(config.store, config.run))
    assert followed == [first, second]
    assert f"Flow run {second.id} has taken the run over" in capsys.readouterr().out

    live, cancelled = iter([None, second]), []
    ends = {first.id: Crashed()}  # Ctrl-C while the second one is followed
    monkeypatch.setattr(flow_runs, "cancel", lambda url, credentials, flow_run: cancelled.append(flow_run))
    with pytest.raises(typer.Exit):
        train._train(project, config, RunStore(config.store, config.run))
    assert cancelled == [second]


@pytest.mark.parametrize("resumes_already", [False, True])
def test_a_run_that_was_just_stopped_is_resumed(project, monkeypatch, resumes_already):
    ending, new, followed = SimpleNamespace(id=uuid4()), SimpleNamespace(id=uuid4()), []
    config = RunConfig(store=(project / ".tba").as_uri())
    store = RunStore(config.store, config.run)
    attempts.write_heartbeat(store, {"state": "stopped", "step": 3})
    states = [Running(), Running(), Completed(name="Stopped")]

    def state(view: train.FlowRunView):
        if resumes_already and len(states) == 2:
            attempts.write_heartbeat(store, {"state": "training", "step": 3})
        return states.pop(0)

    def follow(view: train.FlowRunView, *_: object):
        followed.append(view._flow_run)
        return Completed()

    monkeypatch.setattr(stack, "up", lambda *_, **__: "http://127.0.0.1:1/api")
    monkeypatch.setattr(stack, "leave", lambda *_, **__: None)
    monkeypatch.setattr(prefect_server, "api", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(flow_runs, "live_run", lambda *_: ending)
    monkeypatch.setattr(flow_runs, "mark_crashed", lambda *_: 0)
    monkeypatch.setattr(flow_runs, "submit", lambda *_: new)
    monkeypatch.setattr(train.FlowRunView, "state", state)
    monkeypatch.setattr(train, "_follow", follow)
    monkeypatch.setattr(train, "_tell_end", lambda *_: None)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    train._train(project, config, store)
    assert followed == [ending if resumes_already else new]


@pytest.mark.parametrize("error", [httpx.ReadTimeout("no answer"), ObjectNotFound(Exception("404"))])
def test_a_server_that_fails_is_one_line(project, monkeypatch, capsys, error):
    def fail(*_: object) -> None:
        raise error

    left = []
    monkeypatch.setattr(stack, "up", lambda *_, **__: "http://elsewhere:1/api")
    monkeypatch.setattr(stack, "leave", lambda *_, **__: left.append("stack"))
    monkeypatch.setattr(prefect_server, "api", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(flow_runs, "live_run", fail)
    config = RunConfig(store=(project / ".tba").as_uri())
    with pytest.raises(typer.Exit):
        train._train(project, config, RunStore(config.store, config.run))
    said = capsys.readouterr().err
    assert said.startswith(
        f"The Prefect server at http://elsewhere:1/api refuses or fails: {error!r}. The same command"
    )
    assert left == ["stack"]


def test_a_damaged_summary_is_one_line(project, checked):
    RunStore((project / ".tba").as_uri(), "done").put("summary.json", b'{"run"')
    result = tba("train", "done")
    assert result.exit_code == 2 and result.stderr.startswith("cannot read summary.json"), result.output


@pytest.mark.parametrize("own", ["storage/__init__.py", "flows.py"])
def test_a_package_of_the_users_that_would_hide_ours_is_named(project, own):
    (project / own).parent.mkdir(exist_ok=True)
    (project / own).touch()
    (project / "infra").mkdir()  # without Python in it, a folder of that name hides nothing
    for command in ("train", "up", "down"):
        result = tba(command)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"{project / own} would be imported in place of tba's own package")
