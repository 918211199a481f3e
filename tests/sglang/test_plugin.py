"""The entry point: what it hooks and when, and that what is wrong ends the process instead of being logged."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

LOAD = """
    import json, sys
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry
"""
REPORT = """
    ours = {t: HookRegistry._patched & {t} != set() for t in HookRegistry._hooks
            if any("kv_canary" in h.__module__ for _, h, _ in HookRegistry._hooks[t])}
    loaded = sorted(m for m in sys.modules if m.startswith("kv_canary.engines.sglang"))
    print("RESULT", json.dumps({"ours": ours, "loaded": loaded, "triton": "kv_canary.kernels" in sys.modules}))
"""


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own, whose environment says nothing of a canary but `environ`."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("KV_CANARY_")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def result(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    import json

    assert done.returncode == 0, done.stderr[-2000:]
    [line] = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    found: dict[str, object] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.parametrize("mode", [pytest.param("", marks=pytest.mark.long), "off"])
def test_without_a_mode_nothing_is_hooked(mode):
    environ = {"KV_CANARY_MODE": mode} if mode else {}
    found = result(run(LOAD + "    load_plugins()\n" + REPORT, **environ))
    assert found["ours"] == {}
    assert found["loaded"] == ["kv_canary.engines.sglang", "kv_canary.engines.sglang.plugin"]
    assert not found["triton"]


def test_with_a_mode_every_hook_is_applied():
    found = result(run(LOAD + "    load_plugins()\n" + REPORT, KV_CANARY_MODE="log"))
    from kv_canary.engines.sglang.hooks import HOOKS

    assert found["ours"] == {hook.target: True for hook in HOOKS}


def test_the_detokenizer_is_left_alone():
    code = LOAD + "    import sglang.srt.managers.detokenizer_manager\n"
    code += "    assert 'sglang.srt.managers.scheduler' not in sys.modules\n    load_plugins()\n" + REPORT
    found = result(run(code, KV_CANARY_MODE="log"))
    assert found["ours"] == {}


def test_a_missing_target_ends_the_process():
    code = (
        LOAD
        + """
    import sglang.srt.model_executor.model_runner as m
    del m.ModelRunner.forward
    load_plugins()
    print("went on")
    """
    )
    done = run(code, KV_CANARY_MODE="log")
    assert done.returncode == 1
    assert "went on" not in done.stdout
    assert "a version that the adapter knows" in done.stderr
    assert "without sglang.srt.model_executor.model_runner.ModelRunner.forward" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        pytest.param("KV_CANARY_MODE", "rais", "mode must be one of log, raise", marks=pytest.mark.long),
        ("KV_CANARY_READ_BITES", "16", "did you mean KV_CANARY_READ_BYTES"),
        pytest.param("KV_CANARY_STRIDE", "0", "stride must be at least 1", marks=pytest.mark.long),
    ],
)
def test_a_wrong_setting_ends_the_process(name, text, said):
    done = run(LOAD + "    load_plugins()\n    print('went on')\n", **{"KV_CANARY_MODE": "log", name: text})
    assert done.returncode == 1
    assert "went on" not in done.stdout
    assert said in done.stderr


def test_a_hook_that_was_not_applied_is_an_error_when_the_scheduler_starts():
    code = (
        LOAD
        + """
    from kv_canary.engines.sglang import hooks, session
    hooks.register(session.HOOKED)
    HookRegistry.apply_hooks()
    hooks.expect_live()
    HookRegistry._patched.discard(hooks.HOOKS[2].target)
    try:
        hooks.expect_live()
    except ValueError as error:
        print("RESULT", json.dumps(str(error)))
    """
    )
    told = result(run(code, KV_CANARY_MODE="log"))
    assert "hooks must be applied by SGLang, got not so: " in str(told)
    assert "ModelRunner.forward" in str(told)


def test_another_version_with_all_that_is_hooked_is_tried_and_said():
    code = (
        LOAD
        + """
    import logging
    logging.basicConfig(level=logging.WARNING)
    from kv_canary.engines.sglang import hooks
    hooks.TESTED = "0.0.1"
    load_plugins()
    hooks.expect_live()
    print("RESULT", json.dumps(True))
    """
    )
    done = run(code, KV_CANARY_MODE="log")
    assert result(done) is True
    assert "the adapter is tested with 0.0.1; all that it hooks is there" in done.stderr
