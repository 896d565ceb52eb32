"""This machine's folders, threads, processor and code version, for the processes of a run."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from infra.control_groups import core_limit

CHECKOUT = Path(__file__).resolve().parents[1]  # of an installed wheel: site-packages


def local_folder(project: Path | None = None) -> Path:
    """The folder of a project's data outside runs: Prefect's database, logs, converted models. Git ignores it.

    project: None: the working folder.
    """
    return (project or Path.cwd()) / ".tba" / ".local"


def keep_compiled_code_private() -> None:
    """torch keeps compiled code in a folder of this project. Call it before torch is imported.

    torch's default is a folder in /tmp, which another account may have made before; torch runs what it finds there.
    """
    folder = local_folder() / "torchinductor"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def policy_cache(run: str) -> Path:
    """The folder in which this machine's processes share copies of a run's newest policies."""
    return local_folder() / "policies" / run


def cpu_threads(num_processes: int) -> int:
    """Threads for each of this many concurrent processes on the cores that this machine or container may use."""
    return max(1, int(min(len(os.sched_getaffinity(0)), core_limit())) // num_processes)


def has_bfloat16(cpu: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bfloat16 in hardware, as tba.precision.compute_dtype finds out with torch."""
    with suppress(OSError):
        return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(cpu.read_text().split())
    return False


def processor_name(cpu: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model as the system names it, else its architecture."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(\S.*)$", cpu.read_text(), re.MULTILINE):
            return found[1]
    return platform.machine()


def code_version() -> str:
    """The checkout's git commit, where "+" marks uncommitted changes; of an installed wheel its version, "tba 0.1.0".

    A wheel may lie inside another project's checkout, whose commit says nothing about this code."""
    if not (CHECKOUT / ".git").exists():
        return _installed_version()
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],  # noqa: S607 - the PATH is trusted
            cwd=CHECKOUT, capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return _installed_version()
    return described.stdout.strip() or _installed_version()


def _installed_version() -> str:
    try:
        return f"tba {metadata.version('tba')}"
    except metadata.PackageNotFoundError:
        return "unknown"
