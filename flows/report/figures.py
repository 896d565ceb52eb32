"""The figures of a report, from its tables."""

from markupsafe import Markup

from flows.report.svg import WIDE, Axes, Series, bar_chart, heat_map, line_chart, stacked_chart
from flows.report.text import number, percent

MAX_SEARCHERS = 8  # Searchers that a note names, at most


def charts(tables: dict[str, list[dict]]) -> dict[str, Markup]:
    """The figures by name. tables: storage.report_tables.report_tables, as rows."""
    drawn = {
        "learning": _learning(tables, WIDE),
        "learning_narrow": _learning(tables, (440, 300)),
        "loss": _loss(tables),
        "gradient": _gradient(tables),
        "kl": _of_training(tables, {"fresh": "fresh_kl"}, "nats a response"),
        "entropy": _of_training(tables, {"fresh": "fresh_entropy"}, "nats a token"),
        "weights": _of_training(
            tables, {"effective sample size": "effective_sample_size", "tapered": "tapered_share"}, "share of the batch"
        ),
        "mismatch": _of_training(tables, {"mismatch": "logprob_mismatch"}, "nats a token"),
        "cut": _of_training(tables, {"cut": "fresh_cut_share"}, "share of the responses"),
        "staleness": _staleness(tables),
        "age": _age(tables),
        "rewards": _rewards(tables),
        "shares": _shares(tables),
        "share_rewards": _share_rewards(tables),
        "gap": _gap(tables),
        "throughput": _throughput(tables),
        "buffer": _buffer(tables),
    }
    return {name: Markup(svg) for name, svg in drawn.items()}  # noqa: S704 - svg.py escapes all text


def time_shares(tables: dict[str, list[dict]]) -> list[dict]:
    """Each process's time by activity: its name, seconds, and the share of each part."""
    rows = []
    totals, trainer = tables["totals"][0], tables["trainer"][0]
    if totals["first_step_at"]:
        parts = [("training", trainer["step_s"]), ("waiting for data", trainer["wait_s"])]
        rows.append(_row("Trainer", trainer["present_s"], parts, "publishing, checkpoints, resuming"))
    for row in tables["searchers"]:
        parts = [("sampling", row["sampling_s"]), ("scoring", row["scoring_s"])]
        rows.append(_row(row["searcher"], row["present_s"], parts, "loading policies, evaluating, between rounds"))
    return rows


def _row(name: str, present_s: float, parts: list[tuple[str, float]], rest: str) -> dict:
    busy = sum(seconds for _, seconds in parts)
    parts = [*parts, (rest, max(present_s - busy, 0.0))]
    whole = sum(seconds for _, seconds in parts) or 1.0
    shown = [{"name": part, "share": seconds / whole, "seconds": seconds} for part, seconds in parts]
    return {"name": name, "seconds": present_s, "parts": shown}


def _points(rows: list[dict], name: str) -> list[tuple[float, float | None]]:
    return [(row["step"], row[name]) for row in rows]


def _band(rows: list[dict], low: str, high: str) -> list[tuple[float, float, float]]:
    return [(row["step"], row[low], row[high]) for row in rows if row[low] is not None]


def _learning(tables: dict, size: tuple[int, int]) -> str:
    held = [(row["policy_step"], row["accuracy"]) for row in tables["evaluations"]]
    series = [
        Series("held-out", held, 2, dots=True),
        Series("sampled", _points(tables["training"], "sampled_reward"), 1),
        Series("batch", _points(tables["training"], "batch_reward"), 3, faint=True),
    ]
    return line_chart(series, Axes("policy step", "reward", size=size, from_zero=True))


def _loss(tables: dict) -> str:
    return line_chart(
        [Series("loss", _points(tables["training"], "loss"), 1)], Axes("policy step", "loss", from_zero=True)
    )


def _gradient(tables: dict) -> str:
    line = Series("norm", _points(tables["training"], "gradient_norm"), 4)
    return line_chart([line], Axes("policy step", "gradient norm before clipping", from_zero=True))


def _of_training(tables: dict, columns: dict[str, str], y_name: str) -> str:
    """columns: of the training curves, by the name of each line. Empty if none was measured."""
    if all(row[name] is None for row in tables["training"] for name in columns.values()):
        return ""
    lines = [
        Series(label, _points(tables["training"], name), place)
        for place, (label, name) in enumerate(columns.items(), 1)
    ]
    return line_chart(lines, Axes("policy step", y_name, from_zero=True))


def _staleness(tables: dict) -> str:
    rows = tables["staleness"]
    whole = sum(row["num_slots"] for row in rows) or 1
    bars = []
    for row in rows:
        one = row["first"] == row["last"]
        label = str(row["first"]) if one else f"{row['first']}–{row['last']}"
        share = row["num_slots"] / whole
        bars.append((label, share, f"{label} policy steps old\n{row['num_slots']:,} slots, {percent(share)}"))
    return bar_chart(bars, Axes("staleness, policy steps", "share of drawn slots", form=percent))


