"""The quality gate: the rules for a shard before it is committed, as a Great Expectations suite.

The suite checks facts: one flat row a trajectory, computed from the shard by Arrow (lengths, counts of bad values). So
its cost does not grow with the number of tokens.
"""

import logging
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.schema import TRAJECTORY
from storage.shards import trajectory_id

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_TOKENS = ("prompt_tokens", "response_tokens")
_LOGPROBS = ("behavior_logprobs", "reference_logprobs")
_NUM_EXAMPLES = 3  # offending values that a failure quotes


def validate_shard(table: pa.Table, vocab_size: int) -> list[str]:
    """The rules that the shard breaks; empty if it may be trained on.

    table: one round's trajectories, as they would be committed. vocab_size: token ids are in [0, vocab_size).
    """
    if not table.schema.equals(TRAJECTORY):
        wrong = sorted(str(field) for field in set(table.schema) - set(TRAJECTORY))
        missing = sorted(str(field) for field in set(TRAJECTORY) - set(table.schema))
        return [f"schema: missing {missing}, unknown {wrong}, or in another order; expected storage.schema.TRAJECTORY"]
    return _judge(facts_of(table, vocab_size))


def validate_shards(tables: list[pa.Table], vocab_size: int) -> list[list[str]]:
    """validate_shard of each table of TRAJECTORY columns. Many good tables cost little more than one."""
    facts = [facts_of(table, vocab_size) for table in tables]
    if all(of_shard.num_rows for of_shard in facts) and not (facts and _judge(pa.concat_tables(facts))):
        return [[] for _ in facts]
    return [_judge(of_shard) for of_shard in facts]


def _judge(facts: pa.Table) -> list[str]:
    """The rules that the facts break."""
    context, suite = load_suite()
    batch_definition = context.data_sources.get("shards").get_asset("facts").get_batch_definition("whole")
    report = batch_definition.get_batch({"dataframe": facts.to_pandas()}).validate(suite)
    return [describe(result) for result in report.results if not result.success]


def facts_of(table: pa.Table, vocab_size: int) -> pa.Table:
    """The flat facts that the suite checks, one row a trajectory."""
    facts = {name: table[name] for name in ("trajectory_id", "finish_reason")}
    # by name, not one column each: an expectation takes milliseconds
    nulls = [[name if null else "" for null in pc.is_null(table[name]).to_pylist()] for name in TRAJECTORY.names]
    facts["null_columns"] = [" ".join(filter(None, names)) for names in zip(*nulls, strict=True)]
    facts["reward_is_finite"] = pc.is_finite(table["reward"])
    for name in (*_TOKENS, *_LOGPROBS):
        facts[f"num_{name}"] = pc.fill_null(pc.list_value_length(table[name]), 0)
    for name in _TOKENS:
        facts[f"num_bad_{name}"] = _count_outside(table[name], 0, vocab_size - 1)
    for name in _LOGPROBS:
        facts[f"num_bad_{name}"] = _count_outside(table[name], -_FLOAT32_MAX, 0)
    facts["num_bad_rewards"] = [_num_not_finite(components) for components in table["rewards"].to_pylist()]
    origins = zip(table["searcher"].to_pylist(), table["round"].to_pylist(), strict=True)
    facts["id_of_place"] = [
        None if None in origin else trajectory_id(*origin, index) for index, origin in enumerate(origins)
    ]
    return pa.table(facts)


def _count_outside(lists: pa.ChunkedArray, low: float, high: float) -> np.ndarray:
    """Number of values of each row's list outside [low, high]; null and NaN count as outside."""
    rows = lists.combine_chunks()
    values = rows.flatten().to_numpy(zero_copy_only=False)  # nulls become NaN
    outside = ~((values >= low) & (values <= high))
    return np.bincount(pc.list_parent_indices(rows).to_numpy()[outside], minlength=len(rows))


def _num_not_finite(components: list[tuple[str, float]] | None) -> int:
    return sum(value is None or not np.isfinite(value) for _, value in components or [])


@cache
def load_suite():
    """Great Expectations' context and the suite. Imported here, because the import takes seconds."""
    logging.getLogger("great_expectations").setLevel(logging.WARNING)  # it logs hundreds of lines
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")  # nothing on disk
    context.variables.progress_bars = {"globally": False}  # a progress bar for each shard would fill a Searcher's log
    context.enable_analytics(False)
    context.data_sources.add_pandas("shards").add_dataframe_asset("facts").add_batch_definition_whole_dataframe("whole")
    return context, gx.ExpectationSuite(name="trajectories", expectations=expectations())


def expectations() -> list:
    from great_expectations import expectations as gxe

    def rule(expectation: type, text: str, **arguments):
        return expectation(**arguments, meta={"rule": text})

    between, equal = gxe.ExpectColumnValuesToBeBetween, gxe.ExpectColumnPairValuesToBeEqual
    among = gxe.ExpectColumnValuesToBeInSet
    return [
        rule(gxe.ExpectTableRowCountToBeBetween, "a shard has trajectories", min_value=1),
        rule(among, "no column is null", column="null_columns", value_set=[""]),
        rule(gxe.ExpectColumnValuesToBeUnique, "trajectory_id is unique", column="trajectory_id"),
        rule(equal, "trajectory_id is searcher-round-index", column_A="trajectory_id", column_B="id_of_place"),
        rule(among, "reward is finite", column="reward_is_finite", value_set=[True]),
        rule(between, "components of rewards are finite", column="num_bad_rewards", max_value=0),
        *(rule(between, f"{name} has at least one token", column=f"num_{name}", min_value=1) for name in _TOKENS),
        *(
            rule(between, f"{name} are inside the vocabulary", column=f"num_bad_{name}", max_value=0)
            for name in _TOKENS
        ),
        *(
            rule(equal, f"{name} has one a response token", column_A=f"num_{name}", column_B="num_response_tokens")
            for name in _LOGPROBS
        ),
        *(rule(between, f"{name} are finite and <= 0", column=f"num_bad_{name}", max_value=0) for name in _LOGPROBS),
        rule(among, "finish_reason is stop or length", column="finish_reason", value_set=["stop", "length"]),
    ]


def describe(result) -> str:
    """One line: the rule, how many trajectories break it, and the first offending facts."""
    arguments = result.expectation_config.kwargs
    facts = ", ".join(arguments[key] for key in ("column", "column_A", "column_B") if key in arguments)
    found = result.to_json_dict()["result"]  # plain values, not numpy's
    rule = result.expectation_config.meta["rule"]
    if result.exception_info.get("raised_exception"):
        return f"{rule}: could not be checked ({result.exception_info['exception_message']})"
    if "unexpected_count" not in found:
        return f"{rule}: got {found['observed_value']}"
    examples = found["partial_unexpected_list"][:_NUM_EXAMPLES]
    return f"{rule}: broken by {found['unexpected_count']} of {found['element_count']}, where ({facts}) is {examples}"
