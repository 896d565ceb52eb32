"""Which Prefect server a run uses (infra/prefect_server.py). Run: pytest tests/infra/test_prefect_server.py

- the stack's own server is known by each spelling of its address, and another one by none
- a URL that lacks its /api is told
"""

import pytest

from infra import prefect_server

OURS = "http://127.0.0.1:4200/api"


@pytest.mark.parametrize(
    ("named", "is_ours"),
    [
        ("http://localhost:4200/api", True),
        ("http://127.0.0.1:4200/api/", True),
        ("http://127.0.0.1:4201/api", False),
        ("http://[::1]:4200/api", False),  # another process may listen there
        ("http://192.0.2.1:4200/api", False),
        ("http://127.0.0.1:420O/api", False),
    ],
)
def test_our_server_is_known_by_each_spelling(named, is_ours, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_API_URL", named)
    found = [each.url for each in prefect_server.candidates(OURS)]
    assert found == ([OURS] if is_ours else [named, OURS])


def test_a_url_without_its_end_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prefect_server, "version", lambda *_, **__: None)  # Prefect's page answers, but no API
    monkeypatch.setenv("PREFECT_API_URL", "http://192.0.2.1:4200")
    with pytest.raises(
        prefect_server.StackError, match=r"no Prefect API answers there \(an API's URL ends with /api\)"
    ):
        prefect_server.find(None, lambda _: None, lambda _: {})
