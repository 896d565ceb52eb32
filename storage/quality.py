"""The quality gate: storage/rules.py as a Great Expectations suite, for each shard before its commit and for the audit.

The suite checks facts: one flat row for each trajectory, computed from the shard by Arrow (lengths, counts of bad
values). So its cost does not grow with the number of tokens.
"""

import logging
from functools import cache

import pyarrow as pa

from storage.rules import NOT_EMPTY, RULES, Limits, describe, facts_of
from storage.schema import TRAJECTORY


def validate_shard(table: pa.Table, limits: Limits) -> list[str]:
    """The rules that the shard breaks; empty if it may be trained on.

    table: one round's trajectories, as they would be committed.
    """
    if not table.schema.equals(TRAJECTORY):
        wrong = sorted(str(field) for field in set(table.schema) - set(TRAJECTORY))
        missing = sorted(str(field) for field in set(TRAJECTORY) - set(table.schema))
        return [f"schema: missing {missing}, unknown {wrong}, or another order; expected storage.schema.TRAJECTORY"]
    context, suite = load_suite()
    batch_definition = context.data_sources.get("shards").get_asset("facts").get_batch_definition("whole")
    report = batch_definition.get_batch({"dataframe": facts_of(table, limits).to_pandas()}).validate(suite)
    return [told(result) for result in report.results if not result.success]


@cache
def load_suite():
    """Great Expectations' context and the suite. The import takes seconds, so it is here and not at the top."""
    logging.getLogger("great_expectations").setLevel(logging.WARNING)  # it logs hundreds of lines
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")  # nothing on disk
    context.variables.progress_bars = {"globally": False}  # a progress bar for each shard would fill a Searcher's log
    context.enable_analytics(False)
    context.data_sources.add_pandas("shards").add_dataframe_asset("facts").add_batch_definition_whole_dataframe("whole")
    return context, gx.ExpectationSuite(name="trajectories", expectations=expectations())


def expectations() -> list:
    from great_expectations import expectations as gxe

    return [
        gxe.ExpectTableRowCountToBeBetween(min_value=1, meta={"rule": NOT_EMPTY}),
        *(getattr(gxe, rule.expectation)(**rule.arguments, meta={"rule": rule.text}) for rule in RULES),
    ]


def told(result) -> str:
    """One line about an expectation that is not met, worded as by rules.broken."""
    arguments = result.expectation_config.kwargs
    facts = tuple(arguments[key] for key in ("column", "column_A", "column_B") if key in arguments)
    found = result.to_json_dict()["result"]  # plain values, not numpy's
    rule = result.expectation_config.meta["rule"]
    if result.exception_info.get("raised_exception"):
        return f"{rule}: could not be checked ({result.exception_info['exception_message']})"
    if "unexpected_count" not in found:
        return f"{rule}: got {found['observed_value']}"
    counts = found["unexpected_count"], found["element_count"]
    return describe(rule, facts, counts, found["partial_unexpected_list"])
