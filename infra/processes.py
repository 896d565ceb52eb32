"""Processes of this machine: found by what they carry, stopped."""

import contextlib

import psutil

STOP_TIMEOUT_S = 15  # a flow process that is told to stop reports its state to the server first


def find_processes(variable: str, value: str) -> list[psutil.Process]:
    """Processes that carry this environment variable: children inherit it, whoever their parent is later."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or it is another user's
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def stop_processes(processes: list[psutil.Process]) -> None:
    """Terminate, wait, kill what is left."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=STOP_TIMEOUT_S)
