"""Errors of a store, and the one table that maps backends' exceptions to them."""

import errno


class StoreError(Exception):
    """An operation on a store failed. The message names the operation, the path and the remedy."""


class NotFound(StoreError):
    """Nothing is stored under this path."""


class AlreadyExists(StoreError):
    """Something is stored under this path, and it is never replaced."""


class StoreUnreachable(StoreError):
    """The store cannot be reached, read or written: address, credentials or permissions."""


class StoreFull(StoreError):
    """The store's disk, or this user's share of it, has no room left."""


class RunConfigMismatch(StoreError):
    """The run exists with another configuration."""


class TornShard(StoreError):
    """A shard cannot be read, or does not hold trajectories."""


class DamagedRecord(StoreError):
    """A small file of the run (pointer, attempt, heartbeat, ledger entry, run.json) does not hold such a record."""


class DamagedPolicy(StoreError):
    """A published policy's files differ from the published ones."""


class Superseded(StoreError):
    """A later Trainer has taken over the run; this one must stop."""


class AlreadyTraining(StoreError):
    """Another Trainer works on the run; this one must not begin."""


class ReadOnly(StoreError):
    """A SQL statement that is not read-only."""


# By class name, so that a local store never imports botocore; an exception's nearest ancestor in the table counts.
_BACKEND_ERRORS: dict[str, tuple[type[StoreError], str]] = {
    "FileNotFoundError": (NotFound, "it is not there"),
    "FileExistsError": (AlreadyExists, "it is there already and is never replaced"),
    "PermissionError": (StoreUnreachable, "permission denied; check the credentials and their permissions"),
    "NoCredentialsError": (
        StoreUnreachable,
        "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the machine a role",
    ),
    "BotoCoreError": (StoreUnreachable, "no answer; check the network, AWS_ENDPOINT_URL and AWS_REGION"),
    "TimeoutError": (StoreUnreachable, "no answer in time; check the network and AWS_ENDPOINT_URL"),
    "ConnectionError": (StoreUnreachable, "no connection; check the network and AWS_ENDPOINT_URL"),
    "OSError": (StoreError, "the store refused"),
    "ClientError": (StoreError, "the store refused"),
}

# Before those: what the operating system says, and what s3fs makes of 503 and 500.
_FULL = (StoreFull, "no room is left; free some space, and the same command resumes")
_AWAY = (StoreUnreachable, "the store is away or overloaded; when it is back, the same command resumes")
_BY_ERRNO: dict[int, tuple[type[StoreError], str]] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EBUSY: _AWAY,
    errno.EREMOTEIO: _AWAY,
}


def translate(error: Exception, action: str, where: str) -> StoreError | None:
    """The StoreError for a backend's exception while doing `action` at `where`; None when it is not a backend's."""
    known = _BY_ERRNO.get(getattr(error, "errno", None))
    for ancestor in type(error).__mro__:
        known = known or _BACKEND_ERRORS.get(ancestor.__name__)
    if known is None:
        return None
    kind, remedy = known
    return kind(f"cannot {action} {where}: {remedy} ({type(error).__name__}: {error})")
