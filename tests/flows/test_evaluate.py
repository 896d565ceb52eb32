"""evaluate/policy: the figures of a policy that says what it is told to, worked out by hand.

- Greedy accuracy, perplexity under the reference, pass@k for k = 1, 2, 4; of tldr the win rate; of redteam success and
  diversity.
- The best policy is evaluated, the newest where that is asked for or none was measured, and the figures stay in the
  run's store. A run without a policy is refused, and a missing judge or encoder named, before an engine starts; weights
  that are not the published ones are refused. A policy that training prunes meanwhile gives way to the newest.

python -m pytest tests/flows/test_evaluate.py
"""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from flows import evaluate
from flows.config import RunConfig
from storage import kept_policies, policies
from storage.store import RunStore
from tba.engine import Response, ServedPolicy
from tba.tasks.base import Problem
from tests.flows.published import publish

PROBLEMS = [Problem("a", "1 + 1 =", "2"), Problem("b", "1 + 2 =", "3")]
SAID = {"a": ["2", "2", "1", "2"], "b": ["2", "2", "2", "3"]}  # greedy is the first


class Told:
    """A Searcher whose policy says what it is told to."""

    def __init__(self, problems=PROBLEMS, said=SAID, task=None):
        self.task = SimpleNamespace(heldout=problems, train=problems, task=task)
        self._said = said
        self.right = 1.0  # the reward of a right answer
        self.differs = 0  # 1: the engine finds other weights than were published

    def sample_responses(self, problems, num_samples=1, temperature=0.0):
        assert (temperature == 0) == (num_samples == 1)
        said = ([self._said[p.prompt_id][n] for n in range(num_samples)] for p in problems)
        return [[Response([len(text)], [-0.5], text, []) for text in of_problem] for of_problem in said]

    def text(self, response):
        return response.finish_reason  # where this test keeps it

    def rewards(self, problems, responses):
        return [self.right * (self.text(r) == p.answer) for p, r in zip(problems, responses, strict=True)]

    def reference_logprobs(self, problems, responses):
        return [[-math.log(2), -math.log(8)] for _ in responses]  # mean -2 ln 2

    def load(self, folder, policy_step):
        self.loaded = policy_step
        return ServedPolicy(policy_step, f"{policy_step + self.differs:032d}")

    def drop_rounds(self):
        pass


def config(tmp_path, **task) -> RunConfig:
    return RunConfig.model_validate({"run": "told", "store": tmp_path.as_uri(), "task": task})


def test_figures_of_sums(tmp_path):
    figures = evaluate.measure(Told(), config(tmp_path), num_problems=2, samples=4)
    assert figures == {
        "num_problems": 2,
        "accuracy": 0.5,
        "perplexity": pytest.approx(4),
        "mean_response_tokens": 1,
        # a: 3 of 4 right, b: 1 of 4. k = 2: a misses in 0 of 6 pairs, b in 3 of 6
        "pass@1": pytest.approx((3 / 4 + 1 / 4) / 2),
        "pass@2": pytest.approx((1 + 1 / 2) / 2),
        "pass@4": 1,
    }


def test_what_no_reward_judges_is_neither_right_nor_wrong(tmp_path):
    told, judges = Told(), [True, True, False, True, *[False] * 4]  # three responses to a, none to b
    every = told.rewards

    def rewards(problems, responses):
        return [value if judged else None for value, judged in zip(every(problems, responses), judges, strict=False)]

    told.rewards = rewards
    figures = evaluate.measure(told, config(tmp_path), num_problems=2, samples=4)
    assert {name: value for name, value in figures.items() if name.startswith("pass")} == {"pass@1": 1, "pass@2": 1}


def test_a_reward_of_one_half_is_a_right_response(tmp_path):
    """A task's rewards may add up to less than 1 for a right answer."""

    task = {}

    def share_right(reward: float) -> float:
        searcher = Told()
        searcher.right = reward
        return evaluate.measure(searcher, config(tmp_path, **task), num_problems=2, samples=4)["pass@1"]

    assert (share_right(0.5), share_right(0.49)) == (0.5, 0.0)
    task = {"name": "reasoning_gym", "generator": "chain_sum"}  # its graders give near misses a part of the reward
    assert (share_right(1.0), share_right(0.99)) == (0.5, 0.0)


def test_the_win_rate_is_against_the_reference_summary(tmp_path):
    problems = [Problem("a", "Post", "the cat sat"), Problem("b", "Post", "the cat sat")]
    told = Told(problems, {"a": ["the cat sat"], "b": ["a dog"]})
    figures = evaluate.measure(told, config(tmp_path, name="tldr", data="none.jsonl"), 2, 0)
    assert "win_rate" not in figures, "by ROUGE-L the reference scores 1 against itself"
    judge = SimpleNamespace(rewards=lambda problems, texts: [float(len(text)) for text in texts])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(evaluate, "judge", lambda name, field: judge)
        told = Told(problems, {"a": ["the black cat sat"], "b": ["a dog"]})
        figures = evaluate.measure(told, config(tmp_path, name="tldr", data="none.jsonl"), 2, 0)
    assert figures["win_rate"] == 0.5


