"""Jobs share what they find: through folders, a real Redis server, and artifacts as GitHub serves them."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import ExampleDatabase, InMemoryExampleDatabase, MultiplexedDatabase

from kv_canary.difftest import databases
from kv_canary.difftest.databases import KEY_PREFIX, RemoteDatabase, open_database

# A job of the fleet: it prints the numbers that its test was called with. The smallest that fails is 1000. The settings
# come last, since a seed takes the database away; where nothing is to be replayed, Hypothesis skips the test.
JOB = """
import json, sys, unittest
from hypothesis import Phase, given, seed, settings, strategies as st
from kv_canary.difftest.databases import open_database

called = []

@settings(
    database=open_database(sys.argv[2:]), phases=[Phase[name] for name in sys.argv[1].split(",")],
    max_examples=50, derandomize=False, deadline=None,
)
@seed(0)
@given(st.integers(0, 2**32))
def every_number_is_small(number):
    called.append(number)
    assert number < 1000

try:
    every_number_is_small()
except (AssertionError, unittest.SkipTest):
    pass
print(json.dumps(called))
"""


@dataclass(kw_only=True)
class Server:
    """A Redis server that a test started."""

    process: subprocess.Popen[bytes]
    port: int
    socket: Path

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


def start_server(folder: Path, *, port: int | None = None) -> Server:
    """Start a Redis server that keeps nothing, and wait until it answers."""
    program = shutil.which("redis-server")
    if program is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)("needs redis-server on PATH")
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    folder.mkdir(exist_ok=True)
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", str(folder / "socket")]
    command += ["--save", "", "--appendonly", "no", "--dir", str(folder)]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    client = redis.Redis(port=port)
    give_up_at = time.monotonic() + 60
    while True:
        try:
            client.ping()
        except redis.RedisError as error:
            if process.poll() is not None or time.monotonic() > give_up_at:
                process.kill()
                pytest.fail(f"redis-server does not answer: {error}\n{(folder / 'log').read_text()}")
            time.sleep(0.02)
        else:
            return Server(process=process, port=port, socket=folder / "socket")


@pytest.fixture(scope="session")
def session_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def server(session_server: Server) -> Server:
    """The session's server, empty."""
    redis.Redis(port=session_server.port).flushall()
    return session_server


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., list[int]]:
    """Run a job in a process of its own; return the numbers that its test was called with."""

    def run(*descriptions: str, phases: str) -> list[int]:
        script = tmp_path / "job.py"
        script.write_text(JOB)
        command = [sys.executable, str(script), phases, *descriptions]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        called: list[int] = json.loads(done.stdout)
        return called

    return run


@pytest.fixture
def opened_artifacts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Make GitHub serve one folder as an artifact, or raise; what is downloaded is kept in a folder of the test."""
    monkeypatch.setenv("GITHUB_TOKEN", "a token")
    monkeypatch.chdir(tmp_path)

    def serve(served: dict[str, Path] | Exception) -> None:
        def urlopen(request: urllib.request.Request) -> io.BytesIO:
            assert socket.getdefaulttimeout() == databases.TIMEOUT_SECONDS
            if isinstance(served, Exception):
                raise served
            address = request.full_url.removeprefix("https://api.github.com/repos/")
            if address.endswith("/actions/artifacts"):
                artifacts = [
                    {"name": name.rsplit("/", 1)[1], "created_at": "2026-01-01T00:00:00Z", "archive_download_url": name}
                    for name in served
                    if name.startswith(address.removesuffix("/actions/artifacts") + "/")
                ]
                for artifact in artifacts:
                    artifact["archive_download_url"] = f"https://zip/{artifact['archive_download_url']}"
                return io.BytesIO(json.dumps({"artifacts": artifacts}).encode())
            return io.BytesIO(zipped(served[address.removeprefix("https://zip/")]))

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)

    return serve


def zipped(folder: Path) -> bytes:
    """A folder as an artifact holds it: what is in it, without its own name."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in folder.rglob("*"):
            if path.is_file():
                archive.write(path, path.relative_to(folder))
    return buffer.getvalue()


