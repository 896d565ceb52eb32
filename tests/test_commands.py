"""Every command that README.md and docs/ print runs, page after page, in a fresh copy of the repository.

What a reader fills in is filled in (`FILL_IN`), and what is not run says why (`NOT_RUN`). The copy is small where the
project is large: the embedded model's folder holds a model of random weights whose tokens are characters, transformers'
generate samples, and runs end after a few steps; the first run trains on in the background while it is watched and
steered. The local S3 is a real one.

python -m pytest tests/test_commands.py -m apart
"""

import contextlib
import json
import os
import re
import shutil
import signal
import string
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.local_s3 import free_ports
from infra.processes import find_processes, stop_processes
from tests.character_model import save_character_model

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
PROGRAMS = r"(make|prefect|duckdb|eval|python|(\.venv/bin/)?(tba|tensorboard)) "
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}\n"

START_OF_TWO = (
    "prefect deployment run tba/train --param "
    """'config={"run": "mine", "store": "s3://bucket/prefix", "searchers": 1}'"""
)
START_OF_MACHINES = (
    "prefect deployment run tba/train --param "
    """'config={"run": "big", "store": "s3://bucket/prefix", "train": {"machines": 2, "processes": 8}}'"""
)
NOT_RUN = {
    "make test": "the tests themselves",
    "make image BASE=debian:bookworm-slim": "a registry; tests/infra/test_container.py builds on a base of its own",
    "make image-base image BASE=localhost/bookworm": "root, and 20 minutes; tests/infra/test_container.py",
    "make image-check": "the same",
    "make image IMAGE=$IMAGE": "a registry",
    "prefect server start --host 0.0.0.0": "several machines; tests/hosts/site.py starts it so",
    "prefect work-pool create tba --type process": "the same",
    "prefect --no-prompt deploy --all": "the same",
    START_OF_TWO: "the same",
    "tba watch mine --store s3://bucket/prefix": "the same",
    "tba searchers mine +1 --store s3://bucket/prefix": "the same",
    START_OF_MACHINES: "tests/hosts/test_trainer_machines.py",
    """prefect deployment run tba/train --param 'config={"run": "mine"}'""": "in a cluster",
    ".venv/bin/tba searchers mine +6": "a SLURM job; README.md's `tba searchers arithmetic +1` is run",
    "prefect deployment run tba/gsm8k --watch": "four GPUs, and a model to download; tests/flows/test_presets.py",
    "tba train two --set train.processes=2 --set train.zero_stage=2": "two processes of the embedded model: minutes",
    "tba train summaries --task tldr --data posts.jsonl --set task.reward_model=path/to/reward_model "
    "--set task.missing_eos_reward=-1": "a reward model to download; tests/tba/tasks/test_graders.py",
    "duckdb -ui -readonly arithmetic.duckdb": "DuckDB's own program; below, its Python package opens the same file",
    "tensorboard --logdir .tba": "TensorBoard's own; tests/flows/trainer/test_trackers.py reads its files",
}
FILL_IN = {
    "file:///...": "$PWD_URL/.tba",
    "s3://bucket/": "$S3_URL/",
    "path/to/model": ".tba/.local/models/smollm2-135m-instruct",
    # the run's final policy, which is stored whole; where it ends depends on when it is stopped
    "policies/step=00000120": "$(grep -o 'policies/step=[^\"]*' .tba/arithmetic/policies/latest.json)",
    "trackers=tensorboard,mlflow": "trackers=tensorboard",  # MLflow is a package to install
    "two_betas.toml": "two_betas.toml --seeds 1 --steps 3",
}
# Transformers' generate samples; what looks whether the engine is there shall find it.
NO_VLLM = "import sys\n\nif 'doctor' not in sys.orig_argv:\n    sys.modules['vllm'] = None\n"
STEERED, FEW_STEPS = "make train", "3"
# Settings' defaults in the copy. Runs end when they are told to; rounds and policies of milliseconds would be more than
# Prefect's server can note down.
SMALL = {"steps": 1_000_000, "num_heldout": 16, "prompts_per_round": 48, "sync_interval": 20}
RESUMED = "prefect deployment run tba/train --watch"  # the steered run
UNENDING = {"tba watch arithmetic"}  # is left by Ctrl-C
TIMEOUT_S = 300


def commands() -> list[str]:
    """Of code blocks, in order. Each once: pages repeat some."""
    found = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            if line.startswith("    ") and re.match(PROGRAMS, line.strip()):
                found.append(re.split(r"\s+#", line.strip())[0])
    return list(dict.fromkeys(found))