def test_attacks_are_counted_by_kind(tmp_path, monkeypatch):
    pytest.importorskip("tba.diversity")
    toxicity = {"one": [0.9, 0.9], "two": [0.8, 0.6], "three": [0.9, 0.3], "four": [0.1, 0.1]}
    vectors = {"one": [1, 0], "two": [1, 0], "three": [0, 1], "four": [-1, 0]}
    monkeypatch.setattr("tba.diversity.embed", lambda texts: np.array([vectors[text] for text in texts], float))
    problem = Problem("a", "Write", None)
    task = SimpleNamespace(toxicity=lambda attacks: [toxicity[attack] for attack in attacks])
    told = Told([problem], {"a": list(toxicity)}, task)
    figures = evaluate.measure_attacks(told, 4)
    # one, two and three succeed (0.9, 0.7, 0.6), one and two are of one kind; 1 - cosine of the pairs: 0, 1, 2, 1, 2, 1
    assert figures == {
        "num_attacks": 4,
        "attack_success_rate": 0.75,
        "cosine_distance": pytest.approx(7 / 6),
        "success_clusters": 2,
    }
    (answers,) = told.sample_responses([problem], 4, 1.0)
    told.sample_responses = lambda *_: [answers[:1]]
    assert evaluate.measure_attacks(told, 1)["cosine_distance"] is None  # NaN is no JSON


def test_the_best_policy_is_evaluated_and_its_figures_stay(tmp_path):
    store, told = RunStore(tmp_path.as_uri(), "told"), Told()
    refs = [publish(store, tmp_path / "policy", 12), publish(store, tmp_path / "policy", 14, attempt=2)]
    figures = evaluate.measure_policy(store, config(tmp_path, num_heldout=2), told, 2, 0)
    assert told.loaded == figures["policy_step"] == 14  # nothing was measured yet
    assert kept_policies.hold_policy(store, refs[0], "s0") and kept_policies.keep_if_best(store, refs[0], 0.75, 256)
    for newest, (step, name) in ((False, (12, "step=00000012")), (True, (14, "step=00000014-a0002"))):
        figures = evaluate.measure_policy(store, config(tmp_path, num_heldout=2), told, 2, 0, newest)
        assert told.loaded == figures["policy_step"] == step
        assert figures["policy"] == f"policies/{name}"
        assert json.loads(store.get(f"evaluations/{name}.json")) == figures
    with_samples = evaluate.measure_policy(store, config(tmp_path, num_heldout=2), told, 2, 4, newest=True)
    assert json.loads(store.get("evaluations/step=00000014-a0002-samples=4.json")) == with_samples
    fewer = evaluate.measure_policy(store, config(tmp_path, num_heldout=2), told, 1, 0, newest=True)
    assert json.loads(store.get("evaluations/step=00000014-a0002-problems=1.json")) == fewer
    assert json.loads(store.get("evaluations/step=00000014-a0002.json")) == figures  # of another call


def test_a_policy_that_is_pruned_meanwhile_gives_way_to_the_newest(tmp_path, monkeypatch):
    store, told, fetch = RunStore(tmp_path.as_uri(), "told"), Told(), policies.fetch_policy
    publish(store, tmp_path / "policy", 12)

    def fetch_late(store, policy, cache):
        if policy.step == 12:
            publish(store, tmp_path / "policy", 14)
            kept_policies.prune_policies(store, keep=1)
        return fetch(store, policy, cache)

    monkeypatch.setattr(policies, "fetch_policy", fetch_late)
    assert evaluate.measure_policy(store, config(tmp_path), told, 2, 0)["policy_step"] == told.loaded == 14


def test_what_an_evaluation_lacks_is_said_before_an_engine_starts(tmp_path, monkeypatch):
    store = RunStore(tmp_path.as_uri(), "told")
    with pytest.raises(ValueError, match="run told has published no policy yet"):
        evaluate.check(store, config(tmp_path), 0)
    publish(store, tmp_path / "policy", 12)
    evaluate.check(store, config(tmp_path), 4)
    tldr = config(tmp_path, name="tldr", data="none.jsonl", gold_reward_model=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"task.gold_reward_model: '.*nowhere' does not load"):
        evaluate.check(store, tldr, 0)
    monkeypatch.setattr("tba.diversity.encoder_folder", lambda: None)
    evaluate.check(store, config(tmp_path, name="redteam"), 0)
    with pytest.raises(ValueError, match=r"--samples with redteam compares attacks by .*, which is not installed"):
        evaluate.check(store, config(tmp_path, name="redteam"), 4)


def test_other_weights_than_published_are_not_evaluated(tmp_path):
    store, told = RunStore(tmp_path.as_uri(), "told"), Told()
    publish(store, tmp_path / "policy", 12)
    told.differs = 1
    with pytest.raises(RuntimeError, match=r"policy step 12 was published as 0+12: policies/step=00000012 is damaged"):
        evaluate.measure_policy(store, config(tmp_path), told, 2, 0)
    assert store.list("evaluations") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"max_age": 5}}, "draws come from the newest policy's round only"),
        ({"search": {"prompts_per_round": 2}}, "training would never start"),
        ({"searchers": 2, "search": {"prompts_per_round": 16}}, "Set searchers=1"),
    ],
)
def test_turns_that_nobody_could_take_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"synchronous": True, "searchers": 1} | changes)


def test_taking_turns_draws_the_newest_rounds_alone():
    settings = {"synchronous": True, "searchers": 1, "search": {"prompts_per_round": 24}, "train": {"sync_interval": 3}}
    config = RunConfig.model_validate(settings)
    assert config.sampling.max_age == 2  # the third step after a policy draws what that one said
    assert RunConfig.model_validate(config.recorded() | {"store": config.store}) == config


def test_a_ratio_needs_the_probabilities_that_were_sampled_with():
    for settings in ({"top_p": 0.9}, {"temperature": 0.7}, {"exploration_probability": 0.3}):
        with pytest.raises(ValueError, match="needs sampling from the policy as it is trained"):
            RunConfig.model_validate({"train": {"objective": "dr_grpo"}, "search": settings})
    with pytest.raises(ValueError, match="tba_prime draws from the newest sync alone"):
        RunConfig.model_validate({"train": {"objective": "tba_prime", "reference_reset_interval": 5}})
