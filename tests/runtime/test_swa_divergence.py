"""The line about sliding-window attention: its text, its numbers, and when it comes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import kv_canary as kc
from kv_canary.difftest.simulator import Action
from kv_canary.difftest.simulator.canary_engine import CanaryEngine
from kv_canary.difftest.simulator.groups import LutGroup
from kv_canary.observers import swa_divergence
from kv_canary.observers.swa_divergence import SwaDivergence, assert_all_signals, find_last, format_line, parse_line

from .observed import live, make_engine

FACTS = SwaDivergence(
    forward_ct=7, verify_full=120, verify_swa=48, swa_full_idx_divergence=16, swa_out_of_window_tokens=44
)
LINE = (
    'kv_canary_swa_divergence={"forward_ct": 7, "verify_full": 120, "verify_swa": 48, '
    '"swa_full_idx_divergence": 16, "swa_out_of_window_tokens": 44}'
)


def logged(caplog: pytest.LogCaptureFixture) -> list[SwaDivergence]:
    return [facts for r in caplog.records if (facts := parse_line(r.message)) is not None]


def test_the_line_is_a_name_and_json_and_reads_back() -> None:
    assert format_line(FACTS) == LINE
    assert parse_line(LINE) == FACTS
    assert parse_line(f"2026-01-01 INFO rank 3: {LINE} [pid 4]\n") == FACTS


@pytest.mark.parametrize(
    "line",
    [
        "",
        "kv-canary: statistics",
        "kv_canary_swa_divergence=",
        "kv_canary_swa_divergence={",
        "kv_canary_swa_divergence=[1]",
        "kv_canary_swa_divergence=12",
        LINE.replace('"verify_swa": 48, ', ""),
        LINE.replace("48", "4.5"),
        LINE.replace("48", "true"),
        LINE.replace("forward_ct", "forward"),
    ],
)
def test_any_other_line_reads_as_nothing(line: str) -> None:
    assert parse_line(line) is None


def test_the_last_line_of_a_log_counts() -> None:
    later = LINE.replace("7", "9", 1)
    assert find_last(f"a\n{LINE}\nb\n{later}\nkv_canary_swa_divergence={{broken\n") == parse_line(later)
    assert find_last("nothing\n") is None


def follow(engine: CanaryEngine) -> Iterator[SwaDivergence]:
    """Yield, for each forward from now on, what the tables and the lookup table say; counted one by one in Python."""
    expected: list[SwaDivergence] = []
    seen = {"divergence": 0, "beyond": 0}

    def before(batch: kc.ForwardBatch) -> None:
        seen.update(divergence=0, beyond=0)
        full = next((g for g in engine.groups if not g.config.window), None)
        for group in engine.groups:
            window = group.config.window
            for request in batch.requests if window and full is not None else ():
                first = max(0, request.prefix_len - window)
                seen["beyond"] += first
                for position in range(first, request.prefix_len):
                    named = int(batch.tables[group.name][request.row, position])
                    slot = int(group.lookup[named]) if isinstance(group, LutGroup) else named
                    seen["divergence"] += slot != int(batch.tables[full.name][request.row, position])

    def after(batch: kc.ForwardBatch) -> None:
        entries = engine.manager.state.counters[:, 1].tolist()
        expected.append(
            SwaDivergence(
                forward_ct=engine.manager.step,
                verify_full=entries[kc.Tag.HEAD_FULL] + entries[kc.Tag.TAIL_FULL],
                verify_swa=entries[kc.Tag.HEAD_SWA] + entries[kc.Tag.TAIL_SWA],
                swa_full_idx_divergence=seen["divergence"],
                swa_out_of_window_tokens=seen["beyond"],
            )
        )

    engine.before_forward, engine.after_forward = before, after
    return expected


@pytest.mark.parametrize("kinds", [("full", "lut"), ("full", "ring"), ("full", "window"), ("full", "lut", "ring")])
@pytest.mark.parametrize("every", [1, 3])
def test_the_numbers_are_those_of_the_tables(
    caplog: pytest.LogCaptureFixture, kinds: tuple[str, ...], every: int
) -> None:
    engine = make_engine(kinds=kinds, swa_divergence_every=every)
    expected = follow(engine)
    with caplog.at_level(logging.INFO, "kv_canary"):
        live(engine, steps=5)
        # Fewer entries than before: what stands behind the valid ones of the plan is old.
        engine.run(Action(kind="finish"))
        engine.run(Action(kind="arrive", pick=1, amount=5))
        for _ in range(3):
            engine.run(Action(kind="mixed", amount=3))
        engine.manager.flush()
    assert len(expected) == 8
    assert logged(caplog) == [facts for facts in expected if facts.forward_ct % every == 0]
    diverges = any(facts.swa_full_idx_divergence for facts in logged(caplog))
    assert diverges == (kinds != ("full", "window"))
    assert any(facts.swa_out_of_window_tokens for facts in logged(caplog))
    assert engine.manager.summary().violations == 0


def test_an_entry_that_the_lookup_table_lost_differs_too(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(swa_divergence_every=1)
    with caplog.at_level(logging.INFO, "kv_canary"):
        live(engine, steps=3)
        expected = follow(engine)
        group, request = engine.groups[1], engine.running[0]
        assert isinstance(group, LutGroup)
        group.lookup[engine.table[request.row, request.cached - 1]] = 0
        engine.run(Action(kind="decode"))
    assert logged(caplog)[-1] == expected[-1]


def test_without_a_full_group_there_is_nothing_to_differ_from(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(kinds=("ring",), swa_divergence_every=2)
    with caplog.at_level(logging.INFO, "kv_canary"):
        live(engine, steps=4)
    assert [facts.forward_ct for facts in logged(caplog)] == [2, 4]
    assert {(f.verify_full, f.swa_full_idx_divergence, f.swa_out_of_window_tokens) for f in logged(caplog)} == {
        (0, 0, 0)
    }
    assert logged(caplog)[-1].verify_swa > 0


@pytest.mark.parametrize(("kinds", "every"), [(("full",), 1), (("full", "lut"), 0)])
def test_no_windows_or_no_wish_is_no_line(caplog: pytest.LogCaptureFixture, kinds: tuple[str, ...], every: int) -> None:
    engine = make_engine(kinds=kinds, swa_divergence_every=every)
    with caplog.at_level(logging.INFO, "kv_canary"):
        live(engine, steps=4)
        engine.manager.close()
    assert logged(caplog) == []


class Event:
    """Stands for a CUDA event, which happens when a test says so."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


