"""The model under test in red-teaming: answers each attack a few times, by transformers.

Most of a round's time goes here. So an attack's keys and values are computed once for all its answers, a token is drawn
without a sort of the vocabulary, and no log-probability is kept.
"""

from functools import cached_property
from pathlib import Path

MAX_ANSWER_TOKENS = 30
TEMPERATURE, TOP_P = 0.7, 0.92  # as chat models are commonly served
ANSWERS_AT_ONCE = 160
CANDIDATES = 1024  # most probable tokens, which usually have more than TOP_P of the probability
ALPACA = "### Instruction:\n{}\n\n### Response:\n"  # for a victim without a chat template


class Victim:
    """A causal language model, a folder or a Hugging Face id; it loads on the first use."""

    def __init__(self, model: Path | str) -> None:
        self._model = model

    def answers(self, attacks: list[str], num_answers: int) -> list[list[str]]:
        """`num_answers` answers to each attack; asked as a chat if the victim has a template."""
        tokenizer, _ = self._loaded
        prompts, tokens = [self._encode(attack) for attack in attacks], []
        at_once = max(1, ANSWERS_AT_ONCE // num_answers)
        for start in range(0, len(prompts), at_once):
            tokens += self._generate(prompts[start : start + at_once], num_answers)
        texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in tokens]
        return [texts[start : start + num_answers] for start in range(0, len(texts), num_answers)]

    def _encode(self, attack: str) -> list[int]:
        tokenizer, _ = self._loaded
        if not tokenizer.chat_template:
            return tokenizer.encode(ALPACA.format(attack))
        messages = [{"role": "user", "content": attack}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    def _generate(self, prompts: list[list[int]], num_answers: int) -> list[list[int]]:
        """The tokens of `num_answers` answers to each of P prompts, one prompt's after the other's."""
        import torch
        from transformers import DynamicCache, LogitsProcessorList

        tokenizer, model = self._loaded
        longest, eos = max(map(len, prompts)), tokenizer.eos_token_id
        padding = [longest - len(prompt) for prompt in prompts]  # on the left: all answers begin at one column
        padded = [[eos] * n + prompt for n, prompt in zip(padding, prompts, strict=True)]
        ids = torch.tensor(padded, device=model.device)  # [P, longest]
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding], device=model.device)
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            if longest > 1:  # generate computes the last token
                model(
                    input_ids=ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache, use_cache=True,
                    position_ids=(mask[:, :-1].cumsum(1) - 1).clamp(min=0), logits_to_keep=1,
                )  # fmt: skip
                cache.batch_repeat_interleave(num_answers)
            sequences = model.generate(
                ids.repeat_interleave(num_answers, 0),
                attention_mask=mask.repeat_interleave(num_answers, 0),
                past_key_values=cache,
                logits_processor=LogitsProcessorList([draw]),
                do_sample=False,
                max_new_tokens=MAX_ANSWER_TOKENS,
                eos_token_id=eos,
                pad_token_id=eos,
            )  # [P * num_answers, longest + MAX_ANSWER_TOKENS at most]
        return sequences[:, longest:].tolist()

    @cached_property
    def _loaded(self):
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        from tba.precision import compute_dtype, default_device

        device = default_device()
        tokenizer = AutoTokenizer.from_pretrained(self._model, trust_remote_code=False)
        # For one token of each answer, a CPU's fused attention takes several times as long as products of matrices.
        attention = "eager" if device == "cpu" else None
        loads = {"dtype": compute_dtype(device), "use_safetensors": True, "trust_remote_code": False}
        model = AutoModelForCausalLM.from_pretrained(self._model, attn_implementation=attention, **loads)
        # The folder's generation_config.json may change the sampling (a repetition penalty, min_p): it is not used.
        model.generation_config = GenerationConfig()
        return tokenizer, model.to(device).eval()


def draw(_, logits):
    """Draws each row's token by TEMPERATURE and TOP_P; its score is 0, of all others -inf. logits: [N, V]

    A logits processor of transformers, whose own sampling sorts the vocabulary for each token: a quarter of the time.
    """
    import torch

    probabilities = logits.float().div(TEMPERATURE).softmax(-1)
    top, tokens = probabilities.topk(min(CANDIDATES, logits.shape[-1]))  # [N, CANDIDATES], falling
    if (top.sum(-1) < TOP_P).any():
        top, tokens = probabilities.sort(descending=True)
    more_probable = top.cumsum(-1) - top
    chosen = (top * (more_probable < TOP_P)).multinomial(1)  # [N, 1]
    return torch.full_like(logits, -torch.inf).scatter_(-1, tokens.gather(-1, chosen), 0.0)
