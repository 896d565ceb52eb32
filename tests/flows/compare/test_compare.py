"""tba compare: arms over seeds, the step size of each, what is written, and runs that are interrupted.

- An arm is run once: its outcome is in the store, and other settings under its name are refused.
- The grid of step sizes grows until its best is at no edge.
- Intervals are Student's; differences are taken seed by seed, and their intervals hold at once.
- Tables, plot and numbers say what came out; the numbers are what the command's last line is. They name the GPUs.
- Interrupted, the comparison of turns lets its run stop in order.

python -m pytest tests/flows/compare/test_compare.py
"""

import json
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from flows.compare import study_page, turns
from flows.compare.arm import Arm, Outcome
from flows.compare.bench import LARGEST_RATE, TUNING_SEED, Bench, rates_to_try, run_arm, with_rate
from flows.compare.on_testbed import Configuration, OnTestbed, experience
from flows.compare.results import confidence_interval, file_name, hardware, paired_differences
from flows.compare.study import Study, read_study
from storage.attempts import first_attempt_at, start_attempt
from storage.errors import RunConfigMismatch
from storage.store import RunStore
from tba import testbed
from tests.storage.buffer_runs import commit
from tests.storage.helpers import NOON, OWNER, start_python

STALENESS = read_study("staleness", seeds=2, steps=3)


@pytest.mark.slow
def test_an_arm_is_run_once(tmp_path, monkeypatch):
    settings = STALENESS.configuration("tb").model_dump(mode="json") | {"reward": "dense"}
    arm = with_rate(Arm("tb", 2, settings), 1e-3)
    first_policies = [testbed.Policy(), testbed.Policy()]
    for seed, policy in enumerate(first_policies):  # pretraining takes long
        testbed.save_file(policy.state_dict(), testbed.first_policy_file(tmp_path, seed))
    with Bench(tmp_path.as_uri(), "mine", OnTestbed(tmp_path), print) as bench:
        one, other = bench.run([(arm, 0), (arm, 1)])
        assert (one.arm, one.seed, other.seed, one.learning_rate) == ("tb-lag2", 0, 1, 1e-3)
        assert len(one.curve) == 3 and one.curve != other.curve
        configuration = Configuration(**arm.settings)
        other_again = testbed.train(first_policies[1], configuration.train, 2, 1, experience(configuration, 1))
        assert other.curve == other_again.curve
        assert bench.run([(arm, 0)]) == [one]  # from the store, its seconds too
        changed = Arm("tb", 2, arm.settings | {"reward": "exact"})
        with pytest.raises(RunConfigMismatch, match="reward"):
            bench.run([(changed, 0)])
    monkeypatch.setattr(testbed, "PRETRAINING_STEPS", 10)
    with pytest.raises(RunConfigMismatch, match="pretraining"):
        run_arm(OnTestbed(tmp_path), arm, 0, RunStore(tmp_path.as_uri(), "mine-tb-lag2-rate1.00e-03-seed0"))


def test_runs_of_another_number_of_steps_ask_for_another_store(tmp_path, monkeypatch):
    def found_another(name, study, store, *_):
        run_store = RunStore(store, name)
        for steps in (3, study.steps):
            run_store.create_run({"steps": steps})

    monkeypatch.setattr(study_page, "run_study", found_another)
    result = CliRunner().invoke(
        app, ["compare", "staleness", "--store", str(tmp_path), "--out", str(tmp_path / "results")]
    )
    assert result.exit_code == 2
    message = " ".join(result.output.split())
    assert "steps" in message and "Give another --store" in message and "tba train" not in message


@pytest.mark.parametrize(
    ("accuracies", "next_rates"),
    [
        ({}, [1e-3, 10**-2.5, 1e-2]),
        ({1e-3: 0.5, 3e-3: 0.6, 1e-2: 0.4}, []),
        ({1e-3: 0.7, 3e-3: 0.6, 1e-2: 0.4}, [1e-3 / 10**0.5]),
        ({1e-3: 0.5, 3e-3: 0.6, 1e-2: 0.8}, [1e-2 * 10**0.5]),
        ({1e-5: 0.7, 3e-5: 0.6}, []),  # smaller steps than any that learns
    ],
)
def test_step_sizes_are_tried_until_the_best_is_at_no_edge(accuracies, next_rates):
    assert rates_to_try(accuracies) == pytest.approx(next_rates)


