"""Log-probabilities with a shared prompt equal those of one response at a time.

- Values and gradients equal a plain forward pass a response, for five architectures, any lengths.
- What all prompts begin with is computed once.
- The same in bfloat16, within its rounding, and with gradient checkpointing.
- Chunks of logits change nothing, values nor gradients.
- Models whose attention or logits are of another kind are refused, by name.
- Empty prompts or responses are refused.

python -m pytest tests/tba/test_logprobs.py
"""

import functools
import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DogeConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MiniCPM3Config,
    MistralConfig,
    ModernBertDecoderConfig,
    Qwen2Config,
    RecurrentGemmaConfig,
)

from tba import logprobs, product_attention, shared_prefix
from tba.logprobs import Group, check_supported, load_policy, response_logprobs, sequence_logprobs
from tba.model_files import context_length, with_window
from tba.product_attention import Places, ProductAttention
from tests.tba.small_models import CONFIGS, SHAPE, SPECIAL, TEMPERATURE, TREE, model_of

STOP = 96
# Responses of one token, prompts of one token, uneven lengths, a response twice, one response alone, responses that
# stop and responses that are cut off, one of them where another stops.
GROUPS = [
    Group([5, 6, 7], [[1, 2, 3], [4], [9, 8, 7, 6, 5], [4]]),
    Group([3], [[2], [1]]),
    Group([1, 2], [[5, 4], [3]]),
    Group([11, 12, 13, 14], [[15, 16]]),
    Group([9, 3], [[5, 4, STOP], [5, 4], [STOP], [5, 4, 2, 6]]),
]


pytestmark = pytest.mark.usefixtures("rms_norms_in_float64")


def plain_logprobs(model, groups) -> list[torch.Tensor]:
    """One forward pass a response, whole logits: slower and obvious."""
    result = []
    for group in groups:
        for response in group.responses:
            logits = model(torch.tensor([[*group.prompt, *response]])).logits[0]
            logprobs = (logits / TEMPERATURE).log_softmax(-1)
            first = len(group.prompt) - 1
            result.append(torch.stack([logprobs[first + place, token] for place, token in enumerate(response)]))
    return result


def gradients(model, logprobs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    # Weighted by place, so that mixed-up tokens or responses show.
    total = sum((n + 1) * (tokens * torch.arange(1, len(tokens) + 1)).sum() for n, tokens in enumerate(logprobs))
    model.zero_grad()
    total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# All prompts begin alike, and one is the beginning of another.
ALIKE = [
    Group([7, 8, 9, 5], [[1, 2, 3], [4]]),
    Group([7, 8, 9], [[6, 1], [2, 2]]),
    Group([7, 8, 9, 5, 6, 1], [[3], [1, 1, 1]]),
]


# Lengths that attend in several calls; a long response begins like a short one.
UNEVEN = [Group([5, 6], [[3, 1] * 6, [1, 2, 3], [4, 1], [1, 2, 3, 9, 8, 7, 6, 5, 4, 3, 2], [2] * 5])]


def test_responses_of_unlike_lengths_are_not_padded_to_the_longest(monkeypatch):
    monkeypatch.setattr(shared_prefix, "MORE_TOKENS", 1)
    lengths = [2, 3, 4, 40, 50, 300]
    groups = [Group([5, 6], [[number, *range(1, length)] for number, length in enumerate(lengths)])]
    _, (calls, _) = shared_prefix.pack(groups, torch.device("cpu")).layout.pieces
    assert [list(call.rows.shape) for call in calls] == [[2, 2], [1, 3], [2, 49], [1, 299]]


def test_what_responses_begin_with_alike_is_computed_once():
    model, computed = model_of("llama", "tba_shared_prefix"), []
    model.get_input_embeddings().register_forward_hook(lambda _, arguments, __: computed.append(arguments[0].numel()))
    response_logprobs(model, TREE, TEMPERATURE)
    # [5], common; [6], then 1 2 3 9 and 7 2, and [7], then 1 2: a response's last token is never computed.
    assert computed == [1 + (1 + 6) + (1 + 2)]


@pytest.mark.parametrize(
    "groups", [GROUPS, ALIKE, TREE, UNEVEN], ids=["unlike", "prompts alike", "responses alike", "uneven"]
)
@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize(
    ("together", "max_scores", "scores"),
    [(0, 1 << 23, 1 << 20), (0, 1 << 23, 0), (0, 0, 0), (9, 1 << 23, 1 << 20), (256, 0, 0)],
    ids=["groups apart", "responses one by one", "groups apart, fused", "some together", "all together"],
)
def test_values_and_gradients_equal_one_response_at_a_time(
    architecture, groups, together, max_scores, scores, monkeypatch
):
    monkeypatch.setattr(shared_prefix, "WHOLE_TOKENS", together)
    monkeypatch.setattr(shared_prefix, "MAX_SCORES", max_scores)
    monkeypatch.setattr(product_attention, "SCORES", scores)
    monkeypatch.setattr(shared_prefix, "MORE_TOKENS", 1)
    slow, fast = model_of(architecture, "sdpa"), model_of(architecture, "tba_shared_prefix")
    expected = plain_logprobs(slow, groups)
    got = [tokens for of_group in response_logprobs(fast, groups, TEMPERATURE) for tokens in of_group]
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    expected_gradients = gradients(slow, expected)
    for name, gradient in gradients(fast, got).items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
        )


