"""A Searcher's name while it searches: takes it, renews its lease in a thread, and gives it back.

storage/leases.py has the leases.
"""

import contextlib
import threading
from collections.abc import Iterator

from prefect import get_run_logger
from prefect.exceptions import Abort
from prefect.runtime import flow_run

from storage import leases
from storage.errors import NameTaken, StoreError, Superseded
from storage.store import RunStore


class HeldName:
    """A Searcher's name, which this process has."""

    def __init__(self, store: RunStore, searcher: str) -> None:
        """Raises: NameTaken: a living process has the name. Takes as long as leases.is_alive."""
        self.name, self._store = searcher, store
        self._lease = leases.take_name(store, searcher, flow_run.id)
        self._closing = threading.Event()
        self._log = get_run_logger()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises: Superseded: another process has the name, so this one commits no more."""
        leases.check_name(self._store, self._lease)

    def give_back(self) -> None:
        """Does nothing if the store is away, which would take minutes. Then the next owner waits."""
        self._closing.set()
        self._thread.join(leases.RENEWAL_S)
        if not self._thread.is_alive():
            with contextlib.suppress(StoreError):
                leases.release(self._store, self._lease)

    def _renew(self) -> None:
        while not self._closing.wait(leases.RENEWAL_S):
            try:
                leases.renew(self._store, self._lease)
            except Superseded:
                return  # `check` ends the Searcher
            except StoreError as error:
                self._log.warning("the lease could not be renewed: %s", error)


@contextlib.contextmanager
def held_name(store: RunStore, searcher: str) -> Iterator[HeldName]:
    """The name, until the Searcher ends.

    Raises: NameTaken, Superseded: another process has it. prefect.exceptions.Abort: this flow run was started twice,
    and the other process goes on. That one decides the flow run's state, so this one leaves it as it is.
    """
    held = None
    try:
        held = HeldName(store, searcher)
        yield held
    except (NameTaken, Superseded) as error:
        now = leases.newest(store, searcher)
        if flow_run.id and now is not None and now.flow_run == flow_run.id:
            get_run_logger().warning("%s", error)
            raise Abort(str(error)) from error
        raise
    finally:
        if held is not None:
            held.give_back()
