"""The Searchers of a run, which its flow starts and restarts."""

import contextlib
from collections.abc import Iterable
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.states import Cancelling, Crashed

from flows.config import RunConfig
from storage import policies, requests, shards
from storage.errors import StoreError
from storage.store import RunStore

# A failed Searcher is replaced. Repeated failure without progress (a committed round) is not transient.
MAX_REPLACEMENTS = 3
# Flow runs in one answer: the default of PREFECT_SERVER_API_DEFAULT_LIMIT, above which the server refuses.
PAGE = 200


class Searchers:
    """The run's Searchers. Each is a flow run of its own, on any machine of the work pool."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._store, self._wanted = RunStore(config.store, config.run), config.searchers
        self._failures: dict[str, tuple[int, int]] = {}  # by name: round of the last failure, failures in that round
        self._runs: dict[str, FlowRun] = {}  # in the order of their places
        self._leaving: list[FlowRun] = []
        self.is_server_away = False
        self._num_names = 0  # no name is used twice: a Searcher told to leave may still run

    def keep_up(self) -> None:
        """Starts missing Searchers, restarts failed, crashed and cancelled ones, and asks surplus ones to leave.

        The number may change during a run (`tba searchers`). Raises: RuntimeError: a Searcher failed too often.
        """
        with contextlib.suppress(StoreError):  # the store is unreachable: keep the last number
            self._wanted = requests.wanted_searchers(self._store, self._config.searchers)
        while len(self._runs) < self._wanted:
            name = f"s{self._num_names}"
            self._runs[name] = self._start(name, place=len(self._runs))
            self._num_names += 1
        while len(self._runs) > self._wanted:
            newest = list(self._runs)[-1]
            requests.ask_to_leave(self._store, newest)
            self._leaving.append(self._runs.pop(newest))
        states = read_states(self._runs.values())
        for name, run in list(self._runs.items()):
            state = states.get(run.id, Crashed(message="The flow run was deleted."))
            with contextlib.suppress(StoreError):  # the store is unreachable: try again later
                if self._has_failed(state):
                    self._replace(name, state)

    def stop(self) -> None:
        """Ends the Searchers that still run. Their committed shards stay in the store."""
        states = read_states([*self._runs.values(), *self._leaving])
        with get_client(sync_client=True) as client:
            for flow_run_id, state in states.items():
                if not state.is_final():
                    client.set_flow_run_state(flow_run_id, Cancelling(message="The run has ended."), force=True)

    def _replace(self, name: str, state: State) -> None:
        """Restarts a Searcher that ended in this state.

        Raises: RuntimeError: it failed too often. StoreError: it was not restarted.
        """
        at = shards.next_round(self._store, name)
        before, failures = self._failures.get(name, (at, 0))
        if before != at:  # it has committed a round since
            failures = 0
        # a Searcher that ended because its Trainer was silent for too long is not at fault
        failures += not state.is_completed()
        if failures > MAX_REPLACEMENTS:
            raise RuntimeError(
                f"searcher {name} failed {failures} times in its round {at}; its flow run's log has the reason"
            )
        self._runs[name] = self._start(name, place=list(self._runs).index(name))
        self._failures[name] = at, failures
        get_run_logger().warning("searcher %s failed and is started again", name)

    def _start(self, name: str, place: int) -> FlowRun:
        """`place`: its number among the running Searchers, which chooses its GPU; the first one evaluates."""
        config = self._config
        requests.welcome(self._store, name)
        return run_deployment(
            "search/searcher",
            parameters={
                "store": config.store,
                "run": config.run,
                "name": name,
                "evaluates": place == 0,
                "place": place,
            },
            flow_run_name=f"{config.run}/{name}",
            tags=[f"run:{config.run}"],
            timeout=0,
        )

    def _has_failed(self, state: State) -> bool:
        """Whether the Searcher ended for a reason other than the run's final policy. Raises: StoreError."""
        if state.is_completed():
            policy = policies.latest_policy(self._store)
            return policy is None or not policy.final
        return state.is_failed() or state.is_crashed() or state.is_cancelled()


def read_states(runs: Iterable[FlowRun]) -> dict[UUID, State]:
    """The states of flow runs, by id, with one request for each `PAGE` of them. A deleted flow run has none."""
    ids = [run.id for run in runs]
    with get_client(sync_client=True) as client:
        found = [
            client.read_flow_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids[at : at + PAGE])), limit=PAGE
            )
            for at in range(0, len(ids), PAGE)
        ]
    return {run.id: run.state for page in found for run in page}
