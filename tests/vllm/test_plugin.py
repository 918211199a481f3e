"""The entry point: what it hooks and when, and that what is wrong ends the process instead of being logged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

LOAD = """
    import json, sys
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker.worker_base import WorkerWrapperBase
    from vllm.v1.core.sched.scheduler import Scheduler
"""
REPORT = """
    hooked = [f"{c.__name__}.{n}" for c, n in ((WorkerWrapperBase, "initialize_from_config"), (Scheduler, "schedule"))
              if getattr(vars(c)[n], "_is_of_the_canary", False)]
    loaded = sorted(m for m in sys.modules if m.startswith("kv_canary.engines.vllm"))
    print("RESULT", json.dumps({"hooked": hooked, "loaded": loaded, "triton": "kv_canary.kernels" in sys.modules}))
"""


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own, whose environment says nothing of a canary but `environ`."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("KV_CANARY_")}
    return subprocess.run(
        # Without this folder on the path, whose folders would be packages there.
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def result(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    found: dict[str, object] = json.loads(line.removeprefix("RESULT "))
    return found


def test_without_a_mode_nothing_is_hooked() -> None:
    found = result(run(LOAD + "    load_general_plugins()\n" + REPORT, KV_CANARY_MODE="off"))
    assert found["hooked"] == []
    assert found["loaded"] == ["kv_canary.engines.vllm", "kv_canary.engines.vllm.plugin"]
    assert not found["triton"]


def test_with_a_mode_both_classes_are_hooked_once() -> None:
    again = "    load_general_plugins()\n    from kv_canary.engines.vllm.plugin import plugin\n    plugin()\n"
    found = result(run(LOAD + again + REPORT, KV_CANARY_MODE="log"))
    assert found["hooked"] == ["WorkerWrapperBase.initialize_from_config", "Scheduler.schedule"]
    # Neither the runtime nor a worker of vLLM's is imported for it.
    assert "kv_canary.engines.vllm.session" not in found["loaded"]
    assert not found["triton"]


@pytest.mark.parametrize(
    ("code", "environ", "said"),
    [
        ("    del Scheduler.schedule\n", {}, "0.32.0 without vllm.v1.core.sched.scheduler.Scheduler.schedule"),
        ("", {"KV_CANARY_STRIED": "4"}, "did you mean KV_CANARY_STRIDE?"),
    ],
)
def test_what_is_wrong_ends_the_process(code: str, environ: dict[str, str], said: str) -> None:
    done = run(LOAD + code + "    load_general_plugins()\n    print('went on')\n", KV_CANARY_MODE="log", **environ)
    assert done.returncode == 1
    assert said in done.stderr
    assert "went on" not in done.stdout


def test_doctor_says_how_it_is_turned_on_and_whether_the_plugin_is_left_out() -> None:
    code = "from kv_canary.cli import main; main(['doctor', '--engine', 'vllm', '--json'])"
    found = run(code, TRITON_INTERPRET="0")
    [engine] = [e for e in json.loads(found.stdout)["engines"] if e["name"] == "vllm"]
    assert engine["supported"]
    assert "KV_CANARY_MODE" in engine["detail"]
    left_out = run(code, TRITON_INTERPRET="0", VLLM_PLUGINS="another")
    assert left_out.returncode == 1
    assert "leaves the plugin kv-canary out" in left_out.stdout
