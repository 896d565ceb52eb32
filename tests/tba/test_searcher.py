"""The Searcher: a round's trajectories are complete, right and repeatable in their prompts.

- Rows have what a shard asks for; their ids follow from (searcher, round, place); rewards are the task's.
- Reference log-probabilities are the reference policy's own, one a token.
- They are scored in passes of so many tokens at most, and are the same however that divides prompts and responses.
- A round's prompts depend on (seed, searcher, round) alone: a retried round asks the same.
- Exploration draws temperature and top_p by prompt, in their ranges, and each row says its own.
- Responses are sampled behind a drawn system prompt, each row says which, and stored and scored without it.
- Too few rewards or a NaN stop the round, and say which response. A response to which no reward applies is left out.
- An evaluation is of the policy that is served.

python -m pytest tests/tba/test_searcher.py
"""

import contextlib
import json
import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from flows.config import RunConfig
from flows.run.preflight import check_temperatures
from storage.shards import shard_of
from tba.config import SearchSettings
from tba.engine import Response, ServedPolicy, WholeBatches
from tba.logprobs import Group, load_policy, response_logprobs
from tba.precision import compute_dtype, default_device
from tba.reference_policy import ReferencePolicy
from tba.rewards import FunctionReward, NoneJudged, RewardedTask
from tba.searcher import Models, Round, Searcher, SearcherIdentity
from tba.tasks.base import Problem, stop_tokens

WORDS = ["[UNK]", "</s>", "one", "two", "three", "four", "five"]


class Counting:
    """What comes next? Rewarded for the right word."""

    name, version, stop, max_response_tokens = "counting", "next-1", (), 4
    train = tuple(Problem(f"p{n}", WORDS[n], WORDS[n + 1]) for n in range(2, 6))
    heldout = train

    def rewards(self, problems, responses):
        return [float(response == problem.answer) for problem, response in zip(problems, responses, strict=True)]


class Parrot(WholeBatches):
    """An engine that says the word after the prompt's, then the one before it: one right, one wrong."""

    def load(self, folder, policy_step):
        self.served = ServedPolicy(policy_step, f"{policy_step:032d}")
        return self.served

    def sample(self, prompts, sampling):
        self.asked = sampling
        return [
            [
                Response([prompt[0] + (1 if n == 0 else -1), 1], [-0.5, -0.1], "stop", [(0, self.served)])
                for n in range(of_prompt.num_samples)
            ]
            for prompt, of_prompt in zip(prompts, sampling, strict=True)
        ]


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_searcher(tokenizer, reference, task=None, name="s0", engine=None, **settings) -> Searcher:
    """A Searcher that serves policy step 8."""
    searcher = Searcher(
        SearcherIdentity(name, seed=1, code_version="test"),
        RewardedTask(task or Counting()),
        Models(tokenizer, engine or Parrot(), ReferencePolicy(reference)),
        SearchSettings(**{"samples_per_prompt": 3, "prompts_per_round": 2} | settings),
        max_response_tokens=4,
        temperature=0.5,
    )
    searcher.load(reference, policy_step=8)
    return searcher


def run_round(searcher: Searcher, number: int) -> Round:
    return searcher.score(searcher.sample(number))


def test_an_engine_of_whole_batches_samples_no_round_ahead(tokenizer, reference):
    """The round would be held back until the next one is whole."""
    engine, started = Parrot(), []
    start = engine.start
    engine.start = lambda *asked, **options: started.append(asked) or start(*asked, **options)
    searcher = make_searcher(tokenizer, reference, engine=engine)
    searcher.sample(0, ahead=True)
    searcher.drop_rounds()  # behind what the engine's thread has been asked for
    assert len(started) == 1


