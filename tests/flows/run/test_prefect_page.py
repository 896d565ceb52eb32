"""Prefect's page as the control room: the real flow with a real server, and a stand-in for Trainer and Searcher.

Claims
- a run's flow run has a progress, a table, two image and a link artifact, replaced in place rather than piled up
- each published policy is a task run named by its steps, an asset that depends on its shards, and an event
- Suspend on the page ends the Trainer between two steps and the Searcher; Resume there goes on from what was saved
- Cancel ends both as well, and says so; the run can be resumed
- the flow of a resumed run shows the policies of its own attempts, and not the earlier ones again
- a damaged policy, a deleted artifact, or any other part of the page that fails, silences no alarm and no later part
- an alarm of the heartbeat is in the progress artifact, and an event and a warning when it goes on
- tba.run.finished sets off the automation of prefect.yaml, with the run's name and store
- curves have few points whatever the run's length, and no value is left out at the ends

Run: pytest tests/flows/run/test_prefect_page.py -m "apart or not apart"
"""

import contextlib
import json
import os
import time
from collections import Counter
from itertools import product
from types import SimpleNamespace
from uuid import uuid4

import httpx
import pytest

from flows.config import RunConfig
from flows.run import prefect_page, prefect_page_artifacts
from flows.run.prefect_page_lineage import PublishedPolicies
from infra import prefect_server, stack
from storage import attempts, policies
from storage.store import RunStore
from tests.browser import LAPTOP, PHONE, browser
from tests.infra.project import REPOSITORY, make_project, processes_of, string_of, wait_for
from tests.storage.helpers import OWNER

STEPS = 12
# The real flow; only its checks, and what the Trainer's process runs, are stood in for.
TRAIN = """
import subprocess, sys, types
passes = lambda config: []
sys.modules["flows.run.preflight"] = types.SimpleNamespace(check_inputs_in_a_process=passes, check_memory=passes)
from flows import train
from flows.run import prefect_page

class Popen(subprocess.Popen):
    def __init__(self, command, env):
        super().__init__([sys.executable, {trainer!r}, *command[3:]], env=env)

train.subprocess = types.SimpleNamespace(Popen=Popen, TimeoutExpired=subprocess.TimeoutExpired)
train.POLL_S = prefect_page.UPDATE_S = 0.5
tba = train.tba
"""
# A Trainer that takes a step every half a second, publishes every second one, and goes on where the last one stopped.
# Its first life ends no step beyond the third until it is told to stop.
TRAINER = """
import json, signal, sys, tempfile, threading
from datetime import UTC, datetime
from pathlib import Path
from storage import attempts, ledger, policies
from storage.process_identity import Identity
from storage.store import RunStore
from tests.storage.helpers import make_batch, make_training_step

store, told = RunStore(*sys.argv[1:3]), threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told.set())
begun = policies.latest_policy(store).step if policies.latest_policy(store) else 0
attempt = attempts.start_attempt(store, begun, Identity.current(), previous=attempts.latest_attempt(store))

def publish(step):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(b"weights")
        ref = policies.policy_ref(step, "f" * 32, attempt=attempt, final=step == {steps})
        policies.publish_policy(store, folder, ref)

def beat(state, step):
    alarms = {{"entropy_low": "entropy is near zero"}}
    facts = {{"state": state, "step": step, "reward_mean": 0.5, "attempt": attempt, "alarms": alarms}}
    attempts.write_heartbeat(store, facts)

publish(begun)
for step in range(begun + 1, {steps} + 1):
    started_at = datetime.now(UTC)
    told.wait(600 if attempt == 1 and step > 3 else 0.5)
    ledger.record_batch(store, attempt, step, make_batch([step - 1]))
    times = {{"started_at": started_at, "ended_at": datetime.now(UTC)}}
    ledger.record_training_step(store, make_training_step(attempt, step) | times)
    beat("training", step)
    if told.is_set() or step % 2 == 0:
        publish(step)
    if told.is_set():
        beat("stopped", step)
        sys.exit(0)
evaluation = {{"attempt": attempt, "policy_step": {steps}, "split": "heldout", "num_problems": 1, "accuracy": 0.75}}
evaluation |= {{"mean_response_tokens": 1.0, "seconds": 2.0, "created_at": datetime.now(UTC)}}
ledger.record_evaluation(store, evaluation)
beat("finished", {steps})
"""
SEARCH = """
import time
from prefect import flow

@flow(name="search")
def search(store: str, run: str, name: str, evaluates: bool) -> None:
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def room(server, tmp_path_factory):
    """A project on the stack that is there, with the automation on: (client, store's root URL)."""
    first, url, _ = server
    project = make_project(tmp_path_factory.mktemp("room"))
    (project / "trainer.py").write_text(TRAINER.format(steps=STEPS))
    (project / "flows" / "train.py").write_text(TRAIN.format(trainer=str(project / "trainer.py")))
    (project / "flows" / "search.py").write_text(SEARCH)
    before, audit, after = (project / "prefect.yaml").read_text().partition("audit the buffer of a finished run")
    (project / "prefect.yaml").write_text(before + audit + after.replace("enabled: false", "enabled: true", 1))
    from prefect.settings import PREFECT_API_AUTH_STRING, temporary_settings

    string = string_of(first)  # as a server of one's own has it: in the environment, and so in Prefect's settings
    with pytest.MonkeyPatch.context() as patch, temporary_settings({PREFECT_API_AUTH_STRING: string}):
        patch.setenv("PREFECT_API_URL", url)
        patch.setenv("PREFECT_API_AUTH_STRING", string)
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.chdir(project)  # as a person does: the worker's flows run in its working folder
        stack.up(project, keep=True, say=lambda _: None)
        try:
            with prefect_server.api(url) as client:
                yield client, (project / "store").as_uri()
        finally:
            stack.down(project)
            assert processes_of(project) == []


def submit(room, run: str):
    """The flow run of a new run, and its store."""
    from flows.run import flow_runs

    client, root = room
    config = RunConfig(run=run, store=root, searchers=1, train={"steps": STEPS, "sync_interval": 2})
    return flow_runs.submit(client, config), RunStore(root, run)


def state_of(client, flow_run) -> str:
    return client.read_flow_run(flow_run.id).state.name


def flow_runs_of(client, flow: str) -> list:
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName

    return client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=[flow])))