def outcome(arm: str, seed: int, accuracy: float, rate: float = 1e-3) -> Outcome:
    return Outcome(arm, seed, rate, 0.4, accuracy, 3.0, 1.0, 1.0, "code", [0.4])


def test_a_place_for_the_page_that_cannot_be_is_refused_before_any_run(tmp_path, monkeypatch):
    monkeypatch.setattr(study_page, "run_study", lambda *_: pytest.fail("a run was begun"))
    (tmp_path / "results").write_text("a file")
    result = CliRunner().invoke(
        app, ["compare", "beta", "--out", str(tmp_path / "results"), "--store", str(tmp_path / "runs")]
    )
    assert result.exit_code and "results" in result.stderr and "Traceback" not in result.stderr


def test_the_largest_step_size_has_a_name_that_a_run_may_have(tmp_path):
    arm = with_rate(Arm("a", 1, {"train": {}}), LARGEST_RATE)
    with Bench(tmp_path.as_uri(), "mine", OnTestbed(), print) as bench:
        assert bench._run_store(arm, 0).run == "mine-a-lag1-rate1.00e00-seed0"


def test_names_that_are_too_long_for_a_run_are_refused_before_any_run(tmp_path, monkeypatch):
    monkeypatch.setattr("flows.compare.bench.run_arm", lambda *_: pytest.fail("a run was begun"))
    arms = [with_rate(Arm(label, 1, {"train": {}}), 1e-3) for label in ("a", "b" * 60)]
    with (
        Bench(tmp_path.as_uri(), "mine", OnTestbed(), print) as bench,
        pytest.raises(ValueError, match=r"study 'mine', arm 'b+': a run's name begins with both"),
    ):
        bench.run([(arm, 0) for arm in arms])


def test_a_page_names_each_processor_and_commit_of_its_runs(tmp_path, monkeypatch):
    def run(self, jobs):
        for arm, seed in jobs:
            rate = arm.settings["train"]["learning_rate"]
            found = outcome(arm.name, seed, 0.9 - abs(rate - 10**-2.5), rate)
            version = "tuned" if seed == TUNING_SEED else "code"
            self.outcomes.append(replace(found, processor="another", code_version=version))
        return self.outcomes[-len(jobs) :]

    monkeypatch.setattr(Bench, "run", run)
    study = read_study("staleness", seeds=2)
    page, _ = study_page.run_study("staleness", study, tmp_path.as_uri(), tmp_path / "results", print)
    assert "some runs on another\n" in page.read_text() and "- commit: code, tuned\n" in page.read_text()


def test_each_arm_gets_the_step_size_that_is_best_for_it(monkeypatch):
    best = {"tb-lag1": 10**-2.5, "tb-lag16": 1e-3}

    def run(self, jobs):
        rates = [arm.settings["train"]["learning_rate"] for arm, _ in jobs]
        return [
            outcome(arm.name, seed, 0.9 - abs(rate - best[arm.name]), rate)
            for (arm, seed), rate in zip(jobs, rates, strict=True)
        ]

    monkeypatch.setattr(Bench, "run", run)
    arms = [Arm("tb", lag, {"train": {"beta": 0.05}}) for lag in (1, 16)]
    tuned = Bench.tune(Bench.__new__(Bench), arms)
    assert [(arm.name, arm.settings) for arm in tuned] == [
        (name, {"train": {"beta": 0.05, "learning_rate": rate}}) for name, rate in best.items()
    ]


def outcomes(study: Study = STALENESS) -> list[Outcome]:
    """Two seeds of each; tb loses 0.1 and 0.3 from the first lag to the last, the others nothing."""
    found = []
    for seed in (0, 1):
        for arm in study.arms_at_each_lag():
            lost = (0.1, 0.3)[seed] if arm.label == "tb" and arm.lag == study.lags[-1] else 0.0
            found.append(outcome(arm.name, seed, (0.8, 0.9)[seed] - lost))
    return found


def test_intervals_are_students():
    # 0.5, 0.6, 0.7: sd 0.1; t of 2 degrees of freedom 4.303; 4.3027 * 0.1 / sqrt(3) = 0.24841
    interval = confidence_interval([0.5, 0.6, 0.7])
    assert (interval.mean, interval.half_width) == (pytest.approx(0.6), pytest.approx(0.24841, abs=1e-5))
    assert str(interval) == "0.600 ± 0.248" and str(confidence_interval([0.5])) == "0.500"