def small_numbers(database: ExampleDatabase, on_call: Callable[[int], None]) -> Callable[[], None]:
    """A test that fails from 1000 on, in every phase."""

    @settings(database=database, derandomize=False, max_examples=50, deadline=None)
    @seed(0)
    @given(st.integers(0, 2**32))
    def every_number_is_small(number: int) -> None:
        on_call(number)
        assert number < 1000

    return every_number_is_small


def values(database: ExampleDatabase, key: bytes = b"key") -> set[bytes]:
    return set(database.fetch(key))


def stored(server: Server) -> dict[bytes, set[bytes]]:
    """What a Redis server holds."""
    client = redis.Redis(port=server.port)
    return {key: set(client.smembers(key)) for key in client.scan_iter()}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "kv_canary" and r.levelno >= logging.WARNING]


def test_a_failure_found_by_one_process_is_the_first_thing_that_another_tries(
    job: Callable[..., list[int]], server: Server
) -> None:
    assert job("dir:other", server.address, phases="reuse") == []
    found = job("dir:first", server.address, phases="generate,shrink")
    assert len(found) > 1
    reused = job("dir:second", server.address, phases="reuse")
    assert reused[0] == 1000
    # The folder of the first kept it too; a folder by itself knows nothing of it.
    assert job("dir:first", phases="reuse")[0] == 1000
    assert job("dir:third", phases="reuse") == []


def test_a_campaign_begins_with_what_another_found(tmp_path: Path, server: Server) -> None:
    first, second = (
        campaign(tmp_path / name, "--database", f"{access}{server.address}/5", "--seed", name)
        for name, access in (("1", ""), ("2", "ro:"))
    )
    assert first["findings"][0]["op"] == second["findings"][0]["op"] == "move"
    assert first["findings"][0]["cases_before"] > second["findings"][0]["cases_before"] == 1


def campaign(folder: Path, *options: str) -> dict[str, Any]:
    """Fuzz a planted bug on the command line until it is found; return the facts."""
    folder.mkdir()
    command = [str(Path(sys.executable).with_name("kv-canary")), "difftest", "fuzz", "--op", "move", "--jobs", "1"]
    command += ["--plant", "retired-moves", "--max-findings", "1", "--shrink", "5", "--json", "facts.json", *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=280
    )
    assert done.returncode == 1, done.stdout + done.stderr
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


def test_a_read_only_redis_is_replayed_and_not_written(job: Callable[..., list[int]], server: Server) -> None:
    job("dir:first", f"ro:{server.address}", phases="generate,shrink")
    assert stored(server) == {}
    job(server.address, phases="generate,shrink")
    before = stored(server)
    assert before
    assert all(key.startswith(KEY_PREFIX) for key in before)
    assert job("dir:second", f"ro:{server.address}", phases="reuse")[0] == 1000
    read_only = open_database([f"ro:{server.address}"])
    for key, members in before.items():
        for value in members:
            read_only.delete(key.removeprefix(KEY_PREFIX), value)
            read_only.move(key.removeprefix(KEY_PREFIX), b"elsewhere", value)
    assert stored(server) == before


def test_a_redis_is_a_database_like_any_other(server: Server) -> None:
    database = open_database([server.address])
    database.save(b"key", b"value")
    database.save(b"key", b"other\x00\xff")
    assert values(open_database([f"{server.address}/0"])) == {b"value", b"other\x00\xff"}
    assert values(open_database([f"unix://{server.socket}"])) == {b"value", b"other\x00\xff"}
    assert values(open_database([f"{server.address}/1"])) == set()
    assert values(open_database([f"unix://{server.socket}?db=1"])) == set()
    database.move(b"key", b"moved", b"value")
    database.delete(b"key", b"other\x00\xff")
    assert (values(database), values(database, b"moved")) == (set(), {b"value"})


def test_several_are_one(tmp_path: Path, server: Server) -> None:
    local, shared = f"dir:{tmp_path / 'local'}", server.address
    open_database([shared]).save(b"key", b"shared")
    both = open_database([local, shared])
    both.save(b"key", b"new")
    assert values(both) == {b"shared", b"new"}
    assert values(open_database([local])) == {b"new"}
    assert values(open_database([shared])) == {b"shared", b"new"}


