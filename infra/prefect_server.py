"""Prefect servers: chooses one, makes clients for it, and gives it the work pool and the deployments."""

import contextlib
import os
import socket
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

WORK_POOL = "tba"
DEPLOYMENT = "tba/train"
# Flow runs in one answer: the default of PREFECT_SERVER_API_DEFAULT_LIMIT, above which the server refuses.
PAGE = 200
OPEN_TIMEOUT_S = 10
VERSION_TIMEOUT_S = 10


class StackError(RuntimeError):
    """The stack did not start, or one of its processes died. The message ends with the tail of a log."""


class AccessRefused(StackError):
    """The server asks for an authentication string that it was not given."""


def is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


@contextlib.contextmanager
def api(url: str, settings: dict | None = None) -> Iterator:
    """Prefect's client for this URL, with the user's Prefect settings, replaced by `settings` (stack.credentials)."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: url, **(settings or {})}), get_client(sync_client=True) as client:
        yield client


@dataclass(frozen=True)
class Named:
    """A server that a run may use."""

    url: str
    by: str  # where the URL comes from, in words
    undo: str  # what to do so that it is not used


def configured() -> Named | None:
    """A server of the user's own: PREFECT_API_URL in the environment or .env, else a prefect.toml of theirs.

    A prefect.toml that is a link is this project's own, with the server that its stack started last; it does not count.
    Neither does the active profile, which is for the user's other projects.
    Raises: StackError: prefect.toml cannot be read.
    """
    from dotenv import dotenv_values

    if url := os.environ.get("PREFECT_API_URL"):
        return Named(url, "PREFECT_API_URL", "unset PREFECT_API_URL")
    if url := dotenv_values(".env").get("PREFECT_API_URL"):
        return Named(url, ".env", "remove it from .env")
    own = Path("prefect.toml")
    if not own.is_file() or own.is_symlink():
        return None
    try:
        url = tomllib.loads(own.read_text()).get("api", {}).get("url")
    except (OSError, ValueError, AttributeError) as error:
        raise StackError(f"{own.absolute()} cannot be read as Prefect's settings: {error}") from error
    return Named(url, "prefect.toml", "remove it from prefect.toml") if url else None


def candidates(ours: str | None) -> list[Named]:
    """The servers that a run may use; the first one that can be used is. ours: the URL that our stack uses already.

    Raises: StackError: as `configured`.
    """
    running = Named(ours, "this project's stack", "run `tba down`") if ours else None
    own = configured()
    if own and ours and _port_here(own.url) == _port_here(ours) is not None:
        own = None  # ours by another spelling
    order = (own, running) if os.environ.get("PREFECT_API_URL") else (running, own)
    return [named for named in order if named]


def _port_here(url: str) -> int | None:
    """The port of a URL at this machine's usual loopback address; None: it is elsewhere, or no URL."""
    with contextlib.suppress(ValueError):
        split = urlsplit(url)
        return split.port if split.hostname in ("127.0.0.1", "localhost") else None
    return None


def find(ours: str | None, say: Callable[[str], None], credentials: Callable[[str], dict]) -> str | None:
    """The URL of a server to use. None: start one.

    ours: the URL that this project's stack uses already; credentials: stack.credentials of a URL.
    Raises: StackError: no other server may be started, because the named one is another machine's and cannot be
    used, refuses access, or is not the running stack's."""
    for named in candidates(ours):
        url, refused = named.url, False
        try:
            found = version(url, settings=credentials(url))
        except AccessRefused:
            found, refused = None, True
        if refused:
            problem = "it asks for an authentication string, and PREFECT_API_AUTH_STRING does not hold it"
        elif found is None:
            has_end = url.rstrip("/").endswith("/api")
            problem = "no Prefect API answers there" + ("" if has_end else " (an API's URL ends with /api)")
        elif not is_compatible(found):
            problem = f"it is Prefect {found}, whose API differs from this client's"
        elif ours and url != ours:
            raise StackError(
                f"This project's stack runs with the server at {ours}, but the one of {named.by} is {url}. "
                f"Run `tba down` first, or {named.undo}."
            )
        else:
            return url
        if not is_loopback(url) or (refused and named.by == "PREFECT_API_URL"):
            remedy = "Set PREFECT_API_AUTH_STRING" if refused else "Start that server"
            raise StackError(
                f"The server of {named.by} is {url}, but {problem}. {remedy}, or {named.undo} for a local one."
            )
        if found is not None or refused:
            say(f"Not using the server at {url}: {problem}.")
    return None


