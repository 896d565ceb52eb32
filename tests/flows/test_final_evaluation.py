"""The end of a run: its flow waits for the evaluation of the final policy (flows/train.py).

python -m pytest tests/flows/test_final_evaluation.py
"""

import logging
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest
from prefect.exceptions import Pause

from flows import train
from storage import ledger, policies, requests
from storage.errors import StoreUnreachable
from storage.store import RunStore
from tests.storage.helpers import NOON


@pytest.fixture
def evaluating(local_store, monkeypatch) -> RunStore:
    """The final policy is published."""
    monkeypatch.setattr(policies, "latest_policy", lambda store: SimpleNamespace(step=80))
    monkeypatch.setattr(train, "POLL_S", 0)
    monkeypatch.setattr(train, "end_if_suspended", lambda: None)
    monkeypatch.setattr(train, "get_run_logger", lambda: logging.getLogger("test"))
    return local_store


def searchers_that(keep_up: Callable[[], None] = lambda: None) -> SimpleNamespace:
    return SimpleNamespace(keep_up=keep_up, is_away=False)


def test_the_final_evaluation_goes_on_while_the_server_is_away(evaluating):
    def keep_up() -> None:
        """Meanwhile the Searcher evaluates."""
        row = {"attempt": 1, "policy_step": 80, "split": "heldout", "num_problems": 8, "accuracy": 0.75}
        ledger.record_evaluation(evaluating, row | {"mean_response_tokens": 4.0, "seconds": 2.0, "created_at": NOON})
        raise httpx.ConnectError("the server is away")

    train.await_evaluation(evaluating, searchers_that(keep_up), 1)
    assert list(ledger.evaluations(evaluating)) == [80]


def test_the_final_evaluation_goes_on_while_the_store_is_away(evaluating, monkeypatch):
    answers = iter([StoreUnreachable("no answer"), StoreUnreachable("no answer"), [], [80]])

    def evaluations(_: RunStore) -> list[int]:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    monkeypatch.setattr(ledger, "evaluations", evaluations)
    train.await_evaluation(evaluating, searchers_that(), 1)
    assert next(answers, None) is None


def test_the_final_evaluation_ends_without_searchers_and_when_the_run_is_suspended(evaluating, monkeypatch):
    def suspended() -> None:
        raise Pause(state=None)

    monkeypatch.setattr(train, "end_if_suspended", suspended)
    with pytest.raises(Pause):
        train.await_evaluation(evaluating, searchers_that(), 1)
    requests.want_searchers(evaluating, 0)
    train.await_evaluation(evaluating, searchers_that(), 1)


def test_an_evaluation_may_take_hours(evaluating, monkeypatch):
    clock, said = iter(range(0, 10**6, 500)), []
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda s: None))
    monkeypatch.setattr(train, "get_run_logger", lambda: SimpleNamespace(info=lambda *words: said.append(words)))
    monkeypatch.setattr(ledger, "evaluations", lambda store: [80] if len(said) == 9 else [])
    train.await_evaluation(evaluating, searchers_that(), 1)
    assert said == [("policy step %s is still being evaluated", 80)] * 9
