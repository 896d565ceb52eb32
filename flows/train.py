"""tba/train: starts or resumes a run, watches its Trainer and Searchers, and ends it."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from uuid import UUID

import httpx
from prefect import flow, get_run_logger, task
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, Pause, PrefectException
from prefect.runtime import flow_run
from prefect.states import Completed

from flows.config import RunConfig, continued
from flows.reuse.warm_start import copy_sources_task
from flows.run import takeover
from flows.run.prefect_page import Page
from flows.run.searchers import Searchers
from flows.run.trainer_machines import end_machines, start_machines
from flows.trainer import ALREADY_TRAINING
from flows.trainer.meeting import KEY_VARIABLE
from infra.memory import tensor_environment
from storage import attempts, checkpoints, ledger, policies, requests
from storage.errors import AlreadyTraining, StoreError
from storage.store import RunStore
from storage.summary import read_summary, summarise

POLL_S = 2.0
# Prefect's server does not answer, has lost a record, or something else answers in its place (ValueError); the store
# does not answer.
AWAY = (httpx.HTTPError, PrefectException, ValueError, StoreError)
# A Trainer that failed is started again, unless it failed so often without a checkpoint between.
MAX_FAILURES = 3
RESTART_S = 5.0
# Time for a step and its checkpoint. Prefect kills a flow's process 30 s after it was told to end.
TRAINER_PATIENCE_S = 20.0
REMIND_S = 600  # between two messages that the final policy's evaluation goes on


@flow(name="tba", flow_run_name="{config.run}")
def tba(config: RunConfig = RunConfig()) -> dict:  # noqa: B008 - frozen
    """Post-trains a policy by asynchronous Trajectory Balance; the same run name resumes.

    Returns the run's summary, or the state Stopped if the run was asked to stop. Raises: AlreadyTraining: another
    Trainer works on the run. RuntimeError: Trainer or Searchers failed too often. prefect.exceptions.Pause: the flow
    run was suspended.
    """
    config = continued(config)
    if takeover.is_out_of_date(RunStore(config.store, config.run), flow_run.tags, flow_run.run_count):
        return Completed(name="NotNeeded", message="The Trainer is alive: its heartbeat goes on.")
    store = prepare_task(config, takeover.is_takeover(flow_run.tags), flow_run.run_count > 1)
    if summary := read_summary(store):
        get_run_logger().info("run %s is finished; to train again, choose another name", config.run)
        return summary
    try:
        copy_sources_task(store, config)
    except Exception as error:  # as too few trajectories, which only the copies tell
        tell_failure(store, error)
        raise
    searchers, page = Searchers(config), Page(store, config)
    owns_run, superseded, ending = threading.Event(), threading.Event(), threading.Event()
    training = train_policy.submit(config, owns_run, superseded, ending)
    try:
        while not training.state.is_final():
            look_after(searchers, owns_run.is_set())
            page.update()
            time.sleep(POLL_S)
        training.result()
        if not policies.latest_policy(store).final:
            return Completed(name="Stopped", message="The Trainer was asked to stop. The same command resumes the run.")
        await_evaluation(store, searchers, config.searchers)
    except (RuntimeError, StoreError) as error:
        ending.set()
        training.wait()
        if not superseded.is_set():
            tell_failure(store, error)
        raise
    finally:  # also if the flow run is cancelled: Prefect terminates this process
        ending.set()
        try:
            training.wait()
        finally:  # in a suspended flow run wait() raises, because its tasks end with Prefect's signal
            if not superseded.is_set():  # otherwise another flow has adopted the Searchers
                end_searchers(searchers)
    summary = summarise(store)
    page.finish(summary)
    return summary


def look_after(searchers: Searchers, owns_run: bool) -> None:
    """Keeps the Searchers running, if this flow owns the run: so no other flow's Searchers commit beside them. The run
    goes on without Prefect's server or the store.

    Raises: prefect.exceptions.Pause: the flow run was suspended. RuntimeError: a Searcher failed too often.
    """
    try:
        with contextlib.suppress(ObjectNotFound):  # the flow run was deleted, so nobody can suspend it
            end_if_suspended()
        if owns_run:
            searchers.keep_up()
        searchers.is_away = False
    except AWAY as error:
        if not searchers.is_away:
            cause = getattr(error, "http_exc", error)  # of Prefect's ObjectNotFound, which has no text of its own
            get_run_logger().warning("Searchers are not being restarted, without Prefect's server or store: %r", cause)
        searchers.is_away = True


def tell_failure(store: RunStore, error: Exception) -> None:
    """Gives the reason to the heartbeat, which `tba watch` and `tba runs` show. A Trainer's own reason stays.

    A Trainer that finished has not failed: the reason is why its final policy was not evaluated.
    """
    with contextlib.suppress(StoreError):
        beat = attempts.read_heartbeat(store) or {"state": "starting", "step": 0}  # before the first Trainer
        if beat["state"] != "failed":
            state = "finished" if beat["state"] == "finished" else "failed"
            attempts.write_heartbeat(store, beat | {"state": state, "message": str(error)})


def end_searchers(searchers: Searchers) -> None:
    """Ends them. Without Prefect's server they go on: to the final policy, or until the run's next flow adopts them."""
    try:
        searchers.stop()
    except AWAY as error:
        get_run_logger().warning("Searchers were not told to end, without Prefect's server: %r", error)


def end_if_suspended() -> None:
    """Ends the flow if its run was suspended on Prefect's page; Resume there starts it again.

    Raises: prefect.exceptions.Pause: it was suspended.
    """
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run.id).state
    if state.is_paused() and state.state_details.pause_reschedule:
        raise Pause(state=state)


def prepare(config: RunConfig, is_takeover: bool = False, is_restart: bool = False) -> RunStore:
    """Checks the inputs, then creates the run or opens the existing one.

    is_takeover: a Searcher submitted the flow run. The inputs were checked when the run began. is_restart: Prefect has
    started the flow run before. In both cases nobody gave a command, so an earlier request to stop holds.
    """
    store = RunStore(config.store, config.run)
    if is_takeover:
        return store
    from flows.run.preflight import check_inputs_in_a_process, check_memory

    for warning in check_inputs_in_a_process(config):
        get_run_logger().warning(warning)
    check_memory(config)  # the Trainer runs on this machine
    store.create_run(config.recorded(), config.read_recorded)
    if not is_restart:
        requests.take_back_stop(store)  # the request was for an earlier attempt
    return store


prepare_task = task(task_run_name="prepare", persist_result=False)(prepare)


@task(task_run_name="training", persist_result=False)
def train_policy(
    config: RunConfig, owns_run: threading.Event, superseded: threading.Event, ending: threading.Event
) -> None:
    """Trains to the end, or until `ending` is set. A Trainer that fails is started again, from its last checkpoint.

    `owns_run` is set while this flow's Trainer owns the run, and `superseded` once another flow's Trainer has it.
    Raises: AlreadyTraining: another Trainer has the run. RuntimeError: the Trainer failed `MAX_FAILURES` times without
    a checkpoint between; the message has the reason.
    """
    store, failures, before = RunStore(config.store, config.run), 0, None
    while True:
        try:
            return run_trainer(config, owns_run, superseded, ending)
        except RuntimeError as error:
            with contextlib.suppress(StoreError):
                newest = max((checkpoint.step for checkpoint in checkpoints.list_checkpoints(store)), default=0)
                failures, before = (failures if newest == before else 0), newest
            failures += 1
            if failures == MAX_FAILURES or ending.wait(RESTART_S):
                raise
            get_run_logger().warning("the Trainer is started again: %s", error)


def run_trainer(
    config: RunConfig, owns_run: threading.Event, superseded: threading.Event, ending: threading.Event
) -> None:
    """Runs one process of the Trainer until it ends or `ending` is set. The events are those of train_policy.

    Raises: AlreadyTraining: another Trainer has the run. RuntimeError: the process failed.
    """
    run_store, attempt = RunStore(config.store, config.run), None
    owns_run.clear()  # each Trainer begins an attempt of its own
    os.environ[KEY_VARIABLE] = key = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.trainer", config.store, config.run, str(os.getpid()), json.dumps(config.devices)],
        env=os.environ | tensor_environment(),
    )
    try:
        while process.poll() is None and not ending.wait(POLL_S):
            if not owns_run.is_set() and (begun := attempt_of(run_store, process.pid)) is not None:
                attempt = begun
                tell_prefect(end_others, config, attempt)
                tell_prefect(start_machines, config, attempt, key)
                owns_run.set()
            elif owns_run.is_set() and is_superseded(run_store, attempt):
                owns_run.clear()
    finally:
        status = end(process)
        if config.train.machines > 1 and attempt is not None:
            tell_prefect(end_machines, config, attempt)
    if ending.is_set():
        return
    if status == ALREADY_TRAINING or (attempt is not None and is_superseded(run_store, attempt)):
        owns_run.clear()
        superseded.set()
        owner = attempts.newest_attempt(run_store).owner
        raise AlreadyTraining(
            f"run {config.run} has another Trainer: host {owner.host}, pid {owner.pid}. This one ends."
        )
    if status:
        reason = failure_message(run_store, process.pid)
        raise RuntimeError(f"the Trainer of run {config.run} ended with status {status}: {reason}")


def attempt_of(store: RunStore, pid: int) -> int | None:
    """The latest attempt, if it is this process's, and not that of a process with the same pid on another machine.

    None while the store is away.
    """
    with contextlib.suppress(StoreError):
        newest = attempts.newest_attempt(store)
        if newest is not None and newest.owner.pid == pid and newest.owner.is_running() is True:
            return newest.attempt
    return None


def tell_prefect(call: Callable, *arguments: object) -> None:
    """Calls a function that asks Prefect's server. Training goes on without it."""
    try:
        call(*arguments)
    except (httpx.HTTPError, PrefectException, ValueError) as error:
        get_run_logger().warning("Prefect's server was not told: %r", error)