def searchers_of(client, store: RunStore) -> list[str]:
    """States of the run's Searchers."""
    return [
        r.state_name
        for r in flow_runs_of(client, "search")
        if (r.parameters["store"], r.parameters["run"]) == (store.url, store.run)
    ]


def artifacts_of(client, flow_run) -> list:
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
    return client.read_artifacts(artifact_filter=of_run)


def has(found: list[dict], step: int) -> list[dict] | None:
    """The events, once there is one of this step: they come a moment later."""
    return found if step in [event["payload"]["step"] for event in found] else None


def beat(store: RunStore) -> dict:
    return json.loads(store.get(attempts.HEARTBEAT)) if store.exists(attempts.HEARTBEAT) else {"step": 0}


def events(client, prefix: str, resource: str) -> list[dict]:
    body = {"limit": 50, "filter": {"event": {"prefix": [prefix]}, "resource": {"id_prefix": [resource]}}}
    return client._client.post("/events/filter", json=body).json()["events"]


@pytest.mark.apart
def test_suspend_ends_all_between_two_steps_and_resume_goes_on(room):
    from prefect.states import Suspended

    client, root = room
    flow_run, store = submit(room, "suspended")
    wait_for(lambda: beat(store)["step"] >= 3 and searchers_of(client, store) == ["Running"])
    client.set_flow_run_state(flow_run.id, Suspended(timeout_seconds=300))  # what the page's button does
    wait_for(lambda: searchers_of(client, store) == ["Cancelled"])
    assert state_of(client, flow_run) == "Suspended"
    stopped = beat(store)
    assert stopped["state"] == "stopped" and policies.latest_policy(store).step == stopped["step"] < STEPS

    client.resume_flow_run(flow_run.id)
    wait_for(lambda: state_of(client, flow_run) == "Completed")
    assert [record.resumed_from for record in attempts.list_attempts(store)] == [0, stopped["step"]]

    shown = artifacts_of(client, flow_run)
    keys = {"suspended-progress": 2, "suspended-steps": 2, "suspended-reward-curve": 2, "suspended-staleness-curve": 2}
    assert Counter(artifact.key for artifact in shown) == keys | {"suspended-report": 2}, "one set a life of the flow"
    newest = {artifact.key: artifact for artifact in sorted(shown, key=lambda artifact: artifact.created)}
    assert float(newest["suspended-progress"].data) == 100
    assert f"step {STEPS} of {STEPS}" in newest["suspended-progress"].description
    assert "ALARM: entropy is near zero" in newest["suspended-progress"].description
    table = json.loads(newest["suspended-steps"].data)
    assert [row["step"] for row in table] == list(range(STEPS, 0, -1))
    assert table[0]["reward"] == 0.25 and table[0]["staleness, mean"] == 1.0
    assert newest["suspended-reward-curve"].data.startswith("data:image/svg+xml,<svg")
    assert f"{root}/suspended/report.html" in newest["suspended-report"].data

    published = wait_for(lambda: has(events(client, "tba.policy.published", "tba.run.suspended"), STEPS))
    steps = {event["payload"]["step"] for event in published}
    assert {0, *(step for step in range(stopped["step"], STEPS + 1) if step % 2 == 0)} <= steps
    (last,) = [event for event in published if event["payload"]["final"]]
    assert last["payload"] | {"step": STEPS, "attempt": 2, "num_shards": 1, "fingerprint": "f" * 32} == last["payload"]
    policy = f"{root}/suspended/policies/step={STEPS:08d}"
    (asset,) = wait_for(lambda: events(client, "prefect.asset.materialization.succeeded", policy))
    shard = f"{root}/suspended/trajectories/searcher=s0/round=00000000.parquet"
    assert shard in [related["prefect.resource.id"] for related in asset["related"]]
    names = [related["prefect.resource.name"] for related in asset["related"] if "task-run" in related.values()]
    assert names == [f"steps {STEPS - 1} to {STEPS}"]

    alarmed = wait_for(lambda: events(client, "tba.alarm.", "tba.run.suspended"))
    assert [event["event"] for event in alarmed] == ["tba.alarm.entropy_low"] * 2, "one a life of the flow"

    (finished,) = wait_for(lambda: events(client, "tba.run.finished", "tba.run.suspended"))
    assert finished["payload"]["accuracy_after"] == 0.75 and finished["payload"]["steps"] == STEPS
    asked_for = {"store": root, "run": "suspended"}
    wait_for(lambda: [r for r in flow_runs_of(client, "maintain") if r.parameters == asked_for])


