"""Requests to a running run: stop, change the number of Searchers.

Claims
- the flow keeps the last requested number of Searchers, across its restarts; a new one has a name of its own
- a Searcher that gave up on a silent Trainer is started again, as often as that takes; at the final policy none is
- so is one that failed after a committed round; repeated failure at the same round ends the run
- the store tells a surplus Searcher to leave, and its name is not used again; the first, which evaluates, stays
- a Searcher told to leave finishes its round and begins no other
- the Trainer's process reads a stop request within a heartbeat, once
- an unreachable store changes nothing, nor does an unreachable Prefect server during the final evaluation
- `tba searchers` refuses an unchanged number, a number that leaves no Searcher to evaluate, and a finished run
- `tba stop` waits until the Trainer reports its stop, and prints it; it refuses a run without a live Trainer

Run: pytest tests/flows/cli/test_steer.py
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import httpx
import pytest
from prefect.logging import disable_run_logger
from prefect.states import Completed, Crashed, Failed, Running, State, StateType
from typer.testing import CliRunner

from flows import search, train
from flows.cli.app import app
from flows.config import RunConfig
from flows.run import searchers as of_run
from flows.run.searchers import MAX_REPLACEMENTS, Searchers
from flows.searcher import held_name
from flows.searcher.held_name import HeldName
from flows.trainer.alarms import RunAlarms
from flows.trainer.heartbeat import Heartbeat
from flows.trainer.outbox import StoreOutbox
from storage import attempts, ledger, policies, requests
from storage.errors import StoreUnreachable
from storage.intake import Refusal, refuse
from storage.policies import PolicyRef
from storage.process_identity import Identity
from storage.shards import commit_shard
from storage.store import RunStore
from tba.training_loop import Stopped
from tests.flows.prepared_run import heartbeat, prepare_run
from tests.storage.helpers import make_shard


@pytest.fixture
def store(tmp_path, monkeypatch) -> RunStore:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TBA_STORE", raising=False)
    return prepare_run((tmp_path / ".tba").as_uri())


def start_in_state(monkeypatch, state: State) -> list[dict]:
    """The parameters of the flow runs that are started, in order; each is in this state from the beginning."""
    parameters = []

    def run_deployment(name: str, **given) -> SimpleNamespace:
        parameters.append(given["parameters"])
        return SimpleNamespace(id=len(parameters), parameters=given["parameters"])

    monkeypatch.setattr(of_run, "run_deployment", run_deployment)
    monkeypatch.setattr(of_run, "started_by_flows", lambda config: [])
    monkeypatch.setattr(of_run, "read_ended", lambda ids: dict.fromkeys(ids, state) if state.is_final() else {})
    return parameters


@pytest.fixture
def started(monkeypatch) -> list[dict]:
    """The parameters of the flow runs that were started, in order; none of them fails."""
    return start_in_state(monkeypatch, Running())


def new_flow(store: RunStore) -> Searchers:
    return Searchers(RunConfig(run=store.run, store=store.url, searchers=1))


def tba(*arguments: str):
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def names(started: list[dict]) -> list[str]:
    return [parameters["name"] for parameters in started]


def away(*_: object):
    raise StoreUnreachable("away")


def test_the_flow_keeps_as_many_searchers_as_are_wanted(store, started):
    searchers = new_flow(store)
    searchers.keep_up()
    assert tba("searchers", "arithmetic", "+2").exit_code == 0
    searchers.keep_up()
    searchers.keep_up()
    assert names(started) == ["s0", "s1", "s2"]
    assert [parameters["evaluates"] for parameters in started] == [True, False, False]

    answer = json.loads(tba("searchers", "arithmetic", "-1", "--json").stdout)
    assert answer == {"run": "arithmetic", "before": 3, "wanted": 2, "alive": False}
    searchers.keep_up()
    assert [requests.is_to_leave(store, name) for name in ("s0", "s1", "s2")] == [False, False, True]

    tba("searchers", "arithmetic", "+1")
    searchers.keep_up()
    assert names(started)[3:] == ["s3"]  # s2 may be in its last round still
    assert not started[3]["evaluates"]

    resumed = new_flow(store)
    resumed.keep_up()
    assert names(started)[4:] == ["s0", "s1", "s2"]
    assert not requests.is_to_leave(store, "s2")  # the new one


def test_a_store_that_is_away_changes_nothing(store, started, monkeypatch):
    searchers = new_flow(store)
    tba("searchers", "arithmetic", "+1")
    searchers.keep_up()

    monkeypatch.setattr(requests, "wanted_searchers", away)
    searchers.keep_up()
    assert names(started) == ["s0", "s1"]
    assert not requests.is_to_leave(store, "s1")


def test_who_gave_up_on_a_silent_trainer_is_started_again(store, monkeypatch):
    parameters = start_in_state(monkeypatch, Completed())
    latest = SimpleNamespace(final=False, step=7)
    monkeypatch.setattr(policies, "latest_policy", lambda store: latest)
    monkeypatch.setattr(ledger, "evaluations", lambda store: {7: "of the final policy"})
    searchers = new_flow(store)
    with disable_run_logger():
        for _ in range(2 * MAX_REPLACEMENTS):
            searchers.keep_up()
        assert names(parameters) == ["s0"] * (1 + 2 * MAX_REPLACEMENTS)
        latest.final = True
        searchers.keep_up()
    assert len(parameters) == 1 + 2 * MAX_REPLACEMENTS


@pytest.fixture
def failing(monkeypatch) -> list[dict]:
    """The parameters of the flow runs that were started, in order; each of them has crashed when it is looked at."""
    return start_in_state(monkeypatch, Crashed())


def test_a_searcher_that_fails_now_and_then_is_restarted_each_time(store, failing):
    """A preempted machine each day, of which a run of many days has many, is no fault."""
    searchers = new_flow(store)
    with disable_run_logger():
        for number in range(2, 3 + 2 * MAX_REPLACEMENTS):
            searchers.keep_up()
            commit_shard(store, make_shard("s0", number))
    assert names(failing) == ["s0"] * (2 + 2 * MAX_REPLACEMENTS)


def test_each_of_many_searchers_may_fail_once(store, failing):
    searchers = Searchers(RunConfig(run=store.run, store=store.url, searchers=2 * MAX_REPLACEMENTS))
    with disable_run_logger():
        searchers.keep_up()
    again = [(parameters["name"], parameters["evaluates"]) for parameters in failing]
    assert again[2 * MAX_REPLACEMENTS :] == again[: 2 * MAX_REPLACEMENTS]


def test_a_searcher_whose_flow_run_was_deleted_is_started_again(store, started, monkeypatch):
    searchers = new_flow(store)
    searchers.keep_up()
    with monkeypatch.context() as deleted, disable_run_logger():
        deleted.setattr(of_run, "read_ended", lambda ids: dict.fromkeys(ids, Crashed(message="It was deleted.")))
        searchers.keep_up()
    searchers.keep_up()
    assert names(started) == ["s0", "s0"]


class FlowRuns:
    """A server's flow runs, which answers with a page at most."""

    def __init__(self, monkeypatch, states: list[State]) -> None:
        self.runs, self.num_requests = [SimpleNamespace(id=uuid4(), state=state) for state in states], 0
        monkeypatch.setattr(of_run, "get_client", lambda sync_client: contextlib.nullcontext(self))

    def _chosen(self, flow_run_filter) -> list[SimpleNamespace]:
        self.num_requests += 1
        types = flow_run_filter.state.type.any_ if flow_run_filter.state else list(StateType)
        return [run for run in self.runs if run.id in flow_run_filter.id.any_ and run.state.type in types]

    def count_flow_runs(self, flow_run_filter) -> int:
        return len(self._chosen(flow_run_filter))

    def read_flow_runs(self, flow_run_filter, limit: int, offset: int = 0) -> list[SimpleNamespace]:
        assert limit <= of_run.PAGE
        return self._chosen(flow_run_filter)[offset : offset + limit]


