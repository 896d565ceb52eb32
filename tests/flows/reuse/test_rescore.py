"""Stored trajectories scored by another reward. Run: pytest tests/flows/reuse/test_rescore.py

- Rescoring writes one file a shard and touches no shard; a second time it scores only what came since.
- A version belongs to one reward, to one source of it and to one set of answers. NaN, a wrong count, an unknown
  function: refused, by name.
- A version's newest scores count. Rounds that upkeep deletes while others are scored are left out.
- A function scores a run whose data is not here, with a warning; it gets no answers.
- The run's own reward scores the run's own prompts, also those without an answer, and no others. A function that scores
  others is warned about.
"""

import importlib
import json
import linecache
import sys

import pytest

from flows.reuse.rescore import rescore
from storage import reward_versions, shard_files, shards
from storage.store import RunStore
from tba.tasks import load_task
from tests.flows.reuse.runs import TASK, commit, files, new_run, rows_of, run_config, silent
from tests.storage.helpers import make_shard


def test_rescoring_adds_a_file_a_shard_and_touches_none(tmp_path, model, module):
    store = new_run(tmp_path, model, "scored")
    before = files(store, "trajectories")
    assert rescore(store, f"{module}:brief", None, silent) == ("brief", 16)
    assert files(store, "trajectories") == before
    assert store.list("rewards/brief") == [
        "rewards/brief/searcher=s0/round=00000000.parquet",
        "rewards/brief/searcher=s0/round=00000001.parquet",
        "rewards/brief/version.json",
    ]
    answer = int(TASK.train[0].answer)  # every response is three characters
    first = rows_of(store, "SELECT reward_version, reward FROM rewards ORDER BY trajectory_id LIMIT 1")
    assert first == [("brief", answer - 3)]
    joined = "SELECT count(*) FROM rewards JOIN trajectories USING (trajectory_id) WHERE rewards.reward <> 1"
    assert rows_of(store, joined) == [(16,)]


def test_a_cut_response_is_worth_what_the_run_sets(tmp_path, model, module):
    store = new_run(tmp_path, model, "cut", task={"missing_eos_reward": -9.0})
    cut = shard_files.read_shards(store, "s0", [0])
    store.delete(shards.shard_path("s0", 0))
    shards.commit_shard(store, reward_versions.replace_columns(cut, {"finish_reason": ["length"] * cut.num_rows}))
    rescore(store, f"{module}:brief", None, silent)
    found = rows_of(store, "SELECT round, rewards.reward = -9 FROM rewards JOIN trajectories USING (trajectory_id)")
    assert sorted(set(found)) == [(0, True), (1, False)]


def test_rescoring_again_scores_what_is_missing(tmp_path, model, module):
    store = new_run(tmp_path, model, "growing")
    rescore(store, f"{module}:brief", "v2", silent)
    store.delete("rewards/v2/searcher=s0/round=00000001.parquet")  # as if it had been interrupted before
    commit(store, model, 2, TASK.train[:3])
    before = files(store, "rewards")
    assert rescore(store, f"{module}:brief", "v2", silent) == ("v2", 8 + 12)
    assert rescore(store, f"{module}:brief", "v2", silent) == ("v2", 0)
    assert files(store, "rewards").items() >= before.items()


def test_a_new_score_counts_though_the_rows_came_with_rewards_of_that_version(tmp_path, model, module):
    """As after a warm start from rewards of a version of that name, whose function was another."""
    store = new_run(tmp_path, model, "copied")
    sampled = shard_files.read_shards(store, "s0", [0])
    copied = reward_versions.replace_columns(sampled, {"reward_version": ["v2"] * sampled.num_rows})
    assert reward_versions.with_rewards(store, "v2", copied) == copied
    rescore(store, f"{module}:brief", "v2", silent)
    scored = reward_versions.with_rewards(store, "v2", copied)["reward"].to_pylist()
    assert scored == [float(int(TASK.train[0].answer) - 3)] * 4 + scored[4:] and scored != copied["reward"].to_pylist()


def test_a_round_that_upkeep_deletes_meanwhile_is_left_out(tmp_path, model, module, monkeypatch):
    store = new_run(tmp_path, model, "expiring")
    listed = {"s0": [0, 1]}
    store.delete(shards.shard_path("s0", 0))
    monkeypatch.setattr(reward_versions, "unscored_shards", lambda *_: listed)
    assert rescore(store, f"{module}:brief", "v2", silent) == ("v2", 8)


def test_a_function_scores_a_run_whose_data_is_not_here(tmp_path, model, module):
    store = new_run(tmp_path, model, "moved")
    recorded = store.read_json("run.json", dict)
    recorded["task"] |= {"name": "gsm8k", "data": str(tmp_path / "elsewhere.jsonl"), "rewards": ["gone:reward"]}
    store.put_json("run.json", recorded)
    said = []
    assert rescore(store, f"{module}:brief", None, said.append) == ("brief", 16)
    assert "elsewhere.jsonl" in said[0] and "16 of these trajectories have prompts" in said[1]
    with pytest.raises(ValueError, match="elsewhere"):
        rescore(store, "task", None, silent)


