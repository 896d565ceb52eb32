"""How many requests does a run send to its store? `make bench-requests`: a table a run, then one JSON object.

Runs of `tba train` with 1 and 3 Searchers (SEARCHERS=… chooses) and STEPS steps, on radosgw behind a proxy that counts
requests. Each table has the requests by folder of the run. The object has for each run its seconds and rounds, and its
requests by price: writes (PUT, POST, LIST), reads (GET, HEAD), and deletes, which cost nothing at list prices.
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

STEPS = 12
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
    seconds, kinds = time.monotonic() - began, Counter()
    for line, times in proxy.first_lines.items():
        kinds[kind_of(line.decode(), run)] += times
    for (method, of), times in sorted(kinds.items(), key=lambda item: item[0][::-1]):
        print(f"{of:24}{method:8}{times:8}")
    os.environ.update(direct)
    (row,) = query(RunStore(url, run), "SELECT count(*) AS rounds FROM search_rounds").to_pylist()
    counted: Counter[str] = Counter()
    for (method, _), times in kinds.items():
        counted[KINDS.get(method, "deletes")] += times
    return {"seconds": seconds, **row, **counted}


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