def test_a_thousand_living_searchers_take_two_requests(monkeypatch):
    server = FlowRuns(monkeypatch, [Running()] * 1_000)
    assert of_run.read_ended(run.id for run in server.runs) == {} and server.num_requests == 2


@pytest.mark.parametrize("num_ended", [1, of_run.PAGE, 2 * of_run.PAGE + 1])
def test_all_that_ended_are_found_with_their_states(monkeypatch, num_ended):
    server = FlowRuns(monkeypatch, [Failed()] * num_ended + [Completed()] + [Running()] * 500)
    ended = of_run.read_ended(run.id for run in server.runs)
    assert ended == {run.id: run.state for run in server.runs[: num_ended + 1]}


def test_deleted_flow_runs_have_crashed(monkeypatch):
    server = FlowRuns(monkeypatch, [Running()] * (2 * of_run.PAGE))
    deleted = uuid4()
    ((found, state),) = of_run.read_ended([deleted, *(run.id for run in server.runs)]).items()
    assert found == deleted and state.is_crashed()


def test_a_searcher_that_fails_repeatedly_in_one_round_ends_the_run(store, failing):
    searchers = new_flow(store)
    with disable_run_logger():
        for _ in range(MAX_REPLACEMENTS):
            searchers.keep_up()
        with pytest.raises(RuntimeError, match="searcher s0 failed 4 times in its round 2"):
            searchers.keep_up()
    assert names(failing) == ["s0"] * (1 + MAX_REPLACEMENTS)


