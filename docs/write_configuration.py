"""Writes docs/configuration.md from the models, by `make docs`; a test compares the two."""

import types
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flows.config import RunConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration

<!-- written by `make docs` from the models in flows/config.py, tba/config.py and storage/mop.py -->

Every setting of a run. The common settings have an option on the command line (`tba train --help`). Every setting can
be given as `--set name=value`, with a dot for groups:

    tba train sharper --set train.beta=0.1 --set sampling.reward_temperature=0.5 --set task.data=null

`null` means none. A list may be JSON (`search.exploration_top_p=[0.8,1]`). Prefect's form and `run.json` nest the same
names. An unknown name or a value out of range is refused before anything is started; the message has the setting, the
value and the rule. A run keeps its settings: the same name with other settings is refused, and the message lists the
differences. Three settings are not kept, because they depend on the machine: `train.processes`, `train.machines` and
`train.zero_stage`. Give them at each resume; otherwise they have their defaults. `train.micro_batch_tokens` and
`train.gradient_checkpointing` may be given at a resume, too, and hold for that resume; otherwise they are the run's.

| Environment variable | Meaning |
|---|---|
| `TBA_STORE` | the store, a folder or a URL, if neither `--store` nor `store` is given |
| `TBA_STORE_PATIENCE_MINUTES` | time to wait for a store that is away or full, in minutes; default: 2 |
| `PREFECT_API_URL`, `PREFECT_API_AUTH_STRING` | URL and authentication string of your own Prefect server |
| `TBA_NO_WORKER` | set: `tba up` and `tba train` start no worker ([operating.md](operating.md)) |
| `VLLM_CPU_KVCACHE_SPACE` | the engine's cache of keys and values on a CPU, in GiB; default: 1 |
| `TMPDIR` | folder on a disk: policies, and checkpoints unless `/dev/shm` has room; the buffer's tokens |
| `AWS_…` | address and credentials of an S3 store ([operating.md](operating.md)) |

A flow has the environment of its worker, so a deployment without a `store` uses the worker's `TBA_STORE`. A variable
that is set while a stack runs reaches its flows after `tba down`.

Rules between settings; `tba train` refuses a run that breaks one, and names it:

| Setting | Rule |
|---|---|
| `sampling.responses_per_prompt` (K) | at most `search.samples_per_prompt` (S) and `sampling.capacity_per_prompt` |
| `sampling.prompts_per_batch` (B) | at most the number of training prompts |
| `train.objective` `tba_prime` | needs `train.reference_reset_interval`, and `sampling.recent_probability` 1 |
| `train.objective` `dr_grpo`, `rloo`, `prox_rloo` | `search.temperature` is `train.temperature`, `search.top_p` is 1 |
| the same | `search.exploration_probability` is 0 |
| the same, and `online_dpo` | `train.processes` and `train.machines` are 1 |
| `train.learning_rate_schedule` `warmup-stable-decay` | needs `train.decay_steps`, which no other one has |
| `train.beta` 0 | only with `rloo`, `prox_rloo`, `dr_grpo` |
| `train.beta_steps` | needs `train.beta_final` |
| `train.reference_reset_interval`, `train.residual_weight` `plain` | only with `tb` and `tba_prime` |
| `train.reward_tempering`, `train.fluency_temperature` other than 1 | only with `tb` and `tba_prime` |
| `train.gradient_checkpointing` `cheap` | not with several processes and `train.zero_stage` 3 |
| `sampling.max_age` | at least `train.sync_interval` - 1, or `train.steps` - 1 |
| `synchronous` | `searchers` 1, and no `sampling.max_age` or `sampling.samples_per_insert` |
| the same | one round fills `sampling.min_size` and `sampling.prompts_per_batch` |
| `sampling.uniform_fraction` | needs `sampling.reward_temperature` |
| `train.reward_tempering_steps`, `train.fluency_steps` | need `train.reward_tempering`, `train.fluency_temperature` |
| `search.system_prompts` | needs `search.exploration_probability` |
| `reward_version` | needs a run in `warm_start`: files have no versions |
| `task.name` `dataset` | needs `task.rewards` |
| `task.reward_weights` | one for each of `task.rewards` |
| `task.data`, `generator`, `reward_model`, `gold_reward_model`, `victim`, `classifier` | a task that uses them |
"""
OF_THIS_PLACE = {"store": "`.tba/` here"}  # defaults that depend on the working folder
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def configuration() -> str:
    """The page's text."""
    return "\n".join([HEAD, *_tables("", RunConfig)])


def _tables(group: str, model: type[BaseModel]) -> Iterator[str]:
    """The settings of a model, then those of its groups."""
    fields = model.model_fields
    groups = {name: field.annotation for name, field in fields.items() if _is_group(field.annotation)}
    yield f"## {f'`{group}`' if group else 'The run'}\n"
    yield f"{model.__doc__.strip().splitlines()[0]}\n"
    yield "| Setting | Type | Default | Meaning |\n|---|---|---|---|"
    for name, field in fields.items():
        if name not in groups:
            default = OF_THIS_PLACE.get(name) or _value(field.default)
            path = f"{group}.{name}" if group else name
            meaning = (field.description or "").replace("|", r"\|").replace("<", "&lt;")
            yield f"| `{path}` | {_type(field)} | {default} | {meaning} |"
    yield ""
    for name, inner in groups.items():
        yield from _tables(f"{group}.{name}" if group else name, inner)


def _is_group(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _type(field: FieldInfo) -> str:
    """Such as `int ≥ 1, or none`."""
    bounds = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in SIGNS.items()
        if getattr(rule, name, None) is not None
    ]
    kinds = [_kind(kind) for kind in _alternatives(field.annotation)]
    plain = [" ".join([kind, *bounds]) for kind in kinds if kind != "none"]
    return ", or ".join([*plain, *(["none"] if "none" in kinds else [])])


def _alternatives(annotation: object) -> tuple:
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if is_union else (annotation,)


def _kind(annotation: object) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "none"
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "JSON object"
    return {"str": "text", "bool": "true or false"}.get(annotation.__name__, annotation.__name__)


def _value(value: object) -> str:
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, tuple):
        return ", ".join(f"`{part}`" for part in value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    PAGE.write_text(configuration())
