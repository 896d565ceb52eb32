"""Checks that a run's store is whole: `tba verify RUN`.

    shards       each is whole and valid, has its own name and is not refused; no round is missing; no trajectory
                 is there twice
    ledger       each trained trajectory is stored, each step that counts is recorded, syncs match the shards
    policies     each stored one has the published files and weights; latest.json and best.json name one; each
                 trajectory of this run was sampled by a published policy
    checkpoints  each that training could resume from is whole
    records      of the configuration, the inputs and the pruning of policies: each can be read

Unfinished writes of a killed process are no fault. The run may train meanwhile: pointers are read before the files that
they name.
"""

import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from storage import attempts, checkpoints, kept_policies, ledger, policies, schema
from storage.errors import DamagedPolicy, DamagedRecord, NotFound, StoreError
from storage.intake import limits_of
from storage.ledger_files import KEYS, is_entry, parts_named
from storage.paths import LARGEST_NUMBER
from storage.policy_folder import Manifest, age, is_policy
from storage.reward_versions import VERSION
from storage.run_inputs import DATA, MODEL, SCORERS
from storage.shards import WARM_START_PLAN, round_of
from storage.store import RunStore, transfer_all
from storage.verify_shards import Fault, Shards, check_shards, duplicates, some

_BETWEEN_WRITES_S = 2.0  # between the completion of an attempt's first policy and the change of latest.json

MOST_MISSING = 1000  # steps or rounds that are named one by one

_LEDGER = {
    "metrics/training": schema.TRAINING_STEP,  # before the batches: a step's metrics come after what it drew
    "batches": schema.BATCH,
    "syncs": schema.SYNC,
    "metrics/search": schema.SEARCH_ROUND,
    "metrics/evaluations": schema.EVALUATION,
    "rewards": schema.REWARD,
    "diversity": schema.DIVERSITY,
}
_PATH = pa.dictionary(pa.int32(), pa.string())  # once a file: a run's batches have millions of rows
_POINTERS = {policies.LATEST: policies.PolicyRef, kept_policies.BEST: kept_policies.BestPolicy}


@dataclass
class Report:
    """The faults, and the numbers of checked files and rows (`num_*`)."""

    faults: list[Fault]
    num_shards: int
    num_trajectories: int
    num_policies: int
    num_steps: int


def verify(store: RunStore, fingerprint: Callable[[Path], str] | None) -> Report:
    """Checks the run's store. Returns its faults.

    fingerprint: computes the checksum of the weights in a policy's folder; any exception means that they do not load.
    None: a quick check, without the values in the shards (storage/rules.py) and the policies' weights.
    Raises: NotFound: there is no such run. StoreUnreachable.
    """
    store.get("run.json")
    if faults := list(_torn_records(store)):  # these decide which entries count, so nothing else can be checked
        return Report(faults, num_shards=0, num_trajectories=0, num_policies=0, num_steps=0)
    faults = list(_damaged_json(store))
    ledgers = _LEDGER if fingerprint else {folder: _asked(columns) for folder, columns in _LEDGER.items()}
    resumes = attempts.list_attempts(store)
    entries = {folder: _read_entries(store, folder, columns, faults) for folder, columns in ledgers.items()}
    syncs = _effective_syncs(store)
    shards = check_shards(store, limits_of(store) if fingerprint else None, faults)
    pointers = {path: _read_pointer(store, path) for path in _POINTERS}
    published = policies.published_policies(store)
    faults += chain(
        duplicates(shards),
        _unknown_trained(entries["batches"], shards),
        _unrecorded_steps(resumes, entries),
        _inconsistent_syncs(syncs, shards),
        _bad_policies(store, published, pointers, fingerprint) if fingerprint else (),
        _bad_pointers(store, pointers, published, shards),
        _unpublished_policies(shards, published),
        _bad_checkpoints(store),
    )
    return Report(
        faults,
        num_shards=len(shards.ids),
        num_trajectories=sum(map(len, shards.ids)),
        num_policies=len(published),
        num_steps=len(_effective_steps(resumes, entries["batches"])),
    )


