"""infra/slurm/tba.sbatch on a SLURM cluster of two nodes, each with a network and processes of its own.

- a job that is queued again saves a checkpoint first, and resumes the run from there; the run's end is the job's end
- the second node dies: the run goes on on the first one, in the same job
- the time limit comes: the run stops, and the job is queued again
- `tba verify` finds no fault, and no process has the server's string in its arguments

Run: pytest tests/hosts/test_slurm.py -m apart
"""

import contextlib
from pathlib import Path

import psutil
import pytest

from storage import attempts
from tests.hosts.cluster import RUN, Cluster, missing
from tests.hosts.network import Network

SAVING_S = 120  # SLURM kills after 30 s; of a machine that others keep busy
RARELY = 100_000  # steps between checkpoints: all there are come from an orderly end


@pytest.fixture
def cluster(tmp_path):
    if reason := missing():
        pytest.skip(reason)
    with contextlib.closing(Network(tmp_path)) as network:
        cluster = Cluster(network, tmp_path)
        cluster.start()
        yield cluster


def await_stop(cluster: Cluster) -> int:
    """Waits until the job is queued again; returns the step at which its Trainer stopped."""
    cluster.wait_for(lambda: cluster.state() == "PENDING", "the job to be queued again", SAVING_S)
    beat = cluster.beat()
    assert beat["state"] == "stopped"
    return beat["step"]


def in_arguments(text: str) -> list[str]:
    """Names of this machine's processes with the text in their arguments."""
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        if any(text in argument for argument in process.info["cmdline"] or []):
            found.append(process.info["name"])
    return found


@pytest.mark.apart
def test_a_job_that_is_queued_again_resumes(cluster: Cluster, tmp_path: Path):
    cluster.submit(train__checkpoint_interval=RARELY)
    cluster.await_steps(5, attempt=1)
    (string_file,) = tmp_path.glob("project/.tba/slurm/*/prefect_auth_string")
    assert string_file.parent.stat().st_mode & 0o077 == 0 and in_arguments(string_file.read_text().strip()) == []
    cluster.requeue()
    stopped_at = await_stop(cluster)
    cluster.await_steps(5, attempt=2)
    assert [attempt.resumed_from for attempt in attempts.list_attempts(cluster.store)] == [0, stopped_at]
    cluster.tba("stop", RUN)
    cluster.wait_for(lambda: cluster.state() == "COMPLETED", "the job to end with its run", SAVING_S)
    assert "0 faults" in cluster.tba("verify", RUN)


@pytest.mark.apart
def test_a_run_goes_on_without_a_node_and_stops_at_the_time_limit(cluster: Cluster):
    cluster.submit(train__checkpoint_interval=10)
    cluster.await_steps(15, attempt=1)
    was_on_beta = cluster.trainers_node() == "beta"
    cluster.kill("beta")
    step = cluster.beat()["step"]
    cluster.await_steps(20 if was_on_beta else step + 20, attempt=2 if was_on_beta else 1)
    assert cluster.state() == "RUNNING" and cluster.trainers_node() == "alpha"
    cluster.announce_time_limit()
    await_stop(cluster)
    cluster.cancel()
    assert "0 faults" in cluster.tba("verify", RUN)
