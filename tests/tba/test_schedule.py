"""The learning rate and beta, step by step.

- Each schedule has the values worked out here, warms up alike, and never steps by nothing.
- beta goes to its floor in a line and stays.
- Settings that contradict each other are refused.

python -m pytest tests/tba/test_schedule.py
"""

import pytest

from tba import schedule
from tba.config import TrainSettings

# Eight steps, two of them warm-up, a learning rate of 1: 1/2, 1, then the schedule's six.
EXPECTED = {
    "constant": [1, 1, 1, 1, 1, 1],
    "linear": [6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7],
    # (1 - cos(pi x)) / 2 at the same sevenths
    "cosine": [0.9504844, 0.8117449, 0.6112605, 0.3887395, 0.1882551, 0.0495156],
    # the last three: (1 - cos(pi x)) / 2 at 3/4, 2/4, 1/4
    "warmup-stable-decay": [1, 1, 1, 0.8535534, 0.5, 0.1464466],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_learning_rate_follows_its_schedule(name):
    decay = {"decay_steps": 3} if name == "warmup-stable-decay" else {}
    settings = TrainSettings(steps=8, learning_rate=1, warmup_steps=2, learning_rate_schedule=name, **decay)
    rates = [schedule.learning_rate(settings, step) for step in range(1, 9)]
    assert rates == pytest.approx([0.5, 1.0, *EXPECTED[name]], abs=1e-6)


def test_warm_up_may_be_longer_than_the_run():
    settings = TrainSettings(steps=2, learning_rate=1, warmup_steps=4, learning_rate_schedule="cosine")
    assert [schedule.learning_rate(settings, step) for step in (1, 2)] == [0.25, 0.5]


def test_beta_goes_to_its_floor_in_a_line_and_stays():
    settings = TrainSettings(steps=8, beta=1.0, beta_final=0.2, beta_steps=4)
    assert [schedule.beta(settings, step) for step in range(1, 8)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_beta_without_a_floor_is_constant():
    assert [schedule.beta(TrainSettings(beta=0.3), step) for step in (1, 50)] == [0.3, 0.3]


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate_schedule": "warmup-stable-decay"},
        {"decay_steps": 3},
        {"beta_steps": 3},
        {"beta_final": 0},
        {"objective": "rloo", "reward_tempering": 2},
        {"objective": "online_dpo", "fluency_temperature": 2},
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings):
    with pytest.raises(ValueError, match=r"decay_steps|beta_|target to temper"):
        TrainSettings(**settings)


def test_the_target_is_tempered_as_set():
    assert [schedule.tempering(TrainSettings(steps=4), step) for step in (1, 4)] == [(1, 1), (1, 1)]
    settings = TrainSettings(steps=9, reward_tempering=2, reward_tempering_steps=4, fluency_temperature=1.5)
    # T: 2, 1.75, 1.5, 1.25, then 1; g: 1 in step 1, and 1.5 in step 10, the first that there is not
    assert schedule.tempering(settings, 1) == (0.5, 0.5)
    assert schedule.tempering(settings, 3) == pytest.approx((1 / (1.5 * (1 + 0.5 * 2 / 9)), 1 / 1.5))
    assert schedule.tempering(settings, 9) == pytest.approx((1 / (1 + 0.5 * 8 / 9), 1))
    settings = TrainSettings(steps=9, fluency_temperature=1.5, fluency_steps=2)
    assert schedule.tempering(settings, 3) == pytest.approx((1 / 1.5, 1))
