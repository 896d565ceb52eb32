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

Each side writes its own file first and reads the other's afterwards, so at least one of them sees the other. A Trainer
that sees a policy held keeps it. A Searcher that sees its policy about to be pruned does not make it the best.
best.json moves while the policy is held, so the Trainer looks for held policies first and for the best one afterwards.
"""

import json
import os
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from storage.errors import DamagedPolicy, NotFound, Superseded
from storage.paths import inside
from storage.store import RunStore, transfer_all

MANIFEST = "policy.json"
LATEST = "policies/latest.json"
BEST = "policies/best.json"
_HELD = "policies/held"
_PRUNING = "policies/pruning.json"
_FOLDER = re.compile(r"step=(?P<step>\d{8})(-a(?P<attempt>\d{4}))?")
_CACHED_POLICIES = 2  # the served policy, and the next one
_STALE_DOWNLOAD_S = 3600  # the process of a download this old has died


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

    accuracy: float  # on held-out problems, greedy
    num_problems: int


def policy_ref(step: int, fingerprint: str, *, attempt: int, final: bool = False) -> PolicyRef:
    """A policy that is to be published."""
    return PolicyRef(step, policy_path(step, attempt), fingerprint, final, attempt, published_at="")


def publish_policy(
    store: RunStore, local_folder: str | Path, ref: PolicyRef, cache_dir: str | Path | None = None
) -> PolicyRef:
    """Upload a policy, then point policies/latest.json to it.

    cache_dir: the folder of fetch_policy's copies on this machine. A copy is put there to save the download. On one
    filesystem the copy links to local_folder's files, so these must not be written to again. Superseded if a later
    attempt has published: otherwise Searchers would alternate between two Trainers' policies.
    """
    local_folder = Path(local_folder)
    latest = latest_policy(store)
    if latest is not None and latest.attempt > ref.attempt:
        raise Superseded(
            f"attempt {ref.attempt} at run {store.run} cannot publish policy step {ref.step}: attempt {latest.attempt} "
            f"has published step {latest.step}, so another Trainer has taken over. Stop this one."
        )
    files = {
        file.relative_to(local_folder).as_posix(): file.stat().st_size
        for file in sorted(local_folder.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }
    manifest = {"step": ref.step, "fingerprint": ref.fingerprint, "attempt": ref.attempt, "files": files}
    (local_folder / MANIFEST).write_text(json.dumps(manifest, indent=2))
    store.upload_folder(local_folder, ref.path, last=MANIFEST)
    ref = replace(ref, published_at=datetime.now(UTC).isoformat())
    if cache_dir is not None and store.local_path(ref.path) is None:
        link = partial(shutil.copytree, local_folder, copy_function=_link, dirs_exist_ok=True)
        with suppress(OSError):  # if the disk is full, Searchers download it
            _into_cache(ref, Path(cache_dir), link)
    store.put(LATEST, json.dumps(asdict(ref), indent=2).encode())
    return ref


def policy_path(step: int, attempt: int) -> str:
    return f"policies/step={step:08d}" + (f"-a{attempt:04d}" if attempt > 1 else "")


def latest_policy(store: RunStore) -> PolicyRef | None:
    """The newest complete policy; None before the first."""
    found = store.read_json(LATEST)
    return PolicyRef(**found) if found else None


def best_policy(store: RunStore) -> BestPolicy | None:
    """The complete policy with the highest held-out accuracy; None before the first evaluation.

    A resume may have undone its steps. It was trained and evaluated, so a crash does not remove it.
    """
    found = store.read_json(BEST)
    return BestPolicy(**found) if found else None


def hold_policy(store: RunStore, ref: PolicyRef, searcher: str) -> bool:
    """Keep a policy from being pruned until this Searcher holds another one or releases it. False: it is too late.

    If the Searcher is killed, its policy stays held until the next Searcher of that name holds another one.
    """
    store.put(_held_path(searcher), json.dumps(asdict(ref), indent=2).encode())
    is_doomed = ref.path in (store.read_json(_PRUNING) or [])  # None: nothing has been pruned yet
    return not is_doomed and "pruned" not in json.loads(store.get(f"{ref.path}/{MANIFEST}"))


def release_policy(store: RunStore, searcher: str) -> None:
    """End this Searcher's hold. From now on only best.json can keep the policy."""
    with suppress(NotFound):
        store.delete(_held_path(searcher))


def keep_if_best(store: RunStore, ref: PolicyRef, accuracy: float, num_problems: int) -> bool:
    """Point policies/best.json to a held policy, unless a better one was evaluated; of equal ones the newer wins."""
    best = best_policy(store)
    if best is not None and best.accuracy > accuracy:
        return False
    found = BestPolicy(**asdict(ref), accuracy=accuracy, num_problems=num_problems)
    store.put(BEST, json.dumps(asdict(found), indent=2).encode())
    return True


def _held_path(searcher: str) -> str:
    return f"{_HELD}/{searcher}.json"


