"""The ranks' schedule, without processes: several managers in one, whose exchanges meet on a bus."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kv_canary as kc
from kv_canary.observers import Observer
from kv_canary.ranks import watch
from kv_canary.ranks.compare import Word
from kv_canary.ranks.digest import Digest, Gatherer
from kv_canary.ranks.group import Exchange as RealExchange
from kv_canary.runtime.accounts import Accounts
from kv_canary.runtime.budget import Budget
from kv_canary.runtime.composition import ForwardRequest
from kv_canary.specs.violation_row import ViolationRow, site_of

from .engine import MAX_ROWS, Engine, Request, make_pool


class Bus:
    """Exchanges between ranks of one process: an exchange is over once every rank has begun as many."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Whether a wait for what is not there is an error.
        self.strict = False
        self.sent: dict[int, list[torch.Tensor]] = defaultdict(list)


class Rank:
    """Stands for a `RankGroup`."""

    timeout = 60.0

    def __init__(self, bus: Bus, rank: int) -> None:
        self.bus, self.rank, self.size = bus, rank, bus.size

    def claim(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def forget_left(self) -> None:
        pass

    def store(self) -> None:
        raise RuntimeError("there is no store")


class Exchange:
    """Stands for an exchange."""

    def __init__(self, ranks: Rank, words: torch.Tensor) -> None:
        self.began, self._bus = time.monotonic(), ranks.bus
        sent = self._bus.sent[ranks.rank]
        self._index = len(sent)
        sent.append(words.clone())

    def done(self) -> bool:
        return all(len(self._bus.sent[rank]) > self._index for rank in range(self._bus.size))

    def wait(self, seconds: float) -> bool:
        # What is not there does not come while the only thread waits.
        if self._bus.strict and not self.done():
            raise RuntimeError("a rank would wait here")
        return self.done()

    def received(self) -> torch.Tensor:
        return torch.stack([self._bus.sent[rank][self._index] for rank in range(self._bus.size)])


def rank_engines(monkeypatch: pytest.MonkeyPatch, size: int = 2, **config: Any) -> list[Engine]:
    """Return one engine of each rank, with KV bytes of its own."""
    torch.manual_seed(0)
    monkeypatch.setattr(watch, "Exchange", Exchange)
    # The managers are made one after the other here, so that none can wait for the rest.
    monkeypatch.setattr(watch.RankWatch, "_meet", lambda _: None)
    bus, engines = Bus(size), []
    for rank in range(size):
        engine = Engine(
            [
                kc.BufferGroup(name="full", pool=make_pool(512)),
                kc.BufferGroup(name="ring", pool=make_pool(64), window=5, ring=True),
            ],
            kc.CanaryConfig(backend="reference", **config),
            ranks=Rank(bus, rank),
        )
        engines.append(engine)
    return engines


def add(engines: list[Engine], name: str, tokens: int) -> list[Request]:
    return [engine.add(name, tokens) for engine in engines]


def sent(engine: Engine) -> list[torch.Tensor]:
    ranks: Any = engine.manager.ranks._ranks
    return ranks.bus.sent[ranks.rank]


def damage(engine: Engine, request: Request, position: int) -> None:
    group = engine.groups[0]
    engine.flip(group, "K", engine.slot_of(group, request, position), position)


def exchanges(steps: int, *, every: int, agrees: bool) -> int:
    """Return how many exchanges that many steps make."""
    due = [n for n in range(1, steps + 1) if every and n > watch.LAG and (n - watch.LAG) % every == 0]
    return steps if agrees else len(due)


@pytest.mark.every_day("0-raise", "1-log", "3-raise")
@pytest.mark.parametrize("mode", ["log", "raise"])
@pytest.mark.parametrize("every", [0, 1, 3])
def test_ranks_exchange_at_steps_that_the_configuration_alone_says(
    monkeypatch: pytest.MonkeyPatch, mode: str, every: int
) -> None:
    engines = rank_engines(monkeypatch, mode=mode, digest_every=every)
    a = add(engines, "a", 60)
    for _ in range(20):
        for engine, request in zip(engines, a, strict=True):
            engine.step((request, 2))
    for engine in engines:
        words = sent(engine)
        assert len(words) == exchanges(20, every=every, agrees=mode == "raise")
        assert len({w.shape for w in words}) <= 1
        assert engine.manager.rank_reports == engine.manager.reports
        assert engine.manager.summary().watching == "complete"


@pytest.mark.every_day("0", "3", "4", "7")
@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_to_ranks_they_make_the_same_calls_and_raise_together(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Forwards fail here and there, bytes change here and there, and ranks flush as they like."""
    chance = random.Random(seed)
    mode = chance.choice(["log", "raise"])
    every, size = chance.choice([0, 1, 2, 5]), chance.choice([2, 3])
    engines = rank_engines(monkeypatch, size, mode=mode, digest_every=every)
    engines[0].manager.ranks._ranks.bus.strict = mode == "raise"
    names = ["a", "b"]
    requests = {name: add(engines, name, 100) for name in names}
    errors: list[list[kc.RankViolationError]] = [[] for _ in engines]
    hurt: set[int] = set()
    failed = False
    for _ in range(16):
        work = [name for name in names if chance.random() < 0.8] or ["a"]
        counts = {name: chance.randint(1, 3) for name in work}
        # A forward that fails on one rank is tried again there, so that this rank is one step ahead from then on.
        fails = chance.randrange(size) if chance.random() < 0.2 and not failed else None
        failed = failed or fails is not None
        victim = chance.randrange(size) if chance.random() < 0.15 else None
        # Real ranks wait where these have to come in the right order: those ahead come last.
        for rank in sorted(range(size), key=lambda r: (engines[r].manager.step, r == fails)):
            engine = engines[rank]
            mine = [(requests[name][rank], counts[name]) for name in work]
            if victim == rank and mine[0][0].cached:
                damage(engine, mine[0][0], chance.randrange(mine[0][0].cached))
                hurt.add(rank)
            failing = rank == fails
            while True:
                batch = engine.batch(*mine)
                try:
                    with engine.forward.around(batch):
                        if failing:
                            failing = False
                            raise ValueError("the model failed")
                        engine.write_bytes(batch)
                except ValueError:
                    continue
                except kc.RankViolationError as error:
                    errors[rank].append(error)
                    continue
                break
            for request, count in mine:
                request.cached += count
        if chance.random() < 0.2:
            engines[chance.randrange(size)].manager.flush()
    assert len({len(w) for engine in engines for w in [sent(engine)]}) <= 2
    assert len({w.shape for engine in engines for w in sent(engine)}) <= 1
    for rank, engine in enumerate(engines):
        steps = engine.manager.step
        assert len(sent(engine)) == exchanges(steps, every=every, agrees=mode == "raise")
        assert engine.manager.summary().watching == "complete"
        assert bool(engine.manager.reports) <= (rank in hurt)
        # No difference is made up: only that some ranks have violations.
        kinds = {d for report in engine.manager.rank_reports for d in report.differences}
        assert kinds <= ({"VIOLATIONS"} if hurt else set())
    # The steps before which ranks raise are those that all of them come to, unless the run ends first.
    last = min(engine.manager.step for engine in engines)
    assert len({tuple(e.step for e in part if e.step <= last) for part in errors}) == 1
    assert all(e.verdicts or e.differences for part in errors for e in part)
    assert not any(errors) or (mode == "raise" and hurt)


def test_a_rank_without_the_others_goes_on_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines = rank_engines(monkeypatch, digest_every=1)
    alone, _ = engines
    monkeypatch.setattr(Rank, "timeout", 5.0)
    a = alone.add("a", 60)
    for _ in range(watch.LAG + 3):
        alone.step((a, 1))
    assert alone.manager.summary().watching == "complete"
    later = time.monotonic() + 6
    monkeypatch.setattr(watch.time, "monotonic", lambda: later)
    alone.step((a, 1))
    assert alone.manager.summary().watching == "partial"
    assert caplog.text.count("not all ranks took part in the exchange before step 5 within 5 seconds") == 1
    before = len(sent(alone))
    damage(alone, a, 1)
    for _ in range(5):
        alone.step((a, 1))
    # It verifies and reports as before, and calls no one.
    assert len(sent(alone)) == before
    assert {r.reasons for r in alone.found()} == {("K",)}
    assert caplog.text.count("goes on alone") == 1


def test_too_many_exchanges_under_way_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(Exchange, "wait", lambda self, seconds: waits.append(seconds) or self.done())
    alone, _ = rank_engines(monkeypatch, digest_every=1)
    a = alone.add("a", 100)
    for _ in range(watch.LAG + watch.MOST_UNDER_WAY + 1):
        alone.step((a, 1))
    assert waits == []
    alone.step((a, 1))
    assert len(waits) == 1


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_an_exchange_that_cannot_begin_or_fails_degrades_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("connection closed by peer")

    for part in ("__init__", "done", "wait"):
        with monkeypatch.context() as patch:
            alone, other = rank_engines(patch, digest_every=1, mode=mode)
            patch.setattr(Exchange, part, broken)
            for engine in (alone, other):
                a = engine.add("a", 60)
                for _ in range(8):
                    engine.step((a, 1))
                damage(engine, a, 1)
                engine.step((a, 1))
                engine.step((a, 1))
                engine.manager.flush(all_ranks=True)
                found = engine.manager.summary()
                # A log rank looks at exchanges, and only a flush or a raise rank waits for one.
                assert found.watching == "partial"
                assert found.reasons == {"K": found.violations}
    assert "connection closed by peer" in caplog.text


@pytest.mark.parametrize("part", ["see", "digest"])
def test_a_digest_that_cannot_be_gathered_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    engines = rank_engines(monkeypatch, digest_every=1)
    a = add(engines, "a", 60)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    for i in range(12):
        for rank, (engine, request) in enumerate(zip(engines, a, strict=True)):
            with monkeypatch.context() as patch:
                if rank == 1 and i == 3:
                    patch.setattr(engine.manager.ranks._gatherer, part, broken)
                engine.step((request, 1))
    for engine in engines:
        engine.manager.flush()
        assert engine.manager.ranks.compared == 12 - watch.LAG - 1
        assert list(engine.manager.rank_reports) == []
    assert "the digest of step 4 was not gathered" in caplog.text


def test_a_request_that_cannot_say_whether_it_was_discarded_costs_one_digest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines = rank_engines(monkeypatch, digest_every=4)
    a = add(engines, "a", 60)

    def broken(*_: object) -> bool:
        raise KeyError("the scheduler has forgotten it")

    for _ in range(13):
        for rank, (engine, request) in enumerate(zip(engines, a, strict=True)):
            batch = engine.batch((request, 1))
            if rank == 1 and engine.manager.step == 3:
                object.__setattr__(batch.requests[0], "discarded", broken)
            engine.run(batch)
            request.cached += 1
    assert [engine.manager.ranks.compared for engine in engines] == [1, 1]
    assert [len(engine.manager.rank_reports) for engine in engines] == [0, 0]
    assert "the digest of step 4 was not packed" in caplog.text


@pytest.mark.parametrize("redact", [True, False])
def test_redaction_leaves_out_what_a_digest_or_an_exchange_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, redact: bool
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise ValueError("request somebody@example.org")

    for owner, name, says in (
        (Gatherer, "see", "was not gathered"),
        (Gatherer, "digest", "was not gathered"),
        (Digest, "pack", "was not packed"),
        (watch, "compare", "failed (ValueError"),
        (Exchange, "done", "failed (ValueError"),
        (Exchange, "__init__", "could not begin (ValueError"),
    ):
        caplog.clear()
        engines = rank_engines(monkeypatch, digest_every=1, redact=redact)
        a = add(engines, "a", 60)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, breaks)
            for _ in range(2 * watch.LAG):
                for engine, request in zip(engines, a, strict=True):
                    engine.step((request, 1))
        assert says in caplog.text
        assert ("somebody" in caplog.text) is not redact


def test_a_difference_that_goes_on_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = rank_engines(monkeypatch, digest_every=1)
    a = add(engines, "a", 60)
    a[1].tokens[0] += 1
    told: list[Any] = []
    for _ in range(12):
        for engine, request in zip(engines, a, strict=True):
            engine.step((request, 1))
            told = list(engine.manager.rank_reports)
    assert [(r.step, r.differences, r.ranks) for r in told] == [(2, ("TAIL",), (0, 1))]


def test_damage_that_a_digest_shows_as_well_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = rank_engines(monkeypatch, digest_every=1, mode="raise")
    a = add(engines, "a", 60)
    raised: list[tuple[int, kc.RankViolationError]] = []
    for i in range(14):
        if i in (4, 5):
            damage(engines[1], a[1], 1)
        for rank, (engine, request) in enumerate(zip(engines, a, strict=True)):
            try:
                engine.step((request, 1))
            except kc.RankViolationError as error:
                raised.append((rank, error))
    assert [(rank, error.step) for rank, error in raised] == [(0, 7), (1, 7)]
    for rank, error in raised:
        assert [(v.rank, v.total) for v in error.verdicts] == [(1, 1)]
        assert error.differences == ()
        # Only the rank that found it has the report itself.
        assert len(error.reports) == rank
    assert [[r.differences for r in engine.manager.rank_reports] for engine in engines] == [[("VIOLATIONS",)]] * 2


def test_all_that_a_rank_finds_between_two_exchanges_is_raised_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = rank_engines(monkeypatch, mode="raise")
    a = add(engines, "a", 60)
    errors: list[kc.RankViolationError] = []
    for i in range(8):
        for rank, (engine, request) in enumerate(zip(engines, a, strict=True)):
            if rank == 1 and i == 4:
                # One is told by a flush, and two more, which were found outside of forwards, with the next step.
                for count in (1, 2):
                    row = ViolationRow(site=site_of(kc.Tag.SWEEP_FULL, 1), reasons=kc.Reason.SEAL_K, slot=2, step=4)
                    engine.manager.report([row] * count)
                    if count == 1:
                        engine.manager.flush()
            try:
                engine.step((request, 1))
            except kc.RankViolationError as error:
                errors.append(error)
    assert [[(v.rank, v.total) for v in error.verdicts] for error in errors] == [[(1, 3)], [(1, 3)]]
    assert [len(error.reports) for error in errors] == [0, 3]


def test_what_another_rank_says_stays_within_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = rank_engines(monkeypatch, mode="raise")
    a = add(engines, "a", 60)
    errors: list[kc.RankViolationError] = []
    for i in range(8):
        for rank, (engine, request) in enumerate(zip(engines, a, strict=True)):
            if rank == 1 and i == 4:
                engine.manager.ranks._total, engine.manager.ranks._sentence = 1, "x\nkv-canary: forged \x1b[2J\u202e"
            try:
                engine.step((request, 1))
            except kc.RankViolationError as error:
                errors.append(error)
    assert len(errors) == 2
    for error in errors:
        assert "rank 1 found 1, first x\\nkv-canary: forged \\x1b[2J\\u202e" in str(error)
        assert str(error).isprintable()
        assert error.verdicts[0].sentence.isprintable()
    verdict = kc.ranks.RankVerdict(rank=0, total=1, sentence="x\ny")
    assert str(kc.RankViolationError(step=1, own=[], verdicts=[verdict], differences=[])).isprintable()


def test_only_so_many_differences_of_a_step_are_written_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines = rank_engines(monkeypatch, digest_every=1, max_reports_per_step=2)
    requests = [add(engines, name, 60) for name in ("a", "b", "c")]
    for request in requests:
        request[1].tokens[0] += 1
    for _ in range(8):
        for rank, engine in enumerate(engines):
            engine.step(*((request[rank], 1) for request in requests))
    assert [len(engine.manager.rank_reports) for engine in engines] == [2, 2]
    assert "1 more requests differ and are not written out" in caplog.text


def test_observers_are_told_and_what_they_raise_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = rank_engines(monkeypatch, digest_every=1)
    told: list[kc.RankReport] = []

    class Teller(Observer):
        def on_ranks(self, report: kc.RankReport) -> None:
            told.append(report)

    class Thrower(Observer):
        def on_ranks(self, report: kc.RankReport) -> None:
            raise OSError("the disk is full")

    engines[0].manager.accounts.join(Thrower(), Teller())
    a = add(engines, "a", 60)
    a[1].tokens[0] += 1
    for _ in range(8):
        for engine, request in zip(engines, a, strict=True):
            engine.step((request, 1))
    assert [r.differences for r in told] == [("TAIL",)]


def test_the_last_steps_are_compared_where_all_ranks_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = rank_engines(monkeypatch, digest_every=1)
    a = add(engines, "a", 60)
    for _ in range(6):
        for engine, request in zip(engines, a, strict=True):
            engine.step((request, 1))
    watches = [engine.manager.ranks for engine in engines]
    for engine in engines:
        engine.manager.flush()
    assert [w.compared for w in watches] == [2, 2]
    # Each rank waits for the others here, which one thread cannot do: what they send is what is checked.
    for step in (3, 4, 5, 6):
        for w in watches:
            w._send(6, digest_step=step)
        for w in watches:
            w._collect(wait=True)
    assert [w.compared for w in watches] == [6, 6]


def test_a_flush_of_all_ranks_compares_the_steps_that_no_other_step_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Patient(Exchange):
        """Waits for ranks in threads of their own."""

        def wait(self, seconds: float) -> bool:
            deadline = time.monotonic() + seconds
            while not self.done() and time.monotonic() < deadline:
                time.sleep(0.001)
            return self.done()

    engines = rank_engines(monkeypatch, digest_every=2)
    monkeypatch.setattr(watch, "Exchange", Patient)
    a = add(engines, "a", 60)
    a[1].tokens[6] += 1
    for _ in range(8):
        for engine, request in zip(engines, a, strict=True):
            engine.step((request, 1))
    # What they read in the last step differs in its last token: no step before shows it, and none follows.
    assert [list(engine.manager.rank_reports) for engine in engines] == [[], []]
    threads = [threading.Thread(target=engine.manager.flush, kwargs={"all_ranks": True}) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    told = [[(r.step, r.differences) for r in engine.manager.rank_reports] for engine in engines]
    assert told == [[(8, ("TAIL",))]] * 2
    assert [engine.manager.ranks.compared for engine in engines] == [4, 4]


def test_a_digest_setting_without_ranks_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kv_canary"):
        Engine([kc.BufferGroup(name="full", pool=make_pool())], kc.CanaryConfig(backend="reference", digest_every=5))
    assert "digest_every is set, but there are no ranks to compare digests with" in caplog.text


def test_ranks_that_are_configured_differently_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Others(Exchange):
        """The other rank has another `digest_every`."""

        def wait(self, seconds: float) -> bool:
            return True

        def received(self) -> torch.Tensor:
            mine = self._bus.sent[0][0]
            theirs = mine.clone()
            theirs[1] = 10
            return torch.stack([mine, theirs])

    monkeypatch.setattr(watch, "Exchange", Others)
    closed: list[bool] = []
    monkeypatch.setattr(Accounts, "close", lambda _: closed.append(True))
    with pytest.raises(ValueError, match="CanaryManager: digest_every must be the same on all ranks, got 5, 10"):
        kc.CanaryManager(
            [kc.BufferGroup(name="full", pool=make_pool())],
            limits=kc.CanaryLimits(max_rows=4, max_requests=4, max_tokens=64, max_len=64),
            config=kc.CanaryConfig(backend="reference", digest_every=5),
            ranks=Rank(Bus(2), 0),
        )
    # Files and ports of observers are given back.
    assert closed == [True]


@pytest.fixture
def distributed() -> Iterator[None]:
    """Be the only process of torch.distributed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("distributed")
def test_a_group_serves_one_manager_and_waits_for_a_while() -> None:
    group = dist.new_group(backend="gloo")
    ranks = kc.RankGroup(group)
    ranks.claim()
    with pytest.raises(RuntimeError, match="RankGroup: a group must serve one manager, got a second one"):
        ranks.claim()
    with pytest.raises(ValueError, match="RankGroup: timeout must be above 0 seconds, got 0"):
        kc.RankGroup(group, timeout=0)


@pytest.mark.usefixtures("distributed")
def test_an_exchange_is_over_once_every_rank_has_given_its_words() -> None:
    ranks = kc.RankGroup.new(timeout=10.0)
    assert ranks is not None
    exchange = RealExchange(ranks, torch.tensor([3, 1, 4]))
    assert exchange.wait(10.0)
    assert exchange.done()
    assert exchange.received().tolist() == [[3, 1, 4]]


@pytest.mark.usefixtures("distributed")
def test_a_group_has_to_carry_tensors_of_the_cpu() -> None:
    new = kc.RankGroup.new()
    assert new is not None
    for group in (new.group, dist.group.WORLD, dist.new_group(backend="cpu:gloo")):
        assert kc.RankGroup(group).size == 1
    # As an NCCL group does, which cannot be made without a GPU.
    for_gpus_only = dist.new_group(backend="cuda:gloo")
    why = "over NCCL a rank that died would hang the others; engines have a CPU group, and RankGroup.new makes one"
    with pytest.raises(ValueError, match=rf"RankGroup: group must be one that .* \({why}\), got cuda:gloo"):
        kc.RankGroup(for_gpus_only)


class ChangingBudget(Budget):
    """A budget that chooses, as on a GPU, by a clock of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__(kc.CanaryConfig(), torch.device("cuda"), max_rows=MAX_ROWS)
        self._chosen = random.Random(rank)

    def observe(self, *, relied_on: int, now: float) -> None:
        self.stride = self._chosen.choice([1, 2, 4, 8])


def ranks_of_other_strides(monkeypatch: pytest.MonkeyPatch, **config: Any) -> list[Engine]:
    engines = rank_engines(monkeypatch, 3, digest_every=1, **config)
    for rank, engine in enumerate(engines):
        engine.manager._steps.budget = ChangingBudget(rank)
    return engines


def entries_of_ranks(engines: list[Engine]) -> list[set[int]]:
    """Return, of each digest that was sent, the counts of entries that the ranks say of their first request."""
    shape = engines[0].manager.ranks._shape
    digests = zip(*(sent(engine) for engine in engines), strict=True)
    return [{int(words[-math.prod(shape) :].view(shape)[0, 0, Word.ENTRIES]) for words in part} for part in digests]


@pytest.mark.every_day("raise")
@pytest.mark.parametrize("mode", ["log", "raise"])
def test_healthy_ranks_that_choose_other_strides_do_not_differ(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    engines = ranks_of_other_strides(monkeypatch, mode=mode)
    a = add(engines, "a", 120)
    for engine, request in zip(engines, a, strict=True):
        engine.step((request, 64))
    for _ in range(40):
        for engine, request in zip(engines, a, strict=True):
            engine.step((request, 1))
    # They did verify other counts of positions, and said so.
    assert sum(len(counts) > 1 for counts in entries_of_ranks(engines)) > 10
    for engine in engines:
        assert engine.manager.ranks.compared >= 35
        assert list(engine.manager.rank_reports) == []
        assert engine.manager.summary().violations == 0


def test_damage_on_all_ranks_that_some_come_to_later_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = ranks_of_other_strides(monkeypatch)
    a = add(engines, "a", 120)
    for engine, request in zip(engines, a, strict=True):
        engine.step((request, 64))
    for i in range(40):
        for engine, request in zip(engines, a, strict=True):
            if i == 1:
                damage(engine, request, 20)
            engine.step((request, 1))
    found = [{report.step for report in engine.found()} for engine in engines]
    # All found it, and not in the same steps.
    assert all(found)
    assert len(set(map(frozenset, found))) > 1
    assert [list(engine.manager.rank_reports) for engine in engines] == [[], [], []]


def test_names_that_stand_twice_in_a_batch_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = rank_engines(monkeypatch, digest_every=1)
    a, b = add(engines, "a", 60), add(engines, "b", 60)
    for _ in range(8):
        for rank, engine in enumerate(engines):
            batch = engine.batch((a[rank], 1), (b[rank], 1))
            requests: list[ForwardRequest] = list(batch.requests)
            object.__setattr__(requests[1], "request_id", "a")
            engine.run(batch)
            a[rank].cached += 1
            b[rank].cached += 1
    assert [list(engine.manager.rank_reports) for engine in engines] == [[], []]
    assert [engine.manager.ranks.compared for engine in engines] == [3, 3]
