"""The flow run that resumes a run whose Trainer's machine died. A Searcher submits it (flows/run/trainer_watch.py).

It has a tag with the heartbeat after which the Trainer fell silent. If the Trainer has written another one by the time
that the flow run starts, it is not needed.
"""

from hashlib import sha256
from uuid import UUID

from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.states import Crashed

from flows.config import RunConfig
from flows.run import flow_runs
from storage import attempts
from storage.store import RunStore

# Flow runs that are submitted after one heartbeat, if each ends before its Trainer begins.
MAX_TRIES = 3
TAG = "after-heartbeat:"


def resume_elsewhere(client, config: RunConfig, last_heartbeat: bytes):
    """Submits the run again as it was submitted before. However many Searchers ask, there is one flow run at a time.

    Returns prefect.client.schemas.FlowRun. None: no flow run of the run claims to run, because the run was stopped;
    another one waits for a worker already; or `MAX_TRIES` flow runs have ended.
    """
    unfinished = flow_runs.unfinished(client, config, ["tba"])
    silent = [flow_run for flow_run in unfinished if flow_run.state.is_running()]
    if not silent or any(each.state.is_scheduled() or each.state.is_pending() for each in unfinished):
        return None
    tag, first = TAG + sha256(last_heartbeat).hexdigest(), silent[0]
    tried = client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[tag])))
    if len(tried) >= MAX_TRIES or any(not each.state.is_final() for each in tried):
        return None
    return client.create_flow_run_from_deployment(
        first.deployment_id,
        parameters=first.parameters,
        name=config.run,
        tags=[f"run:{config.run}", tag],
        idempotency_key=f"{config.store}/{config.run}/{tag}/{len(tried)}",
        job_variables=first.job_variables,
        work_queue_name=first.work_queue_name,
    )


def is_takeover(tags: list[str]) -> bool:
    """Whether a flow run with these tags was submitted by a Searcher."""
    return any(tag.startswith(TAG) for tag in tags)


def is_out_of_date(store: RunStore, tags: list[str], num_starts: int) -> bool:
    """Whether a Searcher submitted the flow run with these tags, and the Trainer has shown life since.

    Not if it was started before: then the heartbeat may be of its own Trainer, and it was suspended or evicted.
    """
    beat = attempts.raw_heartbeat(store) or b""
    return num_starts <= 1 and is_takeover(tags) and TAG + sha256(beat).hexdigest() not in tags


def end_others(client, config: RunConfig, ours: UUID, attempt: int) -> None:
    """Marks the run's other flow runs that claim to run as Crashed: flows, and machines of other attempts' Trainers.

    Call it once `attempt`, the Trainer's, is that of the flow run `ours`.
    """
    for flow_run in flow_runs.unfinished(client, config, ["tba", "ranks"]):
        claims_to_run = flow_run.state.is_running() or flow_run.state.is_cancelling()
        if claims_to_run and flow_run.id != ours and flow_run.parameters.get("attempt") != attempt:
            state = Crashed(message=f"Its Trainer fell silent or ended. Flow run {ours} trains the run.")
            client.set_flow_run_state(flow_run.id, state, force=True)
