"""A Trainer's state as the files of a checkpoint. Tensors of a few files at a time are copied from where they train.

    trainer-00000.safetensors   policy.NAME, and by AdamW step.NAME, exp_avg.NAME, exp_avg_sq.NAME; after a reset
                                reference.NAME. Then trainer-00001.safetensors, ...
    state.json                  {"step": 100, "num_files": 1, "skipped_in_a_row": 0}: the steps just before it that were
                                skipped

Older versions wrote one file, trainer.safetensors, and the step alone.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

STATE = "state.json"
FILE_BYTES = 1 << 28  # from which on a file takes no further tensor
NUM_WRITERS = 4  # files that are written at once: beside a step that uses all cores, one thread takes twice as long


def write_state(folder: Path, step: int, tensors: Iterable[tuple[str, Tensor]], skipped_in_a_row: int = 0) -> None:
    """Writes tensors by name, in their order. The tensors of `NUM_WRITERS` files are in memory at a time."""
    files: list[Future[None]] = []

    def write_file(of_file: dict[str, Tensor], file: Path) -> None:
        save_file(of_file, file)
        of_file.clear()  # frees the copies before the next file's are made

    with ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="checkpoint") as writers:
        for of_file in _files(tensors):
            files.append(writers.submit(write_file, of_file, folder / f"trainer-{len(files):05d}.safetensors"))
            if len(files) >= NUM_WRITERS:
                files[-NUM_WRITERS].result()
    for file in files:
        file.result()
    counts = {"step": step, "num_files": len(files), "skipped_in_a_row": skipped_in_a_row}
    (folder / STATE).write_text(json.dumps(counts))


def _files(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each file, by name."""
    of_file: dict[str, Tensor] = {}
    for name, tensor in tensors:
        of_file[name] = tensor.detach().contiguous()
        if sum(each.nbytes for each in of_file.values()) >= FILE_BYTES:
            yield of_file
            of_file = {}
    if of_file:
        yield of_file


class SavedState(Mapping[str, Tensor]):
    """The tensors that `write_state` wrote, by name. Each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        counts = json.loads((folder / STATE).read_text())
        self.step: int = counts["step"]
        self.skipped_in_a_row: int = counts.get("skipped_in_a_row", 0)
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