def fetch_policy(store: RunStore, ref: PolicyRef, cache_dir: str | Path) -> Path:
    """A local folder with the whole policy: the store's own if the store is on this machine, else a copy in the cache.

    The cache keeps the newest two. NotFound if the policy was pruned; DamagedPolicy if files are not as published.
    """
    own = store.local_path(ref.path)
    if own is not None:
        _check_whole(store, ref, own)
        return own

    def download(folder: Path) -> None:
        store.download_folder(ref.path, folder)
        _check_whole(store, ref, folder)

    return _into_cache(ref, Path(cache_dir), download)


def _into_cache(ref: PolicyRef, cache_dir: Path, fill: Callable[[Path], object]) -> Path:
    """The cache's copy; if there is none, `fill` writes one. The copy is whole or absent, also after a kill."""
    # the fingerprint separates runs of one name in different stores
    cached = inside(cache_dir, f"{Path(ref.path).name}-{ref.fingerprint[:16]}")
    if not cached.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        incoming = Path(tempfile.mkdtemp(prefix=".tmp-", dir=cache_dir))
        try:
            fill(incoming)
            with suppress(OSError):  # another process of this machine was faster: its copy is as good
                os.rename(incoming, cached)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        _trim_cache(cache_dir)
    return cached


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another filesystem, or on one without links
        shutil.copyfile(source, target)


def _check_whole(store: RunStore, ref: PolicyRef, folder: Path) -> None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        found = {name: inside(folder, name).stat().st_size for name in manifest["files"]}
    except FileNotFoundError as error:
        raise NotFound(
            f"policy {ref.path} of run {store.run} in {store.url} is not there in full ({error}): it was pruned, or "
            "its files were removed by hand. Fetch the latest policy."
        ) from error
    for name, published in manifest["files"].items():
        if found[name] != published:
            raise DamagedPolicy(
                f"policy {ref.path} of run {store.run} in {store.url}: {name} has {found[name]} bytes, but {published} "
                "were published. The store lost or changed it; publish the policy again."
            )


def _trim_cache(cache_dir: Path) -> None:
    newest_first = sorted(cache_dir.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
    policies = [folder for folder in newest_first if _FOLDER.match(folder.name)]
    dead_downloads = [
        folder
        for folder in newest_first
        if folder.name.startswith(".tmp-") and time.time() - folder.stat().st_mtime > _STALE_DOWNLOAD_S
    ]
    for folder in policies[_CACHED_POLICIES:] + dead_downloads:
        shutil.rmtree(folder, ignore_errors=True)


def published_policies(store: RunStore) -> dict[str, dict]:
    """The policy.json of each policy ever published, by folder inside the run; pruned policies included."""
    paths = [path for path in store.list("policies") if path.endswith(f"/{MANIFEST}")]
    manifests = transfer_all(lambda path: json.loads(store.get(path)), paths)
    return {path.removesuffix(f"/{MANIFEST}"): manifest for path, manifest in zip(paths, manifests, strict=True)}


def prune_policies(store: RunStore, keep: int) -> None:
    """Delete the weights of all but the newest `keep` policies, the best one and those that Searchers hold.

    Their policy.json stays, marked as pruned. Policies of a later attempt are newer, whatever their step. A partial
    policy, whose Trainer was killed, is deleted.
    """

    def age(folder: str) -> tuple[int, int]:
        match = _FOLDER.fullmatch(Path(folder).name)
        return int(match["attempt"] or 1), int(match["step"])

    files: dict[str, list[str]] = defaultdict(list)
    for path in store.list("policies"):
        folder = "/".join(path.split("/")[:2])
        if _FOLDER.fullmatch(Path(folder).name):  # other names are not policies
            files[folder].append(path)
    unpruned = [folder for folder, paths in files.items() if paths != [f"{folder}/{MANIFEST}"]]
    doomed = sorted(unpruned, key=age)[:-keep]
    if not doomed:
        return
    store.put(_PRUNING, json.dumps(doomed).encode())
    kept = _evaluated(store)
    for folder in doomed:
        if folder not in kept:
            _delete_weights(store, folder, files[folder])


def _delete_weights(store: RunStore, folder: str, files: list[str]) -> None:
    manifest = f"{folder}/{MANIFEST}"
    if manifest not in files:
        store.delete_folder(folder, first=MANIFEST)
        return
    # the mark comes first: files that are gone without it mean damage
    store.put(manifest, json.dumps(json.loads(store.get(manifest)) | {"pruned": True}, indent=2).encode())
    for path in files:
        if path != manifest:
            with suppress(NotFound):  # somebody else is pruning too
                store.delete(path)


def _evaluated(store: RunStore) -> set[str]:
    """Folders of the policies that Searchers hold, and of the best one; in this order (the module's docstring)."""
    folders = set()
    for path in store.list(_HELD):
        if held := store.read_json(path):  # None: released since it was listed
            folders.add(held["path"])
    best = best_policy(store)
    return folders | ({best.path} if best else set())