def test_a_round_is_whole_and_right(tokenizer, reference):
    searcher = make_searcher(tokenizer, reference)
    found = run_round(searcher, 5)
    rows = found.trajectories
    shard = shard_of(rows)  # raises where it does not fit
    assert shard["trajectory_id"].to_pylist() == [f"s0-00000005-{index:05d}" for index in range(6)]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0] * 2
    for which in ("", "last_"):
        of_policy = {(row[f"{which}policy_step"], row[f"{which}policy_fingerprint"]) for row in rows}
        assert of_policy == {(8, f"{8:032d}")}
    assert found.metrics["num_trajectories"] == 6 and found.metrics["reward_mean"] == pytest.approx(1 / 3)
    policy = load_policy(reference)
    for row in rows:
        group = Group(row["prompt_tokens"], [row["response_tokens"]])
        ((expected,),) = response_logprobs(policy, [group], temperature=0.5)
        assert row["reference_logprobs"] == pytest.approx(expected.tolist(), abs=0.05)  # bfloat16


def test_a_rounds_tokens_and_mean_reward_are_of_all_that_were_sampled(tokenizer, reference):
    pytest.importorskip("rapidfuzz", reason="extra tasks")
    metrics = run_round(make_searcher(tokenizer, reference, near_duplicate_distance=0.01), 5).metrics
    assert metrics["num_trajectories"] == 4  # of three responses to each of two prompts two are the same
    assert metrics["num_response_tokens"] == 6 * 2 and metrics["reward_mean"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("pass_tokens", [1, 5, 9, 100])
def test_the_reference_scores_a_bounded_pass_at_a_time(reference, monkeypatch, pass_tokens):
    monkeypatch.setattr("tba.reference_policy.PASS_TOKENS", pass_tokens)
    passes = []

    def spy(model, groups, temperature):
        passes.append(sum(group.num_tokens for group in groups))
        return response_logprobs(model, groups, temperature)

    monkeypatch.setattr("tba.reference_policy.response_logprobs", spy)
    prompts = [[2, 3], [2, 3], [4, 5], [2, 3], [2, 3]]
    responses = [[4, 5, 6], [1], [6, 1], [5, 5, 5, 1], [1]]
    found = ReferencePolicy(reference).logprobs(prompts, responses, 0.5)
    policy = load_policy(reference)
    for prompt, response, logprobs in zip(prompts, responses, found, strict=True):
        ((expected,),) = response_logprobs(policy, [Group(prompt, [response])], temperature=0.5)
        assert logprobs == pytest.approx(expected.tolist(), abs=0.05)  # bfloat16
    # the largest alone: two prompt tokens and three that a response of four makes
    assert max(passes) <= max(pass_tokens, 5) and sum(passes) >= 2 + 2 + 3 + 2 + 1


def test_the_references_matrices_are_cast_once_and_its_numbers_stay_the_policys(reference):
    policy = ReferencePolicy(reference)
    found = policy.logprobs([[2, 3]], [[4, 5, 6, 1]], 0.5)
    uncast = load_policy(reference).to(default_device())
    ((expected,),) = response_logprobs(uncast, [Group([2, 3], [[4, 5, 6, 1]])], temperature=0.5)
    assert found == [expected.tolist()]
    model = policy._model
    head = model.get_output_embeddings()
    matrices = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    assert matrices and {matrix.weight.dtype for matrix in matrices} == {compute_dtype(default_device())}


def test_a_retried_round_asks_the_same_and_others_do_not(tokenizer, reference):
    def prompts(name: str, number: int) -> list[str]:
        return [row["prompt"] for row in run_round(make_searcher(tokenizer, reference, name=name), number).trajectories]

    assert prompts("s0", 7) == prompts("s0", 7)
    assert len({tuple(prompts(name, number)) for name in ("s0", "s1") for number in range(8)}) > 3


def test_exploration_is_drawn_by_prompt_and_recorded_by_row(tokenizer, reference):
    engine = Parrot()
    searcher = make_searcher(
        tokenizer, reference, engine=engine, prompts_per_round=4, exploration_probability=0.5,
        exploration_temperature=(0.7, 1.1), exploration_top_p=(0.8, 0.9),
    )  # fmt: skip
    asked, recorded = [], []
    for number in range(25):
        rows = run_round(searcher, number).trajectories
        asked += [(sampling.temperature, sampling.top_p) for sampling in engine.asked for _ in range(3)]
        recorded += [(row["temperature"], row["top_p"]) for row in rows]
    assert asked == recorded
    for values, usual, low, high in [
        ([temperature for temperature, _ in recorded[::3]], 1.0, 0.7, 1.1),
        ([top_p for _, top_p in recorded[::3]], 1.0, 0.8, 0.9),
    ]:
        drawn = [value for value in values if value != usual]
        assert 30 < len(drawn) < 70 and len(set(drawn)) == len(drawn)  # 100 at one half: 4 standard deviations are 20
        assert all(low <= value <= high for value in drawn)
    retried = run_round(searcher, 3).trajectories  # draws the same
    assert retried[0]["temperature"] == recorded[3 * 12][0]
    searcher.evaluate(2)
    assert {sampling.temperature for sampling in engine.asked} == {0.0}


def test_system_prompts_are_sampled_behind_and_not_trained_behind(tokenizer, reference):
    class Listening(Parrot):
        def sample(self, prompts, sampling):
            self.heard = prompts
            return super().sample([prompt[-1:] for prompt in prompts], sampling)

    engine = Listening()
    settings = {"prompts_per_round": 4, "exploration_probability": 0.5, "system_prompts": ("five", "four")}
    searcher, plain = (
        make_searcher(tokenizer, reference, engine=engine, **settings),
        make_searcher(tokenizer, reference),
    )
    drawn = []
    for number in range(25):
        rows = run_round(searcher, number).trajectories
        for heard, row in zip(engine.heard, rows[::3], strict=True):
            system = tokenizer.encode(row["system_prompt"]) if row["system_prompt"] else []
            assert heard == system + row["prompt_tokens"] == system + tokenizer.encode(row["prompt"])
            drawn.append(row["system_prompt"])
    assert set(drawn) == {"", "five", "four"} and 30 < drawn.count("") < 70
    assert {row["system_prompt"] for row in run_round(plain, 0).trajectories} == {""}
    policy = load_policy(reference)
    for row in rows:
        ((expected,),) = response_logprobs(policy, [Group(row["prompt_tokens"], [row["response_tokens"]])], 0.5)
        assert row["reference_logprobs"] == pytest.approx(expected.tolist(), abs=1e-5)
    searcher.evaluate(2)
    assert engine.heard == [tokenizer.encode(problem.prompt) for problem in Counting.heldout[:2]]


def test_a_system_prompt_takes_the_place_of_a_chats_own(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    messages = ({"role": "system", "content": "one"}, {"role": "user", "content": "two"})
    assert tokenizer.decode(Problem("p", "one two ", messages=messages).encode(tokenizer, "five")) == "five two"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"system_prompts": ("five",)}, "exploration_probability is 0: none would be drawn"),
        ({"system_prompts": ("",), "exploration_probability": 0.3}, "one is empty"),
    ],
)
def test_system_prompts_that_do_nothing_are_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        SearchSettings(**settings)