def version(url: str, settings: dict | None = None) -> str | None:
    """The version of the Prefect server at this URL; None if none answers within VERSION_TIMEOUT_S.

    settings: stack.credentials, if it may be a server of ours. Raises: AccessRefused."""
    import httpx
    from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES

    quick = {PREFECT_API_REQUEST_TIMEOUT: VERSION_TIMEOUT_S, PREFECT_CLIENT_MAX_RETRIES: 0}
    try:
        with api(url, {**quick, **(settings or {})}) as client:
            answer = client.api_version()
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            raise AccessRefused(f"The Prefect server at {url} asks for another authentication string.") from error
        return None
    # No server, one that answers without HTTP or JSON, or no URL.
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
    return answer if isinstance(answer, str) else None


def is_open(url: str) -> bool:
    """Whether the server answers without an authentication string."""
    import httpx

    try:
        return httpx.get(f"{url}/admin/version", timeout=OPEN_TIMEOUT_S).is_success
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def free_port(preferred: int) -> int:
    """The preferred port of 127.0.0.1, or another if that is taken."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is not taken
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return probe.getsockname()[1]
    raise StackError("No free port on 127.0.0.1.")


def deployments_file(project: Path) -> Path:
    """The project's prefect.yaml if it deploys tba/train, else this package's own: the former may be of other flows.

    Raises: StackError: the project's is no YAML."""
    import yaml

    own = project / "prefect.yaml"
    try:
        content = yaml.safe_load(own.read_text()) if own.is_file() else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StackError(f"{own} is no YAML ({error}). Mend it, or move it away: tba has one of its own.") from error
    listed = content.get("deployments") if isinstance(content, dict) else None
    for deployment in listed if isinstance(listed, list) else []:
        if isinstance(deployment, dict) and str(deployment.get("entrypoint")).endswith(":tba"):
            return own
    return Path(__file__).with_name("prefect.yaml")


def create_work_pool(url: str, credentials: dict) -> str:
    """Creates the work pool if it is missing; returns its type. credentials: stack.credentials.

    Raises: StackError: the server does not give one."""
    import httpx
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectException
    from prefect.workers.process import ProcessWorker

    try:
        with api(url, credentials) as client:
            with contextlib.suppress(ObjectNotFound):
                return client.read_work_pool(WORK_POOL).type
            template = ProcessWorker.get_default_base_job_template()
            pool = WorkPoolCreate(name=WORK_POOL, type="process", base_job_template=template)
            try:
                return client.create_work_pool(pool).type
            except ObjectAlreadyExists:  # another machine was faster
                return client.read_work_pool(WORK_POOL).type
    except (httpx.HTTPError, PrefectException) as error:
        raise StackError(f"The Prefect server at {url} gives no work pool: {error!r}. Try again.") from error


def unfinished(client, flows: list[str]) -> list:
    """Flow runs of these flows that have not ended, as prefect.client.schemas.FlowRun."""
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName

    return read_unfinished(client, flow_filter=FlowFilter(name=FlowFilterName(any_=flows)))


def read_unfinished(client, flow_filter=None, **of_runs) -> list:
    """Flow runs that have not ended, as prefect.client.schemas.FlowRun. of_runs: more conditions of FlowRunFilter."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import TERMINAL_STATES

    state = FlowRunFilterState(type=FlowRunFilterStateType(not_any_=list(TERMINAL_STATES)))
    return read_all(client, flow_filter=flow_filter, flow_run_filter=FlowRunFilter(state=state, **of_runs))


def read_all(client, **filters) -> list:
    """All flow runs that `client.read_flow_runs(**filters)` has, page by page."""
    found: dict = {}  # by id: a page begins with runs of the one before if new runs came meanwhile
    offset = 0
    while page := client.read_flow_runs(**filters, limit=PAGE, offset=offset):
        found |= {run.id: run for run in page}
        offset += len(page)
        if len(page) < PAGE:
            break
    return list(found.values())


def is_compatible(server_version: str) -> bool:
    """Whether a server's API fits this client: by Prefect's rule, if both have the same major version."""
    from prefect import __version__

    return server_version.split(".")[0] == __version__.split(".")[0]
