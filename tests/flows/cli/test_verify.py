"""`tba verify` as a command, with weights as they are published.

Claims
- a run that is whole: exit status 0, and how much was looked at
- a shard that is cut off, and weights that were edited: status 1, each fault on a line of its own; --json has the same
- no such run: status 2, one line

Run: pytest tests/flows/cli/test_verify.py
"""

import json

import pytest
import torch
from typer.testing import CliRunner

from flows.cli.app import app
from storage import policies
from storage.shards import commit_shard, shard_path
from storage.store import RunStore
from tba.weights import fingerprint, write_weights
from tests.storage.helpers import make_shard


@pytest.fixture
def run(tmp_path, local_store) -> RunStore:
    """A policy, and a shard that it sampled."""
    local_store.create_run({"run": "run"})
    folder, weights = tmp_path / "policy", {"weight": torch.arange(4.0)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 8}))
    write_weights(weights, folder)
    mark = fingerprint(weights.items())
    policies.publish_policy(local_store, folder, policies.policy_ref(0, mark, attempt=1))
    for number in range(2):
        commit_shard(local_store, make_shard("s0", number, policy_step=0, policy_fingerprint=mark))
    return local_store


def verify(store: RunStore, *arguments: str):
    return CliRunner().invoke(app, ["verify", "run", "--store", store.url, *arguments], catch_exceptions=False)


def test_a_whole_run_ends_with_status_0(run):
    result = verify(run)
    assert result.exit_code == 0
    assert result.stdout == "0 faults in 8 trajectories of 2 shards, 0 training steps, 1 published policies.\n"


def test_each_fault_is_named_and_the_status_is_1(run, tmp_path):
    run.put(shard_path("s0", 1), run.get(shard_path("s0", 1))[:-9])
    write_weights({"weight": torch.arange(4.0) + 1}, run.local_path("policies/step=00000000"))
    result = verify(run)
    assert result.exit_code == 1
    changed, torn = sorted(result.stdout.splitlines()[:-1])
    assert changed.startswith("changed weights: policies/step=00000000: they were published as ")
    assert torn.startswith(f"torn shard: {shard_path('s0', 1)}: ")
    told = verify(run, "--json")
    assert told.exit_code == 1
    assert sorted(fault["kind"] for fault in json.loads(told.stdout)["faults"]) == ["changed weights", "torn shard"]


def test_a_run_that_is_not_there_is_one_line(local_store):
    result = verify(local_store)
    assert (result.exit_code, result.stderr) == (2, f"There is no run 'run' in {local_store.url}. Runs there: none.\n")
