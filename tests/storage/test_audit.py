"""The audit judges the whole buffer and leaves a site to read.

- A sound buffer has no faults, and a browsable site: index.html and a page for the validation, in the store.
- Faults that no single shard shows (an id twice, a round missing) and those of one shard are each named.
- What has expired is not judged.
- Text of a shard is text in the site: no tag of it is one of the page's.

pytest tests/storage/test_audit.py
"""

from datetime import timedelta

import pyarrow as pa
import pytest

from storage.audit import audit
from storage.new_shards import new_shards
from storage.rules import Limits
from storage.shards import commit_shard, parquet_bytes, shard_path
from storage.upkeep import delete_superseded, expire
from tests.storage.helpers import make_shard

LIMITS = Limits(vocab_size=100)


@pytest.fixture
def run(local_store):
    for searcher, number in (("s0", 0), ("s0", 1), ("s0", 2), ("s1", 0)):
        commit_shard(local_store, make_shard(searcher, number))
    return local_store


def test_a_sound_buffer_has_a_site_and_no_faults(store):
    for number in range(2):
        commit_shard(store, make_shard("s0", number))
    page, faults = audit(store, LIMITS)
    assert faults == [] and page.startswith("audits/") and page.endswith("/index.html")
    assert b"<html" in store.get(page)
    site = store.list(page.rpartition("/")[0])
    validations = [path for path in site if "/validations/" in path and path.endswith(".html")]
    assert len(validations) == 1 and b"trajectory_id" in store.get(validations[0])


def test_each_fault_is_named(run):
    run.put("trajectories/searcher=s1/round=00000001.parquet", b"torn")
    copy = make_shard("s0", 0)  # under another name
    run.put(shard_path("s1", 2), parquet_bytes(copy))
    run.delete(shard_path("s0", 1))
    bad = make_shard("s2", 0, reward=float("nan"))
    run.put(shard_path("s2", 0), parquet_bytes(pa.concat_tables([bad])))
    _, faults = audit(run, LIMITS)
    text = "\n".join(faults)
    assert "searcher s0: round 1 is missing" in text
    assert "round=00000001.parquet of run run" in text and "not a whole Parquet file" in text
    assert "trajectory_id is unique: broken by 8" in text
    assert "reward is finite: broken by 4" in text
    assert len(faults) == 4


def test_without_a_shard_there_is_no_page(local_store):
    assert audit(local_store, LIMITS) == (None, [])
    assert local_store.list("audits") == []


def test_what_has_expired_is_no_fault(run):
    run.put("summary.json", b"{}")
    expire(run, timedelta(days=-1), None, min_size=1)
    delete_superseded(run, timedelta(0))
    assert len(run.list("trajectories")) == 2
    assert audit(run, LIMITS)[1] == []


def test_a_round_that_is_refused_meanwhile_is_no_fault(run, monkeypatch):
    def refusing(store, seen):
        found = new_shards(store, seen)
        store.put("quarantine/searcher=s0/round=00000001.json", b"{}")
        return {searcher: [number for number in rounds if number != 1] for searcher, rounds in found.items()}

    monkeypatch.setattr("storage.audit.new_shards", refusing)
    assert audit(run, LIMITS)[1] == []


def test_no_text_of_a_shard_is_html(run):
    """Of a shard that passed no gate, as one who may write to the store can put it there."""
    evil = "<img src=x onerror=alert(1)>"
    bad = make_shard("s2", 0, finish_reason=evil, trajectory_id=f"{evil}<script>alert(2)</script>'\"")
    run.put(shard_path("s2", 0), parquet_bytes(bad))
    page, faults = audit(run, LIMITS)
    site = [run.get(path) for path in run.list(page.rpartition("/")[0]) if path.endswith(".html")]
    assert not any(b"<img src=x" in html or b"<script>alert" in html for html in site)
    assert any(b"onerror=alert(1)" in html for html in site)  # it is shown, as text
    text = "\n".join(faults)
    assert f"finish_reason is stop or length: broken by 4 of 20, where (finish_reason) is ['{evil}'" in text
