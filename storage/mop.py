"""MOP: mixing recent and older trajectories (TBA, arXiv 2503.18929, section 4). What a training step draws, given what
it may draw (storage/sql/list_prompts.sql, list_candidates.sql): pure functions, their random numbers a hash.

B prompts a batch, K responses a prompt.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

# From one state of splitmix64 to the next: copies of a response have successive states, the first one its key.
SPLITMIX64_STRIDE = np.uint64(0x9E3779B97F4A7C15)


def uniform_numbers(keys: np.ndarray, seed: int, step: int, purpose: str) -> np.ndarray:
    """In (0, 1), one for each uint64 key: splitmix64 (Steele et al. 2014) of its xor with md5("seed/step/purpose")."""
    digest = hashlib.md5(f"{seed}/{step}/{purpose}".encode(), usedforsecurity=False).digest()
    mixed = keys ^ np.uint64(int.from_bytes(digest[:8], "little"))
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed ^= mixed >> 31
    return ((mixed >> 12) + 0.5) / 2**52


def choose_prompts(
    keys: np.ndarray, recent: np.ndarray, num_places: int, recent_probability: float, seed: int, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """The prompt of each place, and whether the place is a recent one: that with probability m. Both [B].

    keys, recent: of all prompts that may be drawn, and whether the newest sync brought them something [n], in any
    order. Returned are indices into these. Recent places take recent prompts, the other places any, each in random
    order and in turn: all different where there are enough; those that recent places took come last in the others.
    """
    places = np.arange(num_places, dtype=np.uint64)
    is_recent = recent.any() & (uniform_numbers(places, seed, step, "recent") < recent_probability)
    pool, num_recent = np.flatnonzero(recent), is_recent.sum()
    recents = pool[_lowest(uniform_numbers(keys[pool], seed, step, "recent prompt"), num_recent)]
    others = _lowest(uniform_numbers(keys, seed, step, "prompt"), num_places)  # even if all the recents are among them
    others = others[np.argsort(np.isin(others, recents), kind="stable")]
    chosen = np.empty(num_places, np.int64)
    chosen[is_recent] = np.resize(recents, num_recent)
    chosen[~is_recent] = np.resize(others[: num_places - num_recent], num_places - num_recent)
    return chosen, is_recent


@dataclass(frozen=True)
class Candidates:
    """The responses that one place may draw, in any order: [n] each."""

    keys: np.ndarray
    log_weights: np.ndarray
    times_sampled: np.ndarray


def draw_responses(
    candidates: Candidates, num_slots: int, uniform_fraction: float, seed: int, step: int, place: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one place's K responses. Returns index and first-draw probability of each slot [K].

    The draw is among samples, as if the buffer
    had kept every copy of a response: without replacement where there are K samples, else all of them in turn. A
    response's share therefore follows how often it was sampled, however many distinct ones there are. Drawing without
    replacement is an exponential race, -ln(u) / p, first come first drawn (the Gumbel-top-k trick); where p underflows
    to 0 the higher weight goes first.
    """
    keys, log_weights, times_sampled = candidates.keys, candidates.log_weights, candidates.times_sampled
    response = np.repeat(np.arange(len(keys)), times_sampled)  # of each sample
    first = np.cumsum(times_sampled) - times_sampled  # of each response, its first sample
    copy = (np.arange(len(response)) - first[response]).astype(np.uint64)
    numbers = uniform_numbers(keys[response] + copy * SPLITMIX64_STRIDE, seed, step, f"response/{place}")
    order = np.argsort(numbers)  # the same sums, to the last bit, in whatever order the candidates came
    response = response[order]
    weights = np.exp(log_weights[response] - log_weights.max())
    p = (1 - uniform_fraction) * weights / weights.sum() + uniform_fraction / len(weights)
    with np.errstate(divide="ignore"):
        arrival = -np.log(numbers[order]) / p
    drawn = np.resize(np.lexsort((-log_weights[response], arrival)), num_slots)
    return response[drawn], (times_sampled[response] * p)[drawn]


def _lowest(numbers: np.ndarray, count: int) -> np.ndarray:
    """Where the `count` lowest numbers are, in their order; all where there are no more."""
    lowest = np.argpartition(numbers, count)[:count] if count < len(numbers) else np.arange(len(numbers))
    return lowest[np.argsort(numbers[lowest])]
