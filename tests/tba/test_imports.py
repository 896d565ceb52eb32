"""Which functions a configuration may name, as rewards or data.

Claims
- Python's own modules, this project's, names of Python's own and texts that are no names are refused as the
  configuration is made and as a reward is loaded, and nothing is imported
- a function of the standard library is refused by the name of a module that imported it, too
- functions of the working folder and of installed packages are loaded; a file there may have a standard module's name
- a configuration of before that names a reward still reads

pytest tests/tba/test_imports.py
"""

import importlib.util
import sys

import pytest
from pydantic import ValidationError

from flows.config import RunConfig
from tba.config import TaskSettings
from tba.imports import is_users_own, load_function
from tba.rewards import load_reward
from tba.tasks.dataset import Dataset

REFUSED = {
    "os:system": "standard library",
    "subprocess:getoutput": "standard library",
    "builtins:exec": "standard library",
    "builtins:eval": "standard library",
    "importlib:import_module": "standard library",
    "posix:system": "standard library",
    "_posixsubprocess:fork_exec": "standard library",
    "os.path:join": "standard library",
    "test.autotest:main": "standard library",
    "xmlrpc.client:loads": "standard library",
    "runpy:run_path": "standard library",
    "antigravity:geohash": "standard library",
    "tba.imports:load_function": "part of this project",
    "tba.tasks.rows:read_rows": "part of this project",
    "infra.local_s3:run": "part of this project",
    "storage.store:read_url": "part of this project",
    "flows.train:end": "part of this project",
    "__main__:main": "Python's own",
    "my_rewards:__class__": "Python's own",
    "my_rewards.__builtins__:exec": "Python's own",
    "my_rewards:__builtins__": "Python's own",
    "my_rewards": "write module:function",
    ":brief": "write module:function",
    "my_rewards:": "write module:function",
    "my_rewards:brief.__globals__": "write module:function",
    "my_rewards:a.b": "write module:function",
    ".my_rewards:brief": "write module:function",
    "../my_rewards:brief": "write module:function",
    "my_rewards:brief:more": "write module:function",
    "my rewards:brief": "write module:function",
}
MINE = """
from os import system
from subprocess import getoutput as brief_not
from functools import partial
import json

def brief(completions, **columns):
    return [0.0] * len(completions)

def made(n):
    return brief

shorter = partial(brief)
shell = partial(system, "true")

class Reward:
    def __call__(self, completions, **columns):
        return [1.0] * len(completions)

graded = Reward()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with my_rewards.py."""
    (tmp_path / "my_rewards.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name in ("my_rewards", "this", "tabnanny"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_not_be_imported_is_refused_before_anything_is(folder, name):
    for make in (
        lambda: load_reward(name),
        lambda: load_reward(f"{name}('true')"),
        lambda: RunConfig(task={"rewards": [name]}),
        lambda: RunConfig(task={"rewards": f"task,{name}('touch x')", "reward_weights": "1,1"}),
        lambda: (
            RunConfig.model_validate({"task": {"name": "dataset", "data": f"{name}", "rewards": ["my_rewards:brief"]}})
            if ":" in name
            else load_reward(name)
        ),
        lambda: Dataset(data=name) if ":" in name else load_reward(name),
    ):
        before = set(sys.modules)
        with pytest.raises((ValueError, ValidationError), match=REFUSED[name]):
            make()
        assert not {"my_rewards", "antigravity", "xmlrpc.client"} & (set(sys.modules) - before)


@pytest.mark.parametrize("name", ["system", "brief_not", "shell"])
def test_what_a_module_took_from_python_is_refused(folder, name):
    with pytest.raises(ValueError, match="of Python's standard library"):
        load_reward(f"my_rewards:{name}('true')")
    with pytest.raises(ValueError, match="of Python's standard library"):
        load_function(f"my_rewards:{name}", "task.data")


@pytest.mark.parametrize("name", ["brief", "shorter", "graded", "made(3)"])
def test_functions_of_the_working_folder_are_loaded(folder, name):
    assert load_reward(f"my_rewards:{name}").path == f"my_rewards:{name.partition('(')[0]}"
    assert TaskSettings(rewards=[f"my_rewards:{name}"]).rewards == (f"my_rewards:{name}",)


def test_a_folder_of_modules_needs_no_init_file(folder):
    (folder / "inside").mkdir()
    (folder / "inside" / "graders.py").write_text(MINE)
    try:
        assert load_reward("inside.graders:made(3)").path == "inside.graders:made"
        (folder / "inside" / "graders-1.0.dist-info").mkdir()  # pip has put it there
        assert not is_users_own("inside.graders:made")
    finally:
        for name in ("inside", "inside.graders"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("place", ["", "run", "somebodys/run"])
def test_files_of_a_store_in_the_working_folder_are_not_imported(folder, place):
    """Other people may write to it."""
    run = folder / "runs" / place
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text("{}")
    (folder / "runs" / "evil.py").write_text("raise SystemExit('it was imported')")
    with pytest.raises(ValueError, match=r"runs is in a store, whose files may be other people's"):
        load_reward("runs.evil:reward")


def test_files_of_a_store_deep_in_the_working_folder_are_not_imported(folder):
    run = folder / "results/team/store/run"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "evil.py").write_text("raise SystemExit('it was imported')")
    with pytest.raises(ValueError, match=r"team is in a store, whose files may be other people's"):
        load_reward("results.team.store.run.evil:reward")


def test_functions_of_installed_packages_are_loaded():
    assert callable(load_function("scipy.special:logit", "reward"))
    assert callable(load_function("rich.markup:escape", "reward"))


def test_a_file_may_have_the_name_of_a_standard_module_that_is_not_loaded(folder):
    name = next(name for name in ("this", "tabnanny") if name not in sys.modules)
    with pytest.raises(ValueError, match="standard library"):
        load_function(f"{name}:brief", "reward")
    (folder / f"{name}.py").write_text(MINE)
    importlib.invalidate_caches()
    assert TaskSettings(rewards=[f"{name}:brief"])
    assert load_function(f"{name}:brief", "reward")
    (folder / "os.py").write_text(MINE)  # which every process has loaded already, from Python
    with pytest.raises(ValueError, match=r"if os\.py is a file of yours, give it another name"):
        load_function("os:system", "reward")


def test_files_and_datasets_are_no_functions(tmp_path):
    for data in (str(tmp_path / "a:b.jsonl"), "openai/gsm8k", str(tmp_path / "rows.parquet"), None):
        assert TaskSettings(data=data).data == data
