"""The policies that a Searcher serves (flows/searcher/policy_feed.py).

Claims
- a policy that was removed or damaged, or whose files lead out of its folder, is not asked for again and again: a
  Searcher goes on with the one that it serves, and one without any, or a synchronous one, waits
- a lost final policy is waited for: nobody trains on rounds of an older one
- a damaged pointer stops no Searcher
- after a load that failed half-way nothing is sampled before a whole policy is loaded
- this machine's copy whose weights changed is fetched anew; weights that the store changed are an error
- a synchronous Searcher waits for another policy
- in the middle of a round a new policy is served, but not the final one, and not if loads take much of the time; `next`
  says afterwards that it is new; after a load that failed half-way another policy is waited for

Run: pytest tests/flows/searcher/test_policy_feed.py
"""

import json
import threading
import time

import pytest
from prefect.logging import disable_run_logger

from flows.searcher import policy_feed
from flows.searcher.policy_feed import PolicyFeed
from storage import attempts, policies
from storage.errors import DamagedPolicy
from storage.store import RunStore
from tba.engine import ServedPolicy


class Engine:
    """A Searcher whose engine's fingerprint is the content of the weights' file."""

    def __init__(self) -> None:
        self.loads, self.fails_with = 0, None

    def load(self, folder, step):
        self.loads += 1
        if self.fails_with:
            raise self.fails_with
        self.served = ServedPolicy(step, (folder / "model.safetensors").read_text())
        return self.served

    def drop_rounds(self):
        pass


@pytest.fixture
def publish(tmp_path):
    def publish(store: RunStore, step: int, final: bool = False) -> policies.PolicyRef:
        folder = tmp_path / f"policy-{time.monotonic_ns()}"
        folder.mkdir()
        (folder / "model.safetensors").write_text(f"{step:032d}")
        return policies.publish_policy(store, folder, policies.policy_ref(step, f"{step:032d}", attempt=1, final=final))

    return publish


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(policy_feed, "POLL_S", 0.05)
    monkeypatch.setattr(policy_feed, "policy_cache", lambda run: tmp_path / "cache")
    with disable_run_logger():
        yield


@pytest.fixture
def fetches(monkeypatch) -> list[policies.PolicyRef]:
    """Every fetch that is tried."""
    tried, fetch = [], policies.fetch_policy
    monkeypatch.setattr(
        policies, "fetch_policy", lambda store, ref, cache: (tried.append(ref), fetch(store, ref, cache))[1]
    )
    return tried


def remove(store: RunStore, ref: policies.PolicyRef) -> None:
    store.delete_folder(ref.path, first="policy.json")


def cut(store: RunStore, ref: policies.PolicyRef) -> None:
    store.put(f"{ref.path}/model.safetensors", b"cut")


def lead_out(store: RunStore, ref: policies.PolicyRef) -> None:
    """Its list of files names one outside its folder."""
    path = f"{ref.path}/policy.json"
    store.put(path, json.dumps(store.read_json(path) | {"files": {"../../../run.json": 2}}).encode())


@pytest.mark.parametrize("spoil", [remove, cut, lead_out])
def test_a_searcher_goes_on_with_what_it_serves(local_store, publish, fetches, spoil):
    engine = Engine()
    feed = PolicyFeed(local_store, engine)
    first = publish(local_store, 0)
    assert feed.next() == first and feed.is_new
    spoil(local_store, lost := publish(local_store, 1))
    for _ in range(20):
        assert feed.next() == first and not feed.is_new and engine.served.step == 0
    assert fetches == [first, lost]
    newest = publish(local_store, 2)
    assert feed.next() == newest and feed.is_new and engine.served.step == 2


def test_a_synchronous_searcher_samples_another_round_if_the_trainer_refused_the_last(local_store, publish):
    engine, answers = Engine(), iter([False, False, True])
    feed = PolicyFeed(local_store, engine, is_synchronous=True, is_refused=lambda: next(answers))
    first = publish(local_store, 0)
    assert feed.next() == first and feed.is_new
    assert feed.next() == first and not feed.is_new
    assert next(answers, None) is None, "it waited until the round was refused"


@pytest.mark.parametrize("is_synchronous", [False, True])
def test_without_another_one_a_lost_policy_is_waited_for(local_store, publish, fetches, monkeypatch, is_synchronous):
    feed = PolicyFeed(local_store, Engine(), is_synchronous=is_synchronous)
    if is_synchronous:
        publish(local_store, 0)
        feed.next()
        fetches.clear()
    remove(local_store, lost := publish(local_store, 1))
    monkeypatch.setattr(policy_feed, "TRAINER_SILENT_S", 1.0)
    assert feed.next() is None
    assert fetches == [lost], "twenty polls, one request for its files"


def test_a_lost_policy_is_tried_again(local_store, publish, monkeypatch):
    monkeypatch.setattr(policy_feed, "LOST_S", 0.2)
    remove(local_store, lost := publish(local_store, 1))
    again = threading.Timer(0.5, lambda: publish(local_store, 1))
    again.start()
    found = PolicyFeed(local_store, Engine()).next()
    again.join()
    assert found.path == lost.path


