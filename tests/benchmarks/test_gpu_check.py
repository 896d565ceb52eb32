"""The parts of `make gpu-check` run, with small shapes, also without a GPU; what they measure here says nothing.

- Each part ends with its figures.
- A part that fails is named, and so is why; the exit status is 1.

python -m pytest tests/benchmarks/test_gpu_check.py
"""

import json
import subprocess
import sys

import pytest

from tests.benchmarks import gpu_check

COMMAND = [sys.executable, "-m", "tests.benchmarks.gpu_check", "--small"]


@pytest.mark.slow
def test_each_part_ends_with_its_figures():
    done = subprocess.run([*COMMAND, "generation_64", "step", "swap"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(done.stdout.splitlines()[-1])["parts"]
    assert parts["generation_64"]["tokens_per_s"] > 0 and parts["generation_64"]["swap_pause_s"] > 0
    assert parts["step"]["ours"]["step_s"] > 0 and 0 < parts["step"]["mfu"] < 1
    assert parts["swap"]["num_files"] > 1 and 0 < parts["swap"]["delta_share"] < 0.1 and parts["swap"]["load_s"] > 0


def test_a_warning_behind_the_figures_is_no_figure(tmp_path):
    module = "import json, sys; print(json.dumps({'a': 1})); print('[W Warning: not destroyed', file=sys.stderr)"
    (tmp_path / "warns.py").write_text(module)
    (tmp_path / "says_nothing.py").write_text("print('no figures')")
    environment = {"PYTHONPATH": str(tmp_path)}
    assert gpu_check.run_module("warns", environment=environment) == {"a": 1}
    with pytest.raises(RuntimeError, match="says_nothing  printed no result:\nno figures"):
        gpu_check.run_module("says_nothing", environment=environment)


def test_a_part_that_fails_is_named(monkeypatch, capsys):
    def run_module(*arguments, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_check, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "step", "swap"])
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    assert end.value.code == 1
    parts = json.loads(capsys.readouterr().out.splitlines()[-1])["parts"]
    assert parts == {"step": {"failed": "out of memory"}, "swap": {"failed": "out of memory"}}
