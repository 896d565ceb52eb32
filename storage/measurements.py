"""Samples of a run's responses, and their measured diversity.

diversity/measured=20261121T120000.000000Z.parquet    one measurement
"""

import pyarrow as pa

from storage.queries import ask
from storage.schema import DIVERSITY, to_table
from storage.shards import parquet_bytes
from storage.sql import sql
from storage.store import RunStore, scans


@scans
def choose_diversity_sample(
    store: RunStore, *, num_bins: int, responses_per_prompt: int, num_responses: int, seed: int
) -> pa.Table:
    """About `num_responses` responses, `responses_per_prompt` to each prompt (choose_diversity_sample.sql)."""
    parameters = {
        "num_bins": num_bins,
        "responses_per_prompt": responses_per_prompt,
        "num_responses": num_responses,
        "seed": seed,
    }
    return ask(
        store,
        lambda reader: reader.sql(sql("choose_diversity_sample"), params=parameters).to_arrow_table(),
        ("trajectories",),
    )


def record_diversity(store: RunStore, rows: list[dict]) -> None:
    """Stores a measurement: DIVERSITY rows with one `measured_at`."""
    name = f"{rows[0]['measured_at']:%Y%m%dT%H%M%S.%fZ}"
    store.put_new(f"diversity/measured={name}.parquet", parquet_bytes(to_table(rows, DIVERSITY)))
