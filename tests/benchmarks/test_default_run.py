"""The benchmarks' measures of a run: when it learned, how far it fell back, and that it is stopped in order.

python -m pytest tests/benchmarks/test_default_run.py
"""

import sys

import pytest

from flows.compare import turns
from flows.compare.turns import run_to_its_end
from tests.benchmarks.bench_accuracy import compare
from tests.benchmarks.default_run import Sample, reached, worst_fall

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


def samples(*rewards: float, num_responses: int = 160) -> list[Sample]:
    """A sample every ten seconds."""
    return [Sample(10.0 * number, num_responses, reward) for number, reward in enumerate(rewards, 1)]


def test_the_target_is_reached_where_the_mean_of_640_responses_first_is_060():
    # 160 responses each: after two of 0.75 the newest four have 0.625, before them 0.5625
    assert reached(samples(0.5, 0.5, 0.5, 0.5, 0.75, 0.75, 0.9)) == {
        "seconds": 60.0,
        "responses": 960,
        "best": pytest.approx(0.625),
    }


def test_samples_count_whole_and_by_their_responses():
    # 400 of 0.9 and 300 of 0.3 are needed for 640 responses: (400 x 0.9 + 300 x 0.3) / 700
    uneven = [Sample(1.0, 50, 1.0), Sample(2.0, 400, 0.9), Sample(3.0, 300, 0.3)]
    assert reached(uneven) == {"seconds": 3.0, "responses": 750, "best": pytest.approx(0.642857, abs=1e-6)}


def test_fewer_than_640_responses_reach_nothing():
    assert reached(samples(1.0, 1.0, 1.0)) == {"seconds": None, "responses": 480, "best": None}


def test_a_target_that_is_not_reached_leaves_the_best_mean():
    assert reached(samples(0.5, 0.1, 0.1, 0.1, 0.1)) == {"seconds": None, "responses": 800, "best": pytest.approx(0.2)}


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
