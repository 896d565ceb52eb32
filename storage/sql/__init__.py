"""The queries of storage/, one file each, named by a verb phrase."""

from functools import cache
from importlib.resources import files


@cache
def sql(name: str) -> str:
    """The text of `storage/sql/<name>.sql`."""
    return files(__name__).joinpath(f"{name}.sql").read_text(encoding="utf-8")
