"""Claims about storage/rules.py. Run: pytest tests/storage/test_rules.py

- a valid shard passes
- each way to be wrong is refused, alone, in one row only, with a failure that names the rule and how many rows break it
- the gate and the Trainer's intake say the same, in the same words as Great Expectations, which the audit asks
"""

import math

import pyarrow as pa
import pytest

from storage.audit import expectations, told
from storage.rules import Limits, broken_in_each, facts_of, validate_shard
from storage.schema import TRAJECTORY, to_table
from tests.storage.helpers import make_shard

LIMITS = Limits(vocab_size=8, last_step=100)  # make_shard's largest token id is 4 + 3


def spoiled(**columns) -> pa.Table:
    """A valid shard of four rows, but for these values in the second one."""
    rows = make_shard().to_pylist(maps_as_pydicts="strict")
    rows[1] |= columns
    return to_table(rows, TRAJECTORY)


@pytest.fixture(scope="module")
def judge():
    """What Great Expectations says of a shard: judge(table)."""
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    context.enable_analytics(False)
    asset = context.data_sources.add_pandas("shards").add_dataframe_asset("facts")
    batch, suite = asset.add_batch_definition_whole_dataframe("whole"), gx.ExpectationSuite("rules", expectations())

    def judge(table: pa.Table) -> list[str]:
        report = batch.get_batch({"dataframe": facts_of(table, LIMITS).to_pandas()}).validate(suite)
        return sorted(told(result) for result in report.results if not result.success)

    return judge


def test_a_valid_shard_passes(judge):
    assert judge(make_shard()) == []
    assert validate_shard(make_shard(), LIMITS) == []
    assert validate_shard(make_shard(num_rows=1, rewards={}, response="", finish_reason="length"), LIMITS) == []


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ({"reward": math.nan}, "reward is finite"),
        ({"reward": -math.inf}, "reward is finite"),
        ({"rewards": {"exact": 1.0, "length": math.nan}}, "components of rewards are finite and have different names"),
        ({"behavior_logprobs": [-0.5, 0.125]}, "behavior_logprobs are finite and <= 0"),
        ({"behavior_logprobs": [math.nan, -0.5]}, "behavior_logprobs are finite and <= 0"),
        ({"behavior_logprobs": [-0.5, None]}, "behavior_logprobs are finite and <= 0"),
        ({"behavior_logprobs": [-0.5]}, "behavior_logprobs has one value for each response token"),
        ({"reference_logprobs": [-math.inf, -0.5]}, "reference_logprobs are finite and <= 0"),
        ({"reference_logprobs": [-0.5, -0.5, -0.5]}, "reference_logprobs has one value for each response token"),
        ({"prompt_tokens": [1, 8]}, "prompt_tokens are inside the vocabulary"),
        ({"prompt_tokens": []}, "prompt_tokens has at least one token"),
        ({"response_tokens": [-1, 2]}, "response_tokens are inside the vocabulary"),
        ({"response_tokens": [None, 2]}, "response_tokens are inside the vocabulary"),
        (
            {"response_tokens": [], "behavior_logprobs": [], "reference_logprobs": []},
            "response_tokens has at least one token",
        ),
        ({"policy_step": -5}, "policy_step is a step of the run"),
        ({"policy_step": 101}, "policy_step is a step of the run"),
        ({"policy_step": 2**62}, "policy_step is a step of the run"),
        ({"policy_fingerprint": ""}, "policy_fingerprint is not empty"),
        ({"last_policy_step": 101}, "last_policy_step is a step of the run"),
        ({"last_policy_fingerprint": ""}, "last_policy_fingerprint is not empty"),
        ({"temperature": math.nan}, "temperature is finite and > 0"),
        ({"temperature": math.inf}, "temperature is finite and > 0"),
        ({"temperature": 0.0}, "temperature is finite and > 0"),
        ({"top_p": math.nan}, "top_p is > 0 and <= 1"),
        ({"top_p": 0.0}, "top_p is > 0 and <= 1"),
        ({"top_p": 1.5}, "top_p is > 0 and <= 1"),
        ({"schema_version": 4}, "schema_version is one that this version reads"),
        ({"finish_reason": "abort"}, "finish_reason is stop or length"),
        ({"trajectory_id": "s0-00000000-00009"}, "trajectory_id is searcher-round-index"),
        *(
            ({name: None}, "no column is null")
            for name in TRAJECTORY.names
            if name not in ("response_tokens", "prompt_tokens", "behavior_logprobs", "reference_logprobs")
            and name not in ("trajectory_id", "searcher", "round")
        ),
    ],
    ids=str,
)
def test_each_way_to_be_wrong_is_refused(judge, columns, rule):
    (failure,) = validate_shard(spoiled(**columns), LIMITS)
    assert failure.startswith(f"{rule}: broken by 1 of 4")
    assert judge(spoiled(**columns)) == [failure]
    assert broken_in_each([make_shard(), spoiled(**columns)], LIMITS) == [[], [failure]]


@pytest.mark.parametrize("name", ["response_tokens", "behavior_logprobs", "trajectory_id", "searcher", "round"])
def test_a_null_that_breaks_other_rules_too_is_named(name):
    failures = validate_shard(spoiled(**{name: None}), LIMITS)
    assert any(failure.startswith("no column is null") and f"['{name}']" in failure for failure in failures)


def test_an_id_used_twice_is_refused(judge):
    twice = spoiled(trajectory_id="s0-00000000-00000")
    failures = sorted(validate_shard(twice, LIMITS))
    assert [failure.partition(":")[0] for failure in failures] == [
        "trajectory_id is searcher-round-index",
        "trajectory_id is unique",
    ]
    assert judge(twice) == failures


def test_a_shard_without_trajectories_is_refused(judge):
    assert judge(TRAJECTORY.empty_table())[0] == "a shard has trajectories: got 0"
    assert validate_shard(TRAJECTORY.empty_table(), LIMITS) == ["a shard has trajectories: got 0"]
    assert broken_in_each([TRAJECTORY.empty_table()], LIMITS) == [["a shard has trajectories: got 0"]]


def test_other_columns_are_refused():
    other = make_shard().drop_columns(["top_p"]).append_column("extra", [[1] * 4])
    (failure,) = validate_shard(other, LIMITS)
    assert "top_p: float" in failure and "extra: int64" in failure


def test_rows_are_judged_across_chunks():
    chunks = pa.concat_tables([make_shard().slice(0, 2), spoiled(reward=math.nan).slice(1, 3).slice(1)])
    assert validate_shard(chunks, LIMITS) == []
    bad = pa.concat_tables([spoiled(response_tokens=[9, 2]).slice(0, 2), make_shard().slice(2)])
    (failure,) = validate_shard(bad, LIMITS)
    assert failure.startswith("response_tokens are inside the vocabulary: broken by 1 of 4")
