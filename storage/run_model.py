"""The model that a run begins with: each machine must load the same one.

Before: tba/models.py finds the model's folder on a machine; after: Trainer, reference policy and engine load it.

model.json               {"fingerprint": ...} of its weights, written once, by the first process that loads them

The run's settings have the model's name or path. On another machine, or at a resume, other weights may be there: the
reference log-probabilities of the trajectories would then be of another model.
"""

from contextlib import suppress
from dataclasses import dataclass

from storage.errors import AlreadyExists, RunConfigMismatch
from storage.store import RunStore

MODEL = "model.json"


@dataclass(frozen=True)
class _Model:
    fingerprint: str


def recorded_fingerprint(store: RunStore) -> str | None:
    """None: no process of the run has loaded the model, or an older version did. Raises: DamagedRecord."""
    recorded = store.read_json(MODEL, _Model)
    return recorded and recorded.fingerprint


def check_model(store: RunStore, model: str, fingerprint: str) -> None:
    """Records the fingerprint of a run's model, or compares it with the recorded one. model: its name, or folder.

    Raises: RunConfigMismatch: the run began with other weights. DamagedRecord: model.json cannot be read.
    """
    with suppress(AlreadyExists):
        store.put_new_json(MODEL, {"fingerprint": fingerprint})
        return
    recorded = store.read_json(MODEL, _Model, remedy=f"Delete it if {model} has not changed since the run began.")
    if recorded is not None and recorded.fingerprint != fingerprint:
        raise RunConfigMismatch(
            f"model: the weights of {model} on this machine have fingerprint {fingerprint}, but run {store.run} in "
            f"{store.url} began with {recorded.fingerprint} ({MODEL}). Restore the model's files, or begin another run."
        )