def test_the_tasks_own_reward_is_a_reward_too(tmp_path, model, module):
    store = new_run(tmp_path, model, "own")
    assert rescore(store, "task", None, silent) == (TASK.version, 16)
    assert rows_of(store, "SELECT DISTINCT reward FROM rewards") == [(0.0,)]  # no sum of two-digit numbers is 0 to 3
    foreign = make_shard("s1", 0, 1, prompt="who are you?", prompt_id="foreign")
    shards.commit_shard(store, foreign)
    with pytest.raises(ValueError, match="task arithmetic has no prompt 'foreign'"):
        rescore(store, "task", None, silent)
    said = []
    rescore(store, f"{module}:brief", "of-foreign", said.append)
    (warning,) = said
    assert "WARNING: 1 of these trajectories have prompts that task arithmetic does not have now" in warning


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("nan", "got nan .* a reward is a finite number"),
        ("few", "1 rewards for 8 responses"),
        ("broken", "failed \\(TypeError"),
        ("nothing", "has no function 'nothing'; it has brief, nan, few, broken"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_by_name(tmp_path, model, module, reward, message):
    store = new_run(tmp_path, model, "refusing")
    with pytest.raises(ValueError, match=f"reward {module}:{reward}.*{message}"):
        rescore(store, f"{module}:{reward}", None, silent)
    assert not store.list("rewards")


def test_a_reward_that_failed_at_once_can_be_mended_under_the_same_version(tmp_path, model, module):
    store = new_run(tmp_path, model, "mended")
    with pytest.raises(ValueError, match="failed"):
        rescore(store, f"{module}:broken", "v2", silent)
    assert rescore(store, f"{module}:brief", "v2", silent) == ("v2", 16)


def test_a_version_belongs_to_one_reward(tmp_path, model, module):
    store = new_run(tmp_path, model, "versions")
    rescore(store, f"{module}:brief", "v2", silent)
    with pytest.raises(ValueError, match=r"'v2' of run versions was scored by own_rewards:brief; arithmetic"):
        rescore(store, "task", "v2", silent)
    for reward, message in [("nowhere:f", "cannot import nowhere"), ("nowhere", "write module:function")]:
        with pytest.raises(ValueError, match=message):
            rescore(store, reward, None, silent)
    with pytest.raises(ValueError, match=r"reward version: got '\.\./v3'"):
        rescore(store, f"{module}:brief", "../v3", silent)
    file = tmp_path / "own_rewards.py"
    file.write_text(file.read_text().replace("- len(text)", "- 2 * len(text)"))
    sys.modules.pop(module)
    importlib.invalidate_caches()
    linecache.checkcache()
    with pytest.raises(ValueError, match=r"'v2' .* was scored by own_rewards:brief before its source, or .* changed"):
        rescore(store, f"{module}:brief", "v2", silent)
    assert rescore(store, f"{module}:brief", "v3", silent)[1] > 0


def test_a_version_belongs_to_one_set_of_answers(tmp_path, model, module):
    file = tmp_path / "capitals.jsonl"

    def write(answer: str) -> None:
        rows = [{"prompt": f"Name {n}:", "capital": answer} for n in range(64)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("Paris")
    task = {"name": "dataset", "data": str(file), "rewards": [f"{module}:brief"]}
    config = run_config(tmp_path, model, "labelled", task=task)
    store = RunStore(config.store, config.run)
    store.create_run(config.recorded())
    commit(store, model, 0, [load_task(config.task, seed=config.seed).train[0]])
    rescore(store, "task", "v2", silent)
    write("Lima")
    commit(store, model, 1, [load_task(config.task, seed=config.seed).train[0]])
    with pytest.raises(ValueError, match=r"'v2' of run labelled was scored by .* with other problems or answers"):
        rescore(store, "task", "v2", silent)
    rescore(store, f"{module}:brief", "with-data", silent)
    file.unlink()
    rescore(store, f"{module}:brief", "without", silent)
    with pytest.raises(ValueError, match=r"'with-data' .* lacks the task's data"):
        rescore(store, f"{module}:brief", "with-data", silent)
    write("Lima")
    with pytest.raises(ValueError, match=r"'without' .* lacks the task's data"):
        rescore(store, f"{module}:brief", "without", silent)


def test_a_reward_without_answers_scores_its_own_prompts(tmp_path, model, module):
    file = tmp_path / "names.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Name {n}:"}) + "\n" for n in range(64)))
    task = {"name": "dataset", "data": str(file), "rewards": [f"{module}:brief"]}
    config = run_config(tmp_path, model, "own-task", task=task)
    store = RunStore(config.store, config.run)
    store.create_run(config.recorded())
    problem = load_task(config.task, seed=config.seed).train[0]
    commit(store, model, 0, [problem])
    _, number = rescore(store, "task", None, silent)
    assert number == rows_of(store, "SELECT count(*) FROM rewards")[0][0] > 0
