"""Syncs the replay buffer beside training, in a thread of its own: the store may take seconds, and training goes on.

A sync has two parts (storage/buffer.py). The thread finds, reads and indexes the new shards while the Trainer draws and
trains. Then it admits them, which writes the sync's record, at a moment when no draw is in progress: from the end of
a draw to the begin of the next one. The record names the first step that can draw them, so every draw can be repeated.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from storage.attempts import check_not_superseded
from storage.buffer import ReplayBuffer, Sync
from storage.store import RunStore

# A sync that takes no longer, as those of a local store do, is waited for: its trajectories are a step younger then.
MAX_STALL_S = 0.04
SHORT_S = 0.02  # an admission that takes no longer may begin right before a draw, which waits for it
_CLOSING_S = 10.0


class BackgroundSync:
    """One sync after the other, each at the Trainer's request."""

    def __init__(self, store: RunStore, buffer: ReplayBuffer, attempt: int, on_sync: Callable[[Sync | None], object]):
        """on_sync: is told the result of each sync, in the thread, before its trajectories can be drawn."""
        self._store, self._buffer, self._attempt, self._on_sync = store, buffer, attempt, on_sync
        self._changed = threading.Condition()  # guards the fields below
        self._next_step = 0  # no draw before it will begin
        self._first_step = 0  # the same when the sync in progress began
        self._is_requested = self._is_busy = self._may_admit = self._is_closing = False
        self._deadline = 0.0  # of a Trainer that waits for the end of a sync
        self._admission_s = self._sync_s = 0.0  # what the last admission took, and the last sync
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="sync", daemon=True)
        self._thread.start()

    def request(self, step: int, stall_s: float | None) -> None:
        """Asks for a sync, whose trajectories `step` or a later one draws. Returns when it is done.

        stall_s: returns after so many seconds at the latest; None: no limit. Raises what the thread raised.
        """
        with self._changed:
            self._next_step, self._may_admit, self._is_requested = step, True, True
            self._deadline = float("inf") if stall_s is None else time.monotonic() + stall_s
            self._changed.notify_all()
            if stall_s is None or self._sync_s <= stall_s:
                self._changed.wait_for(lambda: self._error or not (self._is_requested or self._is_busy), stall_s)
            self._may_admit, self._deadline = False, float("inf")  # the Trainer draws now
            self._raise_error()

    @contextmanager
    def drawing(self, step: int) -> Iterator[None]:
        """The draw of a step. No sync is admitted meanwhile; after it one may be, for the next step.

        Raises what the thread raised. If the draw raises, the next `request` is awaited.
        """
        with self._changed:
            self._raise_error()
            yield
            self._next_step, self._may_admit = step + 1, True
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
            while self._await_request():
                self._sync()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _await_request(self) -> bool:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_requested or self._is_closing)
            self._is_requested, self._is_busy, self._first_step = False, True, self._next_step
            return not self._is_closing

    def _sync(self) -> None:
        began = time.monotonic()
        check_not_superseded(self._store, self._attempt)
        has_found = self._buffer.find(self._first_step)
        self._sync_s = time.monotonic() - began
        if not has_found:
            self._on_sync(None)
            return
        with self._changed:  # a draw waits for it
            self._changed.wait_for(lambda: self._is_closing or self._may_begin_admission())
            if self._is_closing:
                return
            began = time.monotonic()
            self._on_sync(self._buffer.admit(self._next_step, self._attempt))
            self._admission_s = time.monotonic() - began
            self._sync_s += self._admission_s
        self._buffer.move_words()
        with self._changed:
            self._buffer.free_words()

    def _may_begin_admission(self) -> bool:
        is_in_time = self._may_admit and time.monotonic() + self._admission_s < self._deadline
        return is_in_time or self._admission_s < SHORT_S
