"""Stored trajectories as the beginning of another run. Run: pytest tests/flows/reuse/test_warm_start.py

- 10,000 trajectories are rescored and trained on with the new version by a run without Searchers, resumed or not.
- A run begins with runs and files of demonstrations; what a file lacks is computed; held-out problems stay out.
- Torn shards of a run, those that it refused, torn rewards, and shards that break a rule are left out.
- A copy that was interrupted goes on, also from a source that grew, and counts nothing twice.
- A compacted file of a source is read once.
- What cannot be a source is refused by name; so are too few trajectories, and limits that nobody would ever meet.
"""

import json
import os
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from flows.config import RunConfig
from flows.reuse import warm_start
from flows.reuse.rescore import rescore
from flows.run.preflight import check_inputs
from flows.trainer.__main__ import learn
from storage import reward_versions, shards
from storage.errors import NotFound, RunConfigMismatch
from storage.queries import query
from storage.run_inputs import check_model
from storage.schema import TRAJECTORY, to_table
from storage.shard_files import read_file
from storage.store import RunStore
from storage.summary import summarise
from storage.upkeep import compact, delete_superseded
from tba.logprobs import Group, load_policy, response_logprobs
from tba.lora import base_fingerprint
from tba.tasks.rows import digest
from tests.flows.reuse.runs import TASK, K, begin, commit, new_run, rows_of, run_config, silent, url
from tests.storage.helpers import make_shard


def test_ten_thousand_rescored_trajectories_are_trained_on_without_an_engine(tmp_path, model, module):
    old = new_run(tmp_path, model, "old", num_shards=25, prompts=100)
    assert rescore(old, f"{module}:brief", "v2", silent) == ("v2", 10_000)
    config = run_config(tmp_path, model, "new", warm_start=[url(old)], reward_version="v2")
    store = begin(config)
    learn(config.store, config.run, parent=os.getppid())
    assert rows_of(store, "SELECT count(*), count(DISTINCT trajectory_id) FROM trajectories") == [(10_000, 10_000)]
    assert rows_of(store, "SELECT count(*), count(DISTINCT step), min(reward) > 1 FROM batches") == [(32, 2, True)]
    assert rows_of(store, "SELECT DISTINCT reward_version, policy_step FROM trajectories") == [("v2", 0)]
    summary = summarise(store)
    assert summary["steps"] == 2 and summary["accuracy_after"] is None and "no engine" in summary["note"]
    assert json.loads(store.get("run.json"))["warm_start"] == [url(old)]


def test_torn_and_refused_shards_of_a_source_are_left_out(tmp_path, model, module, caplog):
    old = new_run(tmp_path, model, "old", num_shards=6, prompts=4)
    old.put(shards.shard_path("s0", 1), b"torn")
    old.put(shards.refusal_path("s0", 2), b'{"reasons": ["reward is finite"]}')
    assert rescore(old, f"{module}:brief", "v2", silent) == ("v2", 4 * 4 * K)
    old.put("rewards/v2/searcher=s0/round=00000004.parquet", b"torn")
    spoiled = reward_versions.replace_columns(read_file(old, shards.shard_path("s0", 5)), {"top_p": [9.0] * 4 * K})
    old.put(shards.shard_path("s0", 5), shards.parquet_bytes(spoiled))  # no Trainer of that run has met it
    store = begin(run_config(tmp_path, model, "new", warm_start=[url(old)], reward_version="v2"))
    assert rows_of(store, "SELECT count(*), count(DISTINCT round) FROM trajectories") == [(2 * 4 * K, 2)]
    assert caplog.text.count("is not a whole Parquet file") == 2
    assert "rewards/v2/searcher=s0/round=00000004.parquet" in caplog.text
    assert "round=00000005.parquet of" in caplog.text and "top_p is > 0 and <= 1" in caplog.text