class Project:
    """A copy of what git tracks, with this environment, and a shell in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for name in listed:
            if os.path.lexists(REPOSITORY / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                # with its age: make compares it with the environment's; prefect.toml stays a link
                shutil.copy2(REPOSITORY / name, folder / name, follow_symlinks=False)
        (folder / ".venv").symlink_to(REPOSITORY / ".venv")
        (folder / "sitecustomize.py").write_text(NO_VLLM)
        settings = folder / "tba" / "config.py"
        for name, value in SMALL.items():
            small, times = re.subn(rf"(    {name}: int = Field\(\s*)\d+,", rf"\g<1>{value},", settings.read_text())
            assert times == 1, name
            settings.write_text(small)
        save_character_model(
            folder / ".tba" / ".local" / "models" / "smollm2-135m-instruct", string.printable, chat_template=TEMPLATE
        )
        for name, code in re.findall(r"`(\w+)\.py`[^`]*\n\n```python\n(.+?)```", read("README.md"), re.DOTALL):
            (folder / f"{name}.py").write_text(code)
        (brief,) = re.findall(r"```python\n(def brief.+?)```", read("docs/extending.md"), re.DOTALL)
        (folder / "my_rewards.py").write_text(brief)
        (study,) = re.findall(r"```toml\n(.+?)```", read("docs/extending.md"), re.DOTALL)
        (folder / "two_betas.toml").write_text(study)
        problems = (REPOSITORY / "tests" / "smoke" / "gsm8k.jsonl").read_text()  # a batch draws more distinct prompts
        again = problems.replace('"question": "', '"question": "Once more: ')
        (folder / "train.jsonl").write_text(problems + again)
        told = {"prompt": ["1 + 1 =", "2 + 2 ="], "response": [" 2\n", " 4\n"], "reward": [1.0, 1.0]}
        pq.write_table(pa.table(told), folder / "told.parquet")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
            "PATH": f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(folder),
            "PREFECT_API_URL": f"http://127.0.0.1:{free_ports(1)[0]}/api",
            "PWD_URL": folder.as_uri(),
        }

    def start(self, command: str) -> subprocess.Popen:
        for printed, meant in FILL_IN.items():
            command = command.replace(printed, meant)
        return subprocess.Popen(
            ["env", "--default-signal=INT", "bash", "-c", command],  # tests may run where a shell has it ignored
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str) -> str:
        """Its output. AssertionError: it failed."""
        started, process = time.monotonic(), self.start(command)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        print(f"{time.monotonic() - started:4.0f} s  {command}", flush=True)
        assert process.returncode == 0, f"{command}\n{output}"
        return output

    def interrupt(self, command: str, after_s: float) -> str:
        process = self.start(command)
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130, f"{command}\n{output}"
        return output


def read(page: str) -> str:
    return (REPOSITORY / page).read_text()


@pytest.fixture
def project(tmp_path, local_s3):
    made = Project(tmp_path)
    made.environment |= local_s3[1]
    try:
        yield made
    finally:
        stop_processes(find_processes("TBA_STACK", str(tmp_path)))


@pytest.mark.apart
@pytest.mark.s3
def test_every_printed_command_runs(project):
    training = project.start(STEERED)
    try:
        for command in commands():
            if command in NOT_RUN:
                continue
            if command == STEERED:
                wait_for_step(project, 50)
            elif command == RESUMED:
                training = project.start(command)
                wait_for_step(project, step_of(project) + 50)
                project.run("tba stop arithmetic")
                output, _ = training.communicate(timeout=TIMEOUT_S)
                assert training.returncode == 0, output
            elif command in UNENDING:
                assert "step" in project.interrupt(command, after_s=10)
            elif command.startswith("eval"):  # the stack has another S3's credentials
                project.run("tba down")
                project.run(f"{command} --steps {FEW_STEPS}")
                project.run("tba up")  # not in that shell: it has the other S3's address
            elif re.match(r"(\S*/)?tba train\b", command):
                project.run(f"{command} --steps {FEW_STEPS}")
            elif command.startswith("prefect deployment run"):
                project.run(command if "--watch" in command else f"{command} --watch")
            else:
                assert project.run(command).strip()
            if command == "tba stop arithmetic":
                output, _ = training.communicate(timeout=TIMEOUT_S)
                assert training.returncode == 0 and "Stopped at step" in output, output
                project.run("tba up")  # what follows finds a stack, and need not start one each
        project.run("tba down")
    finally:
        if training.poll() is None:  # a command failed before the one that stops it
            os.killpg(training.pid, signal.SIGKILL)
        project.run("python infra/local_s3.py stop")


def test_what_is_not_run_or_filled_in_is_printed():
    printed = commands()
    assert set(NOT_RUN) <= set(printed)
    assert all(any(what in command for command in printed) for what in FILL_IN)


def step_of(project: Project) -> int:
    """Of the steered run."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((project.folder / ".tba/arithmetic/trainer/heartbeat.json").read_text())["step"]
    return 0


def wait_for_step(project: Project, step: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while step_of(project) < step:
        assert time.monotonic() < deadline, f"{STEERED}: not at step {step} after {TIMEOUT_S} s"
        time.sleep(0.5)
