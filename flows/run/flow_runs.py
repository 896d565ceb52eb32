"""The flow runs of one training run on a Prefect server: which is alive, submit one, stop one.

A flow run's own record does not tell whether it is alive: after a SIGKILL it says Running for ever. Its processes tell:
each carries the flow run's id in its environment (PREFECT__FLOW_RUN_ID), which the worker sets and children inherit.
If the server is on another machine, the processes may be there too, invisible from here. The record then counts until
the run's store shows no live Trainer.
"""

import contextlib
from datetime import UTC, datetime, timedelta

from pydantic import ValidationError

from flows.config import RunConfig
from infra import prefect_server
from infra.processes import find_processes, stop_processes
from storage import attempts, policies
from storage.store import RunStore

FLOWS = ["tba", "search"]
TRAINER_WATCH_S = 15  # several heartbeats
# Within this time a resumed flow starts its Trainer, and a worker ends the processes of a cancelled flow run.
PATIENCE = timedelta(minutes=10)


def live_run(client, config: RunConfig):
    """The flow run that trains this run now, or None. Returns prefect.client.schemas.FlowRun.

    Takes up to `TRAINER_WATCH_S` if a flow run is on another machine and its Trainer is silent."""
    store = RunStore(config.store, config.run)
    found = [r for r in unfinished(client, config, ["tba"]) if is_alive(client, r)]
    return next((r for r in found if _processes(r) or not _has_died_elsewhere(r, store)), None)


def _has_died_elsewhere(flow_run, store: RunStore) -> bool:
    """Whether a flow run on another machine has died, by its record and the run's store."""
    if flow_run.state.is_cancelling():  # it ends; live_run does not check its Trainer
        return True
    if not flow_run.state.is_running() or _age(flow_run.state) < PATIENCE:
        return False
    if attempts.trainer(store) is None:  # a warm start may take hours
        return False
    policy = policies.latest_policy(store)
    in_last_evaluation = policy is not None and policy.final  # this evaluation needs no Trainer
    return not in_last_evaluation and not attempts.run_is_alive(store, TRAINER_WATCH_S)


def mark_crashed(client, config: RunConfig) -> int:
    """Mark flow runs of this run that a killed stack or flow left behind as Crashed, and stop their processes here.
    The worker of another machine stops the processes there. Returns the number of flow runs marked.

    Call it only if no flow trains the run (live_run). A Searcher that has outlived its flow would otherwise run beside
    the next flow's Searcher of the same name. Flow runs that still wait for a worker are marked too."""
    from prefect.states import Crashed

    dead = unfinished(client, config, ["tba"])
    dead += [r for r in unfinished(client, config, ["search"]) if r.parent_task_run_id or not is_alive(client, r)]
    for flow_run in dead:
        state = _ended(client, flow_run, Crashed(message="Its stack or flow was killed; found by a later `tba train`."))
        stop_processes(_processes(flow_run))
        client.set_flow_run_state(flow_run.id, state, force=True)
    return len(dead)


def _ended(client, flow_run, state):
    """`state`, or Cancelling if the process may be on another machine: the worker there reacts to no other state."""
    from prefect.states import Cancelling

    old = flow_run.state
    may_run = old.is_running() or (old.is_cancelling() and _age(old) < PATIENCE)
    is_here = prefect_server.is_loopback(str(client.api_url)) or _processes(flow_run)
    return Cancelling(message=state.message) if may_run and not is_here else state


def _age(state) -> timedelta:
    return datetime.now(UTC) - state.timestamp


def submit(client, config: RunConfig):
    """A new flow run of tba/train with this configuration. Returns prefect.client.schemas.FlowRun."""
    deployment = client.read_deployment_by_name(prefect_server.DEPLOYMENT)
    return client.create_flow_run_from_deployment(
        deployment.id,
        parameters={"config": config.model_dump(mode="json")},
        name=config.run,
        tags=[f"run:{config.run}"],
    )


def cancel(url: str, credentials: dict, flow_run) -> None:
    """Stop a flow run and the Searchers that it started. If the server still answers, their records get the new state.

    credentials: stack.credentials of the server.
    After Ctrl-C in a terminal the server may not answer: as a child of `tba train` it gets the signal too."""
    import httpx
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
    from prefect.settings import PREFECT_API_REQUEST_TIMEOUT
    from prefect.states import Cancelled

    family = [flow_run]
    settings = {**credentials, PREFECT_API_REQUEST_TIMEOUT: 5}
    with contextlib.suppress(httpx.HTTPError), prefect_server.api(url, settings) as client:
        children = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run.id]))
        family += [r for r in client.read_flow_runs(flow_run_filter=children) if not r.state.is_final()]
        family[0] = client.read_flow_run(flow_run.id)  # it was submitted some time ago
        for member in family:  # before their processes end: the worker does not overwrite a final state with Crashed
            state = _ended(client, member, Cancelled(message="Stopped by `tba train`."))
            client.set_flow_run_state(member.id, state, force=True)
    stop_processes([process for member in family for process in _processes(member)])


def is_alive(client, flow_run) -> bool:
    """Whether the flow run's process runs; True if it may run on another machine."""
    if not prefect_server.is_loopback(str(client.api_url)):
        return True
    # the flow's own process, not only a Trainer or engine that outlived it
    return any("prefect.engine" in process.cmdline() for process in _processes(flow_run))


def _processes(flow_run) -> list:
    return find_processes("PREFECT__FLOW_RUN_ID", str(flow_run.id))


def unfinished(client, config: RunConfig, flows: list[str] = FLOWS) -> list:
    """Flow runs of these flows, for this run in this store, that have not ended."""
    return [flow_run for flow_run in prefect_server.unfinished(client, flows) if _is_of(flow_run, config)]


def _is_of(flow_run, config: RunConfig) -> bool:
    """Whether the parameters name this run: tba takes a configuration (none: the default), search a store and a run."""
    given = flow_run.parameters
    try:
        named = RunConfig.model_validate(
            {k: given[k] for k in ("store", "run") if k in given} or given.get("config", {})
        )
    except ValidationError:  # of another version of this project, or of another flow by that name
        return False
    return (named.run, named.store) == (config.run, config.store)
