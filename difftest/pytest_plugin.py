"""The pytest plugin: a registered op's cases in anybody's test suite, with seeds and a line that replays what fails.

pytest finds it where kv-canary is installed; it adds options and a fixture, and does nothing until a test asks for it.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Examples of an op where nobody says how many.
EXAMPLES = 100
# What `kv-canary difftest run` says by its exit code: no difference, a difference.
_CLEAN, _FOUND = 0, 1


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kv-canary", "differential tests of registered ops (kv-canary)")
    group.addoption("--kv-canary-examples", type=int, metavar="N", help=f"generated calls of an op [{EXAMPLES}]")
    group.addoption("--kv-canary-seed", type=int, default=0, metavar="N", help="of everything that is drawn [0]")
    group.addoption(
        "--kv-canary-device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where Triton runs; on a CPU in its interpreter; auto: on a GPU where there is one [auto]",
    )
    group.addoption(
        "--kv-canary-findings", default="findings", metavar="DIR", help="folder for what is found [findings]"
    )


@pytest.fixture
def kv_canary_difftest(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that holds an op against its reference: `kv_canary_difftest("paged_gather")`.

    It draws calls, runs them in processes of their own, and fails the test with the smallest call that differs. Whether
    Triton is interpreted is settled there: nothing has to be set, and what the test has imported does not matter.

    Args of the function:
        op: its name.
        module: Python file or module that registers it; None: those that its implementations come from, which the test
            has imported then.
        examples: generated calls; None: as `--kv-canary-examples` says.
    """

    def check(op: str, *, module: str | Path | None = None, examples: int | None = None) -> None:
        option = request.config.getoption
        asked = examples if option("--kv-canary-examples") is None else option("--kv-canary-examples")
        run_op(
            op,
            modules=modules_of(op) if module is None else [str(module)],
            examples=EXAMPLES if asked is None else asked,
            seed=option("--kv-canary-seed"),
            device=device_of(option("--kv-canary-device")),
            findings=Path(option("--kv-canary-findings")),
            folder=request.getfixturevalue("tmp_path"),
        )

    return check


def modules_of(op: str) -> list[str]:
    """Return the modules that register an op and its cases, or their files where these cannot be imported by name.

    Raises:
        ValueError: there is no such op here.
    """
    from kv_canary.backends import implementation
    from kv_canary.difftest import strategies
    from kv_canary.specs import get_spec

    get_spec(op)
    functions: list[Callable[..., Any]] = [implementation(op, backend) for backend in ("reference", "triton")]
    # kv-canary's own are found by name.
    functions += [strategies._REGISTERED[op]] if op in strategies._REGISTERED else []
    places = dict.fromkeys(place for f in functions if (place := _place(inspect.unwrap(f))))
    return [place for place in places if not place.startswith("kv_canary.")]


def _place(function: Callable[..., Any]) -> str:
    """Return where a function comes from; "" where that is nowhere, as of what a library has made."""
    name = getattr(function, "__module__", "")
    code = getattr(function, "__code__", None)
    try:
        if name != "__main__" and importlib.util.find_spec(name) is not None:
            return name
    except (ImportError, ValueError):
        pass
    return code.co_filename if code is not None and Path(code.co_filename).exists() else ""


def device_of(device: str) -> str:
    """Return where Triton is to run: "cpu" or "cuda"."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def run_op(op: str, *, modules: list[str], examples: int, seed: int, device: str, findings: Path, folder: Path) -> None:
    """Run generated cases of an op; fail the test that calls where one differs, or none could be run."""
    path = folder / "difftest.json"
    command = [sys.executable, "-P", "-m", "kv_canary", "difftest", "run", "--op", op]
    command += [f"--examples={examples}", f"--seed={seed}", f"--device={device}", "--jobs=1", "--max-findings=1"]
    command += [f"--findings={findings}", f"--json={path}", *(f"--import={module}" for module in modules)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    if done.returncode == _CLEAN:
        return
    if done.returncode != _FOUND or not path.exists():
        pytest.fail(f"kv-canary: {op} could not be tested:\n{done.stdout}{done.stderr}", pytrace=False)
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"{finding['says']}\nreplay it: {finding['replay']}" for finding in told["findings"]]
    pytest.fail("\n".join([f"kv-canary: {op}, seed {seed}:", *lines, *told["errors"]]), pytrace=False)


def _environment() -> dict[str, str]:
    """Return the environment of the run: what can be imported here can be there, and Triton is as it has to be."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
