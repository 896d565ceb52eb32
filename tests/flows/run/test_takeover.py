"""The flow run that takes a run over, against a stand-in for Prefect's server.

- it is submitted as the silent one was: its deployment, parameters, job variables and work queue
- however many Searchers ask, there is one at a time, and few after one heartbeat; none if the run was stopped
- it is not needed if the Trainer has written another heartbeat since
- once it trains, the silent flow runs, and machines of other attempts, are marked as Crashed
- further machines' flow runs are in the flow's own work queue
- of the further machines' flow runs, those of an ended attempt that no worker has taken are cancelled

Run: pytest tests/flows/run/test_takeover.py
"""

import contextlib
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from prefect.states import Cancelled, Cancelling, Completed, Failed, Pending, Running, Scheduled, State

from flows.config import RunConfig
from flows.run import flow_runs, takeover, trainer_machines
from storage import attempts
from storage.store import RunStore


class Server:
    """Unfinished flow runs by flow, and every flow run that was submitted."""

    def __init__(self, **runs: list[SimpleNamespace]) -> None:
        self.runs, self.submitted = runs, []

    def unfinished(self, client, config: RunConfig, flows: list[str]) -> list[SimpleNamespace]:
        return [run for flow in flows for run in self.runs.get(flow, []) if not run.state.is_final()]

    def read_flow_runs(self, flow_run_filter) -> list[SimpleNamespace]:
        (tag,) = flow_run_filter.tags.all_
        return [run for run in self.submitted if tag in run.tags]

    def create_flow_run_from_deployment(self, deployment: UUID, *, idempotency_key: str, **given) -> SimpleNamespace:
        known = [run for run in self.submitted if run.idempotency_key == idempotency_key]
        if not known:
            made = SimpleNamespace(
                id=uuid4(), deployment_id=deployment, idempotency_key=idempotency_key, state=Pending(), **given
            )
            self.submitted.append(made)
        return (known or self.submitted)[-1]

    def set_flow_run_state(self, flow_run_id: UUID, state: State, force: bool) -> None:
        next(run for runs in self.runs.values() for run in runs if run.id == flow_run_id).state = state


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return RunConfig(run="run", store=tmp_path.as_uri())


@pytest.fixture
def server(monkeypatch) -> Server:
    server = Server()
    monkeypatch.setattr(flow_runs, "unfinished", server.unfinished)
    return server


def run_of(state: State, **parameters) -> SimpleNamespace:
    given = {"deployment_id": uuid4(), "job_variables": {"gpus": 8}, "work_queue_name": "of-a-folder"}
    return SimpleNamespace(id=uuid4(), state=state, parameters=parameters, tags=[], **given)


def test_it_is_submitted_as_the_silent_one_was(server, config):
    silent = run_of(Running(), config={"train": {"processes": 8, "machines": 2}})
    server.runs = {"tba": [silent]}
    found = takeover.resume_elsewhere(server, config, b"last")
    assert (found.deployment_id, found.parameters) == (silent.deployment_id, silent.parameters)
    assert (found.job_variables, found.work_queue_name) == ({"gpus": 8}, "of-a-folder")
    assert takeover.is_takeover(found.tags)


def test_there_is_one_at_a_time_and_few_after_one_heartbeat(server, config):
    server.runs = {"tba": [run_of(Running())]}
    for number in range(takeover.MAX_TRIES):
        made = takeover.resume_elsewhere(server, config, b"last")
        assert server.submitted[-1] is made and len(server.submitted) == number + 1
        assert takeover.resume_elsewhere(server, config, b"last") is None, "another Searcher asks"
        made.state = Failed()
    assert takeover.resume_elsewhere(server, config, b"last") is None
    assert takeover.resume_elsewhere(server, config, b"of a later attempt") is not None


@pytest.mark.parametrize(
    "states", [[], [Cancelling()], [Scheduled()], [Running(), Scheduled()], [Running(), Pending()]]
)
def test_a_run_that_was_stopped_or_waits_already_is_left(server, config, states):
    server.runs = {"tba": [run_of(state) for state in states]}
    assert takeover.resume_elsewhere(server, config, b"last") is None and not server.submitted


def test_it_is_not_needed_once_the_trainer_shows_life(server, config):
    store = RunStore(config.store, config.run)
    attempts.write_heartbeat(store, {"step": 1})
    server.runs = {"tba": [run_of(Running())]}
    tags = takeover.resume_elsewhere(server, config, attempts.raw_heartbeat(store)).tags
    assert not takeover.is_out_of_date(store, tags, num_starts=1)
    attempts.write_heartbeat(store, {"step": 2})
    assert takeover.is_out_of_date(store, tags, num_starts=1)
    assert not takeover.is_out_of_date(store, tags, num_starts=2), "it trained, was suspended, and is resumed"
    assert not takeover.is_out_of_date(store, ["run:run"], num_starts=1), "a person's command"


def test_what_claims_to_run_is_ended(server, config):
    ours, silent, stopped, waiting = [run_of(state) for state in (Running(), Running(), Cancelling(), Scheduled())]
    before, now = run_of(Running(), attempt=1), run_of(Running(), attempt=2)
    server.runs = {"tba": [ours, silent, stopped, waiting], "ranks": [before, now]}
    takeover.end_others(server, config, ours.id, attempt=2)
    states = [run.state.name for run in (ours, silent, stopped, waiting, before, now)]
    assert states == ["Running", "Crashed", "Crashed", "Scheduled", "Crashed", "Running"]
    assert str(ours.id) in silent.state.message


def test_further_machines_are_in_the_flows_queue(config, monkeypatch):
    given = []
    monkeypatch.setattr(trainer_machines, "run_deployment", lambda name, **options: given.append((name, options)))
    monkeypatch.setattr(flow_runs, "queue_of_child", lambda deployment: f"the flow's, for {deployment}")
    three = config.model_copy(update={"train": config.train.model_copy(update={"machines": 3})})
    trainer_machines.start_machines(three, 1, "key")
    assert [(name, of_one["work_queue_name"]) for name, of_one in given] == [
        ("ranks/machine", "the flow's, for ranks/machine")
    ] * 2


def test_machines_that_no_worker_took_are_cancelled(server, config, monkeypatch):
    monkeypatch.setattr(trainer_machines, "get_client", lambda **_: contextlib.nullcontext(server))
    taken, waiting = run_of(Running(), attempt=2), run_of(Scheduled(), attempt=2)
    of_another, ended = run_of(Scheduled(), attempt=3), run_of(Completed(), attempt=2)
    server.runs = {"ranks": [taken, waiting, of_another, ended]}
    trainer_machines.end_machines(config, attempt=2)
    states = [run.state.name for run in (taken, waiting, of_another, ended)]
    assert states == ["Running", Cancelled().name, "Scheduled", "Completed"]