def as_on_a_gpu(monkeypatch) -> None:
    """Attention with masks in the form that flash attention takes, which a CPU's attention turns into tensors."""
    monkeypatch.setattr(shared_prefix, "WHOLE_TOKENS", 0)
    monkeypatch.setattr(shared_prefix, "MAX_SCORES", 0)
    on_gpu = functools.partial(shared_prefix._causal_behind, device=torch.device("cuda"))
    monkeypatch.setattr(shared_prefix, "_causal_behind", lambda num_before, num, device: on_gpu(num_before, num))


def test_masks_in_the_form_of_flash_attention_change_nothing(monkeypatch):
    model = model_of("llama", "tba_shared_prefix")
    expected = [t for of_group in response_logprobs(model, GROUPS, TEMPERATURE) for t in of_group]
    as_on_a_gpu(monkeypatch)
    got = [t for of_group in response_logprobs(model, GROUPS, TEMPERATURE) for t in of_group]
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_in_bfloat16_they_agree_within_its_rounding(architecture, monkeypatch):
    """bfloat16 keeps 8 bits, 0.4 %: the gradients' directions agree, in all and to a percent in size."""
    monkeypatch.setattr("tba.logprobs.compute_dtype", lambda device: torch.bfloat16)  # on any CPU
    exact, rounded = model_of(architecture, "tba_shared_prefix"), model_of(architecture, "tba_shared_prefix").float()

    def flat(model) -> torch.Tensor:
        got = [tokens for of_group in response_logprobs(model, GROUPS, TEMPERATURE) for tokens in of_group]
        return torch.cat([gradient.flatten().double() for gradient in gradients(model, got).values()])

    one, other = flat(exact), flat(rounded)
    assert torch.cosine_similarity(one, other, dim=0) > 0.999
    assert other.norm() == pytest.approx(one.norm().item(), rel=0.02)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["on a CPU", "as on a GPU"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_gradient_checkpointing_changes_nothing(architecture, on_gpu, tmp_path, monkeypatch):
    model_of(architecture, "sdpa").save_pretrained(tmp_path)
    if on_gpu:
        as_on_a_gpu(monkeypatch)

    def result(checkpointing: str) -> dict[str, torch.Tensor]:
        model = load_policy(tmp_path, torch.float64, checkpointing)
        assert model.is_gradient_checkpointing is (checkpointing != "none")
        logprobs = [t for of_group in response_logprobs(model, GROUPS, TEMPERATURE) for t in of_group]
        return gradients(model, logprobs)

    expected = result("none")
    for checkpointing in ("cheap", "layers"):
        for name, gradient in result(checkpointing).items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)


def test_pickled_weights_are_not_read(tmp_path, monkeypatch):
    model = model_of("llama", "sdpa")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(OSError, match="safetensors"):
        load_policy(tmp_path)


def test_a_sliding_window_shorter_than_the_sequence_is_refused():
    config = MistralConfig(**SHAPE, **SPECIAL, num_key_value_heads=2, sliding_window=6)
    model = AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("tba_shared_prefix")
    response_logprobs(model, [Group([1, 2, 3], [[4, 5, 6, 7], [8]])], TEMPERATURE)  # 6 positions
    with pytest.raises(ValueError, match="8 tokens, and this model's sliding window is 6"):
        response_logprobs(model, [Group([1, 2, 3], [[4, 5, 6, 7, 8], [8]])], TEMPERATURE)


def test_a_window_is_the_one_that_transformers_takes(tmp_path):
    """A file may leave out the kinds of layers, or name a window that is off."""
    for config, limit in [
        (MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=6, max_position_embeddings=64), 7),
        (Qwen2Config(**SHAPE, num_key_value_heads=2, sliding_window=6, max_position_embeddings=64), 64),
    ]:
        named = config.to_dict() | {"sliding_window": 6}
        named.pop("layer_types", None)
        (tmp_path / "config.json").write_text(json.dumps(named))
        assert context_length(with_window(tmp_path)) == limit


