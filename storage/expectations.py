"""storage/rules.py as Great Expectations' expectations, for the audit. They are checked on the same facts."""

from storage.rules import NOT_EMPTY, RULES, describe


def expectations() -> list:
    """One for each rule. The import takes seconds, so it is here and not at the top."""
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
