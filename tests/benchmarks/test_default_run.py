"""The benchmarks' measures of a run: when it learned, how far it fell back, and that it is stopped in order.

python -m pytest tests/benchmarks/test_default_run.py
"""

import sys

import pytest

from flows.compare import turns
from flows.compare.turns import run_to_its_end
from tests.benchmarks.bench_accuracy import compare
from tests.benchmarks.default_run import reached, worst_fall

# A run that takes until it is told to end, and then says so.
PATIENT = """
import signal, sys, time
from pathlib import Path
def end(*_):
    print("stopped", flush=True)
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
Path(sys.argv[1]).touch()
time.sleep(60)
"""


def test_the_target_is_reached_where_the_mean_of_ten_steps_first_is_060():
    # Ten steps of 0.5, then of 0.75: after four of these the mean is 0.6, not counting any mean of fewer than ten.
    curve = [(10.0 * step, 0.5 if step <= 10 else 0.75) for step in range(1, 21)]
    assert reached(curve) == {"seconds": 140.0, "step": 14, "best": pytest.approx(0.6)}


def test_fewer_than_ten_steps_reach_nothing():
    assert reached([(float(step), 1.0) for step in range(9)]) == {"seconds": None, "step": 9, "best": None}


def test_a_target_that_is_not_reached_leaves_the_best_mean():
    # 0.5, then ten of 0.1: the best mean of ten is the first, (0.5 + 9 x 0.1) / 10
    assert reached([(0.0, 0.5)] + [(1.0, 0.1)] * 10) == {"seconds": None, "step": 11, "best": pytest.approx(0.14)}


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(turns, "POLL_S", 0.05)


@pytest.mark.parametrize(
    ("rewards", "fall"),
    [
        # means of three rounds: 0.6, 0.5, 0.4, 0.5; from 0.6 to 0.4
        ([0.6, 0.6, 0.6, 0.3, 0.3, 0.9], 0.2),
        # 0.6, 0.4, 0.7, 0.6: the deepest fall is the first, though a later best is higher
        ([0.6, 0.6, 0.6, 0.0, 1.5, 0.3], 0.2),
        # 0.5, 0.2: it falls, but before it has passed 0.55
        ([0.5, 0.5, 0.5, 0.0, 0.1], 0.0),
        # one round of 0.9 is no mean of three
        ([0.9, 0.0], 0.0),
        ([], 0.0),
    ],
)
def test_the_worst_fall_is_below_the_best_mean_of_three_rounds_so_far(rewards, fall):
    assert worst_fall(rewards) == pytest.approx(fall)


def test_a_run_that_never_reached_the_target_counts_as_the_slowest():
    assert compare([50.0, None, 70.0], 350.0) == {
        "ours_seconds": [50.0, None, 70.0],
        "ours_median_seconds": 70.0,
        "trl_seconds": 350.0,
        "ratio_vs_trl": 5.0,
    }
    assert compare([50.0, None, None], 350.0)["ratio_vs_trl"] is None


def test_a_run_is_told_to_stop_once_it_has_trained_enough(tmp_path, often):
    began = tmp_path / "began"
    assert run_to_its_end([sys.executable, "-c", PATIENT, str(began)], began.exists) == (130, "stopped\n")


def test_an_error_while_looking_at_a_run_stops_it(tmp_path, often):
    began = tmp_path / "began"

    def look() -> bool:
        if began.exists():
            raise KeyboardInterrupt
        return False

    script = PATIENT.replace('print("stopped", flush=True)', 'Path(sys.argv[1]).write_text("stopped")')
    with pytest.raises(KeyboardInterrupt):
        run_to_its_end([sys.executable, "-c", script, str(began)], look)
    assert began.read_text() == "stopped"
