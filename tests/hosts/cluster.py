"""A SLURM cluster on one machine: slurmctld, and nodes that are hosts (tests/hosts/network.py). Jobs run for real."""

import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from storage import attempts
from storage.store import RunStore
from tests.character_model import save_character_model
from tests.hosts.network import Network, wait_for
from tests.hosts.site import WITHOUT_VLLM, missing_namespaces

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "infra" / "slurm" / "tba.sbatch"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
RUN = "slurm"
SETTINGS = {
    "evaluate_share": 0,
    "task.num_heldout": 16,
    "sampling.prompts_per_batch": 2,
    "sampling.responses_per_prompt": 4,
    "sampling.min_size": 32,
    "search.prompts_per_round": 4,
    "search.samples_per_prompt": 8,
    "train.steps": 100_000,  # the test ends the run
}
# A job starts again after cred_expire, of which the default is two minutes. A node is down after SlurmdTimeout.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=control({control})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SlurmdTimeout=10
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Cluster:
    """Hosts `control`, `alpha` and `beta`; one job at a time, in the folder `project` that all of them see."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.control, self._network, self._folder = network.add("control"), network, folder
        self.nodes = {name: network.add(name) for name in ("alpha", "beta")}
        self._project, self._temporary = folder / "project", folder / "tmp"
        self.store = RunStore((self._project / ".tba").as_uri(), RUN)
        self.job = ""

    def start(self) -> None:
        for name in ("state", "spool-alpha", "spool-beta", "project", "tmp"):
            (self._folder / name).mkdir()
        (self._project / "sitecustomize.py").write_text(WITHOUT_VLLM)
        self._model = save_character_model(self._folder / "model", hidden_size=64, num_hidden_layers=2)
        hosts = [self.control, *self.nodes.values()]
        names = self._folder / "hosts"
        names.write_text("".join(f"{host.address} {host.name}\n" for host in hosts) + "127.0.0.1 localhost\n")
        configuration = CONFIGURATION.format(control=self.control.address, folder=self._folder)
        nodes = [f"NodeName={name} NodeAddr={node.address} CPUs=2\n" for name, node in self.nodes.items()]
        (self._folder / "slurm.conf").write_text(configuration.lstrip() + "".join(nodes))
        for host in hosts:
            host.variables = {
                "SLURM_CONF": str(self._folder / "slurm.conf"),
                "TBA_VENV": sys.prefix,
                "TMPDIR": str(self._temporary),
                "PYTHONPATH": str(REPOSITORY),
                "OMP_NUM_THREADS": "1",
            }
            host.run("mount", "--bind", str(names), "/etc/hosts")
            host.run("mount", "--bind", str(host.folder / "tmp"), str(self._temporary))  # each node has its own
        self._start_munge()
        self.control.start("slurmctld", "-D", log="slurmctld.log")
        for node in self.nodes.values():
            node.start("slurmd", "-D", log="slurmd.log")
        self.wait_for(lambda: self._slurm("sinfo", "--noheader", "--format=%T %D") == "idle 2", "two idle nodes", 30)

    def _start_munge(self) -> None:
        key = self._folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self._folder}/munge.{suffix}" for option, suffix in files.items()]
        self.control.start("munged", "--foreground", "--force", f"--key-file={key}", *options, log="munged.log")
        socket = self._folder / "munge.socket"
        self.wait_for(socket.exists, "munged", 20)

    def submit(self, **settings: object) -> None:
        """Submits the script for a run with one Searcher; its settings have `__` where a dot is."""
        changed = {name.replace("__", "."): value for name, value in settings.items()}
        pairs = [part for name, value in (SETTINGS | changed).items() for part in ("--set", f"{name}={value}")]
        options = [f"--chdir={self._project}", f"--output={self._folder}/job.log", "--parsable"]
        train = [RUN, "--model", str(self._model), "--searchers", "1", *pairs]
        self.job = self._slurm("sbatch", *options, str(SCRIPT), *train)

    def requeue(self) -> None:
        self._slurm("scontrol", "requeue", self.job)

    def announce_time_limit(self) -> None:
        """Sends the signal that SLURM sends some minutes before the job's time limit."""
        self._slurm("scancel", "--batch", "--signal=USR1", self.job)

    def cancel(self) -> None:
        self._slurm("scancel", self.job)

    def state(self) -> str:
        """The job's state: PENDING, RUNNING, COMPLETED, …"""
        return self._slurm("squeue", "--noheader", f"--jobs={self.job}", "--states=all", "--format=%T")

    def kill(self, name: str) -> None:
        self.nodes[name].kill()

    def _slurm(self, *command: str) -> str:
        return self.control.run(*command).strip()

    def tba(self, *arguments: str) -> str:
        inside = ["env", f"--chdir={self._project}", sys.executable, "-m", "flows.cli"]
        return self.control.run(*inside, *arguments)

    def beat(self) -> dict:
        """The newest heartbeat; before the first: step 0 of attempt 0."""
        return attempts.read_heartbeat(self.store) or {"attempt": 0, "step": 0, "state": "starting"}

    def trainers_node(self) -> str:
        return attempts.newest_attempt(self.store).owner.host

    def await_steps(self, number: int, attempt: int, timeout_s: float = 600) -> None:
        """Waits until this attempt has made so many steps."""

        def has_made() -> bool:
            beat = self.beat()
            if beat["attempt"] != attempt or beat["state"] != "training":
                return False
            return beat["step"] >= number + attempts.newest_attempt(self.store).resumed_from

        self.wait_for(has_made, f"step {number} of attempt {attempt}", timeout_s)

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        wait_for(condition, what, timeout_s, lambda: f"; heartbeat {self.beat()}{self._logs()}")

    def _logs(self) -> str:
        logs = [*sorted(self._folder.glob("*.log")), *sorted(self._folder.glob("*/*.log"))]
        logs += sorted(self._project.glob(".tba/slurm/*/*.log"))
        return "".join(f"\n--- {log.relative_to(self._folder)}\n{log.read_text()[-3000:]}" for log in logs)


def missing() -> str | None:
    """What this machine lacks for a cluster, in words; None: nothing."""
    lacks = [program for program in PROGRAMS if not shutil.which(program)]
    return missing_namespaces() or (f"not installed: {', '.join(lacks)}" if lacks else None)
