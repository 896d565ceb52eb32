"""evaluate/policy: the figures of a policy that says what it is told to, worked out by hand.

- Greedy accuracy, perplexity under the reference, pass@k for k = 1, 2, 4; of tldr the win rate; of redteam success and
  diversity.
- The newest policy is evaluated, and the figures stay in the run's store. A run without a policy is refused.
- Training evaluates at the intervals that are set.

python -m pytest tests/flows/test_evaluate.py
"""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from flows import evaluate
from flows.config import RunConfig
from flows.search import next_evaluation, next_policy
from storage.store import RunStore
from tba.engine import Response
from tba.tasks.base import Problem

PROBLEMS = [Problem("a", "1 + 1 =", "2"), Problem("b", "1 + 2 =", "3")]
SAID = {"a": ["2", "2", "1", "2"], "b": ["2", "2", "2", "3"]}  # greedy is the first


class Told:
    """A Searcher whose policy says what it is told to."""

    def __init__(self, problems=PROBLEMS, said=SAID, task=None):
        self.task = SimpleNamespace(heldout=problems, train=problems, task=task)
        self._said = said

    def answers(self, problems, num_samples=1, temperature=0.0):
        assert (temperature == 0) == (num_samples == 1)
        said = ([self._said[p.prompt_id][n] for n in range(num_samples)] for p in problems)
        return [[Response([len(text)], [-0.5], text) for text in of_problem] for of_problem in said]

    def text(self, response):
        return response.finish_reason  # where this test keeps it

    def rewards(self, problems, responses):
        return [float(self.text(r) == p.answer) for p, r in zip(problems, responses, strict=True)]

    def reference_logprobs(self, problems, responses):
        return [[-math.log(2), -math.log(8)] for _ in responses]  # mean -2 ln 2

    def load(self, folder, policy_step):
        self.loaded = policy_step


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


def test_the_win_rate_is_against_the_reference_summary(tmp_path):
    problems = [Problem("a", "Post", "the cat sat"), Problem("b", "Post", "the cat sat")]
    told = Told(problems, {"a": ["the cat sat"], "b": ["a dog"]})
    figures = evaluate.measure(told, config(tmp_path, name="tldr", data="none.jsonl"), 2, 0)
    assert figures["win_rate"] == 0  # ROUGE-L: the reference scores 1 against itself, and an equal score is no win
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


def test_the_newest_policy_is_evaluated_and_its_figures_stay(tmp_path, monkeypatch):
    store, told = RunStore(tmp_path.as_uri(), "told"), Told()
    with pytest.raises(ValueError, match="run told has published no policy yet"):
        evaluate.measure_policy.fn(store, config(tmp_path), told, 2, 0)
    newest = SimpleNamespace(step=12)
    monkeypatch.setattr(evaluate.policies, "latest_policy", lambda store: newest)
    monkeypatch.setattr(evaluate.policies, "fetch_policy", lambda store, policy, folder: folder)
    figures = evaluate.measure_policy.fn(store, config(tmp_path), told, 2, 0)
    assert told.loaded == figures["policy_step"] == 12
    assert json.loads(store.get("evaluations/step=00000012.json")) == figures


def test_training_evaluates_at_its_intervals(tmp_path):
    every = RunConfig.model_validate({"evaluate_interval": 3, "train": {"sync_interval": 2}})
    assert [next_evaluation(every, step) for step in (0, 7)] == [6, 13]
    assert next_evaluation(config(tmp_path), 0) == math.inf


def test_a_synchronous_searcher_waits_for_another_policy(monkeypatch):
    seen = iter(["old", "old", "new"])
    monkeypatch.setattr("flows.search.policies.latest_policy", lambda store: next(seen))
    monkeypatch.setattr("flows.search.POLL_S", 0)
    pulse = SimpleNamespace(is_silent=lambda: False)
    assert next_policy(None, pulse, after="old") == "new"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"max_age": 5}}, "draws from the newest policy's round alone"),
        ({"search": {"prompts_per_round": 2}}, "nobody would ever go on"),
        ({"searchers": 2, "search": {"prompts_per_round": 16}}, "Set searchers=1"),
    ],
)
def test_turns_that_nobody_could_take_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"synchronous": True, "searchers": 1} | changes)


def test_taking_turns_draws_the_newest_rounds_alone():
    settings = {"synchronous": True, "searchers": 1, "search": {"prompts_per_round": 16}, "train": {"sync_interval": 3}}
    config = RunConfig.model_validate(settings)
    assert config.sampling.max_age == 2  # the third step after a policy draws what that one said
    assert RunConfig.model_validate(config.recorded() | {"store": config.store}) == config


def test_a_ratio_needs_the_probabilities_that_were_sampled_with():
    for search in ({"top_p": 0.9}, {"temperature": 0.7}, {"exploration_probability": 0.3}):
        with pytest.raises(ValueError, match="compares with the probabilities"):
            RunConfig.model_validate({"train": {"objective": "dr_grpo"}, "search": search})
    with pytest.raises(ValueError, match="tba_prime has no replay"):
        RunConfig.model_validate({"train": {"objective": "tba_prime", "reference_reset_interval": 5}})
