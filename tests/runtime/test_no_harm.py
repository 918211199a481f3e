"""In log mode nothing that goes wrong inside the canary leaves it: the engine goes on, and so does the canary."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import kv_canary as kc
from kv_canary import ops
from kv_canary.observers import Observer
from kv_canary.reports import Decoder, reporter
from kv_canary.runtime import composition
from kv_canary.runtime.accounts import Accounts
from kv_canary.runtime.drain import Drain
from kv_canary.runtime.guard import Guard
from kv_canary.runtime.history import StepHistory
from kv_canary.runtime.summary import RECENT_STEPS

from .engine import Engine, Request, full_engine, make_pool
from .test_observers import flip

OPS = ("chain_tails", "verify_prefixes", "verify_resolved", "write")


def contained(**options: Any) -> Engine:
    """Return an engine as a user has it: what fails inside the canary stays there, in log mode."""
    engine = full_engine(check_tokens=True, **options)
    engine.manager.guard.contains = engine.config.mode != "raise"
    return engine


def share(engine: Engine, name: str, of: Request, prefix: int) -> Request:
    """Return a request with the same tokens as another, whose first ones it has from the cache."""
    request = engine.add(name, of.tokens)
    for group in engine.groups:
        table = engine.tables[group.name]
        table[request.row, :prefix] = table[of.row, :prefix]
    request.cached = prefix
    return request


def strike(true: Callable[..., Any], *, at: int, behind: bool) -> Callable[..., Any]:
    """Return `true`, whose call number `at` raises, before or after it has done its work."""
    calls = iter(range(1, 1 << 30))

    def call(*args: Any, **kwargs: Any) -> Any:
        now = next(calls) == at
        if now and not behind:
            raise RuntimeError("out of memory, in the canary's own launch")
        result = true(*args, **kwargs)
        if now:
            raise RuntimeError("out of memory, in the canary's own launch")
        return result

    return call


@pytest.mark.every_day(*(f"{op}-{1 + i % 3}-{where}" for op in OPS for i, where in enumerate(("before", "behind"))))
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("op", OPS)
def test_a_launch_that_fails_is_contained_and_the_canary_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, op: str, at: int, behind: bool
) -> None:
    engine = contained()
    a, b = engine.add("a", 100), engine.add("b", 100)
    monkeypatch.setattr(ops, op, strike(getattr(ops, op), at=at, behind=behind))
    engine.step((a, 20), (b, 10))
    for _ in range(4):
        engine.step((a, 1), (b, 2))
    # What nobody recorded is relied on by another request too.
    engine.step((share(engine, "c", a, 24), 1), (a, 1))
    engine.manager.flush()
    summary = engine.manager.summary()
    assert summary.violations == 0
    assert list(summary.failures.values()) == [1]
    assert summary.skipped == 1
    assert summary.watching == "partial"
    assert [r.getMessage().count("failed (RuntimeError)") for r in caplog.records] == [1]
    # It is still on: a fault is found where it is.
    flip(engine, "a", 3)
    engine.step((a, 1))
    assert {(r.position, r.reasons) for r in engine.found()} == {(3, ("K",))}
    # And after a while without failures it is healthy again, while the count stays.
    flip(engine, "a", 3)
    for _ in range(RECENT_STEPS):
        engine.step((b, 1)) if b.cached < 100 else engine.run(engine.batch((b, 0)))
    engine.manager.flush()
    assert (engine.manager.summary().watching, engine.manager.summary().skipped) == ("complete", 1)


@pytest.mark.parametrize("name", ["push", "poll", "_fetch"])
def test_what_was_found_is_not_lost_by_a_drain_that_fails(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    engine = contained()
    a = engine.add("a", 60)
    engine.step((a, 20))
    flip(engine, "a", 3)
    monkeypatch.setattr(Drain, name, strike(getattr(Drain, name), at=1, behind=False))
    for _ in range(4):
        engine.step((a, 1))
    engine.manager.flush()
    # The forward that did not begin, if there is one, has looked at nothing.
    summary = engine.manager.summary()
    assert summary.violations == 4 - summary.skipped
    assert sum(summary.failures.values()) == 1


@pytest.mark.parametrize(
    "part",
    [
        (StepHistory, "request"),
        (Accounts, "_was_discarded"),
        (Accounts, "_intact_at"),
        (Accounts, "_take_step"),
        (Accounts, "_count_reasons"),
        (Drain, "_drop_stale_counts"),
        (Decoder, "decode"),
    ],
    ids=lambda part: part[1],
)
def test_damage_of_one_step_is_counted_whatever_fails_behind_its_read(
    monkeypatch: pytest.MonkeyPatch, part: tuple[Any, str]
) -> None:
    engine = contained(seals="layer")
    a = engine.add("a", 60)
    engine.step((a, 20))
    engine.manager.flush()
    flip(engine, "a", 3)
    for owner, name in [part]:
        monkeypatch.setattr(owner, name, strike(getattr(owner, name), at=1, behind=False))
    engine.manager.scrub()
    engine.step((a, 1))
    # It is gone again before anybody looks once more.
    flip(engine, "a", 3)
    for _ in range(3):
        engine.step((a, 1))
    engine.manager.flush()
    summary = engine.manager.summary()
    assert summary.violations > 0
    assert sum(summary.failures.values()) == 1


def test_records_that_could_not_be_marked_are_all_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = contained()
    a = engine.add("a", 60)
    engine.step((a, 20))
    with monkeypatch.context() as patch:
        patch.setattr(ops, "write", strike(ops.write, at=1, behind=False))
        patch.setattr(kc.KvPool, "inside", strike(kc.KvPool.inside, at=1, behind=False))
        engine.step((a, 1))
    engine.step((a, 1))
    engine.manager.flush()
    summary = engine.manager.summary()
    assert (summary.violations, summary.skipped, summary.unverified) == (0, 1, 21)


@pytest.mark.parametrize("tokens", [lambda i, j: [], lambda i, j: 1 / 0, lambda i, j: None])
def test_tokens_that_cannot_be_had_cost_one_forward(tokens: Callable[[int, int], Any]) -> None:
    engine = contained()
    a, b = engine.add("a", 60), engine.add("b", 60)
    engine.step((a, 20), (b, 5))
    batch = engine.batch((a, 1), (b, 1))
    engine.run(
        dataclasses.replace(batch, requests=[dataclasses.replace(batch.requests[0], tokens=tokens), batch.requests[1]])
    )
    for request in (a, b):
        request.cached += 1
    engine.step((a, 1), (b, 1))
    engine.manager.flush()
    summary = engine.manager.summary()
    assert (summary.violations, summary.skipped, summary.unverified) == (0, 1, 2)


def test_a_discarded_that_raises_loses_no_finding() -> None:
    engine = contained()
    a = engine.add("a", 60)
    engine.step((a, 20))
    flip(engine, "a", 3)
    batch = engine.batch((a, 1))

    def discarded() -> bool:
        raise RuntimeError("the request is gone")

    engine.run(dataclasses.replace(batch, requests=[dataclasses.replace(batch.requests[0], discarded=discarded)]))
    engine.manager.flush()
    summary = engine.manager.summary()
    assert summary.violations == len(engine.manager.reports) == 1
    assert summary.failures == {"discarded: RuntimeError": 1}
    # It is the engine's own callback: nothing of the canary's has failed.
    assert summary.watching == "complete"


def test_an_observer_that_raises_at_every_step_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Sour(Observer):
        def on_step(self, facts: Any) -> None:
            raise OSError("the disk is full")

        def on_forward(self, forward: Any, batch: Any) -> None:
            raise KeyError("gone")

    pool = make_pool()
    engine = Engine([kc.BufferGroup(name="full", pool=pool)])
    engine.manager.accounts.join(Sour())
    a = engine.add("a", 100)
    for _ in range(20):
        engine.step((a, 1))
    engine.manager.flush()
    lines = [r.getMessage() for r in caplog.records if "Sour" in r.getMessage()]
    assert ["on_step failed (OSError)" in line for line in lines] in ([True, False], [False, True])
    assert (
        engine.manager.summary().failures[
            "test_an_observer_that_raises_at_every_step_is_told_of_once.<locals>.Sour.on_step: OSError"
        ]
        == 20
    )
    # Nothing of the canary's own has failed.
    assert engine.manager.summary().watching == "complete"


def test_what_a_forward_is_not_told_right_is_said_and_costs_that_forward(caplog: pytest.LogCaptureFixture) -> None:
    engine = contained()
    a = engine.add("a", 100)
    engine.step((a, 20))
    batch = engine.batch((a, 1))
    engine.run(dataclasses.replace(batch, positions=batch.positions[:0]))
    assert "positions must be of shape [1]" in caplog.text
    # Out of turn: the forward before was never ended, and the next ones are.
    engine.forward.begin(batch)
    engine.forward.begin(batch)
    engine.forward.head()
    engine.forward.tail()
    engine.forward.end()
    engine.forward.tail()
    engine.forward.end()
    engine.run(batch)
    a.cached += 1
    engine.step((a, 1))
    engine.manager.flush()
    summary = engine.manager.summary()
    assert summary.violations == 0
    assert summary.skipped >= 2
    flip(engine, "a", 3)
    engine.step((a, 1))
    assert engine.found()


def test_a_forward_that_nobody_can_describe_is_skipped_and_what_it_wrote_is_unverified(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for mode in ("log", "raise"):
        engine = contained(mode=mode)
        a, b = engine.add("a", 100), engine.add("b", 100)
        engine.step((a, 20), (b, 20))
        batch = engine.batch((a, 4))
        engine.forward.skip(batch.out_slots, why="beam search")
        engine.write_bytes(batch)
        a.cached += 4
        caplog.clear()
        engine.forward.skip({}, why="beam search")
        # All of the pool, since nobody can say where that one wrote: everything is taken in as it is now.
        engine.step((a, 1), (b, 1))
        c = share(engine, "c", a, 24)
        engine.step((c, 1))
        engine.manager.flush()
        summary = engine.manager.summary()
        assert (summary.violations, summary.skipped, summary.unverified) == (0, 2, 44)
        assert "beam search" not in caplog.text
        # From here on it is watched as anything else.
        flip(engine, "a", 22)
        if mode == "log":
            engine.step((a, 1), (c, 1))
            assert {r.position for r in engine.found()} == {22}
        else:
            engine.step((a, 1), (c, 1))
            with pytest.raises(kc.CanaryViolationError):
                engine.manager.flush()
            # The engine is usable.
            flip(engine, "a", 22)
            engine.step((b, 1))
            engine.manager.flush()


def test_only_what_a_skipped_forward_wrote_is_taken_in() -> None:
    engine = contained()
    a, b = engine.add("a", 100), engine.add("b", 100)
    engine.step((a, 20), (b, 20))
    batch = engine.batch((a, 4))
    engine.forward.skip(batch.out_slots, why="beam search")
    engine.write_bytes(batch)
    a.cached += 4
    # What was recorded before is verified as ever.
    flip(engine, "a", 5)
    engine.step((a, 1), (b, 1))
    assert {r.position for r in engine.found()} == {5}
    assert engine.manager.summary().unverified == 4


def test_a_gap_that_a_row_comes_to_name_later_is_no_fault() -> None:
    engine = contained()
    a = engine.add("a", 100)
    b = engine.add("b", a.tokens)
    engine.step((a, 20), (b, 20))
    # b's slots are gaps; a has been looked through since, and goes on.
    engine.manager.unverify(engine.groups[0].pool, engine.tables["full"][b.row, :20].long())
    engine.step((a, 1))
    # Both have the same tokens: the engine lets a name b's slots, as a prefix cache does, and frees a's own.
    engine.tables["full"][a.row, :16] = engine.tables["full"][b.row, :16]
    for _ in range(3):
        engine.step((a, 1))
    engine.manager.flush()
    summary = engine.manager.summary()
    assert summary.violations == 0
    assert summary.unverified >= 16
    assert summary.failures == {}
    # Nothing was ever written there, and nobody has said that it could not be followed: that is a fault.
    engine.tables["full"][a.row, 5] = 99
    engine.step((a, 1))
    assert {(r.position, r.reasons) for r in engine.found()} == {(5, ("NEVER_WRITTEN",))}


def test_in_raise_mode_failures_are_raised_and_findings_come_from_begin_and_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = contained(mode="raise")
    a = engine.add("a", 100)
    engine.step((a, 20))
    with monkeypatch.context() as patch:
        patch.setattr(ops, "verify_prefixes", strike(ops.verify_prefixes, at=1, behind=False))
        with pytest.raises(RuntimeError, match="in the canary's own launch"):
            engine.step((a, 1))
    flip(engine, "a", 3)
    engine.step((a, 1))
    with pytest.raises(kc.CanaryViolationError):
        engine.forward.begin(engine.batch((a, 1)))
    flip(engine, "a", 3)
    engine.step((a, 1))
    engine.manager.flush()


def test_off_is_off() -> None:
    engine = full_engine(mode="off", metrics_port=1, event_log=None)
    a = engine.add("a", 100)
    engine.step((a, 20))
    flip(engine, "a", 3)
    with engine.manager.one_step():
        engine.step((a, 1))
    engine.manager.retire(engine.groups[0].pool, torch.tensor([1, 2]))
    engine.manager.sweep()
    engine.manager.flush()
    engine.manager.close()
    assert engine.manager.summary() == dataclasses.replace(
        kc.CanarySummary(watching="off"), dropped=engine.manager.summary().dropped
    )
    assert not engine.groups[0].pool.records.any()


@pytest.mark.parametrize("secret", [None, "a key"])
def test_redaction_leaves_no_token_and_no_name(
    caplog: pytest.LogCaptureFixture, tmp_path: Any, secret: str | None
) -> None:
    path, folder = tmp_path / "events.jsonl", tmp_path / "bundles"
    engine = full_engine(redact=True, redact_key=secret, event_log=path, bundles=folder, check_tokens=True)
    # So long that no digest shows it by chance.
    name, token = "somebody@example.org", 1_774_411_023
    a = engine.add(name, [token + i for i in range(100)])
    b = engine.add("b" * 30, 100)
    with caplog.at_level(logging.INFO, "kv_canary"):
        engine.step((a, 20), (b, 20))
        flip(engine, name, 3)
        engine.tables["full"][b.row, 4] = engine.tables["full"][a.row, 7]
        engine.step((a, 1), (b, 1))
        engine.manager.flush()
    engine.manager.close()
    files = [path, *folder.iterdir()]
    assert len(files) > 2
    shown = caplog.text + "".join(f.read_text() for f in files) + str(engine.manager.incidents)
    shown += repr(engine.manager.config)
    assert "redacted-" in shown
    assert not any(hidden in shown for hidden in (name, "b" * 30, secret or name))
    records = engine.groups[0].pool.records[1:41].tolist()
    for hidden in (token, *(words[1] for words in records), *(words[2] for words in records)):
        assert not any(str(v) in shown for v in range(hidden, hidden + (20 if hidden == token else 1)))
        assert str(hidden & ((1 << 64) - 1)) not in shown
    # Equal things still have equal names: the reader that both incidents tell of, and the writer.
    reports = list(engine.manager.reports)
    wrong = next(r for r in reports if "TOKEN" in r.reasons)
    damaged = next(r for r in reports if r.reasons == ("K",))
    assert wrong.record is not None
    assert damaged.record is not None
    assert wrong.record.request_id == damaged.request_id != wrong.request_id
    assert damaged.record.token == damaged.expected_token
    assert wrong.record.token != wrong.expected_token


@pytest.mark.parametrize(
    ("owner", "name", "says"),
    [
        (reporter.IncidentReporter, "_surroundings", "looking around incident 1 failed"),
        (reporter.IncidentReporter, "_bundle", "incident 1 could not be saved"),
        (reporter.BundleFolder, "save", "incident 1 could not be saved"),
        (reporter.IncidentTracker, "take", "grouping the reports failed"),
        (Drain, "push", "failed (ValueError)"),
    ],
)
def test_redaction_leaves_no_text_of_an_exception_but_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any, owner: type, name: str, says: str
) -> None:
    hidden = "somebody@example.org"

    def breaks(*_: object, **__: object) -> None:
        raise ValueError(f"request {hidden}")

    for redacts in (True, False):
        caplog.clear()
        engine = contained(redact=redacts, bundles=tmp_path)
        a = engine.add(hidden, 60)
        engine.step((a, 20))
        flip(engine, hidden, 3)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, breaks)
            engine.step((a, 1))
            engine.manager.flush()
            assert says in caplog.text
        assert (hidden in caplog.text) is not redacts
        # Where it was is no secret, but the line that stands there may be.
        assert f'File "{__file__}", line ' in caplog.text
        assert "in breaks" in caplog.text
        assert ("raise ValueError" in caplog.text) is not redacts
        assert "ValueError" in caplog.text


def test_the_texts_of_what_an_engine_raises_for_a_name_are_always_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Who reads a composed batch is of no canary, and cannot ask whether one redacts."""

    class Nameless:
        def name(self, member: object) -> str:
            raise KeyError("somebody@example.org")

    assert composition._name(cast("composition.RequestSource", Nameless()), 1, 7) == "row 7"
    assert "Nameless.name failed" in caplog.text
    assert "KeyError" in caplog.text
    assert "somebody" not in caplog.text