def _torn_records(store: RunStore) -> Iterator[Fault]:
    """Faults of attempts and policies' manifests that cannot be read."""
    of_attempts = [path for path in store.list("trainer") if path.startswith("trainer/attempt=")]
    manifests = [path for path in store.list("policies") if path.endswith(f"/{policies.MANIFEST}")]

    def fault(path: str) -> Fault | None:
        try:  # None: deleted since it was listed
            attempts.read_record(store, path) if path in of_attempts else store.read_json(path, Manifest)
        except DamagedRecord as error:
            return Fault("torn record", path, str(error))

    yield from filter(None, transfer_all(fault, of_attempts + manifests))


def _damaged_json(store: RunStore) -> Iterator[Fault]:
    """Faults of the run's other records that cannot be read: a start, a Searcher or pruning needs each of them."""
    paths = ["run.json", MODEL, DATA, SCORERS, WARM_START_PLAN, kept_policies.PRUNING, *store.list(kept_policies.HELD)]
    for path in paths:
        try:
            store.read_json(path)
        except DamagedRecord as error:
            yield Fault("torn record", path, str(error))


# --- ledger -----------------------------------------------------------------------------------------------------------


def _read_entries(store: RunStore, folder: str, columns: pa.Schema, faults: list[Fault]) -> pa.Table:
    """All rows of a folder of the ledger, with the path of each."""

    def read(path: str) -> pa.Table | Fault:
        try:
            table = ledger.read_entry(store, path, columns, ledger.NEEDED[folder])
            # an older version recorded fewer columns: null here, as in `tba sql`
            table = pa.concat_tables([columns.empty_table(), table], promote_options="default")
            return table.append_column("path", pa.array([path] * table.num_rows, _PATH))
        except DamagedRecord as error:
            return Fault("torn ledger entry", path, str(error))
        except NotFound:  # deleted since it was listed: upkeep deletes the rewards of expired rounds
            return None

    paths = [path for path in store.list(folder) if not path.endswith(f"/{VERSION}")]
    entries = [path for path in paths if is_entry(folder, path)]
    if folder in KEYS:
        entries = [part.path for part in parts_named(folder, paths)]
    faults += [
        Fault("stray file", path, "its name is not an entry's, so it is not read")
        for path in sorted({*paths} - {*entries})
    ]
    found = transfer_all(read, entries)
    faults += [fault for fault in found if isinstance(fault, Fault)]
    empty = columns.append(pa.field("path", _PATH)).empty_table()
    return pa.concat_tables([empty, *(table for table in found if isinstance(table, pa.Table))])


def _asked(columns: pa.Schema) -> pa.Schema:
    """The columns of a ledger entry that a check reads. Other columns are only checked for presence."""
    return pa.schema([column for column in columns if column.name in ("attempt", "step", "trajectory_id")])


def _unknown_trained(batches: pa.Table, shards: Shards) -> Iterator[Fault]:
    trained, stored = batches["trajectory_id"], shards.all_ids()
    known = stored.filter(pc.is_in(stored, trained.unique()))  # fewer than are stored: a set takes memory
    unknown = batches.filter(pc.invert(pc.is_in(trained, known)))
    ids_by_path = defaultdict(list)
    for path, name in zip(unknown["path"].to_pylist(), unknown["trajectory_id"].to_pylist(), strict=True):
        if not _is_expired(name, shards):
            ids_by_path[path].append(name)
    for path, ids in ids_by_path.items():
        yield Fault("unknown trajectory", path, f"trained on {some(ids)}, but no shard has them")


def _is_expired(name: str, shards: Shards) -> bool:
    try:
        searcher, number = round_of(name)
    except ValueError:  # a damaged entry
        return False
    return number <= shards.expired.get(searcher, -1)


def _effective_steps(resumes: list[attempts.Attempt], rows: pa.Table) -> set[int]:
    """The steps whose entries count. Steps after a checkpoint that training resumed from do not count."""
    places = set(zip(rows["attempt"].to_pylist(), rows["step"].to_pylist(), strict=True))
    return {step for attempt, step in places if attempts.counts(attempt, step, resumes)}


