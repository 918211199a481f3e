"""A map from lines of the runtime to the tests that run them: a program, `python line_map.py OUT ROOT TESTS...`.

It stands alone: what is measured must not be imported before the measurement begins.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class _Contexts:
    """A plugin that tells coverage which test runs, and takes its time."""

    def __init__(self, measured: Any) -> None:
        self.measured, self.seconds = measured, dict[str, float]()
        self.failed: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.measured.switch_context(item.nodeid)
        began = time.monotonic()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.monotonic() - began
            self.measured.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "failed":
            self.failed.append(report.nodeid)


def main(out: Path, root: Path, options: list[str]) -> None:
    """Run the tests that `options` name and write, as JSON, the tests of each line and the seconds of each test.

    Args:
        out: file to write.
        root: folder that holds the package `kv_canary`; it comes before any other that is installed.
        options: for pytest.
    """
    import coverage

    # By what a path leads to, which is what coverage knows it by: the package may be one of links.
    sources = (root / "kv_canary" / "__init__.py").resolve().parent
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)
    measured = coverage.Coverage(data_file=None, include=[f"{sources}/*"], config_file=False)
    contexts = _Contexts(measured)
    measured.start()
    pytest.main(["-q", "-p", "no:cacheprovider", "--benchmark-disable", *options], plugins=[contexts])
    measured.stop()
    data = measured.get_data()
    tests: list[str] = list(contexts.seconds)
    numbers = {test: number for number, test in enumerate(tests)}
    lines: dict[str, dict[int, list[int]]] = {}
    for file in data.measured_files():
        # A failed test kills nothing by failing again.
        lines[os.path.relpath(file, sources.parent)] = {
            line: sorted(numbers[c] for c in found if c in numbers and c not in contexts.failed)
            for line, found in data.contexts_by_lineno(file).items()
        }
    told = {"tests": tests, "seconds": [round(contexts.seconds[t], 3) for t in tests], "lines": lines}
    out.write_text(json.dumps({**told, "failed": contexts.failed}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
