"""All processes of a run have the model and the problems that it began with (storage/run_inputs.py).

- The first process records the model's fingerprint; others with the same weights go on.
- Other weights are refused, and the record stays. So is a record that cannot be read.
- So are other problems, and other models that score responses. A check before a start records none.

python -m pytest tests/storage/test_run_inputs.py
"""

import pytest

from storage.errors import DamagedRecord, RunConfigMismatch
from storage.run_inputs import DATA, MODEL, SCORERS, check_data, check_model, check_scorers


def test_all_processes_have_the_first_ones_weights(store):
    check_model(store, "org/model", "a1")
    check_model(store, "/elsewhere/model", "a1")
    with pytest.raises(RunConfigMismatch, match=r"org/model on this machine have fingerprint b2, but .* began with a1"):
        check_model(store, "org/model", "b2")
    check_model(store, "org/model", "a1")


def test_a_damaged_record_is_named(local_store):
    check_model(local_store, "org/model", "a1")
    local_store.put(MODEL, b"{}")
    with pytest.raises(DamagedRecord, match=r"model\.json .* Delete it if org/model has not changed"):
        check_model(local_store, "org/model", "a1")


def test_all_searchers_have_the_first_ones_problems(store):
    check_data(store, "a1", records=False)
    assert not store.exists(DATA)
    check_data(store, "a1")
    check_data(store, "a1")
    for records in (True, False):
        with pytest.raises(RunConfigMismatch, match=r"fingerprint b2, but .* began with a1 .* --warm-start"):
            check_data(store, "b2", records=records)
    check_data(store, "a1", records=False)


def test_all_searchers_have_the_first_ones_scorers(store):
    check_scorers(store, "victim a1", records=False)
    assert not store.exists(SCORERS)
    check_scorers(store, "victim a1")
    for records in (True, False):
        with pytest.raises(RunConfigMismatch, match=r"victim b2, but .* began with victim a1 \(scorers.json\)"):
            check_scorers(store, "victim b2", records=records)
        check_scorers(store, "victim a1", records=records)
