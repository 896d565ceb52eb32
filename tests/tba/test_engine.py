"""Both engines on the embedded model: what they serve, sample and say of it.

- `load` swaps the policy in place; the fingerprint is of the weights that went in.
- Greedy output is the model's own; vLLM's equals transformers' on the same weights, before and after a swap.
- Log-probabilities are the sampled tokens' under the temperature and the top-p that they were sampled at.
- A response ends with the token that stopped it, or at the limit; there are `num_samples` to a prompt.
- vLLM takes in a policy while it samples: no response is lost, each says which of its tokens which policy sampled, and
  the log-probabilities are those of these policies, one after the other on the same keys and values.
- A policy is refused if one of vLLM's matrices, joined or packed, is still that of the policy before.
- A mixture of experts is served as the Trainer publishes it; vLLM serves a policy that two processes share, too.
- An argument that vLLM does not know is refused by name.

python -m pytest tests/tba/test_engine.py
"""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

import tba.vllm_weights
from tba.config import TrainSettings
from tba.engine import Response, Sampling, ServedPolicy
from tba.engines import make_engine
from tba.logprobs import Group, load_policy, response_logprobs
from tba.precision import compute_dtype
from tba.trainer import Trainer
from tba.transformers_engine import TransformersEngine
from tba.weights import fingerprint, read_weights, write_weights
from tests.character_model import save_character_model
from tests.tba.engines import (
    GREEDY,
    LIMITS,
    NEWLINE,
    compute_in_float32,
    greedy_tokens,
    run_apart,
    sample,
    save_small_llama,
)


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
        assert engine.load(folder, 4) == ServedPolicy(4, fingerprint(read_weights(folder)))
        assert greedy_tokens(engine, tokens) == expected[folder]


def test_transformers_refuses_weights_of_another_model(base, tmp_path):
    engine = TransformersEngine(base, **LIMITS)
    write_weights({"lm_head.bias": torch.zeros(3)}, tmp_path)
    with pytest.raises(RuntimeError, match="other weights than the model"):
        engine.load(tmp_path, 4)
    write_weights(dict(read_weights(base)) | {"lm_head.bias": torch.zeros(3)}, tmp_path)
    with pytest.raises(RuntimeError, match=r"other weights than the model: \['lm_head.bias'\]"):  # the head is tied
        engine.load(tmp_path, 4)


def room_for(engine: TransformersEngine, num_responses: int, prompt: int, response: int) -> int:
    """Bytes of SmolLM2-135M's keys and values (30 layers, 3 heads of 64), of an MLP over the prompt, of the logits."""
    wide = (prompt + response) * 2 * 30 * 3 * 64 + 3 * prompt * 1536
    return num_responses * (wide * engine._dtype.itemsize + 8 * 4 * 49152)


def test_transformers_samples_so_many_responses_at_once_as_memory_has_room(base, tokens, monkeypatch):
    engine, asked = TransformersEngine(base, **LIMITS), []
    monkeypatch.setattr(
        engine, "_generate", lambda prompts, sampling: asked.append(len(prompts)) or [[]] * len(prompts)
    )
    sampling = [Sampling(2, 1.0, 1.0, 512, [2])] * 8
    monkeypatch.setattr("tba.transformers_engine.ROWS_BYTES", room_for(engine, 4, len(tokens[0]), 512))
    engine.sample(tokens[:1] * 8, sampling)
    assert asked == [2, 2, 2, 2]


def test_transformers_samples_a_prompt_in_parts_where_memory_has_no_room_for_all(base, tokens, monkeypatch):
    engine, asked = TransformersEngine(base, **LIMITS), []

    def generate(prompts: list, sampling: Sampling) -> list[list[int]]:
        asked.append((len(prompts), sampling.num_samples))
        return [[len(asked)] * sampling.num_samples for _ in prompts]

    monkeypatch.setattr(engine, "_generate", generate)
    monkeypatch.setattr("tba.transformers_engine.ROWS_BYTES", room_for(engine, 3, len(tokens[0]), 512))
    found = engine.sample(tokens[:1] * 2, [Sampling(8, 1.0, 1.0, 512, [2])] * 2)
    assert found == [[1] * 3 + [2] * 3 + [3] * 2, [4] * 3 + [5] * 3 + [6] * 2]
    assert asked == [(1, 3), (1, 3), (1, 2)] * 2


