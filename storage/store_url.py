"""The URL of a store: file:///absolute/folder or s3://bucket/prefix. A message never repeats credentials in it."""

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
# KEY:SECRET@ before the bucket, also percent-encoded, and with a missing or an additional slash. A secret key may
# contain '/', so the '@' may be in a later part of the URL, or missing.
CREDENTIALS = r"^([sS]3:/*[^/]*(@|:|%40|%3[aA])|[^/]*/*[^/]*:[^/]*@|[^/]*//+[^/]*@)"
_RULE = "a store is file:///absolute/folder or s3://bucket/prefix"


def default_store() -> str:
    """Root URL of the default store: TBA_STORE, else `.tba/` in the working folder, which git ignores."""
    return as_url(os.environ.get("TBA_STORE") or ".tba")


def as_url(store: str) -> str:
    """The root URL of a store that a user names by URL or folder."""
    is_url = "://" in store or store.lower().startswith(("s3:", "file:"))  # a slash that is missing makes no folder
    return store if is_url else Path(store).absolute().as_uri()


def parse_store_url(url: str, setting: str = "store") -> tuple[str, str]:
    """Scheme (file or s3) and root: the folder, or bucket/prefix.

    Raises: ValueError: the URL is not a store's; the message begins with `setting`.
    """
    if re.match(CREDENTIALS, url):
        raise ValueError(
            f"{setting}: the URL holds credentials; give them in AWS's environment variables or files instead, and "
            "replace them if another person may have seen them"
        )
    if not url.isprintable() or url != url.strip():
        raise ValueError(f"{setting}: the URL begins or ends with a space, or has a control character; {_RULE}")
    if "?" in url or "#" in url:  # what follows may be a signature
        raise ValueError(
            f"{setting}: got {re.split('[?#]', _shown(url))[0]!r} with '?' or '#' after it; {_RULE}, without "
            "parameters. In a folder's name write %3F and %23."
        )
    try:
        parts = urlsplit(url)
    except ValueError:  # its message may repeat the URL
        raise ValueError(f"{setting}: the URL cannot be read; {_RULE}") from None
    path = parts.path.rstrip("/")
    if parts.scheme == "file" and not parts.netloc and path.startswith("/"):
        return "file", unquote(path)
    if parts.scheme != "s3" or not parts.netloc:
        raise ValueError(f"{setting}: got {_shown(url)!r}; {_RULE}")
    return "s3", _bucket_and_prefix(parts.netloc, path, setting)


def one_spelling(url: str) -> str:
    """The URL as it is compared with others: no slash at its end, no '..' in a folder. Raises: ValueError: no store."""
    scheme, root = parse_store_url(url)
    return f"s3://{root}" if scheme == "s3" else Path(os.path.normpath(root or "/")).as_uri()


def _bucket_and_prefix(bucket: str, prefix: str, setting: str) -> str:
    if not _BUCKET.fullmatch(bucket) or {"", ".", ".."} & set(prefix.split("/")[1:]) or "\\" in prefix:
        shown = _shown(f"s3://{bucket}{prefix}")
        raise ValueError(
            f"{setting}: got {shown!r}; {_RULE}: a bucket's name has letters, digits, '.', '-' "
            "and '_' only, and a prefix has no empty part, '.', '..' or backslash, because other programs would "
            "look for the objects elsewhere"
        )
    return f"{bucket}{prefix}"


def _shown(url: str) -> str:
    """The URL without parts that may be secret: all from an authority with '=' or ':' (KEY:SECRET, or a port)."""
    return re.sub(r"//[^/]*[:=].*", "//…", url)
