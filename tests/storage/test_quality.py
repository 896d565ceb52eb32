"""Claims about storage/quality.py. Run: pytest tests/storage/test_quality.py

- a valid shard passes
- each way to be wrong is refused, alone, in one row only, with a failure that names the rule and how many rows break it
- it writes nothing, sends nothing and prints nothing
"""

import math

import pyarrow as pa
import pytest

from storage.quality import validate_shard
from storage.schema import TRAJECTORY, to_table
from tests.storage.helpers import make_shard

VOCABULARY = 8  # make_shard's largest token id is 4 + 3


def spoiled(**columns) -> pa.Table:
    """A valid shard of four rows, but for these values in the second one."""
    rows = make_shard().to_pylist(maps_as_pydicts="strict")
    rows[1] |= columns
    return to_table(rows, TRAJECTORY)


def test_a_valid_shard_passes():
    assert validate_shard(make_shard(), VOCABULARY) == []
    assert validate_shard(make_shard(num_rows=1, rewards={}, response="", finish_reason="length"), VOCABULARY) == []


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ({"reward": math.nan}, "reward is finite"),
        ({"reward": -math.inf}, "reward is finite"),
        ({"rewards": {"exact": 1.0, "length": math.nan}}, "components of rewards are finite"),
        ({"behavior_logprobs": [-0.5, 0.125]}, "behavior_logprobs are finite and <= 0"),
        ({"behavior_logprobs": [math.nan, -0.5]}, "behavior_logprobs are finite and <= 0"),
        ({"behavior_logprobs": [-0.5, None]}, "behavior_logprobs are finite and <= 0"),
        ({"behavior_logprobs": [-0.5]}, "behavior_logprobs has one a response token"),
        ({"reference_logprobs": [-math.inf, -0.5]}, "reference_logprobs are finite and <= 0"),
        ({"reference_logprobs": [-0.5, -0.5, -0.5]}, "reference_logprobs has one a response token"),
        ({"prompt_tokens": [1, 8]}, "prompt_tokens are inside the vocabulary"),
        ({"prompt_tokens": []}, "prompt_tokens has at least one token"),
        ({"response_tokens": [-1, 2]}, "response_tokens are inside the vocabulary"),
        ({"response_tokens": [None, 2]}, "response_tokens are inside the vocabulary"),
        (
            {"response_tokens": [], "behavior_logprobs": [], "reference_logprobs": []},
            "response_tokens has at least one token",
        ),
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
def test_each_way_to_be_wrong_is_refused(columns, rule):
    (failure,) = validate_shard(spoiled(**columns), VOCABULARY)
    assert failure.startswith(f"{rule}: broken by 1 of 4")


@pytest.mark.parametrize("name", ["response_tokens", "behavior_logprobs", "trajectory_id", "searcher", "round"])
def test_a_null_that_breaks_other_rules_too_is_named(name):
    failures = validate_shard(spoiled(**{name: None}), VOCABULARY)
    assert any(failure.startswith("no column is null") and f"['{name}']" in failure for failure in failures)


def test_an_id_used_twice_is_refused():
    failures = validate_shard(spoiled(trajectory_id="s0-00000000-00000"), VOCABULARY)
    assert [failure.partition(":")[0] for failure in failures] == [
        "trajectory_id is searcher-round-index",
        "trajectory_id is unique",
    ]


def test_a_shard_without_trajectories_is_refused():
    assert validate_shard(TRAJECTORY.empty_table(), VOCABULARY) == ["a shard has trajectories: got 0"]


def test_other_columns_are_refused():
    other = make_shard().drop_columns(["top_p"]).append_column("extra", [[1] * 4])
    (failure,) = validate_shard(other, VOCABULARY)
    assert "top_p: float" in failure and "extra: int64" in failure


def test_rows_are_judged_across_chunks():
    chunks = pa.concat_tables([make_shard().slice(0, 2), spoiled(reward=math.nan).slice(1, 3).slice(1)])
    assert validate_shard(chunks, VOCABULARY) == []
    bad = pa.concat_tables([spoiled(response_tokens=[9, 2]).slice(0, 2), make_shard().slice(2)])
    (failure,) = validate_shard(bad, VOCABULARY)
    assert failure.startswith("response_tokens are inside the vocabulary: broken by 1 of 4")


def test_it_writes_and_prints_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert validate_shard(spoiled(reward=math.nan), VOCABULARY) != []
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")
