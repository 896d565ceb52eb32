"""How a Searcher starts: its share of the machine. `start_searcher` itself is tested by whole runs."""

import pytest

from flows.config import RunConfig
from flows.searcher.start import samples_ahead
from infra import machine
from tba import precision


@pytest.mark.parametrize(
    "searchers, cores, device, ahead",
    [
        (1, 2, "cpu", False),  # one core each for the Searcher and the Trainer
        (1, 4, "cpu", True),
        (3, 4, "cpu", False),
        (1, 2, "cuda", True),  # the engine needs no core
    ],
)
def test_the_next_round_is_sampled_ahead_unless_engine_and_scoring_share_a_core(
    monkeypatch, searchers, cores, device, ahead
):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(precision, "default_device", lambda: device)
    assert samples_ahead(RunConfig(searchers=searchers)) is ahead


def test_a_synchronous_run_samples_no_round_ahead(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: range(64))
    assert not samples_ahead(RunConfig(synchronous=True, searchers=1))
