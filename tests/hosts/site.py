"""A site of hosts: Prefect's server with PostgreSQL, S3, hosts that run flows; and a run of a small policy there."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from infra import local_s3
from tests import postgres
from tests.character_model import save_character_model
from tests.hosts.network import Host, Network, wait_for

REPOSITORY = Path(__file__).parents[2]
POSTGRES_PORT = 5432
RUN = "hosts"
WITHOUT_VLLM = "import sys\n\nsys.modules['vllm'] = None\n"  # it starts in 40 s, and transformers' generate in 3
SETTINGS = {
    "run": RUN,
    "searchers": 1,
    "evaluate_share": 0,
    "task": {"num_heldout": 16},
    "sampling": {"prompts_per_batch": 2, "responses_per_prompt": 4, "min_size": 32},
    "search": {"prompts_per_round": 4, "samples_per_prompt": 8},
    "train": {"steps": 100_000, "checkpoint_interval": 10},  # the test ends the run
}


class Site:
    """The hosts `server` and `s3`, and one run in the store there; `worker` adds hosts."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self._folder = network, folder
        self._model = save_character_model(folder / "model", hidden_size=64, num_hidden_layers=2)
        self._server, self._s3 = network.add("server"), network.add("s3")
        self._database = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))  # whose parents PostgreSQL's account sees

    def start(self) -> None:
        string = secrets.token_urlsafe(16)
        url = f"http://{self._server.address}:4200/api"
        self.variables = {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": string, "DO_NOT_TRACK": "1"}
        self.variables |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "OMP_NUM_THREADS": "1"}
        self.variables |= self._start_s3()
        self.store = self.variables.pop("S3_URL")
        self._start_server(string)
        self._observed = self._s3.folder / "observed.log"
        self._s3.variables = self.variables | {"PYTHONPATH": str(REPOSITORY)}
        self._s3.start(sys.executable, "-m", "tests.hosts.observer", self.store, RUN, log=self._observed.name)

    def _start_s3(self) -> dict[str, str]:
        program = str(REPOSITORY / "infra" / "local_s3.py")
        printed = self._s3.run(sys.executable, program, "start", "--folder", "data", "--address", self._s3.address)
        lines = [line.removeprefix("export ") for line in printed.splitlines()]
        return dict(line.split("=", 1) for line in lines)

    def _start_server(self, string: str) -> None:
        for command in postgres.start_commands(self._database, POSTGRES_PORT):
            self._server.run(*command)
        self._server.variables = self.variables | {
            "PREFECT_API_DATABASE_CONNECTION_URL": postgres.url(POSTGRES_PORT),
            "PREFECT_SERVER_API_AUTH_STRING": string,
        }
        self._server.start(
            sys.executable, "-m", "prefect", "server", "start", "--host", "0.0.0.0", "--port", "4200", log="server.log"
        )
        health = f"import urllib.request as r; r.urlopen('{self.variables['PREFECT_API_URL']}/health', timeout=2)"
        self.wait_for(lambda: answers(self._server, health), "Prefect's server to answer")
        self._server.run(sys.executable, "-m", "prefect", "work-pool", "create", "tba", "--type", "process")

    def worker(self, name: str, limit: int) -> Host:
        """A host whose worker runs up to `limit` flows at a time, started by the commands of docs/operating.md."""
        host = self.network.add(name)
        host.variables = self.variables | {"PYTHONPATH": str(host.folder / "work"), "PREFECT_WORKER_QUERY_SECONDS": "1"}
        (host.folder / "work" / "sitecustomize.py").write_text(WITHOUT_VLLM)
        command = ["worker", "start", "--pool", "tba", "--limit", str(limit)]
        host.start(sys.executable, "-m", "prefect", *command, log="worker.log")
        return host

    def deploy_and_run(self, host: Host, **train: int) -> None:
        """`train`: settings of the Trainer that differ from SETTINGS."""
        file = str(REPOSITORY / "prefect.yaml")
        host.run(sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", file)
        config = SETTINGS | {"store": self.store, "model": str(self._model), "train": SETTINGS["train"] | train}
        parameter = f"config={json.dumps(config)}"
        host.run(sys.executable, "-m", "prefect", "deployment", "run", "tba/train", "--param", parameter)

    def tba(self, host: Host, *arguments: str) -> str:
        return host.run(sys.executable, "-m", "flows.cli", *arguments, "--store", self.store)

    def sql(self, host: Host, query: str) -> list[dict]:
        return json.loads(self.tba(host, "sql", RUN, query, "--format", "json"))

    def seen(self) -> list[dict]:
        """What the observer saw of the run's Trainers, in order."""
        lines = self._observed.read_text().splitlines() if self._observed.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def step(self) -> int:
        seen = self.seen()
        return seen[-1]["step"] if seen else 0

    def await_steps(self, number: int) -> None:
        """Waits until the Trainer has made so many further steps."""
        first = self.step()
        self.wait_for(lambda: self.step() >= first + number, f"step {first + number}")

    def await_round(self, searcher: str) -> None:
        """Waits until the Searcher has committed another round."""
        before = self.seen()[-1]["rounds"][searcher]
        another = f"another round of {searcher}"
        self.wait_for(lambda: self.seen()[-1]["rounds"][searcher] > before, another)

    def await_attempt(self, attempt: int) -> dict:
        """Waits until this attempt trains. Returns the first heartbeat after its first step."""

        def steps() -> list[int]:
            return [seen["step"] for seen in self.seen() if seen["attempt"] == attempt and seen["state"] == "training"]

        self.wait_for(lambda: steps() and steps()[-1] > steps()[0], f"attempt {attempt} to train")
        of_attempt = [seen for seen in self.seen() if seen["attempt"] == attempt and seen["state"] == "training"]
        return next(seen for seen in of_attempt if seen["step"] > of_attempt[0]["step"])

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, what, explain=lambda: f"; saw {self.seen()[-3:]}{self._logs()}")

    def _logs(self) -> str:
        logs = sorted(self._folder.glob("*/*.log"))
        return "".join(f"\n--- {log.parent.name}/{log.name}\n{log.read_text()[-3000:]}" for log in logs)

    def close(self) -> None:
        shutil.rmtree(self._database, ignore_errors=True)


def answers(host: Host, program: str) -> bool:
    try:
        host.run(sys.executable, "-c", program)
    except RuntimeError:
        return False
    return True


def missing() -> str | None:
    """What this machine lacks for a site, in words; None: nothing."""
    if reason := missing_namespaces():
        return reason
    if reason := postgres.missing():
        return reason
    try:
        local_s3.install()
    except local_s3.LocalS3Error as error:
        return f"no radosgw: {error}"
    return None


def missing_namespaces() -> str | None:
    """What this machine lacks for hosts, in words; None: nothing."""
    if os.geteuid():
        return "namespaces need root"
    if lacks := [each for each in ("unshare", "nsenter", "ip", "tc", "runuser") if not shutil.which(each)]:
        return f"not installed: {', '.join(lacks)}"
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"this machine makes no namespaces: {tried.stderr.strip()}"
    return None
