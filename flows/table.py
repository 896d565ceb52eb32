"""Rows of a query, printed as a table, JSON or CSV."""

import csv
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow


def print_table(rows: "pyarrow.Table", form: str) -> None:
    """form: `table` for people, `json` (one array of objects) or `csv` (with a header) for programs, on stdout."""
    if form == "json":
        print(json.dumps(rows.to_pylist(maps_as_pydicts="strict"), default=str, indent=2))
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(rows.column_names)
        writer.writerows(row.values() for row in rows.to_pylist(maps_as_pydicts="strict"))
    else:
        _print_for_people(rows)


def _print_for_people(rows: "pyarrow.Table") -> None:
    from pyarrow import types
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # into a pipe nothing is cut or wrapped: there is no screen to fit
    console = Console() if sys.stdout.isatty() else Console(width=100_000)
    table = Table()
    for field in rows.schema:
        is_number = types.is_integer(field.type) or types.is_floating(field.type) or types.is_decimal(field.type)
        table.add_column(field.name, justify="right" if is_number else "left")
    for row in rows.to_pylist(maps_as_pydicts="strict"):
        table.add_row(*(Text(_cell(value)) for value in row.values()))  # Text: a response's [brackets] are no markup
    console.print(table)
    console.print(f"{rows.num_rows} rows")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
