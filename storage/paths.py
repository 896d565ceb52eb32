"""Names from a store: checked before they become a path, on this machine or in the store.

Any writer may have chosen the keys of a bucket, a policy's list of files and the path in a pointer.
"""

import os
from pathlib import Path

from storage.errors import UnsafePath


def is_plain(path: object) -> bool:
    """Whether it is a relative path that leads into its folder: no `..`, no empty part, no backslash, all printable."""
    if not isinstance(path, str):
        return False
    inside = f"/{path}/"
    return (
        "//" not in inside and "/../" not in inside and "/./" not in inside and "\\" not in path and path.isprintable()
    )


def check_path(path: str) -> str:
    """Returns the path if it is plain, or empty (the folder itself). Raises: UnsafePath."""
    if path != "" and not is_plain(path):
        raise UnsafePath(
            f"path {path!r} leads out of its folder, or no folder can have it: a name from a store is relative and "
            "has no '..', empty part, backslash or control character. Another program wrote it, or it was damaged: "
            "remove it from the store."
        )
    return path


def inside(folder: Path, name: str) -> Path:
    """folder/name, for a name from a store. Raises: UnsafePath: name or a symbolic link leads out of the folder."""
    target = current = os.path.join(folder, check_path(name))
    while len(current) > len(str(folder)):  # three look-ups; to resolve the whole path takes a dozen
        if os.path.islink(current):
            end, root = os.path.realpath(target), os.path.realpath(folder)
            if not end.startswith(f"{root}/"):
                raise UnsafePath(
                    f"{target} leads to {end}, by a symbolic link out of {folder}. Put the file or folder itself in "
                    "its place."
                )
            break
        current = os.path.dirname(current)
    return Path(target)
