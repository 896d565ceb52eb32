"""The Searchers that a run's flow keeps up."""

import contextlib

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.states import Cancelling

from flows.config import RunConfig
from storage import policies, requests, shards
from storage.errors import StoreError
from storage.store import RunStore

# A failed Searcher is replaced. Repeated failure without progress (a committed round) is not transient.
MAX_REPLACEMENTS = 3


class Searchers:
    """The run's Searchers, each a flow run of its own on whatever machine the work pool has."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._store, self._wanted = RunStore(config.store, config.run), config.searchers
        self._falls: dict[str, tuple[int, int]] = {}  # by name: the round that it fell at, and how often
        self._runs: dict[str, FlowRun] = {}  # in the order of their places
        self._leaving: list[FlowRun] = []
        self.is_server_away = False
        self._num_names = 0  # no name is used twice: who leaves may not be gone yet

    def keep_up(self) -> None:
        """Starts those not started yet, and anew each that failed, crashed or was lost; lets go whom nobody wants.

        How many are wanted may change during a run (`tba searchers`). Raises: RuntimeError: one fell too often.
        """
        with contextlib.suppress(StoreError):  # a store that is away has no new wishes
            self._wanted = requests.wanted_searchers(self._store, self._config.searchers)
        while len(self._runs) < self._wanted:
            name = f"s{self._num_names}"
            self._runs[name] = self._start(name, place=len(self._runs))
            self._num_names += 1
        while len(self._runs) > self._wanted:
            newest = list(self._runs)[-1]
            requests.ask_to_leave(self._store, newest)
            self._leaving.append(self._runs.pop(newest))
        for name in [name for name, run in self._runs.items() if self._has_fallen(run)]:
            with contextlib.suppress(StoreError):  # a store that is away: later
                self._replace(name)

    def stop(self) -> None:
        """Ends those that still run. Nothing is lost: what they committed is in the store."""
        with get_client(sync_client=True) as client:
            for run in [*self._runs.values(), *self._leaving]:
                state = client.read_flow_run(run.id).state
                if not state.is_final():
                    client.set_flow_run_state(run.id, Cancelling(message="the run is over"), force=True)

    def _replace(self, name: str) -> None:
        """Starts one anew. Raises: RuntimeError: it fell too often. StoreError: the store is away; nothing was done."""
        at = shards.next_round(self._store, name)
        before, falls = self._falls.get(name, (at, 0))
        if before != at:  # it has committed since
            falls = 0
        # one that gave up on a Trainer that was long in coming back has no fault that a new one would share
        falls += not self._state(self._runs[name]).is_completed()
        if falls > MAX_REPLACEMENTS:
            raise RuntimeError(
                f"searcher {name} fell {falls} times at its round {at}; its flow run's log in Prefect says why"
            )
        self._runs[name] = self._start(name, place=list(self._runs).index(name))
        self._falls[name] = at, falls
        get_run_logger().warning("searcher %s fell and is started again", name)

    def _start(self, name: str, place: int) -> FlowRun:
        """`place`: its number among those that run, by which it chooses a GPU; the first one evaluates."""
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

    def _has_fallen(self, run: FlowRun) -> bool:
        """Whether it has ended, and not because the run has its final policy."""
        state = self._state(run)
        if state.is_completed():
            with contextlib.suppress(StoreError):  # away: later
                policy = policies.latest_policy(self._store)
                return policy is None or not policy.final
        return state.is_failed() or state.is_crashed() or state.is_cancelled()

    @staticmethod
    def _state(run: FlowRun) -> State:
        with get_client(sync_client=True) as client:
            return client.read_flow_run(run.id).state
