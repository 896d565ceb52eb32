"""The flow runs of one training run on a Prefect server: finds the live one, submits one, cancels one.

A flow run's record does not show whether it is alive: after a SIGKILL its state stays Running. Its processes do: each
has the flow run's id in its environment (PREFECT__FLOW_RUN_ID), which the worker sets and children inherit. If the
server is on another machine, the processes may be there, too, and cannot be seen from here. Then the record counts
until the run's store shows no live Trainer.
"""

import contextlib
from datetime import UTC, datetime, timedelta

from pydantic import ValidationError

from flows.config import RunConfig
from infra import prefect_server, stack
from infra.processes import find_processes, stop_processes
from storage import attempts, leases, policies, requests
from storage.store import RunStore, transfer_all

FLOWS = ["tba", "search", "ranks"]
TRAINER_WATCH_S = 15  # seconds that a Trainer is watched: several heartbeats
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
    state = flow_run.state
    is_suspended = state.is_paused() and state.state_details.pause_reschedule
    if state.is_cancelling() or is_suspended:  # it is ending or has ended, so its Trainer is not checked
        return True
    if not state.is_running() or _age(state) < PATIENCE:
        return False
    if (newest := attempts.newest_attempt(store)) is None:  # a warm start may take hours
        return False
    policy = policies.latest_policy(store)
    in_last_evaluation = policy is not None and policy.final  # this evaluation needs no Trainer
    return not in_last_evaluation and not attempts.is_alive(store, newest, TRAINER_WATCH_S)


def mark_crashed(client, config: RunConfig) -> int:
    """Marks the run's unfinished flow runs as Crashed and stops their processes here. Returns the number of flow runs.

    Call it only if no flow trains the run (live_run). A killed stack or flow leaves such flow runs behind. Flow runs
    that wait for a worker are marked, too. On another machine the worker there stops the processes. A Searcher there
    that still lives is left: the next flow adopts it (flows/run/searchers.py). One here is stopped, because it is soon
    started again, with the code as it is now. Takes as long as leases.is_alive."""
    from prefect.states import Crashed

    searchers = unfinished(client, config, ["search"])
    staying = _staying(client, config, searchers)
    dead = unfinished(client, config, ["tba", "ranks"])
    dead += [flow_run for flow_run in searchers if flow_run.id not in staying]
    for flow_run in dead:
        state = _ended(client, flow_run, Crashed(message="Its stack or flow was killed; found by a later `tba train`."))
        stop_processes(_processes(flow_run))
        client.set_flow_run_state(flow_run.id, state, force=True)
    return len(dead)


def _staying(client, config: RunConfig, searchers: list) -> set:
    """Ids of the Searchers' flow runs that are left as they are.

    A person started it: it lives. A flow started it: it lives on another machine, and the next flow adopts it.
    """
    staying = {r.id for r in searchers if not r.parent_task_run_id and is_alive(client, r)}
    if prefect_server.is_loopback(str(client.api_url)):
        return staying
    store = RunStore(config.store, config.run)
    wanted = {f"s{number}" for number in range(requests.wanted_or_configured(store, config.searchers))}
    names = {r.id: r.parameters.get("name", "s0") for r in searchers if r.parent_task_run_id}
    elsewhere = [r for r in searchers if names.get(r.id) in wanted and not _processes(r)]
    newest = transfer_all(lambda flow_run: leases.newest(store, names[flow_run.id]), elsewhere)
    held = {
        flow_run.id: lease
        for flow_run, lease in zip(elsewhere, newest, strict=True)
        if lease is not None and lease.flow_run == str(flow_run.id)
    }
    are_alive = leases.are_alive(store, list(held.values()))
    return staying | {flow_run_id for flow_run_id, lives in zip(held, are_alive, strict=True) if lives}


def _ended(client, flow_run, state):
    """`state`; Cancelling if the process may run on another machine, whose worker reacts to no other state."""
    from prefect.states import Cancelling

    old = flow_run.state
    may_run = old.is_running() or (old.is_cancelling() and _age(old) < PATIENCE)
    is_here = prefect_server.is_loopback(str(client.api_url)) or _processes(flow_run)
    return Cancelling(message=state.message) if may_run and not is_here else state


def _age(state) -> timedelta:
    return datetime.now(UTC) - state.timestamp