def check_samples(engine, base, tokens, dtype=None) -> None:
    """dtype: in which the engine computes; None: the machine's."""
    served = engine.load(base, 4)
    responses = sample(engine, tokens, Sampling(6, 0.7, 1.0, 4, [2, NEWLINE]))
    assert [len(of_prompt) for of_prompt in responses] == [6, 6]
    dtype = dtype or compute_dtype()
    policy = load_policy(base, dtype)
    groups = [Group(prompt, [r.tokens for r in of_prompt]) for prompt, of_prompt in zip(tokens, responses, strict=True)]
    with torch.no_grad():
        expected = response_logprobs(policy, groups, temperature=0.7)
    # In bfloat16, logits of about 20 have steps of 1/8: two kernels are some steps apart, the temperature widens them.
    once, on_average = (0.02, 0.005) if dtype == torch.float32 else (0.9, 0.15)
    apart = []
    for of_prompt, of_group in zip(responses, expected, strict=True):
        for response, logprobs in zip(of_prompt, of_group, strict=True):
            stopped = response.tokens[-1] in (2, NEWLINE)
            assert response.policies == [(0, served)]
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


def check_swap(base: Path, moved: Path, tokens: list[list[int]], num_blocks: int | None, least_mixed: int) -> None:
    """In float32, so that rounding hides nothing.

    The engine has room for 16 of 24 responses: some begin with the one policy, some with the other one. The prompts are
    longer than two blocks of vLLM's cache, which have keys and values of the policy that came to the prompt first.
    num_blocks: of this cache; None: enough.
    """
    compute_in_float32()
    tokens = [[*tokens[1], *tokens[0]], [*tokens[0], *tokens[1]]]
    arguments = {"num_gpu_blocks_override": num_blocks} if num_blocks else {}
    engine = make_engine(base, arguments=arguments, **LIMITS | {"max_tokens": 160})
    sampling = Sampling(6, 0.7, 1.0, 12, [2])
    first = engine.load(base, 1)
    number = engine.start([*tokens, *tokens], [sampling] * 4, first=False)
    assert not any(engine.step() for _ in range(5))
    assert len(engine._not_begun()) >= 4 if num_blocks else not engine._not_begun()
    second, found = engine.load(moved, 2), {}
    while not found:
        found = engine.step()
    responses = [(prompt, r) for prompt, of in zip([*tokens, *tokens], found[number], strict=True) for r in of]
    assert len(responses) == 24 and {len(of) for of in found[number]} == {6}
    begun = {tuple(r.policies) for _, r in responses}
    assert begun <= {((0, first),), ((0, first), (5, second)), ((0, second),)} and len(begun) >= 2
    models = {first: load_policy(base, torch.float32), second: load_policy(moved, torch.float32)}
    for model in models.values():
        model.set_attn_implementation("sdpa")
    mixed = [(prompt, response) for prompt, response in responses if len(response.policies) == 2]
    assert len(mixed) >= least_mixed
    right, wrong = [], []
    for prompt, response in responses:
        right.append((torch.tensor(response.logprobs) - mixture_logprobs(models, prompt, response)).abs())
    for prompt, response in mixed:
        sampled = torch.tensor(response.logprobs)
        for one in (first, second):
            alone = Response(response.tokens, [], "", [(0, one)])
            wrong.append((sampled - mixture_logprobs(models, prompt, alone)).abs().mean())
    print("nats a token:", torch.cat(right).max().item(), "by one policy:", torch.stack(wrong).min().item())
    assert torch.cat(right).max() < 0.02, f"{torch.cat(right).max()} nats a token"
    assert torch.stack(wrong).min() > 0.02, "neither policy alone sampled them"


