"""The model under test in red-teaming: answers each attack a few times, by transformers.

Most of a round's time goes here. So keys and values are computed once for the beginning of all attacks (the template),
and once for an attack's answers; query heads share them without copies; an answer that ended is computed no further; a
token is drawn without a sort of the vocabulary.
"""

from functools import cached_property
from itertools import takewhile
from pathlib import Path

from tba.tasks.base import TODAY

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
        text = tokenizer.apply_chat_template(  # with one date: the reward is the same on another day
            messages, tokenize=False, add_generation_prompt=True, strftime_now=TODAY.strftime
        )
        return tokenizer.encode(text, add_special_tokens=False)

    def _generate(self, prompts: list[list[int]], num_answers: int) -> list[list[int]]:
        """The tokens of `num_answers` answers to each of P prompts, one prompt's after the other's."""
        import torch
        from transformers import DynamicCache

        tokenizer, model = self._loaded
        cache = DynamicCache(config=model.config)

        def next_logits(ids, mask):  # ids: [N, L], mask: [N, cached + L] -> [N, V]
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            computed = model(
                input_ids=ids, attention_mask=mask, position_ids=positions,
                past_key_values=cache, use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            return computed.logits[:, -1]

        ends = torch.tensor(_end_tokens(tokenizer, model), dtype=torch.long, device=model.device)
        answers: list[list[int]] = [[] for _ in range(len(prompts) * num_answers)]
        unfinished = torch.arange(len(answers), device=model.device)  # [N]
        with torch.inference_mode():
            prefix, ids, mask = self._padded(prompts)
            if prefix.numel():
                next_logits(prefix, torch.ones_like(prefix))
                cache.batch_repeat_interleave(len(prompts))
            logits = next_logits(ids, mask).repeat_interleave(num_answers, 0)  # [N, V]
            cache.batch_repeat_interleave(num_answers)
            mask = mask.repeat_interleave(num_answers, 0)
            while True:
                tokens = draw(logits)  # [N]
                for answer, token in zip(unfinished.tolist(), tokens.tolist(), strict=True):
                    answers[answer].append(token)
                going = (~torch.isin(tokens, ends)).nonzero()[:, 0]
                if not len(going) or len(answers[unfinished[going[0]]]) == MAX_ANSWER_TOKENS:
                    return answers
                if len(going) < len(tokens):
                    unfinished, tokens, mask = unfinished[going], tokens[going], mask[going]
                    cache.batch_select_indices(going)
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
                logits = next_logits(tokens[:, None], mask)

    def _padded(self, prompts: list[list[int]]):
        """The tokens that all P prompts begin with; the others', with padding on the left; the mask of both.

        [1, L], [P, longest], [P, L + longest]
        """
        import torch

        _, model = self._loaded
        columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)  # a token of each prompt remains
        prefix = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
        rest = [prompt[len(prefix) :] for prompt in prompts]
        padding = [max(map(len, rest)) - len(tokens) for tokens in rest]  # so all answers begin at one column
        ids = [[0] * n + tokens for n, tokens in zip(padding, rest, strict=True)]  # masked, so any token
        mask = [[1] * len(prefix) + [0] * n + [1] * len(tokens) for n, tokens in zip(padding, rest, strict=True)]
        return (torch.tensor(values, device=model.device) for values in ([prefix], ids, mask))

    @cached_property
    def _loaded(self):
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        from tba.precision import compute_dtype, default_device

        device = default_device()
        tokenizer = AutoTokenizer.from_pretrained(self._model, trust_remote_code=False)
        loads = {"dtype": compute_dtype(device), "use_safetensors": True, "trust_remote_code": False}
        model = AutoModelForCausalLM.from_pretrained(self._model, **loads)
        # On a GPU the fast kernels with shared heads take no mask.
        if device == "cpu" and model.config._attn_implementation == "sdpa":
            AttentionInterface.register("grouped", grouped_attention)
            AttentionMaskInterface.register("grouped", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
            model.set_attn_implementation("grouped")
        return tokenizer, model.to(device).eval()


def _end_tokens(tokenizer, model) -> list[int]:
    """The tokens that end an answer: the tokenizer's end of sequence, and the model's, as of a turn in a chat."""
    of_model = model.generation_config.eos_token_id
    found = [tokenizer.eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])]
    return sorted({token for token in found if token is not None})


def draw(logits):
    """Draws each row's token by TEMPERATURE and TOP_P; transformers would sort the vocabulary. [N, V] -> [N]"""
    probabilities = logits.float().div(TEMPERATURE).softmax(-1)
    top, tokens = probabilities.topk(min(CANDIDATES, logits.shape[-1]))  # [N, CANDIDATES], falling
    if (top.sum(-1) < TOP_P).any():
        top, tokens = probabilities.sort(descending=True)
    more_probable = top.cumsum(-1) - top
    chosen = (top * (more_probable < TOP_P)).multinomial(1)  # [N, 1]
    return tokens.gather(-1, chosen)[:, 0]


def grouped_attention(_, query, key, value, attention_mask, scaling=None, **__):
    """PyTorch's fused attention, whose query heads share keys and values. transformers' own copies them for each head.

    query: [N, heads, L, D], key and value: [N, shared heads, cached + L, D], attention_mask: [N, 1, L, cached + L] or
    None: causal. Returns [N, L, heads, D].
    """
    from torch.nn.functional import scaled_dot_product_attention

    n, heads, length, d = query.shape
    if length == 1:  # heads that share keys become queries of one head, so that the keys are read once for them
        query = query.reshape(n, key.shape[1], -1, d)
    is_causal = attention_mask is None and length > 1
    attended = scaled_dot_product_attention(
        query, key, value, attention_mask, scale=scaling, is_causal=is_causal, enable_gqa=True
    )
    return attended.reshape(n, heads, length, -1).transpose(1, 2).contiguous(), None
