"""Near-duplicates: of two responses that nearly say the same, the one that is worth more is kept.

python -m pytest tests/tba/test_near_duplicates.py
"""

import pytest

from tba.near_duplicates import NearDuplicates

pytest.importorskip("rapidfuzz", reason="extra tasks")


def test_the_better_one_of_a_round_is_kept():
    # kitten and sitting: 3 edits, 13 letters together, 0.23 of them
    near = NearDuplicates(0.25)
    assert near.keep(["p"] * 3, ["kitten", "sitting", "elephant"], [0.1, 0.9, 0.0]) == [False, True, True]
    assert NearDuplicates(0.2).keep(["p"] * 2, ["kitten", "sitting"], [0.1, 0.9]) == [True, True]


def test_what_was_kept_before_counts():
    near = NearDuplicates(0.25)
    assert near.keep(["p"], ["kitten"], [0.5]) == [True]
    assert near.keep(["p", "p", "q"], ["sitting", "kitten", "kitten"], [0.4, 0.5, 0.1]) == [False, False, True]
    assert near.keep(["p"], ["sitting"], [0.6]) == [True]  # better than what is near it
