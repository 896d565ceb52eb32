"""Curves as an image that is its own URL, for Prefect's page."""

from urllib.parse import quote

POINTS_SHOWN = 64  # in a curve: the page prints an image's whole URL
PLAIN = " '<>=/:;,.-()"  # what browsers take as it is in a URL that holds an SVG
COLOURS = ("#2563eb", "#d97706")  # told apart by most eyes, on white


def curves(title: str, steps: list[int], lines: dict[str, list[float | None]]) -> str:
    """An SVG with one line a label over `steps`; few points, since its whole text is in the image's URL."""
    width, height, left, top = 520, 200, 36, 34
    chosen = _spread(range(len(steps)))
    values = [value for line in lines.values() for value in line if value is not None]
    low, high = min([0.0, *values]), max([*values, 0.01])

    def x(index: int) -> int:
        return left + round((width - left - 12) * (steps[index] - steps[0]) / max(1, steps[-1] - steps[0]))

    def y(value: float) -> int:
        return top + round((height - top - 24) * (high - value) / (high - low))

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
        "font-family='sans-serif' font-size='11' fill='#444'><rect width='100%' height='100%' fill='#fff'/>"
        f"<text x='{left}' y='16' font-size='13' fill='#111'>{title}</text>"
        f"<path d='M{left} {y(low)}H{width - 12}M{left} {y(high)}H{width - 12}' stroke='#ccc'/>"
        f"<text x='2' y='{y(high) + 4}'>{high:.3g}</text><text x='2' y='{y(low) + 4}'>{low:.3g}</text>"
        f"<text x='{left}' y='{height - 6}'>{steps[0]}</text>"
        f"<text x='{width - 12}' y='{height - 6}' text-anchor='end'>{steps[-1]}</text>"
    ]
    for number, (label, line) in enumerate(lines.items()):
        points = " ".join(f"{x(i)},{y(line[i])}" for i in chosen if line[i] is not None)
        parts.append(
            f"<polyline points='{points}' fill='none' stroke='{COLOURS[number]}' stroke-width='1.5'/>"
            f"<text x='{width - 12 - 90 * number}' y='16' text-anchor='end' fill='{COLOURS[number]}'>{label}</text>"
        )
    return "".join([*parts, "</svg>"])


def _spread(indices: range) -> list[int]:
    """At most `POINTS_SHOWN` of them, evenly, first and last among them."""
    if len(indices) <= POINTS_SHOWN:
        return list(indices)
    return sorted({round(k * (len(indices) - 1) / (POINTS_SHOWN - 1)) for k in range(POINTS_SHOWN)})


def image_url(svg: str) -> str:
    """An image that is its own URL: whoever shows it fetches it from nowhere."""
    return f"data:image/svg+xml,{quote(svg, safe=PLAIN)}"
