"""The model engine: while it is healthy nothing is found, its books are in order, and all that it can do happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_canary as kc
from kv_canary.backends import implementation
from kv_canary.difftest.simulator import (
    ENGINE_OPS,
    FAULTS,
    Action,
    Call,
    Engine,
    EngineConfig,
    GroupConfig,
    Memory,
    Request,
    corrupt,
    perform,
)
from kv_canary.difftest.simulator.actions import random_action
from kv_canary.difftest.simulator.prefix_cache import PrefixCache
from kv_canary.difftest.strategies.engine import engine_cases, engine_configs
from kv_canary.specs import get_spec

# A history takes about half a second.
examples = settings(max_examples=max(1, settings.default.max_examples // 10))
STEPS = 60


def config(**changes: object) -> EngineConfig:
    """Full attention and a window behind a LUT, over K and V."""
    slots = 2 + 60 * 2
    k, v = (
        kc.KvSource(layers=(torch.zeros(slots, 24, dtype=torch.uint8),), page_size=1, bytes_per_token=24)
        for _ in range(2)
    )
    groups = (
        GroupConfig(kind="full", num_slots=slots, k_source=k),
        GroupConfig(kind="lut", num_slots=62, window=6, v_source=v),
    )
    plain = EngineConfig(groups=groups, page_size=2, num_pages=60, first_slot=2, max_rows=5, max_len=40)
    return replace(plain, **changes)  # type: ignore[arg-type]


RINGS = {"groups": (GroupConfig(kind="ring", num_slots=1 + 4 * 7, window=6),), "prefix_cache": False}


def run(engine: Engine, calls: Iterator[Call]) -> list[tuple[str, dict]]:
    """Make the calls on the engine's first memory with the reference; return them."""
    made = []
    for call in calls:
        arguments = call.arguments(engine.memories[0])
        assert get_spec(call.op).has_one_outcome(arguments)
        implementation(call.op, "reference")(**arguments)
        made.append((call.op, arguments))
    return made


def started(**changes: object) -> tuple[Engine, Memory]:
    engine = Engine(config(**changes))
    return engine, engine.new_memory()


def arrived(engine: Engine, *, shared: int = 0, fresh: int = 9, stem: int = 0) -> Request:
    request = engine.arrive(stem=stem, shared=shared, fresh=fresh)
    assert engine.admit(request)
    return request


def prefill(engine: Engine, request: Request) -> list[tuple[str, dict]]:
    return run(engine, engine.step({request: engine.remaining(request)}))


@examples
@given(drawn=engine_configs(max_lens=(24, 40, 300)), seed=st.integers(0, 2**32 - 1))
def test_healthy_engine_has_no_violations(drawn: EngineConfig, seed: int) -> None:
    engine, rng = Engine(drawn), np.random.default_rng(seed)
    memory = engine.new_memory()
    for _ in range(STEPS):
        for op, arguments in run(engine, perform(engine, random_action(rng, longest=drawn.max_len))):
            if op == "plan":
                # Bits for bad tables must stay off; a plan may be too small.
                assert int(arguments["status"]) & ~kc.Status.OVERFLOW == 0
        assert int(memory.violations.count) == 0, memory.violations.ring[:1].tolist()
        engine.check_integrity()


def test_a_step_makes_its_calls_in_order() -> None:
    engine, _ = started(token_pool=True)
    made = prefill(engine, arrived(engine))
    ops = [op for op, _ in made]
    head = ["plan", "verify"] * 2
    assert ops[: len(head) + 1] == ["chain_tails", *head]
    assert ops[len(head) + 1 :][:4] == ["write", "verify"] * 2


