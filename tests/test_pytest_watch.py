"""`pytest --kv-canary=log` in suites of others: a test in which something is found fails, and a verdict comes last."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Variables of those who run these tests.
OURS = ("PYTHONPATH", "CI", "BUILD_NUMBER", "KV_CANARY_MODE", "KV_CANARY_EVENT_LOG")
# An engine of somebody's that damages its own KV where it is told to, as a program too.
ENGINE = """
import sys
import kv_canary as kc
from kv_canary.difftest.simulator.scripted_engine import ScriptedEngine, kv_source


def serve(harm):
    k, v = (kv_source(64, 32, layers=2, read_bytes=32, page_size=1) for _ in range(2))
    group = kc.BufferGroup(name="full", pool=kc.KvPool(name="pool", num_slots=64, k_source=k, v_source=v, device="cpu"))
    limits = kc.CanaryLimits(max_rows=4, max_requests=4, max_tokens=64, max_len=64)
    engine = ScriptedEngine([group], kc.CanaryConfig.from_env(backend="reference"), limits=limits)
    a = engine.add("a", 20)
    engine.step((a, 6))
    if harm:
        engine.flip(group, "K", 3, 2)
    engine.step((a, 1))
    engine.manager.flush()
    engine.manager.close()


if __name__ == "__main__":
    serve(bool(sys.argv[1:]))
"""
TESTS = """
import subprocess
import sys
import pytest
from engine import serve


def test_good():
    serve(False)


def test_bad():
    serve(True)


def test_good_again():
    serve(False)


@pytest.fixture
def served():
    yield
    serve(True)


def test_bad_behind_it(served):
    pass


def test_bad_elsewhere():
    subprocess.run([sys.executable, "engine.py", "harm"], check=True)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder as a stranger does: the plugin is found by its entry point."""
    kept = {name: value for name, value in os.environ.items() if name not in OURS}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=kept, timeout=300, check=False)


def fates(said: str) -> set[str]:
    """Return what pytest's summary says of each test."""
    return set(re.findall(r"^(?:PASSED|FAILED|ERROR) test_[\w.:\[\]]+", said, re.MULTILINE))


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Tests of an engine with a pool of its own."""
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "conftest.py").write_text("import sys\nsys.path.insert(0, '.')\n")
    (tmp_path / "test_engine.py").write_text(TESTS)
    return tmp_path


def test_without_the_option_nothing_is_watched(suite: Path) -> None:
    found = run(suite)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "5 passed" in found.stdout
    assert "verdict" not in found.stdout


@pytest.mark.parametrize(
    "workers", [[], pytest.param(["-n2"], marks=pytest.mark.long)], ids=["alone", "on two workers"]
)
def test_a_test_in_which_something_is_found_fails_and_the_others_do_not(suite: Path, workers: list[str]) -> None:
    found = run(suite, "--kv-canary=log", "-rA", *workers)
    assert found.returncode == 1, found.stdout + found.stderr
    said = found.stdout
    assert fates(said) == {
        "PASSED test_engine.py::test_good",
        "FAILED test_engine.py::test_bad",
        "PASSED test_engine.py::test_good_again",
        "PASSED test_engine.py::test_bad_behind_it",
        "ERROR test_engine.py::test_bad_behind_it",
        "FAILED test_engine.py::test_bad_elsewhere",
    }
    assert "kv-canary: 1 incident\nincident 1: step 2 HEAD_FULL: request a reads position 2 in slot 3" in said
    assert "kv-canary: verdict: CORRUPTION: 3 incidents" in said


def test_in_raise_mode_the_engine_is_stopped(suite: Path) -> None:
    found = run(suite, "--kv-canary=raise", "-k", "test_bad")
    assert found.returncode == 1, found.stdout + found.stderr
    assert "CanaryViolationError" in found.stdout


def test_misuse_is_told(suite: Path) -> None:
    found = run(suite, "--kv-canary=loud")
    assert found.returncode == 4
    assert "invalid choice: 'loud'" in found.stderr


MODEL_TESTS = """
import pytest
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from kv_canary.demo.models import save_tiny_model


@pytest.fixture
def model(tmp_path):
    folder = save_tiny_model(tmp_path / "model", "llama")
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")


@pytest.mark.parametrize("harm", [False, True])
def test_model(model, kv_canary, harm, monkeypatch):
    if harm:
        for name, value in {"MODE": "real_kv_used", "WARM_UP": "4", "COVERED_ONLY": "1"}.items():
            monkeypatch.setenv(f"KV_CANARY_PERTURB_{name}", value)
    canary = kv_canary(model, "log", backend="reference")
    model.generate_batch(
        [[5, 6, 7, 8] * 6],
        generation_config=GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=48, use_cuda_graph=False),
    )
    assert canary.summary().steps > 4
"""


@pytest.mark.parametrize(
    "option", [[], pytest.param(["--kv-canary=log"], marks=pytest.mark.long)], ids=["by itself", "with the option"]
)
def test_a_model_is_watched_by_the_fixture(tmp_path: Path, option: list[str]) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "test_model.py").write_text(MODEL_TESTS)
    found = run(tmp_path, "-rA", *option)
    assert found.returncode == 1, found.stdout + found.stderr
    lines = fates(found.stdout)
    assert {"PASSED test_model.py::test_model[False]"} < lines
    assert lines & {"FAILED test_model.py::test_model[True]", "ERROR test_model.py::test_model[True]"}
    assert not any("[False]" in line for line in lines if not line.startswith("PASSED"))
    assert "HEAD_FULL" in found.stdout
