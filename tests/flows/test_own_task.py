"""The README's task of one's own trains as it is printed there.

- The file has at most 25 lines of code; the command's settings and the file's functions pass every check of a run.
- Searched, committed, trained and evaluated by the flows' own steps, with a tiny model: rewards are stored by
  component, the prompts are the chats that the model's template renders, and a reward's weight counts.

python -m pytest tests/flows/test_own_task.py
"""

import os
import re
import shlex
import string
import sys
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger
from typer.testing import CliRunner

import tba.engines
from flows.cli import train
from flows.cli.app import app
from flows.run.preflight import check_inputs
from flows.search import evaluate, finish_round
from flows.searcher.held_name import held_name
from flows.searcher.policy_feed import PolicyFeed
from flows.searcher.start import start_searcher
from flows.trainer.__main__ import learn
from storage.kept_policies import best_policy
from storage.queries import query
from storage.store import RunStore
from tba.transformers_engine import TransformersEngine
from tests.character_model import save_character_model

README = (Path(__file__).parents[2] / "README.md").read_text()
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture
def model(tmp_path) -> Path:
    return save_character_model(tmp_path / "model", string.printable, chat_template=TEMPLATE)


def test_the_readmes_task_trains(model, tmp_path, monkeypatch):
    name, code = re.search(r"as `(\w+)\.py`:\n\n```python\n(.+?)```", README, re.DOTALL).groups()
    command = re.search(rf"^    (tba train {name} .+)$", README, re.MULTILINE)[1]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 25
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(
        tba.engines, "make_engine", lambda folder, arguments, lora_rank, **limits: TransformersEngine(folder, **limits)
    )
    configs = []
    monkeypatch.setattr(train, "_train", lambda project, config, store: configs.append(config))
    small = "--set search.samples_per_prompt=4 --set search.prompts_per_round=18 --set sampling.responses_per_prompt=4"
    small += f" --set task.reward_weights=1,2 --set sampling.min_size=1 --model {model} --steps 2"
    result = CliRunner().invoke(app, shlex.split(f"{command} {small}")[1:])
    assert result.exit_code == 0, result.output
    (config,) = configs
    assert name not in sys.modules  # a model that it loads would take memory in the command and in the flow, too
    check_inputs(config)
    store = RunStore(config.store, config.run)
    store.create_run(config.recorded())
    with disable_run_logger():
        searcher = start_searcher(config, "s0", 0)
        searcher.load(model, 0)
        assert finish_round(store, searcher, searcher.sample(0)) == "committed"
        learn(config.store, config.run, os.getppid())
        policy = PolicyFeed(store, searcher).next()
        with held_name(store, "s0") as held:
            evaluate(store, searcher, held, 2, policy)
    rows = query(store, "SELECT prompt, rewards, reward FROM trajectories").to_pylist()
    assert len(rows) == 18 * 4
    for row in rows:
        assert re.fullmatch(r"<user>What is the capital of \w+\?<assistant>", row["prompt"])
        components = dict(row["rewards"])
        assert set(components) == {"named", "brief"} and components["brief"] >= -32 / 64
        assert row["reward"] == pytest.approx(components["named"] + 2 * components["brief"])
    assert query(store, "SELECT max(step) FROM training_steps").column(0).to_pylist() == [2]
    (evaluation,) = query(store, "SELECT num_problems, policy_step, accuracy, seconds FROM evaluations").to_pylist()
    best = best_policy(store)
    assert (evaluation["num_problems"], evaluation["policy_step"]) == (2, 2) and evaluation["seconds"] > 0
    assert (best.path, best.accuracy, best.num_problems) == (policy.path, evaluation["accuracy"], 2)


def test_a_reward_that_ends_its_process(model, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def data(): return [{'prompt': str(number), 'answer': 'b'} for number in range(300)]\n"
        "def reward(completions, **_): os._exit(7)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_train", lambda *_: pytest.fail("training began"))
    given = f"train mine --task dataset --data mine:data --set task.rewards=mine:reward --model {model}"
    result = CliRunner().invoke(app, given.split())
    assert result.exit_code == 2 and "the process that tries data and rewards ended early" in result.stderr
