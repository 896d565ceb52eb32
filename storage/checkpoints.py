"""Checkpoints: where training resumes.

trainer/step=00000100/    whole once its state.json is there
"""

import json
import re
from pathlib import Path

from storage.store import RunStore, scans

_CHECKPOINT_COMPLETE = "state.json"
_CHECKPOINT_NAME = re.compile(r"step=(?P<step>\d{8})")


def checkpoint_path(step: int) -> str:
    return f"trainer/step={step:08d}"


def save_checkpoint(store: RunStore, step: int, local_folder: str | Path) -> None:
    """Upload a checkpoint's folder; it counts once its state.json, copied last, is there."""
    store.upload_folder(local_folder, checkpoint_path(step), last=_CHECKPOINT_COMPLETE)


def list_checkpoints(store: RunStore) -> list[int]:
    """Steps of the complete checkpoints, in order."""
    return [
        step for step in _checkpoint_steps(store) if store.exists(f"{checkpoint_path(step)}/{_CHECKPOINT_COMPLETE}")
    ]


def delete_checkpoints(store: RunStore, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints, and the files of incomplete ones before them."""
    kept = list_checkpoints(store)[-keep:]
    for step in _checkpoint_steps(store):
        if kept and step < kept[0]:
            store.delete_folder(checkpoint_path(step), first=_CHECKPOINT_COMPLETE)


def _checkpoint_steps(store: RunStore) -> list[int]:
    names = map(_CHECKPOINT_NAME.fullmatch, store.folders("trainer"))
    return [int(name["step"]) for name in names if name]  # folders with other names are ignored


@scans
def broken_safetensors(store: RunStore, path: str) -> str | None:
    """Why the file cannot be whole, from its header and size alone: a checkpoint is large. None: no fault."""
    filesystem, base = store.arrow_filesystem()
    with filesystem.open_input_file(f"{base}/{path}") as file:
        size = file.size()
        header_length = int.from_bytes(file.read_at(min(8, size), 0), "little")
        try:
            header = json.loads(file.read_at(min(header_length, size - 8), 8) if size > 8 else b"")
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"its header cannot be read ({error!r})"
        expected = 8 + header_length + max(ends, default=0)
        return None if size == expected else f"it has {size} bytes, its header says {expected}"
