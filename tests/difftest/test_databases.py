"""Jobs share what they find: through folders, a real Redis server, and artifacts as GitHub serves them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import time
import unittest
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import ExampleDatabase, InMemoryExampleDatabase, MultiplexedDatabase

from kv_canary.difftest.databases import open_database


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a Redis server that keeps nothing."""
    program = shutil.which("redis-server")
    if program is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)("needs redis-server on PATH")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    with (tmp_path / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    client, give_up_at = redis.Redis(port=port), time.monotonic() + 60
    while time.monotonic() < give_up_at and process.poll() is None:
        try:
            client.ping()
            break
        except redis.RedisError:
            time.sleep(0.02)
    yield f"redis://127.0.0.1:{port}"
    process.kill()
    process.wait()


def called(database: ExampleDatabase, *phases: Phase) -> list[int]:
    """Return the numbers that a job tries, whose test fails from 1000 on."""
    numbers: list[int] = []

    @settings(database=database, phases=phases, max_examples=50, derandomize=False, deadline=None)
    @seed(0)
    @given(st.integers(0, 2**32))
    def every_number_is_small(number: int) -> None:
        numbers.append(number)
        assert number < 1000

    # Where there is nothing to replay, Hypothesis skips the test.
    with contextlib.suppress(AssertionError, unittest.SkipTest):
        every_number_is_small()
    return numbers


FINDING = (Phase.generate, Phase.shrink)


def test_what_one_job_finds_is_the_first_thing_that_another_tries(address: str, tmp_path: Path) -> None:
    for description in (address, f"{address}/3", str(tmp_path / "folder"), f"dir:{tmp_path}/other"):
        assert called(open_database([description]), Phase.reuse) == []
        assert called(open_database([description]), *FINDING)[0] != 1000
        assert called(open_database([description]), Phase.reuse)[0] == 1000
        assert called(open_database([f"ro:{description}"]), Phase.reuse)[0] == 1000


def test_what_is_read_only_is_not_written(address: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for description in (address, str(folder)):
        called(open_database([f"ro:{description}"]), *FINDING)
        assert called(open_database([description]), Phase.reuse) == []


def test_several_are_one(address: str, tmp_path: Path) -> None:
    both = open_database([address, str(tmp_path / "folder")])
    assert isinstance(both, MultiplexedDatabase)
    called(both, *FINDING)
    for description in (address, str(tmp_path / "folder")):
        assert called(open_database([description]), Phase.reuse)[0] == 1000
    assert isinstance(open_database([]), InMemoryExampleDatabase)


def test_a_redis_that_goes_away_is_asked_again(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database = open_database([address])
    database.save(b"key", b"value")
    port = int(address.rpartition(":")[2])
    # The server ends every connection.
    redis.Redis(port=port).client_kill_filter(_type="normal", skipme=True)
    assert set(database.fetch(b"key")) == {b"value"}


@pytest.fixture
def artifact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], None]:
    """Let GitHub serve a folder as an artifact of owner/repository; what is downloaded is kept in the test's folder."""
    monkeypatch.setenv("GITHUB_TOKEN", "a token")
    monkeypatch.chdir(tmp_path)

    def serve(folder: Path) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for path in folder.rglob("*"):
                if path.is_file():
                    archive.write(path, path.relative_to(folder))
        listed = {
            "name": "hypothesis-example-db",
            "created_at": "2026-01-01T00:00:00Z",
            "archive_download_url": "https://zip",
        }

        def urlopen(request: urllib.request.Request) -> io.BytesIO:
            if request.full_url == "https://zip":
                return io.BytesIO(buffer.getvalue())
            assert request.full_url.startswith("https://api.github.com/repos/owner/repository/actions/artifacts")
            return io.BytesIO(json.dumps({"artifacts": [listed]}).encode())

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)

    return serve


def test_an_artifact_is_replayed_and_never_written(artifact: Callable[[Path], None], tmp_path: Path) -> None:
    called(open_database([str(tmp_path / "nightly")]), *FINDING)
    artifact(tmp_path / "nightly")
    database = open_database(["github:owner/repository"])
    assert called(database, Phase.reuse)[0] == 1000
    called(database, *FINDING)
    assert (tmp_path / ".hypothesis/github-artifacts/owner/repository").is_dir()


def test_an_artifact_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    with pytest.raises(ValueError, match="a token in the environment variable GITHUB_TOKEN, got 'github:o/r'"):
        open_database(["github:o/r"])


@pytest.mark.parametrize(
    "description",
    [
        *("", "ro:", "dir:", "ro:dir:", "ftp://host", "redis:", "redis://", "redis://host:port", "redis://host/name"),
        *("redis://host?db=1", "unix://socket", "github:", "github:owner", "github:owner/", "github:owner/../artifact"),
        *("github:owner/repository/", "github:owner/repository/a/b", "github:https://github.com/owner/repository"),
    ],
)
def test_a_malformed_description_is_refused_with_the_forms(description: str) -> None:
    with pytest.raises(ValueError, match=r"kv-canary: difftest: database must be one of PATH, dir:PATH, "):
        open_database(["dir:.", description])


def test_what_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.difftest.databases.TRIES", 0)
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for description, said in (
        (str(tmp_path / "file"), "must be a folder"),
        (f"ro:{tmp_path}/none", "must be a folder that exists and is readable"),
        (f"redis://:secret@127.0.0.1:{port}", r"must be a Redis that answers, got 'redis://\*\*\*@127"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            open_database([description])
        assert "secret" not in str(caught.value)
    with pytest.raises(TypeError, match="a sequence of descriptions, got the string"):
        open_database("dir:.")
