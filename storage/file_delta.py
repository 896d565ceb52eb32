"""The changes from one file to another, as a file; the digests of files.

storage/policy_delta.py has policies travel by it. storage/checkpoints.py compares files by their digests.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from blake3 import blake3

_CHUNK_BYTES = 2**24  # compressed together; four are in memory, whatever the file's size
_PIECE_BYTES = 2**20  # stays in the processor's cache while it is digested and compared
_CODEC = pa.Codec("zstd", compression_level=1)


def file_digest(path: Path) -> str:
    """BLAKE3 of a file's bytes."""
    with open(path, "rb") as file:
        return digest_of(file)


def digest_of(file: BinaryIO) -> str:
    """BLAKE3 of the bytes that are left in an open file."""
    digest = blake3()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def write_delta(base: Path, file: Path, delta: Path) -> tuple[str, str]:
    """Writes the changes from `base` to `file`, which has the same size. Returns the digests of both.

    Of each chunk: the number of bytes, 4 of them, and the XOR of both files, compressed by zstd.
    """
    digests = blake3(), blake3()
    chunk, old = np.empty(_CHUNK_BYTES, np.uint8), np.empty(_PIECE_BYTES, np.uint8)
    with open(base, "rb", buffering=0) as before, open(file, "rb", buffering=0) as after, open(delta, "wb") as out:
        left = file.stat().st_size
        while left:
            changes = chunk[:left]
            for begin in range(0, changes.size, _PIECE_BYTES):
                piece = changes[begin : begin + _PIECE_BYTES]
                after.readinto(piece)
                before.readinto(old[: piece.size])
                digests[0].update(old[: piece.size])
                digests[1].update(piece)
                piece ^= old[: piece.size]
            frame = _CODEC.compress(changes, asbytes=True)
            out.write(len(frame).to_bytes(4, "little") + frame)
            left -= changes.size
    return digests[0].hexdigest(), digests[1].hexdigest()


def apply_deltas(base: Path, deltas: list[Path], target: Path) -> str:
    """Writes the file that the deltas make of `base`. Returns its digest.

    Raises: FileNotFoundError: `base` or a delta is missing. ValueError: a delta cannot be read.
    """
    digest = blake3()
    with ExitStack() as stack:
        before = stack.enter_context(open(base, "rb"))  # it stays readable if another process trims the cache now
        changes = [stack.enter_context(open(delta, "rb")) for delta in deltas]
        out = stack.enter_context(open(target, "wb"))
        other_thread = stack.enter_context(ThreadPoolExecutor(1))
        following = other_thread.submit(_next_chunk, before, changes)
        while (chunk := following.result()).size:
            following = other_thread.submit(_next_chunk, before, changes)  # while this one is digested and written
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


def _next_chunk(before: BinaryIO, deltas: list[BinaryIO]) -> np.ndarray:
    """The next bytes of a file, changed by the deltas; empty at its end."""
    chunk = np.fromfile(before, np.uint8, _CHUNK_BYTES)
    for delta in deltas if chunk.size else ():
        chunk ^= _next_changes(delta, chunk.size)
    return chunk


def _next_changes(delta: BinaryIO, num_bytes: int) -> np.ndarray:
    try:
        frame = delta.read(int.from_bytes(delta.read(4), "little"))
        return np.frombuffer(_CODEC.decompress(frame, decompressed_size=num_bytes), np.uint8)
    except OSError as error:
        raise ValueError(f"{Path(delta.name).name} cannot be read ({error})") from error
