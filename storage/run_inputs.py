"""The models and the problems that a run begins with: each machine, and each resume, must have the same ones.

Before: tba/models.py and tba/tasks find them on a machine; after: Trainer, reference policy and engine use them.

model.json               {"fingerprint": ...} of the model's weights, written once, by the first process that loads them
data.json                {"fingerprint": ...} of the problems (tba/rewards.py), written once, by the first Searcher
scorers.json             the same of the models that score responses (tba.tasks.scorers_fingerprint)

The run's settings have names or paths. On another machine, or at a resume, other files may be there. Then the reference
log-probabilities or the rewards of the trajectories would be of another model, and problems that were trained on might
be held out.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

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
    told = _Told(f"model: the weights of {model}", f"{model} has", "Restore the model's files, or begin another run.")
    _compare(store, MODEL, fingerprint, told)


def check_data(store: RunStore, fingerprint: str, *, records: bool = True) -> None:
    """As `check_model`, of a run's problems. records: whether a run without a record gets this one."""
    told = _Told(
        "task.data: the problems",
        "the data have",
        "Prompts, answers, other columns (which older versions left out), or which of them are held out, differ. A "
        "function must return the same rows at each call. Restore the data, or begin another run; --warm-start takes "
        "the trajectories along. To go on with these, delete data.json: accuracies before and after will not be "
        "comparable.",
    )
    if records or store.exists(DATA):
        _compare(store, DATA, fingerprint, told)


def check_scorers(store: RunStore, fingerprint: str, *, records: bool = True) -> None:
    """As `check_data`, of the models that score a run's responses."""
    told = _Told(
        "task: the models that score responses",
        "these models have",
        "Restore the models' files, or begin another run; `tba rescore` scores stored trajectories by another reward. "
        "Older versions left out models of the Hugging Face Hub: if none has changed, delete scorers.json.",
    )
    if records or store.exists(SCORERS):
        _compare(store, SCORERS, fingerprint, told)


class _Told(NamedTuple):
    """Parts of the messages about an input."""

    subject: str
    unchanged: str  # with its verb
    advice: str


def _compare(store: RunStore, path: str, fingerprint: str, told: _Told) -> None:
    """Records the fingerprint if there is none yet. Raises: RunConfigMismatch, DamagedRecord."""
    with suppress(AlreadyExists):
        store.put_new_json(path, {"fingerprint": fingerprint})
        return
    first = store.read_json(path, _Recorded, remedy=f"Delete it if {told.unchanged} not changed since the run began.")
    if first is not None and first.fingerprint != fingerprint:  # None: deleted meanwhile
        raise RunConfigMismatch(
            f"{told.subject} on this machine have fingerprint {fingerprint}, but run {store.run} in {store.url} began "
            f"with {first.fingerprint} ({path}). {told.advice}"
        )
