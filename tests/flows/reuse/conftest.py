"""The model of these runs, and a module of rewards."""

import sys
from pathlib import Path

import pytest

from tests.character_model import save_character_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_character_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Rewards of one's own, in a module beside where one works."""
    (tmp_path / "own_rewards.py").write_text(
        "def brief(prompts, completions, prompt_id, answer, **columns):\n"
        "    assert len(prompts) == len(completions) == len(prompt_id) == len(answer)\n"
        "    return [float(answer[i] or 0) - len(text) for i, text in enumerate(completions)]\n"
        "def nan(prompts, completions, **columns):\n    return [float('nan')] * len(prompts)\n"
        "def few(prompts, completions, **columns):\n    return [1.0]\n"
        "def broken(prompts, completions, **columns):\n    return prompts['a']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_rewards", None)
    return "own_rewards"
