"""The main job on real parts: Prefect server and worker, a Searcher (vLLM's until the kill), the Trainer, the model.

- SIGKILL to the whole process group in mid-training leaves no process. Then the same command: it finds the stale state
  and the flow run left Running, marks that Crashed, and the run resumes from its checkpoint; every committed shard is
  still there and counted once, and the steps that count are each there once.
- `tba sql` answers during the run; after it SQL has all that was stored; plain DuckDB reads the shards by a glob.
- The summary has what it promises; the final policy loads with from_pretrained and is the one that was fingerprinted.
- The same command on a finished run says so and changes nothing. Nothing is left running.
- Where a run was killed after its final policy and before that was evaluated, it evaluates and trains nothing again.

python -m pytest tests/flows/test_end_to_end.py -m slow
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import psutil
import pytest

from storage.policies import published_policies
from storage.queries import query
from storage.store import RunStore
from tests.infra.project import states

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
STEPS, B, K = 8, 2, 4
SMALL = {
    "searchers": 1,
    "sampling.prompts_per_batch": B,
    "sampling.responses_per_prompt": K,
    "sampling.min_size": 32,
    "search.prompts_per_round": 4,
    "search.samples_per_prompt": 8,
    "train.checkpoint_interval": 3,
    "task.num_heldout": 16,
}
WITHOUT_VLLM = "import sys\n\nsys.modules['vllm'] = None\n"  # every Python process of the project begins with it
SUMMARY_KEYS = {
    "accuracy_before", "accuracy_after", "steps", "trajectories", "staleness_mean", "staleness_max",
    "trainer_wait_share", "publish_stall_share", "searcher_idle_share", "overlap_share", "wall_s", "step_s_median",
}  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A project folder of its own, with this checkout's code and the models it has converted already."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("prefect.yaml", "flows", "infra", "storage", "tba"):
        (folder / name).symlink_to(REPOSITORY / name)
    models = REPOSITORY / ".tba" / ".local" / "models"
    models.mkdir(parents=True, exist_ok=True)
    (folder / ".tba" / ".local").mkdir(parents=True)
    (folder / ".tba" / ".local" / "models").symlink_to(models)
    yield folder
    shutil.rmtree(folder / ".tba")


def tba(project: Path, *arguments: str) -> subprocess.Popen:
    """`tba ...` as the leader of a process group, as a shell's job is."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=project,
        env=environment | {"PYTHONPATH": str(project)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def train(project: Path, run: str, *arguments: str) -> subprocess.Popen:
    settings = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
    return tba(project, "train", run, *settings, *arguments)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return output


def sql(project: Path, run: str, statement: str) -> list[dict]:
    """As `tba sql`, of which each call starts a process."""
    return query(RunStore((project / ".tba").as_uri(), run), statement).to_pylist()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        if time.monotonic() > deadline or process.poll() is not None:
            process.kill()
            raise AssertionError(f"it did not come to that: {process.communicate()[0]}")
        time.sleep(0.1)


def trained(run_folder: Path, steps: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return json.loads((run_folder / "trainer" / "heartbeat.json").read_text())["step"] >= steps
    return False


def left_running(project: Path) -> list[str]:
    """Processes whose working folder is the project's."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if Path(process.cwd()) == project and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def shards(run_folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in run_folder.glob("trajectories/*/*.parquet")}


def test_a_run_killed_in_mid_training_resumes_and_ends_as_if_nothing_had_happened(project):
    run_folder = project / ".tba" / "killed"
    process = train(project, "killed", "--steps", str(STEPS))
    checkpoint = run_folder / "trainer" / "step=00000003-a0001" / "state.json"  # is written while training goes on
    wait_for(lambda: trained(run_folder, 5) and checkpoint.exists(), process)
    counts = "SELECT count(*) AS n, count(DISTINCT trajectory_id) AS ids FROM trajectories"
    (during,) = json.loads(finish(tba(project, "sql", "killed", counts, "--format", "json")))
    assert during["n"] == during["ids"] >= 32
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not wait_until_gone(project)
    stack = project / ".tba" / ".local" / "stack.json"
    assert json.loads(stack.read_text())["processes"]  # stale
    committed = shards(run_folder)

    # The resumed run samples by transformers' generate: vLLM, with which it began, takes half a minute to start.
    (project / "sitecustomize.py").write_text(WITHOUT_VLLM)
    process = train(project, "killed", "--steps", str(STEPS))
    wait_for((run_folder / "trainer" / "attempt=00000002.json").exists, process)
    assert states(project, json.loads(stack.read_text())["url"], "killed") == ["Crashed", "Running"]
    assert "Accuracy before" in finish(process)
    assert not left_running(project) and not stack.exists()

    after = shards(run_folder)
    assert {name: after.get(name) for name in committed} == committed
    attempts = sql(project, "killed", "SELECT attempt, resumed_from FROM attempts ORDER BY attempt")
    assert attempts[0]["resumed_from"] == 0
    assert attempts[1]["resumed_from"] in (3, 6)  # the last checkpoint before the kill
    # The Trainer is back before its Searchers, and waits for the first shard of theirs.
    (resumed,) = sql(
        project,
        "killed",
        "SELECT min(started_at) > (SELECT min(trajectories.created_at) FROM trajectories, attempts WHERE "
        "attempt = 2 AND trajectories.created_at > attempts.created_at) AS waited "
        "FROM training_steps WHERE attempt = 2",
    )
    assert resumed["waited"]
    counted = sql(project, "killed", "SELECT step, count(*) AS slots FROM batches GROUP BY step ORDER BY step")
    assert counted == [{"step": step, "slots": B * K} for step in range(1, STEPS + 1)]
    steps = sql(project, "killed", "SELECT step FROM training_steps ORDER BY step")
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    unknown = "SELECT * FROM batches WHERE trajectory_id NOT IN (SELECT trajectory_id FROM trajectories)"
    assert sql(project, "killed", unknown) == []

    # Plain DuckDB, by a glob, sees what `tba sql` sees; rounds have no gap.
    glob = str(run_folder / "trajectories" / "*" / "*.parquet")
    rows, ids, rounds, newest = duckdb.execute(
        f"SELECT count(*), count(DISTINCT trajectory_id), count(DISTINCT round), max(round) FROM '{glob}'"
    ).fetchone()
    assert rows == ids == len(after) * 32
    assert rounds == newest + 1 == len(after)


def test_the_summary_the_final_policy_and_a_second_start(project):
    run_folder = project / ".tba" / "killed"
    summary = json.loads((run_folder / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == STEPS and summary["trajectories"] == len(shards(run_folder)) * 32
    assert 0 <= summary["accuracy_before"] <= 1 and 0 <= summary["accuracy_after"] <= 1
    assert 0 <= summary["trainer_wait_share"] < 1 and 0 < summary["overlap_share"] <= 1

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tba.weights import fingerprint, read_weights

    latest = json.loads((run_folder / "policies" / "latest.json").read_text())
    folder = run_folder / latest["path"]
    assert latest["final"] and latest["step"] == STEPS
    assert fingerprint(read_weights(folder)) == latest["fingerprint"]
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("24 + 17 =", return_tensors="pt")
    assert policy.generate(**prompt, max_new_tokens=3).shape[1] > prompt["input_ids"].shape[1]

    before = {file: file.stat().st_mtime_ns for file in run_folder.rglob("*")}
    assert "is finished" in finish(train(project, "killed", "--steps", str(STEPS)))
    assert {file: file.stat().st_mtime_ns for file in run_folder.rglob("*")} == before


def test_every_served_policy_was_a_published_one(project):
    """Each trajectory's fingerprint, computed from what the engine took in, is that of one policy step and attempt."""
    found = published_policies(RunStore((project / ".tba").as_uri(), "killed")).values()
    rows = sql(project, "killed", "SELECT DISTINCT policy_step, policy_fingerprint FROM trajectories")
    served = {(row["policy_step"], row["policy_fingerprint"]) for row in rows}
    assert len({step for step, _ in served}) >= 2
    assert served <= {(manifest.step, manifest.fingerprint) for manifest in found}


def test_a_run_killed_after_its_final_policy_is_evaluated_and_not_trained_again(project):
    """By transformers' generate, too."""
    run_folder = project / ".tba" / "killed"
    (run_folder / "summary.json").unlink()
    (run_folder / "metrics" / "evaluations" / f"step={STEPS:08d}-a0002.parquet").unlink()
    before = {file: file.stat().st_mtime_ns for file in run_folder.rglob("*.parquet")}
    assert "Accuracy before" in finish(train(project, "killed", "--steps", str(STEPS)))
    summary = json.loads((run_folder / "summary.json").read_text())
    assert summary["attempts"] == 2 and summary["steps"] == STEPS and 0 <= summary["accuracy_after"] <= 1
    after = {file: file.stat().st_mtime_ns for file in run_folder.rglob("*.parquet")}
    assert {str(file.relative_to(run_folder)) for file in after.keys() - before.keys()} == {
        f"metrics/evaluations/step={STEPS:08d}-a0002.parquet"
    }
    assert {file: after[file] for file in before} == before
    assert not (run_folder / "trainer" / "attempt=00000003.json").exists()


def wait_until_gone(project: Path) -> list[str]:
    """SIGKILL takes a moment to take effect."""
    deadline = time.monotonic() + 10
    while (found := left_running(project)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found
