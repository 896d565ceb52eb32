"""Formats numbers, durations, values and foreign text for readers."""

import json
import logging
import math
import re
from datetime import datetime

MAX_TEXT = 1500  # characters shown of a prompt or response

# Control characters except tab and newline; characters that reorder text or break lines invisibly; and surrogates,
# which cannot be sent to a terminal.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff\ufff9-\ufffb]"
)


# In a URL: name and password before the host, and values of a query that sign or name.
_SECRETS = re.compile(
    r"(?P<scheme>\w+:/+)[^\s'\"@]*@|(?P<name>[?&][\w-]*(?:amz|sig|token|key|secret|password|credential)[\w-]*=)[^\s&'\"`]+",
    re.IGNORECASE,
)


def number(value: float) -> str:
    """A short form: 0.25, 12k, 3.4M."""
    if value == 0:
        return "0"
    short = float(f"{value:.3g}")  # of 999,999: a million
    for size, scale, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= 1e4 and abs(short) >= size:
            return f"{short / scale:.3g}{letter}"
    return f"{value:,.0f}" if abs(short) >= 1000 else f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def duration(seconds: float, space: str = "") -> str:
    """90 -> '1m 30s'; NaN and infinity, which a store may hold, -> '–'; below 0, as clocks may differ, -> '0s'."""
    if not math.isfinite(seconds):
        return "–"
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}{space}h {minutes:02}{space}m"
    return f"{minutes}{space}m {seconds:02}{space}s" if minutes else f"{seconds}{space}s"


def long_duration(seconds: float | None) -> str:
    """90 -> '1 m 30 s'."""
    return "–" if seconds is None else duration(seconds, " ")


def printable(text: str) -> str:
    """The text with each character that could control a terminal written as Python writes it: `\\x1b`, `\\u202e`.

    For all text of a model or a store. It does not escape Rich's markup, which flows.cli.console turns off."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def without_secrets(text: str) -> str:
    """The text without the credentials of URLs in it. For messages, which may repeat what a user has typed."""
    return _SECRETS.sub(lambda found: f"{found['scheme']}…@" if found["scheme"] else f"{found['name']}…", text)


def log_printable(level: int, layout: str, loggers: tuple[str, ...]) -> None:
    """Makes these loggers print from this level on, with control characters escaped: messages have names of a store.

    "": the root. Prefect's import replaces the root's handlers.
    """

    class PrintableFormatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return printable(without_secrets(super().format(record)))

    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(layout))
    for logger in map(logging.getLogger, loggers):
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False


class PrintableMessages(logging.Filter):
    """Escapes control characters and secrets in a logger's messages and exceptions, whatever its handlers."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(without_secrets(record.getMessage())), None
        if record.exc_info:
            record.exc_text = printable(without_secrets(logging.Formatter().formatException(record.exc_info)))
        return True


def clip(text: str) -> str:
    text = printable(text)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT:,} more characters)"


def setting(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool | list) else str(value)


def when(moment: datetime | None) -> str:
    return "" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S UTC")
