"""tba diversity: samples of a run, measured.

Claims
- a run small enough is measured whole: no error, and the values are those of all its responses
- of samples of it, the 95 % intervals contain those exact values about that often
- groups are spans of policies, Searchers and the run; each takes about its share of the sample
- copies of a warm start are a group of their own, unless the run has no other responses
- a measurement is stored and read back by `tba sql`, the newest where there are several
- success begins at the reward at which an evaluation of the run's task has it begin
- tables for people fit 80 columns, with every heading and value whole
- prompts with too few responses are refused with the reason

Run: pytest tests/flows/report/test_diversity.py
"""

import hashlib
import json
import re

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from flows.cli.app import app
from flows.report.diversity import _embedded, measure_diversity, tables
from storage.errors import StoreError
from storage.queries import query
from storage.shards import commit_shard
from storage.store import RunStore
from tba import diversity
from tests.benchmarks.generated_run import generate_run
from tests.storage.helpers import make_shard

METRICS = [
    "distinct-1", "distinct-2", "self-BLEU", "cosine distance", "distinct answers", "success clusters", "entropy",
]  # fmt: skip


@pytest.fixture(scope="module")
def run_store(tmp_path_factory) -> RunStore:
    """64 prompts with 16 responses each, all of one policy."""
    store = RunStore(tmp_path_factory.mktemp("store").as_uri(), "small")
    generate_run(store, 1024, rows_per_shard=1024, num_steps=1, num_response_tokens=8)
    return store


@pytest.fixture(scope="module", autouse=True)
def quick_encoder():
    """In place of the sentence encoder: a vector of unit length that the text decides."""

    def embed(texts):
        seeds = [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) for text in texts]
        vectors = np.stack([np.random.default_rng(seed).normal(1.0, 1.0, 8) for seed in seeds])
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diversity, "embed", embed)
        yield


def of_run(rows: list[dict]) -> dict[str, dict]:
    return {row["metric"]: row for row in rows if row["grouping"] == "run"}


@pytest.fixture(scope="module")
def exact(run_store) -> dict[str, dict]:
    return of_run(measure_diversity(run_store, sample=10**6, embedded=10**6, responses_per_prompt=16))


def test_a_small_run_is_measured_whole(run_store, exact):
    assert {row["standard_error"] for row in exact.values()} == {0}
    assert {row["num_measured_prompts"] for row in exact.values()} == {64}
    entropy = query(run_store, "SELECT avg(-list_sum(behavior_logprobs)) FROM trajectories").column(0)[0].as_py()
    assert exact["entropy"]["value"] == pytest.approx(entropy)
    texts = query(run_store, "SELECT response FROM trajectories ORDER BY prompt_id").column(0).to_pylist()
    groups = [[diversity.words(text) for text in texts[place : place + 16]] for place in range(0, 1024, 16)]
    assert exact["distinct-2"]["value"] == pytest.approx(np.mean([diversity.distinct_n(group, 2) for group in groups]))


def test_error_bars_of_samples_contain_the_exact_values(run_store, exact):
    contained = []
    for seed in range(6):  # three groups, 20 of 64 prompts each
        found = of_run(
            measure_diversity(run_store, sample=3 * 20 * 16, embedded=3 * 20 * 16, responses_per_prompt=16, seed=seed)
        )
        assert found.keys() == exact.keys()
        for metric, row in found.items():
            assert row["num_measured_prompts"] == 20
            contained.append(row["low"] <= exact[metric]["value"] <= row["high"])
    assert np.mean(contained) >= 0.9


def test_groups_share_the_sample(tmp_path):
    store = RunStore(tmp_path.as_uri(), "groups")
    generate_run(store, 2048, rows_per_shard=256, num_steps=40, num_response_tokens=4)
    rows = measure_diversity(store, sample=1600, embedded=0)
    groups = {(row["grouping"], row["searcher"], row["first_policy_step"]) for row in rows}
    assert {grouping for grouping, *_ in groups} == {"policy", "searcher", "run"}
    assert {searcher for grouping, searcher, _ in groups if grouping == "searcher"} == {"s0", "s1"}
    assert {row["num_measured_prompts"] for row in rows if row["metric"] == "entropy"} <= set(range(8, 20))
    assert "cosine distance" not in {row["metric"] for row in rows}
    entropy = [row["value"] for row in rows if row["metric"] == "entropy" and row["grouping"] == "policy"]
    assert entropy[0] > 1.5 * entropy[-1]  # as it was generated


