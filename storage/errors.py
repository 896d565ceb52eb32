"""Errors of a store, and the table of their causes: the StoreError of each, its remedy, and whether it may pass.

`find_cause` recognises an exception of a backend, of botocore behind it, or of Arrow. storage/patience.py repeats an
operation whose cause may pass; `translate` makes the StoreError of an exception.
"""

import errno
import re
from dataclasses import dataclass


class StoreError(Exception):
    """An operation on a store failed. The message names the operation, the path and the remedy."""


class NotFound(StoreError):
    """Nothing is stored under this path."""


class AlreadyExists(StoreError):
    """Something is stored under this path, and it is never replaced."""


class StoreUnreachable(StoreError):
    """The store cannot be reached, read or written: address, credentials, permissions or clock."""


class StoreFull(StoreError):
    """No room is left on the store's disk, in this user's quota, or in this machine's temporary folder."""


class UnsafePath(StoreError):
    """A name that leads out of its folder, from a damaged or hostile store, or by a symbolic link."""


class RunConfigMismatch(StoreError):
    """The run exists with another configuration."""


class TornShard(StoreError):
    """A shard cannot be read, or does not hold trajectories."""


class DamagedRecord(StoreError):
    """A small file of the run (pointer, attempt, heartbeat, ledger entry, run.json) does not hold such a record."""


class DamagedPolicy(StoreError):
    """A published policy's files differ from the published ones."""


class DamagedCheckpoint(StoreError):
    """A checkpoint's files differ from the saved ones."""


class Superseded(StoreError):
    """Another process has taken over: a Trainer's run, or a Searcher's name. This one must stop."""


class AlreadyTraining(StoreError):
    """Another Trainer works on the run; this one must not begin."""


class NameTaken(StoreError):
    """Another process searches under this Searcher's name; this one must not begin."""


class ReadOnly(StoreError):
    """A SQL statement that is not read-only."""


class OddAnswer(ConnectionError):
    """An answer without what every answer of S3 to this operation has, such as a proxy's page. Never leaves storage."""


@dataclass(frozen=True)
class Cause:
    """The cause of a failed operation. may_pass: the fault may end without the user, so the operation is repeated."""

    kind: type[StoreError]
    remedy: str
    may_pass: bool = False


MISSING = Cause(NotFound, "it does not exist")
TAKEN = Cause(AlreadyExists, "it exists already and is never replaced")
FULL = Cause(StoreFull, "no room is left; free some space, and the same command resumes", may_pass=True)
AWAY = Cause(
    StoreUnreachable, "the store is away or overloaded; when it is back, the same command resumes", may_pass=True
)
SILENT = Cause(StoreUnreachable, "no answer in time; check the network and AWS_ENDPOINT_URL", may_pass=True)
CUT_OFF = Cause(StoreUnreachable, "no connection; check the network and AWS_ENDPOINT_URL", may_pass=True)
ODD = Cause(
    StoreUnreachable,
    "the answer is not S3's, or was cut short; check AWS_ENDPOINT_URL, and each proxy between here and the store",
    may_pass=True,
)
EXPIRED = Cause(
    StoreUnreachable, "the credentials have expired; renew them, and the same command resumes", may_pass=True
)
SKEWED = Cause(
    StoreUnreachable, "this machine's clock differs from the store's by too much; set the clock", may_pass=True
)
DENIED = Cause(StoreUnreachable, "permission denied; check the credentials and their permissions")
WRONG_KEYS = Cause(
    StoreUnreachable, "the credentials are wrong; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
)
NO_KEYS = Cause(
    StoreUnreachable,
    "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the machine a role",
)
NO_BUCKET = Cause(StoreUnreachable, "its bucket does not exist; create it, or correct the store's URL")
FORBIDDEN = Cause(
    StoreUnreachable, "this account may not read or write here; give it the folder, or name another store"
)
NO_LINKS = Cause(
    StoreUnreachable, "its file system has no hard links, by which a file is created only once; name another folder"
)
REFUSED = Cause(StoreError, "the store refused")

# Error numbers of a local store. ESTALE: a network file system's server was restarted.
_BY_ERRNO = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.ESTALE: AWAY,
    errno.EROFS: FORBIDDEN,
    errno.ENOTSUP: NO_LINKS,
}

