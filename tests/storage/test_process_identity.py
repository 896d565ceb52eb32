"""Who a Trainer is (storage/process_identity.py). Run: pytest tests/storage/test_process_identity.py

- a process of this machine and namespace runs or has ended; of another boot, namespace or name that cannot be known
- a heartbeat that changes is a living Trainer, on a clone or in a pod with this machine's name, too
- also a slow one: each change may take as long as the watch
- the record of an older version has a host's name only, which decides nothing
- without a boot id (not Linux) a process is recognised, but its absence proves nothing
"""

import json
import threading
import time
from dataclasses import asdict, replace

import pytest

from storage import attempts, process_identity
from storage.process_identity import Identity
from tests.storage.helpers import start_python

ELSEWHERE = [{"boot_id": "another"}, {"pid_namespace": 1}, {"host": "elsewhere"}]
OLDER = {"boot_id": None, "pid_namespace": None}


def is_alive(store, watch_s: float) -> bool:
    return attempts.is_alive(store, attempts.newest_attempt(store), watch_s)


def ended() -> Identity:
    return replace(Identity.current(), started=0.0)


def beat_on(store, times: int, every_s: float) -> list[threading.Timer]:
    beats = [threading.Timer(every_s * n, attempts.write_heartbeat, (store, {"step": n})) for n in range(1, times + 1)]
    for beat in beats:
        beat.start()
    return beats


def test_here_it_is_known_and_elsewhere_it_is_not():
    assert Identity.current().is_running() is True
    assert ended().is_running() is False
    for change in [*ELSEWHERE, OLDER]:
        for process in (Identity.current(), ended()):
            assert replace(process, **change).is_running() is None


@pytest.mark.slow
@pytest.mark.parametrize("change", [*ELSEWHERE, OLDER])
def test_a_clone_with_this_name_is_alive_while_its_heartbeat_changes(local_store, change):
    """Its process is not found here: on the clone it is."""
    attempts.start_attempt(local_store, 0, replace(ended(), **change))
    attempts.write_heartbeat(local_store, {"step": 0})
    assert not is_alive(local_store, watch_s=0.5), "its heartbeat does not change"
    beats = beat_on(local_store, 3, every_s=0.6)
    assert is_alive(local_store, watch_s=1.0)
    for beat in beats:
        beat.join()


def test_a_process_here_with_a_clones_pid_is_not_its_trainer(local_store):
    attempts.start_attempt(local_store, 0, replace(Identity.current(), boot_id="another"))
    assert not is_alive(local_store, watch_s=0.5)


def test_a_dead_one_here_is_not_waited_for(local_store):
    attempts.start_attempt(local_store, 0, ended())
    began = time.monotonic()
    assert not is_alive(local_store, watch_s=60) and time.monotonic() - began < 5


def test_an_attempt_of_an_older_version_is_read(local_store):
    record = {"attempt": 1, "resumed_from": 0, "created_at": "2026-11-21T12:00:00+00:00"}
    owner = {"host": "here", "pid": 7, "started": 1.0}
    local_store.put("trainer/attempt=00000001.json", json.dumps(record | {"owner": owner}).encode())
    (found,) = attempts.list_attempts(local_store)
    assert asdict(found) == record | {"owner": owner | OLDER, "checkpoint": None, "processes": 1}


def test_without_a_boot_id_absence_proves_nothing(monkeypatch):
    monkeypatch.setattr(process_identity, "_boot_id", lambda: None)
    monkeypatch.setattr(process_identity, "_pid_namespace", lambda: None)
    assert Identity.current().is_running() is True
    assert ended().is_running() is None


def test_two_processes_of_one_machine_tell_the_same_of_it():
    other = start_python(
        "import json; from dataclasses import asdict; from storage.process_identity import Identity; "
        "print(json.dumps(asdict(Identity.current()))); input()"
    )
    try:
        told = json.loads(other.stdout.readline())
        assert {key: told[key] for key in ("host", *OLDER)} == {
            key: getattr(Identity.current(), key) for key in ("host", *OLDER)
        }
    finally:
        other.kill()
        other.communicate()


@pytest.mark.parametrize(("beats_on", "is_silent"), [(True, False), (False, True)])
def test_a_process_that_was_frozen_looks_twice(beats_on, is_silent, monkeypatch):
    """After Ctrl-Z and fg the other process, which was frozen too, has had no time for a heartbeat yet."""
    now, beat = 0.0, b"1"

    def sleep(seconds: float) -> None:
        nonlocal now, beat
        now, beat = now + seconds, b"2" if beats_on else beat

    monkeypatch.setattr(process_identity.time, "monotonic", lambda: now)
    monkeypatch.setattr(process_identity.time, "sleep", sleep)
    pulse = process_identity.Pulse(lambda: beat)
    assert not pulse.is_silent(180)
    now = 600.0  # frozen
    assert pulse.is_silent(180) == is_silent
