"""evaluate/policy: the figures of a policy that says what it is told to, worked out by hand.

- Greedy accuracy, perplexity under the reference, pass@k for k = 1, 2, 4; of tldr the win rate; of redteam success and
  diversity.
- The best policy is evaluated, the newest where that is asked for or none was measured, and the figures stay in the
  run's store. A run without a policy is refused, and a missing judge or encoder named, before an engine starts; weights
  that are not the published ones are refused.
- Training evaluates the first policy and the last, and in between as much as its share of the Searcher's time allows.
- The best policy stays in the store while the Trainer prunes, also where the Searcher is killed at any moment; the
  summary says which it is, and what share of the time evaluations took.
- A Searcher that lost its name meanwhile changes neither the best policy nor its successor's hold.

python -m pytest tests/flows/test_evaluate.py
"""

import io
import json
import math
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest
from prefect.logging import disable_run_logger
from rich.console import Console

from flows import evaluate, search
from flows.cli.console import summary_table
from flows.config import RunConfig
from flows.search import EvaluationBudget
from storage import attempts, kept_policies, ledger, policies
from storage.errors import Superseded
from storage.store import RunStore
from storage.summary import summarise
from tba.engine import Response, ServedPolicy
from tba.tasks.base import Problem
from tests.storage.helpers import NOON, OWNER, make_search_round, make_training_step

PROBLEMS = [Problem("a", "1 + 1 =", "2"), Problem("b", "1 + 2 =", "3")]
SAID = {"a": ["2", "2", "1", "2"], "b": ["2", "2", "2", "3"]}  # greedy is the first


class Told:
    """A Searcher whose policy says what it is told to."""

    def __init__(self, problems=PROBLEMS, said=SAID, task=None):
        self.task = SimpleNamespace(heldout=problems, train=problems, task=task)
        self._said = said
        self.right = 1.0  # the reward of a right answer
        self.differs = 0  # 1: the engine finds other weights than were published

    def answers(self, problems, num_samples=1, temperature=0.0):
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


