"""The Searchers of a run, which its flow starts, adopts and restarts."""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Crashed

from flows.config import RunConfig
from flows.run.flow_runs import is_of, queue_of_child, unfinished
from infra.prefect_server import PAGE, read_all
from storage import leases, ledger, policies, requests, shards
from storage.errors import StoreError
from storage.store import RunStore, transfer_all

DEPLOYMENT = "search/searcher"
# A failed Searcher is replaced. Repeated failure without progress (a committed round) is not transient.
MAX_REPLACEMENTS = 3
MAX_SILENCES = 10  # machines die, or are cut off
# A Searcher that has not renewed its lease for this long is replaced: its machine died, or cannot reach the store.
SILENT_S = 40.0  # four renewals
LOOK_S = 10.0
SILENT = "Silent"  # name of a Crashed state, which no one but the flow sets


class Searchers:
    """The run's Searchers. Each is a flow run of its own, on any machine of the work pool."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._store, self._wanted = RunStore(config.store, config.run), config.searchers
        self._failures: dict[str, tuple[int, Counter]] = {}  # by name: round of the newest, and their kinds in it
        self._runs: dict[str, FlowRun] = {}  # the first one evaluates
        self._leaving: list[FlowRun] = []
        self._renewals = Renewals(self._store)
        self.is_away = False  # Prefect's server or the store, at the last look
        self._num_names = 0  # no name is used twice: a Searcher told to leave may still run
        self._unused: int | None = None  # the first number behind those of an earlier flow's Searchers

    def keep_up(self) -> None:
        """Starts missing Searchers, restarts failed, silent and cancelled ones, and asks surplus ones to leave.

        The number may change during a run (`tba searchers`). Raises: RuntimeError: a Searcher failed too often.
        """
        with contextlib.suppress(StoreError):  # the store is unreachable: keep the last number
            self._wanted = requests.wanted_searchers(self._store, self._config.searchers)
        if (num_missing := self._wanted - len(self._runs)) > 0:
            self._add([f"s{self._num_names + each}" for each in range(num_missing)])
        while len(self._runs) > self._wanted:
            newest = list(self._runs)[-1]
            requests.ask_to_leave(self._store, newest)
            self._leaving.append(self._runs.pop(newest))
        ended = read_ended(run.id for run in self._runs.values())
        for name, lease in self._renewals.silent({name: run.id for name, run in self._runs.items()}).items():
            run = self._runs[name]
            if run.id not in ended and (not lease.is_released or _is_running(run)):
                ended[run.id] = Crashed(name=SILENT, message=f"It has not renewed its lease for {SILENT_S:.0f} s.")
                _end(run, ended[run.id])
        for name, run in list(self._runs.items()):
            with contextlib.suppress(StoreError):  # the store is unreachable: try again later
                if run.id in ended and self._has_failed(run):
                    self._replace(name, ended[run.id])

    def stop(self) -> None:
        """Ends the Searchers that still run. Their committed shards stay in the store."""
        started = {run.id for run in [*self._runs.values(), *self._leaving]}
        living = started - read_ended(started).keys()
        with get_client(sync_client=True) as client:
            for flow_run_id in living:
                with contextlib.suppress(ObjectNotFound):  # deleted meanwhile
                    client.set_flow_run_state(flow_run_id, Cancelling(message="The run has ended."), force=True)

    def _add(self, names: list[str]) -> None:
        """Adopts the living Searchers of these names, which an earlier flow started, and starts the others."""
        if self._unused is None:  # the first ones of this flow
            self._unused = self._dismiss_others(names)
        living = self._claim(names, evaluator=next(iter([*self._runs, *names])))
        for name in names:
            if name in living:
                requests.take_back_leave(self._store, name)
                get_run_logger().info("searcher %s, which an earlier flow started, goes on", name)
            self._runs[name] = living.get(name) or self._start(name, evaluates=not self._runs)
            self._num_names = number_of(name) + 1
        self._num_names = max(self._num_names, self._unused)

    def _dismiss_others(self, names: list[str]) -> int:
        """Asks Searchers of other names to leave, which an earlier flow has started. Returns the first unused number.

        That flow's number of Searchers had been lowered and raised, so its names have gaps.
        """
        others = [run for run in started_by_flows(self._config) if run.parameters.get("name", "s0") not in names]
        for run in others:
            requests.ask_to_leave(self._store, run.parameters["name"])
        self._leaving += others
        return 1 + max((number_of(run.parameters["name"]) for run in others), default=-1)

    def _claim(self, names: list[str], evaluator: str) -> dict[str, FlowRun]:
        """The flow runs of living Searchers of these names. Every other owner loses the name.

        evaluator: the name of the Searcher that evaluates, which one that was started by hand may not do. Takes as long
        as leases.is_alive.
        """
        newest = transfer_all(partial(leases.newest, self._store), names)
        held = [lease for lease in newest if lease is not None and not lease.is_released]
        found = read_flow_runs(UUID(lease.flow_run) for lease in held if lease.flow_run)
        runs = {lease: self._named_by(lease, found) for lease in held}
        unfinished = [lease for lease, run in runs.items() if run is not None and not run.state.is_final()]
        are_alive = dict(zip(unfinished, leases.are_alive(self._store, unfinished), strict=True))

        def living(lease: leases.Lease) -> FlowRun | None:
            run, is_living = runs[lease], are_alive.get(lease, False)
            if is_living and (lease.searcher != evaluator or run.parameters.get("evaluates")):
                return run
            leases.revoke(self._store, lease)
            if run is not None and not run.state.is_final() and not is_living:
                _end(run, Crashed(name=SILENT, message="It was silent when another flow resumed the run."))
            return None

        return {lease.searcher: run for lease, run in zip(held, transfer_all(living, held), strict=True) if run}

    def _named_by(self, lease: leases.Lease, found: dict[UUID, FlowRun]) -> FlowRun | None:
        """The flow run of a lease. A copied run's leases name the Searchers of the original: these are let alone."""
        run = found.get(UUID(lease.flow_run)) if lease.flow_run else None
        is_its = run is not None and is_of(run, self._config) and run.parameters.get("name", "s0") == lease.searcher
        return run if is_its else None

    def _replace(self, name: str, state: State) -> None:
        """Restarts a Searcher that ended in this state, or adopts the one that took its name.

        Raises: RuntimeError: it failed too often. StoreError: it was not restarted.
        """
        at = shards.next_round(self._store, name)
        before, failures = self._failures.get(name, (at, Counter()))
        if before != at:  # it has committed a round since
            failures = Counter()
        kind, limit = ("was silent", MAX_SILENCES) if state.name == SILENT else ("failed", MAX_REPLACEMENTS)
        # a Searcher that ended because its Trainer was silent for too long is not at fault
        failures[kind] += not state.is_completed() or self._final_step() is not None
        if failures[kind] > limit:
            raise RuntimeError(
                f"searcher {name} {kind} {failures[kind]} times in its round {at}: {state.message or 'killed'}"
            )
        evaluator = next(iter(self._runs))
        living = self._claim([name], evaluator).get(name)
        self._runs[name] = living or self._start(name, evaluates=name == evaluator)
        self._failures[name] = at, failures
        then = "another process has its name and goes on" if living else "it is started again"
        get_run_logger().warning("searcher %s failed, and %s: %s", name, then, state.message)

    def _start(self, name: str, *, evaluates: bool) -> FlowRun:
        config = self._config
        requests.take_back_leave(self._store, name)
        try:
            return run_deployment(
                DEPLOYMENT,
                parameters={"store": config.store, "run": config.run, "name": name, "evaluates": evaluates},
                flow_run_name=f"{config.run}/{name}",
                tags=[f"run:{config.run}"],
                work_queue_name=queue_of_child(DEPLOYMENT),
                timeout=0,
            )
        except ObjectNotFound as error:
            if self._runs:  # it was there: it may come back
                raise
            raise RuntimeError(
                f"{DEPLOYMENT} is not deployed on this Prefect server, so no Searcher starts: `prefect deploy --all`"
            ) from error

    def _has_failed(self, run: FlowRun) -> bool:
        """Whether the Searcher ended before the final policy, or before it evaluated that one. Raises: StoreError."""
        final = self._final_step()
        return final is None or (bool(run.parameters.get("evaluates")) and final not in ledger.evaluations(self._store))

    def _final_step(self) -> int | None:
        """The final policy's step; None: it is not published yet."""
        policy = policies.latest_policy(self._store)
        return policy.step if policy is not None and policy.final else None


