"""Near-duplicates: of two responses that nearly say the same, the one that is worth more is kept.

python -m pytest tests/tba/test_near_duplicates.py
"""

import pytest

from tba import near_duplicates
from tba.near_duplicates import NearDuplicates

pytest.importorskip("rapidfuzz", reason="extra tasks")


def test_the_better_one_of_a_round_is_kept():
    # kitten and sitting: 3 edits, 13 letters together, 0.23 of them
    near = NearDuplicates(0.25)
    assert near.keep(0, ["p"] * 3, ["kitten", "sitting", "elephant"], [0.1, 0.9, 0.0]) == [False, True, True]
    assert NearDuplicates(0.2).keep(0, ["p"] * 2, ["kitten", "sitting"], [0.1, 0.9]) == [True, True]


def test_what_was_kept_before_counts():
    near = NearDuplicates(0.25)
    assert near.keep(0, ["p"], ["kitten"], [0.5]) == [True]
    assert near.keep(1, ["p", "p", "q"], ["sitting", "kitten", "kitten"], [0.4, 0.5, 0.1]) == [False, False, True]
    assert near.keep(2, ["p"], ["sitting"], [0.6]) == [True]  # better than what is near it


def test_prompts_that_were_asked_long_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr(near_duplicates, "REMEMBERED_IN_ALL", 3)
    near = NearDuplicates(0.25)
    for number, prompt in enumerate("abca"):
        near.keep(number, [prompt], [str(number) * 40], [0.5])
    assert list(near._kept) == ["c", "a"] and len(near._kept["a"]) == 2, "the prompt asked last keeps its responses"


def test_a_round_that_is_tried_again_is_compared_with_what_was_stored_alone():
    near = NearDuplicates(0.25)
    assert near.keep(0, ["p"], ["elephant"], [0.5]) == [True]
    for _ in range(2):
        assert near.keep(1, ["p", "p"], ["kitten", "elephant"], [0.5, 0.5]) == [True, False]
