"""The configuration of a run: one pydantic model, from which Prefect validates parameters and builds its form."""

import json

from pydantic import Field, field_validator, model_validator

from flows.machine import default_store
from storage.buffer import Sampling
from storage.store import check_run_name
from tba.config import SearchSettings, Settings, TaskSettings, TrainSettings


class RunConfig(Settings):
    """Everything that decides what a run does. The same name with the same configuration resumes the run."""

    run: str = Field("arithmetic", description="Name of the run: its folder in the store.")
    store: str = Field(default_factory=default_store, description="Root URL: file:///folder or s3://bucket/prefix.")
    model: str = Field("smollm2-135m-instruct", description="The embedded model, a local folder or a Hugging Face id.")
    seed: int = Field(0, ge=0, description="Of prompts' order, sampling and every draw.")
    searchers: int = Field(1, ge=0, description="Searchers that the flow starts; more may join at any time.")
    warm_start: tuple[str, ...] = Field(
        (),
        description="URLs of runs (<store>/<run>) and .parquet files of demonstrations to begin with.",
    )
    reward_version: str | None = Field(
        None, description="Reward version that the warm-starting runs' trajectories count with; None: as sampled."
    )
    task: TaskSettings = TaskSettings()
    search: SearchSettings = SearchSettings()
    sampling: Sampling = Sampling()
    train: TrainSettings = TrainSettings()

    @field_validator("run")
    @classmethod
    def _run_is_a_plain_name(cls, run: str) -> str:
        return check_run_name(run)

    @field_validator("warm_start")
    @classmethod
    def _warm_start_names_urls(cls, warm_start: tuple[str, ...]) -> tuple[str, ...]:
        for url in warm_start:
            if not url.startswith(("file:///", "s3://")):
                raise ValueError(
                    f"warm_start: got {url!r}; write file:///folder/run, s3://... or either's .parquet file"
                )
        if len(set(warm_start)) < len(warm_start):
            raise ValueError(f"warm_start: {', '.join(warm_start)} names one source twice; name each once")
        return warm_start

    @model_validator(mode="after")
    def _reward_version_of_something(self):
        if self.reward_version is not None and not self.warm_start:
            raise ValueError(
                f"reward_version is {self.reward_version!r}, but there is no warm_start: it chooses the reward of "
                "trajectories that were scored again (tba rescore). Name the run that has them in warm_start."
            )
        return self

    @model_validator(mode="after")
    def _enough_samples_for_a_draw(self):
        K, S = self.sampling.responses_per_prompt, self.search.samples_per_prompt
        if K > S:
            raise ValueError(
                f"sampling.responses_per_prompt (K) is {K}, but search.samples_per_prompt (S) is {S}: a round must "
                f"bring at least the responses that a draw takes. Set K <= {S}, or S >= {K}."
            )
        return self

    def recorded(self) -> dict:
        """What run.json keeps: all but where the store is and on what it trains, so that a run may be moved."""
        return self.model_dump(mode="json", exclude={"store": True, "train": {"processes", "zero_stage"}})


def load_run(store) -> RunConfig:
    """The configuration that a run was created with. Raises: storage.errors.NotFound: there is no such run."""
    return RunConfig(**json.loads(store.get("run.json")), store=store.url)
