"""The flow runs of a run whose Prefect server is on another machine, against a stand-in for the server.

- the worker of another machine stops the flow runs there
- Searchers elsewhere that a dead flow left are ended if they are silent or not wanted
- a flow run for a later time counts as none; a run is submitted to its own folder's queue
- a flow whose machine died is no longer followed, even if the server's record says that it runs

Run: pytest tests/flows/run/test_flow_runs.py
"""

import contextlib
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from prefect.states import Cancelling, Paused, Running, Scheduled, Suspended

from flows.config import RunConfig
from flows.run import flow_runs
from infra import prefect_server
from storage import attempts, leases, policies, requests
from storage.store import RunStore
from tests.storage.helpers import OWNER


class RemoteServer:
    """A Prefect server on another machine, with these flow runs."""

    api_url = "http://elsewhere:4200/api"

    def __init__(self, *flow_runs: SimpleNamespace) -> None:
        self._flow_runs = flow_runs

    def read_flow_run(self, flow_run_id: UUID) -> SimpleNamespace:
        return next(flow_run for flow_run in self._flow_runs if flow_run.id == flow_run_id)

    def read_flow_runs(self, flow_run_filter, flow_filter, limit: int, offset: int) -> list[SimpleNamespace]:
        flows = flow_filter.name.any_ if flow_filter else ["search"]  # without: one's children
        found = [flow_run for flow_run in self._flow_runs if flow_run.flow in flows]
        return [flow_run for flow_run in found if not flow_run.state.is_final()][offset : offset + limit]

    def set_flow_run_state(self, flow_run_id: UUID, state, force: bool) -> None:
        self.read_flow_run(flow_run_id).state = state


def flow_run(flow: str, config: RunConfig, state, *, parent: UUID | None = None) -> SimpleNamespace:
    """A flow run with no process on this machine."""
    parameters = {"config": config.model_dump(mode="json")} if flow == "tba" else {"store": config.store, "run": "run"}
    return SimpleNamespace(id=uuid4(), flow=flow, state=state, parent_task_run_id=parent, parameters=parameters)


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return RunConfig(run="run", store=tmp_path.as_uri())


def test_what_runs_elsewhere_is_ended_by_the_worker_there(config, monkeypatch):
    """Which reacts to Cancelling alone; what has no process yet needs none."""
    flow, searcher = flow_run("tba", config, Running()), flow_run("search", config, Running(), parent=uuid4())
    waiting = flow_run("search", config, Scheduled(), parent=uuid4())
    client = RemoteServer(flow, searcher, waiting)
    monkeypatch.setattr(prefect_server, "api", lambda *_: contextlib.nullcontext(client))
    flow_runs.cancel(client.api_url, {}, SimpleNamespace(id=flow.id, state=Scheduled()))  # as it was submitted
    assert [run.state.name for run in (flow, searcher, waiting)] == ["Cancelling", "Cancelling", "Cancelled"]


def test_more_flow_runs_than_an_answer_has_are_all_ended(config, monkeypatch):
    monkeypatch.setattr(prefect_server, "PAGE", 3)
    flow = flow_run("tba", config, Running())
    searchers = [flow_run("search", config, Scheduled(), parent=uuid4()) for _ in range(10)]
    client = RemoteServer(flow, *searchers)
    assert flow_runs.mark_crashed(client, config) == 11
    assert {run.state.name for run in searchers} == {"Crashed"}
    others = [flow_run("search", config, Scheduled(), parent=uuid4()) for _ in range(6)]
    client = RemoteServer(flow, *others)
    monkeypatch.setattr(prefect_server, "api", lambda *_: contextlib.nullcontext(client))
    flow_runs.cancel(client.api_url, {}, SimpleNamespace(id=flow.id, state=Scheduled()))
    assert {run.state.name for run in others} == {"Cancelled"}


def took_elsewhere(store: RunStore, name: str, flow_run: SimpleNamespace) -> leases.Lease:
    """The lease of a process on another machine."""
    flow_run.parameters["name"] = name
    lease = leases.take_name(store, name, str(flow_run.id))
    lease = replace(lease, owner=replace(lease.owner, boot_id="of another machine"))
    store.put_json(lease.path, lease)
    return lease


