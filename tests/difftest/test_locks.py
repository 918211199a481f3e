"""Locks of one user: nobody else can plant, follow or take them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from kv_canary.difftest.locks import own_lock


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder in which others can make names."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def folder_in(shared: Path) -> Path:
    return shared / f"kv-canary-{os.geteuid()}"


def test_the_lock_lies_in_a_folder_for_this_user_only(shared: Path) -> None:
    with own_lock("giant"):
        pass
    assert [path.name for path in shared.iterdir()] == [folder_in(shared).name]
    assert folder_in(shared).stat().st_mode & 0o777 == 0o700
    assert (folder_in(shared) / "giant.lock").stat().st_mode & 0o777 == 0o600


HOLDER = """
import sys, tempfile
from kv_canary.difftest.locks import own_lock
tempfile.tempdir = sys.argv[1]
print("started", flush=True)
with own_lock("giant"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_one_process_holds_it_at_a_time(shared: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(shared)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, **pipes)
    assert first.stdout is not None
    assert [first.stdout.readline(), first.stdout.readline()] == ["started\n", "held\n"]
    second = subprocess.Popen(command, **pipes)
    assert second.stdout is not None
    assert second.stdout.readline() == "started\n"
    assert select.select([second.stdout], [], [], 1.0)[0] == []
    first.communicate("\n", timeout=60)
    # Its turn comes.
    said, _ = second.communicate("\n", timeout=60)
    assert said == "held\n"


def test_a_link_planted_as_the_folder_is_not_followed(shared: Path) -> None:
    theirs = shared / "theirs"
    theirs.mkdir(mode=0o700)
    folder_in(shared).symlink_to(theirs)
    with (
        pytest.raises(RuntimeError, match=r"locks: .* must be a folder that is this user's"),
        own_lock("giant"),
    ):
        pass
    assert list(theirs.iterdir()) == []


def test_a_link_planted_as_the_lock_is_neither_followed_nor_emptied(shared: Path) -> None:
    precious = shared / "precious"
    precious.write_text("mine")
    folder_in(shared).mkdir(mode=0o700)
    (folder_in(shared) / "giant.lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic link"), own_lock("giant"):
        pass
    assert precious.read_text() == "mine"


def test_what_lay_at_the_name_of_old_is_left_alone(shared: Path) -> None:
    precious = shared / "precious"
    precious.write_text("mine")
    (shared / f"kv-canary-giant-{os.getuid()}.lock").symlink_to(precious)
    with own_lock("giant"):
        pass
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_may_enter_is_refused(shared: Path, mode: int) -> None:
    folder_in(shared).mkdir()
    folder_in(shared).chmod(mode)
    with pytest.raises(RuntimeError, match=f"with mode {mode:o}"), own_lock("giant"):
        pass
    assert list(folder_in(shared).iterdir()) == []


def test_a_folder_of_another_user_is_refused(shared: Path) -> None:
    folder_in(shared).mkdir(mode=0o700)
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder_in(shared), 65534, 65534)
    with pytest.raises(RuntimeError, match="got one of user 65534"), own_lock("giant"):
        pass


def test_a_file_in_place_of_the_folder_is_refused(shared: Path) -> None:
    folder_in(shared).write_text("")
    with pytest.raises(RuntimeError, match="must be a folder"), own_lock("giant"):
        pass
