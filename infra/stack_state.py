"""stack.json: the processes that a project's stack has started, and the commands that use them.

Before and after: infra/stack.py, which starts and stops these processes.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from infra import server_access
from infra.prefect_server import StackError
from storage.process_identity import Process


@dataclass
class State:
    """The content of stack.json."""

    url: str | None = None
    """API of the server that the processes use."""
    own_server: bool = False
    """This project started the server."""
    keep: bool = False
    """`tba up` started the stack, so only `tba down` stops it."""
    users: list[Process] = field(default_factory=list)
    """`tba train` processes that use the stack."""
    processes: dict[str, Process] = field(default_factory=dict)
    """The started processes: `server` (unless one was running) and `worker`."""


@contextlib.contextmanager
def locked_state(folder: Path) -> Iterator[State]:
    """The state without dead processes; written back at the end, or removed if no process is left. Takes a lock.

    Raises: StackError: the folder cannot be written to, or the file is damaged.
    """
    try:
        server_access.make_private(folder)
        lock = open(folder / "stack.lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise StackError(
            f"{folder} cannot be written to ({error}). Is it another account's, or the disk full?"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = read_state(folder)
        state.users = [user for user in state.users if user.find()]
        state.processes = {name: process for name, process in state.processes.items() if process.find()}
        state.keep = state.keep and bool(state.processes)
        try:
            yield state
        finally:
            write_state(folder, state)


def read_state(folder: Path) -> State:
    """Raises: StackError: the file is damaged, or cannot be read."""
    path = folder / "stack.json"
    try:
        stored = json.loads(path.read_text())
        users = [Process(**user) for user in stored["users"]]
        processes = {name: Process(**process) for name, process in stored["processes"].items()}
        return State(stored["url"], stored["own_server"], stored["keep"], users, processes)
    except FileNotFoundError:
        return State()
    except OSError as error:
        raise StackError(f"{path} cannot be read ({error}). Is it another account's?") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StackError(
            f"{path} is damaged ({error!r}), so the processes that were started here are not known. Delete it, end "
            "Prefect's server and worker if they still run, then repeat the command."
        ) from error


def write_state(folder: Path, state: State) -> None:
    path = folder / "stack.json"
    if not state.processes:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(state), indent=2))
    os.replace(temporary, path)