def test_differences_are_taken_seed_by_seed():
    # 0.1 and 0.3: mean 0.2; t of 1 degree of freedom 12.706, times sd 0.1414 / sqrt(2) = 0.1
    (lost,) = paired_differences(outcomes(), [("tb-lag1", "tb-lag128")])
    assert (lost.mean, lost.half_width) == (pytest.approx(0.2), pytest.approx(1.2706, abs=1e-4))


def test_equal_arms_rarely_differ():
    """Of 1,000 studies of six equal arms at most 5 % find any difference; without the correction 20 % do."""
    chance = np.random.default_rng(0)
    arms = [f"arm{number}-lag1" for number in range(6)]
    pairs = [(arms[0], other) for other in arms[1:]]

    def finds_a_difference() -> bool:
        accuracies = chance.normal(0.8, 0.02, (6, 10))
        found = [outcome(arm, seed, accuracies[place, seed]) for place, arm in enumerate(arms) for seed in range(10)]
        return any(abs(difference.mean) > difference.half_width for difference in paired_differences(found, pairs))

    assert 0.01 < np.mean([finds_a_difference() for _ in range(1000)]) <= 0.05


def test_what_is_written_says_what_came_out(tmp_path):
    about = {"task": "addition", "date": "2026-01-02"}
    page, numbers = study_page.write_study(tmp_path, "staleness", STALENESS, outcomes(), about)
    text = page.read_text()
    assert page.name == "staleness_cpu_2026-01-02.md"
    assert f"- published: {STALENESS.published}" in text and "- task: addition" in text
    assert "| Lag | tb | tb_plain | dr_grpo | prox_rloo |" in text
    assert "| 128 | 0.650 ± 0.635 | 0.850 ± 0.635 | 0.850 ± 0.635 | 0.850 ± 0.635 |" in text
    # 0.1 times t of 1 degree of freedom at 1 - 0.05 / 4 / 2
    assert "| loss from lag 1 to 128, paired by seed; these intervals hold at once | 0.200 ± 5.092 |" in text
    assert "The 15 intervals hold at once" in text
    assert text.count("| 128 | 0.000 ± 0.000 | 0.000 ± 0.000 | 0.000 ± 0.000 |") == 1  # distinct right responses
    assert "| 128 | 0.071 | 0.071 | 0.071 | 0.071 |" in text  # 0.7 and 0.6, 0.8 and 0.9: standard deviations
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(page.with_suffix(".json").read_text())["runs"]) == 40
    assert numbers["arms"]["tb-lag128"] == {
        "mean": pytest.approx(0.65),
        "half_width": pytest.approx(0.635, abs=1e-3),
        "seeds": 2,
    }
    assert numbers["lost"]["tb"]["mean"] == pytest.approx(0.2) and set(numbers["lost"]) == set(STALENESS.arms)
    assert numbers["ahead"]["dr_grpo-lag128"]["mean"] == pytest.approx(-0.2)


def test_an_arm_of_fewer_lags_has_no_value_at_the_others(tmp_path):
    about = {"title": "t", "published": "p", "expected": "e", "lags": [0, 4], "compared_with": "tb"}
    study = Study(**about, arms={"tb": {}, "other": {"train": {"beta": 0.2}, "lags": [4]}})
    page, numbers = study_page.write_study(tmp_path, "mine", study, outcomes(study), {"date": "2026-01-02"})
    assert set(numbers["arms"]) == {"tb-lag0", "tb-lag4", "other-lag4"}
    assert set(numbers["ahead"]) == {"other-lag4"} and set(numbers["lost"]) == {"tb"}
    text = page.read_text()
    assert (
        "| 0 | 0.850 ± 0.635 | – |" in text and "| loss from lag 0 to 4, paired by seed | 0.200 ± 1.271 | – |" in text
    )
    assert "| 4 | -0.200 ± 1.271 |" in text and "| 0 | – |" in text  # tb minus the other


