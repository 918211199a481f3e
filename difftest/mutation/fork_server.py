"""A process that has imported what tests take long to import, and forks a child for each set of tests.

A program of its own, `python test_server.py`: it imports nothing of the package, so that each child imports the copy
that it is told to. Requests and answers are lines of JSON: {"key", "root", "tests", "limit_s"} in, {"key", "code",
"said"} out. `code` is pytest's exit code, or -1 where the time was up, or minus the signal that ended the child.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import sys
import tempfile

PRELOADED = ("torch", "numpy", "pytest", "hypothesis", "rich", "click", "triton", "transformers")


def serve() -> None:
    """Answer requests, one after the other, until there are no more."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        code, said = _run(request["root"], request["tests"], request["limit_s"])
        print(json.dumps({"key": request["key"], "code": code, "said": said}), flush=True)


def _run(root: str, tests: list[str], limit_s: float) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if not pid:
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            _test(root, tests)
        done = _wait(pid, limit_s)
        with contextlib.suppress(ProcessLookupError):
            # What a test has started and left.
            os.killpg(pid, signal.SIGKILL)
        output.seek(0)
        # Not what a test has logged as an error.
        failed = [line.strip() for line in output if re.match("(FAILED|ERROR) [^ ]", line)]
    return done, "; ".join(failed)[:500]


def _test(root: str, tests: list[str]) -> None:
    code = 2
    try:
        import pytest

        sys.path.insert(0, root)
        os.environ["PYTHONPATH"] = root
        code = int(
            pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--benchmark-disable", "--examples", "20", *tests])
        )
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(pid: int, limit_s: float) -> int:
    """Return the exit code of a child, minus the signal that ended it, or -1 where it was killed for its time."""
    descriptor = os.pidfd_open(pid)
    try:
        import select

        if not select.select([descriptor], [], [], limit_s)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -1
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    serve()
