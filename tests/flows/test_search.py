"""A Searcher's commit (flows/search.py). The loop itself is tested by whole runs.

- a round whose shard was committed, but not its metrics, is recorded by the next try
- the metrics of a try whose round has another process's shard are dropped

Run: pytest tests/flows/test_search.py
"""

import logging

import pytest

from flows import search
from storage import ledger
from storage.errors import StoreUnreachable
from storage.queries import query
from storage.store import RunStore
from tests.storage.buffer_runs import new_store
from tests.storage.helpers import make_search_round, make_shard


@pytest.fixture
def store(tmp_path, monkeypatch) -> RunStore:
    monkeypatch.setattr(search, "get_run_logger", lambda: logging.getLogger("test"))
    return new_store(tmp_path)


def num_recorded(store: RunStore) -> int:
    return query(store, "SELECT count(*) AS n FROM search_rounds")["n"][0].as_py()


def test_a_round_is_recorded_though_the_first_try_failed_after_its_commit(store, monkeypatch):
    def away(*_):
        raise StoreUnreachable("away")

    shard, metrics = make_shard("s0", 0), make_search_round("s0", 0)
    with monkeypatch.context() as outage:
        outage.setattr(ledger, "record_search_round", away)
        with pytest.raises(StoreUnreachable):
            search.commit(store, shard, metrics)
    assert num_recorded(store) == 0
    for _ in range(2):
        search.commit(store, shard, metrics)
        assert num_recorded(store) == 1


def test_a_try_whose_round_is_another_processs_records_nothing(store):
    search.commit(store, make_shard("s0", 0), make_search_round("s0", 0))
    store.delete("metrics/search/searcher=s0/round=00000000.parquet")
    search.commit(store, make_shard("s0", 0, response_tokens=[7, 7]), make_search_round("s0", 0))
    assert num_recorded(store) == 0
