"""Names from a store: checked before they become a path, on this machine or in the store.

Any writer may have chosen the keys of a bucket, a policy's list of files and the path in a pointer.
"""

import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from storage.errors import UnsafePath

LARGEST_GAP = 1_000  # files that a listing may forget, or that were lost, before a later one


def is_plain(path: str) -> bool:
    """Whether it is a relative path that leads into its folder: no `..`, no empty part, no backslash, all printable."""
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


LARGEST_NUMBER = 99_999_999  # of a step, an attempt, a sync or a round: names have eight digits


def first_stray(numbers: Iterable[int], after: int) -> float:
    """The first of some files' numbers that is far beyond the one before it; infinity if none is.

    Writers number their files without gaps, so nothing reads that file and those after it: another program's file may
    have any number in its name.
    """
    for number in sorted(set(numbers)):
        if number - after > LARGEST_GAP:
            return number
        after = max(after, number)
    return math.inf


def newest_number(paths: Iterable[str], name: re.Pattern, exists: Callable[[int], bool]) -> int:
    """The newest of files that are numbered from 1 without gaps; 0: there is none.

    paths: as listed. name: of such a file, with a group `number`. exists: looks a number up, because a listing may lack
    the newest, which would undo a takeover.
    """
    numbers = [int(match["number"]) for match in map(name.fullmatch, paths) if match]
    stray = first_stray(numbers, after=0)
    newest = max((number for number in numbers if number < stray), default=0)
    while exists(newest + 1):
        newest += 1
    return newest


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
