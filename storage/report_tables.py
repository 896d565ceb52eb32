"""The tables of a report, computed in DuckDB: a few thousand numbers from any number of trajectories."""

import duckdb
import pyarrow as pa

from storage.queries import ask
from storage.sql import sql
from storage.store import RunStore, scans

NUM_EXAMPLES = 6  # of best, worst and most trained trajectories
NUM_POINTS = 160  # of a curve: the resolution of a screen
NUM_BARS = 24  # of a histogram
NUM_COLUMNS, NUM_LEVELS = 32, 10  # of the grid of rewards

# Each table's query, storage/sql/report_<name>.sql, and its parameters.
_TABLES = {
    "totals": {},
    "training": {"num_bins": NUM_POINTS},
    "draws": {"num_bins": NUM_POINTS // 2},
    "staleness": {"num_bins": NUM_BARS},
    "rewards": {"num_bins": NUM_COLUMNS, "num_levels": NUM_LEVELS},
    "buffer_age": {"num_bins": NUM_POINTS // 4},
    "examples": {"num_examples": NUM_EXAMPLES},
    "trainer": {},
    "searchers": {},
    "throughput": {"num_bins": NUM_POINTS // 4},
    "provenance": {},
}


@scans
def report_tables(store: RunStore) -> dict[str, pa.Table]:
    """The tables of a report by name; each query's opening comment defines its rows. Without data they are empty."""
    return ask(store, _tables)


def _tables(connection: duckdb.DuckDBPyConnection) -> dict[str, pa.Table]:
    connection.execute(sql("create_report_tables"))
    tables = {
        name: connection.sql(sql(f"report_{name}"), params=parameters).to_arrow_table()
        for name, parameters in _TABLES.items()
    }
    tables["evaluations"] = connection.sql("SELECT * FROM evaluations ORDER BY policy_step").to_arrow_table()
    tables["steps"] = connection.sql("SELECT * FROM training_steps ORDER BY step").to_arrow_table()
    tables["attempts"] = connection.sql("SELECT * FROM attempts ORDER BY attempt").to_arrow_table()
    return tables
