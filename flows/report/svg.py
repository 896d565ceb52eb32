"""Charts as inline SVG, without scripts. Colours are classes of the page's style sheet, so that one chart serves a
light and a dark page.

Each function returns the markup of one <svg>. A mark's <title> shows its numbers on hovering. All given text, names
included, is escaped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from flows.report.text import number

Point = tuple[float, float]
Band = tuple[float, float, float]  # x, low, high

# In units of the SVG, for a wide typeface and the larger text of phones:
CHARACTER = 7.2  # width of a letter of the axes
NAME_CHARACTER = 8.6  # width of a letter of the lines' bold names
TICK_TEXT = 12  # height of the text of ticks
SIZE = (440, 250)
WIDE = (940, 320)


@dataclass(frozen=True)
class Series:
    """One line. Points whose y is None are left out; `band` lies behind the line."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 1  # of the style sheet's --series-1, ...
    dots: bool = False  # measured now and then: a mark at each point
    band: Sequence[Band] = ()
    faint: bool = False


@dataclass(frozen=True)
class Axes:
    """The axes' names, the size of the chart and the format of y values."""

    x_name: str
    y_name: str
    size: tuple[int, int] = SIZE
    form: Callable[[float], str] = number
    from_zero: bool = False
    told: bool = True  # hovering over a line chart shows the values

    @property
    def label(self) -> str:
        return f"{self.y_name} by {self.x_name}"


def line_chart(series: Sequence[Series], axes: Axes) -> str:
    """Lines over a shared axis, each with its name at its end."""
    series = [line for line in series if any(y is not None for _, y in line.points)]
    values = [y for line in series for _, y in line.points if y is not None]
    values += [edge for line in series for _, *edges in line.band for edge in edges]
    xs = sorted({x for line in series for x, y in line.points if y is not None})
    if not values:
        return nothing(axes.size)
    low, high = min(values), max(values)
    if axes.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    names = max(len(line.name) for line in series) * NAME_CHARACTER + 10
    frame = _Frame(axes, (xs[0], xs[-1]), (low, high), right=min(names, 0.4 * axes.size[0]))
    parts = [frame.axes()]
    for line in series:
        parts += [frame.band(line), frame.line(line)]
    parts += [frame.end_names(series), frame.strips(series, xs) if axes.told else ""]
    return _svg(axes.size, parts, axes.label)


def bar_chart(bars: Sequence[tuple[str, float, str]], axes: Axes) -> str:
    """A histogram. bars: label, height, hover text."""
    if not bars:
        return nothing(axes.size)
    frame = _Frame(axes, (0, len(bars)), (0, max(height for _, height, _ in bars)), right=8, x_ticks=False)
    parts = [frame.axes()]
    every = math.ceil(len(bars) * max(len(label) + 1 for label, *_ in bars) * CHARACTER / frame.width)
    for place, (label, height, told) in enumerate(bars):
        left, right, top = frame.x(place), frame.x(place + 1), frame.y(height)
        gap = min(2.0, (right - left) * 0.15)
        parts.append(
            f'<rect class="fill-1 bar" x="{left + gap / 2:.1f}" y="{top:.1f}" width="{right - left - gap:.1f}" '
            f'height="{max(frame.bottom - top, 0):.1f}" rx="1.5"><title>{escape(told)}</title></rect>'
        )
        if place % every == 0:
            parts.append(_text((left + right) / 2, frame.bottom + 16, label, "middle"))
    return _svg(axes.size, parts, axes.label)


