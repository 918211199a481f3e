"""Locks between the processes of one user of a machine, which no other user can take, plant or follow elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kv_canary.errors import must_be


@contextlib.contextmanager
def own_lock(name: str) -> Iterator[None]:
    """Hold the lock `name` of this user; wait for it first.

    The file lies in a folder of this user's in the temporary one, where everybody may make names. The folder counts
    only if it is no link, is this user's and admits nobody else, which is asked of the open folder, and the file is
    opened inside of that open folder, following no link either.

    Raises:
        RuntimeError: something else has the folder's name, or others may enter it.
    """
    folder = _own_folder()
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(f"{name}.lock", flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        # Closing it gives the lock back.
        os.close(file)


def _own_folder() -> int:
    """Return the open folder of this user's locks."""
    path = Path(tempfile.gettempdir()) / f"kv-canary-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    expected = "a folder that is this user's and nobody else's; remove what is there, or set TMPDIR to another folder"
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(must_be("locks", str(path), expected, str(error))) from error
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(folder)
        got = f"one of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
        raise RuntimeError(must_be("locks", str(path), expected, got))
    return folder