def test_a_lost_final_policy_is_waited_for(local_store, publish, monkeypatch):
    feed = PolicyFeed(local_store, Engine())
    publish(local_store, 0)
    feed.next()
    remove(local_store, publish(local_store, 1, final=True))
    monkeypatch.setattr(policy_feed, "TRAINER_SILENT_S", 0.5)
    assert feed.next() is None


@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_a_damaged_pointer_stops_no_searcher(local_store, publish, monkeypatch, content):
    feed = PolicyFeed(local_store, Engine())
    first = publish(local_store, 0)
    feed.next()
    local_store.put(policies.LATEST, content) if content is not None else local_store.delete(policies.LATEST)
    assert feed.next() == first and not feed.is_new
    mended = threading.Timer(0.5, lambda: publish(local_store, 1))
    mended.start()
    assert PolicyFeed(local_store, Engine()).next().step == 1
    mended.join()


def test_a_heartbeat_that_is_no_json_is_a_sign_of_life(local_store, publish):
    local_store.put(attempts.HEARTBEAT, b"")
    publish(local_store, 0)
    assert PolicyFeed(local_store, Engine()).next().step == 0


def test_after_half_a_load_nothing_is_sampled_until_a_whole_policy_is_loaded(local_store, publish, monkeypatch):
    engine = Engine()
    feed = PolicyFeed(local_store, engine)
    publish(local_store, 0)
    feed.next()
    publish(local_store, 1)
    engine.fails_with = FileNotFoundError("pruned while the engine loads it")
    with monkeypatch.context() as patch:
        patch.setattr(policy_feed, "TRAINER_SILENT_S", 0.5)
        assert feed.next() is None
    engine.fails_with = None
    publish(local_store, 2)
    assert feed.next().step == 2


def test_weights_that_the_store_changed_are_an_error(local_store, publish):
    ref = publish(local_store, 1)
    local_store.put(f"{ref.path}/model.safetensors", b"x" * 32)
    with pytest.raises(RuntimeError, match=r"policies/step=00000001 is damaged or was changed"):
        PolicyFeed(local_store, Engine()).next()


@pytest.mark.s3
def test_this_machines_copy_that_changed_is_fetched_anew(moto_store, publish, tmp_path):
    ref = publish(moto_store, 1)
    copy = policies.fetch_policy(moto_store, ref, tmp_path / "cache")
    (copy / "model.safetensors").write_text("x" * 32)  # of the same size
    engine = Engine()
    feed = PolicyFeed(moto_store, engine)
    assert feed.next() == ref and engine.served.fingerprint == ref.fingerprint and engine.loads == 2
    moto_store.put(f"{ref.path}/model.safetensors", b"x" * 32)
    policies.drop_cached_policy(ref, tmp_path / "cache")
    with pytest.raises(DamagedPolicy, match=r"step=00000001.*model\.safetensors is not the published file"):
        policies.fetch_policy(moto_store, ref, tmp_path / "cache")  # which the feed tries again later


def test_a_synchronous_searcher_waits_for_another_policy(local_store, publish):
    feed = PolicyFeed(local_store, Engine(), is_synchronous=True)
    publish(local_store, 0)
    feed.next()
    another = threading.Timer(0.5, lambda: publish(local_store, 1))
    another.start()
    assert feed.next().step == 1
    another.join()
    assert json.loads(local_store.get(policies.LATEST))["step"] == 1


def test_in_the_middle_of_a_round_a_new_policy_is_served(local_store, publish):
    engine = Engine()
    feed = PolicyFeed(local_store, engine)
    publish(local_store, 0)
    feed.next()
    second = publish(local_store, 1)
    feed._load_s = 0.0  # a load takes no time
    feed.poll()
    assert engine.served.step == 1
    assert feed.paths([engine.served]) == [second.path]
    assert feed.next() == second and feed.is_new, "it is to be evaluated"
    assert feed.next() == second and not feed.is_new
    publish(local_store, 2, final=True)
    feed.poll()
    assert engine.served.step == 1, "nobody trains on responses of the final policy"


def test_loads_take_little_of_a_rounds_time(local_store, publish):
    engine = Engine()
    feed = PolicyFeed(local_store, engine)
    publish(local_store, 0)
    feed.next()
    publish(local_store, 1)
    feed._load_s = 60.0
    feed.poll()
    assert engine.served.step == 0
    feed._loaded_at -= 60.0 / policy_feed.LOAD_SHARE
    feed.poll()
    assert engine.served.step == 1


def test_in_the_middle_of_a_round_another_policy_replaces_half_a_load(local_store, publish, monkeypatch):
    engine = Engine()
    feed = PolicyFeed(local_store, engine)
    publish(local_store, 0)
    feed.next()
    feed._load_s = 0.0
    publish(local_store, 1)
    load = engine.load

    def lose(folder, step):
        publish(local_store, 2, final=True)
        engine.load = load
        raise FileNotFoundError("pruned while the engine loads it")

    engine.load = lose
    feed.poll()
    assert engine.served.step == 2, "the final one, too, and before poll returns: the engine serves none"
    publish(local_store, 3)
    feed._load_s = 0.0
    engine.fails_with = FileNotFoundError("pruned while the engine loads it")
    monkeypatch.setattr(policy_feed, "TRAINER_SILENT_S", -1)
    with pytest.raises(RuntimeError, match="loaded in part, and no other one was published"):
        feed.poll()
