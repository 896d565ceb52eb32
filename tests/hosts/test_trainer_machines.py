"""A Trainer whose processes are on several machines (train.machines), each a host with a network of its own.

- ZeRO-2 on two hosts, a process each, trains with one process's losses and gradients
- a run whose Trainer has two machines goes on by itself on one of them after the other has died
- of an attempt's machines late ones are told so, a silent one is lost, and none follows a record of somebody else

Run: pytest tests/hosts/test_trainer_machines.py -m "apart or not apart"
"""

import contextlib
import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flows.config import RunConfig
from flows.trainer import meeting, ranks
from flows.trainer.meeting import Meeting
from storage import attempts, machines
from storage.errors import DamagedRecord, StoreUnreachable
from storage.machines import World
from storage.process_identity import Identity
from storage.store import RunStore
from tests.hosts.network import Host, Network
from tests.hosts.site import REPOSITORY, RUN, Site, missing_namespaces
from tests.tba.addition import tiny_llama
from tests.tba.run_zero_trainer import run
from tests.tba.test_zero_trainer import SETTINGS, assert_same_curve

FOLLOW = """
import json, sys
from pathlib import Path
from flows.config import RunConfig
from flows.trainer.ranks import follow
from storage.store import RunStore

url, model, settings = sys.argv[1:]
config = RunConfig(run="run", store=url, train=json.loads(settings))
print(follow(RunStore(url, "run"), config, lambda: Path(model), 1, "key"))
"""


@pytest.fixture
def beating(local_store):
    """A run whose first attempt has a Trainer with a heartbeat."""
    attempts.start_attempt(local_store, 0, Identity.current())
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.5):
            attempts.write_heartbeat(local_store, {"attempt": 1, "state": "training", "time": time.time()})

    attempts.write_heartbeat(local_store, {"attempt": 1, "state": "starting"})
    thread = threading.Thread(target=beat)
    thread.start()
    yield local_store
    over.set()
    thread.join()


@pytest.mark.apart
def test_two_hosts_train_as_one_process(tmp_path, beating: RunStore):
    if reason := missing_namespaces():
        pytest.skip(reason)
    model = tiny_llama(tmp_path / "model")
    alone = run(str(model), SETTINGS, save=str(tmp_path / "alone"), load=[])
    settings = SETTINGS | {"machines": 2, "zero_stage": 2}
    with contextlib.closing(Network(tmp_path)) as network:
        first, further = network.add("first"), network.add("further")
        for host in (first, further):
            host.variables = {"PREFECT_API_URL": f"http://{first.address}:4200/api", "PYTHONPATH": str(REPOSITORY)}
            host.variables |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        told = {"model": str(model), "settings": settings, "save": str(tmp_path / "half"), "load": []}
        told |= {"meeting": [beating.url, beating.run]}
        given = json.dumps(SETTINGS | {"machines": 2, "steps": 20})
        following = further.start(sys.executable, "-c", FOLLOW, beating.url, str(model), given, log="follow.log")
        printed = first.run(sys.executable, "-m", "tests.tba.run_zero_trainer", json.dumps(told), timeout_s=400)
        assert following.wait(60) == 0, (further.folder / "follow.log").read_text()[-3000:]
    together = json.loads(printed.splitlines()[-1])
    assert together["published"] == alone["published"]
    assert_same_curve(together["curves"][0], alone["curves"][0])
    world = machines.read_world(beating, 1, "key")
    assert (world.address, world.machines) == (first.address, [1])


def processes_on(host: Host) -> int:
    return host.run("ps", "-e", "-o", "args").count("-m flows.trainer.ranks")


@pytest.mark.apart
def test_the_trainer_goes_on_without_a_machine_that_died(site: Site):
    alpha = site.worker("alpha", limit=1)  # room for the flow and the Trainer's first process
    site.deploy_and_run(alpha, machines=2)
    site.wait_for(lambda: bool(site.seen()), "the Trainer on alpha")
    beta = site.worker("beta", limit=1)  # room for the further machine, which was submitted before the Searcher
    site.wait_for(lambda: processes_on(beta) == 1, "the Trainer's process on beta")
    site.worker("gamma", limit=1)
    site.await_attempt(1)
    site.await_steps(13)  # past a checkpoint

    beta.kill()
    died_at = time.time()
    resumed = site.await_attempt(2)
    assert resumed["host"] == "alpha"
    print(f"\na machine of the Trainer died: the first step without it came {resumed['time'] - died_at:.1f} s later")
    site.await_steps(5)
    site.tba(alpha, "stop", RUN)
    assert "0 faults" in site.tba(alpha, "verify", RUN)


def follow(store: RunStore, key: str = "key") -> bool:
    config = RunConfig(run=store.run, store=store.url)
    return ranks.follow(store, config, lambda: Path("no model is needed"), 1, key)


def test_nobody_with_write_access_to_the_store_sends_a_machine_elsewhere(beating: RunStore):
    """What its processes get from there is unpickled."""
    machines.form_world(beating, 1, World("10.77.0.9", 1, [1]), "another key")
    with pytest.raises(DamagedRecord, match=r"world\.json .* was not written by the attempt's Trainer"):
        follow(beating)


