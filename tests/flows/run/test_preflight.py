"""Bad input is refused before any work, by name, and nothing is left half-made.

- Settings that cannot be: beta, m, K > S, names of runs, settings that do not exist.
- Task, data, model and reward that cannot work; a store that cannot be reached or written.
- A run that exists with another configuration: the message says what differs. One of an older version, without a
  setting that there is today, resumes with what was done then: mostly that setting's default.
- Of a run whose reward has changed since its newest round, a warning names both versions.
- Of a run without Searchers and warm start, or with a reset that never comes, a warning says so.
- A run resumes although a default has changed since; only a setting that is given can be refused.
- A command takes back an earlier request to stop the run; a takeover without a command does not.

python -m pytest tests/flows/run/test_preflight.py
"""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.cli.settings import config_of
from flows.config import RunConfig, continued, load_run
from flows.run.preflight import check_inputs
from flows.train import prepare
from storage import requests
from storage.errors import DamagedRecord, RunConfigMismatch, StoreError
from storage.run_inputs import check_data
from storage.shards import commit_shard
from storage.store import RunStore
from tba.tasks import load_task
from tba.tasks.arithmetic import Arithmetic
from tests.storage.helpers import make_shard, start_python


@pytest.fixture
def tokenizer_only(monkeypatch, tmp_path_factory):
    """A model's folder with nothing but a tokenizer: the check loads no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "\n": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    monkeypatch.setattr("flows.run.preflight.model_folder", lambda name: folder)
    # another process would not have the folder
    monkeypatch.setattr("flows.run.preflight.check_inputs_in_a_process", check_inputs)
    return folder


def config(tmp_path: Path, **changes) -> RunConfig:
    return RunConfig.model_validate({"run": "checked", "store": (tmp_path / "store").as_uri()} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"beta": 0}}, "train.beta is 0, and tb divides by it; give a number greater than 0"),
        ({"train": {"beta": 0, "objective": "online_dpo"}}, "train.beta is 0, and online_dpo divides by it; give a"),
        ({"train": {"beta": -1}}, "train.beta\n.*greater than or equal to 0"),
        ({"sampling": {"recent_probability": 1.5}}, "sampling.recent_probability\n.*less than or equal to 1"),
        ({"sampling": {"recent_probability": -0.1}}, "sampling.recent_probability\n.*greater than or equal to 0"),
        ({"sampling": {"responses_per_prompt": 21}, "search": {"samples_per_prompt": 20}}, r"K.* is 21.*S.* is 20"),
        ({"run": "../elsewhere"}, "run: got '../elsewhere'"),
        ({"run": "a/b"}, "run: got 'a/b'"),
        ({"train": {"betta": 1}}, "train.betta\n.*Extra inputs"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, changes, message):
    with pytest.raises(ValidationError, match=message):
        config(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": {"lora_rank": 8}},
            "train.lora_rank is 8, but peft is not installed; install it, or tba's extra lora",
        ),
        ({"train": {"processes": 2}}, "train.processes is 2 and train.machines 1, but DeepSpeed is not installed"),
        ({"train": {"machines": 2}}, "train.processes is 1 and train.machines 2, but DeepSpeed is not installed"),
    ],
)
def test_a_package_that_is_missing_is_named_before_anything_starts(
    tmp_path, tokenizer_only, monkeypatch, changes, message
):
    monkeypatch.setattr("flows.run.preflight.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        check_inputs(config(tmp_path, **changes))


def test_a_check_does_without_torch(tmp_path, tokenizer_only):
    """It is made twice before a run begins, by the command and by the flow; torch would be ten seconds each time."""
    code = f"""