def test_what_a_redis_hears_of_reaches_listeners(server: Server) -> None:
    database, heard = open_database([server.address]), []
    database.add_listener(heard.append)
    open_database([server.address]).save(b"key", b"value")
    pubsub = database._wrapped._pubsub
    # The first message says that it listens.
    for _ in range(2):
        pubsub.get_message(timeout=60)
    assert heard == [("save", (b"key", b"value"))]
    database.clear_listeners()


def test_a_redis_that_goes_away_does_not_fail_the_run_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(tmp_path / "redis")
    called: list[int] = []

    def on_call(number: int) -> None:
        if not called:
            server.stop()
        called.append(number)

    try:
        run = small_numbers(open_database([f"dir:{tmp_path / 'local'}", server.address]), on_call)
        with pytest.raises(AssertionError, match="1000"):
            run()
    finally:
        server.stop()
    assert len(called) > 10
    (warning,) = warnings_of(caplog)
    assert server.address in warning
    # The folder has what was found after the server had gone.
    again: list[int] = []
    with pytest.raises(AssertionError):
        small_numbers(open_database([f"dir:{tmp_path / 'local'}"]), again.append)()
    assert again[0] == 1000


def test_a_redis_that_comes_back_is_used_again_after_the_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(tmp_path / "redis")
    try:
        wrapped = open_database([server.address])._wrapped
        impatient = RemoteDatabase(wrapped, name="impatient", pause_seconds=0.0)
        patient = RemoteDatabase(wrapped, name="patient", pause_seconds=3600.0)
        server.stop()
        for database in (impatient, patient, impatient, patient):
            database.save(b"key", b"lost")
            assert values(database) == set()
        server = start_server(tmp_path / "redis", port=server.port)
        for database in (impatient, patient):
            database.save(b"key", repr(database).encode())
        assert values(impatient) == {b"RemoteDatabase('impatient')"}
        assert values(patient) == set()
    finally:
        server.stop()
    assert [sum(name in w for w in warnings_of(caplog)) for name in ("impatient", "database patient")] == [1, 1]


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    open_database(["deep/er"]).save(b"key", b"value")
    for description in (
        "deep/er",
        "dir:deep/er",
        f"dir:{tmp_path}/deep/er",
        "~/deep/er",
        "ro:deep/er",
        "ro:dir:deep/er",
    ):
        assert values(open_database([description])) == {b"value"}
    read_only = open_database(["ro:dir:deep/er"])
    read_only.save(b"key", b"new")
    read_only.delete(b"key", b"value")
    assert values(open_database(["deep/er"])) == {b"value"}
    open_database(["dir:with:colon"]).save(b"key", b"colon")
    assert values(open_database(["./with:colon"])) == {b"colon"}


def test_one_is_itself_and_none_is_memory(tmp_path: Path) -> None:
    assert not isinstance(open_database([str(tmp_path)]), MultiplexedDatabase)
    assert isinstance(open_database([]), InMemoryExampleDatabase)


def test_an_artifact_is_replayed(tmp_path: Path, opened_artifacts: Callable[..., None]) -> None:
    found: list[int] = []
    with pytest.raises(AssertionError):
        small_numbers(open_database(["dir:.hypothesis/examples"]), found.append)()
    opened_artifacts({"owner/repository/hypothesis-example-db": tmp_path / ".hypothesis/examples"})
    reused: list[int] = []
    with pytest.raises(AssertionError):
        small_numbers(open_database(["dir:new", "github:owner/repository"]), reused.append)()
    assert reused[0] == 1000


