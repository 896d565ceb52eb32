"""The models and the problems that a run begins with: each machine, and each resume, must have the same ones.

Before: tba/models.py and tba/tasks find them on a machine; after: Trainer, reference policy and engine use them.

model.json               {"fingerprint": ...} of the model's weights, written once, by the first process that loads them
data.json                {"fingerprint": ...} of the problems (tba/rewards.py), written once, by the first Searcher
scorers.json             the same of the models in local folders that score responses (tba.tasks.scorers_fingerprint)

The run's settings have names or paths. On another machine, or at a resume, other files may be there. Then the reference
log-probabilities or the rewards of the trajectories would be of another model, and problems that were trained on might
be held out.
"""

from contextlib import suppress
from dataclasses import dataclass

from storage.errors import AlreadyExists, RunConfigMismatch
from storage.store import RunStore

MODEL, DATA, SCORERS = "model.json", "data.json", "scorers.json"


@dataclass(frozen=True)
class _Recorded:
    fingerprint: str


def recorded_fingerprint(store: RunStore) -> str | None:
    """None: no process of the run has loaded the model, or an older version did. Raises: DamagedRecord."""
    recorded = store.read_json(MODEL, _Recorded)
    return recorded and recorded.fingerprint


def check_model(store: RunStore, model: str, fingerprint: str) -> None:
    """Records the fingerprint of a run's model, or compares it with the recorded one. model: its name, or folder.

    Raises: RunConfigMismatch: the run began with other weights. DamagedRecord: model.json cannot be read.
    """
    first = _first(store, MODEL, fingerprint, f"Delete it if {model} has not changed since the run began.")
    if first != fingerprint:
        raise RunConfigMismatch(
            f"model: the weights of {model} on this machine have fingerprint {fingerprint}, but run {store.run} in "
            f"{store.url} began with {first} ({MODEL}). Restore the model's files, or begin another run."
        )


def check_data(store: RunStore, fingerprint: str, *, records: bool = True) -> None:
    """As `check_model`, of a run's problems. records: whether a run without a record gets this one."""
    if not records and not store.exists(DATA):
        return
    first = _first(store, DATA, fingerprint, "Delete it if the data have not changed since the run began.")
    if first != fingerprint:
        raise RunConfigMismatch(
            f"task.data: the problems on this machine have fingerprint {fingerprint}, but run {store.run} in "
            f"{store.url} began with {first} ({DATA}): prompts, answers, other columns (which older versions left "
            "out), or which of them are held out, differ. A function must return the same rows at each call. Restore "
            "the data, or begin another run; --warm-start takes the trajectories along. To go on with these, delete "
            "the file: accuracies before and after will not be comparable."
        )


def check_scorers(store: RunStore, fingerprint: str, *, records: bool = True) -> None:
    """As `check_data`, of the models that score a run's responses."""
    if not records and not store.exists(SCORERS):
        return
    first = _first(store, SCORERS, fingerprint, "Delete it if these models have not changed since the run began.")
    if first != fingerprint:
        raise RunConfigMismatch(
            f"task: the models that score responses have these fingerprints on this machine: {fingerprint}. Run "
            f"{store.run} in {store.url} began with {first} ({SCORERS}). Restore the models' files, or begin another "
            "run; `tba rescore` scores stored trajectories by another reward."
        )


def _first(store: RunStore, path: str, fingerprint: str, remedy: str) -> str:
    """The fingerprint that was recorded first, which may be this one."""
    with suppress(AlreadyExists):
        store.put_new_json(path, {"fingerprint": fingerprint})
        return fingerprint
    recorded = store.read_json(path, _Recorded, remedy=remedy)
    return fingerprint if recorded is None else recorded.fingerprint
