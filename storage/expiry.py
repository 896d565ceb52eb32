"""Expiry: old trajectories leave the buffer, in two steps that are apart in time.

    expired/searcher=<id>/through=00000041.json    put first: rounds up to 41 do not count any more
    the shards themselves, and their rewards       deleted by a later call, once the mark is `grace` old

From the mark on no reader of this package begins to read these rounds; who had begun has `grace` to finish. Killed
anywhere, each shard still counts or does not, and the next call goes on. Only the oldest rounds of a searcher expire
and never its last, so that the rest has no gaps and its next round is numbered as before. Of a run that is not
finished, what a resume from any kept checkpoint would draw as recent, and all that came later, stays.

What an earlier step drew cannot be drawn again once a part of it has expired; the ledger keeps its ids.
"""

import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from storage import inspect, ledger
from storage.errors import AlreadyExists, NotFound
from storage.sql import sql
from storage.store import RunStore, transfer_all


def expire(store: RunStore, before: datetime | None, keep: int | None, min_size: int) -> dict[str, int]:
    """Mark as expired what was committed earlier than `before`, and what exceeds the newest `keep` trajectories.

    Whole shards only; the newest `min_size` trajectories stay in any case. Returns per searcher the last expired round.
    """
    finished, checkpoints = store.exists("summary.json"), ledger.list_checkpoints(store)
    parameters = {"before": before, "keep": keep, "min_size": min_size, "finished": finished}
    parameters["checkpoint"] = checkpoints[0] if checkpoints else None
    with inspect.connect(store) as connection:
        chosen = dict(connection.execute(sql("choose_expired"), parameters).fetchall())
    for searcher, last in chosen.items():
        mark = {"at": datetime.now(UTC).isoformat(), "before": before and before.isoformat(), "keep": keep}
        with suppress(AlreadyExists):
            store.put_new(f"expired/searcher={searcher}/through={last:08d}.json", json.dumps(mark).encode())
    return chosen


def delete_expired(store: RunStore, grace: timedelta) -> int:
    """Delete the shards that were marked at least `grace` ago, and their rewards. Returns how many shards."""
    due = [path for path in store.list("expired") if _marked_at(store, path) <= datetime.now(UTC) - grace]
    through: dict[str, str] = {}
    for path in due:  # in order: a searcher's last one wins
        _, searcher, name = path.split("/")
        through[searcher] = name.removeprefix("through=").removesuffix(".json")
    paths = [
        path
        for path in [*store.list("rewards"), *store.list("trajectories")]
        if path.endswith(".parquet") and _round(path) <= through.get(path.split("/")[-2], "")
    ]

    def delete(path: str) -> None:
        with suppress(NotFound):  # somebody else was faster
            store.delete(path)

    transfer_all(delete, paths)
    return sum(path.startswith("trajectories/") for path in paths)


def _marked_at(store: RunStore, path: str) -> datetime:
    return datetime.fromisoformat(json.loads(store.get(path))["at"])


def _round(path: str) -> str:
    """The 00000042 of …/round=00000042.parquet: as many digits always, so that text compares as numbers do."""
    return path.rpartition("round=")[2].removesuffix(".parquet")