def test_an_artifact_is_read_only_whether_said_or_not(
    opened_artifacts: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    open_database(["folder"]).save(b"key", b"value")
    opened_artifacts({"owner/repository/hypothesis-example-db": Path("folder")})
    for description in ("github:owner/repository", "ro:github:owner/repository"):
        database = open_database([description])
        # Hypothesis's own refuses to be written.
        database.save(b"key", b"new")
        database.delete(b"key", b"value")
        assert values(database) == {b"value"}
    assert warnings_of(caplog) == []


def test_artifacts_of_one_name_are_kept_apart(opened_artifacts: Callable[..., None]) -> None:
    open_database(["first"]).save(b"key", b"first")
    open_database(["second"]).save(b"key", b"second")
    opened_artifacts({"o/first/same": Path("first"), "o/second/same": Path("second"), "o/second/other": Path("first")})
    assert values(open_database(["github:o/first/same"])) == {b"first"}
    assert values(open_database(["github:o/second/same"])) == {b"second"}
    assert values(open_database(["github:o/second/other", "github:o/second/same"])) == {b"first", b"second"}


@pytest.mark.parametrize(
    "served",
    [{}, urllib.error.URLError("unreachable"), TimeoutError("too slow"), ConnectionResetError("reset by peer")],
    ids=["none yet", "unreachable", "slow", "reset"],
)
def test_an_artifact_that_cannot_be_had_is_logged_once_and_done_without(
    served: Any, opened_artifacts: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    opened_artifacts(served)
    database = open_database(["github:owner/repository"])
    assert values(database) == values(database, b"other") == set()
    (warning,) = warnings_of(caplog)
    assert "github:owner/repository" in warning


def test_an_artifact_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"GITHUB_TOKEN, got 'github:owner/repository'"):
        open_database(["github:owner/repository"])


@pytest.mark.parametrize(
    "description",
    [
        "",
        "ro:",
        "dir:",
        "ro:ro:dir:.",
        "redsi://localhost",
        "https://example.org/examples",
        "redis:localhost",
        "redis://",
        "redis:///0",
        "redis://localhost:port",
        "redis://localhost/first",
        "redis://localhost/0/1",
        "redis://localhost?db=first",
        "redis://localhost?no_such_option=1",
        "unix://",
        "unix://socket",
        "github:",
        "github:owner",
        "github:owner/",
        "github:owner/repository/",
        "github:owner/../artifact",
        "github:owner/repository/artifact/more",
        "github:https://github.com/owner/repository",
    ],
)
def test_a_malformed_description_is_refused_with_the_forms(description: str) -> None:
    with pytest.raises(ValueError, match=r"kv-canary: difftest: database must be one of PATH, dir:PATH, ") as caught:
        open_database(["dir:.", description])
    assert str(caught.value).endswith(f", got {description.removeprefix('ro:')!r}") or description.startswith("ro:")


def test_a_string_for_the_sequence_is_refused() -> None:
    with pytest.raises(TypeError, match="a sequence of descriptions, got the string 'dir:examples'"):
        open_database("dir:examples")


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("file", "file/folder"):
        with pytest.raises(ValueError, match=r"database must be a folder, got 'dir:.*file"):
            open_database([f"dir:{tmp_path / path}"])
    with pytest.raises(ValueError, match=r"must be a folder that exists and is readable, got 'ro:dir:.*missing'"):
        open_database([f"ro:dir:{tmp_path / 'missing'}"])
    assert not (tmp_path / "missing").exists()


def test_a_redis_that_does_not_answer_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "TIMEOUT_SECONDS", 0.2)
    # A bound port nobody listens on, one that takes connections and says nothing, and a socket that is not there.
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as silent:
        closed.bind(("127.0.0.1", 0))
        ports = [s.getsockname()[1] for s in (closed, silent)]
        for address in (*(f"redis://127.0.0.1:{port}/3" for port in ports), f"unix://{tmp_path}/no-socket"):
            with pytest.raises(ValueError, match=f"must be a Redis that answers, got '{address}': "):
                open_database([address])


def test_a_password_is_in_no_message(server: Server) -> None:
    for address, shown in {
        f"redis://user:secret@127.0.0.1:{server.port}": f"redis://***@127.0.0.1:{server.port}",
        f"redis://127.0.0.1:{server.port}?password=secret&db=x": f"redis://127.0.0.1:{server.port}?password=***&db=x",
        "redis://user:sec/secret@localhost": "redis://***@localhost",
        "redsi://user:secret@localhost": "redsi://***@localhost",
    }.items():
        with pytest.raises(ValueError, match="kv-canary: difftest: database must be ") as caught:
            open_database([address])
        assert shown in str(caught.value)
        assert "sec" not in str(caught.value)


def test_a_missing_package_is_said_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ValueError, match=r"pip install 'kv-canary\[fleet\]'\), got 'redis://localhost'"):
        open_database(["redis://localhost"])
