"""A resumed run in its summary and in its report's tables (storage/summary.py, storage/report_tables.py).

- The time between two attempts, and the start of engines before an attempt's first step, count for no process.
- The wall time ends with the last record, whenever the summary is written.
- Tokens a second are those of the time in which they were sampled or trained on; nothing is drawn where nothing was.

python -m pytest tests/storage/test_summary.py
"""

import json
from datetime import timedelta

import pytest

from storage import attempts, ledger
from storage.report_tables import report_tables
from storage.summary import summarise
from tests.storage.helpers import NOON, OWNER, make_search_round, make_training_step

NIGHT_S = 12 * 3600


def at(seconds: float):
    return NOON + timedelta(seconds=seconds)


@pytest.fixture
def resumed(local_store):
    """Two attempts of two steps and two rounds each, with a night between them. Each begins with a wait of 50 s."""
    for attempt, began in ((1, 0), (2, NIGHT_S)):
        attempts.start_attempt(local_store, 2 * (attempt - 1), OWNER)
        path = f"trainer/attempt={attempt:08d}.json"
        local_store.put(
            path, json.dumps(json.loads(local_store.get(path)) | {"created_at": at(began).isoformat()}).encode()
        )
        for place in (0, 1):
            times = {"started_at": at(began + 20 + 10 * place), "ended_at": at(began + 30 + 10 * place)}
            sampling = {"sampling_started_at": times["started_at"], "sampling_ended_at": at(began + 28 + 10 * place)}
            number = 2 * (attempt - 1) + place
            ledger.record_search_round(
                local_store, make_search_round("s0", number) | times | sampling | {"num_response_tokens": 800}
            )
            step = {"started_at": at(began + 50 + 5 * place), "ended_at": at(began + 54 + 5 * place), "step_s": 4.0}
            waited = {"wait_s": 1.0 if place else 50.0, "publish_stall_s": 2.0, "num_response_tokens": 400}
            ledger.record_training_step(
                local_store, make_training_step(attempt, 2 * (attempt - 1) + place + 1) | step | waited
            )
    return local_store


def test_a_night_between_attempts_is_nobodys_time(resumed):
    found = summarise(resumed)
    assert found["searcher_idle_share"] == 0.0
    assert found["trainer_wait_share"] == pytest.approx(2 / (2 + 16))
    assert found["publish_stall_share"] == pytest.approx(4 / 16)
    assert found["wall_s"] == NIGHT_S + 59
    (searcher,) = report_tables(resumed)["searchers"].to_pylist()
    assert (searcher["num_rounds"], searcher["present_s"]) == (4, 40.0)
    assert (searcher["sampling_s"], searcher["scoring_s"]) == (32.0, 8.0)


def test_tokens_lie_where_they_were_sampled_and_trained_on(resumed):
    rows = report_tables(resumed)["throughput"].to_pylist()
    width = rows[1]["at_s"] - rows[0]["at_s"]
    assert len(rows) == 40 and width == pytest.approx((NIGHT_S + 59 - 20) / 40)
    assert sum(row["sampled_per_s"] for row in rows) * width == pytest.approx(4 * 800)
    assert sum(row["trained_per_s"] for row in rows) * width == pytest.approx(4 * 400)
    assert [place for place, row in enumerate(rows) if row["sampled_per_s"]] == [0, 39]
    assert report_tables(resumed)["totals"].to_pylist()[0]["num_sampled_tokens"] == 3200


def test_a_long_round_is_spread_over_its_sampling(local_store):
    times = {"started_at": NOON, "sampling_started_at": at(0), "sampling_ended_at": at(40), "ended_at": at(41)}
    ledger.record_search_round(local_store, make_search_round("s0", 0) | times | {"num_response_tokens": 400})
    rows = report_tables(local_store)["throughput"].to_pylist()
    assert [row["sampled_per_s"] for row in rows] == [pytest.approx(10)] * 40
