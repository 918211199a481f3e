"""A trial of the files, folders and ports that a configuration names: can they be had, here and now?

Permissions are not asked for: root has them all, and is still refused by a file system that is read-only or full, or
that is none of files. What a trial makes is taken away again.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from kv_canary.config import CanaryConfig
from kv_canary.extras import install_command
from kv_canary.observers.metrics_http import listen
from kv_canary.observers.metrics_server import cannot_listen
from kv_canary.reports.versions import installed


def problems_of(config: CanaryConfig) -> list[str]:
    """Say of everything that the configuration names and that cannot be had what is wrong, and what to do."""
    found = [
        _event_log(config.event_log) if config.event_log is not None else "",
        _bundles(config.bundles) if config.bundles is not None else "",
        *(_metrics(config.metrics_address, config.metrics_port) if config.metrics_port else ()),
    ]
    return [problem for problem in found if problem]


def _event_log(path: Path) -> str:
    # As the event log does: it is appended to, or made in a folder that is there.
    real = Path(os.path.realpath(path))
    named = f"event_log: {path} must be a file that can be appended to"
    try:
        _append_nothing(real)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except IsADirectoryError:
        return f"{named}, got a folder: name a file in it, such as {path / 'kv-canary.jsonl'}"
    except OSError as error:
        return f"{named}, got {error.strerror}: let {_user()} write to it, or name another file"
    else:
        return ""
    folder = real.parent
    if not os.path.lexists(folder):
        return f"{named}, got no folder {folder}: mkdir -p {folder}, or name another file"
    try:
        _make_file(folder)
    except OSError as error:
        return f"{named}, got {error.strerror} in {folder}: name a file in a folder that {_user()} can write to"
    return ""


def _bundles(folder: Path) -> str:
    # Folders that are missing are made, when there is something to save.
    real = Path(os.path.realpath(folder))
    there = next(each for each in (real, *real.parents) if os.path.lexists(each))
    try:
        if there == real:
            _make_file(real)
        else:
            with tempfile.TemporaryDirectory(prefix=".kv-canary-doctor-", dir=there) as made:
                _make_file(Path(made))
    except OSError as error:
        named = f"bundles: {folder} must be a folder that can be written to, or made"
        return f"{named}, got {error.strerror} in {there}: name a folder that {_user()} can write to"
    return ""


def _metrics(address: str, port: int) -> list[str]:
    problems = []
    if installed("prometheus-client") is None:
        problems.append(f"metrics_port: prometheus-client is not installed: {install_command('metrics')}")
    try:
        listen(address, port).close()
    except OSError as error:
        problems.append(f"{cannot_listen(address, port, error)}: {_advice(error, port)}")
    return problems


def _advice(error: OSError, port: int) -> str:
    if isinstance(error, PermissionError):
        return "ports below 1024 are root's: take a higher one"
    return (
        f"`ss -ltnp 'sport = :{port}'` says who has it"
        if error.errno == errno.EADDRINUSE
        else "`ip address` lists them"
    )


def _append_nothing(path: Path) -> None:
    """Open a file that is there to append to it, and append nothing.

    Raises:
        OSError: that cannot be done.
    """
    # Nothing that is no file may make this one wait.
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK)
    try:
        # Some file systems refuse only now.
        os.write(descriptor, b"")
    finally:
        os.close(descriptor)


def _make_file(folder: Path) -> None:
    """Make a file in a folder, write to it, and take it away.

    Raises:
        OSError: that cannot be done.
    """
    descriptor, path = tempfile.mkstemp(prefix=".kv-canary-doctor-", dir=folder)
    try:
        os.write(descriptor, b"x")
    finally:
        os.close(descriptor)
        os.unlink(path)


def _user() -> str:
    return f"this user (uid {os.geteuid()})"
