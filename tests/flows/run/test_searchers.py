"""Which Searchers a flow adopts, and which it replaces (flows/run/searchers.py). tests/flows/cli/test_steer.py tests
their number, and how often they may fail.

Claims
- a resumed flow adopts Searchers that live, by their leases and flow runs, and starts the missing ones
- it takes the name from a Searcher that is silent or whose flow run has ended, so that the new one starts at once
- a Searcher whose lease has not changed for long, or that gave it back, is replaced though its flow run's state is
  Running; one that has no lease yet, is suspended, or was not looked at because the store was away, is not
- a flow run that a lease names, but that is another run's, is neither adopted nor ended
- an evaluator that ends without the final policy's evaluation counts as failed
- silence is excused more often than failure
- of two processes of one flow run the second ends and leaves the flow run's state; a Searcher that lost its name
  commits no round, and gives no other process's name back

Run: pytest tests/flows/run/test_searchers.py
"""

import logging
import math
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from prefect.exceptions import Abort
from prefect.logging import disable_run_logger
from prefect.states import Completed, Crashed, Paused, Running, State

from flows import search
from flows.config import RunConfig
from flows.run import searchers as of_run
from flows.run.searchers import LOOK_S, MAX_REPLACEMENTS, MAX_SILENCES, SILENT, SILENT_S, Renewals, Searchers
from flows.searcher import held_name
from storage import leases, ledger, policies, requests
from storage.errors import NameTaken, StoreUnreachable, Superseded
from storage.leases import Lease, take_name
from storage.process_identity import Identity
from storage.store import RunStore


class Server:
    """Flow runs by id, and those that were started, in order."""

    def __init__(self) -> None:
        self.runs: dict[UUID, SimpleNamespace] = {}
        self.started: list[dict] = []
        self.queues: list[str] = []  # of those that were started

    def add(self, state: State, **parameters) -> SimpleNamespace:
        run = SimpleNamespace(id=uuid4(), state=state, parameters=parameters)
        self.runs[run.id] = run
        return run

    def run_deployment(self, name: str, **given) -> SimpleNamespace:
        self.started.append(given["parameters"])
        self.queues.append(given["work_queue_name"])
        return self.add(Running(), **given["parameters"])

    def read_flow_runs(self, ids) -> dict[UUID, SimpleNamespace]:
        return {each: self.runs[each] for each in ids if each in self.runs}

    def read_ended(self, ids) -> dict[UUID, State]:
        deleted = Crashed(message="The flow run was deleted.")
        found = {each: self.runs[each].state if each in self.runs else deleted for each in ids}
        return {each: state for each, state in found.items() if state.is_final()}

    def end(self, run: SimpleNamespace, state: State) -> None:
        self.runs[run.id].state = state

    @property
    def names(self) -> list[str]:
        return [parameters["name"] for parameters in self.started]


@pytest.fixture
def server(monkeypatch) -> Server:
    server = Server()
    monkeypatch.setattr(of_run, "run_deployment", server.run_deployment)
    monkeypatch.setattr(of_run, "queue_of_child", lambda deployment: f"the flow's, for {deployment}")
    monkeypatch.setattr(of_run, "read_flow_runs", server.read_flow_runs)
    monkeypatch.setattr(of_run, "started_by_flows", lambda config: list(server.runs.values()))
    monkeypatch.setattr(of_run, "read_ended", server.read_ended)
    monkeypatch.setattr(of_run, "_end", server.end)
    monkeypatch.setattr(leases, "WATCH_S", 0.3)
    return server


@pytest.fixture
def store(tmp_path) -> RunStore:
    return RunStore(tmp_path.as_uri(), "run")


def make_searchers(store: RunStore, number: int) -> Searchers:
    return Searchers(RunConfig(run=store.run, store=store.url, searchers=number))


def keep_up(searchers: Searchers) -> None:
    with disable_run_logger():
        searchers.keep_up()


def held(store: RunStore, name: str, flow_run: SimpleNamespace, **owner) -> Lease:
    """A lease that a process took which differs from this one in `owner`."""
    flow_run.parameters = {"store": store.url, "run": store.run, "name": name} | flow_run.parameters
    lease = take_name(store, name, str(flow_run.id))
    lease = replace(lease, owner=Identity(**asdict(lease.owner) | owner))
    store.put_json(lease.path, lease)
    return lease


@pytest.mark.parametrize("parameters", [{"run": "original"}, {"store": "file:///elsewhere"}, {"name": "s7"}])
def test_a_flow_run_of_another_run_is_let_alone(store, server, parameters):
    """A copied run's leases name the original's Searchers."""
    foreign = server.add(Running(), **parameters)
    held(store, "s0", foreign, boot_id="of another machine")
    keep_up(make_searchers(store, 1))
    assert foreign.state.is_running() and server.names == ["s0"]
    assert server.queues == ["the flow's, for search/searcher"]