@pytest.mark.apart
def test_cancel_ends_all_and_the_run_can_be_resumed(room):
    from prefect.states import Cancelling

    client, _ = room
    flow_run, store = submit(room, "cancelled")
    wait_for(lambda: beat(store)["step"] >= 1 and searchers_of(client, store) == ["Running"])
    client.set_flow_run_state(flow_run.id, Cancelling())  # what the page's button does
    wait_for(lambda: searchers_of(client, store) == ["Cancelled"] and state_of(client, flow_run) == "Cancelled")
    assert beat(store)["state"] == "stopped"
    assert policies.latest_policy(store).step == beat(store)["step"]


@pytest.mark.apart
def test_the_page_shows_a_run_on_every_screen(room, tmp_path):
    """The pictures are left in pytest's folder, to be looked at."""
    from prefect.states import Cancelling

    client, _ = room
    flow_run, store = submit(room, "shown")
    wait_for(lambda: beat(store)["step"] >= 3 and len(artifacts_of(client, flow_run)) == 5)
    progress = next(of.id for of in artifacts_of(client, flow_run) if of.key == "shown-progress")
    root = str(client.api_url).split("/api")[0]
    pages = {
        "run": (f"runs/flow-run/{flow_run.id}", ["shown", "Running"]),
        "artifacts": ("artifacts", ["shown-progress", "shown-reward-curve", "shown-report"]),
        "progress": (f"artifacts/artifact/{progress}", ["step 3 of 12"]),
    }
    with browser(tmp_path / "profile") as tab:
        tab.open(root, width=LAPTOP)
        tab.evaluate(f"localStorage.setItem('prefect-password', btoa({os.environ['PREFECT_API_AUTH_STRING']!r}))")
        for (name, (path, expected)), width, scheme in product(pages.items(), (LAPTOP, PHONE), ("light", "dark")):
            # Prefect's page is dark until somebody switches it on the page, whatever the system says
            tab.evaluate(f"localStorage.setItem('color-scheme', JSON.stringify({scheme!r}))")
            tab.open(f"{root}/{path}", width=width)
            tab.wait(f"document.documentElement.classList.contains({scheme!r})")
            for text in expected:
                tab.wait(f"document.body.innerText.includes({text!r})")
            time.sleep(8 if name == "run" else 2)  # it fades in; the timeline is drawn last, on a canvas
            tab.screenshot(tmp_path / f"{name}-{width}-{scheme}.png", whole=False)
    client.set_flow_run_state(flow_run.id, Cancelling())
    wait_for(lambda: state_of(client, flow_run) == "Cancelled")


