"""How ranks agree on where they go on together, without engines: several of them in one process."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

import kv_canary as kc
from kv_canary.ranks import meeting
from kv_canary.ranks.meeting import Agreement, Meeting

from .engine import Engine, Request
from .test_rank_watch import add, rank_engines, sent


class Store:
    """A store that counts what it is asked for, and may be out of reach."""

    def __init__(self) -> None:
        self.store, self.asked, self.gone = dist.HashStore(), Counter[str](), False

    def __getattr__(self, name: str) -> Any:
        if self.gone:
            raise RuntimeError("connection\nlost")
        self.asked[name] += 1
        return getattr(self.store, name)


class Rank:
    """Stands for a `RankGroup`."""

    timeout = 60.0

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self._store = rank, size, store
        self.carried: list[Any] = []
        self.forgot = 0

    def store(self) -> Any:
        return self._store

    def leave(self) -> None:
        self.carried.clear()

    def forget_left(self) -> None:
        self.forgot += 1

    def carry(self, fresh: Any) -> None:
        self.carried.append(fresh)


Ranks = Callable[..., list[Meeting]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Return what makes meetings of ranks, whose threads end with the test."""
    monkeypatch.setattr(meeting, "_FIRST_LOOK", 0.01)
    monkeypatch.setattr(meeting, "_LONGEST_LOOK", 0.05)
    monkeypatch.setattr(meeting, "_FIRST_DELAY", 0.01)
    monkeypatch.setattr(meeting, "_LONGEST_DELAY", 0.05)
    made: list[Meeting] = []

    def make(size: int = 2, *, store: Any = None, waits: bool = False, **settings: int) -> list[Meeting]:
        store = store or dist.HashStore()
        made.extend(Meeting(Rank(rank, size, store), {"n": 1} | settings, waits=waits) for rank in range(size))  # type: ignore[arg-type]
        return made

    yield make
    for part in made:
        part.end()


