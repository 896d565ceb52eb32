"""A Trainer's state as the files of a checkpoint. Tensors of one file at a time are copied from where they are trained.

    trainer-00000.safetensors   policy.NAME, and by AdamW step.NAME, exp_avg.NAME, exp_avg_sq.NAME; after a reset
                                reference.NAME. Then trainer-00001.safetensors, ...
    state.json                  {"step": 100, "num_files": 1}

Older versions wrote one file, trainer.safetensors, and no num_files.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

STATE = "state.json"
FILE_BYTES = 1 << 30  # from which on a file takes no further tensor


def write_state(folder: Path, step: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Writes tensors by name, in their order."""
    num_files, of_file = 0, {}

    def write_file() -> None:
        nonlocal num_files
        save_file(of_file, folder / f"trainer-{num_files:05d}.safetensors")
        of_file.clear()
        num_files += 1

    for name, tensor in tensors:
        of_file[name] = tensor.detach().contiguous()
        if sum(each.nbytes for each in of_file.values()) >= FILE_BYTES:
            write_file()
    if of_file:
        write_file()
    (folder / STATE).write_text(json.dumps({"step": step, "num_files": num_files}))


class SavedState(Mapping[str, Tensor]):
    """The tensors that `write_state` wrote, by name. Each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.step: int = json.loads((folder / STATE).read_text())["step"]
        files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dictionary

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)
