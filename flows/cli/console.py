"""Output for people: progress of a run (a live table in a terminal, else a line every few seconds), rows of a query."""

import csv
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import SimpleNamespace

import pyarrow
from pyarrow import types
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from flows.report.text import duration, printable

LINE_INTERVAL_S = 10  # between plain lines, if the output is no terminal
RESIZE_POLL_S = 0.1
MAX_BAR_WIDTH = 76
WIDER_THAN_ANY = 1000

# Values of the Trainer's heartbeat that are shown: key, heading, format. `reward` is the batch's mean reward, `fresh`
# that of fresh samples. With longer headings the line would not fit 80 columns.
COLUMNS = {
    "reward_mean": ("reward", "{:.2f}"),
    "fresh_reward_mean": ("fresh", "{:.2f}"),
    "num_trajectories": ("buffer", "{:,}"),
    "num_prompts": ("prompts", "{:,}"),
    "staleness_mean": ("staleness", "{:.1f}"),
}

# Values of a run's summary that are shown: key, label, format.
SUMMARY = {
    "run": ("Run", "{}"),
    "note": ("Note", "{}"),
    "accuracy_before": ("Accuracy before (held-out, greedy)", "{:.3f}"),
    "accuracy_after": ("Accuracy after training", "{:.3f}"),
    "best_accuracy": ("Accuracy of the best policy", "{:.3f}"),
    "best_policy": ("Best policy", "{}"),
    "steps": ("Policy steps", "{:,}"),
    "attempts": ("Attempts of the Trainer", "{}"),
    "trajectories": ("Trajectories", "{:,}"),
    "staleness_mean": ("Staleness, mean (policy steps)", "{:.2f}"),
    "staleness_max": ("Staleness, largest", "{}"),
    "trainer_wait_share": ("Trainer waited, share of its time", "{:.1%}"),
    "searcher_idle_share": ("Searchers outside rounds, share of their time", "{:.1%}"),
    "evaluation_share": ("Time with an evaluation, share", "{:.1%}"),
    "overlap_share": ("Training beside sampling, share", "{:.1%}"),
    "step_s_median": ("Training step, median", "{:.2f} s"),
    "wall_s": ("Wall time", "{:.0f} s"),
    "finished_at": ("Finished", "{}"),
}


class PlainConsole(Console):
    """Prints text as it is: a response's [brackets] are no markup, its escape sequences no commands.

    The same holds for text with a style if `styled` makes it."""

    def render_str(self, text: str, **options) -> Text:
        return super().render_str(printable(text), **options | {"markup": False, "emoji": False, "highlight": False})


def console() -> Console:
    """A console as wide as the terminal. In a file or a pipe nothing is cut or wrapped."""
    return PlainConsole() if sys.stdout.isatty() else PlainConsole(width=100_000)


def styled(text: str, style: str = "", **options) -> Text:
    """Text in a style, with control characters escaped: it may come from a model or a store."""
    return Text(printable(text), style, **options)


