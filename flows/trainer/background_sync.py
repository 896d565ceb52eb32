"""Syncs the replay buffer beside training, in a thread of its own: the store may take seconds, and training goes on.

A sync has three parts (storage/buffer.py). The thread finds, reads and indexes the new shards. It records them, with
the first step that can draw them. Then it admits them, once all earlier steps have drawn. A draw of that step waits
for it. So every draw can be repeated from the records.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from storage.attempts import check_not_superseded
from storage.buffer import ReplayBuffer
from storage.ledger import Sync
from storage.store import RunStore

# If finding the last sync's shards, and recording them, took at most this long, the Trainer waits for the next sync, so
# that it can draw these trajectories one step sooner. Syncs of a local store are this fast.
MAX_STALL_S = 0.04
# If recording the last sync took longer than this, the next one is recorded for the step after next, so that no draw
# waits for it. Exceptions: the Trainer waits for this sync, or the next step cannot draw without it.
SHORT_S = 0.02
_CLOSING_S = 10.0


class BackgroundSync:
    """One sync after the other, each at the Trainer's request."""

    def __init__(self, store: RunStore, buffer: ReplayBuffer, attempt: int, on_sync: Callable[[Sync | None], object]):
        """on_sync: is told the result of each sync, in the thread, before its trajectories can be drawn."""
        self._store, self._buffer, self._attempt, self._on_sync = store, buffer, attempt, on_sync
        self._changed = threading.Condition()  # guards the fields below, and is held by a draw
        self._next_step = 0  # the next that draws
        self._admitted_at: int | None = None  # the step that the record of the sync in progress names
        self._is_requested = self._is_busy = self._is_awaited = self._is_closing = False
        self._took_s = self._recording_s = 0.0  # the last sync, and the recording of one
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="sync", daemon=True)
        self._thread.start()

    def request(self, step: int, stall_s: float | None) -> None:
        """Asks for a sync, whose trajectories `step` or a later one draws. Returns when it is done.

        stall_s: returns after so many seconds at the latest; None: no limit. Raises what the thread raised.
        """
        with self._changed:
            self._next_step, self._is_requested = step, True
            self._is_awaited = stall_s is None or self._took_s <= stall_s
            self._changed.notify_all()
            if self._is_awaited:
                self._changed.wait_for(lambda: self._error or not (self._is_requested or self._is_busy), stall_s)
            self._is_awaited = False
            self._raise_error()

    @contextmanager
    def drawing(self, step: int) -> Iterator[None]:
        """The draw of a step, which sees the syncs whose records name it or an earlier one, and no others.

        Raises what the thread raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._admitted_at is None or self._admitted_at > step)
            self._raise_error()
            yield
            self._next_step = step + 1
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread. A sync that is not admitted is dropped: its shards are new to the next Trainer."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSING_S)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while (step := self._await_request()) is not None:
                self._sync(step)
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _await_request(self) -> int | None:
        """The step that will draw next; None: the Trainer has ended."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_requested or self._is_closing)
            self._is_requested, self._is_busy = False, True
            return None if self._is_closing else self._next_step

    def _sync(self, step: int) -> None:
        began = time.monotonic()
        check_not_superseded(self._store, self._attempt)
        found = self._buffer.find(step)
        self._took_s = time.monotonic() - began
        if found is None:
            self._on_sync(None)
            return
        with self._changed:
            is_soon = self._is_awaited or self._recording_s <= SHORT_S or not self._buffer.can_draw(self._next_step)
            self._admitted_at = self._next_step if is_soon else self._next_step + 1
        began = time.monotonic()
        arrivals = self._buffer.record(found, self._admitted_at, self._attempt)
        self._recording_s = time.monotonic() - began
        self._took_s += self._recording_s
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._next_step >= self._admitted_at)
            if self._next_step < self._admitted_at:
                return
            self._buffer.admit(arrivals)
            self._on_sync(arrivals.sync)
            self._admitted_at = None
            self._changed.notify_all()
        self._buffer.move_words()
        with self._changed:
            self._buffer.free_words()
