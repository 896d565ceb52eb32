#!/usr/bin/env python3
"""A local S3: Ceph's radosgw on loopback, over one monitor, one manager and one OSD that keeps its data in a folder.

    eval "$(.venv/bin/python infra/local_s3.py start)"      prints AWS_ENDPOINT_URL, new keys, region, S3_URL
    .venv/bin/tba train --store "$S3_URL"
    .venv/bin/python infra/local_s3.py stop                 the data stays in the folder; `start` serves it again

`start` installs missing Debian packages, which needs root. Default folder: .tba/.local/s3. All daemons listen on
127.0.0.1; the gateway listens on another address if `--address` names one. Ceph's own authentication is off, so every
account of this machine can read the data. There is one copy on one disk: use it for development and tests only. The
start takes about 15 s; the daemons take 2 GB of memory.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

PACKAGES = ["radosgw", "ceph-mon", "ceph-mgr", "ceph-osd", "ceph-common"]
DAEMONS = ["radosgw", "ceph-osd", "ceph-mgr", "ceph-mon"]  # each writes to the ones after it
PROGRAMS = ["radosgw", "radosgw-admin", "monmaptool", "ceph-mon", "ceph-mgr", "ceph-osd", "ceph"]
FOLDERS = ("run", "log", "mon", "mgr", "osd", "rgw")
FILES = ("settings.json", "ceph.conf", "monmap", "made")
START_TIMEOUT_S = 90  # 15 s on an idle machine of two cores
REGION = "us-east-1"
BUCKET = "tba"
USER = "tba"

CONFIGURATION = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]
public network = 127.0.0.0/8
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
osd crush chooseleaf type = 0
mon data avail crit = 1
run dir = {folder}/run
admin socket = {folder}/run/$name.sock
log file = {folder}/log/$name.log
pid file = {folder}/run/$name.pid
setuser match path = {folder}
[mon.a]
mon data = {folder}/mon
[mgr.a]
mgr data = {folder}/mgr
mgr initial modules =
[osd.0]
osd objectstore = bluestore
osd data = {folder}/osd
bluestore block size = {block_bytes}
osd memory target = 1073741824
[client.rgw]
# Without tcp_nodelay a small object takes 44 ms to read: its last packet waits for an acknowledgement that is delayed.
rgw data = {folder}/rgw
rgw frontends = beast endpoint={address}:{port} tcp_nodelay=1
debug rgw = 0
# Space of deleted objects is free after a minute. The default is two hours, in which old checkpoints would fill the
# disk.
rgw gc obj min wait = 60
rgw gc processor period = 60
rgw gc processor max time = 60
"""


class LocalS3Error(RuntimeError):
    """The local S3 cannot be installed or did not start; the message has the remedy."""


