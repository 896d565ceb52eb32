"""Both engines on the embedded model: what they serve, sample and say of it.

- `load` swaps the policy in place; the fingerprint is of the weights that went in.
- Greedy output is the model's own; vLLM's equals transformers' on the same weights, before and after a swap.
- Log-probabilities are the sampled tokens' under the temperature they were sampled at.
- A response ends with the token that stopped it, or at the limit; there are `num_samples` to a prompt.

python -m pytest tests/tba/test_engine.py
"""

import importlib.util
import multiprocessing
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tba.engine import Sampling, TransformersEngine, make_engine
from tba.logprobs import Group, load_policy, response_logprobs
from tba.models import embedded_model
from tba.precision import compute_dtype
from tba.weights import fingerprint, read_weights, write_weights

PROMPTS = ["24 + 17 = 41\n63 + 21 = 84\n58 + 36 = 94\n46 + 39 =", "24 + 17 = 41\n63 + 21 = 84\n11 + 12 ="]
NEWLINE = 198
GREEDY = Sampling(1, 0.0, 1.0, 8, [2, NEWLINE])
LIMITS = dict(max_tokens=64, max_sequences=16, seed=0, threads=2)


@pytest.fixture(scope="module")
def base() -> Path:
    return embedded_model(Path(__file__).parents[2] / ".tba" / ".local" / "models")


@pytest.fixture(scope="module")
def other(base, tmp_path_factory) -> Path:
    """Another policy of the same shape: its last norm is scaled, so that greedy output differs."""
    folder = tmp_path_factory.mktemp("other")
    weights = dict(read_weights(base))
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(weights["model.norm.weight"].shape, generator=generator) * 4
    weights["model.norm.weight"] = (weights["model.norm.weight"] * scale).bfloat16()
    write_weights(weights, folder)
    return folder


@pytest.fixture(scope="module")
def tokens(base) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


def greedy_tokens(engine, tokens) -> list[list[int]]:
    return [only.tokens for (only,) in engine.sample(tokens, GREEDY)]


def plain_greedy(base: Path, other: Path, tokens: list[list[int]]) -> dict[Path, list[list[int]]]:
    """What either policy answers, token by token, whole sequence each time."""
    model = load_policy(base, compute_dtype())
    model.set_attn_implementation("sdpa")

    @torch.inference_mode()
    def answer(prompt: list[int]) -> list[int]:
        sequence = list(prompt)
        for _ in range(8):
            sequence.append(model(torch.tensor([sequence])).logits[0, -1].argmax().item())
            if sequence[-1] in GREEDY.stop_tokens:
                break
        return sequence[len(prompt) :]

    answers = {}
    for folder in (base, other):
        model.load_state_dict(dict(read_weights(folder)), strict=False)
        answers[folder] = [answer(prompt) for prompt in tokens]
    assert answers[base] != answers[other]
    return answers


@pytest.mark.slow
def test_transformers_swaps_policies_in_place(base, other, tokens):
    engine, expected = TransformersEngine(base, **LIMITS), plain_greedy(base, other, tokens)
    for folder in (base, other, base):
        assert engine.load(folder) == fingerprint(read_weights(folder))
        assert greedy_tokens(engine, tokens) == expected[folder]


def test_transformers_refuses_weights_of_another_model(base, tmp_path):
    write_weights({"lm_head.bias": torch.zeros(3)}, tmp_path)
    with pytest.raises(RuntimeError, match="other weights than the model"):
        TransformersEngine(base, **LIMITS).load(tmp_path)


def check_samples(engine, base, tokens) -> None:
    engine.load(base)
    responses = engine.sample(tokens, Sampling(6, 0.7, 1.0, 4, [2, NEWLINE]))
    assert [len(of_prompt) for of_prompt in responses] == [6, 6]
    policy = load_policy(base, compute_dtype())
    groups = [Group(prompt, [r.tokens for r in of_prompt]) for prompt, of_prompt in zip(tokens, responses, strict=True)]
    with torch.no_grad():
        expected = response_logprobs(policy, groups, temperature=0.7)
    # In bfloat16, logits of about 20 have steps of 1/8: two kernels are some steps apart, the temperature widens them.
    once, on_average = (0.02, 0.005) if compute_dtype() == torch.float32 else (0.9, 0.15)
    apart = []
    for of_prompt, of_group in zip(responses, expected, strict=True):
        for response, logprobs in zip(of_prompt, of_group, strict=True):
            stopped = response.tokens[-1] in (2, NEWLINE)
            assert response.finish_reason == ("stop" if stopped else "length")
            assert stopped or len(response.tokens) == 4
            assert not set(response.tokens[:-1]) & {2, NEWLINE}
            apart.append(torch.tensor(response.logprobs) - logprobs)
    assert torch.cat(apart).abs().max() < once and torch.cat(apart).abs().mean() < on_average
    assert len({tuple(response.tokens) for response in responses[0]}) > 1


@pytest.mark.slow
def test_transformers_answers_as_the_policy_does_whatever_its_folder_asks_of_chats(base, tokens, tmp_path):
    """Instruct models come with a repetition penalty and the like, which vLLM with its own parameters does not add."""
    for file in base.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 9.0, "no_repeat_ngram_size": 1}')
    plain, asked = TransformersEngine(base, **LIMITS), TransformersEngine(tmp_path, **LIMITS)
    assert greedy_tokens(asked, tokens) == greedy_tokens(plain, tokens)


@pytest.mark.slow
def test_transformers_samples_with_their_logprobs(base, tokens):
    check_samples(TransformersEngine(base, **LIMITS), base, tokens)


def check_vllm(base, other, tokens) -> None:
    engine, expected = make_engine(base, **LIMITS), plain_greedy(base, other, tokens)
    for folder in (base, other, base):
        assert engine.load(folder) == fingerprint(read_weights(folder))
        assert greedy_tokens(engine, tokens) == expected[folder]
    check_samples(engine, base, tokens)


@pytest.mark.slow
def test_vllm_swaps_policies_in_place_and_agrees_with_transformers(base, other, tokens):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; transformers' generate is used instead")
    # In a process of its own: vLLM's start looks into every module, and the web server of other tests refuses that.
    process = multiprocessing.get_context("spawn").Process(target=check_vllm, args=(base, other, tokens))
    process.start()
    process.join()
    assert process.exitcode == 0, "its traceback is in the captured output"