def test_a_run_begins_with_several_sources(tmp_path, model):
    one, other = new_run(tmp_path, model, "one"), new_run(tmp_path, model, "other", num_shards=1)
    heldout = TASK.heldout[0]
    commit(other, model, 1, [heldout, TASK.train[7]])
    commit(other, model, 2, [heldout])
    commit(other, model, 3, TASK.train[8:10])
    told = TASK.train[20]
    demonstrations = tmp_path / "told.parquet"
    columns = {"prompt": [told.prompt] * 2, "response": [f" {told.answer}\n", " 7"], "author": ["Ann", "Bob"]}
    pq.write_table(pa.table(columns), demonstrations)
    sources = [url(one), url(other), demonstrations.as_uri()]
    store = begin(run_config(tmp_path, model, "mixed", warm_start=sources))
    logs = "SELECT searcher, round, count(*) FROM trajectories GROUP BY ALL ORDER BY ALL"
    assert rows_of(store, logs) == [
        ("warm0", 0, 8), ("warm0", 1, 8), ("warm1", 0, 8), ("warm1", 1, 4), ("warm1", 2, 8), ("warm2", 0, 2),
    ]  # fmt: skip
    assert rows_of(store, f"SELECT count(*) FROM trajectories WHERE prompt_id = '{heldout.prompt_id}'") == [(0,)]
    done = json.loads(store.get("warm_start/done.json"))
    assert [(source["num_trajectories"], source["num_heldout_left_out"]) for source in done] == [
        (16, 0),
        (20, 8),
        (2, 0),
    ]
    learn(store.url, store.run, parent=os.getppid())
    assert rows_of(store, "SELECT max(step) FROM training_steps") == [(2,)]


def test_a_demonstration_of_a_held_out_problem_is_left_out(tmp_path, model):
    """The file has no prompt_id."""
    trained, file = TASK.train[20], tmp_path / "told.parquet"
    columns = {"prompt": [TASK.heldout[0].prompt, trained.prompt] * 4, "response": [f" {n}\n" for n in range(8)]}
    pq.write_table(pa.table(columns), file)
    sampling = {"prompts_per_batch": 4, "responses_per_prompt": K, "min_size": 2}
    store = begin(run_config(tmp_path, model, "told", warm_start=[file.as_uri()], sampling=sampling))
    assert rows_of(store, "SELECT DISTINCT prompt FROM trajectories") == [(trained.prompt,)]
    (done,) = json.loads(store.get(warm_start.DONE))
    assert (done["num_trajectories"], done["num_heldout_left_out"]) == (4, 4)


def test_an_id_that_has_another_text_here_is_another_prompt(tmp_path, model):
    """As of the same question with and without a task's heading."""
    old, known, unknown = new_run(tmp_path, model, "old", num_shards=0), TASK.train[5], TASK.train[6]
    commit(old, model, 0, [known, unknown])
    commit(old, model, 1, [replace(known, prompt="Add: 1"), replace(TASK.heldout[0], prompt="Add: 2")])
    store = begin(run_config(tmp_path, model, "new", warm_start=[url(old)]))
    found = rows_of(store, "SELECT prompt, prompt_id, count(*) FROM trajectories GROUP BY ALL ORDER BY ALL")
    expected = [(problem.prompt, problem.prompt_id, K) for problem in (known, unknown)]
    assert found == sorted([*expected, ("Add: 1", digest("Add: 1"), K)])


def test_what_demonstrations_lack_is_computed(tmp_path, model):
    problem, tokenizer = TASK.train[3], AutoTokenizer.from_pretrained(model)
    responses = [f" {problem.answer}\n", " 7", f" 8{tokenizer.eos_token}"]
    table = pa.table({"prompt": [problem.prompt] * 3, "response": responses})
    pq.write_table(table, tmp_path / "told.parquet")
    sampling = {"prompts_per_batch": 4, "responses_per_prompt": K, "min_size": 2}
    config = run_config(tmp_path, model, "told", warm_start=[(tmp_path / "told.parquet").as_uri()], sampling=sampling)
    right, wrong, ended = query(begin(config), "SELECT * FROM trajectories ORDER BY trajectory_id").to_pylist()
    assert right["prompt_id"] == problem.prompt_id and right["prompt_tokens"] == tokenizer.encode(problem.prompt)
    assert right["response_tokens"] == tokenizer.encode(f" {problem.answer}\n")  # ends by the task's stop
    assert wrong["response_tokens"] == [*tokenizer.encode(" 7"), tokenizer.eos_token_id]
    assert ended["response_tokens"] == [*tokenizer.encode(" 8"), tokenizer.eos_token_id]
    assert ended["response"] == " 8", "as a Searcher's: a reward sees no end of sequence"
    assert (right["reward"], wrong["reward"]) == (1.0, 0.0) and right["reward_version"] == TASK.version
    group = Group(right["prompt_tokens"], [right["response_tokens"], wrong["response_tokens"]])
    ((first, second),) = response_logprobs(load_policy(model), [group], config.train.temperature)
    assert right["reference_logprobs"] == pytest.approx(first.tolist(), abs=2e-2)  # bfloat16
    assert wrong["reference_logprobs"] == pytest.approx(second.tolist(), abs=2e-2)


