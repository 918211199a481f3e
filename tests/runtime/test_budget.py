"""What a step verifies: everything at first sight, then all of it within so many steps, whatever requests do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_canary as kc
from kv_canary.constants import STRIDE_BLOCK
from kv_canary.runtime.batch import relied_on
from kv_canary.runtime.budget import Budget, StepCost
from kv_canary.runtime.composition import BatchRequests

from .engine import MAX_LEN, MAX_ROWS, Engine, Request, full_engine, make_pool
from .test_forward import flip

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def planned(engine: Engine, name: str = "full") -> dict[int, set[int]]:
    """Return the positions that the last HEAD verified, by row."""
    entries = engine.forward.verified(name)
    found: dict[int, set[int]] = {}
    rows, positions = (column[entries.valid].tolist() for column in (entries.rows, entries.positions))
    for row, position in zip(rows, positions, strict=True):
        found.setdefault(row, set()).add(position)
    return found


class Watch:
    """When each position of each request was verified last, counted in steps of the engine."""

    def __init__(self, engine: Engine, stride: int) -> None:
        self.engine, self.stride = engine, stride
        self.last: dict[tuple[str, int], int] = {}
        # Of each request, its last step and how many positions it had then.
        self.seen: dict[str, tuple[int, int]] = {}

    def step(self, work: Sequence[tuple[Request, int]]) -> None:
        cached = {r.name: r.cached for r, _ in work}
        self.engine.step(*work)
        now, found = self.engine.manager.step, planned(self.engine)
        for request, _ in work:
            name, prefix, verified = request.name, cached[request.name], found.get(request.row, set())
            assert verified <= set(range(prefix))
            step, length = self.seen.get(name, (-1, 0))
            if step != now - 1 or prefix > length:
                assert verified == set(range(prefix)), f"{name} came or came back, and was verified in part"
            for p in verified:
                self.last[name, p] = now
            for p in range(prefix):
                # What it wrote in the step before counts from there.
                age = now - self.last.setdefault((name, p), now - 1)
                assert age < self.stride, f"position {p} of {name} waited for {age + 1} steps"
            assert prefix == 0 or prefix - 1 in verified
            self.seen[name] = (now, request.cached)


def share(engine: Engine, source: Request, request: Request, count: int) -> None:
    """Let the request go on from the first `count` cached tokens of another, whose text is its own that far."""
    engine.tables["full"][request.row, :count] = engine.tables["full"][source.row, :count]
    request.cached = count


@settings(max_examples=max(1, settings.default.max_examples // 10))
@given(stride=st.sampled_from([1, 2, 3, 5, 8]), changes=st.booleans(), seed=st.integers(0, 1 << 30))
def test_every_position_is_verified_at_first_sight_and_then_every_stride_steps(
    stride: int, changes: bool, seed: int
) -> None:
    rng = random.Random(seed)
    engine = Engine(
        [kc.BufferGroup(name="full", pool=make_pool(2000))], kc.CanaryConfig(backend="reference", stride=stride)
    )
    watch, live = Watch(engine, stride), []
    text = [rng.randrange(1000) for _ in range(MAX_LEN)]
    for i in range(24):
        if changes and stride == 8:
            # As a budget that chooses may do: rotations of powers of two are part of each other.
            engine.manager.budget.stride = rng.choice([1, 2, 4, 8])
        if i == 0 or (len(live) < 6 and rng.random() < 0.4):
            request = engine.add(f"request {i}", text[:90] + [i] * (MAX_LEN - 90), row=free_row(live, rng))
            source = rng.choice(live) if live else None
            if source is not None and rng.random() < 0.7:
                # A prefix that the cache holds, of a text that all of them begin with.
                share(engine, source, request, min(source.cached, 90, rng.randrange(90)))
            live.append(request)
        if len(live) > 1 and rng.random() < 0.15:
            # It goes, and its row is another's.
            live.remove(rng.choice(live))
        resumed = rng.choice(live)
        if rng.random() < 0.1 and resumed.cached < 60 and len(live) > 1:
            # In mid-life more of its text turns out to be cached.
            source = max(live, key=lambda r: r.cached)
            if resumed.cached < source.cached <= 90:
                share(engine, source, resumed, source.cached)
        work = rng.sample(live, rng.randrange(1, min(4, len(live)) + 1))
        watch.step([(r, min(rng.choice([1, 1, 1, 16]), MAX_LEN - r.cached)) for r in work])
    assert [r.sentence for r in engine.found()] == []
    summary = engine.manager.summary()
    assert summary.positions_verified <= summary.positions_relied_on
    assert stride > 1 or summary.positions_verified == summary.positions_relied_on


def free_row(live: list[Request], rng: random.Random) -> int:
    return rng.choice([row for row in range(1, MAX_ROWS) if row not in {r.row for r in live}])


@settings(max_examples=max(1, settings.default.max_examples // 20))
@given(stride=st.sampled_from([2, 3, 7]), position=st.integers(0, 99), wait=st.integers(0, 9))
def test_a_changed_byte_is_reported_within_stride_steps(stride: int, position: int, wait: int) -> None:
    engine = full_engine(stride=stride)
    a = engine.add("a", MAX_LEN)
    engine.step((a, 60))
    engine.step((a, 40))
    for _ in range(wait):
        engine.step((a, 1))
    group = engine.groups[0]
    flip(group, engine.slot_of(group, a, position), position)
    before = engine.manager.step
    for _ in range(stride):
        engine.step((a, 1))
    steps = {r.step for r in engine.found() if r.position == position}
    assert steps
    assert min(steps) <= before + stride


def test_a_stride_saves_what_it_says() -> None:
    engine = full_engine(stride=4)
    a = engine.add("a", MAX_LEN)
    engine.step((a, 48))
    engine.step((a, 48))
    engine.step((a, 1))
    engine.manager.flush()
    before = engine.manager.summary().positions_verified
    counts = []
    for _ in range(4):
        prefix = a.cached
        engine.step((a, 1))
        found = planned(engine)[a.row]
        assert len(found) <= 2 * STRIDE_BLOCK + 1
        counts.append(found - {prefix - 1})
    assert set().union(*counts) >= set(range(96))
    assert sum(len(c) for c in counts) < 96 + 8
    engine.manager.flush()
    assert engine.manager.summary().positions_verified - before <= 96 + 12


def test_a_request_that_waited_is_verified_wholly_when_it_returns() -> None:
    engine = full_engine(stride=8)
    a, b = engine.add("a", 100), engine.add("b", 100)
    engine.step((a, 64), (b, 0))
    engine.step((a, 1), (b, 16))
    engine.step((a, 1), (b, 1))
    assert len(planned(engine)[a.row]) < 65
    engine.step((b, 1))
    engine.step((a, 1), (b, 1))
    assert planned(engine)[a.row] == set(range(66))


def strides(budget: Budget, forward: str, requests: list[kc.ForwardRequest], *, step: int) -> list[int]:
    return budget.strides(forward, BatchRequests.of(requests), step=step).tolist()


@pytest.mark.parametrize("change", ["owner", "identity"])
def test_a_row_that_changed_hands_is_verified_wholly(change: str) -> None:
    budget = Budget(kc.CanaryConfig(stride=4), CPU, max_rows=MAX_ROWS)
    first, other = request(), request(**{change: 9})
    assert strides(budget, "target", [first], step=1) == [1]
    assert strides(budget, "target", [first], step=2) == [4]
    assert strides(budget, "target", [other], step=3) == [1]
    assert strides(budget, "target", [other], step=4) == [4]


def request(**changes: Any) -> kc.ForwardRequest:
    given = {"request_id": "a", "row": 1, "owner": 1, "prefix_len": 4, "extend_len": 1, "tokens": lambda a, b: []}
    return kc.ForwardRequest(**{**given, **changes})


def test_each_forward_has_a_rotation_of_its_own() -> None:
    """What one forward of a step has verified lies in other groups than what another one reads."""
    budget = Budget(kc.CanaryConfig(stride=4), CPU, max_rows=MAX_ROWS)
    assert strides(budget, "draft", [request()], step=1) == [1]
    assert strides(budget, "target", [request()], step=2) == [1]
    assert strides(budget, "draft", [request()], step=2) == [4]
    assert strides(budget, "target", [request()], step=3) == [4]
    # Once more in the same step: the same turn.
    assert strides(budget, "target", [request()], step=3) == [4]
    assert strides(budget, "draft", [request()], step=4) == [1]


def test_a_forward_in_which_only_some_take_part_loses_nobody_s_turn() -> None:
    budget = Budget(kc.CanaryConfig(stride=4), CPU, max_rows=MAX_ROWS)
    both = [request(), request(row=2, owner=2)]
    assert strides(budget, "draft", both, step=1) == [1, 1]
    # Several forwards of a name in a step, as drafts are made.
    assert strides(budget, "draft", both[:1], step=1) == [4]
    assert strides(budget, "draft", both, step=2) == [4, 4]


def test_more_in_the_cache_than_was_put_there_is_verified_wholly() -> None:
    budget = Budget(kc.CanaryConfig(stride=4), CPU, max_rows=MAX_ROWS)
    assert strides(budget, "target", [request(prefix_len=4, extend_len=3)], step=1) == [1]
    assert strides(budget, "target", [request(prefix_len=7)], step=2) == [4]
    assert strides(budget, "target", [request(prefix_len=9)], step=3) == [1]
    # Rejected drafts: less than that is as good.
    assert strides(budget, "target", [request(prefix_len=5)], step=4) == [4]


def test_a_forward_that_was_given_up_is_verified_wholly_when_it_is_made_again() -> None:
    budget = Budget(kc.CanaryConfig(stride=4), CPU, max_rows=MAX_ROWS)
    strides(budget, "target", [request()], step=1)
    strides(budget, "other", [request()], step=1)
    budget.forget("target")
    assert strides(budget, "target", [request()], step=2) == [1]
    assert strides(budget, "other", [request()], step=2) == [4]


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("records", ["one", "head_and_tail"])
def test_the_summary_tells_what_was_verified_of_what_was_relied_on(windowed: bool, records: Any) -> None:
    groups = [kc.BufferGroup(name="full", pool=make_pool(256))]
    if windowed:
        groups.append(kc.BufferGroup(name="ring", pool=make_pool(256, name="ring"), window=9, ring=True))
    for stride in (1, 3):
        engine = Engine(groups, kc.CanaryConfig(backend="reference", stride=stride, records=records))
        engine.manager.clear()
        a, b = engine.add("a", 100), engine.add("b", 100)
        relied = verified = 0
        for n in (30, 1, 1, 5, 1, 1):
            work = [(a, n), (b, 2)]
            relied += sum(relied_on_before(r.cached, windowed) for r, _ in work)
            engine.step(*work)
            verified += sum(int(engine.forward.verified(g.name).valid.sum()) for g in engine.groups)
        assert engine.found() == []
        summary = engine.manager.summary()
        assert (summary.positions_relied_on, summary.positions_verified) == (relied, verified)
        assert (verified == relied) == (stride == 1)
        assert summary.stride == stride


def relied_on_before(cached: int, windowed: bool) -> int:
    return cached + (min(cached, 9) if windowed else 0)


def test_what_a_forward_relies_on_is_what_is_there_of_its_window() -> None:
    full, ring = kc.BufferGroup(name="full", pool=make_pool(8)), kc.BufferGroup(name="w", pool=make_pool(8), window=5)
    wanted = {(0, 0): (0, 0), (3, 0): (3, 3), (9, 0): (9, 5), (9, 2): (7, 3), (9, 7): (2, 0), (9, 9): (0, 0)}
    for (prefix, pending), (in_full, in_window) in wanted.items():
        r = BatchRequests.of([request(prefix_len=prefix, pending=pending)])
        assert (relied_on(r, full), relied_on(r, ring)) == (in_full, in_window)


def test_a_stride_that_is_given_is_kept() -> None:
    for device in (CPU, GPU):
        budget = Budget(kc.CanaryConfig(stride=4), device, max_rows=MAX_ROWS)
        assert not budget.chooses
        assert budget.may_skip
        budget.cost = StepCost(fixed=9.0, entry=9.0)
        for i in range(100):
            budget.observe(relied_on=1000, now=float(i))
        assert budget.stride == 4


def test_a_cpu_never_skips_by_itself() -> None:
    budget = Budget(kc.CanaryConfig(), CPU, max_rows=MAX_ROWS)
    assert not budget.chooses
    assert not budget.may_skip
    assert budget.stride == 1


def chosen(entry: float, *, target: float = 0.01, longest: int = 32, fixed: float = 0.0, steps: int = 64) -> list[int]:
    """Return the strides that are chosen, step by step of one second each, in which 1000 positions are relied on."""
    budget = Budget(kc.CanaryConfig(overhead_target=target, max_stride=longest), GPU, max_rows=MAX_ROWS)
    assert budget.chooses
    assert budget.may_skip
    budget.cost = StepCost(fixed=fixed, entry=entry)
    strides = []
    for i in range(steps):
        budget.observe(relied_on=1000, now=float(i))
        strides.append(budget.stride)
    return strides


@pytest.mark.parametrize(
    ("entry", "stride"), [(0.0, 1), (1e-5, 1), (1.1e-5, 2), (2e-5, 2), (7e-5, 8), (3.1e-4, 32), (1.0, 32)]
)
def test_the_shortest_stride_that_keeps_to_the_target_is_chosen(entry: float, stride: int) -> None:
    assert chosen(entry)[-1] == stride
    assert chosen(entry)[0] == 1


@pytest.mark.parametrize("longest", [1, 2, 12, 31, 32])
def test_the_longest_stride_is_a_power_of_two_within_the_bound(longest: int) -> None:
    last = chosen(1.0, longest=longest)[-1]
    assert last & (last - 1) == 0
    assert last <= longest < 2 * last


def test_decode_steps_that_follow_each_other_share_one_array_of_strides() -> None:
    """A step in which nobody came, waited or grew by more than a token costs no work for each request."""
    budget = Budget(kc.CanaryConfig(stride=4), CPU, max_rows=MAX_ROWS)
    requests = BatchRequests.of([request(), request(row=2, owner=2, prefix_len=9)])
    assert budget.strides("target", requests, step=1).tolist() == [1, 1]
    found = []
    for step in (2, 3, 4):
        requests = requests.following(requests.ends)
        found.append(budget.strides("target", requests, step=step))
    assert found[0].tolist() == [4, 4]
    assert found[1] is found[0]
    assert found[2] is found[0]
    # Behind a step that went by without them they are verified wholly.
    assert budget.strides("target", requests.following(requests.ends), step=6).tolist() == [1, 1]
