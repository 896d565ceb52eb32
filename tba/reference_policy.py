"""The reference policy: the model that training started from. The objective keeps the policy near it."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from tba.logprobs import load_policy, response_logprobs
from tba.precision import compute_dtype, default_device, to_bfloat16
from tba.shared_prefix import Group, in_passes

# Tokens of a forward pass. In models of 7 B parameters the widest tensors have some 20,000 numbers a token: 0.16 GB
# each.
PASS_TOKENS = 4096


class ReferencePolicy:
    """Log-probabilities of given responses under the reference policy. The model loads on the first use."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder

    @cached_property
    def _model(self) -> PreTrainedModel:
        """Its matrices are in the type of their products, so they are not cast again in each pass."""
        model, device = load_policy(self._folder), default_device()
        if compute_dtype(device) == torch.bfloat16:
            head = model.get_output_embeddings()  # the embedding, too, which stays float32 as the Trainer's
            for module in model.modules():
                if type(module) is nn.Linear and module is not head:
                    module.weight = nn.Parameter(to_bfloat16(module.weight.detach()), requires_grad=False)
        return model.to(device)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return self._model.config.get_text_config().vocab_size

    def logprobs(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], temperature: float
    ) -> list[list[float]]:
        """Log-probability of each token of each response to the prompt at its index; equal pairs are computed once.

        temperature: the logits are divided by it.
        """
        keys = [(tuple(prompt), tuple(response)) for prompt, response in zip(prompts, responses, strict=True)]
        by_prompt: dict[tuple, list[tuple]] = {}
        for prompt, response in dict.fromkeys(keys):
            by_prompt.setdefault(prompt, []).append(response)
        found = {}
        parts = [
            part for prompt, of_prompt in by_prompt.items() for part in Group(prompt, of_prompt).split(PASS_TOKENS)
        ]
        for groups in in_passes(parts, lambda part: part.num_tokens, PASS_TOKENS):
            with torch.inference_mode():
                scored = response_logprobs(self._model, groups, temperature)
            for group, tensors in zip(groups, scored, strict=True):
                for response, logprobs in zip(group.responses, tensors, strict=True):
                    found[group.prompt, response] = logprobs.clamp(max=0).tolist()  # rounding can leave +1e-8
        return [found[key] for key in keys]
