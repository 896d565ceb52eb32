"""How many requests does a run send to its store? `make bench-requests`: a table a run, then one JSON object.

Runs of `tba train` with 1 and 3 Searchers (SEARCHERS=… chooses) and 16 steps (STEPS=…), on radosgw behind a proxy that
counts requests. Each table has the requests by folder of the run, and those that came while it trained beside the
formula of docs/operating.md ("What a store costs"). The object has both for each run, by price: writes (PUT, POST,
LIST) and reads (GET, HEAD). Deletes cost nothing at list prices.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from infra.local_s3 import LocalS3
from storage.queries import query
from storage.store import RunStore
from tests.benchmarks.bench_scale import Latency

STEPS = int(os.environ.get("STEPS", "16"))
# Reads and writes for each of these while a run trains, as in docs/operating.md
FORMULA = {
    "second": (3.9, 0.55),
    "searcher_second": (0.7, 0.1),
    "step": (5, 4),
    "round": (4, 3),
    "policy": (11, 13),
}
KINDS = {"PUT": "writes", "POST": "writes", "LIST": "writes", "GET": "reads", "HEAD": "reads"}  # DELETE costs nothing


def kind_of(line: str, run: str) -> tuple[str, str]:
    """Method (LIST for a listing) and folder of the run, of a request's first line."""
    method, target = line.split(" ")
    url = urlsplit(target)
    asked = parse_qs(url.query)
    key = unquote(asked["prefix"][0] if "prefix" in asked else url.path)
    method = "LIST" if "list-type" in asked else method
    _, found, inside = f"/{key}".partition(f"/{run}/")
    folder = re.sub(r"[=/].*|\d+.*", "", inside.replace("metrics/", "metrics-")) if found else "(outside)"
    return method, folder or "(run)"


def counted_run(number: int, url: str, direct: dict[str, str], folder: Path) -> dict[str, float]:
    """Trains with so many Searchers; prints the requests by folder. direct: the environment without the proxy."""
    proxy, run = Latency(direct["AWS_ENDPOINT_URL"], folder / "counter", latency_s=0.0), f"n{number}"
    command = [sys.executable, "-m", "flows.cli", "train", run, "--store", url, "--steps", str(STEPS)]
    began = time.monotonic()
    environment = direct | {"AWS_ENDPOINT_URL": proxy.url}
    subprocess.run([*command, "--set", f"searchers={number}"], check=True, env=environment, stdout=sys.stderr)
    print(f"{number} Searchers, {time.monotonic() - began:.0f} s")
    found = [(at, *kind_of(line.decode(), run)) for at, line in proxy.requests]
    for (of, method), times in sorted(Counter((of, method) for _, method, of in found).items()):
        print(f"{of:24}{method:8}{times:8}")
    os.environ.update(direct)
    begin, end, amounts = amounts_of(RunStore(url, run))
    counted = Counter(KINDS.get(method) for at, method, _ in found if begin <= at <= end)
    amounts |= {"searcher_second": number * amounts["second"], "policy": num_policies(proxy.requests, begin, end)}
    figures = {}
    for index, kind in enumerate(("reads", "writes")):
        expected = sum(each[index] * amounts[name] for name, each in FORMULA.items())
        print(
            f"{kind} in training: {counted[kind]}; by the formula {expected:.0f} ({expected / counted[kind]:.2f} of it)"
        )
        figures |= {kind: counted[kind], f"{kind}_by_formula": expected}
    return amounts | figures


def amounts_of(store: RunStore) -> tuple[float, float, dict[str, float]]:
    """When training began and ended (seconds since the epoch); its seconds, steps and rounds."""
    (span,) = query(
        store,
        "SELECT epoch(min(started_at)) AS began, epoch(max(ended_at)) AS ended, count(*) AS steps FROM training_steps",
    ).to_pylist()
    ended_at = query(store, "SELECT epoch(ended_at) AS at FROM search_rounds").column("at").to_pylist()
    rounds = sum(span["began"] <= at <= span["ended"] for at in ended_at)
    seconds = span["ended"] - span["began"]
    return span["began"], span["ended"], {"second": seconds, "step": span["steps"], "round": rounds}


def num_policies(requests: list[tuple[float, bytes]], begin: float, end: float) -> int:
    """Policies that were published meanwhile."""
    return sum(
        line.startswith(b"PUT ") and b"/policies/latest.json" in line and begin <= at <= end for at, line in requests
    )


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory(prefix="bench-requests-") as folder:
        server = LocalS3(Path(folder) / "s3")
        direct = {**os.environ, **server.start()}
        try:
            for number in [int(number) for number in os.environ.get("SEARCHERS", "1,3").split(",")]:
                figures = counted_run(number, direct["S3_URL"], direct, Path(folder))
                results |= {f"{name}_at_{number}": round(value) for name, value in figures.items()}
        finally:
            server.stop()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
