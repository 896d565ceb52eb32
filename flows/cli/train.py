"""`tba train`: trains or resumes a run, and shows its progress."""

import contextlib
import functools
import logging
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import StoreOption, complete_run, fail, project_folder, say, store_url
from flows.cli.settings import config_of

if TYPE_CHECKING:
    from flows.config import RunConfig
    from storage.store import RunStore

app = typer.Typer()
log = logging.getLogger(__name__)

TASKS = "arithmetic, gsm8k, math, reasoning_gym, tldr, redteam, or dataset: your own"
SERVER_SILENCE_S = 60  # a server that has not answered for so long, even on a busy machine, does not recover
PROCESS_SILENCE_S = 30  # a flow's process ends a moment before the server has its last state


@app.command()
def train(
    run: Annotated[
        str | None, typer.Argument(help="Name of the run; default: the task's name.", autocompletion=complete_run)
    ] = None,
    store: StoreOption = None,
    task: Annotated[str | None, typer.Option(help=f"Task: {TASKS}.")] = None,
    data: Annotated[str | None, typer.Option(help="File, folder, Hugging Face dataset, or module:function.")] = None,
    model: Annotated[str | None, typer.Option(help="Model: smollm2-135m-instruct, folder or Hugging Face id.")] = None,
    steps: Annotated[int | None, typer.Option(help="Policy steps of the run.")] = None,
    searchers: Annotated[int | None, typer.Option(help="Number of Searchers to start.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the order of prompts, of sampling and of draws.")] = None,
    warm_start: Annotated[
        list[str] | None,
        typer.Option(
            help="Run, or .parquet file of demonstrations, whose trajectories the run begins with; repeatable."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Any setting, such as train.beta=0.1; repeatable."),
    ] = None,
) -> None:
    """Train a run, or resume the run of this name, which keeps its settings. Starts the local stack if none runs.

    Example: tba train digits --steps 300 --searchers 2 --set train.beta=0.1
    """
    project = project_folder()
    given = {
        "run": run,
        "store": store and store_url(store),
        "task.name": task,
        "task.data": data,
        "model": model,
        "train.steps": steps,
        "searchers": searchers,
        "seed": seed,
        "warm_start": [_source_url(source, store) for source in warm_start] if warm_start else None,
    }
    config = config_of({key: value for key, value in given.items() if value is not None}, settings or [])
    run_store = _check_inputs(config)
    if (summary := _summary_or_exit(run_store, status=2)) is not None:
        say(
            f"Run {config.run!r} is finished. To train on, begin a run with --model and the folder of its best policy, "
            f"which policies/best.json names, and with --seed {config.seed}, which holds out the same problems."
        )
        _print_summary(summary)
        return
    _train(project, config, run_store)


# --- train ------------------------------------------------------------------------------------------------------------


def _check_inputs(config: "RunConfig") -> "RunStore":
    """Checks the inputs before anything is started; exits with the reason if one is wrong."""
    from flows.run.preflight import check_inputs_in_a_process
    from storage.errors import StoreError
    from storage.store import RunStore
    from tba.models import EMBEDDED_MODEL, MODELS_FOLDER

    if config.model == EMBEDDED_MODEL and not (MODELS_FOLDER / EMBEDDED_MODEL).exists():
        say("Unpacking the embedded model, once in this folder (20 to 80 s).")
    try:
        for warning in check_inputs_in_a_process(config):
            say(f"WARNING: {warning}", err=True)
        return RunStore(config.store, config.run)
    except (ValueError, OSError, ImportError, StoreError) as error:
        fail(str(error), status=2)


def _train(project: Path, config: "RunConfig", store: "RunStore") -> None:
    """Starts the stack, submits or joins the run's flow run, shows it to its end, leaves the stack. May exit."""
    import httpx
    from prefect.exceptions import PrefectException

    from flows.run import flow_runs
    from flows.run.trainer_watch import TrainerWatch
    from infra import prefect_server, stack
    from storage.attempts import raw_heartbeat, read_heartbeat
    from storage.errors import StoreError

    submitted = False
    try:
        ran_before = stack.running_url(project) is not None
        url = stack.up(project, keep=False, say=say)
        if config.store.startswith("file:") and not prefect_server.is_loopback(url):
            say(
                f"WARNING: the store {config.store} is a folder, and the Prefect server {url} is another machine's. "
                "Each machine that runs flows of this run must have the same folder there; otherwise use S3."
            )
        old, credentials = read_heartbeat(store), stack.credentials(project, url)
        last = raw_heartbeat(store)
        with prefect_server.api(url, credentials) as client, contextlib.ExitStack() as following:
            flow_run, submitted = _live_or_new(project, client, config, store, old)
            same_server = functools.partial(prefect_server.api, url, credentials)
            watch = TrainerWatch(store, config, log, last if submitted else None, client=same_server)
            following.callback(watch.close)
            say(f"Flow run: {url.removesuffix('/api')}/runs/flow-run/{flow_run.id}{stack.page_hint(project, url)}")
            state = _follow(FlowRunView(project, client, flow_run), store, old if submitted else None)
            while state.is_crashed() and (other := flow_runs.live_run(client, config)):
                say(f"Flow run {other.id} has taken the run over: following it.")
                flow_run = other  # at once: Ctrl-C stops the one that trains
                state = _follow(FlowRunView(project, client, flow_run), store, None)
        if not state.is_completed():
            _fail_as(project, state, ran_before)
    except (stack.StackError, StoreError, OSError) as error:  # OSError: as of a full disk
        fail(str(error))
    except (httpx.HTTPError, PrefectException) as error:
        fail(f"The Prefect server at {url} refuses or fails: {error!r}. The same command follows or resumes the run.")
    except KeyboardInterrupt:
        if submitted:
            with _uninterrupted():
                flow_runs.cancel(url, credentials, flow_run)
        told = f"Stopped. {_unsaved(store)}The same command resumes" if submitted else "Left. The same command follows"
        say(f"\n{told} the run:\n  {_command_line()}")
        raise typer.Exit(130) from None
    finally:
        with _uninterrupted(), contextlib.suppress(stack.StackError):  # it was told above
            _leave(project)
    _tell_end(project, store, state.name)


def _unsaved(store: "RunStore") -> str:
    """A sentence about the steps that the newest checkpoint does not have; empty if there are none."""
    from storage.attempts import read_heartbeat
    from storage.checkpoints import list_checkpoints
    from storage.errors import StoreError

    try:
        beat = read_heartbeat(store) or {"state": "starting", "step": 0}
        saved = max((checkpoint.step for checkpoint in list_checkpoints(store)), default=0)
    except StoreError:
        return ""
    lost = beat["step"] - saved
    if lost <= 0 or beat["state"] == "finished":  # the last step has no checkpoint: its policy is the result
        return ""
    return f"Its newest checkpoint is of step {saved}, so {lost} steps are trained again; `tba stop` saves. "


def _fail_as(project: Path, state, ran_before: bool) -> None:
    """Exits with the reason of a flow run that ended in this state. ran_before: the stack ran before this command."""
    from infra import stack

    environment = (
        "The flow has the environment of the shell that started the worker. After `tba down`, which stops all runs of "
        "this project, the same command gives it this shell's.\n"
    )
    fail(
        f"The run ended as {state.name}: {state.message}\n{environment if ran_before else ''}"
        f"{stack.log_tail(project, 'worker')}"
    )


def _leave(project: Path) -> None:
    """Leaves the stack. An error, as of a full disk, is told, and the command goes on to tell the run's end."""
    from infra import stack

    try:
        stack.leave(project, say=say)
    except OSError as error:
        with contextlib.suppress(OSError):  # a full disk may be that of the output, too
            say(f"The stack was not left: {error}. `tba down` stops it.")


def _live_or_new(project: Path, client, config: "RunConfig", store: "RunStore", old: dict | None) -> tuple:
    """The flow run that trains the run, and whether it was submitted here. old: the run's heartbeat so far."""
    from flows.run import flow_runs
    from infra import stack

    flow_run = flow_runs.live_run(client, config)
    if flow_run and not _ends_as_stopped(FlowRunView(project, client, flow_run), store, old):
        say(f"Run {config.run!r} is already training: following it.")
        return flow_run, False
    _refuse_live_trainer(store)
    if num_dead := flow_runs.mark_crashed(client, config):
        say(f"Marked {num_dead} flow runs as crashed, which a killed stack, flow or machine had left unfinished.")
    say(f"{'Resuming' if old else 'Starting'} run {config.run!r}.")
    return flow_runs.submit(client, config, stack.work_queue(project)), True


def _ends_as_stopped(view: "FlowRunView", store: "RunStore", old: dict | None) -> bool:
    """Whether the flow run ends because `tba stop` ended its Trainer; waits until it has ended.

    False: its Trainer trains, if need be after a wait for it to begin. old: the run's heartbeat so far.
    """
    from storage.attempts import read_heartbeat

    if (old or {}).get("state") != "stopped":
        return False
    say(
        f"Run {store.run!r} was stopped at step {old['step']}. Its flow run is ending, or has begun to resume: waiting."
    )
    while read_heartbeat(store) == old:
        if view.state().is_final():
            return True
        time.sleep(1)
    return False


def _tell_end(project: Path, store: "RunStore", state: str) -> None:
    """Prints the outcome of a flow run that completed in this state. Exits if the store has no summary."""
    from infra import stack
    from storage.attempts import read_heartbeat

    if state == "Stopped":
        beat = read_heartbeat(store) or {}
        say(f"Stopped at step {beat.get('step')}, as requested. The same command resumes the run.")
    elif state == "NotNeeded":
        say("The run's Trainer lives, under another flow run. The same command follows it.")
    elif summary := _summary_or_exit(store):
        _print_summary(summary)
    else:
        fail(
            f"The run completed, but {store.url}/{store.run} has no summary.json. Perhaps the worker wrote to another "
            "store of that name: it has the AWS_ENDPOINT_URL and credentials of the shell that started the stack. "
            f"Run `tba down`, then the same command.\n{stack.log_tail(project, 'worker')}"
        )


def _summary_or_exit(store: "RunStore", status: int = 1) -> dict | None:
    """The summary of a finished run. Exits with this status if it cannot be read."""
    from storage.errors import StoreError
    from storage.summary import read_summary

    try:
        return read_summary(store)
    except StoreError as error:
        fail(str(error), status=status)


def _refuse_live_trainer(store: "RunStore") -> None:
    """Refuses a run whose live Trainer has no flow run on this server: another server has it, or the flow died."""
    from flows.run.flow_runs import TRAINER_WATCH_S
    from storage.attempts import is_alive, newest_attempt

    newest = newest_attempt(store)
    if is_alive(store, newest, TRAINER_WATCH_S):
        fail(
            f"Run {store.run!r} has a live Trainer (host {newest.owner.host}, pid {newest.owner.pid}) that this "
            "Prefect server does not know. Follow it where it was started, or stop it and repeat this command."
        )


class FlowRunView:
    """Polls the state of a flow run."""

    def __init__(self, project: Path, client, flow_run) -> None:
        self._project, self._client, self._flow_run = project, client, flow_run
        self._heard_at = self._alive_at = time.monotonic()

    def state(self):
        """Its newest state. Raises: StackError: a process of the stack or of the flow died, or the server is silent."""
        import httpx

        from flows.run import flow_runs
        from infra import stack

        stack.check(self._project)
        try:
            self._flow_run = self._client.read_flow_run(self._flow_run.id)
            self._heard_at = time.monotonic()
        except httpx.HTTPError as error:
            if time.monotonic() - self._heard_at > SERVER_SILENCE_S:
                raise stack.StackError(f"The Prefect server no longer answers: {error!r}") from error
        state = self._flow_run.state
        if not state.is_running() or flow_runs.is_alive(self._client, self._flow_run):
            self._alive_at = time.monotonic()
        elif time.monotonic() - self._alive_at > PROCESS_SILENCE_S:
            raise stack.StackError(f"The flow's process is gone.\n{stack.log_tail(self._project, 'worker')}")
        return state


def _follow(view: FlowRunView, store: "RunStore", old: dict | None):
    """Shows progress until the flow run ends; returns its final state. old: an earlier attempt's heartbeat, ignored."""
    from flows.cli.console import Progress, console

    with Progress(console(), store.run) as progress:
        while not (state := view.state()).is_final():
            progress.show(*_stage(state, store, old))
            progress.wait(1)
    return state


def _stage(state, store: "RunStore", old: dict | None) -> tuple[str, dict | None]:
    """The run's stage in words, and the attempt's heartbeat. A heartbeat that cannot be read ends no run."""
    from storage.attempts import read_heartbeat
    from storage.errors import StoreError
    from storage.status import stage_of

    try:
        heartbeat = read_heartbeat(store)
    except StoreError as error:
        return f"the heartbeat cannot be read: {error}", None
    if heartbeat and heartbeat != old:
        return stage_of(heartbeat), heartbeat
    if state.is_running():
        return "starting the flow, which starts the Trainer and the Searchers (about 20 s)", None
    return f"{state.name.lower()}: waiting for the worker", None


# --- helpers ----------------------------------------------------------------------------------------------------------


def _source_url(source: str, store: str | None) -> str:
    """The URL of a source: given as URL, as a path, or as a run of the same store."""
    is_path = "/" in source or source.endswith(".parquet") or Path(source, "run.json").exists()
    if "://" in source or is_path:
        return store_url(source).rstrip("/")
    return f"{store_url(store).rstrip('/')}/{source}"


def _print_summary(summary: dict) -> None:
    from flows.cli.console import console, summary_table

    console().print(summary_table(summary))


def _command_line() -> str:
    import shlex

    return shlex.join(["tba", *sys.argv[1:]])


@contextlib.contextmanager
def _uninterrupted():
    """Ignores signals within the context: a second Ctrl-C would leave processes running."""
    handlers = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