def test_one_key_gives_the_same_names_everywhere_and_another_gives_others() -> None:
    from kv_canary.redact import Redactor

    one, same, other = Redactor("one"), Redactor("one"), Redactor("other")
    assert one.name("a") == same.name("a") != other.name("a")
    assert one.token(5) == same.token(5) != other.token(5)
    assert Redactor().name("a") != Redactor().name("a")
    assert (one.token(None), one.token(-1), one.word(0), one.name(None)) == (None, -1, 0, None)


def test_a_part_that_is_entered_again_tells_of_its_last_time() -> None:
    guard = Guard(contains=True)
    part = guard.contain("a part", allocates=False)
    for fails in (False, True, False, True):
        with part as entered:
            if fails:
                raise ValueError
        assert entered.failed is fails
    assert guard.failures == {"a part: ValueError": 2}
    assert guard.depth == 0
    assert guard.spent > 0


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_a_length_that_no_table_has_is_refused_before_any_token_is_asked_for(mode: str) -> None:
    engine = contained(mode=mode)
    a = engine.add("a", 40)
    engine.step((a, 10))
    asked: list[tuple[int, int]] = []

    def tokens(start: int, end: int) -> range:
        asked.append((start, end))
        return range(start, end)

    batch = engine.batch((a, 1))
    [request] = batch.requests
    wrong = dataclasses.replace(batch, requests=[dataclasses.replace(request, prefix_len=10**9, tokens=tokens)])
    if mode == "raise":
        with pytest.raises(ValueError, match=r"prefix_len of a must be at most .* as many positions as a table has"):
            engine.manager.forward("target").begin(wrong)
    else:
        engine.run(wrong)
        engine.manager.flush()
        assert engine.manager.summary().skipped == 1
        assert engine.manager.guard.failures == {"forward target: begin: ValueError": 1}
    assert asked == []