def test_silent_searchers_that_a_dead_flow_left_elsewhere_are_ended(config, monkeypatch):
    """The next flow adopts those that live (tests/flows/run/test_searchers.py). Those that joined are nobody's."""
    monkeypatch.setattr(leases, "WATCH_S", 3)
    orphan, living = [flow_run("search", config, Running(), parent=uuid4()) for _ in range(2)]
    joined = flow_run("search", config, Running())
    surplus, store = flow_run("search", config, Running(), parent=uuid4()), RunStore(config.store, config.run)
    elsewhere = {
        name: took_elsewhere(store, name, run) for name, run in (("s0", orphan), ("s1", living), ("s2", surplus))
    }
    requests.want_searchers(store, 2)
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.1):
            for name in ("s1", "s2"):
                leases.renew(store, elsewhere[name])

    thread = threading.Thread(target=renew)
    thread.start()
    assert flow_runs.mark_crashed(RemoteServer(orphan, living, surplus, joined), config) == 2
    over.set()
    thread.join()
    found = [run.state.name for run in (orphan, living, surplus, joined)]
    assert found == ["Cancelling", "Running", "Cancelling", "Running"]


def test_a_flow_whose_machine_died_is_not_followed(config, tmp_path, monkeypatch):
    """Where the server is elsewhere its record says Running for ever; the store tells that nobody trains."""
    monkeypatch.setattr(flow_runs, "TRAINER_WATCH_S", 2)
    store = RunStore(config.store, config.run)
    flow = flow_run("tba", config, Running(timestamp=datetime.now(UTC) - timedelta(minutes=11)))
    client = RemoteServer(flow)
    assert flow_runs.live_run(client, config) is flow  # its warm start has not ended

    attempts.start_attempt(store, 0, OWNER)
    assert flow_runs.live_run(client, config) is None
    young = flow_run("tba", config, Running(timestamp=datetime.now(UTC) - timedelta(minutes=9)))
    assert flow_runs.live_run(RemoteServer(young), config) is young

    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.1):
            attempts.write_heartbeat(store, {"at": time.time()})

    trainer = threading.Thread(target=beat)
    trainer.start()
    assert flow_runs.live_run(client, config) is flow
    stop.set()
    trainer.join()

    (tmp_path / "policy").mkdir()
    policies.publish_policy(store, tmp_path / "policy", policies.policy_ref(7, "a fingerprint", attempt=1, final=True))
    assert flow_runs.live_run(client, config) is flow  # its last evaluation has no Trainer

    flow.state = Paused()  # its process waits
    assert flow_runs.live_run(client, config) is flow
    for ending in (Suspended(), Cancelling()):
        flow.state = ending
        assert flow_runs.live_run(client, config) is None


def test_a_flow_run_for_a_later_time_neither_trains_nor_waits(config):
    """As a schedule makes them ahead."""
    soon, late = (Scheduled(scheduled_time=datetime.now(UTC) + timedelta(hours=hours)) for hours in (0, 8))
    waiting, of_tonight = flow_run("tba", config, soon), flow_run("tba", config, late)
    client = RemoteServer(of_tonight, waiting)
    assert flow_runs.unfinished(client, config) == [waiting]
    assert flow_runs.live_run(client, config) == waiting


@pytest.mark.parametrize(("of_deployment", "taken"), [("other-0123abcd", "mine-89abcdef"), ("gpu", None)])
def test_a_run_is_in_its_own_folders_queue_whichever_folder_deployed_last(config, of_deployment, taken):
    """A queue of the user's own prefect.yaml stays."""
    submitted = {}
    client = SimpleNamespace(
        read_deployment_by_name=lambda name: SimpleNamespace(id=uuid4(), work_queue_name=of_deployment),
        create_flow_run_from_deployment=lambda deployment, **given: submitted.update(given),
    )
    flow_runs.submit(client, config, "mine-89abcdef")
    assert submitted["work_queue_name"] == taken
