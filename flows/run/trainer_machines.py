"""The flow runs of a Trainer's further machines (train.machines). flows/ranks.py is what they run."""

from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment
from prefect.states import Cancelled

from flows.config import RunConfig
from flows.run import flow_runs

DEPLOYMENT = "ranks/machine"


def start_machines(config: RunConfig, attempt: int, key: str) -> None:
    """Submits a flow run for each further machine. key: see storage/machines.py.

    Raises: httpx.HTTPError; prefect.exceptions.ObjectNotFound: ranks/machine is not deployed.
    """
    given = {"attempt": attempt, "key": key, "devices": config.devices}
    for number in range(1, config.train.machines):
        run_deployment(
            DEPLOYMENT,
            parameters={"store": config.store, "run": config.run} | given,
            flow_run_name=f"{config.run}/machine {number}",
            tags=[f"run:{config.run}"],
            work_queue_name=flow_runs.queue_of_child(DEPLOYMENT),
            timeout=0,
        )


def end_machines(config: RunConfig, attempt: int) -> None:
    """Cancels this attempt's flow runs that no worker has taken. The others end by themselves. Raises: as above."""
    with get_client(sync_client=True) as client:
        for flow_run in flow_runs.unfinished(client, config, ["ranks"]):
            if flow_run.state.is_scheduled() and flow_run.parameters.get("attempt") == attempt:
                client.set_flow_run_state(flow_run.id, Cancelled(message="The attempt has ended."), force=True)