class Renewals:
    """When each Searcher was last seen to have renewed its lease, by this process's clock."""

    def __init__(self, store: RunStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._seen: dict[str, tuple[leases.Lease, int]] = {}  # by name: the newest lease, and looks that found it so
        self._looked_at = clock() - LOOK_S

    def silent(self, flow_runs: Mapping[str, UUID]) -> dict[str, leases.Lease]:
        """The Searchers whose leases have not changed for `SILENT_S`, by name. It looks every `LOOK_S`; between two
        looks it returns none. flow_runs: of each Searcher, by name.

        It counts looks, because this process may have been frozen between two of them. A Searcher that has no lease
        yet, because no worker has started it, is not silent. One whose flow run gave the name back is: it has ended,
        and could not tell Prefect's server, or it is suspended.
        """
        if self._clock() - self._looked_at < LOOK_S:
            return {}
        before, self._seen = self._seen, {}
        with contextlib.suppress(StoreError):  # count anew: the Searchers may not reach the store, either
            found = transfer_all(lambda name: (name, self._look(*before.get(name, (None, 0)), name)), flow_runs)
            self._seen = {name: seen for name, seen in found if seen}
        self._looked_at = self._clock()  # not before: the store may have been away
        silent = {name: lease for name, (lease, looks) in self._seen.items() if looks * LOOK_S > SILENT_S}
        return {
            name: lease
            for name, lease in silent.items()
            if not lease.is_released or lease.flow_run == str(flow_runs[name])
        }

    def _look(self, lease: leases.Lease | None, looks: int, name: str) -> tuple[leases.Lease, int] | None:
        """The newest lease of a name, and how many looks in a row found it so; None: nobody has the name.

        Reads one file, unless the lease is new or has not changed for long. Raises: StoreError.
        """
        found = leases.read(self._store, name, lease.number) if lease else None
        if found is None or (found == lease and looks * LOOK_S > SILENT_S):
            found = leases.newest(self._store, name)
        if found is None:
            return None
        return found, looks + 1 if found == lease else 0


def number_of(name: str) -> int:
    """Of a Searcher that a run's flow has named: s0, s1, …; -1 of any other one."""
    return int(name[1:]) if re.fullmatch("s[0-9]+", name) else -1


def started_by_flows(config: RunConfig) -> list[FlowRun]:
    """The unfinished flow runs of the Searchers that the run's flows have started, and not a person."""
    with get_client(sync_client=True) as client:
        found = [run for run in unfinished(client, config, ["search"]) if run.parent_task_run_id]
    return [run for run in found if number_of(run.parameters.get("name", "s0")) >= 0]


def _is_running(run: FlowRun) -> bool:
    """Whether Prefect's server has taken the flow run for running for `SILENT_S`, and not for suspended or waiting.

    One that was resumed just now takes its name in a moment.
    """
    found = read_flow_runs([run.id]).get(run.id)
    if found is None or not found.state.is_running():
        return False
    return (datetime.now(UTC) - found.state.timestamp).total_seconds() > SILENT_S


def _end(run: FlowRun, state: State) -> None:
    """Sets a flow run's final state."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, state, force=True)


def read_ended(ids: Iterable[UUID]) -> dict[UUID, State]:
    """The final states of those of these flow runs that have ended, by id. A deleted flow run has crashed.

    While none ends that takes two requests, whatever their number.
    """
    chosen = FlowRunFilterId(any_=list(ids))
    if not chosen.any_:
        return {}
    final = FlowRunFilter(id=chosen, state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(TERMINAL_STATES))))
    with get_client(sync_client=True) as client:
        num_stored = client.count_flow_runs(flow_run_filter=FlowRunFilter(id=chosen))
        ended = {run.id: run.state for run in read_all(client, flow_run_filter=final)}
    if num_stored < len(chosen.any_):
        deleted = set(chosen.any_) - read_flow_runs(chosen.any_).keys()
        ended |= dict.fromkeys(deleted, Crashed(message="The flow run was deleted."))
    return ended


def read_flow_runs(ids: Iterable[UUID]) -> dict[UUID, FlowRun]:
    """Flow runs by id, with one request for each `PAGE` of them. Deleted ones are left out."""
    ids = list(ids)
    if not ids:
        return {}
    with get_client(sync_client=True) as client:
        found = [
            client.read_flow_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids[at : at + PAGE])), limit=PAGE
            )
            for at in range(0, len(ids), PAGE)
        ]
    return {run.id: run for page in found for run in page}