def test_values_may_be_narrower_than_queries():
    """As those of multi-head latent attention."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3 * 5, 4, 8), torch.randn(3 * 5, 2, 8), torch.randn(3 * 5, 2, 6)  # [K' R, heads, D or E]
    prompt_k, prompt_v = torch.randn(2, 2, 8), torch.randn(2, 2, 6)
    rows, may_attend = torch.arange(15).view(3, 5), torch.ones(5, 7, dtype=torch.bool).tril(2)
    places = Places(rows, new=torch.arange(15), again=torch.arange(0), may_attend=may_attend)
    got = ProductAttention.apply(q * 8**-0.5, k, v, prompt_k, prompt_v, places)
    k, v = (torch.cat([p.expand(3, -1, -1, -1), x[rows]], 1) for p, x in ((prompt_k, k), (prompt_v, v)))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in (q[rows], k, v)), attn_mask=may_attend, enable_gqa=True
    )
    torch.testing.assert_close(got, wanted.transpose(1, 2).flatten(0, 1))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(**SHAPE, **SPECIAL, num_key_value_heads=2, head_dim=8), "attn_logit_softcapping is 50"),
        (CohereConfig(**SHAPE, **SPECIAL), "logit_scale is 0.0625"),
        (GraniteConfig(**SHAPE, **SPECIAL, logits_scaling=8.0), "logits_scaling is 8"),
        (RecurrentGemmaConfig(**SHAPE, **SPECIAL, num_key_value_heads=1, lru_width=32), "logits_soft_cap is 30"),
        (MiniCPM3Config(**SHAPE, **SPECIAL, dim_model_base=8), "logits_scaling is "),
        (ModernBertDecoderConfig(**SHAPE, pad_token_id=0), "layers between its last hidden state and its output layer"),
    ],
    ids=["gemma2", "cohere", "granite", "recurrent_gemma", "minicpm3", "modernbert"],
)
def test_models_whose_logits_are_not_the_output_layers_are_refused(config, reason):
    with pytest.raises(ValueError, match=reason):
        check_supported(AutoModelForCausalLM.from_config(config))


def test_a_model_that_masks_attention_itself_is_refused():
    config = DogeConfig(**SHAPE, **SPECIAL, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("tba_shared_prefix")
    with pytest.raises(ValueError, match="a mask of the model's own"):
        response_logprobs(model, [Group([1, 2, 3], [[4, 5], [8]])], TEMPERATURE)


def test_what_prompts_begin_with_is_computed_once():
    # Three tokens are common, but each prompt keeps its last: two are shared.
    packed = [7, 8, *[9, 5, 1, 2], *[9, 6, 2], *[9, 5, 6, 1, 1, 1]]
    assert shared_prefix.pack(ALIKE, torch.device("cpu")).input_ids.tolist() == [packed]


@pytest.mark.parametrize("kept_rows", [0, 5, 1000], ids=["none kept", "a chunk kept", "all kept"])
def test_logits_in_chunks_give_the_same(kept_rows, monkeypatch):
    model = model_of("llama", "tba_shared_prefix")
    whole = sequence_logprobs(model, GROUPS, TEMPERATURE)
    expected = gradients(model, whole)
    monkeypatch.setattr(logprobs, "LOGIT_ROWS", 3)
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", kept_rows * 97 * 8)  # of float64
    in_chunks = sequence_logprobs(model, GROUPS, TEMPERATURE)
    for one, other in zip(whole, in_chunks, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for name, gradient in gradients(model, in_chunks).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "gpt2", "llama, tied, with padding"])
def test_the_output_layers_gradient_is_added_to_the_one_given(architecture, monkeypatch):
    tied = {"pad_token_id": 5, "tie_word_embeddings": True}  # 5 is in prompts and responses
    monkeypatch.setitem(CONFIGS, "llama, tied, with padding", LlamaConfig(**SHAPE, **SPECIAL | tied))
    model = model_of(architecture, "tba_shared_prefix")
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (
        architecture in ("gpt2", "llama, tied, with padding")
    )
    expected = gradients(model, sequence_logprobs(model, GROUPS, TEMPERATURE))
    weight = model.get_output_embeddings().weight
    weight.grad = torch.ones_like(weight)
    before = weight.grad
    scored = sequence_logprobs(model, GROUPS, TEMPERATURE, weight.grad)
    sum((n + 1) * (tokens * torch.arange(1, len(tokens) + 1)).sum() for n, tokens in enumerate(scored)).backward()
    of_weight = next(gradient for name, gradient in expected.items() if model.get_parameter(name) is weight)
    torch.testing.assert_close(weight.grad, of_weight + 1, rtol=0, atol=1e-12)
    assert weight.grad is before  # not a sum with a second one


@pytest.mark.parametrize("group", [Group([], [[1]]), Group([1], [[]])])
def test_empty_prompts_and_responses_are_refused(group):
    with pytest.raises(ValueError, match="at least one token"):
        response_logprobs(model_of("gpt2", "tba_shared_prefix"), [group], TEMPERATURE)