import sys
from pathlib import Path
from flows.run import preflight
from flows.config import RunConfig
preflight.model_folder = lambda name: Path({str(tokenizer_only)!r})
preflight.check_inputs(RunConfig(run="checked", store={(tmp_path / "store").as_uri()!r}))
print("torch" in sys.modules)
"""
    assert start_python(code).communicate()[0] == "False\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": {"name": "reasoning_gym", "generator": "chain_sum", "data": "mine.jsonl"}}, "task.data is 'mine.jso"),
        ({"task": {"name": "arithmetic", "reward_model": "x"}}, "task.reward_model is 'x', but task arithm"),
        ({"task": {"name": "arithmetic", "data": "sums.jsonl"}}, "task.data is .sums.jsonl., but task arithmetic does"),
        ({"sampling": {"max_age": 0}}, "max_age is 0, but .*sync_interval is 2: .* step 2 .* after step 2.*to 1, or"),
        ({"search": {"exploration_top_p": (0.5, 0.9)}}, "exploration_top_p is .*without search.exploration_proba"),
        ({"sampling": {"uniform_fraction": 0.5}}, "uniform_fraction is 0.5, .*without sampling.reward_temperature"),
        ({"train": {"fluency_steps": 9}}, "train.fluency_steps is 9, .* without train.fluency_temperature: set both"),
    ],
)
def test_a_setting_without_an_effect_is_refused_in_a_new_run(tmp_path, tokenizer_only, changes, message):
    with pytest.raises(ValueError, match=message):
        check_inputs(config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("max_age", "changes"),
    [(1, {}), (0, {"train": {"sync_interval": 1}}), (1, {"train": {"sync_interval": 8, "steps": 2}})],
)
def test_a_limit_of_age_that_the_next_policy_meets_is_accepted(tmp_path, tokenizer_only, max_age, changes):
    check_inputs(config(tmp_path, sampling={"max_age": max_age}, **changes))


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
def test_prompts_and_responses_beyond_the_models_context_are_refused_in_a_new_run(tmp_path, tokenizer_only, key):
    file = tokenizer_only / "config.json"
    file.write_text(json.dumps({key: 64}))
    long = config(tmp_path, task={"max_response_tokens": 60})
    with pytest.raises(ValueError, match=r"has \d+ tokens and a response may have 60, but the model's context is 64"):
        check_inputs(long)
    check_inputs(config(tmp_path, task={"max_response_tokens": 20}))
    with pytest.raises(ValueError, match="the model's context is 64"):  # a system prompt counts, too
        system = " ".join(["word"] * 40)
        check_inputs(
            config(
                tmp_path,
                task={"max_response_tokens": 20},
                search={"system_prompts": [system], "exploration_probability": 0.3},
            )
        )
    file.write_text(json.dumps({key: 4096, "sliding_window": 63, "layer_types": ["full_attention"]}))
    check_inputs(long)
    file.write_text(json.dumps({key: 4096, "sliding_window": 63, "layer_types": ["sliding_attention"]}))
    with pytest.raises(ValueError, match="the model's context is 64"):  # the Trainer's attention has no window
        check_inputs(long)
    file.write_text(json.dumps({key: 64, "sliding_window": 4096, "layer_types": ["sliding_attention"]}))
    with pytest.raises(ValueError, match="the model's context is 64"):
        check_inputs(long)
    file.write_text(json.dumps({key: 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}))
    check_inputs(long)
    file.write_text(json.dumps({key: 64}))
    RunStore(long.store, long.run).create_run(long.recorded())
    check_inputs(long)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; scaled or capped logits"),
        (
            {"text_config": {"layer_types": ["linear_attention", "full_attention"]}},
            "its layers have .'linear",
        ),
    ],
)
def test_a_model_with_which_the_trainer_cannot_compute_is_refused(tmp_path, tokenizer_only, changes, message):
    (tokenizer_only / "config.json").write_text(json.dumps(changes))
    with pytest.raises(ValueError, match=f"model smollm2-135m-instruct: {message}"):
        check_inputs(config(tmp_path))


def test_an_older_run_goes_on_with_a_setting_that_has_no_effect(tmp_path, tokenizer_only):
    old = config(tmp_path, sampling={"uniform_fraction": 0.5})
    RunStore(old.store, old.run).create_run(old.recorded())
    check_inputs(old)


def test_a_synchronous_run_that_could_never_begin_is_refused(tmp_path, tokenizer_only, monkeypatch):
    turns = {"synchronous": True, "search": {"prompts_per_round": 8000}, "sampling": {"min_size": 60000}}
    with pytest.raises(ValueError, match=r"a round has 7\d+ prompts, and 5\d+ trajectories are certain.*lower it to 5"):
        check_inputs(config(tmp_path, **turns))
    near = {"synchronous": True, "search": {"near_duplicate_distance": 0.2}, "sampling": {"min_size": 48}}
    with pytest.raises(ValueError, match="24 trajectories, of which near-duplicates are dropped, are certain"):
        check_inputs(config(tmp_path, **near))
    check_inputs(config(tmp_path, **near | {"sampling": {"min_size": 24}}))
    monkeypatch.setattr("flows.run.preflight.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"near_duplicate_distance is 0\.2, but rapidfuzz is not installed"):
        check_inputs(config(tmp_path, search={"near_duplicate_distance": 0.2}))


def test_a_reward_that_has_changed_is_named(tmp_path, tokenizer_only):
    resumed = config(tmp_path)
    store = RunStore(resumed.store, resumed.run)
    store.create_run(resumed.recorded())
    commit_shard(store, make_shard("warm0", 9, reward_version="of another run"))
    commit_shard(store, make_shard("s0", 0, reward_version=Arithmetic.version))
    assert check_inputs(resumed) == []
    commit_shard(store, make_shard("s0", 1, reward_version="sum-0"))
    (warning,) = check_inputs(resumed)
    assert "have rewards of version 'sum-0', new ones will have 'sum-1'" in warning
    where = f" --store {store.url}"
    assert (
        f"tba rescore checked --reward task --version NAME{where}, then tba train NEW --warm-start checked" in warning
    )
    assert f"reward_version=NAME{where}, with the same --model and task.* settings" in warning


def test_a_resume_with_other_data_is_refused(tmp_path, tokenizer_only):
    file = tmp_path / "sums.jsonl"

    def write(numbers):
        file.write_text("".join(f'{{"question": "{n} + 1?", "answer": "#### {n + 1}"}}\n' for n in numbers))

    write(range(40))
    resumed = config(tmp_path, task={"name": "gsm8k", "data": str(file)})
    store = RunStore(resumed.store, resumed.run)
    store.create_run(resumed.recorded())
    check_data(store, load_task(resumed.task, seed=0).fingerprint)  # as its first Searcher does
    write(reversed(range(40)))
    check_inputs(resumed)  # the order does not matter
    write(range(41))
    with pytest.raises(RunConfigMismatch, match=r"task\.data: the problems .* began with"):
        check_inputs(resumed)
    file.rename(tmp_path / "moved.jsonl")
    with pytest.raises(ValueError, match=r"no file .*\. Run 'checked' keeps the paths of its model and data; if one"):
        check_inputs(resumed)


def test_what_never_comes_is_warned_about(tmp_path, tokenizer_only, monkeypatch):
    (warning,) = check_inputs(at_home := config(tmp_path, searchers=0))
    more = f"tba searchers checked +1 --store {at_home.store}"
    assert warning == f"searchers is 0: training waits until `{more}` adds one"
    monkeypatch.setenv("TBA_STORE", at_home.store)
    (warning,) = check_inputs(at_home)
    assert "until `tba searchers checked +1` adds one" in warning
    (warning,) = check_inputs(config(tmp_path, train={"steps": 50, "reference_reset_interval": 50}))
    assert "train.reference_reset_interval is 50 and train.steps 50: the reference is never reset" in warning


def test_good_input_passes_and_leaves_nothing_behind(tmp_path, tokenizer_only):
    check_inputs(config(tmp_path))
    assert not list((tmp_path / "store").rglob("*.json"))


def test_an_unknown_task_is_named(tmp_path, tokenizer_only):
    with pytest.raises(ValueError, match=r"task\.name: got 'chess'; known tasks are arithmetic, dataset, gsm8k"):
        check_inputs(config(tmp_path, task={"name": "chess"}))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"question": "1+1?", "answer": "#### 2"}\n{"question": "2+2?", "ans', "line 2 is not JSON"),
        ('{"question": "1+1?"}\n', "line 1 .*'answer'.* question"),
    ],
)
def test_a_broken_dataset_is_named_with_its_line(tmp_path, tokenizer_only, lines, message):
    file = tmp_path / "data.jsonl"
    file.write_text(lines)
    with pytest.raises(ValueError, match=message):
        check_inputs(config(tmp_path, task={"name": "gsm8k", "data": str(file)}))


def test_a_model_that_does_not_load_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model: .*no-such-model.* does not load"):
        check_inputs(config(tmp_path, model=str(tmp_path / "no-such-model")))


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([float("nan")] * 2, "got nan .* a reward is a finite number"),
        ([], "0 rewards for 2 responses"),
        (["1"] * 2, "got '1'"),
    ],
)
def test_a_reward_function_that_cannot_work_is_refused(tmp_path, tokenizer_only, monkeypatch, rewards, message):
    monkeypatch.setattr(Arithmetic, "rewards", lambda self, problems, responses: rewards)
    with pytest.raises(ValueError, match=message):
        check_inputs(config(tmp_path))


def test_a_reward_that_fails_on_an_empty_response_is_refused(tmp_path, tokenizer_only, monkeypatch):
    monkeypatch.setattr(Arithmetic, "rewards", lambda self, problems, texts: [float(t.split()[-1]) for t in texts])
    with pytest.raises(ValueError, match=r"failed .*IndexError"):
        check_inputs(config(tmp_path))


def test_a_gold_reward_model_is_checked_before_the_run(tmp_path, tokenizer_only):
    data = tmp_path / "posts.jsonl"
    data.write_text("".join(f'{{"query": "Post {n} TL;DR:", "reference_response": " Sum {n}"}}\n' for n in range(40)))
    with pytest.raises(ValueError, match=r"task\.gold_reward_model: '/nowhere' does not load"):
        check_inputs(config(tmp_path, task={"name": "tldr", "data": str(data), "gold_reward_model": "/nowhere"}))


def test_a_store_that_cannot_be_written_is_refused(tmp_path, tokenizer_only):
    (tmp_path / "store").write_text("a file where the store's folder should be")
    with pytest.raises(StoreError, match="store"):
        check_inputs(config(tmp_path))


def test_a_store_that_cannot_be_reached_is_refused(tmp_path, tokenizer_only, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-for-nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-print-me")
    with pytest.raises(StoreError) as caught:
        check_inputs(config(tmp_path, store="s3://bucket/runs"))
    assert "s3://bucket/runs" in str(caught.value) and "do-not-print-me" not in str(caught.value)


def test_a_run_of_another_configuration_says_what_differs(tmp_path, tokenizer_only):
    first = config(tmp_path)
    RunStore(first.store, first.run).create_run(first.recorded())
    check_inputs(first)
    with pytest.raises(RunConfigMismatch, match=rf"train\.beta is {first.train.beta}, but 0\.5 is given"):
        check_inputs(config(tmp_path, train={"beta": 0.5}))
    assert json.loads((tmp_path / "store" / "checked" / "run.json").read_text()) == first.recorded()


def test_a_resume_may_use_less_memory(tmp_path, tokenizer_only):
    first = config(tmp_path)
    store = prepare(first)
    less = config(tmp_path, train={"micro_batch_tokens": 1024, "gradient_checkpointing": "layers"})
    check_inputs(less)
    prepare(less)
    assert json.loads(store.get("run.json")) == first.recorded()
    for changed in (less, config(tmp_path, train={"processes": 2, "zero_stage": 3})):
        assert load_run(store).on_devices(changed.devices) == changed


def test_a_run_of_an_older_version_resumes_with_the_defaults_of_newer_settings(tmp_path, tokenizer_only):
    first = config(tmp_path)
    store, recorded = RunStore(first.store, first.run), first.recorded()
    del recorded["evaluate_share"], recorded["train"]["beta"]
    store.create_run(recorded | {"evaluate_interval": 3})  # a setting that is no more
    check_inputs(first)
    prepare(first)
    assert load_run(store) == first
    for changed in ({"evaluate_share": 0.5}, {"train": {"beta": 0.5}}):
        with pytest.raises(RunConfigMismatch, match=r"is .*, but 0\.5 is given"):
            check_inputs(config(tmp_path, **changed))
    assert json.loads(store.get("run.json")) == recorded | {"evaluate_interval": 3}


def test_a_command_takes_back_a_request_to_stop_and_a_flow_that_starts_without_one_does_not(tmp_path, tokenizer_only):
    first = config(tmp_path)
    store = prepare(first)
    requests.ask_to_stop(store)
    for start in ("is_takeover", "is_restart"):
        prepare(first, **{start: True})
        assert requests.is_to_stop(store)
    prepare(first)
    assert not requests.is_to_stop(store)


@pytest.mark.parametrize("objective", ["tb", "tba_prime", "dr_grpo"])
def test_a_run_of_an_older_version_goes_on_as_it_was_trained(tmp_path, objective):
    """By the loss, the momentum and the draws of then."""
    fitting = {"reference_reset_interval": 50} if objective == "tba_prime" else {}
    recent = {"recent_probability": 1.0} if objective == "tba_prime" else {}
    recorded = config(tmp_path, train={"objective": objective, **fitting}, sampling=recent).recorded()
    del recorded["sampling"]["differing_rewards_first"]
    del recorded["train"]["adam_beta1"], recorded["train"]["residual_weight"]
    RunStore((tmp_path / "store").as_uri(), "checked").create_run(recorded)
    given = {"run": "checked", "store": (tmp_path / "store").as_uri()}
    for resumed in (config_of(dict(given), []), continued(RunConfig.model_validate(given))):
        assert not resumed.sampling.differing_rewards_first
        assert resumed.train.adam_beta1 == 0.9
        assert (resumed.train.residual_weight == "plain") == (objective != "dr_grpo")


def test_the_same_command_resumes_after_a_default_has_changed(tmp_path, tokenizer_only):
    """The defaults of then are in run.json. That of samples_per_prompt is less now than what was given then."""
    then = {"search": {"samples_per_prompt": 20, "prompts_per_round": 20}, "train": {"steps": 75, "beta": 0.1}}
    first = config(tmp_path, sampling={"responses_per_prompt": 20}, **then)
    RunStore(first.store, first.run).create_run(first.recorded())
    given = {"run": first.run, "store": first.store}
    resumed = config_of(dict(given), ["sampling.responses_per_prompt=20", "train.steps=75"])
    assert resumed == first
    check_inputs(resumed)
    with pytest.raises(RunConfigMismatch) as refused:
        check_inputs(config_of(dict(given), ["train.steps=80"]))
    assert "train.steps is 75, but 80 is given. To resume it, leave these settings out" in str(refused.value)
    assert config_of(given | {"run": "another"}, []).train.steps == RunConfig().train.steps


@pytest.mark.parametrize("content", [b"", b"[]", b'{"betta": 1}', b'{"train": 3}'])
def test_a_damaged_run_is_refused_by_the_check_and_not_as_a_mistake_of_the_user(tmp_path, tokenizer_only, content):
    store = RunStore((tmp_path / "store").as_uri(), "checked")
    store.put_new("run.json", content)
    with pytest.raises(DamagedRecord, match=r"cannot read run\.json"):
        check_inputs(config_of({"run": "checked", "store": store.url}, []))
