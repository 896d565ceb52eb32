"""Repeats of operations on a store (storage/patience.py).

- credentials that expired are renewed before the next try, and a renewal that fails is tried again

python -m pytest tests/storage/test_patience.py
"""

import pytest
from botocore.exceptions import ClientError, CredentialRetrievalError

from storage import patience
from storage.patience import patiently


def test_a_renewal_of_credentials_that_fails_is_tried_again(monkeypatch):
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)
    calls = []

    def operation() -> str:
        calls.append("operation")
        if calls.count("renewal") < 2:
            raise ClientError({"Error": {"Code": "ExpiredToken"}}, "GetObject")
        return "answer"

    def renew() -> None:
        calls.append("renewal")
        if calls.count("renewal") == 1:
            raise CredentialRetrievalError(provider="custom-process", error_msg="log in first")

    assert patiently(operation, "read a file", 60, renew) == "answer"
    assert calls == ["operation", "renewal", "renewal", "operation"]


def test_a_renewal_that_fails_for_too_long_is_the_error():
    def operation() -> None:
        raise ClientError({"Error": {"Code": "ExpiredToken"}}, "GetObject")

    def renew() -> None:
        raise CredentialRetrievalError(provider="custom-process", error_msg="log in first")

    with pytest.raises(CredentialRetrievalError, match="log in first"):
        patiently(operation, "read a file", 0.5, renew)