class LocalS3:
    """A local S3 in a folder. Recognises its daemons by pid and command line."""

    def __init__(self, folder: Path, address: str = "127.0.0.1"):
        """`address`: the gateway's, in a new folder; an old one keeps its own."""
        self.folder, self._new_address = folder.absolute(), address
        self.configuration = self.folder / "ceph.conf"

    # --- public interface ---------------------------------------------------------------------------------------------

    def start(self) -> dict[str, str]:
        """Starts all daemons; returns the environment variables for clients. Earlier objects are served again.

        Raises: LocalS3Error: it runs already, and is left running; or it did not start, and all daemons are stopped.
        """
        install()
        if running := [program for program in DAEMONS if self._running(program)]:
            raise LocalS3Error(
                f"it runs already from {self.folder} ({', '.join(running)}); stop it first: its keys are not kept"
            )
        try:
            return self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> dict[str, str]:
        new = not (self.folder / "made").exists()
        if new:
            self._refuse_other_files()
            shutil.rmtree(self.folder, ignore_errors=True)  # left by a start that was interrupted
            self._make()
        self._refuse_taken_ports()
        self._start_daemon("ceph-mon", "-i", "a")
        self._start_daemon("ceph-mgr", "-i", "a")
        if new:
            self._add_osd()
        self._start_daemon("ceph-osd", "-i", "0")
        access_key, secret_key = self._new_keys()
        self.start_gateway()
        self._make_bucket(access_key, secret_key)
        (self.folder / "made").touch()
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": access_key,
            "AWS_SECRET_ACCESS_KEY": secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "S3_URL": f"s3://{BUCKET}",
        }

    def stop(self) -> None:
        """Stops all daemons, each before the daemons that it writes to."""
        for program in DAEMONS:
            self._stop_daemon(program, signal.SIGTERM)

    def start_gateway(self) -> None:
        process = self._start_daemon("radosgw", "-n", "client.rgw")
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(*self._gateway()):
            if time.monotonic() > deadline or process.poll() is not None:
                output = (self.folder / "log" / "radosgw.out").read_text()
                raise LocalS3Error(f"the gateway did not start; logs are in {self.folder}/log: {output[-1000:]}")
            time.sleep(0.1)

    def kill_gateway(self) -> None:
        """Kills the gateway, even during a request, as a crash would. The OSD keeps the data."""
        self._stop_daemon("radosgw", signal.SIGKILL)

    @property
    def endpoint(self) -> str:
        address, port = self._gateway()
        return f"http://{address}:{port}"

    # --- making a cluster ---------------------------------------------------------------------------------------------

    def _refuse_other_files(self) -> None:
        """Raises: LocalS3Error: the folder has files that no start has made."""
        found = {entry.name for entry in self.folder.iterdir()} if self.folder.exists() else set()
        others = found - {*FOLDERS, *FILES, *(f"{program}.pid" for program in DAEMONS)}
        if not others and "settings.json" not in found:  # a start makes only empty folders before it
            others = {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if not path.is_dir()}
        if others:
            raise LocalS3Error(
                f"{self.folder} has files of another kind ({min(others)}); name an empty or a new folder"
            )

    def _refuse_taken_ports(self) -> None:
        """Raises: LocalS3Error: another program listens where a daemon would; it would answer in the daemon's place."""
        settings = self._settings()
        for address, port in (self._gateway(), *(("127.0.0.1", settings[name]) for name in ("mon_v1", "mon_v2"))):
            if _answers(address, port):
                raise LocalS3Error(
                    f"another program listens on port {port} of {address}, which this store's "
                    "daemons had; stop that program (`ss -ltnp` names it)"
                )

    def _make(self) -> None:
        for name in FOLDERS:
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o700)
        ports = dict(zip(("port", "mon_v1", "mon_v2"), free_ports(3), strict=True))
        block_bytes = max(10 << 30, shutil.disk_usage(self.folder).free // 2)  # a sparse file: it takes the used space
        settings = {"fsid": str(uuid.uuid4()), "osd": str(uuid.uuid4()), "address": self._new_address, **ports}
        (self.folder / "settings.json").write_text(json.dumps(settings))
        self.configuration.write_text(CONFIGURATION.format(folder=self.folder, block_bytes=block_bytes, **settings))
        address = f"[v2:127.0.0.1:{ports['mon_v2']},v1:127.0.0.1:{ports['mon_v1']}]"
        monitors = str(self.folder / "monmap")
        run("monmaptool", "--create", "--addv", "a", address, "--fsid", settings["fsid"], monitors)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors)

    def _add_osd(self) -> None:
        osd = self._settings()["osd"]
        self._run("ceph", "osd", "new", osd)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._run("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default")

    def _new_keys(self) -> tuple[str, str]:
        """New access and secret key. radosgw-admin draws them, because other accounts can read its arguments."""
        made = ("--gen-access-key", "--gen-secret")
        try:
            known = json.loads(self._run("radosgw-admin", "user", "info", "--uid", USER))["keys"]
        except LocalS3Error:
            user = self._run("radosgw-admin", "user", "create", "--uid", USER, "--display-name", USER, *made)
        else:
            for old in known:
                self._run("radosgw-admin", "key", "rm", "--uid", USER, "--access-key", old["access_key"])
            user = self._run("radosgw-admin", "key", "create", "--uid", USER, "--key-type", "s3", *made)
        (keys,) = json.loads(user)["keys"]
        return keys["access_key"], keys["secret_key"]

    def _make_bucket(self, access_key: str, secret_key: str) -> None:
        from botocore.session import Session  # s3fs brings it

        client = Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            region_name=REGION,
        )
        client.create_bucket(Bucket=BUCKET)  # repeating it is no error
        client.put_object(Bucket=BUCKET, Key=".first", Body=b"")  # creates the gateway's pools, which takes seconds
        client.delete_object(Bucket=BUCKET, Key=".first")

    # --- daemons ------------------------------------------------------------------------------------------------------

    def _start_daemon(self, program: str, *arguments: str) -> subprocess.Popen:
        """Starts a daemon in its own session, which Ctrl-C in the terminal does not reach. Writes its pid to a file."""
        with open(self.folder / "log" / f"{program}.out", "ab") as output:
            process = subprocess.Popen(
                [program, "--foreground", "--conf", str(self.configuration), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pid_file(program).write_text(str(process.pid))
        return process

    def _stop_daemon(self, program: str, number: int) -> None:
        pid = self._running(program)
        if pid is None:
            return
        os.kill(pid, number)
        deadline = time.monotonic() + 20
        while self._running(program):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def _running(self, program: str) -> int | None:
        """The daemon's pid, if that process is still the same program with this configuration; else None."""
        try:
            pid = int(self._pid_file(program).read_text())
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # a child of this process that has ended would stay as a zombie
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, ValueError):  # ValueError: the disk was full
            return None
        return pid if Path(command[0].decode()).name == program and bytes(self.configuration) in command else None

    def _pid_file(self, program: str) -> Path:
        return self.folder / f"{program}.pid"

    def _gateway(self) -> tuple[str, int]:
        settings = self._settings()
        return settings.get("address", "127.0.0.1"), settings["port"]  # without an address: of an older version

    def _settings(self) -> dict:
        return json.loads((self.folder / "settings.json").read_text())

    def _run(self, program: str, *arguments: str) -> str:
        return run(program, "--conf", str(self.configuration), *arguments)


def _answers(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


def run(program: str, *arguments: str) -> str:
    command = [program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise LocalS3Error(f"{program} did not end in {START_TIMEOUT_S} s") from error
    if done.returncode:
        raise LocalS3Error(f"{program} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout


def install() -> None:
    """Installs missing packages. Raises: LocalS3Error: they cannot be installed."""
    if all(shutil.which(program) for program in PROGRAMS):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise LocalS3Error(
            f"Ceph is not installed; as root: apt-get install --no-install-recommends {' '.join(PACKAGES)}"
        )
    quiet = {"stdout": subprocess.DEVNULL, "env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}}
    update = ["apt-get", "update", "-qq"]
    subprocess.run(update, **quiet)  # if this fails, an old index may suffice
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    if subprocess.run(install, **quiet).returncode:
        raise LocalS3Error(f"apt-get cannot install {' '.join(PACKAGES)}")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["install", "start", "stop"])
    parser.add_argument("--folder", type=Path, default=Path(".tba/.local/s3"), help="for data, logs and sockets")
    parser.add_argument("--address", default="127.0.0.1", help="of the gateway, in a new folder")
    arguments = parser.parse_args()
    local_s3 = LocalS3(arguments.folder, arguments.address)
    try:
        if arguments.action == "install":
            install()
        elif arguments.action == "stop":
            local_s3.stop()
        else:
            for name, value in local_s3.start().items():
                print(f"export {name}={value}")
    except LocalS3Error as error:
        sys.exit(f"local S3: {error}")


if __name__ == "__main__":
    main()