def test_a_searcher_that_fails_while_the_store_is_away_is_restarted_afterwards(store, failing, monkeypatch):
    searchers = new_flow(store)
    with disable_run_logger():
        searchers.keep_up()
        with monkeypatch.context() as outage:
            outage.setattr(RunStore, "list", away)
            outage.setattr(RunStore, "get", away)
            for _ in range(2 * MAX_REPLACEMENTS):
                searchers.keep_up()
        assert names(failing) == ["s0", "s0"]
        searchers.keep_up()
    assert names(failing) == ["s0"] * 3


def test_a_server_that_is_away_at_the_end_is_a_warning(monkeypatch):
    said = []
    monkeypatch.setattr(train, "get_run_logger", lambda: SimpleNamespace(warning=lambda *words: said.append(words)))

    def stop() -> None:
        raise httpx.ConnectError("the server is away")

    def a_page_of_a_proxy() -> None:
        raise ValueError("not JSON")

    train.end_searchers(SimpleNamespace(stop=stop))
    train.tell_prefect(a_page_of_a_proxy)
    assert ["Searchers were not told" in said[0][0], "was not told" in said[1][0]] == [True, True]


def test_a_damaged_number_of_searchers_is_replaced(store):
    store.put(requests.SEARCHERS, b"")
    assert tba("searchers", "arithmetic", "+1").exit_code == 0
    assert requests.wanted_searchers(store, 1) == 2


def test_who_is_to_leave_finishes_the_rounds_that_are_sampled(store, monkeypatch):
    rounds = []

    def sample(number: int, *, ahead: bool, while_waiting) -> int:
        assert ahead is (number <= 3)
        return number

    def search_round(store: RunStore, searcher, feed, held: HeldName, sample: Callable, reports) -> bool:
        if (number := sample()) == 3:
            requests.ask_to_leave(store, "s1")  # in the middle of a round
        rounds.append(number)
        return True

    served = PolicyRef(0, "policies/step=00000000", "f" * 32, False, 1, "")
    monkeypatch.setattr(search, "start_searcher_task", lambda *_, **__: searcher)
    searcher = SimpleNamespace(drop_rounds=lambda: None, sample=sample, has_sampled=lambda number: number <= 5)
    feed = SimpleNamespace(next=lambda: served, poll=None, is_new=False)
    monkeypatch.setattr(search, "PolicyFeed", lambda *_, **__: feed)
    monkeypatch.setattr(search, "search_round", search_round)
    monkeypatch.setattr(search, "samples_ahead", lambda config: True)
    for module in (search, held_name):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    assert search.search.fn(store.url, store.run, name="s1") == 6
    assert rounds == [0, 1, 2, 3, 4, 5]


