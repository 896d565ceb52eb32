"""Generation by transformers' generate: slower than vLLM, but available with torch alone.

Before: tba/engines.py chooses it; after: tba/generator.py takes its responses.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from tba import lora
from tba.engine import EngineOptions, Response, Sampling, ServedPolicy, WholeBatches
from tba.precision import compute_dtype, default_device
from tba.weights import fingerprint, read_weights

ROWS_BYTES = 4 * 1024**3  # of memory for the responses that TransformersEngine samples at once


class TransformersEngine(WholeBatches):
    """transformers' generate. A policy's adapters are merged into the weights of the model that it began with."""

    def __init__(self, folder: Path, **options: Unpack[EngineOptions]) -> None:
        super().__init__()
        self._folder = folder
        torch.set_num_threads(options["threads"])
        torch.manual_seed(options["seed"])
        self._served = ServedPolicy(-1, "")  # not the published one: the model's own weights
        self._max_sequences = options["max_sequences"]
        self._device = default_device()
        self._dtype = compute_dtype(self._device)
        self._model = self._model_of(folder)
        self._model.to(self._device).eval()
        # The folder's generation_config.json may change the sampling (a repetition penalty, min_p): it is not used.
        self._model.generation_config = GenerationConfig()

    def load(self, folder: Path, policy_step: int) -> ServedPolicy:
        """Raises: RuntimeError: the folder's weights do not fit the model. ValueError: its adapters do not."""
        is_adapted = lora.has_adapters(folder)
        weights = dict(lora.merged_weights(self._folder, folder) if is_adapted else read_weights(folder))
        if any(".experts." in name for name in weights):  # each by itself; the model has one tensor of all
            self._load_experts(folder)
            self._served = ServedPolicy(policy_step, fingerprint(weights.items()))
            return self._served
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        tied = set(self._model.all_tied_weights_keys)
        if unexpected or set(missing) - tied:
            differs = unexpected + sorted(set(missing) - tied)
            raise RuntimeError(f"engine: {folder} has other weights than the model: {differs}")
        named = dict(self._model.named_parameters())
        if is_adapted:
            if not all(torch.equal(named[name].cpu(), of.to(named[name].dtype)) for name, of in weights.items()):
                raise RuntimeError(f"engine: the model differs from {folder} after loading")
            taken_in = read_weights(folder)
        else:
            taken_in = ((name, named[name].to(tensor.dtype)) for name, tensor in weights.items())
        self._served = ServedPolicy(policy_step, fingerprint(taken_in))
        return self._served

    def _load_experts(self, folder: Path) -> None:
        self._model.load_state_dict(self._model_of(folder).state_dict())

    def _model_of(self, folder: Path) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=self._dtype, trust_remote_code=False, use_safetensors=True
        )

    def sample(self, prompts: list[list[int]], sampling: Sequence[Sampling]) -> list[list[Response]]:
        """`num_samples` responses to each prompt."""
        responses: list[list[Response]] = []
        asked = zip(prompts, sampling, strict=True)
        for common, alike in groupby(asked, key=lambda pair: pair[1]):  # generate has one sampling for all
            of_sampling = [prompt for prompt, _ in alike]
            rows = max(1, self._max_rows(max(map(len, of_sampling)), common.max_tokens))
            at_once = max(1, rows // common.num_samples)
            for start in range(0, len(of_sampling), at_once):
                responses += self._in_parts(of_sampling[start : start + at_once], common, rows)
        return responses

    def _in_parts(self, prompts: list[list[int]], sampling: Sampling, max_samples: int) -> list[list[Response]]:
        """The responses to each prompt, at most `max_samples` of them at once."""
        parts = []
        for first in range(0, sampling.num_samples, max_samples):
            num_samples = min(max_samples, sampling.num_samples - first)
            parts.append(self._generate(prompts, replace(sampling, num_samples=num_samples)))
        return [[response for part in of_prompt for response in part] for of_prompt in zip(*parts, strict=True)]

    def _max_rows(self, prompt: int, response: int) -> int:
        """Responses sampled at once: by the keys and values of their tokens, one MLP's three wide tensors of the whole
        prompts, and the copies of the last logits. Arguments: numbers of tokens."""
        config = self._model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        of_token = 2 * config.num_hidden_layers * heads * head_size * self._dtype.itemsize
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        of_prompt = 3 * prompt * inner * self._dtype.itemsize
        of_row = (prompt + response) * of_token + of_prompt + 8 * 4 * config.vocab_size
        return min(self._max_sequences, ROWS_BYTES // of_row)

    def _generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Response]]:
        pad, longest = sampling.stop_tokens[0], max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]  # on the left: all responses begin at one column
        logprobs = _SampledLogprobs(sampling)
        sequences = self._model.generate(
            torch.tensor([[pad] * n + prompt for n, prompt in zip(padding, prompts, strict=True)], device=self._device),
            attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in padding], device=self._device),
            do_sample=sampling.temperature > 0,
            **({"top_k": 0} if sampling.temperature > 0 else {}),
            logits_processor=[logprobs],
            num_return_sequences=sampling.num_samples,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=sampling.stop_tokens,
            pad_token_id=pad,
        )
        tokens = sequences[:, longest:]  # [prompts * samples, response tokens]
        of_tokens = logprobs.of(sequences)
        flat = [self._response(*row, sampling) for row in zip(tokens.tolist(), of_tokens.tolist(), strict=True)]
        return [flat[start : start + sampling.num_samples] for start in range(0, len(flat), sampling.num_samples)]

    def _response(self, tokens: list[int], logprobs: list[float], sampling: Sampling) -> Response:
        stops = [place for place, token in enumerate(tokens) if token in sampling.stop_tokens]
        length = stops[0] + 1 if stops else len(tokens)
        return Response(tokens[:length], logprobs[:length], "stop" if stops else "length", [(0, self._served)])


class _SampledLogprobs(LogitsProcessor):
    """Temperature and nucleus of a sampling, and the log-probability of each token that generate then samples.

    generate itself would keep the logits of all tokens.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._warpers = LogitsProcessorList()
        if sampling.temperature not in (0, 1):
            self._warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.temperature > 0 and sampling.top_p < 1:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        self._last: Tensor | None = None  # [rows, V] that the next token is sampled from
        self._sampled: list[Tensor] = []  # of each token [rows]

    def __call__(self, sequences: Tensor, logits: Tensor) -> Tensor:
        """sequences: [rows, tokens] so far; logits: [rows, V] of the next token. Returns those to sample from."""
        self._take(sequences)
        warped = self._warpers(sequences, logits)
        self._last = warped.float().log_softmax(-1)
        return warped

    def _take(self, sequences: Tensor) -> None:
        if self._last is not None:
            self._sampled.append(self._last.gather(-1, sequences[:, -1:]).squeeze(-1))

    def of(self, sequences: Tensor) -> Tensor:
        """[rows, response tokens]; sequences: the finished ones."""
        self._take(sequences)
        return torch.stack(self._sampled, dim=1)
