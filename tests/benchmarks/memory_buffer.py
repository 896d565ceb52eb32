"""The baseline of bench_buffer.py: a replay buffer of Python dictionaries with the semantics of storage/buffer.py.

Newest of identical responses, newest `capacity_per_prompt` of a prompt, MOP. Not what ours adds: it is gone with its
process, cannot tell what a past step drew, and its random numbers are a generator's. A batch is a list of dictionaries.
"""

import random

import numpy as np
import pyarrow as pa

from storage.mop import SamplingSettings
from storage.new_shards import new_shards
from storage.shard_files import by_block, read_shards
from storage.store import RunStore

LISTS = ("prompt_tokens", "response_tokens", "behavior_logprobs", "reference_logprobs")


class MemoryBuffer:
    def __init__(self, store: RunStore, sampling: SamplingSettings, seed: int):
        self._store, self._sampling, self._random = store, sampling, random.Random(seed)
        self._seen: dict[str, int] = {}
        self._stored: dict[str, dict[bytes, dict]] = {}  # prompt_id -> response tokens -> trajectory, oldest first
        self._prompt_ids: list[str] = []
        self._newest_sync = 0

    @property
    def num_trajectories(self) -> int:
        return sum(map(len, self._stored.values()))

    def sync(self) -> None:
        self._newest_sync += 1
        self._recent: dict[str, None] = {}
        for searcher, rounds in new_shards(self._store, self._seen).items():
            for of_block in by_block(rounds):
                self._take_in(read_shards(self._store, searcher, of_block))
            self._seen[searcher] = rounds[-1]

    def _take_in(self, shards: pa.Table) -> None:
        scalars = [shards[name].to_pylist() for name in ("prompt_id", "trajectory_id", "reward", "policy_step")]
        lists = [shards[name].combine_chunks() for name in LISTS]
        values = [column.values.to_numpy() for column in lists]
        ends = [column.offsets.to_pylist() for column in lists]
        for row, (prompt_id, trajectory_id, reward, policy_step) in enumerate(zip(*scalars, strict=True)):
            arrays = [v[e[row] : e[row + 1]].copy() for v, e in zip(values, ends, strict=True)]
            trajectory = dict(zip(LISTS, arrays, strict=True), trajectory_id=trajectory_id, reward=reward)
            trajectory |= {"policy_step": policy_step, "sync": self._newest_sync}
            if prompt_id not in self._stored:
                self._stored[prompt_id] = {}
                self._prompt_ids.append(prompt_id)
            responses = self._stored[prompt_id]
            response = arrays[1].tobytes()
            responses.pop(response, None)  # the newest goes to the end
            responses[response] = trajectory
            if len(responses) > self._sampling.capacity_per_prompt:
                del responses[next(iter(responses))]
            self._recent[prompt_id] = None

    def draw(self) -> list[dict]:
        sampling, batch = self._sampling, []
        num_places = sampling.prompts_per_batch
        num_recent = sum(self._random.random() < sampling.recent_probability for _ in range(num_places))
        recents = self._random.sample(list(self._recent), min(num_recent, len(self._recent)))
        chosen = [(recents[turn % len(recents)], True) for turn in range(num_recent)]
        others = [
            name
            for name in self._random.sample(self._prompt_ids, min(2 * num_places, len(self._prompt_ids)))
            if name not in recents
        ] or recents
        chosen += [(others[turn % len(others)], False) for turn in range(num_places - num_recent)]
        for prompt_index, (prompt_id, recent) in enumerate(chosen):
            candidates = list(self._stored[prompt_id].values())
            if recent:
                candidates = [t for t in candidates if t["sync"] == self._newest_sync]
            p = self._probabilities(candidates, recent)
            race = np.array([self._random.expovariate(1.0) for _ in candidates]) / p
            order = np.argsort(race)
            for slot in range(sampling.responses_per_prompt):
                drawn = order[slot % len(order)]
                place = {"prompt_index": prompt_index, "slot": slot, "prompt_id": prompt_id, "recent": recent}
                batch.append(candidates[drawn] | place | {"draw_probability": p[drawn]})
        return batch

    def _probabilities(self, candidates: list[dict], recent: bool) -> np.ndarray:
        n, tau = len(candidates), self._sampling.reward_temperature
        if recent or tau is None:
            return np.full(n, 1 / n)
        rewards = np.array([t["reward"] for t in candidates])
        weights = np.exp((rewards - rewards.max()) / tau)
        return (1 - self._sampling.uniform_fraction) * weights / weights.sum() + self._sampling.uniform_fraction / n
