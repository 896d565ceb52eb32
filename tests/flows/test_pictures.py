"""Prefect's page as a person sees it, on a real server with a real flow run.

Claims
- the flow run is there by its run's name; its tab of artifacts shows progress, steps, curves and the link to the report
- the progress, the table of steps and the curves each have their page; no page scrolls sideways

The pictures are left in pytest's folder, to be looked at. Run: pytest tests/flows/test_pictures.py -m slow
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from storage.store import RunStore
from tests.benchmarks.generated_run import generate_run
from tests.browser import LAPTOP, browser
from tests.flows.test_stack import unused_url

PROJECT = Path(__file__).parents[2]
START_S = 600  # on a very busy machine; seconds on an idle one

# What the flow tba/train does to the page, once, over a run that is there already.
FLOW = """
import sys
from prefect import flow
from prefect.runtime import flow_run
from flows.config import RunConfig
from flows.page import Page
from storage.store import RunStore

@flow(name="tba", flow_run_name="generated")
def tba() -> None:
    url = sys.argv[1]
    Page(RunStore(url, "generated"), RunConfig(run="generated", store=url, train={"steps": 8})).update(now=True)
    print("flow run", flow_run.id)

tba()
"""


@pytest.fixture
def server(tmp_path):
    """A Prefect server of its own; its address without a path."""
    url = unused_url()
    environment = os.environ | {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(PROJECT),
    }
    host, port = url.removeprefix("http://").removesuffix("/api").split(":")
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", port]
    with open(tmp_path / "server.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while not is_well(url):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "server.log").read_text()
            time.sleep(0.5)
        yield url.removesuffix("/api"), environment
    finally:
        process.terminate()
        process.wait()


def is_well(url: str) -> bool:
    try:
        return json.load(urllib.request.urlopen(f"{url}/health", timeout=10)) is True
    except OSError:
        return False


@pytest.mark.slow
def test_prefects_page_shows_the_run_its_progress_and_its_curves(server, tmp_path):
    address, environment = server
    store = RunStore((tmp_path / "store").as_uri(), "generated")
    generate_run(store, 256, rows_per_shard=64, num_steps=6, num_response_tokens=4)
    store.put("trainer/heartbeat.json", json.dumps({"state": "training", "step": 6, "reward_mean": 0.5}).encode())
    command = [sys.executable, "-c", FLOW, store.url]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    flow_run = done.stdout.split("flow run ")[1].split()[0]
    with browser(tmp_path / "profile") as tab:
        see(tab, f"{address}/runs/flow-run/{flow_run}", ["generated", "Completed"], tmp_path / "prefect-run.png")
        url = f"{address}/runs/flow-run/{flow_run}?tab=Artifacts"
        told = [
            "training, step 6 of 8, reward 0.50",
            "The newest training steps",
            "Reward by step",
            "Staleness by step",
        ]
        see(tab, url, told, tmp_path / "prefect-run-artifacts.png")
        see(
            tab, f"{address}/artifacts/key/generated-progress", ["step 6 of 8", "75"], tmp_path / "prefect-progress.png"
        )
        steps = tmp_path / "prefect-steps.png"
        see(tab, f"{address}/artifacts/key/generated-steps", ["fresh reward", "staleness, mean"], steps)
        see(tab, f"{address}/artifacts/key/generated-reward-curve", ["Reward by step"], tmp_path / "prefect-curve.png")


def see(tab, url: str, told: list[str], picture: Path) -> None:
    """Opens a page, waits for what it must tell, and leaves a picture."""
    tab.open(url, width=LAPTOP)
    for words in told:
        tab.wait(f"document.body.innerText.includes({json.dumps(words)})", timeout_s=90)
    assert tab.evaluate("document.documentElement.scrollWidth") == LAPTOP
    tab.screenshot(picture, whole=False)