# S3's error codes, without capitals and underscores: Arrow writes SLOW_DOWN for SlowDown.
_BY_CODE = {
    "slowdown": AWAY,
    "throttling": AWAY,
    "throttlingexception": AWAY,
    "requestthrottled": AWAY,
    "requestlimitexceeded": AWAY,
    "toomanyrequests": AWAY,
    "bandwidthlimitexceeded": AWAY,
    "serviceunavailable": AWAY,
    "internalerror": AWAY,
    "internalfailure": AWAY,
    # nothing was stored, try again; S3Prefix recognises a lost race before this table is asked
    "operationaborted": AWAY,
    "conditionalrequestconflict": AWAY,
    "preconditionfailed": AWAY,
    "409": AWAY,
    "412": AWAY,
    # the answer to an upload's last request was lost, and the repeated one finds the upload complete
    "nosuchupload": AWAY,
    "requesttimeout": SILENT,
    "networkconnection": CUT_OFF,
    "incompletebody": ODD,
    "baddigest": ODD,
    "xamzcontentsha256mismatch": ODD,
    "expiredtoken": EXPIRED,
    "expiredtokenexception": EXPIRED,
    "tokenrefreshrequired": EXPIRED,
    "requestexpired": EXPIRED,
    "requesttimetooskewed": SKEWED,
    "accessdenied": DENIED,
    "invalidaccesskeyid": WRONG_KEYS,
    "invalidclienttokenid": WRONG_KEYS,
    "invalidsignature": WRONG_KEYS,
    "signaturedoesnotmatch": WRONG_KEYS,
    "unrecognizedclient": WRONG_KEYS,
    "nosuchbucket": NO_BUCKET,
    "nosuchkey": MISSING,
    "resourcenotfound": MISSING,
    "quotaexceeded": FULL,
    "xminiostoragefull": FULL,
}
_BY_STATUS = {408: SILENT, 429: AWAY, 501: REFUSED, 507: FULL}

# By class name, so that a local store never imports botocore; an exception's nearest ancestor in the table counts.
_BY_CLASS = {
    "FileNotFoundError": MISSING,
    "FileExistsError": TAKEN,
    "PermissionError": DENIED,
    "OddAnswer": ODD,
    "NoCredentialsError": NO_KEYS,
    "PartialCredentialsError": NO_KEYS,
    "CredentialRetrievalError": EXPIRED,
    "SSOTokenLoadError": EXPIRED,
    "TokenRetrievalError": EXPIRED,
    "UnauthorizedSSOTokenError": EXPIRED,
    # a body that ended early: aiohttp's name, botocore's, the standard library's
    "ClientPayloadError": ODD,
    "IncompleteReadError": ODD,
    "IncompleteRead": ODD,
    "ResponseStreamingError": ODD,
    "ChecksumError": ODD,
    "FlexibleChecksumError": ODD,
    "ResponseParserError": ODD,
    "TimeoutError": SILENT,
    "ReadTimeoutError": SILENT,
    "ConnectTimeoutError": SILENT,
    "ConnectionError": CUT_OFF,
    "HTTPClientError": CUT_OFF,
    "ClientConnectionError": CUT_OFF,
    "ParamValidationError": REFUSED,
    "BotoCoreError": Cause(StoreUnreachable, "no answer; check the network, AWS_ENDPOINT_URL and AWS_DEFAULT_REGION"),
    "OSError": REFUSED,
    "ClientError": REFUSED,
}

# Arrow's errors are text, and DuckDB repeats it: "AWS Error SLOW_DOWN (HTTP status 503) during GetObject operation: …".
_OF_ARROW = re.compile(r"AWS Error (?P<code>\w+)(?: \(HTTP status (?P<status>\d+)\))? during \w+ operation")
_UNKNOWN_TO_ARROW = re.compile(r"ExceptionName: (?P<code>\w+)")


def error_code(error: BaseException) -> str:
    """S3's code of an error, such as SlowDown; its HTTP status as text if the answer had no code; "" if it has none."""
    return _code_and_status(error)[0]


def is_without_reason(error: BaseException) -> bool:
    """Whether it is Arrow's error of a HEAD request, whose answer has a status but no code such as ExpiredToken."""
    return bool(_OF_ARROW.search(str(error))) and "No response body" in str(error)


def find_cause(error: BaseException) -> Cause | None:
    """The cause of a backend's exception; None when it is not a backend's."""
    code, status = _code_and_status(error)
    known = _BY_CODE.get(code.replace("_", "").lower()) or _BY_STATUS.get(status)
    if known is None and status >= 500:
        known = AWAY
    known = known or _BY_ERRNO.get(getattr(error, "errno", None))
    if known is None and isinstance(error, PermissionError) and error.errno:  # the system's own, not s3fs's
        known = FORBIDDEN
    for ancestor in type(error).__mro__:
        known = known or _BY_CLASS.get(ancestor.__name__)
    return known


def _code_and_status(error: BaseException) -> tuple[str, int]:
    """Code and status of an S3 server's answer, from botocore's error, s3fs's cause, or the text of Arrow's error."""
    for linked in (error, error.__cause__):
        if response := getattr(linked, "response", None):
            return (
                str(response.get("Error", {}).get("Code", "")),
                response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0),
            )
    text = str(error)
    if told := _OF_ARROW.search(text):
        unknown = _UNKNOWN_TO_ARROW.search(text)
        return (unknown or told)["code"], int(told["status"] or 0)
    return "", 0


def translate(error: Exception, action: str, where: str) -> StoreError | None:
    """The StoreError for a backend's exception while doing `action` at `where`; None when it is not a backend's."""
    cause = find_cause(error)
    return cause and cause.kind(f"cannot {action} {where}: {cause.remedy} ({type(error).__name__}: {error})")
