"""ranks/machine: this machine's processes of a Trainer that runs on several machines (train.machines).

The run's flow starts one for each further machine, at each attempt. It ends with the attempt.
"""

import os
from pathlib import Path

from prefect import flow, get_run_logger

from flows.config import StoreUrl, load_run
from infra.gpus import num_gpus
from infra.machine import cpu_threads
from infra.memory import tensor_environment
from storage.run_inputs import check_model
from storage.store import RunStore


@flow(name="ranks")
def ranks(store: StoreUrl, run: str, attempt: int, key: str, devices: dict) -> None:
    """Joins this machine to an attempt of the run's Trainer. key: see storage/machines.py; devices: of RunConfig.

    Raises: RuntimeError: one of its processes failed.
    """
    from flows.trainer.ranks import follow
    from tba.lora import base_fingerprint
    from tba.models import model_folder

    run_store = RunStore(store, run)
    config = load_run(run_store).on_devices(devices)
    if 0 < (num_here := num_gpus()) < config.train.processes:  # a process without a GPU would end the whole attempt
        get_run_logger().error(
            "this machine has %d GPUs, and train.processes is %d: it does not join", num_here, config.train.processes
        )
        return
    threads = str(cpu_threads(config.train.processes))
    os.environ |= {"OMP_NUM_THREADS": threads, **tensor_environment()}  # for the processes started here

    def load() -> Path:
        folder = model_folder(config.model)
        check_model(run_store, config.model, base_fingerprint(str(folder)))
        return folder

    if not follow(run_store, config, load, attempt, key):
        get_run_logger().info("attempt %d has ended, or began without this machine", attempt)