def test_a_fused_step_makes_its_calls_in_order() -> None:
    engine, memory = started(token_pool=True, fused=True)
    request = arrived(engine)
    for _ in range(2):
        made = run(engine, engine.step({request: max(engine.remaining(request), 1)}))
        ops = [op for op, _ in made if op != "retire"]
        assert ops == ["chain_tails", *["verify_prefixes"] * 2, *["write", "verify_resolved"] * 2]
    # In the second step nine positions in the pool, of which six behind the LUT; ten tokens are written.
    assert memory.counters[[kc.Tag.HEAD_FULL, kc.Tag.HEAD_SWA]].tolist() == [[2, 9], [2, 6]]
    assert memory.counters[[kc.Tag.TAIL_FULL, kc.Tag.TAIL_SWA]].tolist() == [[4, 9 + 10], [4, 6 + 10]]
    assert int(memory.violations.count) == 0


def test_where_tail_has_a_plan_of_its_own_nothing_is_fused() -> None:
    engine, _ = started(**RINGS, fused=True)
    made = prefill(engine, arrived(engine, fresh=12))
    assert {op for op, _ in made} == {"chain_tails", "plan", "verify", "write"}


@examples
@given(drawn=engine_configs(max_lens=(24, 40, 300)), seed=st.integers(0, 2**32 - 1))
def test_a_fused_engine_finds_what_one_that_plans_finds(drawn: EngineConfig, seed: int) -> None:
    found = []
    for fused in (False, True):
        rng = np.random.default_rng(seed)
        engine = Engine(replace(drawn, fused=fused, ring_cap=4096))
        memory = engine.new_memory()
        for i in range(STEPS // 2):
            if i == STEPS // 4:
                for kind in ("record", "kv_byte", "table_entry", "lut_entry"):
                    corrupt(engine, kind, pick=int(rng.integers(1000)), value=int(rng.integers(-3, 400)))
            for call in perform(engine, random_action(rng, longest=drawn.max_len)):
                implementation(call.op, "reference")(**call.arguments(memory))
        count = int(memory.violations.count)
        assert count <= 4096
        rows = Counter(map(tuple, memory.violations.ring[:count].tolist()))
        records = [r.tolist() for group in memory.groups.values() for r in group.records]
        found.append((rows, memory.counters.tolist(), memory.tails.tolist(), records))
    assert found[0] == found[1]


def test_ring_plans_twice_and_wraps() -> None:
    engine, memory = started(**RINGS)
    request = arrived(engine, fresh=12)
    made = prefill(engine, request)
    assert [a["after_write"] for op, a in made if op == "plan"] == [False, True]
    [write] = [a for op, a in made if op == "write"]
    # Of twelve tokens the ring of seven keeps the last; the others go to the padding slot.
    assert (write["out_slots"] == 0).tolist() == [True] * 5 + [False] * 7
    for _ in range(9):
        run(engine, engine.step({request: 1}))
    assert int(memory.violations.count) == 0
    assert int(memory.counters[kc.Tag.TAIL_SWA, 1]) > 0


def test_prefixes_are_shared_and_computed_once() -> None:
    engine, _ = started()
    first = arrived(engine, shared=12)
    prefill(engine, first)
    second = arrived(engine, shared=12)
    assert second.cached == 12
    assert second.pages == first.pages[:6]
    assert engine.table[second.row, :12].tolist() == engine.table[first.row, :12].tolist()


def test_same_prompts_in_one_step_end_up_on_the_same_pages() -> None:
    engine, memory = started()
    both = [arrived(engine, shared=12, fresh=2) for _ in range(2)]
    made = run(engine, engine.step(dict.fromkeys(both, 14)))
    assert both[0].pages[:6] == both[1].pages[:6]
    assert [op for op, _ in made].count("retire") == 2
    run(engine, engine.step(dict.fromkeys(both, 1)))
    assert int(memory.violations.count) == 0


def test_windows_are_left_and_matching_needs_them() -> None:
    engine, _ = started()
    request = arrived(engine, shared=30, fresh=1)
    prefill(engine, request)
    [lut] = engine.luts
    assert len(lut.resident) == 16
    run(engine, engine.leave_windows(cached_too=True))
    # Six positions before 31 begin at 25, in page 12.
    assert set(lut.resident) == set(request.pages[12:])
    assert int((lut.lookup[engine.pages.slots(request.pages)] == 0).sum()) == 24
    # A shorter prefix would begin with positions that the window no longer has.
    late = arrived(engine, shared=20, fresh=1)
    assert late.cached == 0


def test_fork_copies_the_last_page_only() -> None:
    engine, memory = started()
    parent = arrived(engine)
    prefill(engine, parent)
    made = run(engine, engine.fork(parent))
    child = engine.running[-1]
    assert child.cached == parent.cached == 9
    assert child.pages[:4] == parent.pages[:4]
    assert child.pages[4] != parent.pages[4]
    moves = [a for op, a in made if op == "move"]
    assert [len(m["src"]) for m in moves] == [2, 2]
    assert {m["owner"] for m in moves} == {child.owner}
    run(engine, engine.step({parent: 1, child: 1}))
    assert int(memory.violations.count) == 0


def test_rejected_drafts_never_enter_tails() -> None:
    engine, memory = started(page_size=1)
    request = arrived(engine)
    prefill(engine, request)
    made = run(engine, engine.step({request: 5}, accepted={request: 2}))
    assert request.cached == 11
    # The slots of three drafts are freed at once.
    assert sum(len(a["slots"]) for op, a in made if op == "retire") >= 3
    [tails] = [a for op, a in run(engine, engine.step({request: 1})) if op == "chain_tails"]
    assert tails["flat"].tolist() == request.tokens[9:11]
    assert int(memory.violations.count) == 0


def test_retracted_request_comes_back_with_its_tokens() -> None:
    engine, memory = started(prefix_cache=False)
    request = arrived(engine)
    prefill(engine, request)
    run(engine, engine.step({request: 1}))
    tokens = list(request.tokens)
    run(engine, engine.retract(request))
    assert (request.row, request.cached, engine.waiting) == (0, 0, [request])
    assert engine.admit(request)
    prefill(engine, request)
    assert request.tokens == tokens
    assert request.cached == 10
    assert int(memory.violations.count) == 0


def test_compaction_moves_private_pages() -> None:
    engine, memory = started(prefix_cache=False)
    request = arrived(engine)
    prefill(engine, request)
    before = list(request.pages)
    made = run(engine, engine.compact(request))
    assert set(before).isdisjoint(request.pages)
    assert [op for op, _ in made] == ["move", "retire"]
    run(engine, engine.step({request: 1}))
    assert int(memory.violations.count) == 0
    engine.check_integrity()


def test_whole_prompts_rewrite_their_last_token_one_at_a_time() -> None:
    engine, memory = started(rewrite_matched=True)
    first = arrived(engine, shared=8, fresh=0)
    prefill(engine, first)
    again = [arrived(engine, shared=8, fresh=0) for _ in range(2)]
    assert [r.cached for r in again] == [7, 7]
    run(engine, engine.step(dict.fromkeys(again, 1)))
    # Which of two writers a record names would be undefined, so the second waits.
    assert [r.cached for r in again] == [8, 7]
    run(engine, engine.step({again[1]: 1}))
    assert again[1].cached == 8
    assert int(memory.violations.count) == 0


def test_padding_goes_to_row_and_slot_0() -> None:
    engine, memory = started()
    request = arrived(engine)
    made = run(engine, engine.step({request: 9}, padding=3))
    [plan, _] = [a for op, a in made if op == "plan"]
    assert plan["rows"].tolist() == [request.row, 0, 0, 0]
    for op, arguments in made:
        if op == "write":
            assert arguments["out_slots"][-3:].tolist() == [0, 0, 0]
    assert memory.groups["full"].records[0][0].tolist() == [0] * 4


def test_flush_heals() -> None:
    engine, memory = started()
    prefill(engine, arrived(engine))
    corrupt(engine, "record", pick=4, value=2)
    engine.flush()
    assert engine.healthy
    assert not memory.groups["full"].records[0].any()
    prefill(engine, arrived(engine))
    assert int(memory.violations.count) == 0


@pytest.mark.every_day("table_entry", "kv_byte", "record")
@pytest.mark.parametrize("kind", FAULTS)
def test_every_fault_can_be_found(kind: str) -> None:
    found = 0
    for pick in range(40):
        engine, memory = started(token_oracle=True)
        for _ in range(2):
            prefill(engine, arrived(engine, fresh=12))
        for _ in range(2):
            run(engine, engine.step(dict.fromkeys(engine.running, 1)))
        corrupt(engine, kind, pick=pick, value=[7, -1, 1 << 40][pick % 3])
        for _ in range(3):
            for action in (Action(kind="arrive", pick=1, amount=9), Action(kind="mixed", amount=20)):
                for call in perform(engine, action):
                    implementation(call.op, "reference")(**call.arguments(memory))
        assert not engine.healthy
        found += int(memory.violations.count) > 0
        if found:
            break
    assert found > 0


def test_integrity_sees_a_page_that_is_free_and_held() -> None:
    engine, _ = started()
    prefill(engine, arrived(engine))
    engine.check_integrity()
    corrupt(engine, "double_free", pick=0, value=0)
    with pytest.raises(RuntimeError, match="free pages must be"):
        engine.check_integrity()


@pytest.mark.parametrize("kind", ["table_entry", "lut_entry"])
def test_integrity_sees_a_wrong_table(kind: str) -> None:
    engine, _ = started()
    prefill(engine, arrived(engine))
    corrupt(engine, kind, pick=2, value=-3)
    with pytest.raises(RuntimeError, match=r"(table|lut) must be"):
        engine.check_integrity()


def test_cache_forgets_leaves_used_longest_ago_first() -> None:
    cache = PrefixCache(2)
    everything = {"usable": lambda page: True}
    cache.insert(0, [1, 2, 3, 4], [10, 11], **everything)
    cache.insert(0, [1, 2, 5, 6], [10, 12], **everything)
    assert cache.match(0, [1, 2, 3, 4, 7]) == [10, 11]
    assert cache.match(1, [1, 2]) == []
    assert cache.insert(0, [1, 2, 3, 4], [20, 21], **everything) == ([10, 11], [])
    assert [cache.evict(idle=lambda page: True) for _ in range(4)] == [12, 11, 10, None]
    assert cache.pages() == []


def test_every_memory_gets_the_same_arguments() -> None:
    engine = Engine(config())
    memories = [engine.new_memory() for _ in range(2)]
    request = arrived(engine)
    for call in engine.step({request: 9}):
        given = [call.arguments(memory) for memory in memories]
        for leaf, other in zip(*(list(get_spec(call.op).leaves(a)) for a in given), strict=True):
            assert torch.equal(leaf.tensor, other.tensor)
        for arguments in given:
            implementation(call.op, "reference")(**arguments)


@pytest.mark.parametrize("op", ENGINE_OPS)
def test_engine_cases_are_whole_and_defined(op: str) -> None:
    seen: Counter[bool] = Counter()

    @examples
    @given(case=engine_cases(op))
    def check(case: dict) -> None:
        assert get_spec(op).bind(case)
        assert get_spec(op).has_one_outcome(get_spec(op).bind(case))
        seen[any(leaf.tensor.numel() > 8 for leaf in get_spec(op).leaves(case))] += 1

    check()
    assert seen[True]


@pytest.mark.parametrize(
    ("dst", "defined"), [([1, 2], True), ([2, 2], False), ([0, 0], True), ([9, 9], True), ([-1, -1], True)]
)
def test_a_move_to_the_same_slot_twice_is_undefined(dst: list[int], defined: bool) -> None:
    given = {"dst": torch.tensor(dst), "records": (torch.zeros(9, 4, dtype=torch.int64),)}
    assert get_spec("move").has_one_outcome(given) is defined


def test_serials_are_never_reused() -> None:
    engine, _ = started()
    serials = [engine.arrive(stem=0, shared=0, fresh=3).serial for _ in range(4)]
    assert all(a < b for a, b in pairwise(serials))
