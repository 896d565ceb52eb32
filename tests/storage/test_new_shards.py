"""How a reader finds shards that it has not seen, by heads (storage/new_shards.py).

Claims
- an empty look costs one request, however many Searchers there are; new shards cost no other look
- a Searcher's head is one file that says its newest round, also after it was restored from its shards
- no shard is missed: not one of a Searcher killed before its head, of a newcomer, of an older version without heads,
  nor one whose head a listing forgets
- a head that names rounds which are not there costs one scan, and no shard
- rounds that were refused or have expired are not named; a compacted round is read from its compacted file

Run: pytest tests/storage/test_new_shards.py
"""

import random

import pyarrow as pa
import pytest

from storage import new_shards as module
from storage.intake import Refusal, refuse
from storage.new_shards import SCAN_S, NewShards, new_shards, read_heads, restore_head
from storage.shards import block_path, commit_shard, head_path, next_round, parquet_bytes, shard_path
from storage.store import RunStore
from tests.storage.buffer_runs import new_buffer, new_store
from tests.storage.helpers import make_shard


class Reader:
    """A reader that takes every round it is told of, as the replay buffer does."""

    def __init__(self, store: RunStore):
        self.now, self.seen, self.taken = 0.0, {}, []
        self._store, self._new = store, NewShards(store, clock=lambda: self.now)

    def look(self) -> dict[str, list[int]]:
        found = self._new.find(self.seen)
        if not all(self._store.exists(shard_path(name, number)) for name in found for number in found[name]):
            found = self._new.scan(self.seen)
        self.taken += [(name, number) for name in found for number in found[name]]
        self.seen |= {name: rounds[-1] for name, rounds in found.items()}
        return found


def commit(store: RunStore, searcher: str, *rounds: int, with_head: bool = True) -> None:
    for number in rounds:
        if with_head:
            commit_shard(store, make_shard(searcher, number))
        else:
            store.put_new(shard_path(searcher, number), parquet_bytes(make_shard(searcher, number)))


@pytest.mark.s3
def test_a_look_costs_one_listing_however_many_searchers_there_are(moto_store, monkeypatch):
    for number in range(12):
        commit(moto_store, f"s{number}", 0)
    reader = Reader(moto_store)
    assert len(reader.look()) == 12
    listings, requests = [], []
    read, call_s3 = module.read_heads, moto_store._files._fs.call_s3
    monkeypatch.setattr(module, "read_heads", lambda store: (listings.append(store), read(store))[1])
    monkeypatch.setattr(moto_store._files._fs, "call_s3", lambda *a, **k: (requests.append(a), call_s3(*a, **k))[1])
    look = reader._new.find
    assert look(reader.seen) == {} and len(listings) == 1 and requests == []
    commit(moto_store, "s7", 1)
    requests.clear()
    assert look(reader.seen) == {"s7": [1]} and len(listings) == 2 and requests == []


def test_a_searcher_has_one_head_which_says_its_newest_round(store):
    commit(store, "s0", 0, 1, 2)
    commit(store, "s00", 0)  # another Searcher, though its name begins alike
    assert store.list("heads") == ["heads/s00=00000000", "heads/s0=00000002"]
    for left_over in (0, 1, 5):
        store.put(head_path("s0", left_over), b"")
    assert restore_head(store, "s0") == next_round(store, "s0") == 3
    assert read_heads(store) == {"s0": 2, "s00": 0} and len(store.list("heads")) == 2
    store.delete(head_path("s0", 2))
    assert restore_head(store, "s0") == 3 and read_heads(store)["s0"] == 2
    assert restore_head(store, "new") == 0 and "new" not in read_heads(store)


def test_a_shard_whose_searcher_was_killed_before_its_head_comes_with_the_next_one(local_store):
    commit(local_store, "s0", 0)
    reader = Reader(local_store)
    reader.look()
    commit(local_store, "s0", 1, with_head=False)
    assert reader.look() == {}
    commit(local_store, "s0", 2)
    assert reader.look() == {"s0": [1, 2]}


def test_a_shard_without_a_head_is_found_by_the_next_scan(local_store):
    commit(local_store, "s0", 0)
    reader = Reader(local_store)
    reader.look()
    commit(local_store, "s0", 1, with_head=False)
    commit(local_store, "newcomer", 0, with_head=False)
    reader.now = SCAN_S - 1
    assert reader.look() == {}
    reader.now = SCAN_S
    assert reader.look() == {"s0": [1], "newcomer": [0]}