def _age(tables: dict) -> str:
    drawn, taken = tables["draws"], tables["buffer_age"]
    series = [
        Series("taken in", _points(taken, "age_median"), 4, band=_band(taken, "age_low", "age_high")),
        Series("drawn", _points(drawn, "staleness_median"), 1, band=_band(drawn, "staleness_low", "staleness_high")),
    ]
    return line_chart(series, Axes("policy step", "age, policy steps", from_zero=True))


def _rewards(tables: dict) -> str:
    rows = tables["rewards"]
    levels = sorted({row["level"] for row in rows})
    bins = {row["bin"]: row for row in rows}
    cells = [
        (
            sorted(bins).index(row["bin"]),
            levels.index(row["level"]),
            row["share"],
            f"policy steps {row['first_step']} to {row['last_step']}\nreward {number(row['level'])}\n"
            f"{row['num_trajectories']:,} trajectories, {percent(row['share'])}",
        )
        for row in rows
    ]
    columns = [str(bins[place]["first_step"]) for place in sorted(bins)]
    names = [number(level) for level in levels]
    return heat_map(cells, columns, names, Axes("sampled by policy step", "reward"))


def _shares(tables: dict) -> str:
    columns = [(row["step"], (row["recent_share"], 1 - row["recent_share"])) for row in tables["draws"]]
    return stacked_chart(columns, ["recent", "replayed"], Axes("policy step", "share of drawn slots", form=percent))


def _share_rewards(tables: dict) -> str:
    series = [
        Series("recent", _points(tables["draws"], "recent_reward"), 1),
        Series("replayed", _points(tables["draws"], "replayed_reward"), 2),
    ]
    return line_chart(series, Axes("policy step", "mean reward of the slots", from_zero=True))


def _gap(tables: dict) -> str:
    """Log-probability gaps of the drawn responses; their difference is policy - behavior."""
    behavior = _points(tables["draws"], "behavior_reference_gap")
    series = [
        Series("trained", _points(tables["draws"], "policy_reference_gap"), 1),
        Series("sampled by", behavior, 2),
        Series("difference", _points(tables["draws"], "policy_behavior_gap"), 3),
    ]
    return line_chart(series, Axes("policy step", "nats a response", from_zero=True))


def _throughput(tables: dict) -> str:
    rows = tables["throughput"]
    minutes = [row | {"step": row["at_s"] / 60} for row in rows]
    series = [
        Series("sampled", _points(minutes, "sampled_per_s"), 1),
        Series("trained", _points(minutes, "trained_per_s"), 2),
    ]
    return line_chart(series, Axes("minutes since the start", "response tokens a second", from_zero=True))


def _buffer(tables: dict) -> str:
    line = Series("stored", _points(tables["training"], "num_trajectories"), 1)
    return line_chart([line], Axes("policy step", "trajectories in the buffer", from_zero=True))


# By metric: heading, note, and name of the axis.
_MEASURES = {
    "distinct-1": ("Distinct words", "Number of different words, divided by the number of words.", "distinct-1"),
    "distinct-2": (
        "Distinct pairs of words",
        "Number of different pairs of words, divided by the number of pairs.",
        "distinct-2",
    ),
    "self-BLEU": ("Self-BLEU", "BLEU of each response against the others; 1: all are the same.", "self-BLEU"),
    "cosine distance": ("Cosine distance", "Mean cosine distance of sentence embeddings.", "1 − cosine"),
    "distinct answers": ("Distinct answers", "Number of different final answers to one prompt.", "answers a prompt"),
    "success clusters": (
        "Success clusters",
        "Number of clusters of successes; successes with close embeddings are one cluster.",
        "clusters a prompt",
    ),
    "entropy": ("Entropy", "Entropy of whole responses, as sampled; 0: always the same response.", "nats a response"),
}


def diversity(rows: list[dict]) -> list[dict]:
    """One figure for each measure: its mean by policy, and by Searcher if there are several. rows: DIVERSITY's."""
    result = []
    for metric, (title, note, axis) in _MEASURES.items():
        of_metric = [row for row in rows if row["metric"] == metric]
        by_policy = [row for row in of_metric if row["grouping"] == "policy"]
        if not by_policy:
            continue
        middles = [(row["first_policy_step"] + row["last_policy_step"]) / 2 for row in by_policy]
        points = [(x, row["value"]) for x, row in zip(middles, by_policy, strict=True)]
        band = [
            (x, row["low"], row["high"]) for x, row in zip(middles, by_policy, strict=True) if row["low"] is not None
        ]
        svg = line_chart([Series("", points, 1, dots=True, band=band)], Axes("sampled by policy step", axis))
        by_searcher = [
            f"{row['searcher']} {number(row['value'])}" for row in of_metric if row["grouping"] == "searcher"
        ][:MAX_SEARCHERS]
        note += f" By Searcher: {', '.join(by_searcher)}." if len(by_searcher) > 1 else ""
        result.append({"title": title, "note": note, "svg": Markup(svg)})  # noqa: S704 - as above
    return result
