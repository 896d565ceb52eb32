"""Claims about infra/places.py. Run: pytest tests/infra/test_places.py

- living processes of a group have places of their own, the lowest free one each; a killed process's place is free again
- one process at a time is alone, until it leaves or ends
- a folder that belongs to another user is refused
"""

import fcntl
import os
import select
import subprocess
import sys

import pytest

from infra import places


def test_living_processes_have_the_lowest_free_places(tmp_path):
    code = "from infra.places import *; print(take_place('g'), take_place('g'), num_places('g'), flush=True); input()"
    started = []

    def begin() -> list[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process.stdout.readline().split()

    assert [begin() for _ in range(3)] == [["0", "0", "1"], ["1", "1", "2"], ["2", "2", "3"]]
    started[1].kill()
    started[1].wait()
    assert begin() == ["1", "1", "3"]
    with pytest.raises(BlockingIOError):  # systemd-tmpfiles leaves a locked folder's files, and deletes locked files
        fcntl.flock(os.open(tmp_path / f"tba-places-{os.getuid()}", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    for process in started:
        process.kill()
        process.communicate()
    assert begin() == ["0", "0", "1"]
    started[-1].communicate("\n")


def test_one_process_is_alone_until_it_leaves_or_ends(tmp_path):
    code = "from infra.places import *\nwith alone_here('a'): print('in', flush=True); input()\nprint('out'); input()"

    def begin() -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    first = begin()
    assert first.stdout.readline() == "in\n"
    second = begin()
    assert not select.select([second.stdout], [], [], 3)[0], "two were inside at once"
    print(file=first.stdin, flush=True)
    assert (first.stdout.readline(), second.stdout.readline()) == ("out\n", "in\n")
    third = begin()
    second.kill()
    assert third.stdout.readline() == "in\n"
    for process in (first, second, third):
        process.kill()
        process.communicate()


def test_another_users_places_are_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"tba-places-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="belongs to another user"):
        places.take_place("g")