def test_each_prompt_has_a_draw_embedded_before_any_has_two():
    group = [{"place": place} for place in (0, 0, 1, 1, 2, 2) for _ in range(3)]  # of each prompt two draws of three
    assert [_embedded(group, 3, number) for number in (2, 4, 9)] == [{0, 2}, {0, 1, 2, 4}, set(range(6))]


def test_copies_of_a_warm_start_are_not_the_runs_own_responses(tmp_path):
    rows = [{"num_rows": 16, "prompt_id": "p", "policy_step": 0, "policy_fingerprint": "f" * 32}] * 2
    store, only = (RunStore(tmp_path.as_uri(), run) for run in ("warm", "only"))
    for run_store in (store, only):
        run_store.create_run({"run": run_store.run})
    for name, columns in zip(("warm0", "s0"), rows, strict=True):
        commit_shard(store, make_shard(name, 0, **columns))
    measured = measure_diversity(store, sample=1000, embedded=0)
    groups = {(row["grouping"], row["searcher"]): row["num_trajectories"] for row in measured}
    assert all(row["standard_error"] is not None for row in measured), "two draws of 8 responses to the one prompt"
    assert {row["num_measured_prompts"] for row in measured} == {1}
    assert groups == {("policy", None): 16, ("run", None): 16, ("searcher", "warm0"): 16, ("searcher", "s0"): 16}
    commit_shard(only, make_shard("warm0", 0, **rows[0]))
    measured = measure_diversity(only, sample=1000, embedded=0)
    assert {row["num_trajectories"] for row in measured if row["grouping"] == "run"} == {16}


def test_the_command_stores_the_newest_measurement_and_compares_runs(run_store):
    other = RunStore(run_store.url, "other")
    generate_run(other, 256, rows_per_shard=256, num_steps=1, num_response_tokens=4)
    arguments = ["diversity", "small", "other", "--store", run_store.url, "--sample", "960", "--embedded", "96"]
    done = CliRunner().invoke(app, [*arguments, "small", "--json"])  # named twice, measured once
    assert done.exit_code == 0 and "WARNING" not in done.stderr, done.output
    assert json.loads(done.stdout).keys() == {"small", "other"}
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert all(text in done.stdout for text in ("between runs", "BLEU", "±"))
    stored = query(run_store, "SELECT count(DISTINCT measured_at), count(*) FROM diversity").to_pylist()[0]
    assert list(stored.values()) == [1, 3 * 7]  # three groups, seven measures
    assert len(run_store.list("diversity")) == 2


def test_a_run_that_may_only_be_read_is_measured(run_store, monkeypatch):
    def refuse(store, rows):
        raise StoreError("permission denied")

    monkeypatch.setattr("storage.measurements.record_diversity", refuse)
    arguments = ["diversity", "small", "--store", run_store.url, "--sample", "240", "--embedded", "0"]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "±" in done.stdout
    assert "WARNING: the values are not stored: permission denied" in done.stderr


@pytest.mark.parametrize(
    ("task", "rewards", "num_clusters"),
    [("redteam", [-0.6, -0.8], 1), ("reasoning_gym", [1.0, 0.9], 1), ("math", [0.5, 0.4], 1)],
)
def test_success_is_that_of_the_task(tmp_path, task, rewards, num_clusters):
    """Red-teaming's reward is a mean log-probability; Reasoning Gym has near misses."""
    store = RunStore(tmp_path.as_uri(), "small")
    store.create_run({"run": "small", "task": {"name": task}})
    for number, reward in enumerate(rewards):
        commit_shard(store, make_shard("s0", number, 1, prompt_id="p0", response=f"response {number}", reward=reward))
    found = of_run(measure_diversity(store, responses_per_prompt=2))
    assert found["success clusters"]["value"] == num_clusters


def test_too_few_responses_are_refused(run_store):
    with pytest.raises(ValueError, match="no prompt of run small has 17 responses"):
        measure_diversity(run_store, embedded=0, responses_per_prompt=17)


def test_tables_fit_80_columns():
    row = {"standard_error": 0.0123, "grouping": "policy", "searcher": None, "policy_step": None}
    rows = [
        row | {"first_policy_step": first, "last_policy_step": first + 11, "metric": metric, "value": 0.98765}
        for first in range(0, 120, 12)
        for metric in METRICS
    ]
    rows += [row | {"grouping": grouping, "searcher": "s0"} for grouping in ("searcher", "run") for row in rows[-7:]]
    console = Console(width=80)
    with console.capture() as capture:
        console.print(*tables({"arithmetic": rows}))
    printed = capture.get()
    assert "…" not in printed
    assert all(word in printed for metric in METRICS for word in re.split(" |(?<=-)", metric))
    assert printed.count("0.988") == 12 * 7 and printed.count("± 0.01") == 12 * 7
