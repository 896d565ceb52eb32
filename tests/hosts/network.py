"""Hosts on one machine: a network, process, mount and host-name namespace each, joined by a switch. Linux, as root.

A host that is killed loses its network and all of its processes in one moment, and says nothing to the others, as a
machine without power. Hosts share the file system; each has a working folder, a home and a temporary folder of its own.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PATIENCE_S = 600.0  # of a machine that others keep busy: there DeepSpeed compiles for over four minutes
POLL_S = 0.1


class Network:
    """A switch and the hosts at it, until `close`."""

    def __init__(self, folder: Path) -> None:
        """Raises: RuntimeError: this machine makes no namespaces."""
        self._folder, self.hosts = folder, []
        self._switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        wait_for(lambda: network_of(self._switch.pid) != network_of("self"), "a network namespace")
        self._at_switch("ip", "link", "add", "switch", "type", "bridge")
        self._at_switch("ip", "link", "set", "switch", "up")

    def add(self, name: str) -> "Host":
        """Starts a host."""
        number = len(self.hosts) + 1
        host = Host(name, f"10.77.0.{number}", self._folder / name, self, port=f"port{number}")
        self.hosts.append(host)
        self._at_switch(
            "ip", "link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", str(host.first_process)
        )
        self._at_switch("ip", "link", "set", host.port, "master", "switch", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "link", "set", "lo", "up")
        return host

    def connect(self, host: "Host", *, is_on: bool) -> None:
        """Plugs the host's cable in, or pulls it out: packets vanish, and no process is told."""
        self._at_switch("ip", "link", "set", host.port, "up" if is_on else "down")

    def limit(self, host: "Host", mbit_s: int | None) -> None:
        """Limits the host's link, in both directions, to megabits a second; None: no limit."""
        for run, device in ((self._at_switch, host.port), (host.run, "eth0")):
            if mbit_s is None:
                run("tc", "qdisc", "del", "dev", device, "root")
            else:
                limit = ["tbf", "rate", f"{mbit_s}mbit", "burst", "32kbit", "latency", "400ms"]
                run("tc", "qdisc", "add", "dev", device, "root", *limit)

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
        self._switch.kill()
        self._switch.wait()

    def _at_switch(self, *command: str) -> None:
        _run(["nsenter", f"--target={self._switch.pid}", "--net", *command])


class Host:
    """A host, and the commands that it runs."""

    def __init__(self, name: str, address: str, folder: Path, network: Network, port: str) -> None:
        self.name, self.address, self.folder, self.port, self._network = name, address, folder, port, network
        self.variables: dict[str, str] = {}  # of the environment of each command, besides this process's own
        for part in ("work", "home", "tmp"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        namespaces = ["--net", "--uts", "--mount", "--mount-proc", "--pid", "--fork", "--kill-child"]
        first = ["sh", "-c", f"hostname {name}; exec sleep infinity"]
        self._first = subprocess.Popen(["unshare", *namespaces, *first], stderr=subprocess.DEVNULL)
        wait_for(lambda: psutil.Process(self._first.pid).children(), "a process namespace")
        self.first_process = psutil.Process(self._first.pid).children()[0].pid

    def start(self, *command: str, log: str) -> subprocess.Popen:
        """Starts a command in the working folder; its output goes to that file of the host's folder."""
        with open(self.folder / log, "ab") as output:
            return subprocess.Popen(
                self._inside(command),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def run(self, *command: str, timeout_s: float = PATIENCE_S) -> str:
        """Runs a command in the working folder to its end; returns what it printed. Raises: RuntimeError: it failed."""
        return _run(self._inside(command), self._environment(), timeout_s)

    def kill(self) -> None:
        """Ends the host: first its network, then all of its processes."""
        if self._first.poll() is None:
            self._network.connect(self, is_on=False)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.first_process, 9)
            self._first.wait()

    def _inside(self, command: tuple[str, ...]) -> list[str]:
        namespaces = ["--net", "--uts", "--mount", "--pid"]
        return ["nsenter", f"--target={self.first_process}", *namespaces, f"--wd={self.folder / 'work'}", *command]

    def _environment(self) -> dict[str, str]:
        ours = ("PREFECT_", "AWS_", "TBA_")  # the settings by which this process reaches servers of its own
        others = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return others | {"HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp")} | self.variables


def network_of(pid: int | str) -> int:
    """The network namespace of a process."""
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def wait_for(
    condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S, explain: Callable[[], str] = str
) -> None:
    """Raises: RuntimeError: the condition did not become true in time. explain: the end of its message."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {timeout_s:.0f} s for {what}{explain()}")
        time.sleep(POLL_S)


def _run(command: list[str], environment: dict[str, str] | None = None, timeout_s: float = 20) -> str:
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
