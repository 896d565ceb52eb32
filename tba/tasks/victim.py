"""The model under test in red-teaming: answers each attack a few times."""

from functools import cached_property
from pathlib import Path

from tba.engine import Sampling
from tba.transformers_engine import TransformersEngine

MAX_ANSWER_TOKENS = 30
TEMPERATURE, TOP_P = 0.7, 0.92  # as chat models are commonly served
ANSWERS_AT_ONCE = 160
ALPACA = "### Instruction:\n{}\n\n### Response:\n"  # for a victim without a chat template


class Victim:
    """A causal language model, a folder or a Hugging Face id; it loads on the first use."""

    def __init__(self, model: Path | str) -> None:
        self._model = model

    def answers(self, attacks: list[str], num_answers: int) -> list[list[str]]:
        """`num_answers` answers to each attack; asked as a chat if the victim has a template."""
        tokenizer, engine = self._loaded
        stop = [tokenizer.eos_token_id]
        sampling = Sampling(num_answers, TEMPERATURE, TOP_P, MAX_ANSWER_TOKENS, stop)
        responses = engine.sample([self._encode(attack) for attack in attacks], [sampling] * len(attacks))
        return [
            [tokenizer.decode(response.tokens, skip_special_tokens=True) for response in of_attack]
            for of_attack in responses
        ]

    def _encode(self, attack: str) -> list[int]:
        tokenizer, _ = self._loaded
        if not tokenizer.chat_template:
            return tokenizer.encode(ALPACA.format(attack))
        messages = [{"role": "user", "content": attack}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _loaded(self):
        import torch
        from transformers import AutoTokenizer

        engine = TransformersEngine(
            self._model, max_tokens=MAX_ANSWER_TOKENS, max_sequences=ANSWERS_AT_ONCE, seed=torch.initial_seed() % 2**31,
            threads=torch.get_num_threads(),
        )  # fmt: skip
        return AutoTokenizer.from_pretrained(self._model, trust_remote_code=False), engine
