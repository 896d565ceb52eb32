"""A run with samples of an enforced age, by the real parts and a model with random weights.

- Step t trains on new responses of the policy of step max(0, t - 1 - lag), and of no other.
- Each Searcher's round comes in at each step.
- With adapters the engine serves each policy's; the final policy, which is stored, has them merged.
- Its measures are of the final policy; red-teaming's are of attacks on the victim.

python -m pytest tests/flows/compare/test_lagged.py
"""

import string

import pytest

import tba.engines
from flows.compare.bench import run_arm
from flows.compare.lagged import run_with_lag
from flows.compare.study import Study
from flows.config import RunConfig
from storage.policies import latest_policy
from storage.queries import query
from storage.store import RunStore
from tba.transformers_engine import TransformersEngine
from tests.character_model import save_character_model
from tests.tba.engines import run_apart

pytestmark = pytest.mark.slow
COMMON = {
    "task": {"max_response_tokens": 4, "num_heldout": 8},
    "searchers": 2,
    "search": {"prompts_per_round": 4, "samples_per_prompt": 4},
    "sampling": {"prompts_per_batch": 4, "responses_per_prompt": 4, "recent_probability": 1.0},
}


@pytest.fixture
def model(tmp_path) -> str:
    shape = {"dtype": "bfloat16", "hidden_size": 64}  # whose adapters travel alone, with heads that vLLM takes
    return str(save_character_model(tmp_path / "model", string.printable, **shape))


def study(model: str, lag: int = 2, **common: dict) -> Study:
    arms = {"a": {}, "b": {"train": {"residual_weight": "plain"}}}
    about = {"title": "t", "published": "p", "expected": "e", "lags": [lag], "compared_with": "a"}
    return Study(**about, model=model, steps=5, common=COMMON | common, arms=arms)


@pytest.mark.parametrize(
    ("lag", "policy_steps"),
    [
        pytest.param(0, [0, 1, 2, 3, 4], id="as-synchronous"),
        (1, [0, 0, 1, 2, 3]),
        (2, [0, 0, 0, 1, 2]),
    ],
)
def test_samples_have_the_age(model, tmp_path, monkeypatch, lag, policy_steps):
    """policy_steps: of the policy whose responses each step trains on. transformers samples, which starts sooner."""
    monkeypatch.setattr(
        tba.engines, "make_engine", lambda folder, arguments, lora_rank, **limits: TransformersEngine(folder, **limits)
    )
    arm, _ = study(model, lag=lag).arms_at_each_lag()
    config = RunConfig.model_validate(arm.settings | {"store": (tmp_path / "store").as_uri(), "trackers": ()})
    lagged = run_with_lag(config, arm.lag)
    store = RunStore(config.store, config.run)
    drawn = query(store, "SELECT DISTINCT step, policy_step FROM batches ORDER BY ALL").to_pylist()
    assert [tuple(row.values()) for row in drawn] == [*enumerate(policy_steps, start=1)]
    assert lagged.staleness == sum(range(5)) / 5 - sum(policy_steps) / 5
    assert len(lagged.curve) == 2 * 5  # no round behind the final policy
    rounds = query(store, "SELECT count(DISTINCT round) FROM batches JOIN trajectories USING (trajectory_id)")
    assert rounds.column(0)[0].as_py() == 10
    rows = query(store, "SELECT count(*), count(DISTINCT round) FROM trajectories").to_pylist()
    assert [*rows[0].values()] == [10 * 4 * 4, 10]
    assert 1 <= lagged.after.num_distinct <= 8 and 0 <= lagged.after.cosine_distance <= 2


def check_adapters(model: str, store: str) -> None:
    arm, _ = study(model, lag=1, train={"lora_rank": 2, "warmup_steps": 0, "learning_rate": 1e-2}).arms_at_each_lag()
    config = RunConfig.model_validate(arm.settings | {"store": store, "trackers": ()})
    run_with_lag(config, arm.lag)
    store = RunStore(config.store, config.run)
    sampled = query(store, "SELECT policy_step, policy_fingerprint FROM trajectories GROUP BY ALL ORDER BY 1")
    assert sampled["policy_step"].to_pylist() == [0, 1, 2, 3]
    assert len(set(sampled["policy_fingerprint"].to_pylist())) == 4
    ref = latest_policy(store)
    names = {path.rpartition("/")[2] for path in store.list(ref.path)}
    assert ref.final and "model.safetensors" in names and "adapter_model.safetensors" not in names


def test_policies_by_adapters_are_sampled_from(model, tmp_path):
    pytest.importorskip("peft")
    run_apart(check_adapters, model, (tmp_path / "store").as_uri())


@pytest.mark.apart
def test_red_teaming_is_measured_by_attacks(model, tmp_path):
    task = {"task": {"name": "redteam", "victim": model, "max_response_tokens": 4}}
    attacks = study(model, **task)
    _, arm = attacks.arms_at_each_lag()
    outcome = run_arm(attacks.runs, arm, 1, RunStore((tmp_path / "store").as_uri(), "arm"))
    assert outcome.accuracy_after == 0 and outcome.num_distinct_right == 0  # no word of the list from random letters
    assert 8 < outcome.num_distinct <= 64 and len(outcome.curve) == 10
