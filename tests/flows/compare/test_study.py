"""Studies: the files of the project, what is refused, and the replay that an arm may train on.

- Every file is read, has at most forty lines, and is named in the command's help.
- A setting that the testbed would ignore is refused, as are an unknown section and a comparison with no arm.
- An arm's settings lie over the common ones, and each arm is validated with both.
- Without replay an arm trains on what was sampled for its step; with m = 1, no more sampled than drawn, replay is that.
- Replay draws the newest rounds with probability m; else anything stored, within the capacity, the newest kept.
- Replay by distance draws responses that differ more from the prompt's others, and no others than even replay.

python -m pytest tests/flows/compare/test_study.py
"""

from importlib.resources import files
from pathlib import Path

import pytest
import torch

from flows.cli.compare import compare
from flows.compare import study_page
from flows.compare.on_testbed import Configuration, experience
from flows.compare.study import Study, read_study, study_names
from tba import testbed, testbed_task

RUN = {"train": {"steps": 4}, "search": {"prompts_per_round": 4, "samples_per_prompt": 3}}
ONE_ARM = {"title": "t", "published": "p", "expected": "e", "lags": [1], "compared_with": "a"}


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    return testbed.Policy()


@pytest.mark.parametrize("name", study_names())
def test_a_study_is_a_short_file_and_in_the_help(name):
    study = read_study(name)
    assert study.seeds >= (10 if study.model is None else 3)
    assert len(study.arms_at_each_lag()) == sum(len(study.lags_of(label)) for label in study.arms)
    assert len((files("flows.compare") / "studies" / f"{name}.toml").read_text().splitlines()) <= 40
    assert f" {name}," in " ".join(compare.__doc__.split()).replace(".", ",")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {"a": {}, "b": {"train": {"lora_rank": 8}}}}, "arm b: train.lora_rank is no setting of the testbed"),
        ({"arms": {"a": {}, "b": {"sampling": {"max_age": 8}}}}, "arm b: sampling.max_age is no setting"),
        ({"arms": {"a": {}, "b": {"trian": {}}}}, "arm b: .*trian"),
        ({"arms": {"a": {}, "b": {"train": 3}}}, "arm b: train: got 3; it is a table of settings"),
        ({"common": {"train": 3}, "arms": {"a": {}, "b": {"train": {}}}}, "arm a: train: got 3; it is a table"),
        ({"arms": {"a": {}, "b": {"train": {"beta": 0.0}}}}, "arm b: .*train.beta is 0, and tb divides by it"),
        ({"arms": {"a": {}, "B": {}}}, "arm 'B': a label has small letters"),
        ({"arms": {"b": {}, "c": {}}}, "compared_with is 'a', but the arms are b, c"),
        ({"common": {"reward": "dens"}, "arms": {"a": {}, "b": {}}}, "arm a: .*reward"),
        ({"arms": {"a": {}, "b": {"lags": [1, 2]}}}, r"arm b: lags has \[2\], which the study has not; it has \[1\]"),
        ({"arms": {"a": {"lags": [1]}, "b": {}}}, "arm a: others are compared with it, so it takes no lags"),
        ({"arms": {"a": {}}}, "arms: got one at one lag; a study compares several arms, or several lags"),
        ({"model": "m", "arms": {"a": {}, "b": {"reward": "dense"}}}, "arm b: reward is no setting of an arm; it has "),
        ({"model": "m", "arms": {"a": {}, "b": {"train": {"beta": -1}}}}, "arm b: train.beta: got -1"),
        ({"model": "m", "arms": {"a": {}, "b": {"train": 3}}}, "arm b: train: got 3; it is a table of settings"),
        ({"model": "m", "arms": {"a": {}, "b": {"searchers": 0}}}, "arm b: searchers is 0"),
        (
            {"model": "m", "arms": {"a": {}, "b": {"sampling": {"max_age": 4}}}},
            "arm b: sampling.max_age cannot be an arm's: the study sets steps and age",
        ),
        ({"model": "m", "arms": {"a": {}, "b": {"searchers": "4"}}}, "arm b: searchers is '4'; give a whole number"),
        ({"arms": {"a": {}, "b": {"lags": 1}}}, r"arm b: lags is 1; give a list of policy steps, such as \[1, 4\]"),
        ({"arms": {"a": {}, "b": {"lags": []}}}, r"arm b: lags is \[\]; give different policy steps, at least one"),
        ({"lags": [4, 4], "arms": {"a": {}}}, r"arm a: lags is \[4, 4\]; give different policy steps, at least one"),
        ({"lags": [-1, 4], "arms": {"a": {}}}, "lags: got -1; samples are of this policy step, 0, or of an earlier"),
    ],
)
def test_a_mistake_in_a_study_is_refused_with_its_arm_and_setting(changes, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        Study(**ONE_ARM | changes)


def test_arms_with_steps_of_their_own_take_no_other_number():
    with pytest.raises(ValueError, match="--steps: got 10, but the arms of searchers_equal have their own"):
        read_study("searchers_equal", steps=10)
    assert study_page._steps(read_study("searchers_equal")).startswith("searchers_1 320, searchers_2 160, ")
    assert study_page._steps(read_study("searchers", steps=10)) == 10


def test_an_unknown_study_and_a_file_of_ones_own(tmp_path):
    with pytest.raises(ValueError, match=r"there is no study 'speed'; known are sync, beta, .*staleness"):
        read_study("speed")
    file = tmp_path / "mine.toml"
    file.write_text("title = 3")
    with pytest.raises(ValueError, match=r"(?s)mine.toml:\ntitle: got 3; .*published: .*required"):
        read_study(str(file))


def test_the_study_that_the_docs_show_is_read(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
    (tmp_path / "two_betas.toml").write_text(text.partition("```toml\n")[2].partition("```")[0])
    assert list(read_study(str(tmp_path / "two_betas.toml")).arms) == ["low", "high"]


def test_an_arm_with_a_model_has_a_runs_settings():
    arms = {"a": {}, "b": {"train": {"beta": 0.1}, "searchers": 4}}
    study = Study(**ONE_ARM, model="m", steps=7, common={"train": {"learning_rate": 1e-4}}, arms=arms)
    arm = study.arms_at_each_lag()[1].settings
    assert (arm["model"], arm["searchers"]) == ("m", 4) and "store" not in arm
    train = {name: arm["train"][name] for name in ("steps", "beta", "learning_rate", "sync_interval")}
    assert train == {"steps": 7, "beta": 0.1, "learning_rate": 1e-4, "sync_interval": 1}


def test_an_arms_settings_lie_over_the_common_ones():
    study = Study(
        **ONE_ARM,
        steps=7,
        common={"train": {"beta": 0.2, "adam_beta1": 0.9}, "searchers": 2},
        arms={"a": {}, "b": {"train": {"objective": "dr_grpo", "beta": 0.0}, "searchers": 4}},
    )
    a, b = study.configuration("a"), study.configuration("b")
    assert (a.train.beta, a.train.adam_beta1, a.train.steps, a.searchers, a.sampling) == (0.2, 0.9, 7, 2, None)
    assert (b.train.objective, b.train.beta, b.train.adam_beta1, b.searchers) == ("dr_grpo", 0.0, 0.9, 4)


def rows(samples: testbed.Samples) -> list[tuple]:
    """Number, response and log-probabilities of each, in order of these."""
    numbers = samples.numbers.repeat_interleave(len(samples.responses) // len(samples.numbers))
    columns = zip(numbers.tolist(), samples.responses.tolist(), samples.behavior.tolist(), strict=True)
    return sorted((number, *response, *behavior) for number, response, behavior in columns)


def steps_of(policy, num_steps: int, **changes) -> list[testbed.Samples]:
    draw, generator = experience(Configuration(**RUN | changes), seed=1), torch.Generator().manual_seed(5)
    return [draw(policy, step, generator) for step in range(1, num_steps + 1)]


def test_replay_of_all_that_is_new_is_no_replay(policy):
    draws_all = {"prompts_per_batch": 4, "responses_per_prompt": 3, "recent_probability": 1.0}
    for fresh, replayed in zip(steps_of(policy, 3), steps_of(policy, 3, sampling=draws_all), strict=True):
        assert len(set(fresh.numbers.tolist())) == 4  # a sum twice in a round would be one prompt
        assert [row[:5] for row in rows(fresh)] == [row[:5] for row in rows(replayed)]
        assert sorted(fresh.reward.tolist()) == sorted(replayed.reward.tolist())


def test_searchers_bring_a_round_each_and_rewards_may_be_dense(policy):
    (samples,) = steps_of(policy, 1, searchers=3)
    assert samples.numbers.shape == (12,) and samples.responses.shape == (36, testbed_task.T)
    (dense,) = steps_of(policy, 1, searchers=3, reward="dense")
    assert torch.equal(dense.responses, samples.responses)
    assert set((dense.reward * 12).tolist()) <= set(range(13)) and (dense.reward >= samples.reward).all()


def test_the_share_of_recent_prompts_is_m(policy):
    fresh_steps = steps_of(policy, 60)

    def share_of_recent(m: float) -> float:
        sampling = {"prompts_per_batch": 4, "responses_per_prompt": 2, "recent_probability": m}
        fresh = [set(samples.numbers.tolist()) for samples in fresh_steps]
        drawn = [samples.numbers.tolist() for samples in steps_of(policy, 60, sampling=sampling)]
        late = [
            number in of_step for of_step, numbers in zip(fresh[20:], drawn[20:], strict=True) for number in numbers
        ]
        return sum(late) / len(late)

    assert share_of_recent(1.0) == 1.0
    assert 0.6 < share_of_recent(0.75) < 0.9  # 160 places: 0.75, and a few of the others
    assert share_of_recent(0.0) < 0.2


def test_the_newest_responses_stay(policy, monkeypatch):
    """One sum again and again: what is drawn of everything stored is of the newest two distinct responses."""
    monkeypatch.setattr(testbed.torch, "randint", lambda *_, **__: torch.zeros(4, dtype=torch.long))
    sampling = {"prompts_per_batch": 1, "responses_per_prompt": 2, "recent_probability": 0.0, "capacity_per_prompt": 2}
    generator = torch.Generator().manual_seed(5)
    draw = experience(Configuration(**RUN | {"sampling": sampling}), seed=1)
    newest: list[tuple] = []
    for step in range(1, 5):
        before = generator.get_state()
        of_round = testbed.sample_sums(policy, 4, 3, generator).responses.tolist()
        generator.set_state(before)
        for response in map(tuple, of_round):
            newest = [*(other for other in newest if other != response), response][-2:]
        drawn = {tuple(response) for response in draw(policy, step, generator).responses.tolist()}
        assert drawn <= set(newest)


def test_replay_by_distance_draws_what_differs(monkeypatch):
    """Responses 111, 112, 113 and 999 to one sum: the last differs in 3 tokens from the others, these in 5 / 3."""
    texts = ["111\n", "112\n", "113\n", "999\n"]
    stored = torch.tensor([[testbed_task.CHARACTERS.index(character) for character in text] for text in texts])
    zeros = torch.zeros(4, testbed_task.T)

    def rounds(policy, step, generator) -> testbed.Samples:
        return testbed.Samples(torch.tensor([7]), stored, zeros, torch.zeros(4))

    monkeypatch.setattr(testbed, "sample_sums", lambda policy, *_: rounds(policy, 0, None))
    sampling = {"prompts_per_batch": 1, "responses_per_prompt": 2, "recent_probability": 0.0}

    def share_of_the_last(by_distance: bool) -> float:
        draw = experience(Configuration(**RUN | {"sampling": sampling}, replay_by_distance=by_distance), seed=1)
        drawn = torch.cat([draw(None, step, None).responses for step in range(1, 501)])
        assert {tuple(row) for row in drawn.tolist()} == {tuple(row) for row in stored.tolist()}
        return (drawn == stored[3]).all(1).float().mean().item()

    # Of two slots without replacement: 3/8 first, else 5/24 each and then 3 of the remaining 19/3. Evenly: 1/4.
    assert share_of_the_last(False) == pytest.approx(0.25, abs=0.03)
    assert share_of_the_last(True) == pytest.approx((3 / 8 + 5 / 8 * 9 / 19) / 2, abs=0.03)
