"""Repeats operations on a store while their fault may pass: one rule for folders, S3, Arrow and temporary files.

storage/errors.py lists the faults that may pass. TBA_STORE_PATIENCE_MINUTES is the limit. No other code of this project
waits for an outage; botocore and s3fs repeat a request for seconds. Every operation may be repeated, because a put
writes the same bytes to the same path.
"""

import errno
import functools
import logging
import math
import os
import random
import tempfile
import time
from collections.abc import Callable
from typing import TypeVar

from storage.errors import EXPIRED, FULL, StoreFull, find_cause

LIMIT = "TBA_STORE_PATIENCE_MINUTES"
# Long enough for a gateway to restart, a network to return, or a disk to be cleared. Shorter than the silence after
# which a Searcher assumes that the Trainer is dead (180 s), so that an outage ends no Searcher.
DEFAULT_MINUTES = 2.0
FIRST_PAUSE_S = 0.25  # each pause is twice the one before
_LONGEST_PAUSE_S = 10.0

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def patience_s() -> float:
    """The limit in seconds. Raises: ValueError: the environment variable is not a number of minutes."""
    text = os.environ.get(LIMIT) or str(DEFAULT_MINUTES)
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 <= minutes < math.inf:
        raise ValueError(
            f"{LIMIT}: got {text!r}; it is the time in minutes, 0 or more, to wait for a store that is away or full. "
            f"Correct it, or leave it out (default: {DEFAULT_MINUTES:g})."
        )
    return 60 * minutes


def patiently(
    operation: Callable[[], Result], action: str, limit_s: float, renew: Callable[[], object] = lambda: None
) -> Result:
    """Returns operation(), repeated while its error may pass, for up to `limit_s` seconds. Raises its last error.

    renew: called after an error of expired credentials, before the next try; reads them again. Its errors count as the
    operation's.
    """
    deadline, pause_s, has_expired = time.monotonic() + limit_s, FIRST_PAUSE_S, False
    while True:
        try:
            if has_expired:
                renew()
            return operation()
        except Exception as error:
            cause = find_cause(error)
            if cause is None or not cause.may_pass or time.monotonic() + pause_s > deadline:
                raise
            logger.warning("store: cannot %s now, retrying: %s (%s)", action, cause.remedy, error)
            has_expired = cause is EXPIRED
        # at random, so that many Searchers do not retry at the same moment
        time.sleep(pause_s * random.uniform(0.5, 1))  # noqa: S311 - no secret
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def with_room(write: Callable[[], Result], name: str, folder: str | os.PathLike[str] | None = None) -> Result:
    """Returns write(), which writes `name` to a folder; repeated while the disk is full (patience_s).

    folder: None: the one for temporary files. Raises: StoreFull: the disk was full for all that time.
    """
    place = os.fspath(folder or tempfile.gettempdir())

    def try_once() -> Result:
        try:
            return write()
        except Exception as error:
            if not _is_for_lack_of_room(error):
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place) from error

    try:
        return patiently(try_once, f"write {name} to {place}", patience_s())
    except OSError as error:
        if not _is_for_lack_of_room(error):
            raise
        remedy = "" if folder else " TMPDIR names a folder on another disk."
        raise StoreFull(f"cannot write {name} to {place}: {FULL.remedy}.{remedy}") from error


def _is_for_lack_of_room(error: Exception) -> bool:
    """Whether the disk is full. safetensors and torch raise errors of their own, without an errno."""
    numbered = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return numbered or "No space left" in str(error) or "quota exceeded" in str(error)


def patient(verb: str) -> Callable[[Callable], Callable]:
    """A decorator: repeats a backend's operation on a path as `patiently` does, for up to the backend's `patience_s`.

    verb: what the operation does to the path, in the warning of a repeat.
    """

    def decorate(operation: Callable) -> Callable:
        @functools.wraps(operation)
        def repeated(self, path: str, *arguments):
            action = f"{verb} {path or 'the root'}"
            return patiently(lambda: operation(self, path, *arguments), action, self.patience_s, self.renew)

        return repeated

    return decorate
