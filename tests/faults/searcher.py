"""A Searcher's process: `python -m tests.faults.searcher STORE RUN NAME ACKNOWLEDGED`.

The flow `search` itself, in a process without Prefect: its tasks run as the functions that they are. Where a commit is
acknowledged a line is added to the file ACKNOWLEDGED: the shard's path, and number and digest of its rows.
"""

import hashlib
import json
import logging
import sys
import time
from pathlib import Path

import pyarrow as pa

PAUSE_S = 1.0  # after a round: the small model samples one in milliseconds, and would fill the bucket

log = logging.getLogger("search")


def digest(shard: pa.Table) -> str:
    """Of its rows, as Python sees them."""
    return hashlib.sha256(repr(shard.to_pylist()).encode()).hexdigest()


def main(store: str, run: str, name: str, acknowledged: str) -> None:
    from flows import search
    from flows.searcher import held_name, policy_feed
    from flows.searcher.start import start_searcher
    from storage import shards

    commit = shards.commit_shard

    def acknowledging(run_store, table: pa.Table) -> str:
        path = commit(run_store, table)
        with open(acknowledged, "a") as file:
            file.write(json.dumps({"path": path, "rows": table.num_rows, "digest": digest(table)}) + "\n")
        time.sleep(PAUSE_S)
        return path

    for module in (search, held_name, policy_feed):
        module.get_run_logger = lambda: log
    search.start_searcher_task, search.evaluate_task = start_searcher, search.evaluate
    search.as_asset = lambda *_: lambda search_round: search_round
    search.opaque = lambda sampled: sampled  # Prefect's tasks unwrap it
    shards.commit_shard = acknowledging
    search.search.fn(store, run, name, evaluates=name == "s0")


if __name__ == "__main__":
    sys.modules["vllm"] = None  # transformers' generate starts in seconds
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    Path(sys.argv[4]).touch()
    main(*sys.argv[1:])
