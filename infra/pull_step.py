"""The pull step of prefect.yaml's deployments: it chooses the folder that a flow runs in."""

import contextlib
import os

import psutil


def enter_workers_folder() -> dict[str, str]:
    """Makes the folder of this process's worker the working folder. Returns {"directory": folder}, as Prefect requires.

    A process worker starts each flow in a temporary folder and removes that afterwards. Prefect's default step enters
    the folder of the deploying host instead, which other hosts lack. In a container no worker is this process's
    parent; the image's folder stays the working folder.
    """
    folder, parent = os.getcwd(), psutil.Process().parent()
    if parent is not None:
        with contextlib.suppress(psutil.AccessDenied):  # another user's process
            folder = parent.cwd()
    os.chdir(folder)
    return {"directory": folder}
