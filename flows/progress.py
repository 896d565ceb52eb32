"""What a person sees while a run trains: a live table in a terminal, else a line now and then."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.table import Table

LINE_INTERVAL_S = 10  # between plain lines, where the output is no terminal

# What the Trainer's heartbeat carries: its key, our heading, how it is written.
COLUMNS = {
    "reward_mean": ("reward", "{:.2f}"),
    "fresh_reward_mean": ("accuracy", "{:.2f}"),
    "num_trajectories": ("buffer", "{:,}"),
    "num_prompts": ("prompts", "{:,}"),
    "staleness_mean": ("staleness", "{:.1f}"),
}

SUMMARY = {
    "run": ("Run", "{}"),
    "note": ("Note", "{}"),
    "accuracy_before": ("Accuracy before (held-out, greedy)", "{:.3f}"),
    "accuracy_after": ("Accuracy after training", "{:.3f}"),
    "steps": ("Policy steps", "{:,}"),
    "attempts": ("Attempts (one, and one a resume)", "{}"),
    "trajectories": ("Trajectories", "{:,}"),
    "staleness_mean": ("Staleness, mean (policy steps)", "{:.2f}"),
    "staleness_max": ("Staleness, largest", "{}"),
    "trainer_wait_share": ("Trainer waiting", "{:.1%}"),
    "searcher_idle_share": ("Searchers idle", "{:.1%}"),
    "overlap_share": ("Training while a Searcher sampled", "{:.1%}"),
    "step_s_median": ("Median step", "{:.2f} s"),
    "wall_s": ("Wall time", "{:.0f} s"),
    "finished_at": ("Finished", "{}"),
}


class Progress:
    """Shows the newest stage and heartbeat. A context manager: the live table needs an end."""

    def __init__(self, console: Console):
        self._console = console
        self._live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
        self._began = time.monotonic()
        self._line_at = float("-inf")
        self._stage = None

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, stage: str, heartbeat: Mapping | None) -> None:
        """stage: in words, what is going on; heartbeat: the Trainer's newest, None before the first of this attempt."""
        fields = {"elapsed": duration(time.monotonic() - self._began), **_fields(heartbeat or {})}
        if self._live:
            table = Table(title=stage, title_justify="left", title_style="bold")
            for heading in fields:
                table.add_column(heading, justify="right")
            table.add_row(*fields.values())
            self._live.update(table)
        elif stage != self._stage or time.monotonic() - self._line_at >= LINE_INTERVAL_S:
            self._stage, self._line_at = stage, time.monotonic()
            self._console.print("  ".join([stage, *(f"{k} {v}" for k, v in fields.items())]), soft_wrap=True)


def _fields(heartbeat: Mapping) -> dict[str, str]:
    fields = {}
    if heartbeat.get("steps"):
        fields["step"] = f"{heartbeat['step']}/{heartbeat['steps']}"
    for key, (heading, form) in COLUMNS.items():
        if heartbeat.get(key) is not None:
            fields[heading] = form.format(heartbeat[key])
    if heartbeat.get("seconds_left") is not None:
        fields["left"] = duration(heartbeat["seconds_left"])
    return fields


def duration(seconds: float) -> str:
    """90 -> '1m 30s'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {seconds:02}s" if minutes else f"{seconds}s"


def summary_table(summary: Mapping) -> Table:
    table = Table(title=f"Run {summary['run']}", show_header=False, title_justify="left", title_style="bold")
    for key, (label, form) in SUMMARY.items():
        if summary.get(key) is not None:
            table.add_row(label, form.format(summary[key]))
    return table
