"""Policies that travel as deltas: 99 % of a bfloat16 policy's weights are those of the policy before it.

Before: storage/policies.py publishes or fetches a policy; after: storage/policy_folder.py keeps the copy in the cache.

policies/step=00000040/model.safetensors          whole: the first policy of an attempt, the final one
policies/step=00000042/model.safetensors.delta    what differs from the policy before; so for a large tokenizer.json
policies/step=00000072/model.safetensors{,.delta} both: every 16th, and the best one; published as a delta, then whole

policy.json has the chain, which is the policies before this one, and the digests of the rebuilt files. The last policy
of the chain is the delta's base. A machine begins with the newest policy of the chain in its cache, or with the newest
whole one (the anchor), and applies the deltas after it. A delta is the XOR of two files of one size. So all deltas are
applied in one pass, and one digest shows whether the anchor or a delta is damaged or was replaced.

The weights of every 16th policy are uploaded after latest.json names it, so that no Searcher waits for them. Those of
the best policy are uploaded by the Searcher that evaluated it, before best.json names it: so from_pretrained loads it
from the store as it is, and pruning keeps no chain for it. In a local folder all policies are whole, because their
files are used in place. If a run was copied there from S3, its deltas are rebuilt in the cache.
"""

import logging
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from storage.errors import DamagedPolicy, DamagedRecord, NotFound, UnsafePath
from storage.file_delta import apply_deltas, file_digest, write_delta
from storage.paths import inside
from storage.patience import with_room
from storage.policy_folder import (
    DELTA,
    LONGEST_CHAIN,
    MANIFEST,
    Link,
    Manifest,
    age,
    cached_path,
    drop,
    into_cache,
    link_or_copy,
    manifest_text,
    parse_manifest,
    read_manifest,
    sizes_fault,
)
from storage.store import RunStore, transfer_all

# A machine that joins fetches an anchor and at most 16 deltas, of 1 to 5 % each. The Trainer uploads a sixteenth of the
# weights' bytes for anchors. Twice as many deltas would save it 3 %, and could double what the machine fetches.
ANCHOR_EVERY = 16
_LINK_TRIES = 3
_LARGEST_SHARE = 0.5  # of the files' bytes; a larger delta is not worth its chain
# Larger files travel as deltas, too: a tokenizer, which does not change, may have more bytes than the weights' delta.
# config.json, which the Trainer reads from the store, is far smaller.
_LARGE_BYTES = 2**20

logger = logging.getLogger(__name__)


# --- the Trainer ------------------------------------------------------------------------------------------------------


def with_deltas(
    store: RunStore, folder: Path, policy: Manifest, base: Link | None, cache_dir: str | Path | None
) -> Manifest:
    """The policy.json by which a policy in a local folder is published to a remote store.

    It has a chain, and the folder gets the deltas, if the base is an earlier policy of the same attempt, can be fetched
    from the store and has a sound copy in the cache. Otherwise the policy is published whole.
    """
    large = [name for name, size in policy.files.items() if name.endswith(".safetensors") or size > _LARGE_BYTES]
    if base is not None and cache_dir is not None:
        try:
            published = _published(store, base)
            copy = cached_path(base.path, base.fingerprint, cache_dir)
            chain = [*published.chain, replace(base, whole=published.whole)][-LONGEST_CHAIN:]
            # ValueError: another attempt's base, or this policy itself, which is published again because it was lost
            policy_with_chain = replace(policy, digests=published.digests, chain=chain, whole=False)
            return replace(policy_with_chain, digests=_write_deltas(copy, folder, published.digests))
        except (DamagedRecord, OSError, ValueError) as error:
            logger.info("policy step %d is published whole: %s", policy.step, error)
            for name in large:
                (folder / (name + DELTA)).unlink(missing_ok=True)
    return replace(policy, digests={name: file_digest(folder / name) for name in large})


def _published(store: RunStore, base: Link) -> Manifest:
    """The base's policy.json. Raises: ValueError: the store lacks files for it. DamagedRecord."""
    manifest = store.read_json(f"{base.path}/{MANIFEST}", Manifest)
    if manifest is None or not can_be_fetched(store, base):
        raise ValueError(f"{base.path} was removed from the store, or a policy that it needs")
    return manifest


def _write_deltas(copy: Path, folder: Path, published: dict[str, str]) -> dict[str, str]:
    """Writes the deltas from the base's copy. Returns the digests of the new files.

    published: digests of the base's files. Raises: ValueError: no delta can be made, or it is hardly smaller. OSError.
    """
    sizes = {name: (folder / name).stat().st_size for name in published}
    if any((copy / name).stat().st_size != size for name, size in sizes.items()):
        raise ValueError("its files have other sizes than those of the policy before")
    digests = {}
    for name in published:
        write = partial(write_delta, copy / name, folder / name, folder / (name + DELTA))
        found, digests[name] = with_room(write, f"the changes of {name}")
        if found != published[name]:
            drop(copy)
            raise ValueError(f"the copy {copy} of the policy before was damaged")
    share = sum((folder / (name + DELTA)).stat().st_size for name in published) / max(1, sum(sizes.values()))
    if share > _LARGEST_SHARE:
        raise ValueError(f"its changes take {share:.0%} of its bytes")
    return digests


