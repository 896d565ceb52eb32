"""The model under test in red-teaming.

- Each of several answers to attacks of uneven length is the one that transformers gives to that attack alone, also
  where the prompts begin alike and the answers end after different numbers of tokens.
- Tokens are drawn as transformers' warpers of temperature and top-p draw them, also from a flat distribution.

python -m pytest tests/tba/tasks/test_victim.py
"""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from tba.tasks import victim
from tba.tasks.victim import MAX_ANSWER_TOKENS, TEMPERATURE, TOP_P, Victim, draw
from tests.character_model import save_character_model

TEMPLATE = "{{% for message in messages %}}{}{{{{ message['content'] }}}}={{% endfor %}}"


ATTACKS = ["12 + 34", "5", "7 + 86 + 901", "1", "44", "9 + 9"]


@pytest.mark.parametrize(
    ("begin", "end_of_turn"),
    [("", False), ("12 + ", False), ("", True)],
    ids=["nothing in common", "one beginning", "a turn's end of the model's own"],
)
def test_answers_are_those_to_each_attack_alone(begin, end_of_turn, tmp_path, monkeypatch):
    folder = save_character_model(
        tmp_path, chat_template=TEMPLATE.format(begin), initializer_range=0.5, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data[tokenizer.eos_token_id] *= 2  # so answers end after different numbers of tokens
    if end_of_turn:  # a token that the model gives within its answers
        prompts = [tokenizer(f"{attack}=", return_tensors="pt").input_ids for attack in ATTACKS]
        greedy = {"do_sample": False, "max_new_tokens": MAX_ANSWER_TOKENS, "pad_token_id": 1}
        answers = [model.generate(prompt, **greedy)[0, prompt.shape[1] :].tolist() for prompt in prompts]
        *longest, _ = max(answers, key=len)
        model.generation_config.eos_token_id = [
            tokenizer.eos_token_id,
            max(longest, key=longest.index),
        ]  # it comes late
    model.save_pretrained(folder)
    monkeypatch.setattr("tba.precision.compute_dtype", lambda device: torch.float32)
    monkeypatch.setattr(victim, "TOP_P", 1e-6)  # the most probable token alone
    monkeypatch.setattr(victim, "ANSWERS_AT_ONCE", 8)  # so the attacks come in two batches
    alone = []
    for attack in ATTACKS:
        prompt = tokenizer(f"{begin}{attack}=", return_tensors="pt").input_ids
        answer = model.generate(prompt, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS, pad_token_id=1)
        alone.append(tokenizer.decode(answer[0, prompt.shape[1] :], skip_special_tokens=True))
    assert len({len(answer) for answer in alone}) > 3
    assert Victim(folder).answers(ATTACKS, 2) == [[answer, answer] for answer in alone]


@pytest.mark.parametrize("scale", [4.0, 0.1], ids=["peaked", "flat"])
def test_tokens_are_drawn_as_transformers_draws_them(scale):
    torch.manual_seed(0)
    vocabulary, num_rows = 2048, 20_000
    logits = scale * torch.randn(1, vocabulary)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopPLogitsWarper(TOP_P)])
    expected = warpers(None, logits).softmax(-1)[0]
    tokens = torch.cat([draw(logits.expand(2000, -1)) for _ in range(num_rows // 2000)])
    found = tokens.bincount(minlength=vocabulary) / num_rows
    assert (found[expected == 0] == 0).all()
    assert (found - expected).abs().max() < 5 * (expected.max() / num_rows).sqrt()  # five standard errors
    drawn = 1 - (1 - expected) ** num_rows  # probability that a token is drawn at all
    assert ((found > 0).sum() - drawn.sum()).abs() < 5 * (drawn * (1 - drawn)).sum().sqrt() + 1