def test_an_exploration_top_p_above_one_is_refused():
    with pytest.raises(ValueError, match=r"search\.exploration_top_p: got 0\.9, 1\.2"):
        SearchSettings(exploration_top_p=(0.9, 1.2))


@pytest.mark.parametrize("settings", [{"temperature": 2.5}, {"exploration_temperature": (0.5, 2.5)}])
def test_a_temperature_that_vllm_refuses_is_refused(settings):
    with pytest.raises(ValueError, match=r"is 2\.5; vLLM samples at .* <= 2"):
        check_temperatures(RunConfig(search=settings))


def test_evaluation_is_greedy_and_means_the_reward(tokenizer, reference):
    engine, task = Parrot(), Counting()
    task.heldout = (*Counting.heldout[:2], Problem("wrong", "two", "five"))  # Parrot says "three"
    result = make_searcher(tokenizer, reference, task, engine=engine).evaluate(3)
    assert {(asked.temperature, asked.num_samples) for asked in engine.asked} == {(0.0, 1)}
    assert result["accuracy"] == pytest.approx(2 / 3) and result["num_problems"] == 3


def test_a_response_to_which_no_reward_applies_is_left_out(tokenizer, reference):
    def only_two(completions, **_):
        return [1.0 if text.split() == ["three"] else None for text in completions]

    task = Counting()
    searcher = make_searcher(tokenizer, reference, task, prompts_per_round=4)
    searcher.task = RewardedTask(task, [(FunctionReward(only_two), 1.0)])
    found = run_round(searcher, 0)
    assert {row["response"] for row in found.trajectories} == {"three"} and len(found.trajectories) == 3
    assert found.metrics["num_trajectories"] == 3 and found.metrics["reward_mean"] == 1.0
    assert searcher.evaluate(4)["accuracy"] == 1.0  # of the one problem whose response has a reward


