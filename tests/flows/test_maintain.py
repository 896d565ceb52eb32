"""maintain/buffer (flows/maintain.py): a mistyped run is refused, and nothing is made of it.

Its work is tested in tests/storage. Run: python -m pytest tests/flows/test_maintain.py
"""

import pytest

from flows.maintain import maintain
from storage.errors import NotFound


def test_a_mistyped_run_is_refused_and_nothing_is_made(tmp_path):
    with pytest.raises(NotFound, match="mistyped"):
        maintain.fn(tmp_path.as_uri(), "mistyped", max_age_hours=1.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["max_age_hours", "keep", "grace_hours"])
def test_a_negative_number_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}: got -1; it must not be negative"):
        maintain.fn(tmp_path.as_uri(), "any", **{name: -1})
