"""maintain/buffer: expires old trajectories, compacts small shards and the ledger, and audits the whole buffer.

Runs on request or on a schedule, during training or after it. Readers are not disturbed.
"""

from datetime import timedelta

from prefect import flow, get_run_logger, task

from flows.config import StoreUrl, load_run
from storage import audit, ledger_upkeep, upkeep
from storage.intake import limits_of
from storage.store import RunStore


@flow(name="maintain")
def maintain(
    store: StoreUrl, run: str, max_age_hours: float | None = None, keep: int | None = None, grace_hours: float = 1.0
) -> str | None:
    """Expires trajectories older than `max_age_hours` or beyond the newest `keep`, compacts, audits.

    None: no trajectory expires by that rule. A run of this flow at least `grace_hours` later deletes expired and
    compacted files; readers must have finished by then. Returns the URL of the audit's site;
    None: there is no shard yet.
    Raises: RuntimeError: the audit found faults. ValueError: a number is negative. NotFound: there is no such run.
    """
    for name, value in {"max_age_hours": max_age_hours, "keep": keep, "grace_hours": grace_hours}.items():
        if value is not None and value < 0:
            raise ValueError(f"{name}: got {value}; it must not be negative")
    run_store = RunStore(store, run)
    load_run(run_store)  # otherwise a mistyped name would be a run without faults
    expire(run_store, max_age_hours, keep)
    compact(run_store)
    delete_superseded(run_store, grace_hours)
    return audit_buffer(run_store)


@task(persist_result=False, retries=2, retry_delay_seconds=5)
def expire(store: RunStore, max_age_hours: float | None, keep: int | None) -> None:
    """Marks the shards that are too old, or beyond the number to keep, as expired."""
    if max_age_hours is None and keep is None:
        return
    max_age = None if max_age_hours is None else timedelta(hours=max_age_hours)
    marked = upkeep.expire(store, max_age, keep, load_run(store).sampling.min_size)
    get_run_logger().info("expired, by searcher the last round: %s", marked or "none")


@task(persist_result=False, retries=2, retry_delay_seconds=5)
def compact(store: RunStore) -> None:
    """Writes each block of small shards, and of the ledger's entries, as one file, which replaces them."""
    num_blocks, num_files = upkeep.compact(store), ledger_upkeep.compact_ledger(store)
    get_run_logger().info("%d blocks of shards compacted, %d files of the ledger written", num_blocks, num_files)


@task(persist_result=False, retries=2, retry_delay_seconds=5)
def delete_superseded(store: RunStore, grace_hours: float) -> None:
    """Deletes shards that an earlier run of this flow marked or compacted, and entries that it compacted."""
    grace = timedelta(hours=grace_hours)
    num_files = upkeep.delete_superseded(store, grace) + ledger_upkeep.delete_compacted(store, grace)
    get_run_logger().info("%d expired or compacted files deleted", num_files)


@task(persist_result=False)
def audit_buffer(store: RunStore) -> str | None:
    """Audits the whole buffer by Great Expectations. Returns the URL of the Data Docs, a site in the store.

    None: there is no shard yet.

    Raises: RuntimeError: the audit found faults; the message names each.
    """
    page, faults = audit.audit(store, limits_of(store))
    site = page and f"{store.url}/{store.run}/{page}"
    if faults:
        see = f" (see {site})" if site else ""
        raise RuntimeError(f"the buffer has {len(faults)} faults{see}: {'; '.join(faults)}")
    get_run_logger().info("the buffer has no faults: %s", site or "no shard was committed yet")
    return site