def _unrecorded_steps(resumes: list[attempts.Attempt], entries: dict[str, pa.Table]) -> Iterator[Fault]:
    """Missing draws: steps are recorded in order, and steps up to a checkpoint before the checkpoint."""
    batches = _effective_steps(resumes, entries["batches"])
    counting = (each for each in resumes if attempts.counts(each.attempt, each.resumed_from, resumes))
    resumed_from = max((attempt.resumed_from for attempt in counting), default=0)
    last = max(resumed_from, *batches, 0)
    missing = (step for step in range(1, last + 1) if step not in batches)
    for step in islice(missing, MOST_MISSING):
        yield Fault("missing batch", "batches", f"step {step} counts as trained, but its draw is not recorded")
    if (num_left := last - len(batches) - MOST_MISSING) > 0:
        yield Fault("missing batch", "batches", f"{num_left} further steps count as trained, without a recorded draw")
    for step in sorted(_effective_steps(resumes, entries["metrics/training"]) - batches):
        yield Fault("missing batch", "batches", f"step {step} has metrics, but its draw is not recorded")


def _effective_syncs(store: RunStore) -> list[dict]:
    try:
        return ledger.effective_syncs(store, step=LARGEST_NUMBER)
    except DamagedRecord:
        return []  # a torn entry, which is among the faults already


def _inconsistent_syncs(syncs: list[dict], shards: Shards) -> Iterator[Fault]:
    """Faults of syncs: each one that counts took in the rounds after those of the sync before, and all are stored."""
    following: dict[str, int] = defaultdict(int)
    stored = {searcher: set(rounds) for searcher, rounds in shards.rounds.items()}
    for row in sorted(syncs, key=lambda row: row["sync"]):
        path, searcher = f"syncs/attempt={row['attempt']:08d}/sync={row['sync']:08d}.parquet", row["searcher"]
        first, last = row["first_round"], row["last_round"]
        expired, refused = shards.expired.get(searcher, -1), shards.refused.get(searcher, set())
        starts = (following[searcher], expired + 1)  # a resume takes in again the rounds that have not expired
        if not any(start <= first <= _next_kept(start, refused) for start in starts):
            yield Fault(
                "sync out of order", path, f"{searcher}: begins at round {first}, expected {following[searcher]}"
            )
        kept = range(max(first, expired + 1), last + 1)
        of_searcher = stored.get(searcher, set())
        if missing := list(islice((number for number in kept if number not in of_searcher), MOST_MISSING)):
            more = " and more" if len(missing) == MOST_MISSING else ""
            yield Fault(
                "sync without shards", path, f"{searcher}: rounds {missing}{more} were taken in, but are not stored"
            )
        following[searcher] = last + 1


def _next_kept(number: int, refused: set[int]) -> int:
    """The first round from `number` on that was not refused."""
    return next(later for later in itertools.count(number) if later not in refused)


# --- policies and checkpoints -----------------------------------------------------------------------------------------


def _bad_policies(
    store: RunStore, published: dict[str, Manifest], pointers: dict, fingerprint: Callable
) -> Iterator[Fault]:
    stored = [path for path, manifest in published.items() if is_policy(path) and not manifest.pruned]
    # The network of a superseded Trainer may hold up a put of policy.json until a later attempt has pruned the policy;
    # then the mark is gone. So files may be missing of an earlier attempt's policy that no pointer names.
    newest = max((manifest.attempt for manifest in published.values()), default=0)
    named = {pointer["path"] for pointer in pointers.values() if isinstance(pointer, dict)}
    may_lack_files = {path for path in stored if published[path].attempt < newest and path not in named}
    with tempfile.TemporaryDirectory(prefix="tba-verify-") as cache:
        # one after the other, as they were published: the cache keeps two, and one is rebuilt from the one before
        for path in sorted(stored, key=age):
            if fault := _policy_fault(store, path, published[path], fingerprint, cache, path in may_lack_files):
                yield fault


