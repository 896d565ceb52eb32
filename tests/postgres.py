"""A PostgreSQL server for a test, of Debian's programs and under Debian's account, which needs root."""

import os
import shutil
from pathlib import Path

_VERSIONS = Path("/usr/lib/postgresql")


def missing() -> str | None:
    """Why no server can be started here; None: it can."""
    if not list(_VERSIONS.glob("*/bin/initdb")):
        return f"no PostgreSQL in {_VERSIONS}"
    return None if os.getuid() == 0 else "root is needed to run PostgreSQL under its own account"


def start_commands(folder: Path, port: int) -> list[list[str]]:
    """The commands that make a database in a folder and start its server on 127.0.0.1.

    The folder becomes the account's, which has to see the folder's parents.
    """
    shutil.chown(folder, "postgres")
    options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder}"
    start = ["start", "--wait", "--options", options, "--log", str(folder / "log")]
    return [_as_postgres("initdb", folder, "--auth", "trust"), _as_postgres("pg_ctl", folder, *start)]


def stop_command(folder: Path) -> list[str]:
    return _as_postgres("pg_ctl", folder, "stop", "--mode", "fast")


def url(port: int) -> str:
    """The database's, as Prefect's server takes it."""
    return f"postgresql+asyncpg://postgres@127.0.0.1:{port}/postgres"


def _as_postgres(program: str, folder: Path, *arguments: str) -> list[str]:
    programs = sorted(_VERSIONS.glob("*/bin"))[-1]
    account = ["env", "--chdir=/", "runuser", "--user", "postgres", "--"]
    return [*account, str(programs / program), "--pgdata", str(folder / "data"), *arguments]
