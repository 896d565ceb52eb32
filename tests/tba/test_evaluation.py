"""Figures of an evaluation against values worked out by hand.

python -m pytest tests/tba/test_evaluation.py
"""

import math
from itertools import combinations

import pytest

from tba.evaluation import pass_at_k, perplexity, succeeds, win_rate


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # of 6 pairs 3 have the right one
        (5, 2, 3, 9 / 10),  # of 10 triples 1 has neither
        (3, 0, 2, 0),
        (3, 3, 1, 1),
        (3, 2, 2, 1),  # two are right: no pair has neither
    ],
)
def test_pass_at_k(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value)
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match="1 right of 4 samples, k=5"):
        pass_at_k(4, 1, 5)


def test_a_win_is_a_higher_score():
    assert win_rate([1.0, 0.5, 0.2, 3.0], [0.0, 0.5, 0.3, 2.0]) == 0.5


def test_perplexity_is_by_response_token():
    # ln 2, ln 4, ln 8 and ln 4: their mean is 2 ln 2
    logprobs = [[-math.log(2), -math.log(4)], [-math.log(8), -math.log(4)]]
    assert perplexity(logprobs) == pytest.approx(4)
    assert perplexity([[-math.log(2)], [-math.log(2), -math.log(2)]]) == pytest.approx(2)


def test_an_attack_succeeds_above_one_half_on_average():
    assert [*map(succeeds, ([0.9, 0.2], [0.5, 0.5], [1.0, 0.0, 0.6], [0.1]))] == [True, False, True, False]
