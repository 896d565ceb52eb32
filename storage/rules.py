"""The rules that a trajectory must keep to be trained on, for the Searcher's quality gate and the Trainer's intake.

A rule is about facts: one flat row for each trajectory, computed by Arrow (lengths, counts of bad values). 1,000
trajectories are checked in milliseconds. The audit (storage/audit.py) checks the same rules by Great Expectations,
which takes 170 ms for a shard.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.paths import LARGEST_NUMBER
from storage.schema import SCHEMA_VERSION, TRAJECTORY
from storage.shards import trajectory_ids

ANY_VOCABULARY = 2**31  # token ids are int32
_INT32_MAX = 2**31 - 1
_STEPS = ("policy_step", "last_policy_step")
_FINGERPRINTS = ("policy_fingerprint", "last_policy_fingerprint")
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_TOKENS = ("prompt_tokens", "response_tokens")
_LOGPROBS = ("behavior_logprobs", "reference_logprobs")
_NUM_EXAMPLES = 3  # offending values that a reason quotes


@dataclass(frozen=True)
class Limits:
    """The limits of a run, for the rules."""

    vocab_size: int = ANY_VOCABULARY  # token ids are in [0, vocab_size)
    last_step: int = LARGEST_NUMBER  # the newest policy that the run can have


def is_between(values: pa.ChunkedArray, low: int, high: int) -> pa.ChunkedArray:
    return pc.and_(pc.greater_equal(values, low), pc.less_equal(values, high))


@dataclass(frozen=True)
class Rule:
    """A rule about some columns of the facts. A null breaks only the rule against nulls."""

    text: str
    columns: tuple[str, ...]
    holds: Callable[..., pa.ChunkedArray | pa.Array]  # of the columns: whether each row keeps the rule
    expectation: str  # the same rule by the name of Great Expectations' class, and its arguments
    arguments: dict


def _between(text: str, column: str, low: int, high: int) -> Rule:
    arguments = {"column": column, "min_value": low, "max_value": high}
    return Rule(
        text, (column,), lambda values: is_between(values, low, high), "ExpectColumnValuesToBeBetween", arguments
    )


def _among(text: str, column: str, *allowed: str) -> Rule:
    def holds(values):
        return pc.or_kleene(pc.is_in(values, pa.array(allowed)), pc.is_null(values))

    arguments = {"column": column, "value_set": list(allowed)}
    return Rule(text, (column,), holds, "ExpectColumnValuesToBeInSet", arguments)


def _equal(text: str, a: str, b: str) -> Rule:
    return Rule(text, (a, b), pc.equal, "ExpectColumnPairValuesToBeEqual", {"column_A": a, "column_B": b})


def _unique(text: str, column: str) -> Rule:
    def holds(values):
        counts = pc.value_counts(values)
        repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
        return pc.invert(pc.is_in(values, repeated))

    return Rule(text, (column,), holds, "ExpectColumnValuesToBeUnique", {"column": column})


NOT_EMPTY = "a shard has trajectories"
RULES = (
    _among("no column is null", "null_columns", ""),
    _unique("trajectory_id is unique", "trajectory_id"),
    _equal("trajectory_id is searcher-round-index", "trajectory_id", "id_of_place"),
    _among("reward is finite", "bad_reward", ""),
    _between("components of rewards are finite and have different names", "num_bad_rewards", 0, 0),
    *(_between(f"{name} has at least one token", f"num_{name}", 1, _INT32_MAX) for name in _TOKENS),
    *(_between(f"{name} are inside the vocabulary", f"num_bad_{name}", 0, 0) for name in _TOKENS),
    *(
        _equal(f"{name} has one value for each response token", f"num_{name}", "num_response_tokens")
        for name in _LOGPROBS
    ),
    *(_between(f"{name} are finite and <= 0", f"num_bad_{name}", 0, 0) for name in _LOGPROBS),
    _among("finish_reason is stop or length", "finish_reason", "stop", "length"),
    *(_among(f"{name} is a step of the run", f"bad_{name}", "") for name in _STEPS),
    *(_between(f"{name} is not empty", f"num_{name}", 1, _INT32_MAX) for name in _FINGERPRINTS),
    _among("temperature is finite and > 0", "bad_temperature", ""),
    _among("top_p is > 0 and <= 1", "bad_top_p", ""),
    _between("schema_version is one that this version reads", "schema_version", 1, SCHEMA_VERSION),
)


def validate_shard(table: pa.Table, limits: Limits) -> list[str]:
    """The rules that a round's trajectories break, as they would be committed; empty if they may be trained on."""
    if not table.schema.equals(TRAJECTORY):
        wrong = sorted(str(field) for field in set(table.schema) - set(TRAJECTORY))
        missing = sorted(str(field) for field in set(TRAJECTORY) - set(table.schema))
        return [f"schema: missing {missing}, unknown {wrong}, or another order; expected storage.schema.TRAJECTORY"]
    return broken(facts_of(table, limits))


def broken_in_each(shards: list[pa.Table], limits: Limits) -> list[list[str]]:
    """The rules that each shard breaks. Many good shards take little more time than one."""
    if len(shards) > 1 and all(shard.num_rows for shard in shards):
        index = np.concatenate([np.arange(shard.num_rows) for shard in shards])
        if not broken(facts_of(pa.concat_tables(shards), limits, index)):
            return [[] for _ in shards]
    return [broken(facts_of(shard, limits)) for shard in shards]