@torch.inference_mode()
def mixture_logprobs(models: dict, prompt: list[int], response: Response) -> torch.Tensor:
    """Log-probability of each token by the policy that sampled it, on the keys and values of those before. [T]"""
    sequence, cache, logits = torch.tensor([prompt + response.tokens]), None, []
    starts = [start for start, _ in response.policies[1:]] + [len(response.tokens)]
    place = 0  # in the sequence: tokens before it are in the cache
    for (_, served), end in zip(response.policies, starts, strict=True):
        model, stop = models[served], len(prompt) + end - 1  # the token at `stop` is the last that this policy samples
        output = model(sequence[:, place:stop], past_key_values=cache, use_cache=True)
        cache, place = output.past_key_values, stop
        logits.append(output.logits[0].float())
    logprobs = (torch.cat(logits)[len(prompt) - 1 :] / 0.7).log_softmax(-1)  # [T, V]
    return logprobs.gather(-1, torch.tensor(response.tokens).unsqueeze(-1)).squeeze(-1)


def moved_weights(base: Path, folder: Path) -> Path:
    """A policy whose every layer differs from the base's, by a twentieth."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: (tensor.float() * (1 + 0.05 * torch.randn(tensor.shape, generator=generator))).bfloat16()
        for name, tensor in read_weights(base)
    }
    write_weights(weights, folder)
    for file in base.glob("*.json"):
        (folder / file.name).symlink_to(file)
    return folder


def check_nucleus(engine, folder: Path) -> None:
    """The first tokens of 64 responses are of the nucleus, whose other half of the probability they have, too."""
    prompt = AutoTokenizer.from_pretrained(folder).encode("Once upon a")
    (responses,) = sample(engine, [prompt], Sampling(64, 1.5, 0.5, 1, [NEWLINE]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=compute_dtype())
    with torch.inference_mode():
        p = (model(torch.tensor([prompt])).logits[0, -1].float() / 1.5).softmax(-1)
    falling, tokens = p.sort(descending=True)
    nucleus = tokens[falling.cumsum(0) - falling < 0.6]  # some slack for the engine's rounding
    of_nucleus = dict(zip(nucleus.tolist(), p[nucleus].tolist(), strict=True))
    assert 1 < len(nucleus) < len(p) / 10 and {response.tokens[0] for response in responses} <= of_nucleus.keys()
    gains = [response.logprobs[0] - math.log(of_nucleus[response.tokens[0]]) for response in responses]
    assert sum(gains) / len(gains) == pytest.approx(math.log(2), abs=0.2)


def test_transformers_samples_from_the_nucleus(tmp_path, monkeypatch):
    monkeypatch.setattr("tba.transformers_engine.compute_dtype", lambda *_: torch.float32)
    folder, prompt = save_character_model(tmp_path, initializer_range=0.2), [3, 4, 5]
    engine = TransformersEngine(folder, **LIMITS | {"max_sequences": 256})
    engine.load(folder, 0)
    (responses,) = sample(engine, [prompt], Sampling(200, 0.7, 0.5, 1, [1]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(engine._device)
    p = (model(torch.tensor([prompt], device=engine._device)).logits[0, -1] / 0.7).softmax(-1).detach().cpu()
    falling, tokens = p.sort(descending=True)
    nucleus = tokens[falling.cumsum(0) - falling < 0.5]
    expected = dict(zip(nucleus.tolist(), (p[nucleus] / p[nucleus].sum()).log().tolist(), strict=True))
    assert 1 < len(nucleus) < len(p) and {response.tokens[0] for response in responses} <= expected.keys()
    for response in responses:
        assert response.logprobs == pytest.approx([expected[response.tokens[0]]], abs=1e-4)


def check_vllm(base: Path, other: Path, moved: Path, tokens: list[list[int]]) -> None:
    """One engine for all, because its start takes longer than each check."""
    engine, expected = make_engine(base, **LIMITS), plain_greedy(base, other, tokens)
    for folder in (base, other, base):
        assert engine.load(folder, 4) == ServedPolicy(4, fingerprint(read_weights(folder)))
        assert greedy_tokens(engine, tokens) == expected[folder]
    check_samples(engine, base, tokens)
    check_nucleus(engine, base)
    if not torch.cuda.is_available():  # it replaces the CPU backend's packed matrices
        check_refusals(engine, base, moved)


def check_refusals(engine, base: Path, moved: Path) -> None:
    """One layer keeps the first policy's matrix, as the output layer did under vLLM 0.32."""
    refresh = tba.vllm_weights._refresh_tied_head
    for name in ("lm_head", "model.layers.3.mlp.gate_up_proj", "model.layers.29.self_attn.o_proj"):
        kept = []

        def keep(model, name=name, kept=kept) -> None:
            refresh(model)
            layer = model.get_submodule(name)
            kept.append(layer.cpu_linear)
            layer.cpu_linear = kept[0]

        tba.vllm_weights._refresh_tied_head = keep
        engine.load(base, 1)
        with pytest.raises(RuntimeError, match=f"{name} differs"):
            engine.load(moved, 2)
    tba.vllm_weights._refresh_tied_head = refresh
    assert engine.load(moved, 3).fingerprint == fingerprint(read_weights(moved))