def test_a_resumed_flow_adopts_the_living_and_starts_the_missing(store, server):
    living, dead, ended = server.add(Running(), evaluates=True), server.add(Running()), server.add(Crashed())
    held(store, "s0", living)
    held(store, "s1", dead, boot_id="of a machine that died")
    lost = held(store, "s2", ended)
    requests.ask_to_leave(store, "s0")
    searchers = make_searchers(store, 4)
    keep_up(searchers)
    assert server.names == ["s1", "s2", "s3"]
    assert [parameters["evaluates"] for parameters in server.started] == [False] * 3, "s0 evaluates"
    assert not requests.is_to_leave(store, "s0"), "it is wanted again"
    assert all(leases.newest(store, name).is_released for name in ("s1", "s2")), "the new ones need not wait"
    assert (living.state.name, dead.state.name, ended.state.name) == ("Running", SILENT, "Crashed")
    with pytest.raises(Superseded):
        leases.check_name(store, lost)

    server.end(living, Crashed())
    keep_up(searchers)
    assert server.names[3:] == ["s0"], "an adopted one is replaced like the others"


def test_a_searcher_of_an_earlier_flow_that_is_not_wanted_leaves(store, server):
    """Of three Searchers one was asked to leave, and another came under a new name, before the flow's machine died."""
    s2 = server.add(Running(), store=store.url, run=store.run, name="s2", evaluates=False)
    searchers = make_searchers(store, 2)
    keep_up(searchers)
    assert server.names == ["s0", "s1"] and requests.is_to_leave(store, "s2")
    requests.want_searchers(store, 3)
    keep_up(searchers)
    assert server.names == ["s0", "s1", "s3"], "the name of one that leaves is not used again"
    assert s2 in searchers._leaving


def test_whoever_took_the_name_meanwhile_is_adopted(store, server):
    searchers = make_searchers(store, 1)
    keep_up(searchers)
    (first,) = server.runs.values()
    held(store, "s0", server.add(Running(), evaluates=True))
    server.end(first, Crashed())
    keep_up(searchers)
    keep_up(searchers)
    assert server.names == ["s0"]


def test_one_that_was_started_by_hand_does_not_take_the_evaluators_place(store, server):
    """It does not evaluate, so the run would wait for its last evaluation."""
    for name in ("s0", "s1"):
        held(store, name, server.add(Running(), evaluates=False))
    keep_up(make_searchers(store, 2))
    assert [(parameters["name"], parameters["evaluates"]) for parameters in server.started] == [("s0", True)]


