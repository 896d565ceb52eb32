"""Published policies: from the Trainer to Searchers and evaluations.

Before: flows/trainer/outbox.py writes a policy's files; after: flows/searcher/policy_feed.py fetches the newest.

policies/step=00000040/          Hugging Face format; policy.json, written last, lists the files of the whole policy
policies/step=00000044-a0002/    published by the run's second attempt; the first attempt's policies do not change
policies/step=00000010/          pruned: only policy.json is left, so that every trajectory's fingerprint stays known
policies/latest.json             names the newest policy; replaced in one put, after all of the policy's files exist
policies/best.json               names the one with the highest held-out accuracy; replaced in one put

The Trainer prunes while a Searcher evaluates, perhaps on another machine. Two files keep an evaluated policy whole:

policies/held/s0.json            names the policy that Searcher s0 evaluates
policies/pruning.json            names the policies that the Trainer is about to prune

Each side writes its own file before it reads the other's, so at least one of them sees the other's file. If the Trainer
sees that a policy is held, it keeps it. If the Searcher sees that its policy is about to be pruned, it does not make it
the best. best.json changes while the policy is held, so the Trainer reads held/ before best.json.

A superseded Trainer may still complete a policy, and may replace latest.json in the moment after its last check. The
policy is whole, in its own attempt's folder, and may become the best one, like every policy that a resume undoes. If
latest.json names a policy of an attempt before the newest one that has published, it is not followed: latest_policy
finds the newest attempt's policy by its policy.json. Until the new attempt publishes, the policy of the attempt before
is served; it is not final if the resume undid it.
"""

import json
import logging
import math
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat

from storage.attempts import check_not_superseded, counts, is_superseded, list_attempts
from storage.errors import DamagedPolicy, DamagedRecord, NotFound, Superseded, UnsafePath
from storage.patience import with_room
from storage.policy_delta import can_be_fetched, damaged, fetch, is_anchor_due, lacks_files, make_whole, travel_form
from storage.policy_folder import (
    MANIFEST,
    Link,
    Manifest,
    age,
    cached_path,
    drop,
    folder_fault,
    into_cache,
    is_policy,
    is_safe_fingerprint,
    link_or_copy,
    manifest_text,
    read_manifest,
)
from storage.store import RESTORE, RunStore, transfer_all

LATEST = "policies/latest.json"
BEST = "policies/best.json"
_HELD = "policies/held"
_PRUNING = "policies/pruning.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicyRef:
    """The content of policies/latest.json."""

    step: int
    path: str  # of the folder, inside the run
    fingerprint: str  # checksum of the weights
    final: bool  # the run's last: Searchers stop here
    attempt: int
    published_at: str  # UTC, ISO 8601


@dataclass(frozen=True)
class BestPolicy(PolicyRef):
    """The content of policies/best.json."""

    accuracy: FiniteFloat  # on held-out problems, greedy
    num_problems: int


def policy_ref(step: int, fingerprint: str, *, attempt: int, final: bool = False) -> PolicyRef:
    """The reference to a policy that will be published."""
    return PolicyRef(step, policy_path(step, attempt), fingerprint, final, attempt, published_at="")


