"""summary.json: the result of a run, computed from the store alone."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import chain, pairwise
from statistics import median

from pydantic import BaseModel, FiniteFloat

from storage import attempts, intake, kept_policies, policies, queries
from storage.store import RunStore

Interval = tuple[datetime, datetime]

_PATH = "summary.json"
MAX_REFUSED = 100  # refused shards that a summary names; `tba verify` names all


class _Summary(BaseModel, extra="allow"):
    """The fields of summary.json that this project computes with."""

    steps: int | None = None
    trajectories: int | None = None
    refused_shards: dict[str, str] = {}
    wall_s: FiniteFloat | None = None


def read_summary(store: RunStore) -> dict | None:
    """The summary of a finished run; None before its end. Raises: DamagedRecord: it cannot be read."""
    found = store.read_json(_PATH, _Summary, remedy="Delete it; the same `tba train` writes it again.")
    return found and found.model_dump(exclude_unset=True)


def is_finished(store: RunStore) -> bool:
    return store.exists(_PATH)


def summarise(store: RunStore) -> dict:
    """Writes `summary.json` of a trained run and returns it. Shares are shares of time.

    First checks the shards that no sync took in, so that the summary names every refused one.
    """
    intake.refuse_rest(store)
    refused = intake.refusals(store)
    steps = queries.query(store, "SELECT * FROM training_steps ORDER BY step").to_pylist()
    rounds = queries.query(store, "SELECT * FROM search_rounds ORDER BY started_at").to_pylist()
    evaluations = queries.query(store, "SELECT policy_step, accuracy, created_at FROM evaluations").to_pylist()
    accuracy = {row["policy_step"]: row["accuracy"] for row in evaluations}
    records, best = attempts.list_attempts(store), kept_policies.best_policy(store)
    training = [(step["started_at"], step["ended_at"]) for step in steps]
    sampling = union([(row["sampling_started_at"], row["sampling_ended_at"]) for row in rounds])
    # Of each attempt's time from its first step to its last: before the first one engines start.
    later = [step for before, step in pairwise(steps) if step["attempt"] == before["attempt"]]
    wait_s = sum(step["wait_s"] or 0.0 for step in later)
    last = _last_step(store, steps)
    staleness = [step for step in steps if step["staleness_mean"] is not None and step["staleness_max"] is not None]
    summary = {
        "run": store.run,
        "accuracy_before": accuracy.get(0),
        "accuracy_after": accuracy.get(last),
        "best_accuracy": best.accuracy if best else None,
        "best_step": best.step if best else None,
        "best_policy": best.path if best else None,
        "steps": last,
        "trajectories": queries.query(store, "SELECT count(*) FROM trajectories").column(0)[0].as_py(),
        "staleness_mean": _mean(step["staleness_mean"] for step in staleness),
        "staleness_max": max((step["staleness_max"] for step in staleness), default=None),
        "trainer_wait_share": _share(wait_s, wait_s + length(training)),
        # Runs of an older version did not measure it.
        "publish_stall_share": _share(sum(step["publish_stall_s"] or 0.0 for step in later), length(training)),
        "searcher_idle_share": idle_share(rounds, [record.began_at for record in records]),
        "evaluation_share": evaluation_share(store, rounds),
        "overlap_share": _share(length(intersection(union(training), sampling)), length(training)),
        "wall_s": (_last_record(steps, rounds, evaluations) - attempts.first_attempt_at(store)).total_seconds(),
        "step_s_median": median([step["step_s"] for step in steps if step["step_s"] is not None] or [0.0]),
        "attempts": max((step["attempt"] for step in steps), default=None),
        "num_refused_shards": len(refused),
        "refused_shards": {refusal.shard: "; ".join(refusal.reasons) for refusal in refused[:MAX_REFUSED]},
        "note": None if rounds else "accuracy was not measured, because no Searcher, and so no engine, took part",
        "finished_at": datetime.now(UTC).isoformat(),
    }
    store.put_json(_PATH, summary)
    return summary


def _last_step(store: RunStore, steps: list[dict]) -> int:
    """That of the final policy, because the last step's entry may be torn."""
    final = policies.latest_policy(store)
    return final.step if final and final.final else max((step["step"] for step in steps), default=0)


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def _share(part: float, whole: float) -> float | None:
    """None: a clock stood still, or an entry of the ledger holds no number."""
    return part / whole if whole > 0 and math.isfinite(part / whole) else None


def _last_record(*rows: list[dict]) -> datetime:
    """When the last step, round or evaluation ended; now, if there is none."""
    times = (row.get("ended_at") or row.get("created_at") for row in chain(*rows))
    return max((time for time in times if time is not None), default=datetime.now(UTC))


def idle_share(rounds: list[dict], attempts_at: Iterable[datetime]) -> float | None:
    """Share of the Searchers' time, each from its first round of an attempt to its last, that is outside their rounds.

    attempts_at: when each attempt began. None: there was no Searcher, or no time passed by its clock.
    """
    began, by_attempt = sorted(attempts_at), defaultdict(list)
    for row in rounds:
        by_attempt[row["searcher"], bisect_right(began, row["started_at"])].append(row)
    busy = present = timedelta()
    for own in by_attempt.values():
        busy += sum((row["ended_at"] - row["started_at"] for row in own), timedelta())
        present += max(row["ended_at"] for row in own) - min(row["started_at"] for row in own)
    return 1 - busy / present if present else None


def evaluation_share(store: RunStore, rounds: list[dict]) -> float | None:
    """Share of the time in which Searchers sampled, scored or evaluated that had an evaluation, undone ones included.

    None: no policy was evaluated, or an older version did not measure the duration.
    """
    rows = queries.query(
        store,
        "SELECT created_at, seconds FROM stored_evaluations WHERE seconds > 0 AND seconds < 1e9 "
        "AND created_at BETWEEN TIMESTAMPTZ '1990-01-01' AND TIMESTAMPTZ '9999-01-01'",
    ).to_pylist()
    if not rows:
        return None
    evaluating = [(row["created_at"] - timedelta(seconds=row["seconds"]), row["created_at"]) for row in rows]
    searching = [(row["started_at"], row["ended_at"]) for row in rounds]
    return _share(length(union(evaluating)), length(union(evaluating + searching)))


def union(intervals: list[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(these: list[Interval], those: list[Interval]) -> list[Interval]:
    """The intersection of two lists of disjoint intervals in order. Takes linear time, because a long run has many."""
    both, i, j = [], 0, 0
    while i < len(these) and j < len(those):
        start, end = max(these[i][0], those[j][0]), min(these[i][1], those[j][1])
        if start < end:
            both.append((start, end))
        if these[i][1] < those[j][1]:
            i += 1
        else:
            j += 1
    return both


def length(intervals: list[Interval]) -> float:
    """Seconds in disjoint intervals."""
    return sum((end - start).total_seconds() for start, end in intervals)