def submit(client, config: RunConfig, queue: str | None = None):
    """A new flow run of tba/train with this configuration. Returns prefect.client.schemas.FlowRun.

    queue: the folder's own; another folder on the same server may have deployed since, and so changed the deployment's.
    A queue that is no folder's, as of a prefect.yaml of the user's own, stays.
    """
    deployment = client.read_deployment_by_name(prefect_server.DEPLOYMENT)
    is_a_folders = stack.is_work_queue(deployment.work_queue_name or "")
    return client.create_flow_run_from_deployment(
        deployment.id,
        parameters={"config": config.model_dump(mode="json")},
        name=config.run,
        tags=[f"run:{config.run}"],
        work_queue_name=queue if is_a_folders else None,
    )


def queue_of_child(deployment: str) -> str | None:
    """The work queue for a flow run of `deployment` that this flow run starts; None: the deployment's own.

    On a server that several folders use, a deployment has the queue of the folder that deployed last, so a child gets
    this flow run's queue: it runs where its parent may run. A deployment that has another queue or pool than tba/train
    keeps it. Raises: httpx.HTTPError; prefect.exceptions.ObjectNotFound: there is no such deployment.
    """
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    queue = context and context.flow_run and context.flow_run.work_queue_name
    if not queue:  # the flow was called without a deployment
        return None
    with get_client(sync_client=True) as client:
        ours, its = (client.read_deployment_by_name(name) for name in (prefect_server.DEPLOYMENT, deployment))
    is_shared = (ours.work_pool_name, ours.work_queue_name) == (its.work_pool_name, its.work_queue_name)
    return queue if is_shared else None


def cancel(url: str, credentials: dict, flow_run) -> None:
    """Stops a flow run and the Searchers that it started, and records their state if the server still answers.

    credentials: stack.credentials of the server. After Ctrl-C in a terminal the server may not answer, because it
    gets the signal, too, as a child of `tba train`."""
    import httpx
    from prefect.client.schemas.filters import FlowRunFilterParentFlowRunId
    from prefect.exceptions import ObjectNotFound
    from prefect.settings import PREFECT_API_REQUEST_TIMEOUT
    from prefect.states import Cancelled

    family = [flow_run]
    settings = {**credentials, PREFECT_API_REQUEST_TIMEOUT: 5}
    # The flow run may have been deleted on Prefect's page.
    with contextlib.suppress(httpx.HTTPError, ObjectNotFound), prefect_server.api(url, settings) as client:
        children = FlowRunFilterParentFlowRunId(any_=[flow_run.id])
        family += prefect_server.read_unfinished(client, parent_flow_run_id=children)
        family[0] = client.read_flow_run(flow_run.id)  # its state has changed since it was submitted
        for member in family:  # before their processes end: the worker keeps a final state, and records no Crashed
            state = _ended(client, member, Cancelled(message="Stopped by `tba train`."))
            client.set_flow_run_state(member.id, state, force=True)
    stop_processes([process for member in family for process in _processes(member)])


def is_alive(client, flow_run) -> bool:
    """Whether the flow run's process runs; True if it may run on another machine."""
    if not prefect_server.is_loopback(str(client.api_url)):
        return True
    # the flow's own process; a Trainer or engine may outlive it
    return any("prefect.engine" in process.cmdline() for process in _processes(flow_run))


def _processes(flow_run) -> list:
    return find_processes("PREFECT__FLOW_RUN_ID", str(flow_run.id))


def unfinished(client, config: RunConfig, flows: list[str] = FLOWS) -> list:
    """The unfinished flow runs of these flows that belong to this run in this store, without those for a later time."""
    found = prefect_server.unfinished(client, flows)
    return [flow_run for flow_run in found if is_of(flow_run, config) and not _is_for_later(flow_run)]


def _is_for_later(flow_run) -> bool:
    """Whether a schedule, or its user, has it start at a later time: it neither trains nor waits for a worker."""
    due = flow_run.state.state_details.scheduled_time if flow_run.state.is_scheduled() else None
    return due is not None and due - datetime.now(UTC) > PATIENCE


def is_of(flow_run, config: RunConfig) -> bool:
    """Whether the parameters name this run: tba's are a configuration (none: default), the others' store and run."""
    given = flow_run.parameters
    try:
        named = RunConfig.model_validate(
            {k: given[k] for k in ("store", "run") if k in given} or given.get("config", {})
        )
    except ValidationError:  # parameters of another version of this project, or of another project's flow of this name
        return False
    return (named.run, named.store) == (config.run, config.store)