def is_anchor_due(policy: Manifest) -> bool:
    """Whether a machine that joins later would have to fetch `ANCHOR_EVERY` deltas."""
    return len(policy.needs) >= ANCHOR_EVERY


def make_whole(store: RunStore, path: str, folder: Path, before_last: Callable[[], object] = lambda: None) -> None:
    """Uploads the weights of a policy that is stored as a delta; afterwards its policy.json says that they are there.

    before_last: called before each try to replace policy.json; if it raises, it is not.
    Raises: NotFound. DamagedRecord. DamagedPolicy: the folder has other weights.
    """
    manifest = store.read_json(f"{path}/{MANIFEST}", Manifest)
    if manifest is None or manifest.pruned:
        raise NotFound(f"policy {path} of run {store.run} in {store.url} was pruned or removed")
    if any(file_digest(inside(folder, name)) != digest for name, digest in manifest.digests.items()):
        raise DamagedPolicy(f"policy {path} of run {store.run} in {store.url}: its copy {folder} is damaged; remove it")
    if not manifest.whole:
        store.upload_folder(folder, path, only=manifest.digests)
        store.put(f"{path}/{MANIFEST}", manifest_text(replace(manifest, whole=True)), before_last)


def can_be_fetched(store: RunStore, policy: Link) -> bool:
    """Whether a policy and all that its weights are rebuilt from are stored, by the files' names.

    Takes one listing and reads two policy.json, however long the chain is.
    """
    with suppress(DamagedRecord):
        if (manifest := _unpruned(store, policy)) is None:
            return False
        needed = {link.path: {*manifest.deltas, MANIFEST} for link in manifest.needs} | {policy.path: manifest.stored}
        if manifest.needs:
            anchor = _unpruned(store, manifest.needs[0])
            if anchor is None or not anchor.whole:
                return False
            needed[manifest.needs[0].path] = set(anchor.files)
        found = set(store.list("policies", start_after=min(needed)))
        return all(f"{folder}/{name}" in found for folder, names in needed.items() for name in names)
    return False


def _unpruned(store: RunStore, link: Link) -> Manifest | None:
    """The policy's policy.json; None: it was removed or pruned, or is another policy's. Raises: DamagedRecord."""
    manifest = store.read_json(f"{link.path}/{MANIFEST}", Manifest)
    return manifest if manifest and not manifest.pruned and manifest.fingerprint == link.fingerprint else None


# --- a machine that needs a policy ------------------------------------------------------------------------------------


def fetch(store: RunStore, policy: Link, cache_dir: str | Path) -> Path:
    """The cache's copy of a policy: one process of the machine downloads it, or rebuilds it from another copy.

    Raises: NotFound: it, or a policy that it needs, was pruned. DamagedPolicy: files differ from the published ones.
    """

    def fill(folder: Path) -> None:
        try:
            _download(store, policy, folder)
        except (NotFound, FileNotFoundError) as error:
            raise lacks_files(store, policy, error) from error
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise damaged(store, policy, f"its list of files is not one of a folder ({error})") from error

    return into_cache(cached_path(policy.path, policy.fingerprint, cache_dir), fill)


def lacks_files(store: RunStore, policy: Link, error: Exception) -> NotFound:
    return NotFound(
        f"policy {policy.path} of run {store.run} in {store.url} lacks files ({error}): it was pruned, or its files "
        "were removed by hand. Fetch the latest policy."
    )


def damaged(store: RunStore, policy: Link, fault: str) -> DamagedPolicy:
    return DamagedPolicy(
        f"policy {policy.path} of run {store.run} in {store.url}: {fault}. The store lost or changed it; publish the "
        "policy again."
    )


def _download(store: RunStore, policy: Link, folder: Path) -> None:
    text = store.get(f"{policy.path}/{MANIFEST}")  # before the files: those that it names stay if it is replaced now
    manifest = _checked(store, policy, text)
    _download_files(store, policy, manifest, manifest.files.keys() - manifest.digests.keys(), folder)
    if not _rebuild_from_a_copy(store, policy, manifest, folder):
        if manifest.whole:
            _download_files(store, policy, manifest, manifest.digests, folder)
        elif fault := _rebuild(store, policy, manifest, manifest.anchor, None, folder):
            raise damaged(store, policy, fault)
    (folder / MANIFEST).write_bytes(text)


