"""A run on several hosts, each with a network and processes of its own: what a dead, a cut-off and a slow host cost.

- a slow link and a partition of the Searchers' host cost time, and no restart
- the Trainer's host dies: the run goes on by itself on another host
- a host with the Trainer and Searchers is cut off: another one takes the run over, and the first one ends its flow when
  it is back
- meanwhile no name has two owners; `tba verify` finds no fault

Run: pytest tests/hosts -m apart
"""

import time

import pytest

from tests.hosts.network import Host
from tests.hosts.site import RUN, Site

PARTITION_S = 30.0
SLOW_MBIT_S = 10


def trains(host: Host) -> bool:
    return "flows.trainer" in host.run("ps", "-e", "-o", "args")


@pytest.mark.apart
def test_a_run_survives_its_hosts(site: Site):
    alpha = site.worker("alpha", limit=1)  # room for the flow and its Trainer
    site.deploy_and_run(alpha)
    site.wait_for(lambda: bool(site.seen()), "the Trainer on alpha")
    beta = site.worker("beta", limit=2)  # room for the Searcher, and for the flow later
    site.await_attempt(1)

    site.network.limit(beta, SLOW_MBIT_S)
    site.await_steps(6)
    site.network.limit(beta, None)
    site.network.connect(beta, is_on=False)
    time.sleep(PARTITION_S)
    site.network.connect(beta, is_on=True)
    site.await_round("s0")
    assert site.seen()[-1]["attempt"] == 1
    site.await_steps(13)  # past a checkpoint

    died_at = time.time()
    alpha.kill()
    resumed = site.await_attempt(2)
    assert resumed["host"] == "beta"
    print(f"\nthe Trainer's host died: the first step on another one came {resumed['time'] - died_at:.1f} s later")

    gamma = site.worker("gamma", limit=2)
    site.tba(gamma, "searchers", RUN, "+1")
    site.await_round("s1")
    cut_at = time.time()
    site.network.connect(beta, is_on=False)
    resumed = site.await_attempt(3)
    assert resumed["host"] == "gamma" and trains(beta)
    print(f"it was cut off: the first step on another one came {resumed['time'] - cut_at:.1f} s later")
    site.network.connect(beta, is_on=True)
    site.wait_for(lambda: not trains(beta), "the superseded flow to end")
    for searcher in ("s0", "s1"):
        site.await_round(searcher)
    assert site.seen()[-1]["attempt"] == 3

    site.tba(gamma, "stop", RUN)
    assert "0 faults" in site.tba(gamma, "verify", RUN)
    assert not any(seen["twice"] for seen in site.seen()), "a process renewed a lease that it had lost"
