"""Example databases by description, so that the jobs of a fuzzing fleet share what they find.

They are Hypothesis's own databases. Each job replays what the others found before it draws cases of its own.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    ExampleDatabase,
    GitHubArtifactDatabase,
    InMemoryExampleDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)
from hypothesis.errors import HypothesisWarning

from kv_canary.errors import must_be

FORMS = (
    "PATH, dir:PATH, redis://HOST[:PORT][/DB], rediss://HOST[:PORT][/DB], unix://SOCKET[?db=DB], "
    "github:OWNER/REPO[/ARTIFACT], or one of these behind ro: (read only)"
)
KEY_PREFIX = b"kv-canary:"
# The name that Hypothesis's documentation gives the artifact.
ARTIFACT = "hypothesis-example-db"
# How long a remote may take to answer.
TIMEOUT_SECONDS = 10.0

_logger = logging.getLogger("kv_canary")
_T = TypeVar("_T")


def open_database(descriptions: Sequence[str]) -> ExampleDatabase:
    """Open the databases that `descriptions` name, as one.

    What is found is saved in every one of them that is not read only, and what any of them holds is replayed; without
    descriptions, what is found is kept for as long as the process lives.
    Hypothesis also deletes from them what no longer fails: a job that runs other code than the fleet should
    open the fleet's database read only. `hypothesis.seed`, also inside `find(random=...)`, takes a test's database
    away: settings with the database have to be applied after it.

    A Redis has to answer now; one that goes away later is logged once and done without (see `RemoteDatabase`).
    An artifact is downloaded now, with the token in GITHUB_TOKEN; where there is none yet, that is logged.

    Args:
        descriptions: each one of PATH or `dir:PATH`; `redis://HOST[:PORT][/DB]`, `rediss://...` or
            `unix://SOCKET[?db=DB]`, with what else redis-py takes in an address; `github:OWNER/REPO[/ARTIFACT]`,
            which is read only always. `ro:` in front makes any of them read only.

    Raises:
        TypeError: `descriptions` is a string.
        ValueError: a description has none of these forms, or what it names cannot be opened.
    """
    if isinstance(descriptions, str):
        raise TypeError(must_be("difftest", "databases", "a sequence of descriptions", f"the string {descriptions!r}"))
    opened = [_open(description) for description in descriptions] or [InMemoryExampleDatabase()]
    return opened[0] if len(opened) == 1 else MultiplexedDatabase(*opened)


class RemoteDatabase(ExampleDatabase):
    """A database elsewhere whose trouble never reaches the run: a call that fails is one that found or did nothing.

    The first failure is logged as a warning. After each, nothing is tried for a while, so that a server which hangs
    costs one timeout a pause and not one a call. What was not saved meanwhile is not saved later.

    Args:
        wrapped: the database.
        name: what the warning calls it.
        pause_seconds: how long nothing is tried after a failure.
    """

    def __init__(self, wrapped: ExampleDatabase, *, name: str, pause_seconds: float = 60.0) -> None:
        super().__init__()
        self._wrapped, self._name, self._pause_seconds = wrapped, name, pause_seconds
        self._try_again_at = -math.inf
        self._logged = False

    def __repr__(self) -> str:
        return f"RemoteDatabase({self._name!r})"

    def fetch(self, key: bytes) -> Iterable[bytes]:
        return self._attempt(lambda: list(self._wrapped.fetch(key)), otherwise=[])

    def save(self, key: bytes, value: bytes) -> None:
        self._attempt(lambda: self._wrapped.save(key, value), otherwise=None)

    def delete(self, key: bytes, value: bytes) -> None:
        self._attempt(lambda: self._wrapped.delete(key, value), otherwise=None)

    def move(self, src: bytes, dest: bytes, value: bytes) -> None:
        self._attempt(lambda: self._wrapped.move(src, dest, value), otherwise=None)

    def _start_listening(self) -> None:
        self._attempt(lambda: self._wrapped.add_listener(self._broadcast_change), otherwise=None)

    def _stop_listening(self) -> None:
        self._attempt(lambda: self._wrapped.remove_listener(self._broadcast_change), otherwise=None)

    def _attempt(self, call: Callable[[], _T], *, otherwise: _T) -> _T:
        if time.monotonic() < self._try_again_at:
            return otherwise
        try:
            return call()
        # What can be raised is up to the client, the server and the network; none of it is worth the run.
        except Exception as error:
            self._try_again_at = time.monotonic() + self._pause_seconds
            if not self._logged:
                _logger.warning("kv-canary: difftest: database %s failed, going on without: %r", self._name, error)
            self._logged = True
            return otherwise


def _open(description: str) -> ExampleDatabase:
    read_only = description.startswith("ro:")
    address = description.removeprefix("ro:")
    # Two letters at least: one is a drive.
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", address)
    match scheme[1] if scheme else "dir":
        case "dir":
            database = _open_directory(address.removeprefix("dir:"), description, read_only=read_only)
        case "redis" | "rediss" | "unix":
            database = _open_redis(address)
        case "github":
            database, read_only = _open_artifact(address), True
        case _:
            raise _malformed(description)
    return ReadOnlyDatabase(database) if read_only else database


def _open_directory(path: str, description: str, *, read_only: bool) -> ExampleDatabase:
    if not path:
        raise _malformed(description)
    folder = Path(path).expanduser()
    # Hypothesis takes a folder that it cannot write as one that is empty.
    try:
        if not read_only:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(must_be("difftest", "database", "a folder", f"{description!r}: {error}")) from error
    needed = os.R_OK | os.X_OK | (0 if read_only else os.W_OK)
    if not folder.is_dir() or not os.access(folder, needed):
        kind = "readable" if read_only else "writable"
        raise ValueError(must_be("difftest", "database", f"a folder that exists and is {kind}", repr(description)))
    return DirectoryBasedExampleDatabase(folder)


def _open_redis(address: str) -> ExampleDatabase:
    name = _without_password(address)
    try:
        import redis
        from hypothesis.extra.redis import RedisExampleDatabase
    except ModuleNotFoundError as error:
        where = "opened where the package redis is installed (pip install 'kv-canary[fleet]')"
        raise ValueError(must_be("difftest", "database", where, repr(name))) from error
    try:
        if not _is_complete(address):
            raise _malformed(name)
        client = redis.Redis.from_url(address, socket_timeout=TIMEOUT_SECONDS, socket_connect_timeout=TIMEOUT_SECONDS)
        client.ping()
    except (ValueError, TypeError):
        # Without the cause, which may quote the password.
        raise _malformed(name) from None
    except (redis.RedisError, OSError) as error:
        raise ValueError(must_be("difftest", "database", "a Redis that answers", f"{name!r}: {error}")) from error
    return RemoteDatabase(RedisExampleDatabase(client, key_prefix=KEY_PREFIX), name=name)


def _is_complete(address: str) -> bool:
    """Whether the address of a Redis says where it is, and which database as a number.

    For what is missing or no number, redis-py takes its default: another database than the one that is meant.
    """
    parts = urlsplit(address)
    if parts.scheme == "unix":
        return parts.path not in ("", "/")
    return bool(parts.hostname) and re.fullmatch(r"(/\d*)?", parts.path) is not None


def _open_artifact(address: str) -> ExampleDatabase:
    form = re.fullmatch(r"github:(\w[\w.-]*)/(\w[\w.-]*)(?:/(\w[\w.-]*))?", address)
    if form is None:
        raise _malformed(address)
    if not os.environ.get("GITHUB_TOKEN"):
        where = "opened with a token in the environment variable GITHUB_TOKEN"
        raise ValueError(must_be("difftest", "database", where, repr(address)))
    owner, repository, artifact = form[1], form[2], form[3] or ARTIFACT
    # By default, artifacts of one name share a folder, whatever repository they come from.
    folder = Path(".hypothesis", "github-artifacts", owner, repository, artifact)
    # Never tried again after a failure: it would download without a timeout.
    database = RemoteDatabase(
        GitHubArtifactDatabase(owner, repository, artifact, path=folder), name=address, pause_seconds=math.inf
    )
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_SECONDS)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", HypothesisWarning)
            # The first fetch downloads.
            database.fetch(b"")
    finally:
        socket.setdefaulttimeout(before)
    why = " ".join(str(w.message).strip() for w in caught if issubclass(w.category, HypothesisWarning))
    if why:
        _logger.warning("kv-canary: difftest: database %s: %s", address, why)
    return database


def _malformed(description: str) -> ValueError:
    return ValueError(must_be("difftest", "database", f"one of {FORMS}", repr(_without_password(description))))


def _without_password(address: str) -> str:
    return re.sub(r"(password=)[^&]*", r"\1***", re.sub(r"//.*@", "//***@", address))
