"""How the processes of a Trainer on several machines find each other, and notice that a machine has died.

The first machine's Trainer waits for the others, which join through the store (storage/machines.py). It goes on with
those that came in time and have the model. If one dies, or falls silent, the attempt ends, and the next one begins with
those that are there.
"""

import logging
import os
import socket
import time
from collections.abc import Iterable
from functools import partial
from ipaddress import ip_address
from urllib.parse import urlsplit

import psutil

from infra.gpus import num_gpus
from storage import machines
from storage.errors import StoreError
from storage.machines import World
from storage.process_identity import Pulse
from storage.store import RunStore, transfer_all

JOIN_S = 60.0  # a worker takes the flow run of a machine, and its process starts
LOAD_S = 3600.0  # a machine that joined has the model: it is downloaded, and its fingerprint compared
POLL_S = 0.5
LOOPBACK = "127.0.0.1"
KEY_VARIABLE = "TBA_MEETING_KEY"  # in the environment of the Trainer's first process

log = logging.getLogger("tba.ranks")


class Meeting:
    """The further machines of one attempt, as the first one sees them."""

    def __init__(self, store: RunStore, attempt: int, num_machines: int, key: str) -> None:
        """`num_machines`: how many are wanted, the first one included. `key`: see storage/machines.py."""
        self._store, self._attempt, self._num_others, self._key = store, attempt, num_machines - 1, key
        self._has_gpus = num_gpus() > 0
        self._pulses: dict[int, Pulse] = {}  # of the machines that take part; before, of those that joined

    def form(self) -> World:
        """Waits for the wanted machines, and tells those that are ready where to meet.

        It waits `JOIN_S` for machines to join, and `LOAD_S` for those that joined and live to have the model.
        """
        began = time.monotonic()
        while len(numbers := self._ready()) < self._num_others:
            waited_s = time.monotonic() - began
            if waited_s > LOAD_S or (waited_s > JOIN_S and not self._is_one_loading(numbers)):
                log.warning("%d of %d further machines are ready; the Trainer goes on", len(numbers), self._num_others)
                break
            time.sleep(POLL_S)
        numbers = numbers[: self._num_others]
        address = own_address() if numbers else LOOPBACK
        if numbers and ip_address(address).is_loopback:
            raise RuntimeError(
                f"the Trainer's other machines cannot reach {address}, by which this one reaches Prefect's server: set "
                "PREFECT_API_URL to an address of the network that the machines share, on each of them"
            )
        world = World(address, free_port(address), numbers)
        machines.form_world(self._store, self._attempt, world, self._key)
        self._pulses = self._new_pulses(numbers)
        return world

    def _ready(self) -> list[int]:
        """Numbers of the machines that joined and have the model."""
        are_ready = machines.ready(self._store, self._attempt)
        return [machine.number for machine in self._joined() if machine.number in are_ready]

    def _is_one_loading(self, are_ready: list[int]) -> bool:
        """Whether a machine lives that joined and is not ready."""
        loading = [machine.number for machine in self._joined() if machine.number not in are_ready]
        self._pulses = self._new_pulses(set(loading) - self._pulses.keys()) | self._pulses
        return not all(self._pulses[number].is_silent(machines.SILENT_S) for number in loading)

    def _joined(self) -> list[machines.Machine]:
        """The machines that joined, each once. On this one the first processes have the devices already.

        Processes on GPUs and on CPUs would not meet.
        """
        places = {machine.owner.place: machine for machine in reversed(machines.joined(self._store, self._attempt))}
        others = [machine for machine in reversed(places.values()) if not machine.owner.is_here()]
        return [machine for machine in others if machine.has_gpus == self._has_gpus]

    def has_lost(self) -> bool:
        """Whether a machine of the world has fallen silent."""
        try:
            are_silent = transfer_all(lambda pulse: pulse.is_silent(machines.SILENT_S), self._pulses.values())
        except StoreError:  # it is away for the other machines, too
            self._pulses = self._new_pulses(self._pulses)
            return False
        silent = [number for number, is_silent in zip(self._pulses, are_silent, strict=True) if is_silent]
        if silent:
            log.error("machines %s of the Trainer are silent", silent)
        return bool(silent)

    def _new_pulses(self, numbers: Iterable[int]) -> dict[int, Pulse]:
        return {number: Pulse(partial(machines.raw, self._store, self._attempt, number)) for number in numbers}


def own_address() -> str:
    """The address at which other machines reach this one: the one by which it reaches Prefect's server."""
    server = urlsplit(os.environ.get("PREFECT_API_URL", ""))
    if not server.hostname:
        return LOOPBACK
    family, kind, *_, target = socket.getaddrinfo(server.hostname, server.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # of datagrams: none is sent
        probe.connect(target)
        return probe.getsockname()[0]


def free_port(address: str) -> int:
    """A port that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
        free.bind((address, 0))
        return free.getsockname()[1]


def interface_variables(address: str) -> dict[str, str]:
    """Environment variables by which gloo and NCCL use the network of this address. The user's own ones stay.

    Otherwise gloo takes the one that the host name resolves to, which may be loopback.
    """
    names = [
        name for name, addresses in psutil.net_if_addrs().items() if address in {each.address for each in addresses}
    ]
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {variable: os.environ.get(variable, names[0]) for variable in variables if names}
