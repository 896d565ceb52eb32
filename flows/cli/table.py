"""Rows of a query, printed as a table, JSON or CSV."""

import csv
import itertools
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow


def print_table(rows: "pyarrow.Table", form: str) -> None:
    """form: `table` for people, `json` (one array of objects) or `csv` (with a header) for programs, on stdout."""
    rows = rows.rename_columns(_distinct(rows.column_names))
    if form == "json":
        print(json_text(rows.to_pylist(maps_as_pydicts="strict")))
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(rows.column_names)
        writer.writerows(row.values() for row in rows.to_pylist(maps_as_pydicts="strict"))
    else:
        _print_for_people(rows)


def json_text(value: object) -> str:
    """NaN and the infinities are null: Python would write them as they are, which is no JSON."""
    return json.dumps(json.loads(json.dumps(value, default=str), parse_constant=lambda _: None), indent=2)


def _distinct(names: list[str]) -> list[str]:
    """Names of which none is there twice, as rows become dictionaries: the second `reward` of a join is `reward_1`."""
    taken, distinct = set(names), []
    for name in names:
        if name in distinct:
            name = next(other for n in itertools.count(1) if (other := f"{name}_{n}") not in taken)
            taken.add(name)
        distinct.append(name)
    return distinct


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
