"""A comparison: the lag is what was asked, intervals are right, what is written says what came out.

- Each step trains on the samples of the policy that is as many steps old as its arm says; the ledger's batches show it.
- Every arm sees the same number of samples; a run that is there is not repeated, one that was interrupted begins anew.
- What has run with other settings is not taken for a run of these; results name the code that sampled them.
- Of the step sizes tried, each arm gets the one that was best for it.
- Of runs in both modes, the time to equal accuracy is that to the highest which all came to.
- Interrupted, it ends when the `tba train` that it started has stopped its run.
- Confidence intervals and losses by seed are worked out; the table and the plot have every arm.

python -m pytest tests/flows/test_compare.py
"""

import json
import math
import sys
import time

import numpy as np
import pytest
from scipy import stats

from flows import compare, comparisons
from flows.compare import Arm, Outcome, confidence_interval, run_arm, summarise_arms
from flows.machine import code_version
from storage.errors import RunConfigMismatch
from storage.inspect import query
from storage.ledger import first_attempt_at, start_attempt
from storage.store import RunStore
from tests.character_model import save_character_model
from tests.storage.buffer_runs import commit
from tests.storage.helpers import NOON, OWNER, start_python

STEPS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_character_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("lag", [0, 2])
def test_the_lag_is_what_was_asked(tmp_path, model, lag):
    base = comparisons.comparison_config(tmp_path.as_uri(), "tiny", STEPS)
    arm = Arm(f"rloo-lag{lag}", lag, {"objective": "prox_rloo"})
    outcome = run_arm(arm, base, model, seed=3, num_heldout=4)
    store = RunStore(tmp_path.as_uri(), f"rloo-lag{lag}-seed3")
    ages = query(
        store, "SELECT step, min(staleness) AS least, max(staleness) AS most FROM batches GROUP BY step ORDER BY step"
    )
    expected = [min(step - 1, lag) for step in range(1, STEPS + 1)]
    assert ages["least"].to_pylist() == ages["most"].to_pylist() == expected
    assert outcome.staleness_mean == pytest.approx(sum(expected[2:]) / 3) and outcome.staleness_max == lag
    assert outcome.num_trajectories == STEPS * 32 * 8 and len(outcome.curve) == STEPS
    # a trajectory is trained on once, by the step behind its round
    times = query(store, "SELECT count(*) AS n, count(DISTINCT trajectory_id) AS d FROM batches").to_pylist()
    assert times == [{"n": STEPS * 256, "d": STEPS * 256}]
    assert run_arm(arm, base, model, seed=3, num_heldout=4) == outcome  # from the store
    with pytest.raises(RunConfigMismatch, match="learning_rate"):
        run_arm(Arm(arm.name, lag, arm.settings | {"learning_rate": 0.5}), base, model, seed=3, num_heldout=4)
    assert comparisons.results_about([store])["commit"] == code_version()
    store.delete("outcome.json")
    again = run_arm(arm, base, model, seed=3, num_heldout=4)
    assert (again.curve, again.accuracy_after) == (outcome.curve, outcome.accuracy_after)


def test_intervals_are_students():
    # 0.5, 0.6, 0.7: sd 0.1; t of 2 degrees of freedom 4.303; 4.303 * 0.1 / sqrt(3) = 0.24843
    assert confidence_interval([0.5, 0.6, 0.7]) == (pytest.approx(0.6), pytest.approx(0.24843, abs=1e-5))
    for number in (*range(2, 31), 40):
        values = np.linspace(0, 1, number)
        exact = stats.t.ppf(0.975, number - 1) * stats.sem(values)
        assert exact < 1.0005 * confidence_interval(list(values))[1] < (1.001 if number <= 30 else 1.02) * exact
    mean, half_width = confidence_interval([0.5])
    assert mean == 0.5 and math.isnan(half_width)


def outcomes() -> list[Outcome]:
    accuracies = {("tb", 1): (0.8, 0.9), ("tb", 4): (0.8, 0.8), ("tb", 16): (0.7, 0.6)}
    accuracies |= {("rloo", 1): (0.9, 0.9), ("rloo", 4): (0.5, 0.7), ("rloo", 16): (0.1, 0.3)}
    return [
        Outcome(f"{objective}-lag{lag}", seed, 0.2, accuracy, float(lag), lag, 640, 1.0, [0.2])
        for (objective, lag), of_seeds in accuracies.items()
        for seed, accuracy in enumerate(of_seeds)
    ]