def wait_for(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def agreed(parts: list[Meeting]) -> list[Agreement]:
    """Return what they have agreed on, once all have."""
    wait_for(lambda: all(part._agreed for part in parts))
    return [part._agreed for part in parts if part._agreed]


def test_ranks_agree_on_a_step_that_is_ahead_of_all_of_them(ranks: Ranks) -> None:
    parts = ranks(3)
    for part, number in zip(parts, (10, 500, 499), strict=True):
        part.seek(number)
    found = agreed(parts)
    (step,) = {agreement.step for agreement in found}
    assert step >= 504
    assert {(agreement.spread, agreement.in_step) for agreement in found} == {(490, False)}
    for part, agreement in zip(parts, found, strict=True):
        assert part.take(step - 1) is None
        assert part.take(step) is agreement
        # It is theirs once.
        assert part.take(step) is None
        assert part._ranks.carried == [agreement.group]  # type: ignore[attr-defined]


def test_ranks_whose_pace_is_not_known_go_on_four_steps_ahead_and_twice_as_many_each_time_that_they_met_in_vain(
    ranks: Ranks,
) -> None:
    (part,) = ranks(1)
    margins = []
    for part._in_vain in range(1, 8):
        margin, spread = part._margins()
        assert spread == meeting._SPREAD
        margins.append(margin)
    assert margins == [4, 8, 16, 32, 64, 64, 64]


def test_ranks_that_run_the_same_steps_are_known_to(ranks: Ranks) -> None:
    parts = ranks()
    for part, number in zip(parts, (10, 12), strict=True):
        part.seek(number)
    assert {agreement.in_step for agreement in agreed(parts)} == {True}


def test_a_rank_that_is_past_the_step_stays_away_and_they_agree_on_a_later_one(ranks: Ranks) -> None:
    first, second = ranks()
    heard: list[int] = []
    gather = second._all

    def late(*arguments: Any) -> list[list[int]]:
        words = gather(*arguments)
        heard.append(1)
        if len(heard) == 2:
            # It runs on before it hears where the others are.
            second.take(1000)
        return words

    second._all = late  # type: ignore[method-assign]
    first.seek(10)
    second.seek(10)
    wait_for(lambda: first._agreed)
    step = first._agreed.step if first._agreed else 0
    assert step < 1000
    assert second._agreed is None
    assert first.take(step) is not None
    # Its first exchange fails.
    first.seek(step)
    (later,) = {agreement.step for agreement in agreed([first, second])}
    # Further ahead than before.
    assert later >= 1000 + 2 * meeting._LEAST_MARGIN


def test_a_rank_that_left_the_step_out_looks_for_another_one(ranks: Ranks) -> None:
    parts = ranks()
    for part in parts:
        part.seek(10)
    (step,) = {agreement.step for agreement in agreed(parts)}
    assert parts[0].take(step + 1) is None
    assert parts[1].take(step)
    parts[1].seek(step + 1)
    assert {agreement.step > step for agreement in agreed(parts)} == {True}


def test_a_rank_that_nobody_meets_asks_now_and_then_and_tries_nothing(ranks: Ranks) -> None:
    store = Store()
    first, _ = ranks(store=store)
    first.seek(10)
    wait_for(lambda: store.asked["check"] >= 10)
    assert (store.asked["add"], store.asked["set"], first._number) == (1, 0, 1)
    first.end()
    assert first._thread is not None
    assert not first._thread.is_alive()


def test_looks_become_rare(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    first, _ = ranks()

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return len(pauses) > 30

    monkeypatch.setattr(meeting, "_FIRST_LOOK", 0.1)
    monkeypatch.setattr(meeting, "_LONGEST_LOOK", 5.0)
    first._ended = Ended()
    first.seek(1)
    wait_for(lambda: len(pauses) > 30)
    assert pauses[0] == 0.1
    assert pauses == sorted(pauses)
    assert set(pauses[12:]) == {5.0}


@pytest.mark.parametrize("waits", [False, True])
def test_ranks_that_wait_for_each_other_try_a_few_times_and_others_go_on(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    parts = ranks(waits=waits)
    for _ in range(meeting._MOST_TRIALS):
        for part in parts:
            part.seek(10)
        for part, agreement in zip(parts, agreed(parts), strict=True):
            assert part.take(agreement.step)
    # They had nothing of each other all the time.
    for part in parts:
        part.seek(10)
    lines = [r.getMessage() for r in caplog.records if "stays alone for good" in r.getMessage()]
    assert len(lines) == (2 if waits else 0)
    # The groups that they left are let go of all the same.
    wait_for(lambda: all(part._ranks.forgot == meeting._MOST_TRIALS + 1 for part in parts))  # type: ignore[attr-defined]
    if not waits:
        assert len(agreed(parts)) == 2


def test_trials_are_counted_anew_once_ranks_were_together(ranks: Ranks) -> None:
    parts = ranks(waits=True)
    for _ in range(meeting._MOST_TRIALS + 1):
        for part in parts:
            part.seek(10)
        for part, agreement in zip(parts, agreed(parts), strict=True):
            assert part.take(agreement.step)
            part.together()
    assert not any(part._over for part in parts)
    # But they come apart again and again, and wait longer for it each time, unless it lasted.
    assert parts[0]._in_vain == meeting._MOST_TRIALS + 1
    parts[0]._together = time.monotonic() - 2 * meeting._LASTING * Rank.timeout
    parts[0].seek(10)
    wait_for(lambda: parts[0]._in_vain == 1)


def test_ranks_that_were_together_have_all_their_trials_again(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    parts = ranks(waits=True)
    for trial in range(1 + meeting._MOST_TRIALS):
        for part in parts:
            part.seek(10)
        assert "stays alone for good" not in caplog.text
        for part, agreement in zip(parts, agreed(parts), strict=True):
            assert part.take(agreement.step)
            if trial == 0:
                part.together()
    for part in parts:
        part.seek(10)
    assert caplog.text.count("stays alone for good") == len(parts)


def test_ranks_that_are_configured_differently_do_not_meet(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    parts = ranks()
    first, second = parts
    second._settings = {"n": 2}
    gather = first._all

    def broken(*arguments: Any) -> list[list[int]]:
        # The other one sees it first, and leaves.
        gather(*arguments)
        raise RuntimeError("connection closed by peer")

    first._all = broken  # type: ignore[method-assign]
    for part in parts:
        part.seek(10)
    wait_for(lambda: all(part._over for part in parts))
    assert caplog.text.count("n must be the same on all ranks, got 1, 2") == 2


def test_a_store_that_is_gone_is_told_of_once(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    first, _ = ranks(store=store)
    first.seek(10)
    wait_for(lambda: store.asked["check"] >= 1)
    store.gone = True
    wait_for(lambda: first._over)
    first.seek(11)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert "rank 0 stays alone for good: it cannot meet the others again (RuntimeError: connection\\nlost)" in line


def test_a_manager_that_is_let_go_of_looks_for_nobody(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = rank_engines(monkeypatch, digest_every=1)
    store = Store()
    watch: Any = engines[0].manager.ranks
    monkeypatch.setattr(watch._ranks.__class__, "store", lambda _: store)
    watch._part("something happened")
    wait_for(lambda: store.asked["check"] >= 1)
    thread = watch._meeting._thread
    del watch, engines
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


class Appointment:
    """Stands for a `Meeting` that brings the ranks together with a certain step."""

    def __init__(self, step: int) -> None:
        self.step, self.sought, self.met = step, 0, 0

    def seek(self, number: int) -> None:
        self.sought += 1

    def take(self, number: int) -> Agreement | None:
        group: Any = None
        return Agreement(group=group, step=number, spread=0, in_step=True) if number == self.step else None

    def together(self) -> None:
        self.met += 1


def parted(monkeypatch: pytest.MonkeyPatch, step: int, **config: Any) -> tuple[list[Engine], list[list[Request]]]:
    """Return engines whose ranks came apart after a step, and are to go on together with step `step`."""
    engines = rank_engines(monkeypatch, **config)
    requests = [add(engines, name, 100) for name in "ab"]
    run(engines, requests)
    for engine in engines:
        watch: Any = engine.manager.ranks
        watch._meeting = Appointment(step)
        watch._part("something happened")
        sent(engine).clear()
    return engines, requests


def run(engines: list[Engine], requests: list[list[Request]], *, steps: int = 1) -> list[kc.RankViolationError]:
    """Run steps on every engine; return what was raised."""
    errors = []
    for _ in range(steps):
        for rank, engine in enumerate(engines):
            try:
                engine.step(*((request[rank], 1) for request in requests))
            except kc.RankViolationError as error:
                errors.append(error)
    return errors


@pytest.mark.parametrize(
    ("mode", "every", "exchanges"),
    [
        ("log", 0, {5: 1, 9: 2, 13: 3, 21: 4, 37: 5, 60: 5}),
        ("log", 1, {5: 1, 8: 4}),
        ("raise", 0, {5: 1, 6: 2, 20: 16}),
    ],
)
def test_what_ranks_exchange_from_the_meeting_on(
    monkeypatch: pytest.MonkeyPatch, mode: str, every: int, exchanges: dict[int, int]
) -> None:
    engines, requests = parted(monkeypatch, 5, mode=mode, digest_every=every)
    run(engines, requests, steps=3)
    assert [sent(engine) for engine in engines] == [[], []]
    assert {engine.manager.summary().watching for engine in engines} == {"partial"}
    found = {}
    while engines[0].manager.step < max(exchanges):
        run(engines, requests)
        found[engines[0].manager.step] = len(sent(engines[0]))
    assert {step: found[step] for step in exchanges} == exchanges
    for engine in engines:
        watch: Any = engine.manager.ranks
        assert (watch.met, watch._meeting.met, watch.alone, watch._meeting.sought) == (1, 1, False, 1)
        assert engine.manager.summary().watching == "complete"


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_ranks_are_together_only_once_all_know(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    engines, requests = parted(monkeypatch, 5, mode=mode, digest_every=1)
    first: Any = engines[0].manager.ranks
    met = []
    for _ in range(7):
        run(engines, requests)
        met.append((engines[0].manager.step, first.met))
    # What is sent before step 6 says that the first exchange is over: in log mode on the second rank alone, since the
    # first one began that step before the second one began the one before.
    assert met[4:] == [(6, 0), (7, 1), (8, 1)] if mode == "raise" else [(6, 0), (7, 0), (8, 1)]


def test_a_rank_whose_other_left_after_the_first_exchange_says_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines, requests = parted(monkeypatch, 5, mode="raise", digest_every=1)
    run(engines, requests, steps=3)
    first: Any = engines[0].manager.ranks
    second: Any = engines[1].manager.ranks
    lines = len(caplog.records)
    # It found something as the ranks went on together, and came apart again before it said more.
    second._number = 5
    second._go_on_together()
    second._total, second._sentence = 1, "x"
    second._send(5, digest_step=0)
    alone = engines[:1]
    errors = run(alone, [request[:1] for request in requests], steps=2)
    assert (first.met, first._verdicts != [], errors) == (0, True, [])
    first._part("the exchange before step 6 failed")
    errors = run(alone, [request[:1] for request in requests], steps=3)
    assert (first.met, errors, first._meeting.sought) == (0, [], 2)
    assert [r.getMessage() for r in caplog.records[lines:] if r.levelno >= logging.WARNING] == []
