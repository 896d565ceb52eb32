"""tba report: the results and the course of a run, as one self-contained HTML file.

storage/report_tables.py computes the numbers in DuckDB, flows/report/figures.py draws them, report.html.jinja is the
page. Responses are untrusted text: the template escapes everything, and the page's policy forbids scripts and network.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from importlib.resources import files

from flows.config import load_run
from flows.report import figures
from flows.report.diversity import measure_diversity
from flows.report.text import clip, long_duration, number, percent, setting, when
from storage.errors import StoreError
from storage.intake import recorded_reasons, refusals
from storage.kept_policies import BestPolicy, best_policy
from storage.policies import published_policies
from storage.queries import query
from storage.report_tables import report_tables
from storage.shards import refusal_path
from storage.store import RunStore
from storage.summary import read_summary
from storage.verify import Fault, verify
from tba.alarms import spans

PAGE = "report.html"
MAX_FAULTS = 50  # faults, and refused rounds, that the page lists
SMALL_SAMPLE = 2_000  # responses whose diversity is measured for a page: takes a second


def write_report(store: RunStore) -> str:
    """Writes the report into the store, in place of an earlier one. Returns its URL.

    Raises: storage.errors.StoreError: the run cannot be read.
    """
    store.put(PAGE, render(store).encode())
    return f"{store.url}/{store.run}/{PAGE}"


def render(store: RunStore) -> str:
    """The report of a run as it is now, as HTML."""
    import jinja2

    tables = {name: table.to_pylist() for name, table in report_tables(store).items()}
    best = best_policy(store)
    config, summary = load_run(store).recorded(), read_summary(store)
    totals, reset = tables["totals"][0], config.get("train", {}).get("reference_reset_interval")
    for row in tables["draws"]:
        if reset and row["step"] > reset:  # the Trainer's gap is to another reference than the stored one
            row["policy_behavior_gap"] = row["policy_reference_gap"] = None
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {f.__name__: f for f in (number, percent, clip, when, long_duration, setting)}
    page = environment.from_string(files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8"))
    return page.render(
        run=store.run,
        command=store.command,
        state=_state(config, summary, totals),
        made_at=datetime.now(UTC),
        totals=totals,
        tiles=_tiles(tables, totals, summary, best),
        charts=figures.charts(tables),
        time=figures.time_shares(tables),
        diversity=_diversity(store),
        alarms=spans(tables["steps"]),
        examples=_examples(tables["examples"]),
        settings=_settings(config),
        provenance=_provenance(store, tables, config, best),
        faults=_faults(store, totals),
    )


def _state(config: dict, summary: dict | None, totals: dict) -> dict:
    steps, wanted = totals["num_steps"] or 0, config.get("train", {}).get("steps")
    if summary:
        return {"word": "finished", "kind": "good", "text": f"{steps:,} policy steps"}
    text = f"step {steps:,} of {wanted:,}" if wanted else f"step {steps:,}"
    return {"word": "not finished", "kind": "neutral", "text": f"{text} when this page was made"}


def _accuracies(evaluations: list[dict]) -> Callable[[float], str]:
    """How to write them: as shares, unless a reward is not between 0 and 1."""
    return percent if all(0 <= row["accuracy"] <= 1 for row in evaluations) else number


def _since(before: float | None, newest: dict | None, write: Callable[[float], str]) -> str:
    """The remark on the newest evaluation. before: accuracy of policy step 0, which a warm start may leave out."""
    if newest is None:
        return "not evaluated"
    if newest["policy_step"] == 0:
        return "before training"
    return f"policy step {newest['policy_step']:,}" if before is None else f"from {write(before)} before training"


def _tiles(tables: dict, totals: dict, summary: dict | None, best: BestPolicy | None) -> list[dict]:
    """The numbers at the top of the page: label, value and remark of each."""
    evaluations = tables["evaluations"]
    newest, write = evaluations[-1] if evaluations else None, _accuracies(evaluations)
    before = next((row["accuracy"] for row in evaluations if row["policy_step"] == 0), None)
    moments = [totals[name] for name in ("first_round_at", "first_step_at", "last_round_at", "last_step_at")]
    there = [moment for moment in moments if moment]
    wall = (max(there) - min(there)).total_seconds() if there else None
    sampled = totals["num_sampled_tokens"] or 0
    rewards = [row["sampled_reward"] for row in tables["training"] if row["sampled_reward"] is not None]
    attempts = f"{totals['num_attempts'] or 0} {'attempt' if totals['num_attempts'] == 1 else 'attempts'}"
    tiles = [
        {
            "label": "held-out accuracy" if write is percent else "held-out reward",
            "value": write(newest["accuracy"]) if newest else "–",
            "remark": _since(before, newest, write) + (f"; best policy {write(best.accuracy)}" if best else ""),
        },
        {
            "label": "newest sampled reward",
            "value": number(rewards[-1]) if rewards else "–",
            "remark": "" if totals["reward_mean"] is None else f"{number(totals['reward_mean'])} over the whole run",
        },
        {
            "label": "policy steps",
            "value": f"{totals['num_steps'] or 0:,}",
            "remark": f"{totals['num_skipped']:,} skipped, {attempts} of the Trainer",
        },
        {
            "label": "trajectories",
            "value": number(totals["num_trajectories"]),
            "remark": f"{number(totals['num_prompts'])} prompts, {number(sampled)} tokens sampled",
        },
        {
            "label": "staleness",
            "value": "–" if totals["staleness_mean"] is None else f"{totals['staleness_mean']:.1f}",
            "remark": f"policy steps on average, at most {totals['staleness_max'] or 0:,}",
        },
        {
            "label": "wall time",
            "value": long_duration(summary.get("wall_s") if summary else wall),
            "remark": f"{number(sampled / wall)} sampled tokens a second" if wall and sampled else "",
        },
    ]
    return tiles


def _examples(rows: list[dict]) -> list[dict]:
    """Three kinds of example trajectories: for each its name, the rule of its order, and the trajectories."""
    kinds = {
        "best": "Highest reward; of equal rewards, lowest log-probability under the reference policy.",
        "worst": "Lowest reward; of equal rewards, highest log-probability when sampled.",
        "most trained": "Most draws into batch slots.",
    }
    return [
        {"kind": kind, "order": order, "rows": [row for row in rows if row["kind"] == kind]}
        for kind, order in kinds.items()
    ]


def _settings(config: dict) -> list[tuple[str, list[tuple[str, object]]]]:
    """Groups of settings, ungrouped settings first."""
    plain = [(name, value) for name, value in config.items() if not isinstance(value, dict)]
    return [("run", plain), *((name, list(group.items())) for name, group in config.items() if isinstance(group, dict))]


def _provenance(store: RunStore, tables: dict, config: dict, best: BestPolicy | None) -> dict:
    from infra.machine import code_version

    published = published_policies(store).values()
    num_kept = sum(not policy.pruned for policy in published)
    newest = max(published, key=lambda policy: (policy.attempt, policy.step), default=None)
    return {
        "facts": [
            ("store", f"{store.url}/{store.run}"),
            ("model", config.get("model")),
            ("policies published", f"{len(published):,}, of which {num_kept:,} still have their weights in the store"),
            ("newest policy", f"step {newest.step:,}, weights {newest.fingerprint}" if newest else "none yet"),
            ("best policy", _best(best) if best else "no policy was evaluated yet"),
            ("report made by", f"code {code_version()}"),
        ],
        "sources": tables["provenance"],
        "attempts": tables["attempts"],
    }


def _best(policy: BestPolicy) -> str:
    measured = f"accuracy {policy.accuracy:.3f} on {policy.num_problems:,} held-out problems"
    return f"step {policy.step:,}, weights {policy.fingerprint}, {measured}, folder {policy.path}"


def _diversity(store: RunStore) -> dict:
    """The newest stored measurement; without one, a small measurement without embeddings, which is not stored."""
    rows = query(store, "SELECT * FROM diversity").to_pylist()
    hint = not rows
    if hint:
        try:
            rows = measure_diversity(store, sample=SMALL_SAMPLE, embedded=0)
        except ValueError:
            return {"note": "No prompt has enough responses yet.", "hint": False, "figures": []}
    m = rows[0]["responses_per_prompt"]
    note = (
        f"How different {m} responses to one prompt are, by the policies that sampled them. Shaded: 95 % confidence "
        "intervals, if not all prompts were measured."
    )
    if not hint:
        newest = max(row["last_policy_step"] for row in rows)
        note += f" Measured {when(rows[0]['measured_at'])}, of policies up to step {newest:,}."
    return {"note": note, "hint": hint, "figures": figures.diversity(rows)}


def _faults(store: RunStore, totals: dict) -> dict:
    """The faults that a quick `tba verify` finds, the rounds that the quality gate refused, and the skipped steps."""
    try:
        found = verify(store, None)
        faults = found.faults
    except StoreError as error:
        faults = [Fault("not checked", store.run, str(error))]
    num_not_taken_in = sum(fault.kind == "refused shard" for fault in faults)
    by_intake = {refusal_path(refusal.searcher, refusal.round) for refusal in refusals(store)}
    by_gate = [path for path in store.list("quarantine") if path.endswith(".json") and path not in by_intake]
    reasons = [(path, "; ".join(recorded_reasons(store, path))) for path in by_gate[:MAX_FAULTS]]
    return {
        "num": len(faults),
        "rows": faults[:MAX_FAULTS],
        "num_refused": len(by_gate),
        "num_not_taken_in": num_not_taken_in,
        "refused": reasons,
        "num_skipped": totals["num_skipped"],
    }
