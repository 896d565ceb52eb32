"""Leases of Searchers' names: one process at a time searches under a name.

searchers/s0/lease=00000001.json    the process that took the name s0 first; it renews the file while it searches
searchers/s0/lease=00000002.json    the process that took the name over, after the first one was silent

A process that finds a living owner does not take the name. An owner that was frozen, or cut off from the store, looks
for a later lease after it has sampled a round. If there is one, it ends. While it scores a round it does not look, so
two processes may commit the same round. The store keeps the first shard only (storage/shards.py), so the round counts
once.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

from pydantic import AfterValidator

from storage.errors import AlreadyExists, DamagedRecord, NameTaken, Superseded
from storage.paths import newest_number
from storage.process_identity import SHORTEST_PAUSE_S, Identity
from storage.shards import check_searcher_id
from storage.store import RunStore

RENEWAL_S = 10.0
# An owner whose process cannot be looked up from here counts as dead if its lease stays the same for this long. So an
# owner whose renewal waits for the store for longer loses its name.
WATCH_S = 30.0
_WATCHED_AT_ONCE = 256
_LOOKS_PER_S = 64  # at leases that are watched at once; a larger number takes longer pauses
_LEASE_NAME = re.compile(r"searchers/[a-z0-9-]+/lease=(?P<number>[0-9]{8})\.json")


def _as_uuid(text: str) -> str:
    return str(UUID(text))


@dataclass(frozen=True)
class Lease:
    """The content of searchers/<name>/lease=….json."""

    searcher: str
    number: int
    owner: Identity | None  # None: the name was taken from its owner, and waits for another one
    flow_run: Annotated[str, AfterValidator(_as_uuid)] | None  # Prefect's id of the owner's flow run
    renewed_at: str  # UTC, ISO 8601
    is_released: bool = False

    @property
    def path(self) -> str:
        return _path(self.searcher, self.number)


def take_name(store: RunStore, searcher: str, flow_run: str | None) -> Lease:
    """Takes a Searcher's name for this process. Takes as long as `is_alive`.

    flow_run: Prefect's id of this process's flow run. Raises: ValueError: not a name. NameTaken: a living process has
    the name.
    """
    last = newest(store, check_searcher_id(searcher))
    if last is not None and is_alive(store, last):
        raise _taken(store, last)
    number = last.number + 1 if last else 1
    lease = Lease(searcher, number, Identity.current(), flow_run, datetime.now(UTC).isoformat())
    try:
        store.put_new_json(lease.path, lease)
    except AlreadyExists:
        raise _taken(store, newest(store, searcher) or lease) from None
    return lease


def _taken(store: RunStore, lease: Lease) -> NameTaken:
    owner = f"host {lease.owner.host}, pid {lease.owner.pid}" if lease.owner else "another process"
    return NameTaken(
        f"a Searcher of run {store.run} has the name {lease.searcher} already: {owner}. This one ends, and has written "
        "nothing. Give it another name."
    )


def revoke(store: RunStore, lease: Lease) -> None:
    """Takes a name from its owner, which ends before its next commit. The next process need not wait for the name."""
    vacant = Lease(lease.searcher, lease.number + 1, None, None, datetime.now(UTC).isoformat(), is_released=True)
    with suppress(AlreadyExists):
        store.put_new_json(vacant.path, vacant)


def renew(store: RunStore, lease: Lease) -> None:
    """Tells that the owner lives. Raises: Superseded: another process has the name, or nobody."""
    check_name(store, lease)
    store.put_json(lease.path, replace(lease, renewed_at=datetime.now(UTC).isoformat()))


def release(store: RunStore, lease: Lease) -> None:
    """Gives the name back, so that the next process takes it without waiting."""
    store.put_json(lease.path, replace(lease, is_released=True))


def check_name(store: RunStore, lease: Lease) -> None:
    """Takes one look-up. Raises: Superseded: the name was taken from this process."""
    if store.exists(_path(lease.searcher, lease.number + 1)):
        raise Superseded(
            f"this Searcher lost the name {lease.searcher} in run {store.run}: it was silent for too long, or its "
            "flow run had ended, so another process may have the name. Its committed rounds count."
        )


def newest(store: RunStore, searcher: str) -> Lease | None:
    """The newest lease of a name; None: no process has ever had it. One that cannot be read has no owner."""
    listed = store.list(f"searchers/{searcher}")
    number = newest_number(listed, _LEASE_NAME, lambda number: store.exists(_path(searcher, number)))
    return read(store, searcher, number) if number else None


def read(store: RunStore, searcher: str, number: int) -> Lease:
    """A lease as it is now. One that cannot be read has no owner."""
    with suppress(DamagedRecord):
        found = store.read_json(_path(searcher, number), Lease)
        if found is not None and (found.searcher, found.number) == (searcher, number):
            return found
    return Lease(searcher, number, None, None, renewed_at="")


def is_alive(store: RunStore, lease: Lease, pause_s: float = SHORTEST_PAUSE_S) -> bool:
    """Whether the owner searches: by its process, or, if that cannot be looked up from here, by renewals of the lease.

    pause_s: between two looks at the lease. Takes up to twice `WATCH_S`, and as long as the store is away; no time if
    the process is known to be dead or has given the name back.
    """
    if lease.is_released or lease.owner is None:
        return False

    # Each renewal changes the file.
    return lease.owner.is_alive(lambda: store.get_or_none(lease.path), WATCH_S, pause_s)


def are_alive(store: RunStore, held: Sequence[Lease]) -> list[bool]:
    """`is_alive` of each of these leases, in about the time of one for each `_WATCHED_AT_ONCE` of them."""
    if not held:
        return []
    at_once = min(len(held), _WATCHED_AT_ONCE)
    pause_s = max(SHORTEST_PAUSE_S, at_once / _LOOKS_PER_S)
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda lease: is_alive(store, lease, pause_s), held))


def _path(searcher: str, number: int) -> str:
    return f"searchers/{searcher}/lease={number:08d}.json"