def test_a_searcher_of_an_older_version_is_listed_each_time(local_store):
    commit(local_store, "old", 0, with_head=False)
    commit(local_store, "s0", 0)
    reader = Reader(local_store)
    reader.look()
    commit(local_store, "old", 1, with_head=False)
    commit(local_store, "newcomer", 0)
    assert reader.look() == {"old": [1], "newcomer": [0]}


def test_a_listing_that_forgets_heads_loses_no_shard(local_store, monkeypatch):
    commit(local_store, "s0", 0)
    commit(local_store, "s1", 0)
    reader = Reader(local_store)
    reader.look()
    commit(local_store, "s0", 1)
    files = local_store._files.files
    monkeypatch.setattr(local_store._files, "files", lambda folder, _: [] if folder == "heads" else files(folder, _))
    assert reader.look() == {"s0": [1]}


@pytest.mark.parametrize("through", [2, 3, 99_999_999])
def test_a_head_of_rounds_that_are_not_there_costs_one_scan_and_no_shard(local_store, monkeypatch, through):
    commit(local_store, "s0", 0, 1)
    commit(local_store, "s1", 0)
    reader = Reader(local_store)
    reader.look()
    scans, scan = [], module.new_shards
    monkeypatch.setattr(module, "new_shards", lambda *given: (scans.append(given), scan(*given))[1])
    local_store.put(head_path("s0", through), b"")
    assert reader.look() == {} and len([given for given in scans if len(given) == 2]) == 1
    commit(local_store, "s1", 1)
    assert reader.look() == {"s1": [1]}
    commit(local_store, "s0", 2, 3, 4)
    assert reader.look() == {"s0": [2, 3, 4]}
    assert len([given for given in scans if len(given) == 2]) == 1


def test_refused_and_expired_rounds_are_not_named(local_store):
    commit(local_store, "s0", 0, 1, 2)
    refuse(local_store, [Refusal("s0", 2, ["a reason"])], "a test")
    local_store.put("expired/searcher=s0/through=00000000.json", b"{}")
    reader = Reader(local_store)
    assert reader.look() == {"s0": [1]} and reader.look() == {}
    commit(local_store, "s0", 3)
    assert reader.look() == {"s0": [3]}


def test_compacted_rounds_are_read_from_the_file_that_counts(tmp_path):
    """A frozen Searcher committed one of them again, with other rows, after the shards had been deleted."""
    store = new_store(tmp_path)
    for number in range(32):
        commit(store, "s0", number)
    tables = [make_shard("s0", number) for number in range(32)]
    store.put_new(block_path("s0", 0), parquet_bytes(pa.concat_tables(tables)))
    for number in range(32):
        store.delete(shard_path("s0", number))
    store.put_new(shard_path("s0", 5), parquet_bytes(make_shard("s0", 5, reward=9.0)))
    buffer = new_buffer(store)
    sync = buffer.sync(1, attempt=1)
    assert sync.num_trajectories == 32 * 4 and sync.fresh.reward == 32 * 2


def test_in_any_order_of_events_each_shard_is_taken_once(local_store):
    chance = random.Random(3)
    reader, committed = Reader(local_store), {"s0": 0, "s1": 0, "old": 0}
    for _ in range(120):
        event = chance.choice(["commit"] * 5 + ["look"] * 3 + ["killed", "restart", "wrong head", "no head", "later"])
        name = chance.choice(list(committed))
        if event in ("commit", "killed"):
            commit(local_store, name, committed[name], with_head=event == "commit" and name != "old")
            committed[name] += 1
        elif event == "restart" and name != "old":
            restore_head(local_store, name)
        elif event == "wrong head":
            local_store.put(head_path(name, committed[name] + chance.randrange(3)), b"")
        elif event == "no head":
            for path in local_store.list("heads"):
                local_store.delete(path)
        elif event == "later":
            reader.now += SCAN_S / 3
        else:
            reader.look()
    reader.now += SCAN_S
    reader.look()
    everything = [(name, number) for name, rounds in new_shards(local_store, {}).items() for number in rounds]
    assert sorted(reader.taken) == sorted(everything) and len(everything) == sum(committed.values())
