"""Policies that travel as deltas, for tests: a Trainer that publishes them, and what is expected of them."""

import hashlib
import shutil
from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from storage.policies import PolicyRef, policy_ref, publish_policy
from storage.store import RunStore

NUM_WEIGHTS = 20_000


def weights(step: int) -> np.ndarray:
    """bfloat16's bits; those of consecutive steps differ in 1 %."""
    found = np.random.default_rng(0).integers(0, 2**16, NUM_WEIGHTS, np.uint16)
    for number in range(1, step + 1):
        random = np.random.default_rng(number)
        found[random.choice(NUM_WEIGHTS, NUM_WEIGHTS // 100, replace=False)] ^= 1
    return found


def write_policy(folder: Path, values: np.ndarray) -> str:
    """Returns the fingerprint."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"weight": values}, folder / "model.safetensors")
    return hashlib.sha256(values.tobytes()).hexdigest()[:32]


class Trainer:
    """Publishes policies as the Trainer's outbox does."""

    def __init__(self, store: RunStore, folder: Path, attempt: int = 1) -> None:
        self.store, self.folder, self.attempt = store, folder, attempt
        self.cache = folder / "cache"
        self.served: PolicyRef | None = None

    def publish(self, step: int, final: bool = False, values: np.ndarray | None = None) -> PolicyRef:
        folder = self.folder / f"policy-{next(NUMBERS)}"
        ref = policy_ref(step, write_policy(folder, weights(step) if values is None else values),
                         attempt=self.attempt, final=final)  # fmt: skip
        self.served = publish_policy(self.store, folder, ref, self.cache, self.served)
        shutil.rmtree(folder)
        return self.served


NUMBERS = count()


def is_right(folder: Path, step: int) -> bool:
    """Whether the folder has the policy's weights and its other files."""
    expected = folder.parent / f".tmp-expected-{next(NUMBERS)}"
    write_policy(expected, weights(step))
    names = {path.name for path in expected.iterdir()}
    is_same = all((folder / name).read_bytes() == (expected / name).read_bytes() for name in names)
    shutil.rmtree(expected)
    return is_same and {path.name for path in folder.iterdir()} == {*names, "policy.json"}


def files(store: RunStore, ref: PolicyRef) -> list[str]:
    return [path.removeprefix(f"{ref.path}/") for path in store.list(ref.path)]


DELTA = ["config.json", "model.safetensors.delta", "policy.json"]
WHOLE = ["config.json", "model.safetensors", "policy.json"]
BOTH = sorted({*DELTA, *WHOLE})


def of_weights(downloads: Counter) -> list[str]:
    return sorted(path for path in downloads.elements() if "safetensors" in path)


class Killed(BaseException):
    """A process ends here."""


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()  # a copy may be a link
    file.write_bytes(data)
