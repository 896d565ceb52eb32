"""Claims about the best policy (storage/kept_policies.py). Run: pytest tests/storage/test_best_policy.py

- the best policy and one that is being evaluated are never pruned; best.json names a whole policy in every order in
  which the Trainer's and the Searcher's requests reach the store
- a Searcher that lost its name during the upload replaces neither best.json nor a policy.json; and the best policy of
  meanwhile stays
"""

import errno
import json
import threading
from collections import Counter
from collections.abc import Callable, Container
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from storage import kept_policies
from storage.errors import Superseded
from storage.kept_policies import best_policy, hold_policy, keep_if_best, prune_policies, release_policy
from storage.policies import fetch_policy, published_policies
from storage.store import RunStore
from tests.faults.memory_store import MemoryFiles, memory_store
from tests.storage.helpers import has_weights


def evaluate(store: RunStore, ref, accuracy: float, cache: Path | None = None) -> None:
    """What a Searcher does around an evaluation."""
    if hold_policy(store, ref, "s0"):
        keep_if_best(store, ref, accuracy, 256, cache)
    release_policy(store, "s0")


def whole(store: RunStore) -> list[str]:
    return [name for name in store.folders("policies") if has_weights(store, name)]


def test_the_best_policy_stays_and_of_equal_ones_the_newer(store, publish, tmp_path):
    assert best_policy(store) is None
    for step, accuracy in enumerate([0.25, 0.75, 0.5, 0.75, 0.625, 0.5]):
        evaluate(store, publish(store, step), accuracy)
        prune_policies(store, keep=1)
        if step == 2:
            assert whole(store) == ["step=00000001", "step=00000002"]
    assert whole(store) == ["step=00000003", "step=00000005"]
    best = best_policy(store)
    assert (best.step, best.path, best.accuracy, best.num_problems) == (3, "policies/step=00000003", 0.75, 256)
    assert (fetch_policy(store, best, tmp_path / "cache") / "model.safetensors").read_text() == "w" * 1003
    latest = json.loads(store.get("policies/latest.json"))
    assert json.loads(store.get("policies/best.json")).keys() == latest.keys() | {"accuracy", "num_problems"}


def test_the_best_policy_stays_when_a_resume_undoes_its_step(store, publish):
    evaluate(store, publish(store, 40), 0.75)
    for step in (30, 31, 32):  # the second attempt resumed from a checkpoint at 30
        evaluate(store, publish(store, step, attempt=2), 0.5)
        prune_policies(store, keep=1)
    assert best_policy(store).path == "policies/step=00000040"
    assert whole(store) == ["step=00000032-a0002", "step=00000040"]


def test_a_policy_is_held_while_it_is_evaluated_or_until_a_killed_searchers_successor_holds_another(store, publish):
    assert hold_policy(store, publish(store, 0), "s0")
    for step in (1, 2):
        newest = publish(store, step)
        prune_policies(store, keep=1)
    assert whole(store) == ["step=00000000", "step=00000002"]
    assert hold_policy(store, newest, "s0")  # the successor of one that was killed
    publish(store, 3)
    prune_policies(store, keep=1)
    assert whole(store) == ["step=00000002", "step=00000003"]
    release_policy(store, "s0")
    prune_policies(store, keep=1)
    assert whole(store) == ["step=00000003"]


def test_an_evaluation_that_is_repeated_holds_its_policy_again(store, publish):
    held = publish(store, 0)
    assert hold_policy(store, held, "s0")
    for step in range(1, 5):
        publish(store, step)
        prune_policies(store, keep=3)
    assert hold_policy(store, held, "s0") and keep_if_best(store, held, 0.5, 256)
    assert best_policy(store).step == 0


@pytest.mark.parametrize("path", ["", "../../x", "heads"])
def test_a_held_name_that_is_no_policys_stops_no_trainer(store, publish, caplog, path):
    refs = [publish(store, step) for step in range(3)]
    hold_policy(store, refs[0], "s0")
    (held,) = store.list("policies/held")
    store.put(held, json.dumps(json.loads(store.get(held)) | {"path": path}).encode())
    prune_policies(store, keep=1)
    assert whole(store) == ["step=00000000", "step=00000001", "step=00000002"]
    assert "no policy is pruned for now" in caplog.text


def test_a_pruned_policy_cannot_be_held(store, publish):
    old = publish(store, 0)
    publish(store, 1)
    prune_policies(store, keep=1)
    publish(store, 2)
    prune_policies(store, keep=1)  # announces another
    assert not hold_policy(store, old, "s0")


def test_a_searcher_that_lost_its_name_replaces_nothing(store, publish):
    """It was cut off, and another process of its name holds another policy."""
    published = [publish(store, step) for step in range(3)]
    evaluate(store, published[0], 0.5)
    assert hold_policy(store, published[1], "s0")

    def lost() -> None:
        raise Superseded("another process has the name")

    before = {path: store.get(path) for path in store.list("policies")}
    with pytest.raises(Superseded):
        keep_if_best(store, published[1], 0.75, 256, check=lost)
    left = {path: store.get(path) for path in store.list("policies") if path.endswith(".json")}
    assert left == {path: data for path, data in before.items() if path.endswith(".json")}


