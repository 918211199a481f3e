"""Launches under a sanitizer, as far as they can be told of without one: the tool is a script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kv_canary.difftest.sanitize import SanitizerResult, sanitize, span_bytes
from kv_canary.difftest.search import draw_cases
from kv_canary.specs import get_spec


def run_under(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> SanitizerResult:
    tool = folder / "compute-sanitizer"
    tool.write_text(f"#!{sys.executable}\n{script}\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return sanitize("memcheck", {"move": draw_cases("move", examples=2, seed=0)}, seconds=1)


def test_calls_and_what_was_left_out_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "kv-canary-launches move 1 1\\nkv-canary-too-large move 99\\nkv-canary-launches move 2 3"
    result = run_under(f"print('{said}\\n========= ERROR SUMMARY: 0 errors')", tmp_path, monkeypatch)
    assert (result.calls, result.launches, result.too_large) == ({"move": 2}, {"move": 3}, 1)
    assert result.clean
    assert result.as_dict()["ended"] == ""


def test_a_child_that_ends_early_is_not_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_under(
        "import sys; print('kv-canary-launches move 1 1\\n========= ERROR SUMMARY: 0 errors')\n"
        "print('torch.OutOfMemoryError: no more\\n\\n========= words', file=sys.stderr); sys.exit(1)",
        tmp_path,
        monkeypatch,
    )
    assert result.errors == 0
    assert not result.clean
    assert result.ended == "exit code 1: torch.OutOfMemoryError: no more"


def test_errors_are_those_of_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "kv-canary-launches move 1 1\\n========= Invalid read\\n========= ERROR SUMMARY: 3 errors"
    result = run_under(f"import sys; print('{said}'); sys.exit(86)", tmp_path, monkeypatch)
    assert (result.errors, result.ended, result.clean) == (3, "", False)
    assert "Invalid read" in result.output


def test_memory_is_counted_as_a_call_spans_it() -> None:
    spec = get_spec("plan")
    spans = sorted(span_bytes(spec, spec.bind(call)) for call in draw_cases("plan", examples=30, seed=0))
    # Some pools lie beyond 32 bits of offsets, without a page of theirs being there: on a GPU they would be.
    assert 0 < spans[0] < 2**20
    assert 2**33 <= spans[-1] < 2**36
