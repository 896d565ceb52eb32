"""`--set KEY.PATH=VALUE` and the options of `tba train` as one configuration."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.common import fail

if TYPE_CHECKING:
    from flows.config import RunConfig

# Settings that may name a local file or folder.
MAY_BE_LOCAL = ("model", "task.data", "task.reward_model", "task.gold_reward_model", "task.victim", "task.classifier")


def config_of(given: dict[str, object], settings: list[str], *, is_new: bool = False) -> "RunConfig":
    """The run's configuration: settings as given, the others as a stored run recorded them, else their defaults.

    is_new: no stored run is looked for.

    Exits with status 2, and a line for each mistake, if it is not valid.
    """
    from pydantic import ValidationError

    from flows.config import RunConfig, explanation, overlaid, with_recorded

    values: dict = {}
    pairs = list(given.items())  # in the order in which they count
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            fail(f"--set {setting}: has no '='; write --set key.path=value, such as --set train.beta=0.1", status=2)
        try:
            read = json.loads(value) if value == "null" or value[:1] in ("[", "{") else value
        except (ValueError, RecursionError) as error:
            fail(
                f"--set {setting:.200}: is not JSON; write a list as --set search.exploration_top_p=[0.8,1], an object "
                f'as --set \'search.engine={{"dtype": "float16"}}\' ({error})',
                status=2,
            )
        if key.startswith("search.engine."):  # vLLM's own arguments, whose types pydantic does not know
            with contextlib.suppress(ValueError, RecursionError):  # a word
                read = json.loads(value)
        pairs.append((key, read))
    for key, value in pairs:
        *path, name = key.split(".")
        node = values
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                fail(f"--set {key}: {part} is a setting, not a group of settings", status=2)
        is_group = isinstance(value, dict) and isinstance(node.get(name), dict)
        node[name] = overlaid(node[name], value) if is_group else value
    _make_absolute(values)
    if "run" not in values and isinstance(values.get("task"), dict) and "name" in values["task"]:
        values["run"] = values["task"]["name"]
    try:
        return RunConfig.model_validate(values if is_new else with_recorded(values))
    except ValidationError as error:
        fail(explanation(error, RunConfig), status=2)


def _make_absolute(values: dict) -> None:
    """Local paths become absolute, because a worker's processes run in another folder. Other names stay as they are."""
    for setting in MAY_BE_LOCAL:
        *path, name = setting.split(".")
        node = values
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(name), str) and Path(node[name]).exists():
            node[name] = str(Path(node[name]).absolute())
