"""Finds this machine's processes by environment variable or port, and stops them."""

import contextlib

import psutil

STOP_TIMEOUT_S = 15  # before it ends, a flow's process reports its state to the server


def find_processes(variable: str, value: str) -> list[psutil.Process]:
    """Processes with this value of the environment variable, which children inherit, also after their parent's end."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or it is another user's
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def listens(process: psutil.Process, port: int) -> bool:
    """Whether this process listens on the TCP port; another account's process may have taken the port."""
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def stop_processes(processes: list[psutil.Process]) -> None:
    """Terminates the processes, waits, and kills those that still run."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=STOP_TIMEOUT_S)