def end_others(config: RunConfig, attempt: int) -> None:
    with get_client(sync_client=True) as client:
        takeover.end_others(client, config, UUID(flow_run.id), attempt)


def is_superseded(store: RunStore, attempt: int) -> bool:
    """Whether a later attempt has begun; False while the store is away."""
    with contextlib.suppress(StoreError):
        return attempts.is_superseded(store, attempt)
    return False


def end(process: subprocess.Popen) -> int:
    """Asks the Trainer to finish its step, save and publish; kills it after `TRAINER_PATIENCE_S`. Returns status."""
    process.terminate()
    try:
        return process.wait(TRAINER_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def await_evaluation(store: RunStore, searchers: Searchers, configured: int) -> None:
    """Waits until a Searcher has finished its round, loaded the final policy and answered the held-out problems.

    There is no limit: long answers to many problems take hours on a slow machine. A Searcher that dies or falls silent
    is replaced. configured: the run's number of Searchers; if none is wanted, there is no engine to evaluate with.
    Raises: RuntimeError: Searchers failed too often. prefect.exceptions.Pause: the flow run was suspended.
    """
    final, reminded_at = policies.latest_policy(store).step, time.monotonic()
    while True:
        with contextlib.suppress(StoreError):  # evaluation goes on without it
            if final in ledger.evaluations(store) or not requests.wanted_or_configured(store, configured):
                return
        look_after(searchers, owns_run=True)
        if time.monotonic() - reminded_at > REMIND_S:
            reminded_at = time.monotonic()
            get_run_logger().info("policy step %s is still being evaluated", final)
        time.sleep(POLL_S)


def failure_message(store: RunStore, pid: int) -> str:
    """The reason that this process of the Trainer gave; a heartbeat of another one, or of a living one, is none."""
    beat = {}
    with contextlib.suppress(StoreError):
        beat = attempts.read_heartbeat(store) or {}
    owner = beat.get("owner")
    has_failed = beat.get("state") == "failed" and isinstance(owner, dict) and owner.get("pid") == pid
    message = beat.get("message") if has_failed else None
    return message or "it was killed, or ended without a message; the worker's log has its output"
