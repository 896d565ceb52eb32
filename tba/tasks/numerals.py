"""Numbers as people and LaTeX write them."""

import re

_SEPARATOR = r"(?:,?\\!|\\[, ]|[\u00a0\u2009\u202f])"  # LaTeX's \, \! and \space; no-break and thin spaces
_THOUSANDS = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)")


def without_separators(text: str) -> str:
    r"""10\,080 and 1,\!234 become 10080 and 1234. A plain space or comma stays: it may separate two numbers."""
    return _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)