def test_a_silent_searcher_is_replaced(store, server, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(of_run, "Renewals", lambda store: Renewals(store, clock=lambda: now[0]))
    searchers = make_searchers(store, 2)
    keep_up(searchers)
    first, second = server.runs.values()
    silent, lively = held(store, "s0", first, boot_id="of a machine that dies"), held(store, "s1", second)
    for seconds in range(0, int(SILENT_S + 3 * LOOK_S), int(LOOK_S)):
        assert server.names == ["s0", "s1"]
        now[0] = seconds
        leases.renew(store, lively)
        keep_up(searchers)
    assert server.names == ["s0", "s1", "s0"]
    assert (first.state.name, second.state.name) == (SILENT, "Running")
    with pytest.raises(Superseded):
        leases.check_name(store, silent)

    leases.renew(store, lively)
    for seconds in range(1000, 1400, int(LOOK_S)):  # the new one waits for a worker, and has no lease
        now[0] = seconds
        leases.renew(store, lively)
        keep_up(searchers)
    assert len(server.names) == 3


def test_silence_is_excused_more_often_than_failure(store, server, monkeypatch):
    """Machines die, or are cut off."""
    searchers = make_searchers(store, 1)

    def unreleased(flow_runs: dict[str, UUID]) -> dict[str, SimpleNamespace]:
        return dict.fromkeys(flow_runs, SimpleNamespace(is_released=False))

    monkeypatch.setattr(searchers, "_renewals", SimpleNamespace(silent=unreleased))
    for number in range(MAX_SILENCES):
        keep_up(searchers)
        assert len(server.names) == number + 2 and server.runs[list(server.runs)[number]].state.name == SILENT
    with pytest.raises(RuntimeError, match=f"was silent {MAX_SILENCES + 1} times"):
        keep_up(searchers)


def test_an_evaluator_that_ends_without_the_final_evaluation_has_failed(store, server):
    """Nobody can fetch the final policy, so each Searcher ends when its Trainer has been silent for long."""
    searchers = make_searchers(store, 2)
    keep_up(searchers)
    policies.point_to(store, policies.policy_ref(7, "0" * 32, attempt=1, final=True))
    evaluator, other = server.runs.values()
    server.end(evaluator, Completed())
    server.end(other, Crashed())
    for _ in range(MAX_REPLACEMENTS):
        keep_up(searchers)
        server.end(list(server.runs.values())[-1], Completed())
    assert server.names == ["s0", "s1", *["s0"] * MAX_REPLACEMENTS], "s1 has nothing more to do"
    with pytest.raises(RuntimeError, match=r"searcher s0 failed \d+ times"):
        keep_up(searchers)
    row = {"attempt": 1, "policy_step": 7, "split": "heldout", "num_problems": 4, "accuracy": 0.5, "seconds": 1.0}
    ledger.record_evaluation(store, row | {"mean_response_tokens": 2.0, "created_at": datetime.now(UTC)})
    keep_up(searchers)


def test_silence_is_counted_anew_after_the_store_was_away(store, monkeypatch):
    now = [0.0]
    renewals = Renewals(store, clock=lambda: now[0])
    flow_run = uuid4()
    take_name(store, "s0", str(flow_run))

    def looks(seconds: float, of: UUID = flow_run) -> list[str]:
        now[0] = seconds
        return list(renewals.silent({"s0": of}))

    def away(*_):
        raise StoreUnreachable("away")

    def silent_after(begin: float) -> int:
        """Looks until it is silent."""
        return next(number for number in range(100) if looks(begin + number * LOOK_S))

    enough = math.floor(SILENT_S / LOOK_S) + 1
    assert silent_after(0) == enough
    assert looks(10_000) == ["s0"], "one that stays silent stays so"
    leases.renew(store, leases.newest(store, "s0"))
    assert looks(20_000) == looks(30_000) == [], "this process was frozen between two looks"
    with monkeypatch.context() as outage:
        outage.setattr(RunStore, "get", away)
        assert looks(31_000) == []
    assert silent_after(32_000) == enough
    leases.release(store, leases.newest(store, "s0"))
    assert looks(60_000) == []
    assert silent_after(70_000) == enough - 1, "it has ended, and Prefect's server was away"
    assert looks(80_000, uuid4()) == [], "the next one waits for a worker"


@pytest.mark.parametrize(
    ("make_state", "is_replaced"),
    [(lambda: Running(timestamp=datetime(2026, 1, 1, tzinfo=UTC)), True), (Running, False), (Paused, False)],
    ids=["running", "resumed just now", "suspended"],
)
def test_a_searcher_that_ended_unheard_is_replaced(store, server, monkeypatch, make_state, is_replaced):
    """It gave its name back, and Prefect's server did not hear of its end."""
    now = [0.0]
    monkeypatch.setattr(of_run, "Renewals", lambda store: Renewals(store, clock=lambda: now[0]))
    searchers = make_searchers(store, 1)
    keep_up(searchers)
    (first,) = server.runs.values()
    leases.release(store, held(store, "s0", first))
    first.state = make_state()
    for seconds in range(0, int(SILENT_S + 3 * LOOK_S), int(LOOK_S)):
        now[0] = seconds
        keep_up(searchers)
    assert len(server.names) == 1 + is_replaced


# --- the Searcher's side


@pytest.fixture
def flow_run(monkeypatch) -> SimpleNamespace:
    """The flow run that this process believes to execute."""
    run = SimpleNamespace(id=str(uuid4()))
    monkeypatch.setattr(held_name, "flow_run", run)
    monkeypatch.setattr(leases, "WATCH_S", 0.3)
    for module in (search, held_name):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    return run


def test_the_second_process_of_a_flow_run_ends_and_leaves_its_state(store, flow_run):
    first = take_name(store, "s0", flow_run.id)
    with pytest.raises(Abort, match="the name s0 already"), held_name.held_name(store, "s0"):
        pass
    flow_run.id = str(uuid4())
    with pytest.raises(NameTaken), held_name.held_name(store, "s0"):
        pass
    assert leases.newest(store, "s0") == first


def test_a_searcher_that_lost_its_name_commits_no_round(store, flow_run):
    sampled = SimpleNamespace(policies=[])  # which cannot be scored
    with pytest.raises(Superseded), held_name.held_name(store, "s0") as name:
        leases.revoke(store, leases.newest(store, "s0"))
        successor = take_name(store, "s0", str(uuid4()))
        search.search_round(store, None, None, name, lambda: sampled, None)
    assert leases.newest(store, "s0") == successor


def test_the_name_is_renewed_and_given_back(store, flow_run, monkeypatch):
    monkeypatch.setattr(leases, "RENEWAL_S", 0.05)
    with pytest.raises(ArithmeticError), held_name.held_name(store, "s0"):
        before, deadline = leases.newest(store, "s0"), time.monotonic() + 60
        while leases.newest(store, "s0").renewed_at == before.renewed_at:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert before.flow_run == flow_run.id
        raise ArithmeticError("the Searcher fails")
    assert leases.newest(store, "s0").is_released
    assert take_name(store, "s0", None).number == 2
