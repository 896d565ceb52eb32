"""What somebody asks of a run while it trains, as small files of its store: any machine that sees the store can ask.

control/stop.json         the Trainer ends after the step that it is at; it removes this when it has heard it
control/searchers.json    how many Searchers the run's flow keeps; a resumed run keeps as many
control/leaving/<name>    this Searcher ends when its round is done
"""

import contextlib
import json

from storage.errors import NotFound
from storage.store import RunStore

STOP = "control/stop.json"
SEARCHERS = "control/searchers.json"


def ask_to_stop(store: RunStore) -> None:
    store.put(STOP, b"{}")


def take_back_stop(store: RunStore) -> bool:
    """Whether somebody asked the run to stop; from then on nobody does."""
    with contextlib.suppress(NotFound):
        store.delete(STOP)
        return True
    return False


def want_searchers(store: RunStore, number: int) -> None:
    store.put(SEARCHERS, json.dumps({"wanted": number}).encode())


def wanted_searchers(store: RunStore, configured: int) -> int:
    """How many Searchers the run's flow is to keep: what was asked last, else what the run was started with."""
    asked = store.read_json(SEARCHERS)
    return asked["wanted"] if asked else configured


def ask_to_leave(store: RunStore, searcher: str) -> None:
    store.put(_leaving(searcher), b"")


def is_to_leave(store: RunStore, searcher: str) -> bool:
    return store.exists(_leaving(searcher))


def welcome(store: RunStore, searcher: str) -> None:
    """A new Searcher of this name is not asked to leave, whatever its predecessor was."""
    with contextlib.suppress(NotFound):
        store.delete(_leaving(searcher))


def _leaving(searcher: str) -> str:
    return f"control/leaving/{searcher}"
