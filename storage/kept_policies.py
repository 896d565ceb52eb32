"""Which published policies stay whole: the newest, the best one, and those that Searchers evaluate.

Before: storage/policies.py publishes them; after: flows/search.py evaluates one, and flows/trainer/outbox.py prunes.

policies/best.json               names the one with the highest held-out accuracy; replaced in one put

The Trainer prunes while a Searcher evaluates, perhaps on another machine. Two files keep an evaluated policy whole:

policies/held/s0.json            names the policy that Searcher s0 evaluates
policies/pruning.json            names the policies that the Trainer is about to prune

Each side writes its own file before it reads the other's, so at least one of them sees the other's file. If the Trainer
sees that a policy is held, it keeps it. If the Searcher sees that its policy is about to be pruned, it does not make it
the best. best.json changes while the policy is held, so the Trainer reads held/ before best.json.
"""

import logging
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat

from storage.errors import DamagedPolicy, DamagedRecord, NotFound, UnsafePath
from storage.policies import PolicyRef, fetch_policy, read_pointer
from storage.policy_delta import linked, make_whole
from storage.policy_folder import MANIFEST, Manifest, age, is_policy
from storage.store import RunStore

BEST = "policies/best.json"
HELD = "policies/held"
PRUNING = "policies/pruning.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BestPolicy(PolicyRef):
    """The content of policies/best.json."""

    accuracy: FiniteFloat  # on held-out problems, greedy
    num_problems: int


def best_policy(store: RunStore) -> BestPolicy | None:
    """The complete policy with the highest held-out accuracy; None before the first evaluation.

    It stays the best policy if a resume undid its steps. Raises: DamagedRecord: policies/best.json cannot be read.
    """
    remedy = "Delete it: the next better policy is named there, and until then none is."
    return read_pointer(store, BEST, BestPolicy, remedy)


def hold_policy(store: RunStore, ref: PolicyRef, searcher: str) -> bool:
    """Keeps a policy from being pruned until this Searcher holds another one or releases it. False: it is too late.

    If the Searcher is killed, its policy stays held until the next Searcher of that name holds another one.
    """
    store.put_json(_held_path(searcher), ref)
    try:
        doomed = store.read_json(PRUNING, list[str]) or []  # None: nothing has been pruned yet
        manifest = store.read_json(f"{ref.path}/{MANIFEST}", Manifest)
    except DamagedRecord as error:
        logger.warning("the policy may be pruned, so it cannot become the best one: %s", error)
        return False
    return ref.path not in doomed and manifest is not None and not manifest.pruned


def release_policy(store: RunStore, searcher: str) -> None:
    """Ends this Searcher's hold. After that only best.json can keep the policy."""
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

    check: called before each try to replace a file; if it raises, none is. The upload may take minutes, after which
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
    store.put_json(BEST, found, check)
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
        if cache_dir is not None:
            Path(cache_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-best-", dir=cache_dir) as temporary:
            fetch = partial(fetch_policy, store, ref, cache_dir or temporary)
            weights = linked(fetch, manifest.digests, Path(temporary) / "weights")  # the upload may take minutes
            make_whole(store, ref.path, weights, before_last=check)


def _held_path(searcher: str) -> str:
    return f"{HELD}/{searcher}.json"


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
        store.put_json(PRUNING, doomed)
        kept |= _with_needed(store, _evaluated(store) - kept)
        going = [folder for folder in doomed if folder not in kept]
        if going != doomed:  # an evaluation that is repeated may hold its policy again
            store.put_json(PRUNING, going)
    except DamagedRecord as error:
        logger.warning("no policy is pruned for now, because held, best or newest ones cannot be read: %s", error)
        return
    for folder in going:
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
    store.put_json(manifest, (published or {}) | {"pruned": True})
    for path in files:
        if path != manifest:
            store.delete(path)


def _evaluated(store: RunStore) -> set[str]:
    """Folders of the policies that Searchers hold, then of the best one; the module's docstring explains the order."""
    folders = set()
    for path in store.list(HELD):
        if held := read_pointer(store, path, PolicyRef, remedy="Delete it if no Searcher evaluates now."):
            folders.add(held.path)  # None: released since it was listed
    best = best_policy(store)
    return folders | ({best.path} if best else set())