def _policy_fault(
    store: RunStore, path: str, manifest: Manifest, fingerprint: Callable, cache: str, may_lack_files: bool
) -> Fault | None:
    ref = policies.PolicyRef(manifest.step, path, manifest.fingerprint, False, manifest.attempt, "")
    try:
        found = {fingerprint(policies.fetch_policy(store, ref, cache))}
        if manifest.whole and manifest.chain:  # rebuilt from its delta; an empty cache has it read its own weights
            with tempfile.TemporaryDirectory(prefix="tba-verify-") as empty:
                found.add(fingerprint(policies.fetch_policy(store, ref, empty)))
    except (NotFound, DamagedPolicy) as error:
        now = store.read_json(f"{path}/{policies.MANIFEST}", Manifest)
        is_pruned = now is None or now.pruned  # meanwhile, by the Trainer
        if not is_pruned and not (may_lack_files and isinstance(error, NotFound)):
            return Fault("damaged policy", path, str(error))
    except StoreError:
        raise
    except Exception as error:  # a broken file may raise any exception
        return Fault("damaged policy", path, f"its weights do not load ({type(error).__name__}: {error})")
    else:
        if wrong := found - {manifest.fingerprint}:
            message = f"they were published as {manifest.fingerprint} and are {wrong.pop()} now"
            return Fault("changed weights", path, message)
    return None


def _read_pointer(store: RunStore, path: str) -> dict | str | None:
    """The content of a pointer; the reason (text) if it cannot be read; None if there is none."""
    try:
        pointer = store.read_json(path, _POINTERS[path])
    except DamagedRecord as error:
        return str(error)
    return asdict(pointer) if pointer else None


def _bad_pointers(store: RunStore, pointers: dict, published: dict[str, Manifest], shards: Shards) -> Iterator[Fault]:
    for path, pointer in pointers.items():
        message = _pointer_fault(pointer, published)
        if path == policies.LATEST and message is None and _is_of_superseded(pointer, published):
            message = f"it names a policy of attempt {pointer['attempt']}, but a later attempt has published"
            time.sleep(_BETWEEN_WRITES_S)
        if path == policies.LATEST and pointer is None and shards.policies:
            message = "it does not exist, but policies have sampled trajectories"
        if message and pointer == _read_pointer(store, path):  # otherwise it was replaced while policies were read
            yield Fault("broken pointer", path, message)


def _is_of_superseded(pointer: dict | None, published: dict[str, Manifest]) -> bool:
    newest = max((manifest.attempt for manifest in published.values()), default=0)
    return pointer is not None and pointer["attempt"] < newest


def _pointer_fault(pointer: dict | str | None, published: dict[str, Manifest]) -> str | None:
    if pointer is None:
        return None
    if isinstance(pointer, str):
        return pointer
    manifest = published.get(pointer["path"])
    if manifest is None or manifest.pruned:
        return f"it names {pointer['path']}, which is not complete"
    differing = [name for name in ("step", "fingerprint", "attempt") if pointer[name] != getattr(manifest, name)]
    told = [f"{name} {pointer[name]}, but the policy has {getattr(manifest, name)}" for name in differing]
    return f"it has {'; '.join(told)}" if told else None


def _unpublished_policies(shards: Shards, published: dict[str, Manifest]) -> Iterator[Fault]:
    known = {(manifest.step, manifest.fingerprint) for manifest in published.values()}
    for (step, mark), path in shards.policies.items():
        if (step, mark) not in known:
            message = f"sampled by weights {mark} as policy step {step}, which no Trainer published"
            yield Fault("unpublished policy", path, message)


def _bad_checkpoints(store: RunStore) -> Iterator[Fault]:
    for found in checkpoints.list_checkpoints(store):
        with suppress(NotFound):  # the Trainer has deleted it since it was listed
            faults = checkpoints.checkpoint_faults(store, found) or checkpoints.content_faults(store, found)
            if faults and found in checkpoints.list_checkpoints(store):
                yield from (Fault("damaged checkpoint", path, message) for path, message in faults)
    for found in checkpoints.superseded_checkpoints(store):
        message = f"attempt {found.attempt} was superseded before step {found.step}, so no run resumes from it"
        yield Fault("superseded checkpoint", found.path, f"{message}; the next checkpoint deletes it")