def test_another_temperature_of_the_objective_scores_the_reference_anew(tmp_path, model):
    old = new_run(tmp_path, model, "cool", num_shards=1)
    same = begin(run_config(tmp_path, model, "same", warm_start=[url(old)]))
    train = {"steps": 2, "temperature": 2.0}
    hot = begin(run_config(tmp_path, model, "hot", warm_start=[url(old)], train=train))
    statement = "SELECT prompt_tokens, response_tokens, reference_logprobs FROM trajectories ORDER BY trajectory_id"
    assert rows_of(same, statement)[0][2] == [-1.0] * 3
    prompt, response, logprobs = rows_of(hot, statement)[0]
    ((expected,),) = response_logprobs(load_policy(model), [Group(prompt, [response])], 2.0)
    assert logprobs == pytest.approx(expected.tolist(), abs=2e-2)


def test_other_weights_under_the_models_name_score_the_reference_anew(tmp_path, model):
    statement = "SELECT reference_logprobs FROM trajectories ORDER BY trajectory_id"
    for weights, is_kept in (("other", False), (base_fingerprint(str(model)), True)):
        old = new_run(tmp_path, model, f"of-{weights[:8]}", num_shards=1)
        check_model(old, str(model), weights)
        new = begin(run_config(tmp_path, model, f"from-{weights[:8]}", warm_start=[url(old)]))
        assert (rows_of(new, statement)[0][0] == [-1.0] * 3) is is_kept


def die_in_the_copy(config: RunConfig, num_commits: int) -> None:
    """Begins the run, whose process ends after so many shards are copied."""
    real, commits = shards.commit_shard, []

    def dies(store, table):
        if len(commits) == num_commits:
            raise KeyboardInterrupt
        commits.append(real(store, table))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards, "commit_shard", dies)
        begin(config)


def test_another_model_than_the_runs_scores_no_source(tmp_path, model):
    config = run_config(tmp_path, model, "new", warm_start=[url(new_run(tmp_path, model, "old"))])
    check_model(RunStore(config.store, config.run), model, "the first machine's")
    with pytest.raises(RunConfigMismatch, match="began with the first machine's"):
        begin(config)


def test_an_interrupted_copy_goes_on_and_counts_nothing_twice(tmp_path, model):
    old = new_run(tmp_path, model, "old", num_shards=3)
    config = run_config(tmp_path, model, "new", warm_start=[url(old)])
    die_in_the_copy(config, num_commits=1)
    rows = make_shard("a0", 0, 4, prompt="first of all searchers").to_pylist()
    shards.commit_shard(old, to_table(rows, TRAJECTORY))  # sorts before what was planned
    store = begin(config)
    ids = "SELECT count(*), count(DISTINCT trajectory_id), count(DISTINCT (prompt_id, response)) FROM trajectories"
    assert rows_of(store, ids) == [(24, 24, 24)]
    begin(config)  # resumed: the sources are not asked again
    assert rows_of(store, ids) == [(24, 24, 24)]


def test_a_source_that_loses_shards_in_mid_copy_is_copied_without_them(tmp_path, model):
    """Its upkeep deletes one shard that was copied already and one that was not."""
    old = new_run(tmp_path, model, "old", num_shards=4)
    config = run_config(tmp_path, model, "new", warm_start=[url(old)])
    die_in_the_copy(config, num_commits=2)
    for number in (0, 2):
        old.delete(shards.shard_path("s0", number))
    store = begin(config)
    assert rows_of(store, "SELECT count(*), count(DISTINCT (prompt_id, response)) FROM trajectories") == [(24, 24)]
    assert rows_of(store, "SELECT DISTINCT round FROM trajectories ORDER BY 1") == [(0,), (1,), (2,)]


def test_a_file_that_changed_in_mid_copy_is_refused(tmp_path, model):
    file = tmp_path / "told.parquet"
    pq.write_table(pa.table({"prompt": [TASK.train[0].prompt] * 9, "response": [f" {i}\n" for i in range(9)]}), file)
    config = run_config(tmp_path, model, "changed", warm_start=[file.as_uri()])
    store = begin(config)
    store.delete(warm_start.DONE)
    pq.write_table(pa.table({"prompt": [TASK.train[1].prompt] * 9, "response": [f" {i}\n" for i in range(9)]}), file)
    with pytest.raises(ValueError, match=r"told\.parquet has changed"):
        begin(config)


