"""MOP (most on-policy; TBA, arXiv 2503.18929, section 4) draws a batch's prompts and responses.

storage/sql/list_prompts.sql and list_candidates.sql list the candidates. These functions are pure; their random numbers
are a hash. B prompts a batch, K responses a prompt.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

# Difference of successive states of splitmix64. Copies of a response have successive states; the first has its key.
SPLITMIX64_STRIDE = np.uint64(0x9E3779B97F4A7C15)


class SamplingSettings(BaseModel):
    """How batches are drawn: MOP, from recent and older trajectories (TBA, arXiv 2503.18929, section 4)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts_per_batch: int = Field(16, ge=1, description="B: prompts in a batch.")
    responses_per_prompt: int = Field(8, ge=2, description="K: responses drawn for a prompt; the loss compares them.")
    recent_probability: float = Field(
        0.75, ge=0, le=1, description="m: probability that a prompt of a batch is drawn from the newest sync."
    )
    differing_rewards_first: bool = Field(
        True,
        description="Whether prompts whose rewards differ are drawn before others; for recent draws, rewards of the "
        "newest sync count.",
    )
    reward_temperature: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="tau: replayed responses (not recent ones) have weights softmax(reward / tau); None: equal "
        "weights.",
    )
    uniform_fraction: float = Field(
        0.0, ge=0, le=1, description="Share of the uniform distribution in the weights by reward_temperature."
    )
    capacity_per_prompt: int = Field(
        100, ge=2, description="Newest distinct responses to a prompt that the buffer keeps."
    )
    min_size: int = Field(192, ge=1, description="Trajectories to take in before the first batch, repeats included.")
    samples_per_insert: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Largest mean number of draws of a trajectory; None: unlimited."
    )
    max_age: int | None = Field(
        None, ge=0, description="Largest age of a drawn trajectory, in policy steps; None: unlimited."
    )

    @model_validator(mode="after")
    def _capacity_holds_a_draw(self) -> "SamplingSettings":
        if self.capacity_per_prompt < self.responses_per_prompt:
            raise ValueError(
                f"sampling.capacity_per_prompt={self.capacity_per_prompt} must be at least sampling."
                f"responses_per_prompt={self.responses_per_prompt}: otherwise no prompt has enough responses; raise it"
            )
        return self


def uniform_numbers(keys: np.ndarray, seed: int, step: int, purpose: str) -> np.ndarray:
    """Numbers in (0, 1), one for each uint64 key: splitmix64 (Steele et al. 2014) of key ^ md5("seed/step/purpose")."""
    digest = hashlib.md5(f"{seed}/{step}/{purpose}".encode(), usedforsecurity=False).digest()
    mixed = keys ^ np.uint64(int.from_bytes(digest[:8], "little"))
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed ^= mixed >> 31
    return ((mixed >> 12) + 0.5) / 2**52


@dataclass(frozen=True)
class Prompts:
    """The prompts that a step may draw, in any order: [n] each."""

    keys: np.ndarray
    recent: np.ndarray  # whether the newest sync brought it responses
    preferred: np.ndarray  # whether places that draw from all prompts take it before the others
    recent_preferred: np.ndarray  # whether recent places do


def choose_prompts(
    prompts: Prompts, num_places: int, recent_probability: float, seed: int, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """The prompt of each place, and whether the place is recent (with probability m). Both [B].

    Returns indices into `prompts`. Recent places take recent prompts, other places any prompts: first those that are
    `recent_preferred` or `preferred`, then the rest, each in random order. Prompts differ if there are enough of them;
    otherwise they are taken in turn. Other places take the prompts of recent places last.
    """
    places = np.arange(num_places, dtype=np.uint64)
    is_recent = prompts.recent.any() & (uniform_numbers(places, seed, step, "recent") < recent_probability)
    pool, num_recent = np.flatnonzero(prompts.recent), is_recent.sum()
    recents = pool[
        _lowest(_ranks(prompts.keys[pool], prompts.recent_preferred[pool], seed, step, "recent prompt"), num_recent)
    ]
    ranks = _ranks(prompts.keys, prompts.preferred, seed, step, "prompt")
    others = _lowest(ranks, num_places)  # enough, even if all prompts of recent places are among them
    others = others[np.argsort(np.isin(others, recents), kind="stable")]
    chosen = np.empty(num_places, np.int64)
    chosen[is_recent] = np.resize(recents, num_recent)
    chosen[~is_recent] = np.resize(others[: num_places - num_recent], num_places - num_recent)
    return chosen, is_recent


def _ranks(keys: np.ndarray, preferred: np.ndarray, seed: int, step: int, purpose: str) -> np.ndarray:
    """Random numbers of these keys: in (0, 1) if `preferred`, else in (1, 2)."""
    return uniform_numbers(keys, seed, step, purpose) + ~preferred.astype(bool)


@dataclass(frozen=True)
class Candidates:
    """The responses that one place may draw, in any order: [n] each."""

    keys: np.ndarray
    log_weights: np.ndarray
    num_copies: np.ndarray


def draw_responses(
    candidates: Candidates, num_slots: int, uniform_fraction: float, seed: int, step: int, place: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws one place's K responses. Returns, for each slot, the index and the probability of being drawn first: [K]
    each.

    The draw is among samples, as if the buffer had kept every copy of a response: without replacement if there are K
    samples, otherwise all samples in turn. So a response's share is proportional to the number of its copies. A draw
    without replacement takes the lowest -ln(u) / p (exponential race, or Gumbel-top-k). If p underflows to 0, higher
    weights come first.
    """
    keys, log_weights, num_copies = candidates.keys, candidates.log_weights, candidates.num_copies
    response = np.repeat(np.arange(len(keys)), num_copies)  # of each sample
    first = np.cumsum(num_copies) - num_copies  # of each response, its first sample
    copy = (np.arange(len(response)) - first[response]).astype(np.uint64)
    numbers = uniform_numbers(keys[response] + copy * SPLITMIX64_STRIDE, seed, step, f"response/{place}")
    order = np.argsort(numbers)  # the same sums, to the bit, for any order of the candidates
    response = response[order]
    weights = np.exp(log_weights[response] - log_weights.max())
    p = (1 - uniform_fraction) * weights / weights.sum() + uniform_fraction / len(weights)
    with np.errstate(divide="ignore"):
        arrival = -np.log(numbers[order]) / p
    drawn = np.resize(np.lexsort((-log_weights[response], arrival)), num_slots)
    return response[drawn], (num_copies[response] * p)[drawn]


def _lowest(numbers: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` lowest numbers, lowest first; of all if there are fewer."""
    lowest = np.argpartition(numbers, count)[:count] if count < len(numbers) else np.arange(len(numbers))
    return lowest[np.argsort(numbers[lowest])]