def test_a_round_that_no_reward_judges_gets_other_prompts(tokenizer, reference):
    judged = Counting.train[2].prompt

    def only_one(prompts, **_):
        return [1.0 if prompt == judged else None for prompt in prompts]

    searcher = make_searcher(tokenizer, reference, prompts_per_round=1)
    searcher.task = RewardedTask(Counting(), [(FunctionReward(only_one), 1.0)])
    for number in range(3):
        for _ in range(50):
            with contextlib.suppress(NoneJudged):
                found = run_round(searcher, number)
                break
        assert {(row["round"], row["prompt"]) for row in found.trajectories} == {(number, judged)}


def test_an_evaluation_is_of_the_policy_that_is_served(tokenizer, reference):
    """Beside many adapters in flight an engine may begin with an older policy's."""

    class Behind(Parrot):
        num_calls = 0

        def sample(self, prompts, sampling):
            self.num_calls += 1
            served, older = self.served, ServedPolicy(7, f"{7:032d}")
            self.served = older if self.num_calls == 1 else served
            try:
                return super().sample(prompts, sampling)
            finally:
                self.served = served

    engine = Behind()
    assert make_searcher(tokenizer, reference, engine=engine).evaluate(2)["accuracy"] == 1.0
    assert engine.num_calls == 2


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0], "1 rewards for 6 responses"),
        ([math.nan] * 6, "got nan"),
        ([math.inf] * 6, "got inf"),
        ([None] * 6, "None"),
    ],
)
def test_a_reward_that_is_no_number_stops_the_round(tokenizer, reference, rewards, message):
    task = Counting()
    task.rewards = lambda problems, responses: rewards
    with pytest.raises(ValueError, match=message):
        run_round(make_searcher(tokenizer, reference, task), 0)


def test_a_token_that_ends_with_a_stop_string_ends_a_response():
    """Llama 3's and Qwen2's tokenizers have such ones."""
    words = Tokenizer(models.WordLevel({"</s>": 0, "\n": 1, ".\n": 2, "\n\n": 3, "\n.": 4, "a": 5}, unk_token="a"))
    task = Counting()
    task.stop = ("\n",)
    assert stop_tokens(task, PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")) == [0, 1, 2, 3]


def test_the_models_own_ends_of_a_turn_end_a_response(tmp_path):
    """vLLM takes them from the folder, so the other engine and demonstrations do."""
    words = Tokenizer(models.WordLevel({"</s>": 0, "<end_of_turn>": 1, "a": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(tmp_path)
    for ends, found in (([0, 1], [0, 1]), (1, [0, 1]), (None, [0])):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert stop_tokens(Counting(), PreTrainedTokenizerFast.from_pretrained(tmp_path)) == found


def test_a_model_whose_responses_nothing_ends_is_refused(tmp_path):
    words = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="nothing ends a response"):
        stop_tokens(Counting(), PreTrainedTokenizerFast.from_pretrained(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert stop_tokens(Counting(), PreTrainedTokenizerFast.from_pretrained(tmp_path)) == [0]


def test_a_stop_string_of_several_tokens_is_refused(tokenizer):
    task = Counting()
    task.stop = ("one two",)
    with pytest.raises(ValueError, match="'one two' is 2 tokens"):
        stop_tokens(task, tokenizer)