class Progress:
    """Shows the newest stage and heartbeat. A context manager, because the live table needs an end.

    The table is drawn in place, and only when a value has changed. If the terminal's size changes, it wraps the drawn
    lines again, and their number is unknown: then the screen is cleared.
    """

    def __init__(self, console: Console, run: str, began_s: float = 0.0):
        """began_s: seconds that had elapsed before this object was made."""
        self._console, self._run = console, run
        self._live: Live | None = None
        self._size = None
        self._began = time.monotonic() - began_s
        self._line_at = float("-inf")
        self._stage = None
        self._alarms: set[str] = set()  # alarms that were on when the last line was printed

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, stage: str, heartbeat: Mapping | None, note: str = "") -> None:
        """stage: what the run does or waits for; heartbeat: the Trainer's newest, None before this attempt's first.

        In a terminal the heartbeat's alarms stand below the table, then `note`. Otherwise an alarm is printed when it
        goes on, later lines have its name while it is on, and `note` is not printed.
        """
        fields = _fields(heartbeat or {}) | {"elapsed": duration(time.monotonic() - self._began)}
        alarms = (heartbeat or {}).get("alarms", {})
        if heartbeat and heartbeat.get("seconds_left") is not None:
            fields["left"] = duration(heartbeat["seconds_left"])
        if self._console.is_terminal:
            done, total = (heartbeat or {}).get("step", 0), (heartbeat or {}).get("steps")
            self._draw(_Picture(f"{self._run}: {stage}", done, total, fields, list(alarms.values()), note))
            return
        for name in alarms.keys() - self._alarms:
            self._console.print(f"ALARM: {alarms[name]}", soft_wrap=True)
        self._alarms = set(alarms)
        if alarms:
            fields["alarms"] = ", ".join(name.replace("_", " ") for name in alarms)
        if stage != self._stage or time.monotonic() - self._line_at >= LINE_INTERVAL_S:
            self._stage, self._line_at = stage, time.monotonic()
            self._console.print("  ".join([stage, *(f"{k} {v}" for k, v in fields.items())]), soft_wrap=True)

    def wait(self, seconds: float) -> None:
        """Sleeps. If the terminal's size changes meanwhile, the table is drawn again at once."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._live and self._size != self._console.size:
                self._draw(self._live.renderable)
            time.sleep(min(left, RESIZE_POLL_S))

    def _draw(self, picture: RenderableType) -> None:
        size = self._console.size
        if self._live and self._size != size:
            self._live.stop()
            self._console.clear()
            self._live = None
        self._size = size
        if self._live:
            self._live.update(picture, refresh=True)
        else:
            self._live = Live(picture, console=self._console, auto_refresh=False)
            self._live.start(refresh=True)


@dataclass(frozen=True)
class _Picture:
    """A title, a progress bar, and the fields in columns, on as few lines as the width allows."""

    title: str
    done: int
    total: int | None
    fields: Mapping[str, str]
    alarms: list[str]
    note: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield styled(self.title, "bold")
        if self.total:
            yield ProgressBar(total=self.total, completed=self.done, width=min(options.max_width, MAX_BAR_WIDTH))
            yield Segment.line()
        headings = list(self.fields)
        for num_lines in range(1, len(headings) + 1):
            num_columns = -(-len(headings) // num_lines)
            lines = [headings[start : start + num_columns] for start in range(0, len(headings), num_columns)]
            grid = self._grid(lines, num_columns)
            if (
                num_columns == 1
                or console.measure(grid, options=options.update(width=WIDER_THAN_ANY)).maximum <= options.max_width
            ):
                break
        yield grid
        for alarm in self.alarms:
            yield styled(f"ALARM: {alarm}", "bold red")
        if self.note:
            yield styled(self.note, "dim", overflow="ellipsis", no_wrap=True)

    def _grid(self, lines: list[list[str]], num_columns: int) -> Table:
        grid = Table.grid(padding=(0, 3, 0, 0))
        for _ in range(num_columns):
            grid.add_column(justify="right", no_wrap=True)
        for line in lines:
            grid.add_row(*line, style="dim")
            grid.add_row(*(self.fields[heading] for heading in line))
        return grid


def _fields(heartbeat: Mapping) -> dict[str, str]:
    fields = {}
    if heartbeat.get("steps"):
        fields["step"] = f"{heartbeat['step']}/{heartbeat['steps']}"
    for key, (heading, form) in COLUMNS.items():
        if heartbeat.get(key) is not None:
            fields[heading] = _formatted(form, heartbeat[key])
    return fields


def _formatted(form: str, value: object) -> str:
    """A store may hold text in place of a number."""
    try:
        return form.format(value)
    except (TypeError, ValueError, OverflowError):
        return f"{value!s:.100}"


def summary_table(summary: Mapping) -> Table:
    table = Table(title=f"Run {summary.get('run')}", show_header=False, title_justify="left", title_style="bold")
    for key, (label, form) in SUMMARY.items():
        if summary.get(key) is not None:
            table.add_row(label, _formatted(form, summary[key]))
    for shard, reasons in summary.get("refused_shards", {}).items():
        table.add_row("Refused shard", Text(printable(f"{shard}: {reasons}")))
    return table


def print_table(rows: "pyarrow.Table", form: str) -> None:
    """form: `table` for people, `json` (one array of objects) or `csv` (with a header) for programs, on stdout."""
    rows = _with_python_times(rows.rename_columns(_distinct(rows.column_names)))
    if form == "json":
        print(json_text(rows.to_pylist(maps_as_pydicts="strict")))
    elif form == "csv":
        writer = csv.writer(SimpleNamespace(write=_write_csv), lineterminator="\r\n")  # so that a \r is quoted
        writer.writerow(rows.column_names)
        writer.writerows(row.values() for row in rows.to_pylist(maps_as_pydicts="strict"))
    else:
        _print_for_people(rows)


def _with_python_times(rows: "pyarrow.Table") -> "pyarrow.Table":
    """Times that Python cannot hold, such as those of year 290000, make their column text."""
    for place, field in enumerate(rows.schema):
        if types.is_temporal(field.type):
            try:
                rows.column(place).to_pylist()
            except (OverflowError, ValueError):
                rows = rows.set_column(place, field.name, rows.column(place).cast("string"))
    return rows


def _write_csv(row: str) -> None:
    """Writes a row: exact to a file or a pipe, with control characters escaped to a terminal."""
    row = row.removesuffix("\r\n")
    sys.stdout.write((printable(row) if sys.stdout.isatty() else row) + "\n")


def json_text(value: object) -> str:
    """The value as JSON. NaN and infinities become null, because JSON has no such numbers. A decimal is a number."""
    return json.dumps(json.loads(json.dumps(value, default=_plain), parse_constant=lambda _: None), indent=2)


def _plain(value: object) -> int | float | str:
    """A value that JSON lacks. DuckDB's sum of integers comes as a Decimal."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return str(value)


def _distinct(names: list[str]) -> list[str]:
    """Unique names, as keys of a row: the second `reward` of a join becomes `reward_1`."""
    taken, distinct = set(names), []
    for name in names:
        if name in distinct:
            name = next(other for n in itertools.count(1) if (other := f"{name}_{n}") not in taken)
            taken.add(name)
        distinct.append(name)
    return distinct


def _print_for_people(rows: "pyarrow.Table") -> None:
    table = Table()
    for field in rows.schema:
        is_number = types.is_integer(field.type) or types.is_floating(field.type) or types.is_decimal(field.type)
        table.add_column(field.name, justify="right" if is_number else "left")
    for row in rows.to_pylist(maps_as_pydicts="strict"):
        table.add_row(*(_cell(value) for value in row.values()))
    out = console()
    out.print(table)
    out.print(f"{rows.num_rows} rows")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
