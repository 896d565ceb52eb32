"""A Searcher's rounds and their commit (flows/search.py). The loop itself is tested by whole runs.

- a round whose shard was committed, but not its metrics, is recorded by the next try
- the metrics of a try whose round has another process's shard are dropped
- a round that breaks a rule is quarantined, and three in a row end the Searcher
- a synchronous Searcher samples one round of a policy
- Prefect hears of one round a second of a run, however many Searchers it has, and of each round that fails

Run: pytest tests/flows/test_search.py
"""

import logging
from types import SimpleNamespace

import pytest

from flows import search
from flows.config import RunConfig
from flows.searcher import held_name, policy_feed
from flows.searcher.round_reports import RoundReports
from storage import ledger, requests
from storage.errors import StoreUnreachable
from storage.queries import query
from storage.store import RunStore
from tba.engine import ServedPolicy
from tba.rewards import NoneJudged
from tests.flows.published import publish
from tests.storage.buffer_runs import new_store
from tests.storage.helpers import make_search_round, make_shard


@pytest.fixture
def store(tmp_path, monkeypatch) -> RunStore:
    monkeypatch.setattr(search, "get_run_logger", lambda: logging.getLogger("test"))
    return new_store(tmp_path)


def num_recorded(store: RunStore) -> int:
    return query(store, "SELECT count(*) AS n FROM search_rounds")["n"][0].as_py()


def test_a_round_is_recorded_though_the_first_try_failed_after_its_commit(store, monkeypatch):
    def away(*_):
        raise StoreUnreachable("away")

    shard, metrics = make_shard("s0", 0), make_search_round("s0", 0)
    with monkeypatch.context() as outage:
        outage.setattr(ledger, "record_search_round", away)
        with pytest.raises(StoreUnreachable):
            search.commit(store, shard, metrics)
    assert num_recorded(store) == 0
    for _ in range(2):
        search.commit(store, shard, metrics)
        assert num_recorded(store) == 1


def test_a_try_whose_round_is_another_processs_records_nothing(store):
    search.commit(store, make_shard("s0", 0), make_search_round("s0", 0))
    store.delete("metrics/search/searcher=s0/round=00000000.parquet")
    search.commit(store, make_shard("s0", 0, response_tokens=[7, 7]), make_search_round("s0", 0))
    assert num_recorded(store) == 0


def test_a_run_reports_one_round_a_second(store):
    now = [0.0]
    searchers = [RoundReports(store, 40, clock=lambda: now[0]) for _ in range(40)]
    assert sum(each.is_due() for each in searchers) < 10, "not all at once"

    def reports(seconds: int) -> int:
        """Of all rounds, which take half a second."""
        num_due = 0
        for _ in range(2 * seconds):
            num_due += sum(each.is_due() for each in searchers)
            now[0] += 0.5
        return num_due

    assert reports(400) == pytest.approx(400, abs=40)
    requests.want_searchers(store, 10)  # most are about to leave; those that stay hear of it with their next report
    del searchers[10:]
    reports(40)
    assert reports(400) == pytest.approx(400, abs=40)
    store.put("control/searchers.json", b"damaged")
    assert reports(400) == pytest.approx(400, abs=40)


def test_a_searcher_alone_reports_each_round(store):
    now = [0.0]
    reports = RoundReports(store, 1, clock=lambda: now[0])
    for now[0] in range(10):
        assert reports.is_due()


@pytest.fixture
def finished(store, monkeypatch) -> list[tuple[str, int]]:
    """How rounds were finished, with their numbers: in the flow, or as a task."""
    found: list[tuple[str, int]] = []

    def finish_round(store: RunStore, searcher, sampled) -> str:
        found.append(("in the flow", sampled.number))
        if sampled.number == 7:
            raise StoreUnreachable("away")
        return "committed" if sampled.number != 8 or len(found) > 1 else "spoiled"

    def as_asset(*_):
        return lambda _: (
            lambda store, searcher, sampled: found.append(("as a task", sampled.unwrap().number)) or "committed"
        )

    monkeypatch.setattr(search, "finish_round", finish_round)
    monkeypatch.setattr(search, "as_asset", as_asset)
    return found


