"""The account of a soak: what was acknowledged and drawn, looked up in the bucket without the product's own readers.

Objects are a mapping from key (inside the run) to bytes. Every rule is written here again, on plain rows, so that a
fault of storage/ cannot hide itself.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq

from tests.faults.searcher import digest

_SHARD = re.compile(r"trajectories/searcher=(?P<searcher>[^/]+)/round=(?P<round>\d{8})\.parquet")
_BATCH = re.compile(r"batches/attempt=(?P<attempt>\d{8})/step=(?P<step>\d{8})\.parquet")
_CHECKPOINT = re.compile(r"trainer/step=(?P<step>\d{8})-a(?P<attempt>\d{4,})/state\.json")
# A put that a proxy holds back is stored this long after its process died, at most.
LATE_S = 15.0


class S3Objects(Mapping):
    """The objects of a bucket below a prefix, listed once and read when asked for."""

    def __init__(self, client, bucket: str, prefix: str):
        self._client, self._bucket, self._prefix = client, bucket, prefix
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        self._keys = [item["Key"].removeprefix(prefix) for page in pages for item in page.get("Contents", [])]

    def __getitem__(self, key: str) -> bytes:
        return self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)["Body"].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass
class Account:
    """Counts, and a line for each thing that does not hold."""

    acknowledged: int = 0  # trajectories
    lost: int = 0
    twice: int = 0
    draws: int = 0  # slots of the ledger's batches
    invalid_draws: int = 0
    faults: list[str] = field(default_factory=list)


def account(
    objects: Mapping[str, bytes], acknowledged: list[dict], spoiled: list[str], shape: tuple[int, int], vocabulary: int
) -> Account:
    """acknowledged: path, rows and digest of each shard whose commit was answered. spoiled: keys put in by another
    writer: nothing of them may be drawn. shape: B, K. vocabulary: its size."""
    result, rows, places = Account(), {}, Counter()
    found = {}
    for key in sorted(key for key in objects if _SHARD.fullmatch(key) and key not in spoiled):
        match = _SHARD.fullmatch(key)
        try:
            shard = pq.ParquetFile(pa.BufferReader(objects[key])).read()
        except (pa.ArrowException, OSError) as error:
            result.faults.append(f"{key} cannot be read: {error}")
            continue
        found[key] = shard
        for place, row in enumerate(shard.to_pylist()):
            places[row["trajectory_id"]] += 1
            if reason := invalid(row, match["searcher"], int(match["round"]), place, vocabulary):
                result.faults.append(f"{key}: row {place}: {reason}")
            else:
                rows[row["trajectory_id"]] = row
    result.twice = sum(times - 1 for times in places.values())
    result.faults += [f"{name} is stored {times} times" for name, times in places.items() if times > 1]
    _account_for_acknowledged(result, found, acknowledged)
    _account_for_draws(result, objects, rows, shape)
    return result


def _account_for_acknowledged(result: Account, found: dict[str, pa.Table], acknowledged: list[dict]) -> None:
    for said in acknowledged:
        result.acknowledged += said["rows"]
        if (shard := found.get(said["path"])) is None:
            result.lost += said["rows"]
            result.faults.append(f"lost: {said['path']} was acknowledged with {said['rows']} rows")
        elif digest(shard) != said["digest"]:
            result.lost += said["rows"]
            result.faults.append(f"lost: {said['path']} has {shard.num_rows} rows, other ones than were acknowledged")


def _account_for_draws(result: Account, objects: Mapping[str, bytes], rows: dict[str, dict], shape: tuple) -> None:
    slots = {(prompt, slot) for prompt in range(shape[0]) for slot in range(shape[1])}
    for key in sorted(filter(_BATCH.fullmatch, objects)):
        match = _BATCH.fullmatch(key)
        try:
            drawn = pq.ParquetFile(pa.BufferReader(objects[key])).read().to_pylist()
        except (pa.ArrowException, OSError) as error:
            result.faults.append(f"{key} cannot be read: {error}")
            continue
        result.draws += len(drawn)
        if {(row["prompt_index"], row["slot"]) for row in drawn} != slots or len(drawn) != len(slots):
            result.faults.append(f"{key}: {len(drawn)} slots, expected each of {shape[0]} x {shape[1]} once")
        for row in drawn:
            if reason := invalid_draw(row, rows.get(row["trajectory_id"]), int(match["attempt"]), int(match["step"])):
                result.invalid_draws += 1
                result.faults.append(f"{key}: slot {row['prompt_index']}, {row['slot']}: {reason}")


def invalid(row: dict, searcher: str, number: int, place: int, vocabulary: int) -> str | None:
    """Why a stored row may not be trained on."""
    if empty := [name for name, value in row.items() if value is None]:
        return f"{', '.join(empty)} is null"
    if row["trajectory_id"] != f"{searcher}-{number:08d}-{place:05d}":
        return f"its id is {row['trajectory_id']}"
    if (row["searcher"], row["round"]) != (searcher, number):
        return f"it says searcher {row['searcher']}, round {row['round']}"
    if not row["prompt_tokens"] or not row["response_tokens"]:
        return "it has no tokens"
    if not all(0 <= token < vocabulary for token in row["prompt_tokens"] + row["response_tokens"]):
        return "a token is outside the vocabulary"
    for name in ("behavior_logprobs", "reference_logprobs"):
        if len(row[name]) != len(row["response_tokens"]):
            return f"{len(row[name])} {name} for {len(row['response_tokens'])} tokens"
        if not all(math.isfinite(value) and value <= 0 for value in row[name]):
            return f"{name} are not all finite and <= 0"
    if not all(math.isfinite(value) for value in (row["reward"], *dict(row["rewards"]).values())):
        return "its reward is not finite"
    if not (row["policy_step"] >= 0 and row["policy_fingerprint"] and row["temperature"] > 0):
        return f"of policy step {row['policy_step']}, fingerprint {row['policy_fingerprint']!r}"


def invalid_draw(drawn: dict, stored: dict | None, attempt: int, step: int) -> str | None:
    """Why a slot of a batch is not the draw of a valid stored row."""
    if stored is None:
        return f"{drawn['trajectory_id']} is no valid stored row"
    differing = [name for name in ("prompt_id", "reward", "policy_step") if drawn[name] != stored[name]]
    if differing:
        return f"{drawn['trajectory_id']} is stored with another {', '.join(differing)}"
    if (drawn["attempt"], drawn["step"]) != (attempt, step):
        return f"it says attempt {drawn['attempt']}, step {drawn['step']}"
    if not 0 < drawn["draw_probability"] <= 1:
        return f"its probability is {drawn['draw_probability']}"


def resumed_too_early(objects: Mapping[str, bytes], stored: list[tuple[float, str]]) -> list[str]:
    """Attempts that began before the newest whole checkpoint. stored: when the store took each put, and its key."""
    whole = [(at, int(m["step"]), int(m["attempt"])) for at, key in stored if (m := _CHECKPOINT.fullmatch(key))]
    names = sorted(key for key in objects if re.fullmatch(r"trainer/attempt=\d{8}\.json", key))
    attempts = {key: json.loads(objects[key]) for key in names}

    def counts(step: int, by: int, before: int) -> bool:
        """Whether no attempt between `by` and `before` resumed from before this step of `by`."""
        between = [other for other in attempts.values() if by < other["attempt"] < before]
        return by < before and all(step <= other["resumed_from"] for other in between)

    faults = []
    for key, attempt in attempts.items():
        began, number = datetime.fromisoformat(attempt["created_at"]).timestamp(), attempt["attempt"]
        in_time = [(step, by) for at, step, by in whole if at < began - LATE_S]
        newest = max((step for step, by in in_time if counts(step, by, number)), default=0)
        if attempt["resumed_from"] < newest:
            faults.append(f"{key} resumed from step {attempt['resumed_from']}, but step {newest} had a checkpoint")
    return faults


def step_ends(objects: Mapping[str, bytes]) -> list[float]:
    """When each training step ended, of every attempt, in order. Torn entries, which verify names, are left out."""
    ends = []
    for key in objects:
        if key.startswith("metrics/training/"):
            with suppress(pa.ArrowInvalid):
                table = pq.ParquetFile(pa.BufferReader(objects[key])).read(["ended_at"])
                ends += [end.timestamp() for end in table["ended_at"].to_pylist()]
    return sorted(ends)


def longest_stall(
    ends: list[float], until: float, outages: list[tuple[float, float]], kills: list[float] = ()
) -> float:
    """Seconds without the end of a training step or a kill of the Trainer, those of the outages left out.

    until: the last moment that counts.
    """
    moments = [*sorted(moment for moment in [*ends, *kills] if moment < until), until]
    return max((_outside(begin, end, outages) for begin, end in pairwise(moments)), default=0.0)


def _outside(begin: float, end: float, outages: list[tuple[float, float]]) -> float:
    """Length of an interval without the parts that outages cover."""
    left, at = 0.0, begin
    for first, last in sorted(outages):
        left += max(0.0, min(first, end) - at)
        at = max(at, min(last, end))
    return left + max(0.0, end - at)


def judge(said: list[dict], spoiled: list[str], status: int) -> list[str]:
    """What is wrong with verify's faults: one that names no spoiled file, a spoiled file that none names, its status.

    A file in quarantine is named by its searcher and round.
    """
    places = [re.sub(r"^trajectories/|\.[a-z]+$", "", key) for key in spoiled]
    named = {place for place in places for fault in said if place in f"{fault['path']} {fault['message']}"}
    others = [fault for fault in said if not any(place in f"{fault['path']} {fault['message']}" for place in places)]
    faults = [f"verify: {fault['kind']}: {fault['path']}: {fault['message']}" for fault in others]
    faults += [f"verify does not name {place}, which another writer put in spoiled" for place in set(places) - named]
    if status != (1 if spoiled else 0) and not others:
        faults.append(f"verify ended with status {status}")
    return faults
