"""Claims about a run's configuration, mostly URLs in it. Run: pytest tests/flows/test_config.py

- credentials in a store's or source's URL are refused, and neither repeated nor shown by pydantic
- Prefect refuses them by each flow's schema, before it stores the parameters, and does not repeat them
- every flow that takes a store checks it
- --set understands the text of every setting's value
"""

import pytest
from prefect.exceptions import ParameterTypeError
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

from flows.analyze import analyze
from flows.cli.settings import config_of
from flows.config import RunConfig
from flows.evaluate import evaluate_policy
from flows.maintain import maintain
from flows.search import search
from flows.train import tba

WITH_SECRET = ["s3://AKIA:sec-ret@bucket/p", "s3://AKIA:sec/ret@bucket", "file://me:sec-ret@host/x", "s3://sec-ret@b"]
FLOWS = {flow.name: flow for flow in (tba, search, evaluate_policy, maintain, analyze)}


def parameters(name: str, url: str) -> dict:
    if name == "tba":
        return {"config": {"store": url}}
    return {"store": url} | ({"runs": ["a"]} if name == "analyze" else {"run": "a"})


def hides(error: Exception) -> bool:
    return not any(part in str(error) for part in ("sec", "ret@", "AKIA"))


@pytest.mark.parametrize("url", WITH_SECRET)
def test_credentials_are_refused_and_not_repeated(url):
    for settings in ({"store": url}, {"warm_start": [url]}):
        with pytest.raises(ValueError, match="credentials") as failure:
            RunConfig(**settings)
        assert hides(failure.value)


@pytest.mark.parametrize("url", WITH_SECRET)
@pytest.mark.parametrize("name", FLOWS)
def test_prefect_refuses_them_before_it_stores_them(name, url):
    schema = parameter_schema(FLOWS[name]).model_dump_for_openapi()
    with pytest.raises(ValidationError, match="a URL without credentials") as failure:
        validate(parameters(name, url), schema, raise_on_error=True)
    assert hides(failure.value)
    validate(parameters(name, "s3://bucket/pre@fix"), schema, raise_on_error=True)
    validate(parameters(name, "file:///home/me@work:1"), schema, raise_on_error=True)


@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_that_is_called_refuses_them_too(name):
    with pytest.raises(ParameterTypeError, match="credentials") as failure:
        FLOWS[name].validate_parameters(parameters(name, WITH_SECRET[0]))
    assert hides(failure.value)


def test_a_source_is_a_url_as_a_store_is():
    for bad in ("s3://b//run", "file:///a/run?x", "old"):
        with pytest.raises(ValueError, match="warm_start: got"):
            RunConfig(warm_start=[bad])
    assert RunConfig(warm_start=["s3://b/run", "file:///a/rows.parquet"]).warm_start


def test_set_understands_the_value_of_every_setting(tmp_path):
    config = RunConfig(store=tmp_path.as_uri())
    values = config.model_dump(mode="json")
    groups = {name: group for name, group in values.items() if isinstance(group, dict)}
    grouped = {f"{name}.{setting}": value for name, group in groups.items() for setting, value in group.items()}
    single = {name: value for name, value in values.items() if name not in groups}
    texts = [f"{name}={value}" for name, value in (single | grouped).items() if isinstance(value, str | int | float)]
    assert len(texts) > 40 and "train.zero_stage=2" in texts
    assert config_of({}, texts) == config


@pytest.mark.parametrize(
    "setting",
    ["search.engine.tensor_parallel_size=2", 'search.engine={"tensor_parallel_size": 2}'],
)
def test_arguments_of_the_engine_may_be_words_or_json(tmp_path, setting):
    config = config_of({"store": tmp_path.as_uri()}, [setting, "search.engine.kv_cache_dtype=fp8"])
    assert config.search.engine == {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}
    assert config.search.num_devices == 2 and RunConfig().search.num_devices == 1


@pytest.mark.parametrize(
    "engine, message",
    [
        ({"trust_remote_code": True}, "trust_remote_code cannot be changed"),
        ({"max_num_seqs": 8}, "max_num_seqs is search.prompts_per_round x search.samples_per_prompt"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; give a whole number of at least 1"),
        ({"pipeline_parallel_size": "two"}, "pipeline_parallel_size is 'two'"),
        ({"tensor_paralel_size": 2}, "argument tensor_paralel_size may not be given; allowed: tensor_parallel_size"),
        ({"worker_cls": "runs.evil.x.Worker"}, "argument worker_cls may not be given; allowed:"),
        ({"reasoning_parser_plugin": "/shared/x.py"}, "argument reasoning_parser_plugin may not be given"),
        ({"hf_token": "secret"}, "argument hf_token may not be given"),
        ({"dtype": {"a": 1}}, "dtype is {'a': 1}; give a number or a word"),
    ],
)
def test_arguments_that_the_searcher_needs_as_they_are_are_refused(engine, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(search={"engine": engine})
