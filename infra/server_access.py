"""Access to the Prefect server that a project's stack starts, by an authentication string in every request.

    .tba/.local/prefect_auth_string    the string: made at the first start and kept, since browsers remember it
    .tba/.local/prefect.toml           URL and, while the server runs, string: Prefect's settings in the project's
                                       folder, where prefect.toml is a link to this file
    .tba/.gitignore                    so that `git add` in a user's repository takes neither these nor runs

The first two have mode 600 in a folder of mode 700. Processes get the string in their environment, which other
accounts cannot read; it is on no command line and in no database.
"""

import errno
import json
import os
import secrets
import stat
from pathlib import Path

STRING_FILE, SETTINGS_FILE = "prefect_auth_string", "prefect.toml"
USER = "tba"  # Prefect asks for user:password
NUM_RANDOM_BYTES = 32


def make_private(folder: Path) -> None:
    """Creates the folder if it is missing; denies other accounts access.

    Raises: OSError: it is another account's, or every account may put another one in its place.
    """
    if not folder.parent.exists():
        folder.parent.mkdir(parents=True)
        folder.parent.chmod(stat.S_IMODE(folder.parent.stat().st_mode) & ~stat.S_IWOTH)
    folder.mkdir(exist_ok=True)
    mode = folder.parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(
            errno.EPERM,
            "every account may write to it, and so replace this project's settings; chmod o-w",
            folder.parent,
        )
    folder.chmod(0o700)
    ignored = folder.parent / ".gitignore"
    if not ignored.exists():
        ignored.write_text("*\n")


def known_string(folder: Path) -> str | None:
    """The authentication string of this folder's server; None before its first start."""
    try:
        return (folder / STRING_FILE).read_text().strip() or None
    except FileNotFoundError:
        return None


def auth_string(folder: Path) -> str:
    """The authentication string of this folder's server; made if there is none."""
    known = known_string(folder)
    if known is None:
        known = f"{USER}:{secrets.token_urlsafe(NUM_RANDOM_BYTES)}"
        _write_private(folder / STRING_FILE, f"{known}\n")
    return known


def write_settings(folder: Path, url: str, string: str | None) -> None:
    """Writes Prefect's settings for this server. string: None after the server has stopped."""
    secret = [f"auth_string = {json.dumps(string)}"] if string else []
    _write_private(folder / SETTINGS_FILE, "\n".join(["[api]", f'url = "{url}"', *secret, ""]))


def link_settings(folder: Path, project: Path) -> None:
    """Makes the project's prefect.toml a link to these settings, unless it has one: for `prefect` in its folder."""
    link = project / SETTINGS_FILE
    if not os.path.lexists(link):
        link.symlink_to((folder / SETTINGS_FILE).relative_to(project))


def server_environment(url: str, string: str) -> dict[str, str]:
    """The server's settings: it requires the string, and lets only pages of its own origin read answers."""
    return {
        "PREFECT_SERVER_API_AUTH_STRING": string,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": url.removesuffix("/api"),
    }


def _write_private(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as target:
        target.write(text)
    temporary.replace(file)
