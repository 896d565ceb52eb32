"""A policy's weights as files: safetensors in and out, and the fingerprint that proves which weights spoke."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

NOISE = 1 << 20  # random numbers that all tensors are rounded by, in turn: drawing one for each weight takes seconds


def read_weights(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight in a Hugging Face folder, one at a time.

    Raises: FileNotFoundError: the folder holds no safetensors file.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no .safetensors file; a policy is a folder in Hugging Face format")
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dictionary
                yield name, weights.get_tensor(name)


def write_weights(weights: dict[str, Tensor], folder: str | Path) -> None:
    """The weights as one safetensors file that `from_pretrained` and vLLM load."""
    save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def to_bfloat16(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Weights on the CPU as bfloat16; float32 ones rounded up or down at random, so that they are right on average.

    A model that came in bfloat16 lies on its grid, and a policy step is a tenth of the distance to the next point:
    rounded to the nearest, published policies would stay the first one for many steps. Equal seeds round alike.
    """
    random = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 1 << 16, (NOISE,), dtype=torch.int32, generator=random).numpy()
    return {
        name: tensor if tensor.dtype == torch.bfloat16 else _round_at_random(tensor, noise)
        for name, tensor in weights.items()
    }


def _round_at_random(tensor: Tensor, noise: np.ndarray) -> Tensor:
    """bfloat16 is the upper half of a float32: what is added to the lower carries over as often as that is large.

    In pieces, which take as long as a plain copy; and in numpy, which is faster at this than torch.
    """
    rounded = torch.empty(tensor.shape, dtype=torch.bfloat16)
    bits, upper = tensor.flatten().view(torch.int32).numpy(), rounded.flatten().view(torch.int16).numpy()
    for start in range(0, len(bits), len(noise)):
        chunk = bits[start : start + len(noise)]
        np.right_shift(chunk + noise[: len(chunk)], 16, out=upper[start : start + len(noise)], casting="unsafe")
    return rounded


class Fingerprint:
    """BLAKE3 over every tensor's name, type, shape and bytes; the order in which they come does not matter.

    BLAKE3 because it is cryptographic and seven times as fast on one core as hashlib's BLAKE2: the Trainer reads every
    policy for it, and each Searcher every one that it serves.
    """

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        digest = blake3(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        self._digests[name] = digest.digest(16)

    def hexdigest(self) -> str:
        whole = blake3()
        for name in sorted(self._digests):
            whole.update(self._digests[name])
        return whole.hexdigest(16)


def fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """32 hex digits that differ as soon as one bit of one weight does."""
    result = Fingerprint()
    for name, tensor in weights:
        result.add(name, tensor)
    return result.hexdigest()
