"""Requests to a running run: stop, change the number of Searchers. Each is a small file in the run's store, so any
machine that sees the store can make one.

control/stop.json         the Trainer ends after its current step, and then deletes this file
control/searchers.json    number of Searchers that the flow keeps running, also after a resume
control/leaving/<name>    this Searcher ends after the rounds that it has sampled
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from storage.errors import DamagedRecord
from storage.store import RunStore

STOP = "control/stop.json"
SEARCHERS = "control/searchers.json"


MOST_SEARCHERS = 10_000


@dataclass(frozen=True)
class _Wanted:
    """The content of control/searchers.json."""

    wanted: Annotated[int, Field(ge=0, le=MOST_SEARCHERS)]


def ask_to_stop(store: RunStore) -> None:
    store.put(STOP, b"{}")


def is_to_stop(store: RunStore) -> bool:
    return store.exists(STOP)


def take_back_stop(store: RunStore) -> None:
    """Clears the stop request, if there is one."""
    store.delete(STOP)


def want_searchers(store: RunStore, number: int) -> None:
    store.put_json(SEARCHERS, {"wanted": number})


def wanted_searchers(store: RunStore, configured: int) -> int:
    """The number of Searchers to keep running: the newest request, else the configured number.

    Raises: DamagedRecord: the request cannot be read.
    """
    asked = store.read_json(SEARCHERS, _Wanted, remedy="`tba searchers` replaces it.")
    return asked.wanted if asked else configured


def wanted_or_configured(store: RunStore, configured: int) -> int:
    """As `wanted_searchers`; the configured number if the request cannot be read."""
    try:
        return wanted_searchers(store, configured)
    except DamagedRecord:
        return configured


def ask_to_leave(store: RunStore, searcher: str) -> None:
    store.put(_leaving(searcher), b"")


def is_to_leave(store: RunStore, searcher: str) -> bool:
    return store.exists(_leaving(searcher))


def take_back_leave(store: RunStore, searcher: str) -> None:
    """Clears a request to leave that was made to an earlier Searcher of this name."""
    store.delete(_leaving(searcher))


def _leaving(searcher: str) -> str:
    return f"control/leaving/{searcher}"
