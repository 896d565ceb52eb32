"""Evaluations during a run (flows/search.py), and the best policy that they find (storage/kept_policies.py).

- Training evaluates the first policy and the last, and in between as much as its share of the Searcher's time allows.
- The best policy stays in the store while the Trainer prunes, also where the Searcher is killed at any moment; the
  summary says which it is, and what share of the time evaluations took.
- A Searcher that lost its name meanwhile changes neither the best policy nor its successor's hold.

python -m pytest tests/flows/test_best_policy.py
"""

import io
import json
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from prefect.logging import disable_run_logger
from rich.console import Console

from flows import search
from flows.cli.console import summary_table
from flows.config import RunConfig
from flows.search import EvaluationBudget
from storage import attempts, kept_policies, ledger, policies
from storage.errors import Superseded
from storage.store import RunStore
from storage.summary import summarise
from tba.engine import ServedPolicy
from tests.flows.published import publish
from tests.storage.helpers import NOON, OWNER, make_search_round, make_training_step


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
        return "committed"

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
        if len(looks) > 2:  # before the evaluation, and after it
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
