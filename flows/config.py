"""The configuration of a run: one pydantic model, by which Prefect validates parameters and builds its form."""

import json
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from storage.errors import DamagedRecord, StoreError
from storage.mop import SamplingSettings
from storage.store import RESTORE, RunStore, check_run_name
from storage.store_url import CREDENTIALS, default_store, one_spelling, parse_store_url
from tba.config import SearchSettings, Settings, TaskSettings, TrainSettings

# Prefect stores a flow run's parameters, and its answer quotes a bad value. By this schema it refuses a URL with
# credentials before it stores the parameters, and its answer quotes the text of `const`, not the URL.
_WITHOUT_CREDENTIALS = {
    "if": {"pattern": CREDENTIALS},
    "then": {"const": "a URL without credentials, which belong in AWS's environment variables or files"},
}
SourceUrl = Annotated[str, Field(json_schema_extra=_WITHOUT_CREDENTIALS)]
StoreUrl = Annotated[SourceUrl, AfterValidator(one_spelling)]


class RunConfig(Settings):
    """The configuration of a run. The same name with the same configuration resumes the run."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a URL may hold credentials

    run: str = Field("arithmetic", description="Name of the run, and of its folder in the store.")
    store: StoreUrl = Field(
        default_factory=default_store,
        validate_default=True,
        description="Root URL of the store: file:///folder or s3://bucket/prefix.",
    )
    model: str = Field(
        "smollm2-135m-instruct",
        description="Model to start from: embedded model's name, local folder or Hugging Face id.",
    )
    seed: int = Field(
        0,
        ge=0,
        description="Seed of the order of prompts, of sampling and of the draws; in arithmetic and reasoning_gym also "
        "of which problems are held out.",
    )
    searchers: int = Field(
        1, ge=0, description="Number of Searchers that the run's flow starts; more may join at any time."
    )
    warm_start: tuple[SourceUrl, ...] = Field(
        (),
        description="URLs of runs (<store>/<run>) and .parquet files that the buffer begins with; none: empty.",
    )
    reward_version: str | None = Field(
        None, description="Reward version of the warm start's trajectories (tba rescore); None: the rewards as sampled."
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        ("tensorboard",),
        description="Trackers of the metrics, besides the store: tensorboard, wandb, mlflow.",
    )
    synchronous: bool = Field(
        False,
        description="Whether one Searcher and the Trainer take turns, without replay; for comparisons.",
    )
    evaluate_share: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Largest share of one Searcher's time for evaluations; 0: only the first and final policy.",
    )
    task: TaskSettings = TaskSettings()
    search: SearchSettings = SearchSettings()
    sampling: SamplingSettings = SamplingSettings()
    train: TrainSettings = TrainSettings()

    @field_validator("run")
    @classmethod
    def _run_is_a_plain_name(cls, run: str) -> str:
        return check_run_name(run)

    @field_validator("trackers", mode="before")
    @classmethod
    def _trackers_as_one_word(cls, trackers):
        """Accepts text with commas: --set trackers=tensorboard,wandb; --set trackers= means none."""
        return [name for name in trackers.split(",") if name] if isinstance(trackers, str) else trackers

    @field_validator("warm_start")
    @classmethod
    def _warm_start_names_urls(cls, warm_start: tuple[str, ...]) -> tuple[str, ...]:
        for url in warm_start:
            parse_store_url(url, "warm_start")
        if len(set(warm_start)) < len(warm_start):
            raise ValueError(f"warm_start: {', '.join(warm_start)} names one source twice; name each once")
        return warm_start

    @model_validator(mode="after")
    def _reward_version_of_something(self):
        if self.reward_version is not None and not self.warm_start:
            raise ValueError(
                f"reward_version is {self.reward_version!r}, but warm_start is empty: reward_version chooses among the "
                "rewards of a source's trajectories (tba rescore). Name the source in warm_start."
            )
        if self.reward_version is not None and all(url.endswith(".parquet") for url in self.warm_start):
            raise ValueError(
                f"reward_version is {self.reward_version!r}, but warm_start names files only, which have no versions: "
                "their rewards are in the column reward, or are the task's. Leave reward_version out."
            )
        return self

    @model_validator(mode="after")
    def _enough_samples_for_a_draw(self):
        K, S = self.sampling.responses_per_prompt, self.search.samples_per_prompt
        if K > S:
            raise ValueError(
                f"sampling.responses_per_prompt (K) is {K}, but search.samples_per_prompt (S) is {S}: a round must "
                f"sample at least as many responses to a prompt as a draw takes. Set K <= {S}, or S >= {K}."
            )
        return self

    @model_validator(mode="after")
    def _turns_can_be_taken(self):
        """Synchronous: draws come from the newest policy's round alone. Needs one Searcher; sets `sampling.max_age`."""
        if not self.synchronous:
            return self
        if self.searchers != 1:
            raise ValueError(
                f"synchronous: searchers is {self.searchers}, but only one Searcher can take turns with the Trainer: "
                "with more, training would begin on one Searcher's round while the others sample. Set searchers=1"
            )
        newest_only, prompts = self.train.sync_interval - 1, self.search.prompts_per_round
        fresh = prompts * self.search.samples_per_prompt
        if self.sampling.max_age not in (None, newest_only) or self.sampling.samples_per_insert is not None:
            raise ValueError(
                f"synchronous: draws come from the newest policy's round only, so sampling.max_age is {newest_only}, "
                "and sampling.samples_per_insert is not used; leave both out"
            )
        if self.sampling.min_size > fresh or self.sampling.prompts_per_batch > prompts:
            raise ValueError(
                f"synchronous: a round brings {fresh} trajectories of {prompts} prompts, but sampling.min_size is "
                f"{self.sampling.min_size} and sampling.prompts_per_batch (B) is {self.sampling.prompts_per_batch}: "
                "training would never start. Lower these, or raise search.prompts_per_round"
            )
        object.__setattr__(self, "sampling", self.sampling.model_copy(update={"max_age": newest_only}))
        return self

    @model_validator(mode="after")
    def _objective_has_what_it_needs(self):
        train, search = self.train, self.search
        if train.objective == "tba_prime" and self.sampling.recent_probability != 1:
            raise ValueError(
                "train.objective: tba_prime draws from the newest sync alone; set sampling.recent_probability to 1"
            )
        explores = search.exploration_probability or search.top_p < 1 or search.temperature != train.temperature
        if train.objective in ("dr_grpo", "prox_rloo", "rloo") and explores:
            raise ValueError(
                f"train.objective {train.objective} needs sampling from the policy as it is trained: set "
                "search.temperature to train.temperature, search.top_p to 1 and search.exploration_probability to 0"
            )
        return self

    @model_validator(mode="after")
    def _can_be_recorded(self):
        try:
            json.dumps(self.recorded(), ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            raise ValueError(
                f"a setting cannot be written to run.json: {error}. Numbers must be finite, and text (also a file's "
                "name) UTF-8"
            ) from error
        return self

    @property
    def devices(self) -> dict:
        """The Trainer's devices and its use of their memory, by name: settings that a resume may change."""
        return {name: getattr(self.train, name) for name in DEVICES + MEMORY}

    def on_devices(self, devices: dict) -> "RunConfig":
        """The same configuration with these `devices`."""
        return self.model_copy(update={"train": self.train.model_copy(update=devices)})

    def recorded(self) -> dict:
        """The content of run.json: all settings except store and devices, which may differ when a run is resumed."""
        return self.model_dump(mode="json", exclude={"store": True, "train": set(DEVICES)})

    def read_recorded(self, run_json: bytes) -> dict:
        """As the function `read_recorded`, with this configuration's use of memory: a resume may change it."""
        return overlaid(read_recorded(run_json), {"train": {name: getattr(self.train, name) for name in MEMORY}})


# Settings of `train` that change no result. A resume may change them, for other devices or for lack of memory.
DEVICES = ("processes", "zero_stage", "machines")
MEMORY = ("micro_batch_tokens", "gradient_checkpointing")

# For a run.json of an older version. REPLACED: settings that no longer exist. UNRECORDED: values that match the
# behaviour before there was a setting, where they differ from its default; `_settings` adds residual_weight.
REPLACED = ("evaluate_interval", "store")
UNRECORDED = {"sampling": {"differing_rewards_first": False}, "train": {"adam_beta1": 0.9}}


def load_run(store) -> RunConfig:
    """The configuration that a run was created with.

    Raises: storage.errors.NotFound: there is no such run; storage.errors.DamagedRecord: run.json cannot be read.
    """
    try:
        return RunConfig(**_settings(store.get("run.json")), store=store.url)
    except ValueError as error:
        raise DamagedRecord(
            f"cannot read run.json (run {store.run} in {store.url}): it has no settings of a run ({error}). {RESTORE}"
        ) from error


def read_recorded(run_json: bytes) -> dict:
    """A run.json's content as `recorded` would write it now. Raises: ValueError."""
    return RunConfig(**_settings(run_json)).recorded()


def with_recorded(values: dict) -> dict:
    """A configuration's values as given, and all others as the run of that name and store recorded them.

    So the same command resumes a run after a default has changed. Without such a run, or where it cannot be read, the
    values as they are: the checks of the configuration and the store give the reason.
    """
    defaults = RunConfig.model_fields
    run = values.get("run", defaults["run"].default)
    store = values.get("store", defaults["store"].get_default(call_default_factory=True))
    if not isinstance(run, str) or not isinstance(store, str):
        return values
    try:
        recorded = read_recorded(RunStore(store, run).recorded_config())
    except (StoreError, ValueError):
        return values
    return overlaid(recorded, values)


def continued(config: RunConfig) -> RunConfig:
    """The configuration with the settings that were not given as the run of that name and store recorded them."""
    return RunConfig.model_validate(with_recorded(config.model_dump(exclude_unset=True)))


def overlaid(below: dict, above: dict) -> dict:
    """`below` with the values of `above`, group by group."""
    both = {
        name: overlaid(below[name], value) if isinstance(value, dict) and isinstance(below.get(name), dict) else value
        for name, value in above.items()
    }
    return below | both


def _settings(run_json: bytes) -> dict:
    """The settings in a run.json; settings that came later have the values that match it. Raises: ValueError."""
    recorded = from_json(run_json)
    if not isinstance(recorded, dict):
        raise ValueError(f"got {recorded!r:.80}, expected a JSON object")
    recorded = {name: value for name, value in recorded.items() if name not in REPLACED}
    for group, before in UNRECORDED.items():
        if isinstance(recorded.get(group), dict):
            recorded[group] = before | recorded[group]
    train = recorded.get("train")
    if isinstance(train, dict) and train.get("objective", "tb") in ("tb", "tba_prime"):
        train.setdefault("residual_weight", "plain")
    return recorded


def explanation(error: ValidationError, model: type[BaseModel]) -> str:
    """A line for each mistake that pydantic found in a model's settings."""
    return "\n".join(_explain(mistake, model) for mistake in error.errors())


def _explain(mistake: dict, model: type[BaseModel]) -> str:
    """One line for a pydantic error: setting, value and rule; for an unknown setting, the names of its group."""
    *path, name = [str(part) for part in mistake["loc"]] or ["configuration"]
    field = ".".join([*path, name])
    if mistake["type"] == "extra_forbidden":
        groups = {group: of.annotation for group, of in model.model_fields.items()}
        if homes := [f"{group}.{name}" for group, of in groups.items() if name in getattr(of, "model_fields", ())]:
            return f"{field}: there is no such setting; there is {' and '.join(homes)}"
        for part in path:
            model = model.model_fields[part].annotation
        return f"{field}: there is no such setting; settings of this group: {', '.join(model.model_fields)}"
    if mistake["type"] == "model_type":
        for part in [*path, name]:
            model = model.model_fields[part].annotation
        names = ", ".join(model.model_fields)
        return f"{field}: got {mistake['input']!r}; it is a group of settings: name one of {names}, as {field}.NAME"
    if mistake["type"] == "tuple_type":
        return f"{field}: got {mistake['input']!r}; give a list, such as [0.8,1]"
    message = mistake["msg"].removeprefix("Value error, ")
    return message if mistake["type"] == "value_error" else f"{field}: got {mistake['input']!r}; {message}"