def test_searchers_with_another_reward_than_the_copies_are_warned_about(tmp_path, model, module):
    old = new_run(tmp_path, model, "old")  # its shards have the version "1"
    rescore(old, f"{module}:brief", "v2", silent)
    v2 = {"warm_start": [url(old)], "reward_version": "v2"}
    for changes, num_warnings in (
        ({"warm_start": [url(old)], "searchers": 1}, 1),
        (v2 | {"searchers": 1}, 1),
        (v2 | {"searchers": 1, "task": {"rewards": [f"{module}:brief"]}}, 0),
        (v2 | {"searchers": 0}, 0),
    ):
        found = [
            text for text in check_inputs(run_config(tmp_path, model, "new", **changes)) if "compares both" in text
        ]
        assert len(found) == num_warnings
        assert all(f"{url(old)} have rewards of" in text and TASK.version in text for text in found)


def test_a_source_that_is_scored_in_part_is_refused_before_anything_is_copied(tmp_path, model, module):
    old = new_run(tmp_path, model, "old")
    rescore(old, f"{module}:brief", "v2", silent)
    commit(old, model, 2, TASK.train[:3])
    config = run_config(tmp_path, model, "new", warm_start=[url(old)], reward_version="v2")
    with pytest.raises(NotFound, match=r"round 2 of searcher s0 .* has no rewards of version 'v2'\. Score it first"):
        warm_start.check_sources(RunStore(config.store, config.run), config)  # before the run begins
    rescore(old, f"{module}:brief", "v2", silent)
    begin(config)


def test_rounds_that_come_after_the_check_are_not_copied(tmp_path, model, module, monkeypatch):
    """They have no rewards of the version yet: the source is still training."""
    source = new_run(tmp_path, model, "grows")
    rescore(source, f"{module}:brief", "v2", silent)
    made = warm_start.Copy

    def copy(*arguments):
        commit(source, model, 2, TASK.train[4:6])
        return made(*arguments)

    monkeypatch.setattr(warm_start, "Copy", copy)
    store = begin(run_config(tmp_path, model, "begun", warm_start=[url(source)], reward_version="v2"))
    assert rows_of(store, "SELECT count(*) FROM trajectories") == [(4 * K,)]


def test_a_number_may_be_a_demonstrations_id(tmp_path, model):
    rows = {"prompt": ["who?"] * 8, "response": ["I"] * 8, "reward": [1] * 8, "prompt_id": [7] * 8}
    pq.write_table(pa.table(rows), tmp_path / "numbered.parquet")
    store = begin(run_config(tmp_path, model, "numbered", warm_start=[(tmp_path / "numbered.parquet").as_uri()]))
    assert rows_of(store, "SELECT DISTINCT prompt_id, reward FROM trajectories") == [("7", 1.0)]


def test_another_generator_of_problems_is_another_task(tmp_path, model):
    generators = [{"name": "reasoning_gym", "generator": name} for name in ("chain_sum", "leg_counting")]
    source = new_run(tmp_path, model, "sums", num_shards=0, task=generators[0])
    config = run_config(tmp_path, model, "legs", warm_start=[url(source)], task=generators[1])
    with pytest.raises(ValueError, match="run 'sums' has generator chain_sum, this one leg_counting"):
        warm_start.open_sources(RunStore(config.store, config.run), config)


def test_a_file_whose_first_trajectories_failed_can_be_mended(tmp_path, model):
    file, prompt = tmp_path / "told.parquet", TASK.train[0].prompt
    pq.write_table(pa.table({"prompt": [prompt, "who?"] * 9, "response": [f" {i}\n" for i in range(18)]}), file)
    config = run_config(tmp_path, model, "mended", warm_start=[file.as_uri()])
    with pytest.raises(ValueError, match=r"has no prompt 'who\?'"):
        begin(config)
    pq.write_table(pa.table({"prompt": [prompt] * 9, "response": [f" {i}\n" for i in range(9)]}), file)
    assert rows_of(begin(config), "SELECT count(*) FROM trajectories") == [(9,)]


