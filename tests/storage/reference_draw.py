"""MOP written the slow way, which the replay buffer's draws are compared with."""

import hashlib
import math

import pytest

from storage.mop import SamplingSettings
from tests.storage.buffer_runs import SEED


def uniform_number(step: int, purpose: str, key: int) -> float:
    """What storage/mop.py promises: splitmix64 of key xor half an md5, its high 52 bits."""
    z = key ^ int.from_bytes(hashlib.md5(f"{SEED}/{step}/{purpose}".encode()).digest()[:8], "little")
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (((z ^ (z >> 31)) >> 12) + 0.5) / 2**52


def key_of(name: str) -> int:
    """What storage/sql/create_index.sql promises: the first half of a md5, little-endian."""
    return int.from_bytes(hashlib.md5(name.encode()).digest()[:8], "little")


def rewards_differ(trajectories: list[dict], prompt_id: str, sync: int | None = None) -> bool:
    """Of the stored trajectories of a prompt, or of those of one sync."""
    return len({t["reward"] for t in trajectories if t["prompt_id"] == prompt_id and sync in (None, t["sync"])}) > 1


def reference_draw(trajectories: list[dict], newest_sync: int, sampling: SamplingSettings, step: int) -> list[tuple]:
    """MOP written the slow way. Rows of (prompt_index, slot, trajectory_id, recent, draw_probability)."""
    recent_pool = {t["prompt_id"] for t in trajectories if t["sync"] == newest_sync}
    whole_pool = {t["prompt_id"] for t in trajectories}
    places = range(sampling.prompts_per_batch)
    is_recent = [
        bool(recent_pool) and uniform_number(step, "recent", place) < sampling.recent_probability for place in places
    ]
    preferred = {name for name in whole_pool if rewards_differ(trajectories, name)}
    recent_preferred = {name for name in recent_pool if rewards_differ(trajectories, name, newest_sync)}
    if not sampling.differing_rewards_first:
        preferred = recent_preferred = set()

    def recent_order(name: str) -> tuple:
        return name not in recent_preferred, uniform_number(step, "recent prompt", key_of(name))

    recents = sorted(recent_pool, key=recent_order)
    num_recent = sum(is_recent)
    prompts = {True: [recents[turn % len(recents)] for turn in range(num_recent)]}
    taken = set(prompts[True])

    def order(name: str) -> tuple:
        return name in taken, name not in preferred, uniform_number(step, "prompt", key_of(name))

    others = sorted(whole_pool, key=order)
    prompts[False] = [others[turn % len(others)] for turn in range(len(places) - num_recent)]
    rows = []
    for place in places:
        recent, prompt_id = is_recent[place], prompts[is_recent[place]].pop(0)
        candidates = [
            t for t in trajectories if t["prompt_id"] == prompt_id and (not recent or t["sync"] == newest_sync)
        ]
        softmax = sampling.reward_temperature is not None and not recent
        samples = [(t, copy) for t in candidates for copy in range(t.get("num_copies", 1))]
        weights = [math.exp(t["reward"] / sampling.reward_temperature) if softmax else 1.0 for t, _ in samples]
        uniform = sampling.uniform_fraction / len(samples)
        race = []
        for (t, copy), weight in zip(samples, weights, strict=True):
            p = (1 - sampling.uniform_fraction) * weight / sum(weights) + uniform
            state = (key_of(t["trajectory_id"]) + copy * 0x9E3779B97F4A7C15) % 2**64
            u = uniform_number(step, f"response/{place}", state)
            race.append((-math.log(u) / p, t["trajectory_id"], p * t.get("num_copies", 1)))
        race.sort()
        for slot in range(sampling.responses_per_prompt):
            _, name, p = race[slot % len(race)]
            rows.append((place, slot, name, recent, pytest.approx(p, rel=1e-12)))
    return rows