def _download_anchor(store: RunStore, anchor: Link, folder: Path) -> None:
    text = store.get(f"{anchor.path}/{MANIFEST}")
    manifest = _checked(store, anchor, text)
    if not manifest.whole:  # its own anchor is not looked for, so that a chain ends
        raise damaged(store, anchor, "a later policy needs its weights, but it is stored as a delta")
    _download_files(store, anchor, manifest, manifest.files, folder)
    (folder / MANIFEST).write_bytes(text)


def _checked(store: RunStore, policy: Link, text: bytes) -> Manifest:
    """The content of this policy's policy.json. Raises: DamagedPolicy: it is not. NotFound: the policy was pruned."""
    try:
        manifest = parse_manifest(text)
    except ValueError as error:
        raise damaged(store, policy, str(error)) from error
    if manifest.fingerprint != policy.fingerprint or (manifest.attempt, manifest.step) != age(policy.path):
        raise damaged(
            store, policy, f"{MANIFEST} is of step {manifest.step} and fingerprint {manifest.fingerprint!r}, "
            f"but {policy.fingerprint!r} was published"
        )  # fmt: skip
    if manifest.pruned:
        raise NotFound(f"{policy.path}/{MANIFEST} is marked as pruned")
    return manifest


def _download_files(store: RunStore, policy: Link, manifest: Manifest, names: Iterable[str], folder: Path) -> None:
    """Downloads some of the policy's files. Raises: DamagedPolicy: they are not those that were published."""
    store.download_folder(policy.path, folder, only=names)
    if fault := sizes_fault(folder, {name: manifest.files[name] for name in names}):
        raise damaged(store, policy, fault)
    for name in manifest.digests.keys() & set(names):
        if file_digest(inside(folder, name)) != manifest.digests[name]:
            raise damaged(store, policy, f"{name} is not the published file, which had as many bytes")


def _rebuild_from_a_copy(store: RunStore, policy: Link, manifest: Manifest, folder: Path) -> bool:
    """Rebuilds the weights from the newest policy of the chain in the cache. Returns False if none of them will do.

    Damaged copies are removed.
    """
    for number in reversed(range(len(manifest.chain))):
        copy = _copy_of(manifest.chain[number], folder)
        if not copy.is_dir():
            continue
        try:
            fault = _rebuild(store, policy, manifest, number, copy, folder)
        except (NotFound, FileNotFoundError) as error:  # a delta was pruned, or another process trimmed the cache
            fault = str(error)
        if fault is None:
            return True
        logger.warning("policy %s cannot be rebuilt from the copy %s: %s", policy.path, copy, fault)
        if not _is_intact(copy):
            drop(copy)
    return False


def _copy_of(link: Link, folder: Path) -> Path:
    return cached_path(link.path, link.fingerprint, folder.parent)


def _rebuild(
    store: RunStore, policy: Link, manifest: Manifest, start: int, copy: Path | None, folder: Path
) -> str | None:
    """Writes the weights of the chain's policy at `start`, changed by all deltas after it. Returns how they are wrong.

    copy: of that policy; None: it is an anchor, which is downloaded unless it is in the cache.
    """
    base, paths = manifest.chain[start], [link.path for link in manifest.chain[start + 1 :]] + [policy.path]
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder.parent) as parts:
        folders = [Path(parts, Path(path).name) for path in paths]
        transfer_all(lambda pair: store.download_folder(*pair, only=manifest.deltas), zip(paths, folders, strict=True))
        if not copy:
            # The lock of a newer policy is held, and this one's is taken: no two processes wait for each other.
            fetch = partial(into_cache, _copy_of(base, folder), partial(_download_anchor, store, base))
            copy = linked(fetch, manifest.digests, Path(parts, "anchor"))
        for name, published in manifest.digests.items():
            deltas, target = [inside(part, name + DELTA) for part in folders], inside(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            write = partial(apply_deltas, inside(copy, name), deltas, target)
            try:
                digest = with_room(write, f"{name} of policy {policy.path}", folder.parent)
            except ValueError as error:
                return str(error)
            if digest != published:
                return f"{name}, rebuilt from {base.path} and {len(paths)} deltas, is not the published file"
    return None


def linked(fetch: Callable[[], Path], names: Iterable[str], folder: Path) -> Path:
    """A new folder with links to these files of the cache's copy, which another process may remove meanwhile.

    fetch: returns the copy. Raises: NotFound: it was removed again and again.
    """
    folder.mkdir()
    for _ in range(_LINK_TRIES):
        copy = fetch()
        with suppress(FileNotFoundError):
            for name in names:
                inside(folder, name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(inside(copy, name), inside(folder, name))
            return folder
    raise NotFound(f"other processes have removed {copy} from the cache {_LINK_TRIES} times, to make room")


def _is_intact(copy: Path) -> bool:
    with suppress(OSError, ValueError, UnsafePath):
        return all(file_digest(inside(copy, name)) == found for name, found in read_manifest(copy).digests.items())
    return False
