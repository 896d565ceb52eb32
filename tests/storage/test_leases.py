"""Searchers' names have one owner at a time (storage/leases.py).

Claims
- a name is free at first, after its owner gave it back, after its owner died, and after it was taken from the owner
- a living owner keeps its name: here by its process, elsewhere by its renewals
- of several processes that take a free name at once, one gets it
- an owner that lost its name hears so, its renewals do not bring the name back, and giving it back frees no other lease
- a lease that is damaged, foreign, or not listed blocks no name and undoes no takeover

Run: pytest tests/storage/test_leases.py
"""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from uuid import uuid4

import pytest

from storage import leases
from storage.errors import NameTaken, Superseded
from storage.leases import Lease, take_name
from storage.process_identity import Identity
from storage.store import RunStore

FLOW_RUN = str(uuid4())


@pytest.fixture(autouse=True)
def short_watch(monkeypatch):
    monkeypatch.setattr(leases, "WATCH_S", 0.5)


def write(store: RunStore, lease: Lease) -> None:
    store.put(lease.path, json.dumps(asdict(lease)).encode())


def lease_of(store: RunStore, **owner) -> Lease:
    """The name s0, taken by a process that differs from this one in `owner`."""
    lease = take_name(store, "s0", FLOW_RUN)
    lease = replace(lease, owner=Identity(**asdict(lease.owner) | owner))
    write(store, lease)
    return lease


def test_a_living_owner_keeps_its_name(local_store):
    lease = take_name(local_store, "s0", FLOW_RUN)
    with pytest.raises(NameTaken, match=r"the name s0 already: host .*, pid \d+. This one ends"):
        take_name(local_store, "s0", FLOW_RUN)
    assert take_name(local_store, "s1", None).number == 1, "another name is free"
    assert leases.newest(local_store, "s0") == lease


def test_who_gave_it_back_or_died_is_not_waited_for(local_store, monkeypatch):
    monkeypatch.setattr(leases, "WATCH_S", 600)
    leases.release(local_store, take_name(local_store, "s0", FLOW_RUN))
    dead = lease_of(local_store, started=0.0)
    assert dead.number == 2
    assert take_name(local_store, "s0", FLOW_RUN).number == 3


@pytest.mark.slow
def test_an_owner_elsewhere_has_its_name_while_it_renews(local_store, monkeypatch):
    lease, over = lease_of(local_store, boot_id="of another machine"), threading.Event()

    def renew() -> None:
        while not over.wait(0.1):
            leases.renew(local_store, lease)

    thread = threading.Thread(target=renew)
    thread.start()
    with monkeypatch.context() as patient:
        patient.setattr(leases, "WATCH_S", 60)
        with pytest.raises(NameTaken):
            take_name(local_store, "s0", None)
    over.set()
    thread.join()
    assert take_name(local_store, "s0", None).number == 2, "it is silent now"


def test_many_owners_are_watched_in_the_time_of_one(local_store, monkeypatch):
    all_at_once, pauses = threading.Barrier(41), set()

    def is_alive(store: RunStore, lease: Lease, pause_s: float) -> bool:
        pauses.add(pause_s)
        all_at_once.wait(60)  # raises if some wait for others
        return lease.number == 7

    monkeypatch.setattr(leases, "is_alive", is_alive)
    held = [Lease(f"s{number}", number, None, None, "") for number in range(41)]
    assert [number for number, lives in enumerate(leases.are_alive(local_store, held)) if lives] == [7]
    assert 41 / max(pauses) <= 64, "looks at the store in a second"
    assert leases.are_alive(local_store, []) == []


def test_one_of_several_gets_a_free_name(local_store):
    start = threading.Barrier(8)

    def take(_: int) -> Lease | None:
        start.wait()
        with suppress(NameTaken):
            return take_name(local_store, "s0", None)

    with ThreadPoolExecutor(8) as pool:
        taken = [lease for lease in pool.map(take, range(8)) if lease]
    assert [lease.number for lease in taken] == [1]


def test_who_lost_its_name_hears_so_and_changes_nothing(local_store):
    lost = take_name(local_store, "s0", FLOW_RUN)
    leases.check_name(local_store, lost)
    leases.revoke(local_store, lost)
    owner = take_name(local_store, "s0", FLOW_RUN)
    assert owner.number == 3, "the second is nobody's"
    for act in (leases.check_name, leases.renew):
        with pytest.raises(Superseded, match="this Searcher lost the name s0 in run"):
            act(local_store, lost)
    leases.release(local_store, lost)
    leases.revoke(local_store, lost)  # by a flow that read the lease before the name changed hands
    leases.check_name(local_store, owner)
    assert leases.newest(local_store, "s0") == owner


def test_a_lease_that_cannot_be_read_blocks_no_name(local_store):
    local_store.put("searchers/s0/lease=00000001.json", b"{")
    local_store.put("searchers/s0/lease=99999999.json", b"{}")
    local_store.put("searchers/s0/notes.txt", b"")
    assert take_name(local_store, "s0", None).number == 2
    foreign = Lease("s9", 7, Identity.current(), None, "")
    local_store.put("searchers/s1/lease=00000001.json", json.dumps(asdict(foreign)).encode())
    assert take_name(local_store, "s1", None).number == 2
    odd = asdict(Lease("s2", 1, Identity.current(), "../../flow_runs", ""))
    local_store.put("searchers/s2/lease=00000001.json", json.dumps(odd).encode())
    assert take_name(local_store, "s2", None).number == 2


def test_a_listing_that_forgets_a_lease_undoes_no_takeover(local_store, monkeypatch):
    owner = take_name(local_store, "s0", None)
    monkeypatch.setattr(RunStore, "list", lambda *_, **__: [])
    assert leases.newest(local_store, "s0") == owner


def test_only_a_searchers_name_can_be_taken(local_store, tmp_path: Path):
    with pytest.raises(ValueError, match=r"searcher: got '\.\./x'"):
        take_name(local_store, "../x", None)
    assert not list(tmp_path.rglob("lease*"))
