"""A line chart as an image that is its own URL, for Prefect's page: the page fetches no file."""

from urllib.parse import quote

from flows.report.svg import Axes, Series, line_chart

POINTS_SHOWN = 64  # points of a curve, few because the page prints an image's whole URL
SIZE = (520, 200)
PLAIN = " '<>=/:;,.-()"  # browsers accept these unescaped in a URL that holds an SVG
COLOURS = ("#2563eb", "#d97706")  # most readers can tell them apart on white
STYLE = (
    "svg{background:#fff;font:11px sans-serif}text{fill:#444}.grid{stroke:#ddd}.base{stroke:#999}"
    ".line{fill:none;stroke-width:1.5}"
) + "".join(
    f".stroke-{place}{{stroke:{colour}}}.fill-{place},.text-{place}{{fill:{colour}}}"
    for place, colour in enumerate(COLOURS, 1)
)


def curves_url(title: str, steps: list[int], lines: dict[str, list[float | None]]) -> str:
    """The URL of a chart over `steps`, with one line for each label, of at most `POINTS_SHOWN` points."""
    chosen = _spread(range(len(steps)))
    series = [
        Series(label, [(steps[place], values[place]) for place in chosen], colour)
        for colour, (label, values) in enumerate(lines.items(), 1)
    ]
    chart = line_chart(series, Axes("step", title, SIZE, from_zero=True, told=False))
    opened = f"<svg xmlns='http://www.w3.org/2000/svg' width='{SIZE[0]}' height='{SIZE[1]}'"
    image = chart.replace('"', "'").replace("<svg", opened, 1).replace("'>", f"'><style>{STYLE}</style>", 1)
    return f"data:image/svg+xml,{quote(image, safe=PLAIN)}"


def _spread(indices: range) -> list[int]:
    """At most `POINTS_SHOWN` values, evenly spaced, with the first and the last."""
    if len(indices) <= POINTS_SHOWN:
        return list(indices)
    return sorted({round(k * (len(indices) - 1) / (POINTS_SHOWN - 1)) for k in range(POINTS_SHOWN)})
