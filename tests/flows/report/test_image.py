"""A curve on Prefect's page is an image that is its own URL. Run: pytest tests/flows/report/test_image.py"""

import re
from urllib.parse import unquote

from flows.report.image import POINTS_SHOWN, curves_url


def test_a_curve_has_few_points_whatever_the_length_and_keeps_both_ends():
    steps = list(range(1, 10_001))
    lines = {"trained on": [step / 10_000 for step in steps], "sampled": [None] * 10_000}
    (path,) = re.findall(r"class='line stroke-1' d='M([^']+)'", unquote(url := curves_url("Reward", steps, lines)))
    points = path.split("L")
    assert len(points) == POINTS_SHOWN
    first, last = points[0].split(), points[-1].split()
    assert float(first[1]) > float(last[1]), "it rises, and an SVG's y falls"
    assert len(url) < 4000
    assert unquote(curves_url("One step", [7], {"trained on": [0.5]})).count("<circle") == 1
