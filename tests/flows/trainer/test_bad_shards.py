"""A run whose store has shards that nobody may train on: the real Trainer, loop, buffer, ledger and report.

Claims
- with a torn shard, one of a newer version and one with a NaN reward among good ones a run trains to its end, also when
  its Trainer is killed in between; it takes in the good shards before, between and after them, and draws from no other
- summary, report and verify name all three
- a run.json from before a setting existed resumes as it was begun: the setting's default, or the behaviour of then

Run: pytest tests/flows/trainer/test_bad_shards.py
"""

import json
import math
import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from flows.cli.console import summary_table
from flows.config import RunConfig, load_run, read_recorded
from flows.report.render import render
from flows.trainer import session
from flows.trainer.__main__ import learn
from flows.trainer.outbox import StoreOutbox
from storage import attempts
from storage.ledger import record_search_round
from storage.policies import PolicyRef, latest_policy
from storage.queries import query
from storage.schema import SCHEMA_VERSION, TRAJECTORY, to_table
from storage.shards import parquet_bytes, shard_path
from storage.store import RunStore
from storage.summary import summarise
from storage.verify import verify
from tba.config import TaskSettings
from tba.tasks import load_task
from tba.weights import fingerprint, read_weights
from tests.character_model import save_character_model
from tests.storage.helpers import make_search_round, make_shard

K = 4
TORN, NEWER, NOT_A_NUMBER = 1, 4, 6  # the rounds of the bad shards; each published policy samples two rounds
KILLED_AT = 4  # the policy step whose publication kills the first attempt, behind the checkpoint of step 3


def shard(model: Path, number: int, policy: PolicyRef) -> bytes:
    """A round of K responses to two problems each, or a bad one."""
    tokenizer, problems = AutoTokenizer.from_pretrained(model), load_task(TaskSettings(), seed=0).train[:2]
    version = SCHEMA_VERSION + 1 if number == NEWER else SCHEMA_VERSION
    rows = make_shard(
        "s0", number, 2 * K, policy_step=policy.step, policy_fingerprint=policy.fingerprint, schema_version=version
    ).to_pylist()
    for index, row in enumerate(rows):
        problem, text = problems[index // K], f" {number % 10}{index % K}\n"
        row |= {"prompt_id": problem.prompt_id, "prompt": problem.prompt, "response": text}
        row |= {"prompt_tokens": tokenizer.encode(problem.prompt), "response_tokens": tokenizer.encode(text)}
        row |= {name: [-1.0] * 4 for name in ("behavior_logprobs", "reference_logprobs")}
    if number == NOT_A_NUMBER:
        rows[3]["reward"] = math.nan
    whole = parquet_bytes(to_table(rows, TRAJECTORY))
    return whole[: len(whole) // 2] if number == TORN else whole


def outbox_with_searcher(model: Path, dies: list[int]):
    class Outbox(StoreOutbox):
        """Behind each policy two rounds follow. `dies`: the steps at whose publication the Trainer dies, once each."""

        def publish(self, step, weights, final) -> None:
            if step in dies:
                dies.remove(step)
                raise KeyboardInterrupt
            super().publish(step, weights, final)
            self._newest_policy.result()
            stored = len(self._store.list("trajectories"))
            for number in (stored, stored + 1):
                self._store.put_new(shard_path("s0", number), shard(model, number, latest_policy(self._store)))
                record_search_round(self._store, make_search_round("s0", number))

    return Outbox


@pytest.mark.slow
def test_a_run_with_bad_shards_trains_to_its_end_and_names_them(tmp_path, monkeypatch):
    model = save_character_model(tmp_path / "model")
    config = RunConfig.model_validate(
        {
            "run": "bad",
            "store": (tmp_path / "store").as_uri(),
            "model": str(model),
            "searchers": 0,
            "sampling": {"prompts_per_batch": 2, "responses_per_prompt": K, "min_size": 1, "recent_probability": 0.5},
            "train": {"steps": 8, "sync_interval": 2, "checkpoint_interval": 3},
            "trackers": [],
        }
    )
    store = RunStore(config.store, config.run)
    store.create_run(config.recorded())
    # a second reading takes longer than all steps
    monkeypatch.setattr("flows.trainer.experience.MAX_STALL_S", 60.0)
    monkeypatch.setattr(session, "StoreOutbox", outbox_with_searcher(model, [KILLED_AT]))
    with pytest.raises(KeyboardInterrupt):
        learn(config.store, config.run, parent=os.getppid())
    monkeypatch.setattr(attempts, "is_alive", lambda *_: False)  # this process is the dead Trainer's, too
    learn(config.store, config.run, parent=os.getppid())
    bad = {shard_path("s0", number) for number in (TORN, NEWER, NOT_A_NUMBER)}

    summary = summarise(store)
    assert summary["steps"] == 8 and summary["attempts"] == 2
    assert summary["num_refused_shards"] == 3 and summary["refused_shards"].keys() == bad
    reasons = [summary["refused_shards"][shard_path("s0", number)] for number in (TORN, NEWER, NOT_A_NUMBER)]
    for reason, said in zip(("not a whole Parquet file", "upgrade tba", "reward is finite"), reasons, strict=True):
        assert reason in said
    out = StringIO()
    Console(file=out, width=1000).print(summary_table(summary))
    page, report = render(store), verify(store, lambda folder: fingerprint(read_weights(folder)))
    assert all(path in out.getvalue() and path in page for path in bad)
    assert {fault.path for fault in report.faults} == bad, report.faults

    drawn = query(store, "SELECT DISTINCT regexp_extract(trajectory_id, '-(\\d+)-', 1)::INT AS r FROM all_batches")
    assert set(drawn["r"].to_pylist()) <= {0, 2, 3, 5, 7, 8, 9} and max(drawn["r"].to_pylist()) >= 7
    counted = query(store, "SELECT DISTINCT round FROM trajectories ORDER BY 1")["round"].to_pylist()
    assert not {TORN, NEWER, NOT_A_NUMBER} & set(counted) and {0, 2, 3, 5, 7, 8, 9} <= set(counted)
    steps = query(store, "SELECT loss, reward_mean, skipped FROM training_steps").to_pylist()
    assert len(steps) == 8 and all(math.isfinite(step["loss"]) and not step["skipped"] for step in steps)


def test_a_run_json_from_before_a_setting_existed_resumes_as_it_was_begun(tmp_path):
    """Without the taper, which was not there; other settings have their defaults."""
    train = {"steps": 40, "residual_weight": "plain"}
    config = RunConfig(store=(tmp_path / "store").as_uri(), run="old", train=train)
    store, recorded = RunStore(config.store, config.run), config.recorded()
    del recorded["evaluate_share"], recorded["train"]["residual_weight"], recorded["sampling"]["max_age"]
    recorded["evaluate_interval"] = 10  # which evaluate_share replaced
    store.put("run.json", json.dumps(recorded).encode())
    assert load_run(store) == config
    assert store.create_run(config.recorded(), read_recorded) == recorded
    store.check_config(config.recorded(), read_recorded)
