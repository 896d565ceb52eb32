"""The input of a training step: a batch of draws.

Dimensions: B prompts, K responses drawn for a prompt, U <= K distinct ones among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from tba.shared_prefix import Group, in_passes

Metrics: TypeAlias = dict[str, float | None]  # columns of the training ledger; None: not measured


@dataclass(frozen=True)
class Draw:
    """One prompt of a batch and the K responses drawn for it, of which U are distinct."""

    group: Group  # the prompt and the U distinct responses
    slot: list[int]  # [K] which of the distinct responses each slot holds
    reward: list[float]  # [K]
    behavior_logprobs: list[list[float]]  # [U][tokens] by the distribution that the response was drawn from
    reference_logprobs: list[list[float]]  # [U][tokens] by the reference policy
    is_of_newest_policy: list[bool]  # [U] whether the newest policy of the batch sampled it


@dataclass(frozen=True)
class Batch:
    """The draws of one step, with their metrics and their record for the ledger."""

    draws: list[Draw]
    facts: Metrics  # metrics of buffer and draw: staleness, rate of draws, the newest sync
    record: pa.Table  # the batch in the replay buffer's form, which the ledger receives unchanged


def passes(draws: Sequence[Draw], max_tokens: int) -> tuple[list[list[Draw]], list[tuple[Draw, list[Group]]]]:
    """Micro-batches of whole prompts; and, split into parts, prompts whose responses exceed `max_tokens`."""
    whole, split = [], []
    for micro_batch in in_passes(draws, lambda draw: draw.group.num_tokens, max_tokens):
        parts = micro_batch[0].group.split(max_tokens)
        if len(micro_batch) == 1 and len(parts) > 1:
            split.append((micro_batch[0], parts))
        else:
            whole.append(micro_batch)
    return whole, split
