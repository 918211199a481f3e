"""The command line: help that teaches, exit codes that mean something, output for machines."""

from __future__ import annotations

import dataclasses
import errno
import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import kv_canary as kc
from kv_canary import output
from kv_canary.cli import LogLines, main
from kv_canary.commands import checkup, places
from kv_canary.commands.checkup import Checkup, check_up
from kv_canary.commands.probe import probe, probe_apart
from kv_canary.engines.sglang import hooks, items
from kv_canary.extras import install_command
from kv_canary.specs import all_specs
from kv_canary.specs.document import ops_page


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in ("demo", "doctor", "ops", "report"))])
def test_help_teaches(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    assert "Usage:" in result.output
    assert len(result.output.splitlines()) > 8


def test_ops_lists_every_op_with_its_contract() -> None:
    result = CliRunner().invoke(main, ["ops"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines() if not line.startswith(" ")] == list(all_specs())


def test_ops_for_machines() -> None:
    result = CliRunner().invoke(main, ["ops", "--json"])
    assert json.loads(result.output) == {name: list(spec.arguments) for name, spec in all_specs().items()}


def test_the_page_of_ops_is_up_to_date() -> None:
    page = Path(__file__).parents[1] / "docs" / "ops.md"
    assert page.read_text() == ops_page(), "run `kv-canary ops --markdown > docs/ops.md`"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["ops", "nope"], "nope"),
        (["demo", "--backend", "cuda"], "--backend"),
        (["demo", "--requests", "1"], "--requests"),
        (["demo", "--prompts", "no/such/file"], "no/such/file"),
        (["nope"], "nope"),
        (["doctor", "--backend", "cuda"], "--backend"),
        (["doctor", "--engine", "nope"], "--engine"),
        (["report"], "BUNDLE"),
        (["report", "no/such/file"], "no/such/file"),
    ],
)
def test_misuse_exits_2_and_says_what_was_wrong(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert word in result.output


def test_a_trace_that_is_none_is_misuse(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("a,b\n1,2\n")
    result = CliRunner().invoke(main, ["demo", "--trace", str(trace)])
    assert result.exit_code == 2
    assert "Azure" in result.output


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The bundle of one damaged slot."""
    k = torch.zeros(1, 64, 16, dtype=torch.uint8)
    source = kc.KvSource(layers=tuple(k), page_size=1, bytes_per_token=16)
    pool = kc.KvPool(name="kv", num_slots=64, k_source=source, v_source=None, device="cpu")
    canary = kc.CanaryManager(
        [kc.BufferGroup(name="full", pool=pool)],
        limits=kc.CanaryLimits(max_rows=2, max_requests=1, max_tokens=16, max_len=64),
        config=kc.CanaryConfig(backend="reference", bundles=tmp_path),
    )
    table, text = torch.zeros(2, 64, dtype=torch.int32), list(range(100, 164))
    for start, end in ((0, 10), (10, 11)):
        table[1, start:end] = slots = torch.arange(start + 1, end + 1)
        request = kc.ForwardRequest(
            request_id="a", row=1, owner=1, prefix_len=start, extend_len=end - start, tokens=lambda i, j: text[i:j]
        )
        batch = kc.ForwardBatch(
            requests=[request],
            input_ids=torch.tensor(text[start:end]),
            positions=torch.arange(start, end),
            out_slots={"full": slots},
            tables={"full": table},
        )
        with canary.forward().around(batch):
            k[:, slots] = 7
        k[:, 4] = 8
    canary.flush()
    assert output.drain()
    (path,) = tmp_path.iterdir()
    return path


def test_report_shows_what_was_found_and_exits_1(bundle: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(bundle)])
    assert result.exit_code == 1
    words = " ".join(result.output.split())
    assert "request a reads position 3 in slot 4 of full: K" in words
    assert "Around it, as of step 2" in words


def test_report_for_machines(bundle: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(bundle), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output) == json.loads(bundle.read_text())


def test_report_draws_a_page(bundle: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["report", str(bundle), "--html", str(page)])
    assert result.exit_code == 1
    assert f"Drawn: {page}" in result.output
    assert page.read_text().startswith("<!doctype html>")
    assert "<svg" in page.read_text()


def test_a_page_for_machines_leaves_the_output_to_them(bundle: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(bundle), "--json", "--html", str(tmp_path / "page.html")])
    assert json.loads(result.output)["format"] == "kv-canary-bundle"
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "kv-canary-bundle", "version": 9}'])
def test_a_file_that_is_no_bundle_is_misuse(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    result = CliRunner().invoke(main, ["report", str(tmp_path / "x.json"), "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 2
    assert "must be a" in result.output
    assert "bundle" in result.output
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_misuse(bundle: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(bundle), "--html", str(tmp_path / "no" / "page.html")])
    assert result.exit_code == 2


def test_the_reference_works_and_a_backend_that_does_not_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe("reference", "cpu") == ""
    assert "must be one of" in probe("nope", "cpu")
    monkeypatch.setattr("kv_canary.reference.verify.fingerprint", lambda source, slots, where: torch.zeros_like(slots))
    assert "must be found clean, got 4" in probe("reference", "cpu")


def test_a_backend_that_finds_nothing_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.reference.verify.report", lambda *_, **__: None)
    assert "a flipped bit in the K of slot 2 must be found, got []" in probe("reference", "cpu")


def test_triton_is_tried_in_a_process_of_its_own() -> None:
    assert probe_apart("triton", "cpu", interpret=True) == ""
    # Not interpreted, it cannot run on a CPU.
    assert "TRITON_INTERPRET=1" in probe_apart("triton", "cpu", interpret=False)


def test_a_process_that_dies_is_a_backend_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.commands.probe.sys.executable", "/bin/false")
    assert probe_apart("triton", "cpu", interpret=True) == "its process ended with 1: it said nothing"


# One measurement, which takes longer than all else that is looked at, says what every other one would.
measured_once = functools.cache(checkup._cost)


@pytest.fixture(autouse=True)
def one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the canary costs here is measured once for all tests."""
    monkeypatch.setattr(checkup, "_cost", measured_once)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends in processes of their own are taken to work."""
    monkeypatch.setattr(checkup, "probe_apart", lambda *_, **__: "")


def doctor(*, backend: str | None = None, engines: tuple[str, ...] = (), **variables: str) -> Checkup:
    return check_up(backend=backend, engines=engines, environ={f"KV_CANARY_{k}": v for k, v in variables.items()})


@pytest.mark.usefixtures("no_processes")
def test_doctor_finds_all_well_and_says_what_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor(READ_BYTES="64", SWEEP_EVERY="50")
    assert found.problems == ()
    assert found.environment == {"KV_CANARY_READ_BYTES": "64", "KV_CANARY_SWEEP_EVERY": "50"}
    assert found.config is not None
    assert found.config["read_bytes"] == 64
    assert [(b.name, b.device, b.works) for b in found.backends][:3] == [
        ("reference", "cpu", True),
        ("triton", "cpu (interpreter)", True),
        ("shadow", "cpu (interpreter)", True),
    ]
    assert {e.name: e.supported for e in found.engines}["transformers"]
    assert any("64 of each token's K" in line for line in found.covered)
    assert any("every 50 steps" in line for line in found.covered)
    assert any("padding slot" in line for line in found.not_covered)
    assert any(
        "every byte of K and V: sealed on a GPU" in line and "by sample on a CPU" in line for line in found.covered
    )


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"engines": ("vllm",)}, "engine vllm: not installed"),
        ({"READ_BYTES": "many"}, "KV_CANARY_READ_BYTES must be int, got 'many'"),
        ({"READ_BITES": "3"}, "did you mean KV_CANARY_READ_BYTES?"),
        ({"QUARANTINE": "1"}, "quarantine must be off where"),
        ({"BUNDLES": "/proc/version/x"}, "bundles: /proc/version/x must be a folder that can be written to"),
        ({"BUNDLES": "/proc/x"}, "in /proc: name a folder that this user (uid "),
        ({"EVENT_LOG": "/proc/version/x.jsonl"}, "must be a file that can be appended to, got Not a directory in"),
        ({"EVENT_LOG": "/nope/x.jsonl"}, "got no folder /nope: mkdir -p /nope, or name another file"),
        ({"EVENT_LOG": "/proc/x.jsonl"}, "in /proc: name a file in a folder that this user"),
        # A file that is there, and that nobody can write to.
        ({"EVENT_LOG": "/proc/version"}, "event_log: /proc/version must be a file that can be appended to, got "),
        ({"EVENT_LOG": "/tmp"}, "got a folder: name a file in it, such as /tmp/kv-canary.jsonl"),
        ({"SHADOW_EVRY": "3"}, "KV_CANARY_SHADOW_EVRY must be a known setting, got an unknown one (did you mean"),
        ({"SHADOW_EVRY": "3"}, "did you mean KV_CANARY_SHADOW_EVERY?"),
        ({"SHADOW_EVERY": "0"}, "every must be at least 1, got 0"),
        ({"PERTURB_MODE": "req_to_token", "PERTURB_WARMUP": "3"}, "did you mean KV_CANARY_PERTURB_WARM_UP?"),
        ({"PERTURB_MODE": "explode"}, "PerturbConfig: mode must be one of 'req_to_token', "),
        ({"PERTURB_SEED": "3"}, "KV_CANARY_PERTURB_MODE must be given with seed"),
        ({"METRICS_ADDRESS": "localhost"}, "metrics_address must be an IP address of this host, or 0.0.0.0"),
        (
            {"METRICS_PORT": "9400", "METRICS_ADDRESS": "192.0.2.1"},
            "got 192.0.2.1: Cannot assign requested address: `ip",
        ),
    ],
)
def test_doctor_says_what_is_missing_that_was_asked_for(asked: dict[str, Any], words: str) -> None:
    (problem,) = doctor(**asked).problems
    assert words in problem


@pytest.mark.usefixtures("no_processes")
def test_doctor_tells_every_error_of_the_configuration() -> None:
    found = doctor(READ_BYTES="many", STRIDES="3", MODE="log", SHADOW_EVRY="3", PERTURB_MODE="explode")
    assert len(found.problems) == 4
    assert found.config is None
    # What is in order is looked at all the same.
    assert len(doctor(EVENT_LOG="/nope/x.jsonl", BUNDLES="/proc/x", PERTURB_MODE="explode").problems) == 3


@pytest.mark.usefixtures("no_processes")
def test_doctor_tries_what_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    log, link = tmp_path / "there.jsonl", tmp_path / "link.jsonl"
    log.write_text("{}\n")
    link.symlink_to(tmp_path / "not yet.jsonl")
    (tmp_path / "found").mkdir()
    before = {path: path.lstat().st_size for path in tmp_path.rglob("*")}
    for event_log in (log, link, tmp_path / "new.jsonl"):
        for bundles in (tmp_path / "found", tmp_path / "a" / "b" / "c"):
            assert doctor(EVENT_LOG=str(event_log), BUNDLES=str(bundles)).problems == ()
    link.unlink()
    link.symlink_to("/nope/x.jsonl")
    assert "got no folder /nope" in doctor(EVENT_LOG=str(link)).problems[0]
    assert "must be a folder" in doctor(BUNDLES=str(log)).problems[0]
    assert {path: path.lstat().st_size for path in tmp_path.rglob("*") if path != link} == {
        path: size for path, size in before.items() if path != link
    }


@pytest.mark.usefixtures("no_processes")
def test_doctor_asks_no_permissions_but_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As root is told, who may write everywhere, of a disk that is full.
    def write(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kv_canary.commands.places.os.write", write)
    problems = doctor(EVENT_LOG=str(tmp_path / "x.jsonl"), BUNDLES=str(tmp_path / "a")).problems
    assert [problem.split(":")[0] for problem in problems] == ["event_log", "bundles"]
    assert all("got No space left on device in" in problem for problem in problems)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_processes")
def test_doctor_says_that_a_port_is_taken_and_that_ranks_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "installed", {"sglang": None}.get)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        (problem,) = doctor(METRICS_PORT=port).problems
        assert "metrics_port must be a port that is free here, another one for every process" in problem
        assert f"got {port} at 127.0.0.1: Address already in use: `ss -ltnp 'sport = :{port}'` says who" in problem
        (problem,) = doctor(METRICS_PORT=port, METRICS_ADDRESS="0.0.0.0").problems
        assert f"got {port} at 0.0.0.0: Address already in use" in problem
    for _ in range(2):
        found = doctor(METRICS_PORT=port)
        assert (found.problems, found.warnings) == ((), ())
    monkeypatch.setattr(checkup, "installed", {"sglang": hooks.TESTED}.get)
    (warning,) = doctor(METRICS_PORT=port).warnings
    assert f"every rank is served on a port of its own, {port} plus its number" in warning


@pytest.mark.usefixtures("no_processes")
def test_doctor_misses_the_library_of_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "installed", lambda _: None)
    assert doctor(METRICS_PORT="0").problems == ()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    assert (
        "prometheus-client is not installed: pip install 'prometheus-client>=" in doctor(METRICS_PORT=port).problems[0]
    )


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("text", ["off", "Off", "none", "0", ""])
def test_doctor_says_that_the_canary_is_off(text: str) -> None:
    # What it would write to is not missed.
    found = doctor(MODE=text, EVENT_LOG="/nope/x.jsonl")
    assert found.problems == ()
    assert found.warnings == ("the canary is off: the environment says so (KV_CANARY_MODE)",)
    assert found.covered == ("nothing: the canary is off (mode)",)
    assert found.config is not None
    assert found.config["mode"] == "off"


def test_doctor_holds_a_backend_against_where_it_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "probe_apart", lambda name, *_, **__: "it fell over" if name == "shadow" else "")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert doctor().problems == ()
    assert doctor(BACKEND="triton").problems == ()
    assert doctor(BACKEND="shadow").problems == ("backend shadow on cpu (interpreter): it fell over",)
    assert doctor(backend="shadow", BACKEND="triton").problems != ()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "it needs a GPU, or TRITON_INTERPRET=1" in doctor(BACKEND="triton").problems[0]
    assert doctor(BACKEND="reference").problems == ()


@pytest.mark.usefixtures("no_processes")
def test_doctor_without_triton_and_with_an_engine_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformers": "4.40.0", "sglang": "0.5.0", "vllm": "0.9.0"}
    monkeypatch.setattr(checkup, "installed", versions.get)
    found = doctor(engines=("transformers", "sglang", "vllm"))
    assert [b.works for b in found.backends] == [True, False, False]
    assert "triton is not installed" in found.backends[1].detail
    assert len(found.problems) == 3
    assert "got 4.40.0" in found.problems[0]
    # What is said to be installed is not: looked for, the hooks' targets are not there.
    assert "engine sglang: kv-canary: sglang adapter: sglang must be" in found.problems[1]
    assert "engine vllm: kv-canary: vllm adapter: vllm must be" in found.problems[2]


@pytest.mark.usefixtures("no_processes")
def test_doctor_knows_whether_sglang_will_load_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "installed", {"sglang": hooks.TESTED}.get)
    [here] = [e for e in doctor().engines if e.name == "sglang"]
    assert here.supported
    assert "KV_CANARY_MODE" in here.detail
    monkeypatch.setattr(items, "IS_COMPILED", not items.IS_COMPILED)
    [other] = [e for e in doctor().engines if e.name == "sglang"]
    assert sorted("built without a C compiler" in e.detail for e in (here, other)) == [False, True]
    monkeypatch.setenv("SGLANG_PLUGINS", "another, one")
    assert "leaves the plugin kv-canary out" in doctor(engines=("sglang",)).problems[0]
    monkeypatch.setenv("SGLANG_PLUGINS", "another, kv-canary")
    assert doctor(engines=("sglang",)).problems == ()
    monkeypatch.setattr(checkup, "entry_points", lambda **_: ())
    assert "does not find the plugin" in doctor(engines=("sglang",)).problems[0]


@pytest.mark.usefixtures("no_processes")
def test_doctor_warns_of_faults_that_are_injected() -> None:
    assert "faults are injected on purpose: real_kv_used" in doctor(PERTURB_MODE="real_kv_used").warnings[0]


@pytest.mark.usefixtures("no_processes")
def test_doctor_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CANARY_STRIDE", "4")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert "All that was asked for is here." in result.output
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.output)["config"]["stride"] == 4
    monkeypatch.setenv("KV_CANARY_BUNDLES", "/proc/x")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "problem: bundles: /proc/x must be a folder that can be written to" in " ".join(result.output.split())
    assert "All that was asked for is here." not in result.output
    monkeypatch.delenv("KV_CANARY_BUNDLES")
    monkeypatch.setenv("KV_CANARY_MODE", "off")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert "warning: the canary is off: the environment says so" in " ".join(result.output.split())
    monkeypatch.delenv("KV_CANARY_MODE")
    monkeypatch.setenv("KV_CANARY_STRIDE", "0")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "stride must be at least 1, got 0" in " ".join(result.output.split())
    assert json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)["config"] is None


HELP = [["--help"], ["difftest", "--help"], ["difftest", "fuzz", "--help"], ["bench", "--help"], ["doctor", "--help"]]


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """So that it is there in a moment; also as `python -m kv_canary`."""
    done = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", "-m", "kv_canary", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Usage: ")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"click", "kv_canary.cli"} <= imported
    assert not imported & {"torch", "triton", "numpy", "hypothesis", "rich", "pytest", "transformers"}


def test_shells_complete_commands_and_options_as_the_page_tells() -> None:
    def told(**variables: str) -> str:
        found = CliRunner().invoke(main, [], prog_name="kv-canary", env=variables)
        assert found.exit_code == 0, found.output
        return found.output

    page = (Path(__file__).resolve().parents[1] / "docs/README.md").read_text()
    shells = re.findall(r"\b_KV_CANARY_COMPLETE=(\w+)_source kv-canary", page)
    assert shells == ["bash", "zsh", "fish"]
    for shell in shells:
        assert "_KV_CANARY_COMPLETE=" in told(_KV_CANARY_COMPLETE=f"{shell}_source")
    for words, completed in (("kv-canary dif", "difftest"), ("kv-canary difftest run --ex", "--examples")):
        number = str(len(words.split()) - 1)
        found = told(_KV_CANARY_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=number)
        assert found.split() == [f"plain,{completed}"]


def test_log_lines_of_the_command_line_say_once_whose_they_are() -> None:
    def line(name: str, text: str, *args: object) -> str:
        return LogLines().format(logging.LogRecord(name, logging.WARNING, __file__, 1, text, args, None))

    assert line("kv_canary", "kv-canary: incident %d", 1) == "WARNING kv-canary: incident 1"
    assert line("transformers", "no tokens: %s", "kv-canary: ") == "WARNING transformers: no tokens: kv-canary: "


def test_the_package_has_each_of_its_names_and_lists_them() -> None:
    import kv_canary

    assert set(kv_canary.__all__) == {"ops", *kv_canary._MODULE_OF}
    assert set(kv_canary.__all__) <= set(dir(kv_canary))
    for name in kv_canary.__all__:
        assert getattr(kv_canary, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = kv_canary.nothing


def test_help_of_the_tools_needs_none_of_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name in ("hypothesis", "triton") else real(name, package),
    )
    for command in (["difftest", "--help"], ["difftest", "run", "--help"], ["difftest", "corpus", "list", "-h"]):
        found = CliRunner().invoke(main, command)
        assert (found.exit_code, "Usage:" in found.output) == (0, True), found.output
    found = CliRunner().invoke(main, ["difftest", "run"])
    assert (found.exit_code, "difftest needs hypothesis: pip install 'hypothesis>=" in found.output) == (2, True)


def test_what_to_install_is_told_by_the_packages_that_extras_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(package: str) -> list[str]:
        assert package == "kv-canary"
        return [
            "torch>=2.6",
            'triton>=3.2; extra == "triton"',
            'transformers!=5.18.*,<5.25,>=5.17; extra == "transformers"',
            "hypothesis>=6.100; python_version > '3' and extra == 'difftest'",
            "pytest>=8; extra == 'difftest'",
            'kv-canary[triton]; extra == "dev"',
        ]

    def is_not_installed(package: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert install_command("transformers") == "pip install 'transformers!=5.18.*,<5.25,>=5.17'"
    assert install_command("triton", "difftest") == "pip install 'triton>=3.2' 'hypothesis>=6.100' 'pytest>=8'"
    monkeypatch.setattr(importlib.metadata, "requires", is_not_installed)
    assert install_command("triton", "difftest") == "pip install '.[triton,difftest]'"


def test_the_page_of_settings_is_up_to_date_and_has_every_one() -> None:
    from kv_canary.commands.settings import COSTS, all_settings, page

    told = (Path(__file__).resolve().parents[1] / "docs/settings.md").read_text()
    assert told == page(), "kv-canary settings --markdown > docs/settings.md writes it anew"
    names = {s.name for s in all_settings()["The canary"]}
    assert names == {f.name for f in dataclasses.fields(kc.CanaryConfig)}
    assert set(COSTS) <= names
    assert all(s.doc.endswith((".", "off", ")")) or len(s.doc) > 20 for of in all_settings().values() for s in of)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "KV_CANARY_STRIDE=none    (a whole number or `none`)\n"),
        (
            ["stride"],
            "(a whole number or `none`)\n    A cached position is verified on admission",
        ),
        (["KV_CANARY_PERTURB_MODE"], "next_token_swap"),
        (["--json"], '"variable": "KV_CANARY_SHADOW_EVERY"'),
    ],
)
def test_settings_are_shown(arguments: list[str], words: str) -> None:
    found = CliRunner().invoke(main, ["settings", *arguments])
    assert (found.exit_code, words in found.output) == (0, True), found.output


def test_a_setting_that_there_is_not_is_misuse() -> None:
    found = CliRunner().invoke(main, ["settings", "strid_e"])
    assert (found.exit_code, "must be a setting, or a part of one, got 'strid_e'" in found.output) == (2, True)


@pytest.mark.parametrize(
    "command",
    [("difftest", "run", "--op", "retire"), ("demo",), ("bench", "seals"), ("run", "--", "true"), ("stress", "soak")],
)
def test_a_file_in_a_folder_that_is_not_there_is_misuse_before_any_work(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    at = command.index("--") if "--" in command else len(command)
    given = [*command[:at], "--json", str(tmp_path / "no" / "x.json"), *command[at:]]
    done = CliRunner().invoke(main, given)
    assert done.exit_code == 2, done.output
    assert "must be there, got none" in " ".join(done.output.split())
