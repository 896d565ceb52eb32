"""Published policies: from the Trainer to Searchers and evaluations.

Before: flows/trainer/outbox.py writes a policy's files; after: flows/searcher/policy_feed.py fetches the newest, and
storage/kept_policies.py decides which ones stay whole.

policies/step=00000040/          Hugging Face format; policy.json, written last, lists the files of the whole policy
policies/step=00000044-a0002/    published by the run's second attempt; the first attempt's policies do not change
policies/step=00000010/          pruned: only policy.json is left, so that every trajectory's fingerprint stays known
policies/latest.json             names the newest policy; replaced in one put, after all of the policy's files exist

A superseded Trainer may still complete a policy, and may replace latest.json in the moment after its last check. The
policy is whole, in its own attempt's folder, and may become the best one, like every policy that a resume undoes. If
latest.json names a policy of an attempt before the newest one that has published, it is not followed: latest_policy
finds the newest attempt's policy by its policy.json. Until the new attempt publishes, the policy of the attempt before
is served; it is not final if the resume undid it.
"""

import logging
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from storage.attempts import Attempt, check_not_superseded, counts, is_superseded, later_attempts
from storage.errors import DamagedRecord, Superseded
from storage.patience import with_room
from storage.policy_delta import can_be_fetched, damaged, fetch, is_anchor_due, lacks_files, make_whole, with_deltas
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
        manifest = with_deltas(store, local_folder, manifest, base and _link(base), cache_dir)
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
        latest = _latest(store)
        if latest is not None and latest.attempt > ref.attempt and _began_later(store, latest.attempt, ref.attempt):
            raise Superseded(
                f"attempt {ref.attempt} at run {store.run} cannot publish policy step {ref.step}: attempt "
                f"{latest.attempt} has published step {latest.step}, so another Trainer has taken over. Stop this one."
            )
    store.put_json(LATEST, ref)


def _began_later(store: RunStore, later: int, attempt: int) -> bool:
    """Whether `later` is an attempt of this run. If only `attempt` is recorded, another program wrote the pointer."""
    return is_superseded(store, later - 1) or not is_superseded(store, attempt - 1)


def policy_path(step: int, attempt: int) -> str:
    return f"policies/step={step:08d}" + (f"-a{attempt:04d}" if attempt > 1 else "")


def latest_policy(store: RunStore) -> PolicyRef | None:
    """The newest complete policy of the newest attempt that has published one; None before the first.

    Raises: DamagedRecord: policies/latest.json cannot be read.
    """
    found = _latest(store)
    if found is None:
        return None
    try:
        later = later_attempts(store, found.attempt)
    except DamagedRecord:
        if newer := newest_policy_after(store, found.attempt):
            return newer
        raise
    if not later:
        return found
    # Searchers ask again until a resumed Trainer has published its first policy, and a long run has many policies.
    if newer := newest_policy_after(store, found.attempt, min(record.resumed_from for record in later)):
        return newer
    return _served(found, later)


def restore_latest(store: RunStore) -> PolicyRef | None:
    """As latest_policy. If latest.json is missing or damaged, writes it again from the newest policy.json."""
    with suppress(DamagedRecord):
        if found := latest_policy(store):
            return found
    if found := newest_policy_after(store, 0):
        found = _served(found, later_attempts(store, found.attempt))
        store.put_json(LATEST, found)
    return found


def _served(found: PolicyRef, later: list[Attempt]) -> PolicyRef:
    """A policy while no later attempt has published: not final if one of them undid it."""
    return found if counts(found.attempt, found.step, later) else replace(found, final=False)


def is_stored(store: RunStore, ref: PolicyRef) -> bool:
    """Whether all files of a published policy and of those that its weights are rebuilt from exist, by their names."""
    return can_be_fetched(store, _link(ref))


def is_latest(store: RunStore, ref: PolicyRef) -> bool:
    """Whether policies/latest.json names the policy."""
    with suppress(DamagedRecord):
        return _latest(store) == ref
    return False


def newest_policy_after(store: RunStore, attempt: int, first_step: int = 0) -> PolicyRef | None:
    """The newest policy of later attempts that is not pruned, found without latest.json.

    first_step: from which their policies are looked for.
    """
    paths = store.list("policies", start_after=f"policies/step={first_step:08d}")
    folders = [path.removesuffix(f"/{MANIFEST}") for path in paths if path.endswith(f"/{MANIFEST}")]
    later = [folder for folder in folders if is_policy(folder) and age(folder)[0] > attempt]
    for folder in sorted(later, key=age, reverse=True):
        with suppress(DamagedRecord):
            found = store.read_json(f"{folder}/{MANIFEST}", Manifest)
            if found is not None and not found.pruned:
                ref = PolicyRef(found.step, folder, found.fingerprint, found.final, found.attempt, published_at="")
                return _checked(ref, f"{folder}/{MANIFEST}")
    return None


def _latest(store: RunStore) -> PolicyRef | None:
    remedy = "The next policy that is published replaces it; `tba train` resumes the run."
    return read_pointer(store, LATEST, PolicyRef, remedy)


def read_pointer(store: RunStore, path: str, kind: type[PolicyRef], remedy: str) -> Any:
    """The policy that a pointer names; None: there is no pointer. Raises: DamagedRecord: it cannot be read."""
    found = store.read_json(path, kind, remedy=remedy)
    return found and _checked(found, f"{path} (run {store.run} in {store.url})")


def _checked(ref: PolicyRef, where: str) -> PolicyRef:
    """The policy, if its names, which come from the store, can become a path. Raises: DamagedRecord: they cannot."""
    if not is_policy(ref.path) or age(ref.path)[1] != ref.step or not is_safe_fingerprint(ref.fingerprint):
        raise DamagedRecord(
            f"{where} names the policy {ref.path!r} of step {ref.step} and fingerprint {ref.fingerprint!r}, which is "
            f"no policy's name. {RESTORE}"
        )
    return ref


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


def published_policies(store: RunStore) -> dict[str, Manifest]:
    """The policy.json of each policy ever published, by folder inside the run; pruned policies included.

    Raises: DamagedRecord: one cannot be read.
    """
    paths = [path for path in store.list("policies") if path.endswith(f"/{MANIFEST}")]
    manifests = transfer_all(lambda path: store.read_json(path, Manifest), paths)
    found = zip(paths, manifests, strict=True)
    return {path.removesuffix(f"/{MANIFEST}"): manifest for path, manifest in found if manifest is not None}