def stacked_chart(columns: Sequence[tuple[float, Sequence[float]]], names: Sequence[str], axes: Axes) -> str:
    """Shares that add up to one, over x. columns: x and the shares, the lowest first; axes: their form is `percent`."""
    if not columns:
        return nothing(axes.size)
    xs = [x for x, _ in columns]
    step = (xs[-1] - xs[0]) / max(len(xs) - 1, 1) or 1
    room = max(map(len, names)) * NAME_CHARACTER + 10
    frame = _Frame(axes, (xs[0] - step / 2, xs[-1] + step / 2), (0, 1), right=room)
    parts = [frame.axes()]
    for x, shares in columns:
        left, right, base = frame.x(x - step / 2), frame.x(x + step / 2), 0.0
        of_each = (f"{name} {axes.form(share)}" for name, share in zip(names, shares, strict=True))
        told = "\n".join([f"{axes.x_name} {number(x)}", *of_each])
        rects = []
        for place, share in enumerate(shares, 1):
            top = frame.y(base + share)
            rects.append(
                f'<rect class="fill-{place}" x="{left:.1f}" y="{top:.1f}" width="{right - left + 0.3:.1f}" '
                f'height="{frame.y(base) - top:.1f}"/>'
            )
            base += share
        parts.append(f'<g class="bar">{"".join(rects)}<title>{escape(told)}</title></g>')
    base = 0.0
    for place, (name, share) in enumerate(zip(names, columns[-1][1], strict=True), 1):
        middle = frame.y(base + share / 2)
        parts.append(_text(frame.right + 6, middle + 4, name, "start", f"name text-{place}"))
        base += share
    return _svg(axes.size, parts, axes.label)


def heat_map(
    cells: Sequence[tuple[int, int, float, str]], columns: Sequence[str], rows: Sequence[str], axes: Axes
) -> str:
    """A grid. cells: column, row (0 is the lowest), strength in 0..1, hover text."""
    if not cells:
        return nothing(axes.size)
    left = max(len(row) for row in rows) * CHARACTER + 10
    frame = _Frame(axes, (0, len(columns)), (0, len(rows)), right=8, left=left)
    parts = [frame.names()]
    for column, row, strength, told in cells:
        x, top = frame.x(column), frame.y(row + 1)
        parts.append(
            f'<rect class="fill-1 bar" x="{x:.1f}" y="{top:.1f}" width="{frame.x(column + 1) - x - 1:.1f}" '
            f'height="{frame.y(row) - top - 1:.1f}" fill-opacity="{0.04 + 0.96 * strength:.2f}">'
            f"<title>{escape(told)}</title></rect>"
        )
    for row, label in enumerate(rows):
        parts.append(_text(left - 6, (frame.y(row) + frame.y(row + 1)) / 2 + 4, label, "end"))
    every = math.ceil(len(columns) * max(len(label) + 2 for label in columns) * CHARACTER / frame.width)
    for column in range(0, len(columns), every):
        parts.append(_text(frame.x(column + 0.5), frame.bottom + 16, columns[column], "middle"))
    return _svg(axes.size, parts, axes.label)


def nothing(size: tuple[int, int] = SIZE) -> str:
    """A placeholder for a chart without data."""
    return _svg(size, [_text(size[0] / 2, size[1] / 2, "nothing yet", "middle", "axis")], "nothing yet")


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers in the range, about `about` of them."""
    if low == high:
        return [low]
    step = tick_step(low, high, about)
    first = math.ceil(low / step - 1e-9)
    return [round(place * step, 12) for place in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_step(low: float, high: float, about: int) -> float:
    """The distance of ticks: 1, 2 or 5 times a power of ten, so that about `about` ticks fill the range."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    return min((unit * power for unit in (1, 2, 5, 10)), key=lambda width: abs(width - raw))


