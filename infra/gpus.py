"""This machine's GPUs, and the ones that each process of a run takes."""

import os
import shutil
from collections import Counter
from pathlib import Path

GPU_START = "gpu-start"  # name of the lock of processes that share a GPU, while they load


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU that this process may use; None without one. Imports torch if one may be there."""
    return min(_gpu_sizes(), default=None)


def num_gpus() -> int:
    """GPUs that this process may use. Imports torch if one may be there."""
    return len(_gpu_sizes())


def gpu_places(num_gpus: int, num_searchers: int, num_trainers: int, gpus_per_searcher: int) -> list[int]:
    """The GPUs of all Searchers, one after the other: behind the Trainer's if enough are left, else any."""
    first = num_trainers if num_gpus - num_trainers >= gpus_per_searcher else 0
    return [first + each % (num_gpus - first) for each in range(num_searchers * gpus_per_searcher)]


def take_gpus(place: int, num_searchers: int, num_trainers: int, gpus_per_searcher: int = 1) -> float:
    """Assigns this Searcher GPUs of this machine: after the Trainer's if enough are left, otherwise any.

    place: of this Searcher among the run's `num_searchers` on this machine, from 0. num_trainers: processes of the
    Trainer here, each of which has a GPU, from GPU 0 on. gpus_per_searcher: GPUs that each Searcher needs. Sets
    CUDA_VISIBLE_DEVICES, so call it before this process uses CUDA, as torch.cuda.is_available does. Returns this
    process's share of each GPU's memory, less than 1 if another process of the run has the GPU, too; 1 without a GPU.
    Raises: ValueError: the machine has fewer GPUs.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        return 1.0
    if gpus_per_searcher > num_gpus:
        raise ValueError(
            f"this process needs {gpus_per_searcher} GPUs (search.engine), and this machine has {num_gpus}"
        )
    places = gpu_places(num_gpus, num_searchers, num_trainers, gpus_per_searcher)
    taken = places[place * gpus_per_searcher :][:gpus_per_searcher]
    num_processes = Counter([*range(num_trainers), *places])
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[gpu] for gpu in taken)
    return 1 / max(num_processes[gpu] for gpu in taken)


def free_share(share: float) -> float:
    """A share of each GPU's memory, or the free part of it, if that is less: a process that began alone on a GPU keeps
    its memory when another one joins.
    """
    import torch

    found = [torch.cuda.mem_get_info(gpu) for gpu in range(torch.cuda.device_count())]
    return min([share, *(free / total for free, total in found)])


def shares_a_gpu(num_searchers: int, num_trainers: int, gpus_per_searcher: int = 1) -> bool:
    """Whether a Searcher has the GPU of a process of the Trainer. Arguments as of `take_gpus`."""
    num = num_gpus()
    return bool(num) and any(
        gpu < num_trainers for gpu in gpu_places(num, num_searchers, num_trainers, gpus_per_searcher)
    )


def _gpu_sizes() -> list[int]:
    if not (shutil.which("nvidia-smi") or any(Path("/dev").glob("nvidia[0-9]*"))):
        return []
    import torch

    return [torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())]
