"""How long do `tba report` and `tba diversity` take on large runs? `make bench-report`: a JSON object a command.

Runs of generated text (generated_run.py): the report of 100,000 trajectories in 400 shards with 800 training steps of
128 slots, the diversity of 1,000,000 trajectories in 977 shards, embeddings on a sample. Each is a command in a process
of its own, imports included, whose resident memory is measured. The runs take 0.7 GB of the folder for temporary files
(TMPDIR).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from storage.store import RunStore
from tests.benchmarks.generated_run import generate_run

PROJECT = Path(__file__).parents[2]
# A child of its own tells its own peak.
COMMAND = """
import resource, sys
from flows.cli.app import app
app(sys.argv[1:], standalone_mode=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def timed(*arguments: str) -> dict[str, float]:
    """Seconds and peak memory of one `tba` command."""
    start, before = time.perf_counter(), os.times()
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], cwd=PROJECT, check=True, capture_output=True)
    spent, after = time.perf_counter() - start, os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    peak = int(done.stdout.split()[-1])
    return {"wall_s": round(spent, 1), "cpu_s": round(cpu, 1), "peak_gb": round(peak / 1e6, 2)}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        url = Path(folder).as_uri()
        generate_run(RunStore(url, "hundred-thousand"), 102_400, rows_per_shard=256, num_steps=800)
        output = f"{folder}/report.html"
        figures = timed("report", "hundred-thousand", "--store", url, "--output", output)
        show("report_100k", figures | {"file_mb": round(Path(output).stat().st_size / 1e6, 2)})
        generate_run(RunStore(url, "million"), 1_000_448, rows_per_shard=1024, num_steps=100, num_response_tokens=32)
        show("diversity_1m", timed("diversity", "million", "--store", url, "--json"))
        show("diversity_1m_without_embeddings", timed("diversity", "million", "--store", url, "--embedded", "0"))


def show(name: str, figures: dict) -> None:
    print(json.dumps({name: figures}), flush=True)


if __name__ == "__main__":
    main()