class _Frame:
    """The place of data in a picture, and the axes around it."""

    def __init__(self, axes: Axes, x_range: Point, y_range: Point, *, right: float, x_ticks=True, left=None) -> None:
        """left: room for row labels in place of ticks: a grid of cells."""
        self._axes, size = axes, axes.size
        (self._x_low, self._x_high), (low, high) = x_range, y_range
        if math.isclose(low, high, rel_tol=1e-9):  # a flat line is drawn in the middle
            low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
        about = 4 if size[1] < 300 else 5
        step = tick_step(low, high, about)  # the axis begins and ends at a tick
        if left is None:
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        self._y_low, self._y_high = low, high
        self._y_ticks = ticks(self._y_low, self._y_high, about)
        self._x_ticks = x_ticks
        labels = max((len(axes.form(tick)) for tick in self._y_ticks), default=1)
        self.left = left or labels * CHARACTER + 12
        self.right, self.top, self.bottom = size[0] - right, 26.0, size[1] - 36.0
        self.width = self.right - self.left

    def x(self, value: float) -> float:
        if self._x_low == self._x_high:
            return (self.left + self.right) / 2
        return self.left + (value - self._x_low) / (self._x_high - self._x_low) * self.width

    def y(self, value: float) -> float:
        return self.bottom - (value - self._y_low) / (self._y_high - self._y_low) * (self.bottom - self.top)

    def axes(self) -> str:
        parts = []
        for tick in self._y_ticks:
            y = self.y(tick)
            parts.append(f'<path class="grid" d="M{self.left:.1f} {y:.1f}H{self.right:.1f}"/>')
            parts.append(_text(self.left - 6, y + 4, self._axes.form(tick), "end"))
        if self._x_ticks:
            for tick in ticks(self._x_low, self._x_high, max(3, round(self.width / 90))):
                parts.append(_text(self.x(tick), self.bottom + 16, number(tick), "middle"))
        parts.append(f'<path class="base" d="M{self.left:.1f} {self.bottom:.1f}H{self.right:.1f}"/>')
        return "".join([*parts, self.names()])

    def names(self) -> str:
        below = self._axes.size[1] - 4
        return _text(2, 13, self._axes.y_name, "start", "axis") + _text(
            self.right, below, self._axes.x_name, "end", "axis"
        )

    def line(self, line: Series) -> str:
        places = [(self.x(x), self.y(y)) for x, y in line.points if y is not None]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts = [f'<path class="line stroke-{line.colour}{" faint" if line.faint else ""}" d="{path}"/>']
        if line.dots or len(places) == 1:
            parts += [f'<circle class="dot fill-{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in places]
        return "".join(parts)

    def band(self, line: Series) -> str:
        if not line.band:
            return ""
        upper = [f"{self.x(x):.1f} {self.y(high):.1f}" for x, _, high in line.band]
        lower = [f"{self.x(x):.1f} {self.y(low):.1f}" for x, low, _ in reversed(line.band)]
        return f'<path class="band fill-{line.colour}" d="M{"L".join(upper + lower)}Z"/>'

    def end_names(self, series: Sequence[Series]) -> str:
        """Names beside the lines' ends, moved apart where they would overlap."""
        ends = [(self.y([y for _, y in line.points if y is not None][-1]), line) for line in series if line.name]
        ends.sort(key=lambda end: end[0])
        heights = [height for height, _ in ends]
        gap = TICK_TEXT + 3
        for place in range(1, len(heights)):
            heights[place] = max(heights[place], heights[place - 1] + gap)
        overflow = max(0.0, heights[-1] - self.bottom) if heights else 0.0
        for place in reversed(range(len(heights))):
            limit = self.bottom - gap * (len(heights) - 1 - place)
            heights[place] = min(heights[place], limit) if overflow else heights[place]
        return "".join(
            _text(self.right + 6, height + 4, line.name, "start", f"name text-{line.colour}")
            for height, (_, line) in zip(heights, ends, strict=True)
        )

    def strips(self, series: Sequence[Series], xs: list[float]) -> str:
        """One strip of the whole height for each x, whose hover text has every line's value there."""
        known = [(line.name, dict(line.points)) for line in series]
        edges = [(a + b) / 2 for a, b in pairwise(xs)]
        edges = [self._x_low, *edges, self._x_high]
        parts = []
        for x, (left, right) in zip(xs, pairwise(edges), strict=True):
            told = [f"{name} {self._axes.form(ys[x])}" for name, ys in known if ys.get(x) is not None]
            start, end = self.x(left), self.x(right)
            title = "\n".join([f"{self._axes.x_name} {number(x)}", *told])
            parts.append(
                f'<rect class="strip" x="{start:.1f}" y="{self.top:.0f}" width="{max(end - start, 1):.1f}" '
                f'height="{self.bottom - self.top:.0f}"><title>{escape(title)}</title></rect>'
            )
        return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(size: tuple[int, int], parts: Sequence[str], label: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )
