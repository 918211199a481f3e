"""Hypothesis's example databases by description, so that the jobs of a fuzzing fleet share what they find."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    ExampleDatabase,
    GitHubArtifactDatabase,
    InMemoryExampleDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)

from kv_canary.errors import must_be
from kv_canary.extras import install_command

FORMS = "PATH, dir:PATH, redis://HOST[:PORT][/DB], github:OWNER/REPO[/ARTIFACT], or one of these behind ro: (read only)"
# How often, and for how long, a Redis is asked again that does not answer.
TRIES, TIMEOUT_S = 3, 10.0


def open_database(descriptions: Sequence[str]) -> ExampleDatabase:
    """Open the databases that `descriptions` name, as one; without any, one that lives as long as the process.

    What is found is saved in every one of them that is not read only, and what any of them holds is replayed first.
    Hypothesis also deletes from them what no longer fails: a job that runs other code than the fleet should open the
    fleet's database read only. `hypothesis.seed`, also inside `find(random=...)`, takes a test's database away:
    settings with the database have to be applied after it.

    Args:
        descriptions: each one of `FORMS`. An artifact is read only always; it is downloaded when it is first looked
            into, with the token in GITHUB_TOKEN. A Redis must answer now; one that stays away later ends the job.

    Raises:
        TypeError: `descriptions` is a string.
        ValueError: a description has none of these forms, or what it names cannot be opened.
    """
    if isinstance(descriptions, str):
        raise TypeError(must_be("difftest", "databases", "a sequence of descriptions", f"the string {descriptions!r}"))
    opened = [_open(description) for description in descriptions] or [InMemoryExampleDatabase()]
    return opened[0] if len(opened) == 1 else MultiplexedDatabase(*opened)


def _open(description: str) -> ExampleDatabase:
    address = description.removeprefix("ro:")
    read_only = address != description
    # Two letters at least: one is a drive.
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", address)
    match scheme[1] if scheme else "dir":
        case "dir" if path := address.removeprefix("dir:"):
            database = _open_folder(Path(path).expanduser(), read_only=read_only)
        case "redis" | "rediss":
            database = _open_redis(address)
        case "github":
            database, read_only = _open_artifact(address), True
        case _:
            raise _malformed(address)
    return ReadOnlyDatabase(database) if read_only else database


def _open_folder(folder: Path, *, read_only: bool) -> ExampleDatabase:
    # Hypothesis takes a folder that it cannot read or write as one that is empty.
    try:
        if not read_only:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(must_be("difftest", "database", "a folder", f"{folder}: {error}")) from error
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK | (0 if read_only else os.W_OK)):
        kind = "readable" if read_only else "writable"
        raise ValueError(must_be("difftest", "database", f"a folder that exists and is {kind}", str(folder)))
    return DirectoryBasedExampleDatabase(folder)


def _open_redis(address: str) -> ExampleDatabase:
    name = re.sub(r"//.*@", "//***@", address)
    try:
        import redis
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis.backoff import ExponentialBackoff
        from redis.retry import Retry
    except ModuleNotFoundError as error:
        where = f"opened where the package redis is installed ({install_command('fleet')})"
        raise ValueError(must_be("difftest", "database", where, repr(name))) from error
    if not re.fullmatch(r"rediss?://([^@/]*@)?[^@/?:]+(:\d+)?(/\d*)?", address):
        raise _malformed(name)
    client = redis.Redis.from_url(
        address,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry=Retry(ExponentialBackoff(), TRIES),
        retry_on_error=[redis.ConnectionError, redis.TimeoutError],
    )
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        raise ValueError(must_be("difftest", "database", "a Redis that answers", f"{name!r}: {error}")) from error
    return RedisExampleDatabase(client, key_prefix=b"kv-canary:")


def _open_artifact(address: str) -> ExampleDatabase:
    form = re.fullmatch(r"github:(\w[\w.-]*)/(\w[\w.-]*)(?:/(\w[\w.-]*))?", address)
    if form is None:
        raise _malformed(address)
    if not os.environ.get("GITHUB_TOKEN"):
        where = "opened with a token in the environment variable GITHUB_TOKEN"
        raise ValueError(must_be("difftest", "database", where, repr(address)))
    # The name that Hypothesis's documentation gives the artifact.
    owner, repository, artifact = form[1], form[2], form[3] or "hypothesis-example-db"
    # By default, artifacts of one name share a folder, whatever repository they come from.
    folder = Path(".hypothesis", "github-artifacts", owner, repository, artifact)
    return GitHubArtifactDatabase(owner, repository, artifact, path=folder)


def _malformed(description: str) -> ValueError:
    return ValueError(must_be("difftest", "database", f"one of {FORMS}", repr(description)))
