"""A busy machine makes nothing hang."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from kv_canary.difftest.patience import OF_THE_CLOCK, Patience


@pytest.mark.parametrize(
    ("code", "factor"), [("any(iter(int, 1))", 1.0), ("import time; time.sleep(60)", OF_THE_CLOCK)]
)
def test_counts_seconds_of_a_core_and_waits_longer_for_what_waits(code: str, factor: float) -> None:
    # What it takes to start is not of the case.
    code = f"print('ready', flush=True); {code}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        patience = Patience(process.pid, 0.3)
        began = time.monotonic()
        try:
            assert not patience.over
            while not patience.over:
                assert time.monotonic() - began < 30
                time.sleep(0.02)
            assert time.monotonic() - began >= factor * 0.3
            patience.heard()
            assert not patience.over
        finally:
            process.kill()


def test_a_process_that_is_gone_has_used_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    patience = Patience(process.pid, 0.05)
    time.sleep(0.1)
    assert not patience.over
    time.sleep(0.05 * OF_THE_CLOCK)
    assert patience.over