def test_what_cannot_be_a_source_is_refused_by_name(tmp_path, model, module):
    old = new_run(tmp_path, model, "old")
    other_model = new_run(tmp_path, "elsewhere/model", "other", num_shards=0)
    other_task = new_run(tmp_path, model, "words", num_shards=0, task={"name": "gsm8k"})
    (tmp_path / "text.parquet").write_text("not Parquet")
    pq.write_table(pa.table({"prompt": ["1 + 1 ="], "answer": ["2"]}), tmp_path / "answers.parquet")
    pq.write_table(pa.table({"prompt": ["who?"] * 9, "response": ["I"] * 9}), tmp_path / "unrewarded.parquet")
    foreign = {"prompt_tokens": [[5]] * 9, "response_tokens": [[7, 8, 9]] * 9, "reward": [1.0] * 9}
    pq.write_table(pa.table({"prompt": ["who?"] * 9, "response": ["I"] * 9} | foreign), tmp_path / "foreign.parquet")
    pq.write_table(pa.table({"prompt": ["who?"], "response": ["I"], "reward": ["high"]}), tmp_path / "typed.parquet")
    refused = {
        f"{old.url}/nothing": "there is no run 'nothing'",
        url(other_model): "run 'other' has model elsewhere/model",
        url(other_task): "run 'words' has task gsm8k, this one arithmetic: .*Give --task gsm8k",
        (tmp_path / "text.parquet").as_uri(): "is not a Parquet file",
        (tmp_path / "answers.parquet").as_uri(): "has no column 'response', only prompt",
        (tmp_path / "typed.parquet").as_uri(): r"typed\.parquet: reward is string, not float",
        (tmp_path / "unrewarded.parquet").as_uri(): "has no prompt 'who\\?', so it cannot reward",
        (tmp_path / "foreign.parquet").as_uri(): r"the response_tokens of 'I' are '.+'\. If they are another",
    }
    for number, (source, message) in enumerate(refused.items()):
        with pytest.raises(ValueError, match=message):
            begin(run_config(tmp_path, model, f"run{number}", warm_start=[source]))
    with pytest.raises(NotFound, match=r"gone\.parquet"):
        begin(run_config(tmp_path, model, "gone", warm_start=[(tmp_path / "gone.parquet").as_uri()]))
    with pytest.raises(ValueError, match="has no rewards of version 'v9'; score it first: tba rescore old"):
        begin(run_config(tmp_path, model, "v9", warm_start=[url(old)], reward_version="v9"))
    with pytest.raises(ValidationError, match="names one source twice"):
        run_config(tmp_path, model, "twice", warm_start=[url(old)] * 2)
    with pytest.raises(ValidationError, match="warm_start: got 'old'"):
        run_config(tmp_path, model, "name", warm_start=["old"])
    with pytest.raises(ValidationError, match="warm_start is empty"):
        run_config(tmp_path, model, "cold", reward_version="v2")
    with pytest.raises(ValidationError, match="warm_start names files only, which have no versions"):
        told = (tmp_path / "told.parquet").as_uri()
        run_config(tmp_path, model, "told", warm_start=[told], reward_version="v2")
    rescore(old, f"{module}:brief", "v2", silent)
    commit(old, model, 2, TASK.train[:1])
    with pytest.raises(NotFound, match=r"round 2 of searcher s0 .* has no rewards of version 'v2'"):
        begin(run_config(tmp_path, model, "unscored", warm_start=[url(old)], reward_version="v2"))
    assert reward_versions.has_version(old, "v2")


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"samples_per_insert": 0.5}, r"steps draw \d+, and sampling\.samples_per_insert is 0\.5, .*wait for ever"),
        ({"max_age": 0}, r"they count as sampled by policy 0, train\.steps is \d+, and sampling\.max_age 0"),
    ],
)
def test_a_limit_that_nobody_would_ever_meet_is_refused(tmp_path, model, sampling, message):
    old = new_run(tmp_path, model, "old")
    train = {"steps": 2, "checkpoint_interval": 1, "sync_interval": 1}
    of_new = run_config(tmp_path, model, "waiting", warm_start=[url(old)], train=train)
    config = of_new.model_copy(update={"sampling": of_new.sampling.model_copy(update=sampling)})
    with pytest.raises(ValueError, match=message):
        begin(config)
    begin(config.model_copy(update={"searchers": 1, "run": "with-a-searcher"}))


def test_a_compacted_file_of_a_source_is_read_once(tmp_path, model, monkeypatch):
    monkeypatch.setattr(shards, "ROUNDS_PER_BLOCK", 4)
    old, reads = new_run(tmp_path, model, "old", num_shards=6, prompts=1), Counter()
    compact(old)
    delete_superseded(old, timedelta(0))

    def counted(store: RunStore, path: str) -> pa.Table:
        reads[path.split("/")[1]] += store.run == "old"
        return read_file(store, path)

    monkeypatch.setattr("storage.shard_files.read_file", counted)
    new = begin(run_config(tmp_path, model, "new", warm_start=[url(old)]))
    assert reads == {"compacted": 1, "searcher=s0": 2}
    assert rows_of(new, "SELECT count(*) FROM trajectories") == [(6 * K,)]


def test_too_few_trajectories_without_searchers_are_refused(tmp_path, model):
    old = new_run(tmp_path, model, "old", num_shards=1, prompts=1)
    with pytest.raises(ValueError, match=r"the sources have 4 trajectories, sampling\.min_size is 8"):
        begin(run_config(tmp_path, model, "few", warm_start=[url(old)]))
    begin(run_config(tmp_path, model, "enough", warm_start=[url(old)], searchers=1))