def join(store: RunStore, attempt: int, *, has_model: bool = True, has_gpus: bool = False, **owner) -> machines.Machine:
    """Joins from a place that differs from this one in `owner`."""
    machine = machines.join(store, attempt, processes=2, has_gpus=has_gpus)
    machine = replace(machine, owner=replace(machine.owner, **owner))
    store.put_json(machine.path, machine)
    if has_model:
        machines.tell_ready(store, machine)
    return machine


@pytest.fixture
def network_address(monkeypatch):
    monkeypatch.setattr(meeting, "JOIN_S", 0.5)
    monkeypatch.setattr(meeting, "own_address", lambda: "10.77.0.9")
    monkeypatch.setattr(meeting, "free_port", lambda address: 1)


def test_the_trainer_begins_with_the_machines_that_came_in_time(local_store, network_address):
    """Each once: two flow runs on one machine, or one beside the Trainer, would share its devices."""
    for place in ("another", "another", None, "a third", "a fourth"):
        join(local_store, 3, **({"boot_id": place} if place else {}))
    world = Meeting(local_store, 3, num_machines=3, key="key").form()
    assert world == World("10.77.0.9", 1, [1, 4])
    assert machines.read_world(local_store, 3, "key") == world
    assert machines.num_processes_here(local_store, 3) == 2
    assert machines.num_processes_here(local_store, 4) == 0


@pytest.mark.parametrize(("num_gpus", "taken"), [(0, [1]), (2, [2])])
def test_machines_with_gpus_train_with_machines_with_gpus_alone(
    local_store, network_address, monkeypatch, num_gpus, taken
):
    """Their processes would wait for each other for half an hour."""
    monkeypatch.setattr(meeting, "num_gpus", lambda: num_gpus)
    join(local_store, 1, boot_id="without")
    join(local_store, 1, boot_id="with", has_gpus=True)
    assert Meeting(local_store, 1, num_machines=3, key="key").form().machines == taken


def test_the_trainer_waits_for_a_machine_that_loads_the_model_but_not_for_one_that_died(
    local_store, network_address, monkeypatch
):
    monkeypatch.setattr(machines, "SILENT_S", 1.0)
    loading = join(local_store, 1, has_model=False, boot_id="another")

    def load() -> None:
        for _ in range(15):  # three times JOIN_S
            time.sleep(0.1)
            machines.renew(local_store, loading)
        machines.tell_ready(local_store, loading)

    thread = threading.Thread(target=load)
    thread.start()
    assert Meeting(local_store, 1, num_machines=2, key="key").form().machines == [1]
    thread.join()
    join(local_store, 2, has_model=False, boot_id="another")  # and renews nothing
    assert Meeting(local_store, 2, num_machines=2, key="key").form().machines == []


def test_an_address_that_other_machines_cannot_reach_is_refused(local_store, network_address, monkeypatch):
    monkeypatch.setattr(meeting, "own_address", lambda: "127.0.1.1")
    assert Meeting(local_store, 2, num_machines=2, key="key").form().machines == [], "alone it does not matter"
    join(local_store, 3, boot_id="another")
    with pytest.raises(RuntimeError, match=r"cannot reach 127\.0\.1\.1, .* set PREFECT_API_URL"):
        Meeting(local_store, 3, num_machines=2, key="key").form()


def test_a_late_machine_is_told_so(beating: RunStore):
    machines.form_world(beating, 1, World("127.0.0.1", 1, []), "key")
    assert not follow(beating)


@pytest.mark.parametrize("end", ["stopped", "superseded"])
def test_a_machine_does_not_wait_for_an_attempt_that_has_ended(local_store, monkeypatch, end):
    monkeypatch.setattr(machines, "SILENT_S", 0.5 if end == "stopped" else 600)
    attempts.start_attempt(local_store, 0, Identity.current())
    attempts.write_heartbeat(local_store, {"attempt": 1, "state": "stopped" if end == "stopped" else "training"})
    if end == "superseded":
        attempts.start_attempt(local_store, 0, Identity.current())
    assert not follow(local_store)


def test_a_silent_machine_is_lost(local_store, network_address, monkeypatch):
    clock = [0.0]
    machine = join(local_store, 1, boot_id="another")
    trainers = Meeting(local_store, 1, num_machines=2, key="key")
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    trainers.form()
    for clock[0] in (1.0, 19.0):
        assert not trainers.has_lost()
    machines.renew(local_store, machine)
    for clock[0] in (22.0, 41.0):
        assert not trainers.has_lost()
    with monkeypatch.context() as outage:
        outage.setattr(RunStore, "get", away)
        clock[0] = 100.0
        assert not trainers.has_lost(), "the store is away for the other machine, too"
    for clock[0] in (101.0, 119.0):
        assert not trainers.has_lost()
    clock[0] = 122.0
    assert trainers.has_lost()


def away(*_: object):
    raise StoreUnreachable("away")