def publish_policy(
    store: RunStore,
    local_folder: str | Path,
    ref: PolicyRef,
    cache_dir: str | Path | None = None,
    base: PolicyRef | None = None,
) -> PolicyRef:
    """Uploads a policy, then points policies/latest.json to it. Returns the reference with the time of publication.

    cache_dir: the folder of fetch_policy's copies on this machine. A copy is put there to save the download. On one
    filesystem the copy links to local_folder's files, so do not write to these again.
    base: the policy that this Trainer published before. A remote store gets the changes since instead of the weights,
    where that pays (storage/policy_delta.py); of the final policy it gets both.
    Raises: Superseded: a later attempt has begun, before policy.json or before the pointer was written. (Otherwise
    Searchers would alternate between two Trainers' policies.)
    """
    local_folder, is_remote = Path(local_folder), store.local_path(ref.path) is None
    files = {
        file.relative_to(local_folder).as_posix(): file.stat().st_size
        for file in sorted(local_folder.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }
    manifest = Manifest(ref.step, ref.fingerprint, ref.attempt, files, ref.final)
    if is_remote:
        manifest = travel_form(store, local_folder, manifest, base and _link(base), cache_dir)
        manifest = replace(manifest, whole=manifest.whole or ref.final)
    text = manifest_text(manifest)
    with_room(lambda: (local_folder / MANIFEST).write_bytes(text), f"{MANIFEST} of run {store.run}")
    check = partial(check_not_superseded, store, ref.attempt)
    store.upload_folder(local_folder, ref.path, last=MANIFEST, before_last=check, only=manifest.stored)
    ref = replace(ref, published_at=datetime.now(UTC).isoformat())
    if cache_dir is not None and is_remote:
        copy = partial(
            shutil.copytree, copy_function=link_or_copy, dirs_exist_ok=True, ignore=lambda *_: manifest.deltas
        )
        with suppress(OSError):  # if the disk is full, Searchers download it
            into_cache(_cached(ref, cache_dir), partial(copy, local_folder), waits_for_room=False)
    point_to(store, ref)
    if is_anchor_due(manifest):  # after the pointer, so that no Searcher waits for it
        make_whole(store, ref.path, local_folder, before_last=check)
    return ref


def point_to(store: RunStore, ref: PolicyRef) -> None:
    """Makes policies/latest.json name a policy. Raises: Superseded: a later attempt has begun or has published."""
    check_not_superseded(store, ref.attempt)
    with suppress(DamagedRecord):  # it is about to be replaced
        latest = _read_pointer(store, LATEST, PolicyRef)
        if latest is not None and latest.attempt > ref.attempt and _began_later(store, latest.attempt, ref.attempt):
            raise Superseded(
                f"attempt {ref.attempt} at run {store.run} cannot publish policy step {ref.step}: attempt "
                f"{latest.attempt} has published step {latest.step}, so another Trainer has taken over. Stop this one."
            )
    store.put(LATEST, json.dumps(asdict(ref), indent=2).encode())


def _began_later(store: RunStore, later: int, attempt: int) -> bool:
    """Whether `later` is an attempt of this run. If only `attempt` is recorded, another program wrote the pointer."""
    return is_superseded(store, later - 1) or not is_superseded(store, attempt - 1)


def policy_path(step: int, attempt: int) -> str:
    return f"policies/step={step:08d}" + (f"-a{attempt:04d}" if attempt > 1 else "")


def latest_policy(store: RunStore) -> PolicyRef | None:
    """The newest complete policy of the newest attempt that has published one; None before the first.

    Raises: DamagedRecord: policies/latest.json cannot be read.
    """
    found = _read_pointer(store, LATEST, PolicyRef)
    if found is None or not is_superseded(store, found.attempt):
        return found
    if newer := newest_policy_after(store, found.attempt):
        return newer
    return found if counts(found.attempt, found.step, list_attempts(store)) else replace(found, final=False)


def is_stored(store: RunStore, ref: PolicyRef) -> bool:
    """Whether all files of a published policy and of those that its weights are rebuilt from exist, by their names."""
    return can_be_fetched(store, _link(ref))


def is_latest(store: RunStore, ref: PolicyRef) -> bool:
    """Whether policies/latest.json names the policy."""
    with suppress(DamagedRecord):
        return _read_pointer(store, LATEST, PolicyRef) == ref
    return False


def newest_policy_after(store: RunStore, attempt: int) -> PolicyRef | None:
    """The newest policy of later attempts that is not pruned, found without latest.json."""
    paths = store.list("policies", start_after=_first_place_after(store, attempt))
    folders = [path.removesuffix(f"/{MANIFEST}") for path in paths if path.endswith(f"/{MANIFEST}")]
    later = [folder for folder in folders if is_policy(folder) and age(folder)[0] > attempt]
    for folder in sorted(later, key=age, reverse=True):
        with suppress(DamagedRecord):
            found = store.read_json(f"{folder}/{MANIFEST}", Manifest)
            if found is not None and not found.pruned:
                ref = PolicyRef(found.step, folder, found.fingerprint, found.final, found.attempt, published_at="")
                return _checked(ref, f"{folder}/{MANIFEST}")
    return None


def _first_place_after(store: RunStore, attempt: int) -> str | None:
    """Where a listing of later attempts' policies may begin: at the step that the first of them resumed from.

    Searchers ask again until a resumed Trainer has published its first policy, and a long run has many policies.
    """
    if not attempt:
        return None
    try:
        resumed_from = [record["resumed_from"] for record in list_attempts(store) if record["attempt"] > attempt]
    except DamagedRecord:
        return None
    return f"policies/step={min(resumed_from, default=0):08d}"


def _read_pointer(store: RunStore, path: str, kind: type[PolicyRef]) -> Any:
    """The policy that a pointer names; None: there is no pointer. Raises: DamagedRecord: it cannot be read."""
    of_best = "Delete it: the next better policy is named there, and until then none is."
    of_latest = "The next policy that is published replaces it; `tba train` resumes the run."
    found = store.read_json(path, kind, remedy=of_best if path == BEST else of_latest)
    return found and _checked(found, f"{path} (run {store.run} in {store.url})")


def _checked(ref: PolicyRef, where: str) -> PolicyRef:
    """The policy, if its names, which come from the store, can become a path. Raises: DamagedRecord: they cannot."""
    if not is_policy(ref.path) or age(ref.path)[1] != ref.step or not is_safe_fingerprint(ref.fingerprint):
        raise DamagedRecord(
            f"{where} names the policy {ref.path!r} of step {ref.step} and fingerprint {ref.fingerprint!r}, which is "
            f"no policy's name. {RESTORE}"
        )
    return ref


def best_policy(store: RunStore) -> BestPolicy | None:
    """The complete policy with the highest held-out accuracy; None before the first evaluation.

    It stays the best policy if a resume undid its steps. Raises: DamagedRecord: policies/best.json cannot be read.
    """
    return _read_pointer(store, BEST, BestPolicy)


def hold_policy(store: RunStore, ref: PolicyRef, searcher: str) -> bool:
    """Keeps a policy from being pruned until this Searcher holds another one or releases it. False: it is too late.

    If the Searcher is killed, its policy stays held until the next Searcher of that name holds another one.
    """
    store.put(_held_path(searcher), json.dumps(asdict(ref), indent=2).encode())
    try:
        doomed = store.read_json(_PRUNING, list[str]) or []  # None: nothing has been pruned yet
        manifest = store.read_json(f"{ref.path}/{MANIFEST}", Manifest)
    except DamagedRecord as error:
        logger.warning("the policy may be pruned, so it cannot become the best one: %s", error)
        return False
    return ref.path not in doomed and manifest is not None and not manifest.pruned


def release_policy(store: RunStore, searcher: str) -> None:
    """Ends this Searcher's hold. After that only best.json can keep the policy."""
    with suppress(NotFound):
        store.delete(_held_path(searcher))


def keep_if_best(
    store: RunStore,
    ref: PolicyRef,
    accuracy: float,
    num_problems: int,
    cache_dir: str | Path | None = None,
    check: Callable[[], object] = lambda: None,
) -> bool:
    """Points policies/best.json to a held policy, unless another has a higher accuracy. Returns whether it did.

    check: called right before a file is replaced; if it raises, none is. The upload may take minutes, after which
    another process may hold another policy under the name.
    cache_dir: as of fetch_policy, for a policy that is stored as a delta: its weights are uploaded before. None: it is
    rebuilt in a temporary folder.
    A policy whose accuracy is not finite, because a reward was NaN, or whose weights cannot be fetched any more, does
    not become the best.
    """
    if not math.isfinite(accuracy):
        return False
    if _is_beaten(store, accuracy):
        return False
    try:
        _store_weights(store, ref, cache_dir, check)
    except (NotFound, DamagedPolicy, DamagedRecord, UnsafePath) as error:
        logger.warning("this policy does not become the best one, because it cannot be stored whole: %s", error)
        return False
    if _is_beaten(store, accuracy):  # meanwhile
        return False
    found = BestPolicy(**asdict(ref), accuracy=accuracy, num_problems=num_problems)
    check()
    store.put(BEST, json.dumps(asdict(found), indent=2).encode())
    return True


def _is_beaten(store: RunStore, accuracy: float) -> bool:
    try:
        best = best_policy(store)
    except DamagedRecord as error:
        logger.warning("this policy becomes the best one, because best.json cannot be read: %s", error)
        return False
    return best is not None and best.accuracy > accuracy


def _store_weights(store: RunStore, ref: PolicyRef, cache_dir: str | Path | None, check: Callable[[], object]) -> None:
    """Uploads a policy's weights if only a delta is stored. Raises: NotFound: the policy was pruned meanwhile."""
    manifest = store.read_json(f"{ref.path}/{MANIFEST}", Manifest)
    if manifest is None or manifest.pruned:  # its hold was taken over by another Searcher of the name
        raise NotFound(f"policy {ref.path} of run {store.run} in {store.url} was pruned or removed")
    if not manifest.whole:
        with tempfile.TemporaryDirectory(prefix="tba-best-") as temporary:
            make_whole(store, ref.path, fetch_policy(store, ref, cache_dir or temporary), before_last=check)


def _held_path(searcher: str) -> str:
    return f"{_HELD}/{searcher}.json"


def fetch_policy(store: RunStore, ref: PolicyRef, cache_dir: str | Path) -> Path:
    """A local folder with the whole policy: the store's own if the store is on this machine, else a copy in the cache.

    The cache keeps the newest two copies. A damaged copy is removed and fetched again.
    Raises: NotFound: the policy was pruned. DamagedPolicy: files in the store differ from the published ones.
    """
    _checked(ref, f"run {store.run} in {store.url}")
    own = store.local_path(ref.path)
    if own is None or _is_delta(own):
        return fetch(store, _link(ref), cache_dir)
    try:
        fault = folder_fault(own)
    except FileNotFoundError as error:
        raise lacks_files(store, _link(ref), error) from error
    if fault:
        raise damaged(store, _link(ref), fault)
    return own


def _is_delta(folder: Path) -> bool:
    """Whether a folder lacks the weights: the run was copied from a remote store."""
    with suppress(FileNotFoundError, ValueError):
        return not read_manifest(folder).whole
    return False


def drop_cached_policy(ref: PolicyRef, cache_dir: str | Path) -> bool:
    """Removes the cache's copy, so that the next fetch downloads it. Returns False if there is none."""
    return drop(_cached(ref, cache_dir))


def _cached(ref: PolicyRef, cache_dir: str | Path) -> Path:
    return cached_path(ref.path, ref.fingerprint, cache_dir)


def _link(ref: PolicyRef) -> Link:
    return Link(ref.path, ref.fingerprint, whole=False)


def published_policies(store: RunStore) -> dict[str, dict]:
    """The policy.json of each policy ever published, by folder inside the run; pruned policies included.

    Raises: DamagedRecord: one cannot be read.
    """
    paths = [path for path in store.list("policies") if path.endswith(f"/{MANIFEST}")]
    manifests = transfer_all(lambda path: store.read_json(path, Manifest), paths)
    found = zip(paths, manifests, strict=True)
    return {path.removesuffix(f"/{MANIFEST}"): asdict(manifest) for path, manifest in found if manifest is not None}


def prune_policies(store: RunStore, keep: int) -> None:
    """Deletes the weights of all policies except the newest `keep`, the best one and those that Searchers hold.

    Policies that the weights of a kept one are rebuilt from are kept, too. The policy.json of a pruned policy stays,
    marked as pruned. Policies of a later attempt are newer, whatever their step. A partial policy, whose Trainer was
    killed, is deleted. No policy is pruned while best.json, a file in held/ or a kept policy.json is damaged.
    """
    files: dict[str, list[str]] = defaultdict(list)
    for path in store.list("policies"):
        folder = "/".join(path.split("/")[:2])
        if is_policy(folder):
            files[folder].append(path)
    unpruned = sorted((folder for folder, paths in files.items() if paths != [f"{folder}/{MANIFEST}"]), key=age)
    try:
        kept = _with_needed(store, set(unpruned[-keep:]))
        doomed = [folder for folder in unpruned if folder not in kept]
        if not doomed:
            return
        store.put(_PRUNING, json.dumps(doomed).encode())
        kept |= _with_needed(store, _evaluated(store) - kept)
    except DamagedRecord as error:
        logger.warning("no policy is pruned for now, because held, best or newest ones cannot be read: %s", error)
        return
    for folder in doomed:
        if folder not in kept:
            _delete_weights(store, folder, files[folder])


def _with_needed(store: RunStore, folders: set[str]) -> set[str]:
    """The policies, and those that their weights are rebuilt from."""
    manifests = (store.read_json(f"{folder}/{MANIFEST}", Manifest) for folder in sorted(folders))
    return folders | {link.path for manifest in manifests if manifest is not None for link in manifest.needs}


def _delete_weights(store: RunStore, folder: str, files: list[str]) -> None:
    manifest = f"{folder}/{MANIFEST}"
    if manifest not in files:
        store.delete_folder(folder, first=MANIFEST)
        return
    try:
        published = store.read_json(manifest, dict[str, Any])
    except DamagedRecord as error:
        logger.warning("policy %s is not pruned: %s", folder, error)
        return
    # the mark is written first: missing files without it mean damage
    store.put(manifest, json.dumps((published or {}) | {"pruned": True}, indent=2).encode())
    for path in files:
        if path != manifest:
            store.discard(path)


def _evaluated(store: RunStore) -> set[str]:
    """Folders of the policies that Searchers hold, then of the best one; the module's docstring explains the order."""
    folders = set()
    for path in store.list(_HELD):
        if held := store.read_json(path, PolicyRef, remedy="Delete it if no Searcher evaluates now."):
            folders.add(held.path)  # None: released since it was listed
    best = best_policy(store)
    return folders | ({best.path} if best else set())