def test_a_trainer_that_waits_in_mid_training_is_starved_once(tmp_path, monkeypatch):
    told, clock = [], [0.0]
    monkeypatch.setattr(prefect_page, "emit_event", lambda event, **of: told.append((event, of["payload"])))
    monkeypatch.setattr(prefect_page.time, "monotonic", lambda: clock[0])
    shown = prefect_page.Page(RunStore(tmp_path.as_uri(), "some"), RunConfig(run="some"))

    def after(seconds: float, state: str, step: int, attempt: int = 1) -> int:
        clock[0] += seconds
        shown._tell_if_starved({"state": state, "step": step, "attempt": attempt, "message": "too early"})
        return len(told)

    assert after(0, "waiting", 0) == after(1000, "waiting", 0) == 0, "the first fill takes as long as it takes"
    assert after(1, "training", 1) == after(1, "waiting", 1) == after(59, "waiting", 1) == 0
    assert after(1, "waiting", 1) == after(60, "waiting", 1) == 1
    assert told == [
        ("tba.buffer.starved",
         {"run": "some", "store": tmp_path.as_uri(), "step": 1, "waited_s": 60, "reason": "too early"})
    ]  # fmt: skip
    assert after(1, "training", 2) == after(1, "waiting", 2) == 1
    assert after(60, "waiting", 2) == 2
    assert after(1, "starting", 0, attempt=2) == after(1, "waiting", 2, attempt=2) == 2
    assert after(1000, "waiting", 2, attempt=2) == 2, "a resumed Trainer waits until its engines are loaded"
    assert after(1, "training", 3, attempt=2) == after(1, "waiting", 3, attempt=2) == 2
    assert after(60, "waiting", 3, attempt=2) == 3


def test_a_resumed_flow_shows_its_own_policies_only(tmp_path, monkeypatch):
    """Earlier ones were shown, and set off automations, when they were published."""
    store, shown = RunStore(tmp_path.as_uri(), "some"), []
    (tmp_path / "weights").mkdir()

    def publish(attempt: int, step: int) -> None:
        ref = policies.policy_ref(step, "f" * 32, attempt=attempt, final=False)
        policies.publish_policy(store, tmp_path / "weights", ref)

    attempts.start_attempt(store, 0, OWNER)
    publish(1, 4)
    page = PublishedPolicies(store)
    monkeypatch.setattr(page, "_show_policy", lambda attempt, _, step, **__: shown.append((attempt, step)) or step == 6)
    page.show()
    assert shown == []
    attempts.start_attempt(store, 4, OWNER)
    publish(2, 6)
    page.show()
    assert shown == [(2, 4), (2, 5), (2, 6)], "its first policy, and then each step that may have one"
    page.show()
    assert len(shown) == 3