HUGE = 1 << 70


@pytest.mark.parametrize("name", ["row", "owner", "prefix_len", "extend_len", "pending", "table_row"])
def test_a_number_that_64_bits_do_not_hold_is_refused_with_its_request(name: str) -> None:
    engine = full_engine(mode="raise")
    a = engine.add("a", 40)
    batch = engine.batch((a, 10))
    [request] = batch.requests
    with pytest.raises(ValueError, match=f"forward: {name} of a must be a number of 64 bits, got {HUGE}"):
        engine.manager.forward("target").begin(
            dataclasses.replace(batch, requests=[dataclasses.replace(request, **{name: HUGE})])
        )


@pytest.mark.parametrize("few", [8, 0])
def test_a_token_that_64_bits_do_not_hold_is_refused_with_its_request(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However many requests there are.
    monkeypatch.setattr("kv_canary.runtime.tails.FEW", few)
    engine = full_engine(mode="raise")
    requests = [engine.add(name, 40) for name in "ab"]
    engine.step(*((r, 10) for r in requests))
    batch = engine.batch(*((r, 1) for r in requests))
    first, last = batch.requests
    broken = dataclasses.replace(last, tokens=lambda start, end: [3] * (end - start - 1) + [HUGE])
    with pytest.raises(ValueError, match=f"forward: tokens of b must be numbers of 64 bits, got {HUGE}"):
        engine.manager.forward("target").begin(dataclasses.replace(batch, requests=[first, broken]))


@pytest.mark.parametrize("pool", ["name", "another's"])
def test_a_pool_that_is_not_the_canarys_is_refused_and_nothing_of_it_is_touched(pool: str) -> None:
    other = full_engine()
    b = other.add("b", 40)
    other.step((b, 10))
    [others_pool] = other.manager.pools
    before = others_pool.records.clone()
    wrong: Any = "full" if pool == "name" else others_pool
    got = "'full'" if pool == "name" else f"another pool, {others_pool.name}"
    slots = torch.tensor([1, 2, 3])
    for mode in ("raise", "log"):
        engine = full_engine(mode=mode)
        manager = engine.manager
        manager.guard.contains = mode == "log"
        a = engine.add("a", 40)
        engine.step((a, 10))
        calls: dict[str, Callable[[], None]] = {
            "retire": lambda manager=manager: manager.retire(wrong, slots),
            "move": lambda manager=manager: manager.move(wrong, slots, slots + 3, owner=1),
            "unverify": lambda manager=manager: manager.unverify(wrong, slots),
            "arrived": lambda manager=manager: manager.arrived(wrong, slots, None),
        }
        for op, call in calls.items():
            if mode == "raise":
                with pytest.raises(
                    ValueError, match=rf"{op}: pool must be one of the canary's pools \(pool\), got {got}"
                ):
                    call()
            else:
                call()
        engine.step((a, 3))
        manager.flush()
        summary = manager.summary()
        assert summary.violations == 0
        assert summary.positions_verified == summary.positions_relied_on == 10
        assert sum(summary.failures.values()) == (0 if mode == "raise" else 4)
    assert torch.equal(others_pool.records, before)


@pytest.mark.parametrize("row", [8, -1, 1 << 40])
def test_the_end_of_a_row_that_is_not_there_is_refused(row: int) -> None:
    engine = full_engine(mode="raise", seals="layer")
    with pytest.raises(ValueError, match=rf"row_ended: row must be in \[1, 8\), got {row}"):
        engine.manager.row_ended(row)
    engine = full_engine(seals="layer")
    engine.manager.guard.contains = True
    engine.manager.row_ended(row)
    assert engine.manager.summary().failures == {"taking in the end of a row: ValueError": 1}


def test_slots_that_are_none_go_no_further() -> None:
    engine = full_engine()
    engine.manager.guard.contains = True
    [pool] = engine.manager.pools
    nothing: Any = None
    engine.manager.retire(pool, nothing)
    engine.manager.move(pool, nothing, nothing, owner=1)
    assert set(engine.manager.summary().failures) == {
        "taking in what was freed: TypeError",
        "taking in what was copied: TypeError",
    }


def test_tokens_that_are_no_integers_are_refused_with_their_request() -> None:
    engine = full_engine(mode="raise")
    a = engine.add("a", 40)
    engine.step((a, 10))
    batch = engine.batch((a, 1))
    [request] = batch.requests
    # Some of them are.
    broken = dataclasses.replace(request, tokens=lambda start, end: [3] * (end - start - 1) + [1.5])
    with pytest.raises(TypeError, match="forward: tokens of a must be integers, got float64"):
        engine.manager.forward("target").begin(dataclasses.replace(batch, requests=[broken]))