def publish(store: RunStore, folder, step: int, attempt: int = 1, final: bool = False) -> policies.PolicyRef:
    """What the Trainer does with a policy."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(f"policy {step} of attempt {attempt}".encode())
    ref = policies.publish_policy(
        store, folder, policies.policy_ref(step, f"{step:032d}", attempt=attempt, final=final)
    )
    kept_policies.prune_policies(store, keep=2)
    return ref


def test_the_best_policy_is_evaluated_and_its_figures_stay(tmp_path):
    store, told = RunStore(tmp_path.as_uri(), "told"), Told()
    refs = [publish(store, tmp_path / "policy", 12), publish(store, tmp_path / "policy", 14, attempt=2)]
    figures = evaluate.measure_policy(store, config(tmp_path), told, 2, 0)
    assert told.loaded == figures["policy_step"] == 14  # nothing was measured yet
    assert kept_policies.hold_policy(store, refs[0], "s0") and kept_policies.keep_if_best(store, refs[0], 0.75, 256)
    for newest, (step, name) in ((False, (12, "step=00000012")), (True, (14, "step=00000014-a0002"))):
        figures = evaluate.measure_policy(store, config(tmp_path), told, 2, 0, newest)
        assert told.loaded == figures["policy_step"] == step
        assert figures["policy"] == f"policies/{name}"
        assert json.loads(store.get(f"evaluations/{name}.json")) == figures
    with_samples = evaluate.measure_policy(store, config(tmp_path), told, 2, 4, newest=True)
    assert json.loads(store.get("evaluations/step=00000014-a0002-samples=4.json")) == with_samples
    assert json.loads(store.get("evaluations/step=00000014-a0002.json")) == figures  # of another call


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


def test_evaluations_stay_within_their_share():
    now = [100.0]
    budget = EvaluationBudget(0.1, clock=lambda: now[0])
    assert budget.allows()  # of a Searcher that joins in the middle: the first policy that it loads
    budget.spend(4.0)
    # A second evaluation of 4 s would make it 8 of 76 + 4 seconds.
    for seconds, allowed in ((75.9, False), (76.0, True)):
        now[0] = 100 + seconds
        assert budget.allows() == allowed
    budget.spend(0.0)  # another Searcher had done it
    assert budget.allows()
    budget.spend(6.0)  # 16 of 154 + 6
    for seconds, allowed in ((153.9, False), (154.0, True)):
        now[0] = 100 + seconds
        assert budget.allows() == allowed
    assert not EvaluationBudget(0.0).allows()


class Measured:
    """A Searcher whose policies have the accuracies that they are told to have; an evaluation takes 2 s."""

    def __init__(self, accuracies: dict[int, float]) -> None:
        self._accuracies, self.step = accuracies, None

    def load(self, folder, step):
        self.step = step
        return ServedPolicy(step, f"{step:032d}")

    def sample(self, number, **_):
        return SimpleNamespace(number=number, policies=set())

    def drop_rounds(self):
        pass

    def evaluate(self, num_problems):
        return {
            "split": "heldout",
            "num_problems": num_problems,
            "accuracy": self._accuracies.get(self.step, 0.5),
            "mean_response_tokens": 1.0,
            "seconds": 2.0,
            "created_at": datetime.now(UTC),
        }


@pytest.mark.parametrize(
    ("share", "evaluated"),
    # A round takes 10 s, and a policy comes with each. 0.1 is 4 s of 42 + 2 at step 4, 6 of 64 + 2 at step 6.
    [(0.1, [0, 4, 6, 8, 9]), (0.0, [0, 9])],
)
def test_training_evaluates_as_its_share_allows_and_keeps_the_best(tmp_path, monkeypatch, share, evaluated):
    store = RunStore(tmp_path.as_uri(), "run")
    store.create_run(RunConfig(run="run", evaluate_share=share, task={"num_heldout": 8}).recorded())
    now = [0.0]

    class Searcher(Measured):
        def evaluate(self, num_problems):
            now[0] += 2.0
            return super().evaluate(num_problems)

    def round_(*_):
        now[0] += 10.0
        publish(store, tmp_path / "policy", policies.latest_policy(store).step + 1, final=now[0] >= 90)
        return True

    searcher = Searcher({0: 0.25, 4: 0.75})
    monkeypatch.setattr(search, "start_searcher_task", lambda *_, **__: searcher)
    monkeypatch.setattr(search, "as_asset", lambda *_: lambda function: function)
    monkeypatch.setattr(search, "finish_round", round_)
    monkeypatch.setattr(search, "evaluate_task", search.evaluate)
    monkeypatch.setattr(search, "EvaluationBudget", lambda share: EvaluationBudget(share, clock=lambda: now[0]))
    publish(store, tmp_path / "policy", 0)
    with disable_run_logger():
        search.search.fn(store.url, "run", "s0", evaluates=True)
    assert list(ledger.evaluations(store)) == evaluated
    best = kept_policies.best_policy(store)
    assert (best.step, best.accuracy, best.num_problems) == ((4, 0.75, 8) if share else (9, 0.5, 8))
    assert store.exists(f"{best.path}/model.safetensors")


class Killed(BaseException):
    pass


class Killing(RunStore):
    """Kills the process that writes to it, before so many writes were done."""

    num_writes = 0

    def _write(self) -> None:
        self.num_writes -= 1
        if self.num_writes < 0:
            raise Killed

    def put(self, *arguments):
        self._write()
        super().put(*arguments)

    def put_new(self, *arguments):
        self._write()
        super().put_new(*arguments)

    def delete(self, *arguments):
        self._write()
        super().delete(*arguments)


HELD = SimpleNamespace(name="s0", check=lambda: None)


@pytest.mark.parametrize("num_writes", range(5))
def test_whenever_the_searcher_is_killed_a_recorded_accuracy_has_its_policy(tmp_path, num_writes):
    """Of the best one: while it is evaluated, and afterwards, the Trainer publishes and prunes."""
    store, folder = RunStore(tmp_path.as_uri(), "run"), tmp_path / "policy"
    searcher = Measured({0: 0.25, 1: 0.75})
    dying = Killing(store.url, "run")
    measure = searcher.evaluate

    def slow(num_problems):
        for step in (2, 3, 4):
            publish(store, folder, step)
        return measure(num_problems)

    with disable_run_logger():
        first = publish(store, folder, 0)
        searcher.load(None, 0)
        search.evaluate(store, searcher, HELD, 8, first)
        better = publish(store, folder, 1)
        searcher.load(None, 1)
        searcher.evaluate, dying.num_writes = slow, num_writes
        with suppress(Killed):
            search.evaluate(dying, searcher, HELD, 8, better)
        searcher.evaluate = measure
        for step in (5, 6, 7):
            publish(store, folder, step)
        best = kept_policies.best_policy(store)
        assert store.get(f"{best.path}/model.safetensors") == f"policy {best.step} of attempt 1".encode()
        if 1 in ledger.evaluations(store):
            assert (best.step, best.accuracy) == (1, 0.75)
        assert (best.step == 1) == (num_writes >= 2)  # held, then the pointer, then the record, then released
        searcher.load(None, 7)
        search.evaluate(store, searcher, HELD, 8, policies.latest_policy(store))  # the next one of its name
    assert store.list("policies/held") == []
    assert kept_policies.best_policy(store).step == (1 if num_writes >= 2 else 7)


@pytest.mark.parametrize("accuracy", [0.75, 0.125], ids=["better", "worse"])
def test_a_searcher_that_lost_its_name_leaves_its_successors_files(tmp_path, accuracy):
    """It is cut off once its evaluation is done, while a process of its name begins one of another policy."""
    store, folder = RunStore(tmp_path.as_uri(), "run"), tmp_path / "policy"
    searcher, looks = Measured({0: 0.25, 1: accuracy}), []

    def check() -> None:
        looks.append(None)
        if len(looks) > 1:
            kept_policies.hold_policy(store, policies.latest_policy(store), "s0")
            raise Superseded("another process has the name")

    with disable_run_logger():
        first = publish(store, folder, 0)
        searcher.load(None, 0)
        search.evaluate(store, searcher, HELD, 8, first)
        late = publish(store, folder, 1)
        publish(store, folder, 2)
        searcher.load(None, 1)
        with pytest.raises(Superseded):
            search.evaluate(store, searcher, SimpleNamespace(name="s0", check=check), 8, late)
    assert kept_policies.best_policy(store).step == 0
    assert json.loads(store.get("policies/held/s0.json"))["step"] == 2


def test_the_summary_says_which_policy_is_best_and_what_evaluations_cost(tmp_path):
    """The best one is of a step that the second attempt undid and trained anew."""
    store = RunStore(tmp_path.as_uri(), "run")

    def at(second: int) -> datetime:
        return NOON + timedelta(seconds=second)

    row = {"split": "heldout", "num_problems": 8, "mean_response_tokens": 4.0, "seconds": 2.0}
    attempts.start_attempt(store, 0, OWNER)
    for attempt, resumed_from, began in ((1, 0, 0), (2, 1, 14)):
        times = {"started_at": at(began), "ended_at": at(began + 10)}
        for step in range(resumed_from + 1, 3):
            ledger.record_training_step(store, make_training_step(attempt, step) | times)
    for number, began in enumerate((2, 14)):
        times = {f"{name}started_at": at(began) for name in ("", "sampling_")}
        times |= {f"{name}ended_at": at(began + 10) for name in ("", "sampling_")}
        ledger.record_search_round(store, make_search_round("s0", number) | times)
    for attempt, step, accuracy, ended in ((1, 0, 0.25, 2), (1, 2, 0.875, 14), (2, 2, 0.75, 26)):
        if attempt == 2:
            attempts.start_attempt(store, 1, OWNER)
        ref = publish(store, tmp_path / "policy", step, attempt)
        assert kept_policies.hold_policy(store, ref, "s0")
        kept_policies.keep_if_best(store, ref, accuracy, 8)
        measured = {"attempt": attempt, "policy_step": step, "accuracy": accuracy, "created_at": at(ended)}
        ledger.record_evaluation(store, row | measured)
    summary = summarise(store)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.75)
    assert (summary["best_step"], summary["best_accuracy"]) == (2, 0.875)
    assert summary["best_policy"] == "policies/step=00000002"  # and not step=00000002-a0002
    assert summary["evaluation_share"] == pytest.approx(6 / 26)
    console = Console(width=100, file=io.StringIO())
    console.print(summary_table(summary))
    shown = console.file.getvalue()
    assert re.search(r"Best policy [ │]+policies/step=00000002 ", shown)
    assert re.search(r"Accuracy of the best policy [ │]+0\.875", shown)


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
    with pytest.raises(ValueError, match="tba_prime has no replay"):
        RunConfig.model_validate({"train": {"objective": "tba_prime", "reference_reset_interval": 5}})
