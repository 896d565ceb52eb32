"""Audit: checks the whole buffer by the quality gate's rules, and stores Great Expectations' Data Docs as a site.

audits/20261121T120000Z/index.html     the first page; each audit has a folder of its own

Data Docs write offending values into their pages without escaping. Text of shards is untrusted, so it is escaped before
the check.
"""

import html
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from storage.errors import StoreError
from storage.new_shards import new_shards
from storage.rules import NOT_EMPTY, RULES, Limits, describe, facts_of
from storage.shard_files import by_block, read_each
from storage.shards import expired_through, refused_rounds
from storage.store import RunStore


def audit(store: RunStore, limits: Limits) -> tuple[str | None, list[str]]:
    """Checks all shards that count, together. Returns the path of the site's first page, and the faults.

    None: no shard could be read, so there is no page.

    A shard that cannot be read is a fault. Refused shards are left out.
    """
    facts, faults = [], []
    committed = new_shards(store, {})  # before the others: a round may be marked or refused meanwhile
    expired, refused = expired_through(store), refused_rounds(store)
    for searcher, rounds in committed.items():
        missing = set(range(expired.get(searcher, -1) + 1, rounds[-1])) - {*rounds, *refused.get(searcher, ())}
        faults += [f"searcher {searcher}: round {number} is missing" for number in sorted(missing)]
        for shard in (shard for of_block in by_block(rounds) for shard in read_each(store, searcher, of_block)):
            if isinstance(shard, StoreError):
                faults.append(str(shard))
            else:
                facts.append(facts_of(shard, limits))
    if not facts:
        return None, faults
    page = f"audits/{datetime.now(UTC):%Y%m%dT%H%M%SZ}/index.html"
    with tempfile.TemporaryDirectory(prefix="tba-audit-") as folder:
        faults += _validate(pa.concat_tables(facts), Path(folder), store.run)
        (site,) = Path(folder).glob("gx/uncommitted/data_docs/local_site")
        store.upload_folder(site, page.rpartition("/")[0], last="index.html")
    return page, faults


def _validate(facts: pa.Table, folder: Path, run: str) -> list[str]:
    """Runs the suite over all facts and builds the Data Docs in the folder. Returns the faults."""
    import great_expectations as gx

    context = gx.get_context(mode="file", project_root_dir=folder)
    context.variables.progress_bars = {"globally": False}
    context.enable_analytics(False)
    source = context.data_sources.add_pandas(run)
    batch = source.add_dataframe_asset("buffer").add_batch_definition_whole_dataframe("whole")
    suite = context.suites.add(gx.ExpectationSuite(name="trajectories", expectations=expectations()))
    definition = gx.ValidationDefinition(name="buffer", data=batch, suite=suite)
    context.validation_definitions.add(definition)
    report = definition.run(batch_parameters={"dataframe": _escaped(facts).to_pandas()}, result_format="SUMMARY")
    context.build_data_docs()
    return [html.unescape(told(result)) for result in report.results if not result.success]


def _escaped(facts: pa.Table) -> pa.Table:
    """The facts with all text escaped for HTML. Different texts stay different; allowed texts do not change."""
    for index, field in enumerate(facts.schema):
        if pa.types.is_string(field.type):
            texts = [text and html.escape(text) for text in facts[field.name].to_pylist()]
            facts = facts.set_column(index, field, pa.array(texts, field.type))
    return facts


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