def test_a_searcher_knows_whether_the_trainer_refused_its_last_round(store, monkeypatch):
    """In a synchronous run the Trainer then waits for another round of the same policy."""
    commit_shard(store, make_shard("s1", 0))
    refuse(store, [Refusal("s1", 0, ["of an earlier process"])], "a test")
    asked, rounds = [], iter(range(1, 4))
    searcher = SimpleNamespace(drop_rounds=lambda: None, sample=print)
    monkeypatch.setattr(search, "start_searcher_task", lambda *_, **__: searcher)

    class Feed:
        is_new, poll = False, None

        def __init__(self, *_: object, is_refused: Callable[[], bool], **__: object) -> None:
            self.is_refused = is_refused

        def next(self) -> PolicyRef | None:
            asked.append(self.is_refused())
            return None if len(asked) == 4 else PolicyRef(0, "policies/step=00000000", "f" * 32, False, 1, "")

    def search_round(*_: object) -> bool:
        if (number := next(rounds)) == 2:
            refuse(store, [Refusal("s1", number, ["a rule"])], "a test")
        return True

    monkeypatch.setattr(search, "PolicyFeed", Feed)
    monkeypatch.setattr(search, "search_round", search_round)
    for module in (search, held_name):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    search.search.fn(store.url, store.run, name="s1")
    assert asked == [False, False, True, False]


def test_the_trainer_hears_that_it_is_to_stop(store, monkeypatch):
    monkeypatch.setattr("flows.trainer.heartbeat.HEARTBEAT_S", 0.05)
    heart = Heartbeat(store, RunConfig(), attempt=1, parent=os.getppid())
    try:
        assert not heart.stop.wait(0.2)
        requests.ask_to_stop(store)
        assert heart.stop.wait(10)
        given = store, RunConfig(), 1, Path(), heart, RunAlarms()
        with contextlib.closing(StoreOutbox(*given)) as outbox, pytest.raises(Stopped):
            outbox.status("training", 4, {})
    finally:
        heart.end("failed")
    again = Heartbeat(store, RunConfig(), attempt=1, parent=os.getppid())
    assert again.stop.wait(10), "a Trainer that is started again obeys the request"
    again.end("stopped")
    assert not requests.is_to_stop(store)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("-1", "at least 1 must stay, because the last one evaluates the final policy"),
        ("2", "change: got '2'; write a number of Searchers with its sign, such as +1 or -1"),
        ("+0", "change: got '+0'"),
        ("+many", "change: got '+many'"),
    ],
)
def test_searchers_refuses(store, change, message):
    result = tba("searchers", "arithmetic", change)
    assert (result.exit_code, message in result.stderr) == (2, True)
    assert requests.wanted_searchers(store, 1) == 1


def test_a_finished_run_needs_no_searchers(store):
    prepare_run(store.url, "done", finished=True)
    result = tba("searchers", "done", "+1")
    assert (result.exit_code, result.stderr) == (2, "Run 'done' is finished.\n")


def test_who_takes_turns_is_one_searcher(store):
    store.put("run.json", json.dumps(json.loads(store.get("run.json")) | {"synchronous": True}).encode())
    result = tba("searchers", "arithmetic", "+1")
    assert (result.exit_code, "one Searcher and the Trainer take turns" in result.stderr) == (2, True)
    assert requests.wanted_searchers(store, 1) == 1


def test_stop_refuses_where_nobody_trains(store):
    result = tba("stop", "arithmetic")
    assert (result.exit_code, "Run 'arithmetic' has no live Trainer" in result.stderr) == (2, True)
    assert not requests.is_to_stop(store)


def test_stop_waits_until_the_trainer_has_stopped(store):
    attempts.start_attempt(store, resumed_from=0, owner=Identity.current())
    attempts.write_heartbeat(store, heartbeat(41))

    def obey() -> None:
        while not requests.is_to_stop(store):
            time.sleep(0.05)
        requests.take_back_stop(store)
        time.sleep(0.5)
        attempts.write_heartbeat(store, heartbeat(42, state="stopped"))

    trainer = threading.Thread(target=obey)
    trainer.start()
    result = tba("stop", "arithmetic")
    trainer.join()
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "Run 'arithmetic' stopped at step 42. The same `tba train` resumes it."
