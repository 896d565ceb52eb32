"""The progress of a run, on a terminal and elsewhere.

- Without a terminal it is plain lines, at most one every few seconds, and an alarm when it goes on.
- In a terminal alarms stand below the table.
- As JSON, decimals are numbers, and NaN is null.

python -m pytest tests/flows/cli/test_console.py
"""

import io
import json
import re
from datetime import date
from decimal import Decimal

import pytest
from rich.console import Console

from flows.cli.console import Progress, json_text
from flows.report.text import duration


def test_progress_without_a_terminal_is_plain_lines():
    out = io.StringIO()
    heartbeat = {"state": "training", "step": 12, "steps": 100, "reward_mean": 0.614, "num_trajectories": 1280,
                 "num_prompts": 40, "staleness_mean": 2.13, "seconds_left": 370}  # fmt: skip
    with Progress(Console(file=out), "some") as progress:
        progress.show("starting", None)
        progress.show("training", heartbeat)
        progress.show("training", heartbeat | {"step": 13})  # too soon for another line
    first, second = out.getvalue().splitlines()
    assert first == "starting  elapsed 0s"
    assert second == (
        "training  step 12/100  reward 0.61  buffer 1,280  prompts 40  staleness 2.1  elapsed 0s  left 6m 10s"
    )


ALARM = {"entropy_low": "entropy is near zero. Raise search.temperature"}


def test_progress_without_a_terminal_prints_an_alarm_when_it_goes_on():
    out = io.StringIO()
    with Progress(Console(file=out), "some") as progress:
        for alarms in ({}, ALARM, ALARM, {}, ALARM):
            progress.show("training", {"state": "training", "step": 1, "steps": 2, "alarms": alarms})
        progress.show("waiting", {"state": "waiting", "step": 1, "steps": 2, "alarms": ALARM})
    assert out.getvalue().splitlines() == [
        "training  step 1/2  elapsed 0s",
        "ALARM: entropy is near zero. Raise search.temperature",
        "ALARM: entropy is near zero. Raise search.temperature",
        "waiting  step 1/2  elapsed 0s  alarms entropy low",
    ]


def test_progress_in_a_terminal_shows_alarms_below_the_table():
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=30), "some") as progress:
        progress.show("training", {"state": "training", "step": 1, "steps": 2, "alarms": ALARM}, "a note")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert text.split().index("ALARM:") < text.split().index("note")
    assert " ".join(text.split()).endswith("ALARM: entropy is near zero. Raise search.temperature a note")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m 00s"), (90, "1m 30s"), (7260, "2h 01m")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_a_sum_is_a_number_in_json():
    """DuckDB's sum of integers comes as a Decimal."""
    row = {"n": Decimal(640), "share": Decimal("0.5"), "at": date(2026, 1, 2), "missing": float("nan")}
    assert json.loads(json_text(row)) == {"n": 640, "share": 0.5, "at": "2026-01-02", "missing": None}