def test_a_name_that_is_lost_between_two_tries_replaces_nothing(local_store, publish, monkeypatch):
    """A put is repeated while the store is away; meanwhile another process has the name."""
    policy, answers = publish(local_store, 0), iter([None, Superseded("another process has the name")])
    assert hold_policy(local_store, policy, "s0")

    def check() -> None:
        if error := next(answers):
            raise error

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(Superseded):
        keep_if_best(local_store, policy, 0.75, 256, check=check)
    assert best_policy(local_store) is None


def test_a_better_policy_of_meanwhile_stays_the_best(store, publish):
    first, second = (publish(store, step) for step in range(2))
    assert hold_policy(store, first, "s0") and hold_policy(store, second, "s1")
    upload = kept_policies._store_weights

    def upload_slowly(*given: object) -> None:
        upload(*given)
        if given[1] == first:
            assert keep_if_best(store, second, 0.75, 256)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_policies, "_store_weights", upload_slowly)
        assert not keep_if_best(store, first, 0.5, 256)
    assert best_policy(store).step == 1


class Shelf(MemoryFiles):
    """Files in memory. Every request waits until it is its thread's turn; transfers of whole files do not."""

    def __init__(self, data: dict[str, bytes]) -> None:
        self.data = data
        self.may, self.did = {}, threading.Semaphore(0)
        self.at_work: set[str] = set()
        self.errors: list[BaseException] = []

    def start(self, name: str, work) -> None:
        """Lets a thread of this name come to its first request."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            finally:
                self.at_work.remove(name)
                self.did.release()

        self.may[name] = threading.Semaphore(0)
        self.at_work.add(name)
        threading.Thread(target=run, name=name, daemon=True).start()
        self.did.acquire()

    def step(self, name: str) -> None:
        """Lets the thread come to its next request, or to its end. Nothing where it has ended."""
        if name in self.at_work:
            self.may[name].release()
            self.did.acquire()

    def _turn(self) -> None:
        if (name := threading.current_thread().name) in self.may:
            self.did.release()
            self.may[name].acquire()

    def get(self, path: str) -> bytes:
        self._turn()
        return super().get(path)

    def put(self, path: str, data: bytes, check: Callable[[], object]) -> None:
        self._turn()
        super().put(path, data, check)

    def files(self, folder: str, start_after: str) -> list[str]:
        self._turn()
        return super().files(folder, start_after)

    def delete(self, path: str) -> None:
        self._turn()
        if self.data.pop(path, None) is None:
            raise FileNotFoundError(path)


def best_after(turns: Container[int], num_turns: int, stored: dict[str, bytes], evaluate_now) -> int:
    """The step of the best policy after an evaluation and a pruning, in this order of their requests."""
    store, shelf = memory_store(), Shelf(dict(stored))
    store._files = shelf
    shelf.start("trainer", lambda: prune_policies(store, keep=1))
    for _ in range(2):  # the listing and the newest policy, which an evaluation does not change
        shelf.step("trainer")
    shelf.start("searcher", lambda: evaluate_now(store))
    for turn in range(num_turns):
        shelf.step("searcher" if turn in turns else "trainer")
    while shelf.at_work:
        shelf.step(min(shelf.at_work))
    assert not shelf.errors, (turns, shelf.errors)
    best = best_policy(store)
    assert f"{best.path}/model.safetensors" in shelf.data, turns
    found = published_policies(store)[best.path]
    assert found.whole and not found.pruned, turns
    return best.step


def test_whatever_order_pruning_and_evaluation_come_in_best_json_names_a_whole_policy(local_store, publish):
    was_best, refs = publish(local_store, 0), [publish(local_store, step) for step in (1, 2)]
    evaluate(local_store, was_best, 0.25)
    prune_policies(local_store, keep=2)
    stored = {path: local_store.get(path) for path in local_store.list("policies")}
    PRUNING, EVALUATING = 7, 7  # requests: from the announcement until a policy is marked as pruned; all
    orders = combinations(range(PRUNING + EVALUATING), EVALUATING)
    outcomes = {
        best_after(turns, PRUNING + EVALUATING, stored, lambda store: evaluate(store, refs[0], 0.5)) for turns in orders
    }
    assert outcomes == {0, 1}  # pruning came first, and evaluation did


def test_the_same_where_the_policies_are_deltas(memory_run, trainer, tmp_path):
    refs = [trainer.publish(step) for step in range(10)]  # the ninth is whole, so the tenth does not need the second
    evaluate(memory_run, refs[0], 0.25)
    fetch_policy(memory_run, refs[1], tmp_path / "cache")
    PRUNING, EVALUATING = 12, 9  # of the pruned policies, the second is marked as the second one
    random, outcomes = Random(0), Counter()
    for _ in range(500):
        turns = set(random.sample(range(PRUNING + EVALUATING), EVALUATING))
        stored = dict(memory_run._files.data)
        outcomes[
            best_after(
                turns, len(turns) + PRUNING, stored, lambda store: evaluate(store, refs[1], 0.5, tmp_path / "cache")
            )
        ] += 1
    assert outcomes.keys() == {0, 1}