@pytest.mark.parametrize(
    ("number", "is_due", "expected"),
    [
        (3, True, [("as a task", 3)]),
        (3, False, [("in the flow", 3)]),
        (7, False, [("in the flow", 7), ("as a task", 7)]),  # it failed: the task tries again, and shows why
        (8, False, [("in the flow", 8), ("in the flow", 8)]),  # its shard is in quarantine
    ],
)
def test_a_round_is_a_task_if_its_report_is_due_or_if_it_fails(store, finished, number, is_due, expected):
    held, feed = SimpleNamespace(name="s0", check=lambda: None), SimpleNamespace(paths=lambda policies: [])
    sampled, reports = SimpleNamespace(number=number, policies=[]), SimpleNamespace(is_due=lambda: is_due)
    search.search_round(store, None, feed, held, lambda: sampled, reports)
    assert finished == expected


def test_a_round_that_breaks_a_rule_is_quarantined_and_three_end_the_searcher(store, monkeypatch):
    monkeypatch.setattr(search, "as_asset", lambda *_: lambda function: function)
    rows = make_shard("s0", 0).to_pylist()
    found = SimpleNamespace(trajectories=rows, metrics=make_search_round("s0", 0))
    searcher = SimpleNamespace(score=lambda sampled: found, vocabulary_size=100)
    held, feed = SimpleNamespace(name="s0", check=lambda: None), SimpleNamespace(paths=lambda policies: [])
    sampled, reports = SimpleNamespace(number=0, policies=[]), SimpleNamespace(is_due=lambda: False)
    rows[1]["behavior_logprobs"] = [0.5, -0.25]
    with pytest.raises(RuntimeError, match="round 0 failed validation 3 times"):
        search.search_round(store, searcher, feed, held, lambda: sampled, reports)
    assert store.list("trajectories") == [] and num_recorded(store) == 0
    assert len(store.list("quarantine")) == 2 * search.MAX_SPOILED_ROUNDS
    rows[1] |= {"behavior_logprobs": [-0.5, -0.25], "response_tokens": [100, 2]}  # of no token of this model
    assert search.finish_round(store, searcher, sampled) == "spoiled"
    rows[1]["response_tokens"] = [99, 2]
    assert search.finish_round(store, searcher, sampled) == "committed" and num_recorded(store) == 1


def test_a_round_that_no_reward_judges_commits_nothing(store, monkeypatch):
    as_a_task = lambda finish: lambda store, searcher, sampled: finish(store, searcher, sampled.unwrap())  # noqa: E731
    monkeypatch.setattr(search, "as_asset", lambda *_: as_a_task)

    def score(sampled):
        raise NoneJudged("task.rewards: all are None")

    searcher, sampled = SimpleNamespace(score=score, vocabulary_size=100), SimpleNamespace(number=0, policies=[])
    held, feed = SimpleNamespace(name="s0", check=lambda: None), SimpleNamespace(paths=lambda policies: [])
    for is_due in (True, False):
        reports = SimpleNamespace(is_due=lambda is_due=is_due: is_due)
        assert search.search_round(store, searcher, feed, held, lambda: sampled, reports) is False
    assert num_recorded(store) == 0 and store.list("quarantine") == []


@pytest.mark.parametrize("num_unjudged", [0, 19, 20])
def test_a_synchronous_searcher_samples_one_round_of_a_policy(store, tmp_path, monkeypatch, num_unjudged):
    """But for those that no reward judges, up to twenty."""
    store.create_run(RunConfig(run=store.run, store=store.url, synchronous=True, searchers=1).recorded())
    publish(store, tmp_path / "policy", 0)
    rounds = []
    searcher = SimpleNamespace(
        load=lambda _, step: ServedPolicy(step, f"{step:032d}"), drop_rounds=lambda: None, sample=print
    )

    def search_round(*arguments: object) -> bool:
        sample = arguments[4]
        rounds.append(sample.args[0])
        assert len(rounds) <= num_unjudged + 1, "a second round of the same policy"
        return len(rounds) > num_unjudged

    monkeypatch.setattr(search, "start_searcher_task", lambda *_, **__: searcher)
    monkeypatch.setattr(search, "search_round", search_round)
    monkeypatch.setattr(search, "samples_ahead", lambda config: False)  # it imports torch, which takes seconds
    for module in (held_name, policy_feed):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(policy_feed, "policy_cache", lambda run: tmp_path / "cache")
    monkeypatch.setattr(policy_feed, "POLL_S", 0.05)
    monkeypatch.setattr(policy_feed, "TRAINER_SILENT_S", 0.5)
    if num_unjudged == 20:
        with pytest.raises(RuntimeError, match="none applied to any response of round 0, for 20 draws of its prompts"):
            search.search.fn(store.url, store.run, "s0")
    else:
        assert search.search.fn(store.url, store.run, "s0") == 1
    assert rounds == [0] * min(num_unjudged + 1, 20)