def test_what_is_written_says_what_came_out(tmp_path):
    assert comparisons.loss_by_seed("tb", outcomes()) == pytest.approx([0.1, 0.3])
    summary = summarise_arms(outcomes())[0]
    # 0.8 and 0.9: t of 1 degree 12.706, times 0.0707 / sqrt(2)
    assert (summary.arm, summary.accuracy_mean) == ("tb-lag1", pytest.approx(0.85))
    assert summary.half_width == pytest.approx(12.706 * 0.05, rel=1e-4)
    table = comparisons.write_results("staleness", tmp_path, outcomes(), {"task": "addition", "date": "2026-01-02"})
    text = table.read_text()
    assert table.name == "staleness_cpu_2026-01-02.md"
    assert "| tb | 1 | 1.00, 1 | 0.850 ± 0.635 | 0.800, 0.900 |" in text
    assert "| rloo | 16 | 16.00, 16 | 0.200 ± 1.271 | 0.100, 0.300 |" in text
    assert "| tb | 0.200 ± 1.271 |" in text and "| rloo | 0.700 ± 1.271 |" in text
    assert table.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(table.with_suffix(".json").read_text())["runs"]) == 12


def test_each_arm_gets_the_step_size_that_is_best_for_it(monkeypatch):
    best = {"tb-lag1": 1e-4, "tb-lag16": 1e-5}

    def run(arm, base, model, seed, num_heldout):
        rate = arm.settings["learning_rate"]
        (of,) = [name for name in best if arm.name == f"tune-{name}-{rate:g}"]
        assert seed == 1000 and arm.settings["beta"] == 0.05
        return Outcome(arm.name, seed, 0.1, 0.9 if rate == best[of] else 0.5, arm.lag, arm.lag, 1, 1.0)

    monkeypatch.setattr(compare, "run_arm", run)
    arms = [Arm("tb-lag1", 1, {"beta": 0.05}), Arm("tb-lag16", 16, {"beta": 0.05})]
    tuned = compare.tune(arms, [1e-4, 1.5e-5, 1e-5], None, None, 4, print)
    assert [(arm.name, arm.lag, arm.settings) for arm in tuned] == [
        ("tb-lag1", 1, {"beta": 0.05, "learning_rate": 1e-4}),
        ("tb-lag16", 16, {"beta": 0.05, "learning_rate": 1e-5}),
    ]


# In the place of Python: `tba train`, which takes a moment to stop its run.
STAND_IN_TRAIN = """#!{python}
import signal, time
from pathlib import Path

def stop(*_):
    time.sleep(1)
    Path("stopped").touch()
    raise SystemExit(130)

signal.signal(signal.SIGTERM, stop)
Path("training").touch()
time.sleep(60)
"""
COMPARE = """
import os, sys
from flows import cli
os.chdir(sys.argv[1])
sys.executable = os.path.abspath("train")
sys.argv = ["tba", "compare", "sync"]
cli.main()
"""


def test_interrupted_it_lets_its_run_stop_in_order(tmp_path):
    """By its pid, as `timeout` does: Ctrl-C in a terminal is the same to it."""
    train = tmp_path / "train"
    train.write_text(STAND_IN_TRAIN.format(python=sys.executable))
    train.chmod(0o700)
    command = start_python(COMPARE, str(tmp_path))
    deadline = time.monotonic() + 120
    while not (tmp_path / "training").exists():
        assert command.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    command.terminate()
    assert command.wait(60) == 130
    assert (tmp_path / "stopped").exists()


def test_equal_accuracy_is_what_all_runs_came_to():
    curves = [[(10.0, 0.2), (20.0, 0.6), (30.0, 0.5)], [(5.0, 0.1), (50.0, 0.4)]]
    assert comparisons.common_accuracy(curves) == 0.4


def test_sampled_accuracy_is_the_mean_of_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(comparisons, "WINDOW", 4)
    store = RunStore(tmp_path.as_uri(), "run")
    start_attempt(store, 0, OWNER)
    with pytest.raises(ValueError, match="fewer than 4 trajectories"):
        comparisons.sampled_accuracy(store)
    rewards = [0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    commit(store, "s0", 0, [("a", [place, 1], reward) for place, reward in enumerate(rewards)])
    curve = comparisons.sampled_accuracy(store)
    assert [accuracy for _, accuracy in curve] == [0.25, 0.5, 0.75]
    assert {seconds for seconds, _ in curve} == {(NOON - first_attempt_at(store)).total_seconds()}
