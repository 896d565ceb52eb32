"""prefect.yaml: every deployment's entrypoint is there, and every preset is a configuration that a run could have.

python -m pytest tests/flows/test_presets.py
"""

import importlib.util
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from flows.config import RunConfig
from flows.train import tba

REPOSITORY = Path(__file__).parents[2]
DEPLOYMENTS = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
PRESETS = {d["name"]: d["parameters"]["config"] for d in DEPLOYMENTS if "config" in d.get("parameters", {})}


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_the_entrypoint_is_there(deployment):
    module, function = deployment["entrypoint"].split(":")
    assert f"def {function}(" in Path(importlib.util.find_spec(module).origin).read_text()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_a_configuration(name, tmp_path):
    config = RunConfig.model_validate(PRESETS[name] | {"store": tmp_path.as_uri()})
    assert config.run == name
    assert tba.validate_parameters({"config": PRESETS[name]})["config"].run == name  # as Prefect does
    # what run.json keeps gives the same configuration again, but for the devices
    kept = RunConfig.model_validate(config.recorded() | {"store": config.store})
    assert kept.on_devices(config.devices) == config


def test_the_papers_settings_are_the_papers():
    gsm8k, tldr, math = (RunConfig.model_validate(PRESETS[name]) for name in ("gsm8k", "tldr", "math"))
    assert gsm8k.sampling.prompts_per_batch * gsm8k.sampling.responses_per_prompt == 140
    assert tldr.sampling.prompts_per_batch * tldr.sampling.responses_per_prompt * tldr.train.steps == 40_960
    assert math.sampling.prompts_per_batch * math.sampling.responses_per_prompt == 512


def test_a_misspelt_setting_of_a_preset_would_be_found():
    with pytest.raises(ValidationError, match="betta"):
        RunConfig.model_validate(PRESETS["gsm8k"] | {"train": {"betta": 1}})
