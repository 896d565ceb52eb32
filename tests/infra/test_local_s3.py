"""Claims about infra/local_s3.py. Run: pytest tests/infra/test_local_s3.py

- no command's arguments, which every account of the machine can read, have a secret key; a second start has new keys
- a folder with files of another kind is refused, and keeps them
- a port that another program has taken meanwhile is named, before a daemon starts
- a pid file that a full disk left empty is no running daemon
"""

import json
import socket

import pytest

from infra import local_s3
from infra.local_s3 import LocalS3, LocalS3Error


def test_no_secret_key_is_on_a_command_line(tmp_path, monkeypatch):
    users: dict[str, list[dict]] = {}
    commands = []

    def admin(program: str, *arguments: str) -> str:  # radosgw-admin, as far as it is used
        commands.append(arguments)
        _, _, _, action, _, user, *rest = arguments
        if action == "info" and user not in users:
            raise LocalS3Error("radosgw-admin failed: could not fetch user info: no user info saved")
        keys = users.setdefault(user, [])
        if action == "rm":
            keys[:] = [key for key in keys if key["access_key"] != rest[-1]]
        if "--gen-secret" in rest:
            number = len(commands)
            keys.append({"user": user, "access_key": f"ACCESS{number}", "secret_key": f"secret{number}"})
        return json.dumps({"user_id": user, "keys": keys})

    monkeypatch.setattr(local_s3, "run", admin)
    server = LocalS3(tmp_path)
    first, second = server._new_keys(), server._new_keys()
    assert first != second and all(
        access.startswith("ACCESS") and secret.startswith("secret") for access, secret in (first, second)
    )
    assert not {first[1], second[1], "--secret", "--secret-key"} & {word for command in commands for word in command}


def test_a_folder_with_other_files_is_refused_and_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setattr(local_s3, "install", lambda: None)
    (tmp_path / "log").mkdir()
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(LocalS3Error, match=r"has files of another kind \(thesis\.tex\); name an empty or a new folder"):
        LocalS3(tmp_path).start()
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    (tmp_path / "thesis.tex").rename(tmp_path / "log" / "thesis.tex")
    with pytest.raises(LocalS3Error, match=r"has files of another kind \(log/thesis\.tex\)"):
        LocalS3(tmp_path).start()
    assert (tmp_path / "log" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("taken", ["port", "mon_v1", "mon_v2"])
def test_a_taken_port_is_named(tmp_path, monkeypatch, taken):
    monkeypatch.setattr(local_s3, "install", lambda: None)
    (tmp_path / "made").touch()
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = dict(zip(("port", "mon_v1", "mon_v2"), local_s3.free_ports(3), strict=True))
        port = ports[taken] = other.getsockname()[1]
        (tmp_path / "settings.json").write_text(json.dumps(ports))
        with pytest.raises(LocalS3Error, match=f"another program listens on port {port} of 127.0.0.1"):
            LocalS3(tmp_path).start()


def test_an_empty_pid_file_is_no_daemon(tmp_path):
    (tmp_path / "radosgw.pid").touch()
    LocalS3(tmp_path).stop()
