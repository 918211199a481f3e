"""HEAD and TAIL under a graph: replays find and record what eager forwards do, byte for byte."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_canary as kc
from kv_canary.difftest.simulator.scripted_engine import ScriptedEngine
from kv_canary.runtime.launches import GroupLaunches

from .engine import MAX_LEN, MAX_ROWS, Engine, Request, full_engine, make_pool
from .tape import Launches


class Tape:
    """A captured forward of an engine: HEAD, the model and TAIL."""

    def __init__(self, engine: ScriptedEngine, *, requests: int, tokens: int, **options: Any) -> None:
        self.launches = Launches()
        self.engine = engine
        with (
            self.launches.tape(),
            engine.forward.capturing(requests=requests, tokens=tokens, tables=engine.tables, **options) as captured,
        ):
            self.launches.taking = True
            engine.forward.head()
            self.middle = len(self.launches.taken)
            engine.forward.tail()
        self.captured = captured

    def run(self, batch: kc.ForwardBatch) -> None:
        forward = self.engine.forward
        forward.begin(batch, captured=self.captured)
        self.launches.play(end=self.middle)
        self.engine.write_bytes(batch)
        self.launches.play(first=self.middle)
        forward.end()


def groups_of(layout: str) -> list[kc.BufferGroup]:
    full = kc.BufferGroup(name="full", pool=make_pool(400, name="full"))
    match layout:
        case "full":
            return [full]
        case "ring":
            return [full, kc.BufferGroup(name="ring", pool=make_pool(400, name="ring"), window=6, ring=True)]
        case _:
            lut = torch.arange(400, dtype=torch.int64)
            return [full, kc.BufferGroup(name="swa", pool=make_pool(400, name="swa"), window=6, lut=lut)]


class Twins:
    """Two engines that live the same life, one of them with captured forwards here and there."""

    def __init__(self, layout: str, *, expects: bool, **options: Any) -> None:
        engines = []
        for _ in range(2):
            torch.manual_seed(0)
            engines.append(Engine(groups_of(layout), kc.CanaryConfig(backend="reference", **options)))
        self.eager, self.captured = engines
        self.expects = expects
        self.requests: list[tuple[Request, Request]] = []
        self.base: torch.Tensor | None = None
        self.tapes: list[Tape] = []

    def capture(self, requests: int, tokens: int) -> None:
        counters = self.captured.manager.state.counters
        before = counters.clone()
        self.tapes.append(Tape(self.captured, requests=requests, tokens=tokens, expects_tokens=self.expects))
        made = counters - before
        # A capture launches what it compiles, on nothing.
        assert int(made[:, 1].sum()) == 0
        self.base = made if self.base is None else self.base + made

    def add(self, name: str, tokens: int) -> None:
        pair = self.eager.add(name, tokens), self.captured.add(name, tokens)
        assert pair[0].row == pair[1].row
        self.requests.append(pair)

    def step(self, work: list[tuple[int, int]], *, tape: int | None, spoil: int = 0) -> None:
        """Extend the requests of these numbers by so many tokens, under the tape of this number in one of the two."""
        for engine, side in ((self.eager, 0), (self.captured, 1)):
            pairs = [(self.requests[i][side], n) for i, n in work]
            batch = engine.batch(*pairs)
            if spoil & 1 and len(batch.positions):
                batch.positions[-1] += 1
            expected = batch.input_ids.clone() if self.expects else None
            if spoil & 2 and len(batch.input_ids):
                batch.input_ids[0] += 1
            batch = dataclasses.replace(batch, expected_input_ids=expected, check_positions=not spoil & 4)
            torch.manual_seed(engine.manager.step)
            if side and tape is not None:
                self.tapes[tape].run(batch)
            else:
                engine.run(batch)
            for request, n in pairs:
                request.cached += n

    def damage(self, which: int, position: int) -> None:
        for engine, side in ((self.eager, 0), (self.captured, 1)):
            request = self.requests[which][side]
            for group in engine.groups:
                if request.cached:
                    slot = engine.slot_of(group, request, position % request.cached)
                    layer, start, _ = group.pool.v_source.coverage(position % request.cached)
                    group.pool.v_source.layers[layer][slot, start] ^= 1

    def check(self) -> None:
        """All that the canary keeps is the same in both."""
        eager, captured = self.eager.manager, self.captured.manager
        for mine, theirs in zip(eager.pools, captured.pools, strict=True):
            for a, b in zip(mine.buffers, theirs.buffers, strict=True):
                assert torch.equal(a, b)
        assert torch.equal(eager.state.violations.count, captured.state.violations.count)
        n = min(int(eager.state.violations.count), len(eager.state.violations.ring))
        assert torch.equal(eager.state.violations.ring[:n], captured.state.violations.ring[:n])
        assert self.base is None or torch.equal(eager.state.counters, captured.state.counters - self.base)
        for offset, tails in eager.state.tails.items():
            assert torch.equal(tails.chains, captured.state.tails[offset].chains)


def live(twins: Twins, rng: random.Random, *, faults: bool) -> None:
    """Let both live through random batches: requests come and go, lengths and tables change."""
    for round_ in range(14):
        if round_ < 2 or (len(twins.requests) < 7 and rng.random() < 0.3):
            twins.add(f"request {len(twins.requests)}", 100)
        if rng.random() < 0.2 and len(twins.tapes) < 3:
            twins.capture(rng.choice([2, 4]), rng.choice([8, 40]))
        if faults and rng.random() < 0.4:
            twins.damage(rng.randrange(len(twins.requests)), rng.randrange(100))
        chosen = rng.sample(range(len(twins.requests)), rng.randrange(1, min(4, len(twins.requests)) + 1))
        work = [(i, rng.choice([1, 1, 2, 5])) for i in chosen]
        fits = [
            i
            for i, t in enumerate(twins.tapes)
            if t.captured.requests >= len(work) and t.captured.tokens >= sum(n for _, n in work)
        ]
        tape = rng.choice(fits) if fits and rng.random() < 0.8 else None
        twins.step(work, tape=tape, spoil=rng.randrange(8) if faults and rng.random() < 0.3 else 0)
        twins.check()


@settings(max_examples=max(1, settings.default.max_examples // 20))
@given(
    layout=st.sampled_from(["full", "ring", "lut"]),
    records=st.sampled_from(["one", "head_and_tail"]),
    stride=st.sampled_from([1, 3]),
    tokens=st.booleans(),
    expects=st.booleans(),
    at_tail=st.booleans(),
    faults=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_replays_and_eager_forwards_leave_the_same_behind(
    layout: str, records: str, stride: int, tokens: bool, expects: bool, at_tail: bool, faults: bool, seed: int
) -> None:
    twins = Twins(
        layout, expects=expects, records=records, stride=stride, check_tokens=tokens, verify_bytes_at_tail=at_tail
    )
    live(twins, random.Random(seed), faults=faults)
    found = [len(engine.found()) for engine in (twins.eager, twins.captured)]
    assert found[0] == found[1]
    assert faults or found[0] == 0
    summaries = [engine.manager.summary() for engine in (twins.eager, twins.captured)]
    assert {s.watching for s in summaries} == {"complete"}
    counts = [(s.positions_relied_on, s.positions_verified, s.violations) for s in summaries]
    assert counts[0] == counts[1]


def captured_engine(*, requests: int = 2, tokens: int = 4, **options: Any) -> tuple[Engine, Tape]:
    engine = full_engine(**options)
    return engine, Tape(engine, requests=requests, tokens=tokens)


def test_a_replay_reads_the_tokens_of_prefixes_that_came_after_the_capture() -> None:
    """The token table keeps its address, however long prefixes become."""
    engine, tape = captured_engine(check_tokens=True, max_reports_per_step=500)
    a = engine.add("a", 120)
    table = engine.manager.state.token_pool
    batch = engine.batch((a, 60))
    engine.run(batch)
    a.cached = 60
    engine.found()
    # The row's own tokens say otherwise than the records.
    a.tokens = [t + 1 for t in a.tokens]
    a.owner += 1
    tape.run(engine.batch((a, 1)))
    assert engine.manager.state.token_pool is table
    found = engine.found()
    assert {r.position for r in found if "TOKEN" in r.reasons and r.tag == "HEAD_FULL"} == set(range(60))


def test_prefixes_past_the_engine_s_limit_do_not_move_what_a_graph_knows() -> None:
    engine, tape = captured_engine(check_tokens=True)
    pool, plan = engine.manager.state.token_pool, tape.launches.taken[0][1]["resolved"]
    a = engine.add("a", 3000)
    wide = torch.zeros(MAX_ROWS, 4096, dtype=torch.int32)
    wide[a.row, :2000] = torch.arange(2000, dtype=torch.int32) % 100 + 1
    tables, engine.tables = engine.tables, {"full": wide}
    a.cached = 2000
    engine.run(engine.batch((a, 1), map_new=False))
    engine.tables = tables
    assert engine.manager.state.token_pool is pool
    engine.manager.flush()
    # It held as much as the limits allow, and said so.
    assert engine.manager.summary().watching == "partial"
    b = engine.add("b", 10)
    tape.run(engine.batch((b, 4)))
    b.cached = 4
    tape.run(engine.batch((b, 1)))
    assert int(plan.num_valid) == 4


def test_a_graph_has_room_for_the_longest_prefixes_that_the_limits_allow() -> None:
    limits = kc.CanaryLimits(max_rows=4, max_requests=2, max_tokens=1300, max_len=700)
    group = kc.BufferGroup(name="full", pool=make_pool(1400))
    engine = ScriptedEngine([group], kc.CanaryConfig(backend="reference"), limits=limits)
    tape = Tape(engine, requests=2, tokens=2)
    a, b = engine.add("a", 700), engine.add("b", 700)
    engine.step((a, 620), (b, 620))
    slot = engine.slot_of(group, b, 619)
    engine.flip(group, "V", slot, 619)
    tape.run(engine.batch((a, 1), (b, 1)))
    assert {(r.slot, r.tag) for r in engine.found()} == {(slot, "HEAD_FULL")}
    summary = engine.manager.summary()
    assert summary.watching == "complete"
    assert summary.positions_verified == summary.positions_relied_on == 1240


def test_a_table_that_moved_is_refused() -> None:
    engine, tape = captured_engine()
    a = engine.add("a", 20)
    batch = engine.batch((a, 2))
    for table in (
        engine.tables["full"].clone(),
        engine.tables["full"][:, :64],
        torch.zeros(MAX_ROWS, MAX_LEN + 1, dtype=torch.int32)[:, 1:],
    ):
        moved = dataclasses.replace(batch, tables={"full": table})
        with pytest.raises(ValueError, match=r"tables\[full\] must be where it was captured, got another tensor"):
            engine.forward.begin(moved, captured=tape.captured)
    assert engine.manager.step == 0
    tape.run(batch)
    assert engine.found() == []


def test_a_batch_larger_than_captured_is_refused() -> None:
    engine, tape = captured_engine(requests=2, tokens=4)
    a, b, c = (engine.add(name, 20) for name in "abc")
    for work, said in (
        ([(a, 1), (b, 1), (c, 1)], "requests must be at most 2 requests, got 3"),
        ([(a, 3), (b, 2)], "requests must be at most 4 new tokens, got 5"),
    ):
        with pytest.raises(ValueError, match=said):
            engine.forward.begin(engine.batch(*work), captured=tape.captured)


@pytest.mark.parametrize("expects", [True, False])
def test_expected_tokens_are_given_as_captured(expects: bool) -> None:
    engine = full_engine()
    tape = Tape(engine, requests=2, tokens=4, expects_tokens=expects)
    batch = engine.batch((engine.add("a", 8), 2))
    other = dataclasses.replace(batch, expected_input_ids=None if expects else batch.input_ids)
    with pytest.raises(ValueError, match=r"expected_input_ids must be .* as captured"):
        engine.forward.begin(other, captured=tape.captured)


def test_pending_tokens_are_refused_with_a_graph() -> None:
    engine, tape = captured_engine()
    a = engine.add("a", 20)
    engine.step((a, 4))
    batch = engine.batch((a, 1))
    request = dataclasses.replace(batch.requests[0], pending=1)
    with pytest.raises(ValueError, match=r"pending of a must be in \[0, 0\], got 1"):
        engine.forward.begin(dataclasses.replace(batch, requests=[request]), captured=tape.captured)


@pytest.mark.parametrize(("requests", "tokens"), [(0, 1), (1, 0), (5, 1), (1, 65), (-1, 1)])
def test_a_capture_larger_than_the_limits_is_refused(requests: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=r"(requests|tokens) must be in \[1, "):
        captured_engine(requests=requests, tokens=tokens)


def test_a_graph_that_is_not_replayed_is_noticed() -> None:
    engine, tape = captured_engine()
    a = engine.add("a", 40)
    for _ in range(2):
        batch = engine.batch((a, 2))
        tape.run(batch)
        a.cached += 2
    assert engine.found() == []
    assert engine.manager.summary().watching == "complete"
    batch = engine.batch((a, 1))
    engine.forward.begin(batch, captured=tape.captured)
    engine.forward.end()
    engine.manager.flush()
    assert engine.manager.summary().watching == "stale"


def test_a_replay_that_stops_behind_head_is_noticed() -> None:
    engine, tape = captured_engine()
    a = engine.add("a", 40)
    tape.run(engine.batch((a, 2)))
    a.cached += 2
    del tape.launches.taken[tape.middle :]
    tape.run(engine.batch((a, 1)))
    engine.manager.flush()
    assert engine.manager.summary().watching == "stale"


@pytest.mark.parametrize("phases", [("head",), ("head", "tail")])
def test_calling_a_phase_of_a_replayed_forward_is_refused_at_its_end(phases: tuple[str, ...]) -> None:
    engine, tape = captured_engine()
    a = engine.add("a", 40)
    engine.forward.begin(engine.batch((a, 2)), captured=tape.captured)
    for phase in phases:
        getattr(engine.forward, phase)()
    with pytest.raises(RuntimeError, match="end must come when the forward is begun"):
        engine.forward.end()
    engine.forward.abort()


@pytest.mark.parametrize("missing", ["head", "tail"])
def test_a_capture_that_leaves_a_phase_out_is_refused(missing: str) -> None:
    engine = full_engine()
    capturing = engine.forward.capturing(requests=1, tokens=1, tables=engine.tables)

    def capture() -> None:
        with capturing:
            if missing == "tail":
                engine.forward.head()

    with pytest.raises(RuntimeError, match="the end of capturing must come when the forward is tail"):
        capture()
    engine.step((engine.add("a", 4), 4))
    assert engine.found() == []


def test_a_replay_that_raised_leaves_the_forward_ready() -> None:
    engine, tape = captured_engine()
    a = engine.add("a", 40)
    batch = engine.batch((a, 2))
    engine.forward.begin(batch, captured=tape.captured)
    engine.forward.abort()
    tape.run(batch)
    a.cached += 2
    engine.step((a, 1))
    assert [r.sentence for r in engine.found()] == []
    assert engine.manager.summary().watching == "complete"


def _serving(*, contains: bool) -> tuple[Engine, Request]:
    """Return an engine that has served, and its request; whether what fails inside the canary stays there."""
    engine = full_engine(check_tokens=True)
    engine.manager.guard.contains = contains
    request = engine.add("a", 60)
    engine.step((request, 8))
    return engine, request


@pytest.mark.parametrize("part", ["_launch_head", "write"])
def test_a_graph_that_a_failed_capture_left_without_head_or_tail_goes_by_unwatched(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, a = _serving(contains=True)
    owner: type = type(engine.forward) if part == "_launch_head" else GroupLaunches
    launch, calls = getattr(owner, part), iter(range(1 << 30))

    def failing(*args: Any, **kwargs: Any) -> Any:
        # The first one is on nothing, before the capture.
        if next(calls):
            raise RuntimeError("no memory, in the canary's own launch")
        return launch(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, part, failing)
        tape = Tape(engine, requests=2, tokens=2)
    for _ in range(3):
        tape.run(engine.batch((a, 1)))
        a.cached += 1
    engine.step((a, 1))
    engine.manager.flush()
    assert [r.sentence for r in engine.found()] == []
    summary = engine.manager.summary()
    assert (summary.skipped, summary.watching) == (3, "partial")


@pytest.mark.parametrize("contains", [False, True])
def test_a_capture_that_cannot_be_prepared_leaves_the_engine_its_graph(
    contains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, a = _serving(contains=contains)

    def failing(_: Any) -> None:
        raise torch.OutOfMemoryError("in the canary's own launch")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.forward), "_launch_tail", failing)
        if not contains:
            with pytest.raises(torch.OutOfMemoryError):
                Tape(engine, requests=2, tokens=2)
        else:
            tape = Tape(engine, requests=2, tokens=2)
            assert not tape.launches.taken
            tape.run(engine.batch((a, 1)))
            a.cached += 1
    engine.step((a, 1))
    engine.manager.flush()
    assert [r.sentence for r in engine.found()] == []
    assert engine.manager.summary().skipped == contains
