"""Prefect servers: which one to use, and how to talk to it."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

WORK_POOL = "tba"
DEPLOYMENT = "tba/train"


class StackError(RuntimeError):
    """The stack did not start, or one of its processes died. The message ends with the tail of a log."""


def is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


@contextlib.contextmanager
def api(url: str, settings: dict | None = None) -> Iterator:
    """Prefect's client for this URL, with the credentials of the user's own Prefect settings."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: url, **(settings or {})}), get_client(sync_client=True) as client:
        yield client


def configured_url() -> str | None:
    """The URL that Prefect itself would use in this folder: environment, else prefect.toml, else the active profile."""
    from prefect.settings import get_current_settings

    return os.environ.get("PREFECT_API_URL") or get_current_settings().api.url


def find(ours: str | None, say: Callable[[str], None]) -> str | None:
    """The URL of a server to use: PREFECT_API_URL's, else ours or the configured one. None: start one.

    ours: the URL that this project's stack uses already. Raises StackError if no server may be started instead:
    PREFECT_API_URL names another machine's server, or another server than the running stack's."""
    asked = "PREFECT_API_URL" in os.environ
    candidates = (configured_url(), ours) if asked else (ours, configured_url())
    for url in dict.fromkeys(filter(None, candidates)):
        found = version(url)
        if found is None:
            problem = "nothing answers there"
        elif not is_compatible(found):
            problem = f"it is Prefect {found}, whose API differs from this client's"
        elif ours and url != ours:
            raise StackError(
                f"This project's stack runs with the server at {ours}, but PREFECT_API_URL is {url}. "
                "Run `tba down` first, or unset PREFECT_API_URL."
            )
        else:
            return url
        if not is_loopback(url):
            raise StackError(
                f"PREFECT_API_URL is {url}, but {problem}. Start that server, or unset PREFECT_API_URL for a local one."
            )
        if found is not None:
            say(f"Not using the server at {url}: {problem}.")
    return None


def version(url: str, timeout_s: float = 10) -> str | None:
    """The version of the Prefect server at this URL; None if none answers."""
    import httpx
    from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES

    try:
        with api(url, {PREFECT_API_REQUEST_TIMEOUT: timeout_s, PREFECT_CLIENT_MAX_RETRIES: 0}) as client:
            answer = client.api_version()
    except (httpx.HTTPError, ValueError):  # nothing listens, or something that speaks no HTTP, or no JSON
        return None
    return answer if isinstance(answer, str) else None


def free_port(preferred: int) -> int:
    """The preferred port of 127.0.0.1, or another if that is taken."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is not taken
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return probe.getsockname()[1]
    raise StackError("No free port on 127.0.0.1.")


def create_work_pool(url: str) -> str:
    """Create the work pool if it is missing; returns its type."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    with api(url) as client:
        try:
            return client.read_work_pool(WORK_POOL).type
        except ObjectNotFound:
            template = ProcessWorker.get_default_base_job_template()
            pool = WorkPoolCreate(name=WORK_POOL, type="process", base_job_template=template)
            return client.create_work_pool(pool).type


def unfinished(client, flows: list[str]) -> list:
    """Flow runs of these flows that have not ended, as prefect.client.schemas.FlowRun."""
    from prefect.client.schemas.filters import (
        FlowFilter,
        FlowFilterName,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import TERMINAL_STATES

    state = FlowRunFilterState(type=FlowRunFilterStateType(not_any_=list(TERMINAL_STATES)))
    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=flows)), flow_run_filter=FlowRunFilter(state=state)
    )


def is_compatible(server_version: str) -> bool:
    """Prefect's own rule: clients and servers of one major version understand each other."""
    from prefect import __version__

    return server_version.split(".")[0] == __version__.split(".")[0]
