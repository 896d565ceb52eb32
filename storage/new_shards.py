"""Finds the shards that a reader has not seen.

Before: storage/shards.py commits a shard; after: storage/intake.py reads and checks it.

    heads/s0=00000042     an empty file: s0 has committed its rounds up to 42

A Searcher writes its head after each shard, and deletes the one before. So one listing, as long as there are Searchers,
says what is new, and the new shards are read by their names.

A head saves requests and decides nothing. It may be late, missing, left over, or of a store that lost shards. So
NewShards scans the shards themselves (`new_shards`) at first, whenever a head names a shard that is not there, and
every SCAN_S. A shard whose Searcher was killed before it wrote the head is found by then, or by the head of the
Searcher's next shard. Known Searchers without a head, of an older version, are listed each time.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from pyarrow.fs import FileSelector

from storage.paths import first_stray
from storage.shards import (
    HEAD_NAME,
    advance_head,
    files_named,
    is_searcher_id,
    list_blocks,
    log_folder,
    lowered_to_whole_blocks,
    marked_through,
    next_round,
    refused_rounds,
    rounds_of,
    shard_path,
)
from storage.store import RunStore, scans, transfer_all, transfer_each

SCAN_S = 300.0  # a shard without a head is found this late at most
MOST_BY_HEAD = 256  # rounds of a Searcher that are read by name; beyond that its log is listed


def new_shards(store: RunStore, seen: dict[str, int], searchers: Iterable[str] | None = None) -> dict[str, list[int]]:
    """Per searcher the committed rounds after `seen[searcher]`, in order; of a searcher not in `seen` all that count.

    searchers: those to look at, which exist; None: all. Takes a listing of each: NewShards needs fewer.
    Refused rounds, and searchers without new rounds, are left out. A round that is missing before listed ones is looked
    up by its path, so that an incomplete listing does not lose it.
    """
    marked = marked_through(store.list("expired"))

    def listed_after_seen(searcher: str) -> list[int]:
        last = max(seen.get(searcher, -1), marked.get(searcher, -1))
        start_after = shard_path(searcher, last) if last >= 0 else None
        return [file.rounds[0] for file in files_named(store.list(log_folder(searcher), start_after=start_after))]

    if searchers is None:
        folders = [name for name in store.folders("trajectories") if name.startswith("searcher=")]
        names = [name.removeprefix("searcher=") for name in folders]
        searchers = [name for name in names if is_searcher_id(name)]
    searchers = list(searchers)
    listed = dict(zip(searchers, transfer_each(listed_after_seen, searchers), strict=True))
    blocks = list_blocks(store)  # listed after the shards: a shard deleted before it was listed is in a compacted file
    expired = lowered_to_whole_blocks(marked, blocks)
    new = {}
    for searcher, rounds in listed.items():
        last = max(seen.get(searcher, -1), expired.get(searcher, -1))
        compacted = (number for block in blocks.get(searcher, ()) for number in rounds_of(block) if number > last)
        listed_or_compacted = {*rounds, *compacted}
        stray = first_stray(listed_or_compacted, last)
        new[searcher] = {number for number in listed_or_compacted if number < stray}
        new[searcher] |= _unlisted(store, searcher, last + 1, new[searcher])
    refused = refused_rounds(store) if any(new.values()) else {}
    left = {searcher: sorted(rounds - refused.get(searcher, set())) for searcher, rounds in new.items()}
    return {searcher: rounds for searcher, rounds in left.items() if rounds}


def _unlisted(store: RunStore, searcher: str, first: int, listed: set[int]) -> set[int]:
    """Stored rounds from `first` on that a listing lacks, though it has later ones."""
    missing = set(range(first, max(listed))) - listed if listed else set()
    is_there = transfer_all(lambda number: store.exists(shard_path(searcher, number)), missing) if missing else []
    return {number for number, found in zip(missing, is_there, strict=True) if found}


@scans
def read_heads(store: RunStore) -> dict[str, int]:
    """By Searcher, in order, the last committed round."""
    # Arrow's client lists a thousand names in a fifth of the time of `store.list`, which checks the answers more.
    filesystem, run = store.arrow_filesystem()
    names, through = [], {}
    for info in filesystem.get_file_info(FileSelector(f"{run}/heads", allow_not_found=True)):
        with suppress(UnicodeDecodeError):  # another program's file
            names.append(f"heads/{info.base_name}")
    for name in names:
        if match := HEAD_NAME.fullmatch(name):
            through[match["searcher"]] = max(int(match["through"]), through.get(match["searcher"], -1))
    return dict(sorted(through.items()))


def restore_head(store: RunStore, searcher: str) -> int:
    """Makes a Searcher's head what its shards say, whatever an earlier process left. Returns its next round."""
    number = next_round(store, searcher)
    if number:
        advance_head(store, searcher, number - 1)
    for path in store.list("heads"):
        head = HEAD_NAME.fullmatch(path)
        if head and head["searcher"] == searcher and int(head["through"]) != number - 1:
            store.delete(path)
    return number


class NewShards:
    """Finds the shards that a reader has not seen, in requests in proportion to their number."""

    def __init__(self, store: RunStore, clock: Callable[[], float] = time.monotonic):
        self._store, self._clock = store, clock
        self._scanned_at: float | None = None
        self._known: set[str] = set()  # Searchers
        self._refused: dict[str, set[int]] = {}  # rounds, by Searcher
        self._expired: dict[str, int] = {}
        self.compacted: dict[str, set[int]] = {}
        """Blocks that had a compacted file at the last scan. Upkeep deletes their shards an hour later, by default."""
        self._wrong: dict[str, int] = {}  # heads that name shards which are not there

    def find(self, seen: dict[str, int]) -> dict[str, list[int]]:
        """As new_shards. A round may be named that does not exist: then call `scan`."""
        if self._scanned_at is None or self._clock() - self._scanned_at >= SCAN_S:
            return self.scan(seen)
        heads = {name: last for name, last in read_heads(self._store).items() if last != self._wrong.get(name)}
        last = {name: max(seen.get(name, -1), self._expired.get(name, -1)) for name in heads}
        if any(through - last[name] > MOST_BY_HEAD for name, through in heads.items()):
            return self.scan(seen)
        new = {name: set(range(last[name] + 1, heads[name] + 1)) for name in heads}
        left = {name: sorted(rounds - self._refused.get(name, set())) for name, rounds in new.items()}
        left |= new_shards(self._store, seen, self._known - heads.keys()) if self._known - heads.keys() else {}
        self._known |= left.keys()
        return {name: rounds for name, rounds in sorted(left.items()) if rounds}

    def scan(self, seen: dict[str, int]) -> dict[str, list[int]]:
        """As new_shards, from the shards themselves."""
        heads = read_heads(self._store)  # before the shards, which are therefore there
        new = new_shards(self._store, seen)
        self._refused, self.compacted = refused_rounds(self._store), list_blocks(self._store)
        self._expired = lowered_to_whole_blocks(marked_through(self._store.list("expired")), self.compacted)
        self._known = {*seen, *new}
        for name, through in heads.items():
            counting, known = new.get(name, ()), (seen.get(name, -1), self._expired.get(name, -1))
            if through > max(*counting, *self._refused.get(name, ()), *known):
                self._wrong[name] = through
        self._scanned_at = self._clock()
        return new