def broken(facts: pa.Table) -> list[str]:
    """The rules that the facts break: each with the number of trajectories that break it, and the first values."""
    if not facts.num_rows:
        return [f"{NOT_EMPTY}: got 0"]
    found = []
    for rule in RULES:
        columns = [facts[name] for name in rule.columns]
        holds = pc.fill_null(rule.holds(*columns), True)
        if pc.all(holds).as_py():
            continue
        offending = facts.select(rule.columns).filter(pc.invert(holds))
        values = [column.to_pylist() for column in offending.slice(0, _NUM_EXAMPLES).columns]
        examples = values[0] if len(values) == 1 else list(map(list, zip(*values, strict=True)))
        found.append(describe(rule.text, rule.columns, (offending.num_rows, facts.num_rows), examples))
    return found


def describe(text: str, columns: tuple[str, ...], counts: tuple[int, int], examples: list) -> str:
    """One line: the rule, how many trajectories of all break it, and the first offending facts."""
    return f"{text}: broken by {counts[0]} of {counts[1]}, where ({', '.join(columns)}) is {examples[:_NUM_EXAMPLES]}"


def facts_of(table: pa.Table, limits: Limits, index: np.ndarray | None = None) -> pa.Table:
    """The facts of TRAJECTORY rows. index: of each row in its shard; None: the table is one shard."""
    places = np.arange(table.num_rows) if index is None else index
    facts = {name: table[name] for name in ("trajectory_id", "finish_reason", "schema_version")}
    facts["null_columns"] = _null_columns(table)
    facts["bad_reward"] = _complaints(table["reward"], pc.is_finite(table["reward"]))
    for name in (*_TOKENS, *_LOGPROBS):
        facts[f"num_{name}"] = pc.fill_null(pc.list_value_length(table[name]), 0)
    for name in _TOKENS:
        facts[f"num_bad_{name}"] = _count_outside(table[name], 0, limits.vocab_size - 1)
    for name in _LOGPROBS:
        facts[f"num_bad_{name}"] = _count_outside(table[name], -_FLOAT32_MAX, 0)
    facts["num_bad_rewards"] = _count_not_finite(table["rewards"])
    facts["id_of_place"] = trajectory_ids(table["searcher"], table["round"], places)
    temperature, top_p = table["temperature"], table["top_p"]
    for name in _STEPS:
        facts[f"bad_{name}"] = _complaints(table[name], is_between(table[name], 0, limits.last_step))
    for name in _FINGERPRINTS:
        facts[f"num_{name}"] = pc.utf8_length(table[name])
    positive = pc.and_(pc.is_finite(temperature), pc.greater(temperature, 0))
    facts["bad_temperature"] = _complaints(temperature, positive)
    facts["bad_top_p"] = _complaints(top_p, pc.and_(pc.greater(top_p, 0), pc.less_equal(top_p, 1)))
    return pa.table(facts)


def _null_columns(table: pa.Table) -> pa.Array | list[str]:
    """Names of each row's null columns, in one text column, because each further expectation takes milliseconds."""
    with_nulls = [name for name in TRAJECTORY.names if table[name].null_count]
    if not with_nulls:
        return pa.repeat("", table.num_rows)
    nulls = [[name if null else "" for null in pc.is_null(table[name]).to_pylist()] for name in with_nulls]
    return [" ".join(filter(None, names)) for names in zip(*nulls, strict=True)]


def _complaints(values: pa.ChunkedArray, good: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """Empty text where a value is good or null, otherwise the value as text."""
    good = pc.fill_null(good, True)
    if pc.all(good).as_py():
        return pa.repeat("", len(values))
    return pc.if_else(good, "", pc.cast(values, pa.string()))


def _count_outside(lists: pa.ChunkedArray, low: float, high: float) -> np.ndarray:
    """Number of values of each row's list outside [low, high]; null and NaN count as outside."""
    rows = lists.combine_chunks()
    values = rows.flatten().to_numpy(zero_copy_only=False)  # nulls become NaN
    inside = (values >= low) & (values <= high)
    if inside.all():
        return np.zeros(len(rows), np.int64)
    return np.bincount(pc.list_parent_indices(rows).to_numpy()[~inside], minlength=len(rows))


def _count_not_finite(maps: pa.ChunkedArray) -> np.ndarray:
    """Number of components of each row's rewards that are null or not finite."""
    rows = maps.combine_chunks()
    values = rows.items[rows.offsets[0].as_py() : rows.offsets[-1].as_py()]
    rows_of = np.repeat(np.arange(len(rows)), np.diff(rows.offsets.to_numpy()))
    keys = rows.keys[rows.offsets[0].as_py() : rows.offsets[-1].as_py()]
    distinct = pa.table({"row": rows_of, "key": keys}).group_by(["row", "key"]).aggregate([]).num_rows
    if not values.null_count and pc.all(pc.is_finite(values), min_count=0).as_py() and distinct == len(keys):
        return np.zeros(len(maps), np.int64)
    components = (row or [] for row in maps.to_pylist())
    return np.array(
        [
            sum(value is None or not np.isfinite(value) for _, value in row) + len(row) - len({key for key, _ in row})
            for row in components
        ]
    )