@pytest.mark.slow
def test_vllm_swaps_policies_in_place_agrees_with_transformers_and_refuses_one_of_which_it_lacks_a_matrix(
    base, other, tokens, tmp_path
):
    run_apart(check_vllm, base, other, moved_weights(base, tmp_path), tokens)


@pytest.mark.slow
# 12: responses wait in vLLM for memory
@pytest.mark.parametrize(("num_blocks", "least_mixed"), [(None, 8), pytest.param(12, 4, marks=pytest.mark.apart)])
def test_vllm_takes_in_a_policy_while_it_samples(base, tokens, tmp_path, num_blocks, least_mixed):
    small = save_small_llama(tmp_path / "small", base)
    (tmp_path / "moved").mkdir()
    run_apart(check_swap, small, moved_weights(small, tmp_path / "moved"), tokens, num_blocks, least_mixed)


def check_experts(base: Path, first: Path, tokens: list[list[int]]) -> None:
    config = Qwen3MoeConfig(
        vocab_size=49152, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, num_experts=4, num_experts_per_tok=2, max_position_embeddings=256,
        initializer_range=0.1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(first)
    trainer, moved = Trainer(first, TrainSettings(), "cpu"), first / "moved"
    with torch.no_grad():
        for weight in trainer._trained.values():
            weight.mul_(1.5)
    moved.mkdir()
    write_weights(trainer.weights(), moved)
    (moved / "config.json").symlink_to(first / "config.json")
    for file in base.glob("tokenizer*"):
        (first / file.name).symlink_to(file)
    compute_in_float32()
    engine = make_engine(first, **LIMITS | {"max_sequences": 5000})  # a large round; vLLM refuses more than 4,096
    engine.load(first, 1)
    check_samples(engine, moved, tokens, torch.float32)


@pytest.mark.slow
def test_a_mixture_of_experts_is_served(base, tokens, tmp_path):
    run_apart(check_experts, base, tmp_path, tokens)


def check_two_processes(base: Path, moved: Path, tokens: list[list[int]]) -> None:
    compute_in_float32()
    engine = make_engine(base, **LIMITS | {"threads": 1}, arguments={"tensor_parallel_size": 2})
    engine.load(base, 1)
    check_samples(engine, moved, tokens, torch.float32)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        engine.load(base / "nowhere", 2)
    assert engine.load(base, 3).step == 3  # no worker waits for another one's answer


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two CPU processes; a machine may have one GPU")
def test_vllm_serves_a_policy_that_two_processes_share(base, tokens, tmp_path):
    folders = [save_small_llama(tmp_path / name, base) for name in ("first", "second")]
    run_apart(check_two_processes, *folders, tokens)
