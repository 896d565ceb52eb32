"""The policies that a Searcher serves: fetches and loads the newest one while a Trainer trains the run.

Before: storage/policies.py publishes a policy; after: tba/searcher.py serves it.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import get_run_logger

from infra.machine import policy_cache
from storage import attempts, policies
from storage.errors import DamagedPolicy, DamagedRecord, NotFound, UnsafePath
from storage.patience import patience_s
from storage.store import RunStore

if TYPE_CHECKING:  # importing it takes torch's seconds
    from tba.engine import ServedPolicy
    from tba.searcher import Searcher

# A Searcher ends by itself this long after the Trainer's last heartbeat. The heartbeat may have to wait for the store.
TRAINER_SILENT_S = max(180, 60 + patience_s())
POLL_S = 0.5
# A policy that was removed or damaged is tried again after this long, unless another one is published before.
LOST_S = 10.0
# A policy is loaded in the middle of a round only if such loads stop the engine for at most this share of the time.
LOAD_SHARE = 0.05


class PolicyFeed:
    """The policies that a Searcher's engine serves: the newest one that can be fetched.

    A removed or damaged policy does not stop the Searcher. It goes on with the policy that it serves, and tries the
    other one again after `LOST_S`. If it serves none, it waits: a waiting Trainer publishes a lost policy again
    (flows/trainer/outbox.py), and a training one publishes its next policy.

    A new policy is loaded before each round. It is loaded in the middle of a round, too, unless loads would take more
    than `LOAD_SHARE` of the time: the engine does not sample while it loads. tba/engine.py says with which policy
    responses in flight go on.
    """

    def __init__(
        self,
        store: RunStore,
        searcher: "Searcher",
        *,
        is_synchronous: bool = False,
        is_refused: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_synchronous`: each policy samples one round. `is_refused`: whether the Trainer refused the last round; it
        then waits for another one of the same policy."""
        self._store, self._searcher = store, searcher
        self._is_synchronous, self._is_refused = is_synchronous, is_refused
        self._pulse = attempts.pulse(store)
        self._policy: policies.PolicyRef | None = None  # None: the engine serves no policy, or a part of one
        self._lost: policies.PolicyRef | None = None
        self._lost_at = 0.0
        self._warned = ""
        self._paths: dict[ServedPolicy, str] = {}  # of each policy that the engine has served
        self._loaded_at, self._load_s = 0.0, 0.0
        self._returned: policies.PolicyRef | None = None
        self.is_new = False
        """Whether the last call of `next` returned another policy than the call before."""

    def next(self) -> policies.PolicyRef | None:
        """The policy for the next round, which the engine serves. Waits for one.

        Returns None: the Trainer has been silent for `TRAINER_SILENT_S`. Raises: RuntimeError: the engine's weights
        differ from the published ones.
        """
        served = self._wait()
        self.is_new, self._returned = served != self._returned, served
        return served

    def poll(self) -> None:
        """Makes the engine serve a new policy in the middle of a round, if loading takes little of the time.

        If the load fails halfway, waits for another policy: the engine must not sample with a part of one.
        Raises: RuntimeError: the engine's weights differ from the published ones, or no other policy is published.
        """
        if self._is_synchronous or time.monotonic() - self._loaded_at < self._load_s / LOAD_SHARE:
            return
        newest = self._newest()
        if newest is not None and not newest.final and self._is_to_try(newest):
            self._deliver(newest)
        if self._policy is None and self._wait() is None:
            raise RuntimeError("searcher: a policy was loaded in part, and no other one was published")

    def _wait(self) -> policies.PolicyRef | None:
        """The policy that the engine serves: a new one, if there is one. None: the Trainer has been silent for long."""
        while not self._pulse.is_silent(TRAINER_SILENT_S):
            newest = self._newest()
            is_delivered = newest is not None and self._is_to_try(newest) and self._deliver(newest)
            if is_delivered or self._may_go_on(newest):
                return self._policy
            time.sleep(POLL_S)
        get_run_logger().warning("no heartbeat from a Trainer for %d s: this Searcher ends", TRAINER_SILENT_S)
        return None

    def paths(self, served: Iterable["ServedPolicy"]) -> list[str]:
        """The paths, inside the run, of policies that the engine has served."""
        return sorted(self._paths[policy] for policy in served)

    def _newest(self) -> policies.PolicyRef | None:
        try:
            return policies.latest_policy(self._store)
        except DamagedRecord as error:  # the next policy replaces it
            self._warn(str(error))
            return None

    def _is_to_try(self, newest: policies.PolicyRef) -> bool:
        return newest != self._policy and (newest != self._lost or time.monotonic() - self._lost_at > LOST_S)

    def _may_go_on(self, newest: policies.PolicyRef | None) -> bool:
        """Whether the next round may be of the policy that is served already."""
        if self._policy is None or (self._is_synchronous and not self._is_refused()):
            return False
        return newest in (None, self._policy) or not newest.final  # rounds after the final policy are not trained on

    def _deliver(self, policy: policies.PolicyRef) -> bool:
        """Makes the engine serve the policy. Returns False if the policy cannot be fetched now."""
        try:
            folder = policies.fetch_policy(self._store, policy, policy_cache(self._store.run))
            self._policy, began = None, time.monotonic()  # until the engine has all of the new weights
            served = load_once_more(self._store, self._searcher, folder, policy, self._warn)
        except (NotFound, FileNotFoundError, DamagedPolicy, UnsafePath) as error:
            self._lost, self._lost_at = policy, time.monotonic()
            self._warn(f"policy step {policy.step} cannot be fetched: {error}")
            return False
        self._policy, self._paths[served] = policy, policy.path
        self._loaded_at = time.monotonic()
        self._load_s = self._loaded_at - began
        return True

    def _warn(self, message: str) -> None:
        if message != self._warned:  # not at every poll
            get_run_logger().warning(message)
        self._warned = message


def load_once_more(
    store: RunStore, searcher: "Searcher", folder: Path, policy: policies.PolicyRef, warn: Callable[[str], object]
) -> "ServedPolicy":
    """Loads the weights. If this machine's copy is damaged, fetches the policy again and loads it once more.

    Raises: RuntimeError: the engine's weights differ from the published ones.
    """
    try:
        return load(searcher, folder, policy)
    except Exception as error:  # a damaged file may raise any
        if not policies.drop_cached_policy(policy, policy_cache(store.run)):
            raise
        warn(f"the copy {folder} of policy step {policy.step} is damaged and is fetched again: {error}")
    return load(searcher, policies.fetch_policy(store, policy, policy_cache(store.run)), policy)


def load(searcher: "Searcher", folder: Path, policy: policies.PolicyRef) -> "ServedPolicy":
    """Loads a policy's folder into the engine.

    Raises: RuntimeError: the engine's weights differ from the published ones.
    """
    served = searcher.load(folder, policy.step)
    if served.fingerprint != policy.fingerprint:
        searcher.drop_rounds()  # they go on with these weights
        raise RuntimeError(
            f"searcher: the engine serves weights {served.fingerprint}, but policy step {policy.step} was published as "
            f"{policy.fingerprint}: {policy.path} is damaged or was changed after it was published"
        )
    return served