def test_each_alarm_that_goes_on_is_an_event_and_a_warning(tmp_path, monkeypatch):
    told, warned = [], []
    monkeypatch.setattr(prefect_page, "emit_event", lambda event, **of: told.append((event, of["payload"])))
    monkeypatch.setattr(prefect_page, "get_run_logger", lambda: SimpleNamespace(warning=warned.append))
    shown = prefect_page.Page(RunStore(tmp_path.as_uri(), "some"), RunConfig(run="some"))
    for step, alarms in enumerate(
        ({}, {"a": "first"}, {"a": "first, later"}, None, {"a": "on"}, {}, {"b": "", "a": ""})
    ):
        shown._tell_alarms({"step": step} | ({} if alarms is None else {"alarms": alarms}))
    assert [event for event, _ in told][:1] == ["tba.alarm.a"]
    assert sorted(event for event, _ in told[1:]) == ["tba.alarm.a", "tba.alarm.b"]
    assert told[0][1] == {"run": "some", "store": tmp_path.as_uri(), "step": 1, "alarm": "a", "message": "first"}
    assert len(warned) == 3 and warned[0] == "first"


def test_a_part_of_the_page_that_fails_silences_no_alarm(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(prefect_page, "emit_event", lambda event, **of: told.append(event))
    monkeypatch.setattr(prefect_page, "get_run_logger", lambda: SimpleNamespace(warning=lambda *_: None))
    store = RunStore(tmp_path.as_uri(), "some")
    shown = prefect_page.Page(store, RunConfig(run="some"))
    monkeypatch.setattr(shown._policies, "show", lambda: json.loads("{"))
    for alarm in ("a", "b"):
        attempts.write_heartbeat(store, {"state": "training", "step": 1, "alarms": {alarm: "it is on"}})
        shown.update(now=True)
    assert told == ["tba.alarm.a", "tba.alarm.b"]


def test_an_artifact_that_was_deleted_on_the_page_is_made_again(tmp_path, monkeypatch):
    made = []

    class Client:
        def update_artifact(self, *_: object) -> None:
            raise httpx.HTTPStatusError("deleted", request=None, response=httpx.Response(404))

    monkeypatch.setattr(prefect_page_artifacts, "get_client", lambda sync_client: contextlib.nullcontext(Client()))
    for kind in ("progress", "link"):
        make = f"create_{kind}_artifact"
        monkeypatch.setattr(prefect_page_artifacts.artifacts, make, lambda key, **_: made.append(key) or uuid4())
    shown = prefect_page_artifacts.Artifacts(RunStore(tmp_path.as_uri(), "some"), RunConfig(run="some"))
    for _ in range(3):
        shown.show_progress({})
    assert made == ["some-progress", "some-report", "some-progress"]


def test_a_damaged_policy_hides_no_later_one(tmp_path):
    store = RunStore(tmp_path.as_uri(), "some")
    store.put(f"{policies.policy_path(5, 1)}/{policies.MANIFEST}", b"{")
    assert not PublishedPolicies(store)._show_policy(1, range(4, 6), 5)


def test_a_rounds_shard_is_an_asset_that_comes_from_its_policies(tmp_path):
    from flows.search import as_asset

    store = RunStore((tmp_path / "with space").as_uri(), "some")
    task = as_asset(store, "s0", 3, ["policies/step=00000004", "policies/step=00000006"])(lambda: None)
    (shard,), causes = task.assets, task.asset_deps
    root = f"{tmp_path.as_uri()}/with_20space/some"  # an asset's key has no percent sign
    assert shard.key == f"{root}/trajectories/searcher=s0/round=00000003.parquet"
    assert [cause.key for cause in causes] == [f"{root}/policies/step=0000000{step}" for step in (4, 6)]
    assert task.task_run_name == "round 3" and task.retries == 2