def test_a_line_waits_for_its_numbers_and_the_end_waits_for_both(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []

    def send(words: torch.Tensor, *, forward_ct: int, beyond: int) -> swa_divergence._Pending:
        events.append(Event())
        return swa_divergence._Pending(forward_ct=forward_ct, beyond=beyond, words=words, event=events[-1])

    monkeypatch.setattr(swa_divergence, "_send", send)
    engine = make_engine(swa_divergence_every=1)
    with caplog.at_level(logging.INFO, "kv_canary"):
        live(engine, steps=3)
        assert (len(events), logged(caplog)) == (3, [])
        # In order, whichever arrived first.
        events[1].happened = True
        engine.run(Action(kind="decode"))
        assert logged(caplog) == []
        events[0].happened = True
        engine.run(Action(kind="decode"))
        assert [facts.forward_ct for facts in logged(caplog)] == [1, 2]
        engine.manager.close()
    assert [facts.forward_ct for facts in logged(caplog)] == [1, 2, 3, 4, 5]


def test_on_a_gpu_nobody_waits_for_the_numbers(caplog: pytest.LogCaptureFixture, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    engine = make_engine(swa_divergence_every=1, device="cuda", backend="triton")
    expected = follow(engine)
    (observer,) = (o for o in engine.manager.accounts.observers if isinstance(o, swa_divergence.SwaDivergenceLogger))
    on_forward = observer.on_forward

    def watched(forward: kc.SingleForwardManager, batch: kc.ForwardBatch) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            on_forward(forward, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    observer.on_forward = watched
    with caplog.at_level(logging.INFO, "kv_canary"):
        live(engine, steps=5)
        engine.manager.flush()
        engine.manager.close()
    assert "raised; the canary goes on" not in caplog.text
    assert logged(caplog) == expected


def run_of(caplog: pytest.LogCaptureFixture, **options: object) -> str:
    """Run an engine and return its log."""
    caplog.clear()
    engine = make_engine(swa_divergence_every=1, **options)
    with caplog.at_level(logging.INFO, "kv_canary"):
        live(engine, steps=4)
        engine.manager.close()
    return caplog.text


def test_a_real_run_shows_every_signal_at_once(caplog: pytest.LogCaptureFixture) -> None:
    found = assert_all_signals(lambda: run_of(caplog), attempts=1)
    assert found.all_signals
    assert found in logged(caplog)


@pytest.mark.parametrize(
    ("options", "lacks"),
    [
        # The same slots for both kinds of layers; a window that no request outgrows; no windows at all.
        ({"kinds": ("full", "window")}, '"swa_full_idx_divergence": 0'),
        ({"window": 60}, '"swa_out_of_window_tokens": 0'),
        ({"kinds": ("ring",)}, '"verify_full": 0'),
        ({"kinds": ("full",)}, "got no line at all"),
    ],
)
def test_a_run_that_lacks_a_signal_fails_and_says_which(
    caplog: pytest.LogCaptureFixture, options: dict[str, object], lacks: str
) -> None:
    with pytest.raises(AssertionError, match="all signals must be above 0 in one line, got") as caught:
        assert_all_signals(lambda: run_of(caplog, **options), attempts=1)
    assert lacks in str(caught.value)


def test_another_attempt_is_made_up_to_so_many_times() -> None:
    logs = iter(["nothing", LINE.replace("44", "0"), f"{LINE}\n{LINE.replace('16', '0')}"])
    assert assert_all_signals(lambda: next(logs)) == FACTS
    calls: list[int] = []

    def run() -> str:
        calls.append(1)
        # One of the signals in each of two lines is not both in one.
        return f"{LINE.replace('44', '0')}\n{LINE.replace('16', '0')}"

    with pytest.raises(AssertionError):
        assert_all_signals(run, attempts=2)
    assert len(calls) == 2
