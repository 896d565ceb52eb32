"""The end of a Trainer of several processes (flows/trainer/ranks.py), with stand-ins for the other processes.

- one whose other process died ends, because it might wait for that one for ever
- unless it is ending itself, by the same failure: then it has its reason to tell first

Run: pytest tests/flows/trainer/test_ranks.py
"""

import threading
from types import SimpleNamespace

import pytest

from flows.trainer import ranks


@pytest.mark.parametrize("is_ending", [True, False])
def test_a_process_that_ends_by_itself_is_not_cut_off(monkeypatch, is_ending):
    closing, cut_off = threading.Event(), threading.Event()
    monkeypatch.setattr(ranks.os, "_exit", lambda _: cut_off.set())
    monkeypatch.setattr(ranks, "OWN_END_S", 60.0 if is_ending else 0.1)
    dead = SimpleNamespace(poll=lambda: 1)
    watcher = threading.Thread(target=ranks._end_without, args=([dead], None, threading.Event(), closing), daemon=True)
    watcher.start()
    assert cut_off.wait(2 if is_ending else 60) != is_ending
    closing.set()
    watcher.join(60)
    assert cut_off.is_set() != is_ending