def test_the_page_of_a_model_names_what_was_measured(tmp_path):
    study = read_study("staleness_embedded", steps=3)
    found = [
        replace(one, arm=arm.name, cosine_distance=0.5, staleness=1.0)
        for arm in study.arms_at_each_lag()
        for one in outcomes()
    ]
    page, numbers = study_page.write_study(tmp_path, "mine", study, found, {"date": "2026-01-02"})
    text = page.read_text()
    assert "Greedy accuracy on held-out problems, mean" in text and "| 16 | 0.500 ± 0.000 |" in text
    assert numbers["lost"]["tb"]["mean"] == 0 and "minus that" not in text  # there is no other arm
    assert "the best of a grid" not in text


def test_results_of_a_model_name_the_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "NVIDIA H200")
    about = hardware(of_model=True)
    assert about["gpus"] == "2 x NVIDIA H200" and file_name("mine", about).startswith("mine_gpu_20")
    of_testbed = hardware(of_model=False)  # which computes on the processor
    assert "gpus" not in of_testbed and file_name("mine", of_testbed).startswith("mine_cpu_20")


def test_a_study_of_one_lag_has_nothing_to_lose(tmp_path):
    study = read_study("recency", seeds=2)
    page, numbers = study_page.write_study(tmp_path, "recency", study, outcomes(study), {"date": "2026-01-02"})
    assert numbers["lost"] == {} and "loss from lag" not in page.read_text()
    assert page.with_suffix(".png").exists()


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
from flows.cli.app import main
os.chdir(sys.argv[1])
sys.executable = os.path.abspath("train")
sys.argv = ["tba", "compare", "sync"]
main()
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


def test_turns_refuse_too_few_steps_and_a_run_with_a_pause(tmp_path):
    def interrupted(command: list[str]) -> tuple[int, str]:
        for _ in range(2):
            start_attempt(RunStore(tmp_path.as_uri(), command[4]), 0, OWNER)
        return 0, ""

    def compare(steps: int) -> None:
        turns.turns(tmp_path.as_uri(), tmp_path, turns.conditions("m", 1, steps), print, interrupted)

    with pytest.raises(ValueError, match="--steps: got 7; sync needs 8"):
        compare(7)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"run asynchronous-seed0 in file:.* was interrupted, .*: delete its folder"):
        compare(8)


def test_equal_accuracy_is_what_all_runs_came_to():
    curves = [[(10.0, 0.2), (20.0, 0.6), (30.0, 0.5)], [(5.0, 0.1), (50.0, 0.4)]]
    assert turns.common_accuracy(curves) == 0.4


def test_times_of_two_modes_are_compared_seed_by_seed(tmp_path):
    """Ratios of the means would be 1.00 and 0.400."""
    times = {("asynchronous", 0): 10.0, ("synchronous", 0): 40.0, ("asynchronous", 1): 30.0, ("synchronous", 1): 60.0}
    rows = [
        dict.fromkeys(turns.SUMMARISED, 0.5) | {"mode": mode, "seed": seed, "seconds_a_step": time_s}
        for (mode, seed), time_s in times.items()
    ]
    rows[2]["seconds_a_step"] = 90.0
    curves = [[(time_s, 0.5)] for time_s in times.values()]
    page = turns.write_turns(tmp_path, "mine", rows, curves, {"date": "2026-01-01", "seeds": 2})
    assert page.name == "mine_cpu_2026-01-01.md"
    headings, *lines = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    ratios = dict(zip(headings, lines[-1], strict=True))
    assert ratios["Time a policy step, s"].startswith("0.875 ± ")  # of 10/40 and 90/60
    assert ratios["Time to equal accuracy, s"].startswith("0.375 ± ")  # of 10/40 and 30/60


def test_sampled_accuracy_is_the_mean_of_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "WINDOW", 4)
    store = RunStore(tmp_path.as_uri(), "run")
    start_attempt(store, 0, OWNER)
    with pytest.raises(ValueError, match="fewer than 4 trajectories"):
        turns.sampled_accuracy(store)
    rewards = [0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    commit(store, "s0", 0, [("a", [place, 1], reward) for place, reward in enumerate(rewards)])
    curve = turns.sampled_accuracy(store)
    assert [accuracy for _, accuracy in curve] == [0.25, 0.5, 0.75]
    assert {seconds for seconds, _ in curve} == {(NOON - first_attempt_at(store)).total_seconds()}
