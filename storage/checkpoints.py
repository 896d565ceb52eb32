"""Checkpoints: where training resumes.

trainer/step=00000100-a0002/    of the second attempt; complete once its state.json is there
trainer/step=00000100/          of an older version, which did not name the attempt

A superseded Trainer may complete a checkpoint minutes later. The checkpoint does not count (storage/attempts.py): no
run resumes from it, and the live Trainer deletes it. A checkpoint without an attempt in its name counts as a checkpoint
of the last attempt that an older version began.

state.json has a digest of each file. If files of a complete checkpoint are torn or have other bytes, the run resumes
from an older one that is whole.
"""

import json
import logging
import math
import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic_core import from_json

from storage.attempts import Attempt, check_not_superseded, counts, list_attempts
from storage.errors import DamagedCheckpoint, DamagedRecord, NotFound, StoreError, UnsafePath
from storage.file_delta import digest_of, file_digest
from storage.store import RunStore, scans

_COMPLETE = "state.json"
_NAME = re.compile(r"step=(?P<step>[0-9]{8})(-a(?P<attempt>[0-9]{4,}))?")
# Bytes of a number of each type that safetensors has.
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1}
_BYTES |= {f"{kind}{bits}": bits // 8 for kind in "IU" for bits in (8, 16, 32, 64)}
_OTHER_BYTES = "it has other bytes than the Trainer saved"
_LONGEST_HEADER = 100_000_000  # bytes; safetensors reads no longer one
# Files that are uploaded at once. Other requests of the process wait for them, on two cores twice as long beside seven
# as beside two (docs/LOG.md, 2026-11-30).
_UPLOADS = min(8, os.cpu_count() or 1)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's place in a run."""

    step: int
    attempt: int
    path: str  # of the folder, inside the run


FROM_SCRATCH = Checkpoint(0, 0, "")


@dataclass(frozen=True)
class _State:
    """What is checked of a checkpoint's state.json."""

    step: int
    num_files: int = 1  # with tensors; older versions wrote one, and no number
    digests: dict[str, str] = field(default_factory=dict)  # of every other file, by name; older versions wrote none


def checkpoint_path(step: int, attempt: int) -> str:
    return f"trainer/step={step:08d}-a{attempt:04d}"


def save_checkpoint(store: RunStore, step: int, local_folder: str | Path, attempt: int) -> None:
    """Uploads a checkpoint's folder. It is complete once its state.json exists, which is copied last.

    The files' digests are added to the folder's state.json before.
    Raises: Superseded: a later attempt began before state.json was copied; the checkpoint stays incomplete.
    """
    state = Path(local_folder) / _COMPLETE
    digests = {file.name: file_digest(file) for file in Path(local_folder).iterdir() if file != state}
    state.write_text(json.dumps(json.loads(state.read_text()) | {"digests": digests}))
    store.upload_folder(
        local_folder,
        checkpoint_path(step, attempt),
        last=_COMPLETE,
        before_last=lambda: check_not_superseded(store, attempt),
        at_once=_UPLOADS,
    )


def download_checkpoint(store: RunStore, checkpoint: Checkpoint, local_folder: Path) -> None:
    """A file with other bytes than were saved is downloaded once more: the answer may have been wrong, not the store.

    Raises: DamagedCheckpoint: its bytes are others still. NotFound: the checkpoint was deleted.
    """
    store.download_folder(checkpoint.path, local_folder)
    digests = json.loads((local_folder / _COMPLETE).read_text()).get("digests", {})

    def with_other_bytes(names: Iterable[str]) -> list[str]:
        there = {file.name for file in local_folder.iterdir()}
        return [name for name in names if name not in there or file_digest(local_folder / name) != digests[name]]

    if wrong := with_other_bytes(digests):
        with suppress(NotFound, UnsafePath):  # it lacks one of them, or names one outside
            store.download_folder(checkpoint.path, local_folder, only=wrong)
    if wrong := with_other_bytes(wrong):
        raise DamagedCheckpoint(
            f"checkpoint {checkpoint.path} of run {store.run} in {store.url} is damaged: {', '.join(sorted(wrong))}: "
            f"{_OTHER_BYTES}"
        )


def list_checkpoints(store: RunStore) -> list[Checkpoint]:
    """The complete checkpoints that count, in order of steps."""
    return _by_kind(store)[0]


def superseded_checkpoints(store: RunStore) -> list[Checkpoint]:
    """The complete checkpoints that do not count, in order of steps: no run resumes from them."""
    return _by_kind(store)[1]


def newest_whole_checkpoint(
    store: RunStore, before: int | None = None, damaged: Collection[Checkpoint] = ()
) -> Checkpoint | None:
    """The checkpoint to resume from. A warning names each newer one that is torn. None: none is whole.

    before: an attempt; this one and later ones are left out of account. None: none is.
    damaged: checkpoints whose bytes were found to be wrong (download_checkpoint). Here sizes are checked, not bytes.
    """
    for checkpoint in reversed(_by_kind(store, before)[0]):
        if checkpoint in damaged:
            continue
        if not (faults := checkpoint_faults(store, checkpoint)):
            return checkpoint
        logger.warning(
            "checkpoint %s of run %s in %s is damaged and is not resumed from: %s",
            checkpoint.path, store.run, store.url, "; ".join(f"{path}: {fault}" for path, fault in faults),
        )  # fmt: skip
    return None


def checkpoint_faults(store: RunStore, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Faults that keep training from resuming from a complete checkpoint, as (path, fault); empty: it is whole.

    Raises: NotFound: it was deleted since it was listed.
    """
    faults, num_files = [], None
    try:
        if (state := store.read_json(f"{checkpoint.path}/{_COMPLETE}", _State)) is None:
            raise NotFound(f"{checkpoint.path} (run {store.run} in {store.url}) no longer exists")
        num_files = state.num_files
        if state.step != checkpoint.step:
            faults.append((checkpoint.path, f"its state.json is of step {state.step}"))
    except DamagedRecord as error:
        faults.append((checkpoint.path, f"its state.json cannot be read ({error})"))
    weights = [path for path in store.list(checkpoint.path) if path.endswith(".safetensors")]
    if not weights:
        faults.append((checkpoint.path, "it has no safetensors file"))
    elif num_files is not None and len(weights) != num_files:
        faults.append((checkpoint.path, f"it has {len(weights)} safetensors files of {num_files}"))
    of_files = ((path, _broken_safetensors(store, path)) for path in weights)
    return faults + [(path, fault) for path, fault in of_files if fault]


@scans
def content_faults(store: RunStore, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """The files that are missing or have other bytes than were saved, as (path, fault). Reads all of them.

    Raises: NotFound: the checkpoint was deleted since it was listed.
    """
    if (state := store.read_json(f"{checkpoint.path}/{_COMPLETE}", _State)) is None:
        raise NotFound(f"{checkpoint.path} (run {store.run} in {store.url}) no longer exists")
    filesystem, base = store.arrow_filesystem()

    def fault(path: str, digest: str) -> str | None:
        if path not in there:
            return "it is missing"
        with filesystem.open_input_stream(f"{base}/{path}") as file:
            return None if digest_of(file) == digest else _OTHER_BYTES

    there = set(store.list(checkpoint.path))
    of_files = ((f"{checkpoint.path}/{name}", digest) for name, digest in sorted(state.digests.items()))
    return [(path, found) for path, digest in of_files if (found := fault(path, digest))]


def delete_checkpoints(store: RunStore, keep: int, attempt: int) -> None:
    """Deletes superseded checkpoints, and all checkpoints, incomplete ones included, before the newest `keep` whole
    ones.

    If it cannot be read now which are whole, nothing is deleted. Raises: Superseded: a later attempt has begun.
    """
    try:
        counting, superseded, incomplete = _by_kind(store)
        whole = [found for found in counting if not checkpoint_faults(store, found)]
    except StoreError as error:
        logger.warning("old checkpoints are kept for now: %s", error)
        return
    if not (kept := whole[-keep:]):
        return
    old = [found for found in counting + incomplete if found.step < kept[0].step]
    check_not_superseded(store, attempt)
    for found in old + superseded:
        store.delete_folder(found.path, first=_COMPLETE)


def _by_kind(store: RunStore, before: int | None = None) -> tuple[list[Checkpoint], list[Checkpoint], list[Checkpoint]]:
    """Complete checkpoints that count, complete ones that do not, and incomplete ones; each in order of steps."""
    records = [record for record in list_attempts(store) if before is None or record.attempt < before]
    counting, superseded, incomplete = [], [], []
    for found in _named(store, records):
        if not store.exists(f"{found.path}/{_COMPLETE}"):
            incomplete.append(found)
        else:
            (counting if counts(found.attempt, found.step, records) else superseded).append(found)
    return counting, superseded, incomplete


def _named(store: RunStore, records: list[Attempt]) -> list[Checkpoint]:
    """Every folder with a checkpoint's name, complete or not, in order of steps."""
    of_older_version = [record.attempt for record in records if record.checkpoint is None]
    names = [name for name in map(_NAME.fullmatch, store.folders("trainer")) if name]
    found = [
        Checkpoint(int(name["step"]), int(name["attempt"] or max(of_older_version, default=0)), f"trainer/{name[0]}")
        for name in names
    ]
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt))


@scans
def _broken_safetensors(store: RunStore, path: str) -> str | None:
    """The fault of the file, by its header and size only, because a checkpoint is large. None: no fault."""
    filesystem, base = store.arrow_filesystem()
    with filesystem.open_input_file(f"{base}/{path}") as file:
        size = file.size()
        header_length = int.from_bytes(file.read_at(min(8, size), 0), "little")
        header = file.read_at(header_length, 8) if header_length <= min(size - 8, _LONGEST_HEADER) else b""
    try:
        tensors = [tensor for name, tensor in from_json(header).items() if name != "__metadata__"]
        end = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor["data_offsets"]):
            length = _BYTES[tensor["dtype"]] * math.prod(tensor["shape"])
            if tensor["data_offsets"] != [end, end + length]:
                raise ValueError(f"the tensor at {tensor['data_offsets']} should be at {[end, end + length]}")
            end += length
        if not tensors:
            raise ValueError("it has no tensors")
        expected = 8 + header_length + end
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"its header cannot be read ({error!r})"
    return None if size == expected else f"it has {size} bytes, but {expected} by its header"
