"""The further machines of a Trainer (train.machines), and where its processes meet.

machines/attempt=00000002/machine=01.json    a machine that joined the attempt; it renews the file while it lives
machines/attempt=00000002/ready=01           it has the model, so it can take part
machines/attempt=00000002/world.json         the machines whose processes train together, and the first one's address

The first machine is the one of the attempt's record (storage/attempts.py). It decides once which machines take part.

Processes that meet run each other's code: PyTorch pickles what they exchange. So world.json is signed with a key that
the run's flow draws for the attempt, and that is not in the store. Without the key nobody sends a machine elsewhere.
"""

import hmac
import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import count
from typing import Annotated

from pydantic import Field

from storage.errors import AlreadyExists, DamagedRecord
from storage.process_identity import Identity
from storage.store import RunStore

RENEWAL_S = 5.0
# A machine that has not renewed its file for this long has died, or is cut off.
SILENT_S = 20.0
_MACHINE_NAME = re.compile(r"machines/attempt=[0-9]{8}/machine=[0-9]{2,}\.json")
_READY_NAME = re.compile(r"machines/attempt=[0-9]{8}/ready=(?P<number>[0-9]{2,})")


@dataclass(frozen=True)
class Machine:
    """The content of machine=….json."""

    attempt: int
    number: Annotated[int, Field(ge=1)]  # from 1; the first machine has no file
    owner: Identity
    processes: Annotated[int, Field(ge=1)]
    renewed_at: str  # UTC, ISO 8601
    has_gpus: bool = False  # older versions did not tell

    @property
    def path(self) -> str:
        return _path(self.attempt, self.number)


@dataclass(frozen=True)
class World:
    """The machines whose processes train together."""

    address: str
    port: Annotated[int, Field(ge=1, le=65535)]
    machines: list[int]  # numbers of the further machines, in the order of their processes' ranks


@dataclass(frozen=True)
class _Signed:
    """The content of world.json."""

    world: World
    signature: str  # HMAC-SHA256, in hexadecimal


def join(store: RunStore, attempt: int, processes: int, has_gpus: bool) -> Machine:
    """Adds this machine to the attempt, with so many processes. The attempt may begin without it: see World."""
    for number in count(1):
        machine = Machine(attempt, number, Identity.current(), processes, _now(), has_gpus)
        with suppress(AlreadyExists):
            store.put_new_json(machine.path, machine)
            return machine
    raise AssertionError  # count does not end


def renew(store: RunStore, machine: Machine) -> None:
    """Tells that the machine lives."""
    store.put_json(machine.path, replace(machine, renewed_at=_now()))


def tell_ready(store: RunStore, machine: Machine) -> None:
    """Tells that the machine has the model."""
    store.put(f"{_folder(machine.attempt)}/ready={machine.number:02d}", b"")


def ready(store: RunStore, attempt: int) -> set[int]:
    """The numbers of the machines that are ready."""
    return {int(name["number"]) for path in store.list(_folder(attempt)) if (name := _READY_NAME.fullmatch(path))}


def joined(store: RunStore, attempt: int) -> list[Machine]:
    """The machines that joined the attempt, in order. A file that cannot be read is left out."""
    found = []
    for path in sorted(filter(_MACHINE_NAME.fullmatch, store.list(_folder(attempt)))):
        with suppress(DamagedRecord):
            found += [machine] if (machine := store.read_json(path, Machine)) else []
    return found


def raw(store: RunStore, attempt: int, number: int) -> bytes | None:
    """A machine's file as it is now, for comparison with a later one; None: it does not exist."""
    return store.get_or_none(_path(attempt, number))


def form_world(store: RunStore, attempt: int, world: World, key: str) -> None:
    """Tells the machines that joined which of them take part. Raises: AlreadyExists: it was told before."""
    signed = _Signed(world, _signature(store, attempt, world, key))
    store.put_new_json(f"{_folder(attempt)}/world.json", signed)


def read_world(store: RunStore, attempt: int, key: str) -> World | None:
    """None: the first machine waits for others still. Raises: DamagedRecord: it is not signed with this key."""
    path = f"{_folder(attempt)}/world.json"
    found = store.read_json(path, _Signed)
    if found is None:
        return None
    if not hmac.compare_digest(found.signature.encode(), _signature(store, attempt, found.world, key).encode()):
        raise DamagedRecord(f"{path} (run {store.run} in {store.url}) was not written by the attempt's Trainer")
    return found.world


def _signature(store: RunStore, attempt: int, world: World, key: str) -> str:
    signed = json.dumps([store.url, store.run, attempt, asdict(world)], sort_keys=True)
    return hmac.digest(key.encode(), signed.encode(), "sha256").hex()


def num_processes_here(store: RunStore, attempt: int) -> int:
    """Processes of the attempt's Trainer on this machine, if it is one of the further ones; else 0."""
    return sum(machine.processes for machine in joined(store, attempt) if machine.owner.is_running())


def _path(attempt: int, number: int) -> str:
    return f"{_folder(attempt)}/machine={number:02d}.json"


def _folder(attempt: int) -> str:
    return f"machines/attempt={attempt:08d}"


def _now() -> str:
    return datetime.now(UTC).isoformat()
