"""Lineage of a run on Prefect's page: policies as assets, which depend on the shards that they were trained on.

The Searchers add the shards, which depend on the policy that sampled them (flows/search.py).
"""

import contextlib
import re

from prefect.assets import Asset, AssetProperties, add_asset_metadata, materialize
from prefect.events import emit_event

from storage import attempts, ledger, policies, shards
from storage.errors import DamagedRecord, NotFound
from storage.schema import BATCH
from storage.store import RunStore

RELATED_SHOWN = 90  # Prefect refuses an event that names more than 100 others


class PublishedPolicies:
    """The policies that the run publishes from now on. Use it inside the run's flow run.

    Earlier attempts' policies were shown by the flow runs that trained them.
    """

    def __init__(self, store: RunStore) -> None:
        self._store, self._earlier_attempts = store, attempts.latest_attempt(store)
        self._published: tuple[int, int] | None = None  # attempt and step of the policy that was shown last

    def show(self) -> None:
        """Shows each policy published since the last call: a task run named by its steps, an asset, an event."""
        latest = policies.latest_policy(self._store)
        if latest is None or latest.attempt <= self._earlier_attempts:
            return
        if self._published == (latest.attempt, latest.step):
            return
        if self._published is None or self._published[0] != latest.attempt:
            resumed_from = attempts.read_attempt(self._store, latest.attempt).resumed_from
            self._show_policy(latest.attempt, range(0), resumed_from)  # each attempt publishes its first policy
            self._published = (latest.attempt, resumed_from)
        for step in range(self._published[1] + 1, latest.step + 1):
            steps = range(self._published[1] + 1, step + 1)
            if self._show_policy(latest.attempt, steps, step, final=latest.final and step == latest.step):
                self._published = (latest.attempt, step)

    def _show_policy(self, attempt: int, steps: range, step: int, final: bool = False) -> bool:
        """Shows one policy. `steps`: training steps since the previous one. Returns False if `step` has no policy."""
        path, manifest = policies.policy_path(step, attempt), None
        with contextlib.suppress(DamagedRecord):  # `tba verify` names it
            manifest = self._store.read_json(f"{path}/{policies.MANIFEST}", policies.Manifest)
        if manifest is None:
            return False
        trained_on = self._shards_of(attempt, steps)
        payload = {
            "run": self._store.run,
            "store": self._store.url,
            "step": step,
            "path": path,
            "fingerprint": manifest.fingerprint,
            "attempt": attempt,
            "final": final,
            "num_shards": len(trained_on),
        }
        asset = Asset(
            key=asset_key(self._store, path), properties=AssetProperties(name=f"{self._store.run}, policy step {step}")
        )
        materialize(
            asset,
            asset_deps=[asset_key(self._store, shard) for shard in trained_on[-RELATED_SHOWN:]],
            task_run_name=f"steps {steps[0]} to {step}" if steps else f"policy of step {step}",
            persist_result=False,
        )(publish)(asset.key, payload)
        emit_event("tba.policy.published", resource=run_resource(self._store), payload=payload)
        return True

    def _shards_of(self, attempt: int, steps: range) -> list[str]:
        """Paths of the shards whose trajectories those steps were trained on, oldest round first."""
        drawn: set[str] = set()
        for step in steps:
            with contextlib.suppress(DamagedRecord, NotFound):  # `tba verify` names it
                found = ledger.read_entry(self._store, ledger.batch_path(attempt, step), BATCH, ["trajectory_id"])
                drawn |= set(found["trajectory_id"].to_pylist())
        rounds = set()
        for trajectory in drawn:
            with contextlib.suppress(ValueError):  # another program's entry
                rounds.add(shards.round_of(trajectory))
        return [shards.shard_path(searcher, number) for searcher, number in sorted(rounds, key=lambda r: r[::-1])]


def publish(asset: str, payload: dict) -> None:
    """Adds a policy's facts to its asset. The policy itself is in the store already."""
    add_asset_metadata(asset, payload)


def run_resource(store: RunStore) -> dict[str, str]:
    """The run as the resource of Prefect's events."""
    return {"prefect.resource.id": f"tba.run.{store.run}", "prefect.resource.name": store.run, "tba.store": store.url}


def asset_key(store: RunStore, path: str) -> str:
    """URL of a run's file or folder, without the characters that Prefect refuses in an asset's key."""
    return re.sub(r"[^\w:/.=@+~-]", "_", f"{store.url}/{store.run}/{path}", flags=re.ASCII)
