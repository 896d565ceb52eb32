"""The stack's deployments, where `prefect deploy` fails.

Claims
- a Prefect server whose database is locked (503) is asked again; another failure is returned at once
- a server that stays locked is given up after so many tries, with Prefect's own output

Run: pytest tests/infra/test_deploy.py
"""

import subprocess

import pytest

from infra import stack

LOCKED = "Error while applying deployment: Server error '503 Service Unavailable' for url 'http://127.0.0.1/api'"


@pytest.fixture
def deploy(monkeypatch, tmp_path):
    """Deploys with a `prefect deploy` that fails with these errors in turn; returns the failure and the calls made."""

    def deployed(*errors: str):
        left, calls = list(errors), []

        def run(command, **_):
            calls.append(command)
            error = left.pop(0) if left else ""
            return subprocess.CompletedProcess(command, int(bool(error)), stdout="", stderr=error)

        monkeypatch.setattr(stack.subprocess, "run", run)
        return stack._deploy(tmp_path, stack.State(url="http://127.0.0.1:1/api")), len(calls)

    return deployed


def test_a_locked_server_is_asked_again(deploy):
    assert deploy(LOCKED) == (None, 2)
    assert deploy(LOCKED, LOCKED) == (None, 3)


def test_another_failure_is_returned_at_once(deploy):
    failure, calls = deploy("prefect.yaml: no such flow", LOCKED)
    assert "no such flow" in failure and calls == 1


def test_a_server_that_stays_locked_is_given_up(deploy):
    failure, calls = deploy(*[LOCKED] * 9)
    assert "503 Service Unavailable" in failure and calls == stack.DEPLOY_TRIES
