"""The Trainer on two processes (tba/zero_trainer.py) is the Trainer on one.

- Prompts are dealt whole, the longest first, to whoever has the fewest tokens.
- ZeRO-1, 2 and 3 train the addition task with one device's losses and gradients, 20 steps: with prompts that are split,
  with steps that leave a process without work, one that both skip for a reward that is not a number, and the policy
  reset as the reference on the way. What they publish is the same to the bit.
- The adapters that they publish before the first step are those of one process.
- What they saved resumes on one process, and what one process saved on them, also where their number divides no
  matrix: the curve goes on.

python -m pytest tests/tba/test_zero_trainer.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tba.batch import Draw
from tba.logprobs import Group
from tba.precision import compute_dtype
from tba.zero_trainer import distribute
from tests.tba.addition import tiny_llama
from tests.tba.run_zero_trainer import HALF, run

SETTINGS = dict(learning_rate=1e-3, warmup_steps=2, micro_batch_tokens=56, reference_reset_interval=12)
ROUNDING = 1e-5 if compute_dtype() == torch.float32 else 5e-3  # of 24 bits, after twenty steps; of 8


def draw_of(num_tokens: int) -> Draw:
    return Draw(Group([1] * num_tokens, [[1], [2]]), [0, 1], [0.0, 1.0], [[0.0]] * 2, [[0.0]] * 2, [True] * 2)


@pytest.mark.parametrize(
    ("tokens", "by_process"),
    [
        ([5, 9, 3, 4], [[9, 3], [5, 4]]),
        ([8, 7, 6, 5], [[8, 5], [7, 6]]),
        ([4], [[4], []]),
    ],
)
def test_prompts_are_distributed_whole_and_balanced(tokens, by_process):
    found = distribute([draw_of(num) for num in tokens], len(by_process))
    assert [[draw.group.num_tokens for draw in own] for own in found] == by_process


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> dict:
    """One process, start to end, and its checkpoint after half the steps."""
    half = tmp_path_factory.mktemp("alone") / "half"
    return run(str(model), SETTINGS, save=str(half), load=[]) | {"half": half}


def on_several(model: Path, settings: dict, save: Path, load: list[Path], num_processes: int = 2) -> dict:
    told = {
        "model": str(model),
        "settings": settings | {"processes": num_processes},
        "save": str(save),
        "load": [*map(str, load)],
    }
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.tba.run_zero_trainer", json.dumps(told)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def assert_same_curve(steps: list[dict], expected: list[dict]) -> None:
    """To rounding: sums over prompts come in another order, and a prompt in other company."""
    assert len(steps) == len(expected)
    for step, other in zip(steps, expected, strict=True):
        assert step["skipped"] == other["skipped"]
        assert step["num_response_tokens"] == other["num_response_tokens"]
        assert step["loss"] == pytest.approx(other["loss"], rel=ROUNDING, nan_ok=True)
        assert step["reward_mean"] == pytest.approx(other["reward_mean"], rel=1e-6, nan_ok=True)
        if not step["skipped"]:
            assert step["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [2, pytest.param(3, marks=pytest.mark.apart)])
def test_two_processes_train_as_one_does_and_resume_each_others_checkpoints(model, alone, zero_stage, tmp_path):
    half = tmp_path / "half"
    together = on_several(model, SETTINGS | {"zero_stage": zero_stage}, save=half, load=[alone["half"]])
    (expected,) = alone["curves"]
    curve, resumed_on_two = together["curves"]
    assert [step["skipped"] for step in curve].count(True) == 1
    assert together["published"][:2] == alone["published"]
    assert len({*together["published"][2:]}) == 1 + (len(expected) - HALF) // 2  # after the checkpoint, every two steps
    assert_same_curve(curve, expected)
    assert_same_curve(resumed_on_two, expected[HALF:])
    _, resumed_alone = run(str(model), SETTINGS, save=str(tmp_path / "again"), load=[str(half)])["curves"]
    assert_same_curve(resumed_alone, expected[HALF:])


@pytest.mark.apart
def test_processes_resume_whose_number_divides_no_matrix(model, alone, tmp_path):
    """ZeRO-3 pads the last one's part."""
    together = on_several(model, SETTINGS | {"zero_stage": 3}, tmp_path / "half", [alone["half"]], num_processes=3)
    (expected,) = alone["curves"]
    curve, resumed = together["curves"]
    assert_same_curve(curve, expected)
    assert_same_curve(resumed, expected[HALF:])


@pytest.mark.apart
def test_two_processes_publish_the_adapters_of_one(model, tmp_path):
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(base)
    settings = SETTINGS | {"lora_rank": 2}
    alone = run(str(base), settings, save=str(tmp_path / "one"), load=[])
    together = on_several(base, settings | {"zero_stage": 3}, save=tmp_path / "two", load=[])
    assert together["published"] == alone["published"] and len(set(alone["published"])) == 2
