"""The canary over SGLang's real pools and allocators: no false alarm, and every covered byte that changes is found."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_canary as kc

from .pool_engine import MAX_LEN, SIZE, WINDOW, PoolEngine, Request, lived_in
from .pool_kinds import CASES, KINDS

WHOLE_AND_DEFAULT = [("whole", {}), ("default", {"read_bytes": 16})]
EVERY_CELL = [(name, page, *cell) for name, page in CASES for cell in KINDS[name].cells]


@functools.cache
def engine_of(name: str, page: int, coverage: str) -> tuple[PoolEngine, Request]:
    """Return an engine that tests share: each of them leaves its bytes as they were."""
    return lived_in(KINDS[name], page, **dict(WHOLE_AND_DEFAULT)[coverage])


def readable(engine: PoolEngine, group: kc.BufferGroup, request: Request) -> range:
    """The positions that a forward of the request reads in a group."""
    return range(max(0, request.cached - WINDOW) if group.window else 0, request.cached)


def look(engine: PoolEngine, request: Request) -> list[kc.ViolationReport]:
    """Let a forward read what the request has, and return what HEAD has found."""
    engine.step((request, 0))
    return [r for r in engine.found() if r.tag.startswith("HEAD")]


def of_group(report: kc.ViolationReport, name: str) -> bool:
    """Whether a report may mean the group: two over the same slots, as data and scales, share their tags."""
    return name in report.group.split(" or ")


@pytest.mark.parametrize(("name", "page"), CASES)
@pytest.mark.parametrize(("coverage", "options"), WHOLE_AND_DEFAULT)
def test_a_healthy_life_is_clean_and_wholly_verified(name: str, page: int, coverage: str, options: dict) -> None:
    engine, request = lived_in(KINDS[name], page, **options)
    look(engine, request)
    summary = engine.manager.summary()
    assert [r.sentence for r in engine.found()] == []
    assert summary.violations == 0
    assert summary.watching == "complete"
    assert summary.positions_verified == summary.positions_relied_on > 400 * len(engine.groups) / 3


@pytest.mark.parametrize(("name", "page", "group_name", "half"), EVERY_CELL)
def test_one_changed_byte_in_the_first_a_middle_and_the_last_layer(
    name: str, page: int, group_name: str, half: str
) -> None:
    engine, request = engine_of(name, page, "whole")
    cell = KINDS[name].cells[group_name, half]
    group = engine.group(group_name)
    source = group.pool.k_source if half == "K" else group.pool.v_source
    count = len(source.layers)
    for layer in {0, count // 2, count - 1}:
        position = next(p for p in reversed(readable(engine, group, request)) if p % count == layer)
        slot = engine.slot_of(group, request, position)
        assert source.coverage(position) == (layer, 0, source.bytes_per_token)
        for byte in {0, source.bytes_per_token // 2, source.bytes_per_token - 1}:
            cell(engine.pool, layer, slot)[byte] ^= 4
            [report] = look(engine, request)
            cell(engine.pool, layer, slot)[byte] ^= 4
            assert of_group(report, group_name)
            assert (report.slot, report.position, report.reasons) == (slot, position, (half,))
            if report.group == group_name:
                place = f"{half} of {group.pool.layer_names[layer]}, bytes 0 to {source.bytes_per_token}"
                assert report.places == (place,)
    assert look(engine, request) == []


@settings(max_examples=max(30, settings.default.max_examples // 4))
@given(data=st.data())
def test_a_changed_byte_is_found_if_and_only_if_it_is_covered(data: st.DataObject) -> None:
    name, page, group_name, half = data.draw(st.sampled_from(EVERY_CELL))
    engine, request = engine_of(name, page, "default")
    group = engine.group(group_name)
    source = group.pool.k_source if half == "K" else group.pool.v_source
    position = data.draw(st.sampled_from(list(readable(engine, group, request))))
    covered, start, end = source.coverage(position)
    layer, byte = data.draw(
        st.one_of(
            st.tuples(st.just(covered), st.integers(start, end - 1)),
            st.tuples(st.integers(0, len(source.layers) - 1), st.integers(0, source.bytes_per_token - 1)),
        )
    )
    slot = engine.slot_of(group, request, position)
    cell = KINDS[name].cells[group_name, half](engine.pool, layer, slot)
    bit = data.draw(st.integers(0, 7))
    assert len(cell) == source.bytes_per_token
    cell[byte] ^= 1 << bit
    try:
        found = look(engine, request)
    finally:
        cell[byte] ^= 1 << bit
    visible = layer == covered and start <= byte < end
    assert all(of_group(r, group_name) for r in found)
    assert [(r.slot, r.position, r.reasons) for r in found] == ([(slot, position, (half,))] if visible else [])


@pytest.mark.parametrize(("name", "page"), [case for case in CASES if case[1] == 16])
def test_a_page_of_zeroes_is_found_in_every_slot(name: str, page: int) -> None:
    engine, request = lived_in(KINDS[name], page)
    # The last whole page that a forward still reads, in windows too.
    first = (request.cached - WINDOW) // page * page if KINDS[name].windowed else page
    read = range(first, first + page)
    expected: Counter[tuple[bool, int, str]] = Counter()
    for (group_name, half), cell in KINDS[name].cells.items():
        group = engine.group(group_name)
        for position in read:
            for layer in range(len(group.pool.layer_names)):
                cell(engine.pool, layer, engine.slot_of(group, request, position)).zero_()
            if position in readable(engine, group, request):
                expected[group.window > 0, position, half] += 1
    found = look(engine, request)
    assert Counter((r.tag == "HEAD_SWA", r.position, half) for r in found for half in r.reasons) == expected


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("name", ["mha", "mla", "v4_uniform"])
def test_a_pool_that_is_full_to_its_last_slot_is_clean(name: str, page: int) -> None:
    engine = PoolEngine(KINDS[name], page)
    for request in [engine.add(f"{i}", MAX_LEN) for i in range(SIZE // MAX_LEN)]:
        engine.step((request, MAX_LEN - 1))
        engine.step((request, 1))
    assert engine.allocator.available_size() == 0
    assert engine.table.max() == SIZE + page - 1
    assert [r.sentence for r in engine.found()] == []


@pytest.mark.parametrize("page", [1, 16])
def test_windows_move_on_over_slots_that_are_used_again(page: int) -> None:
    engine = PoolEngine(KINDS["swa"], page)
    used: list[int] = []
    for turn in range(6):
        a, b = engine.add(f"a{turn}", 110), engine.add(f"b{turn}", 100)
        for count in (30, 1, 1, 40, 1, 17, 1, 1):
            engine.step((a, count), (b, 3))
            for request in (a, b):
                used += engine.leave_window(request).tolist()
        engine.finish(a)
        engine.finish(b)
    assert [r.sentence for r in engine.found()] == []
    # Slots of the sliding pool have come round.
    assert len(used) > len(set(used)) > 0
    summary = engine.manager.summary()
    assert summary.positions_verified == summary.positions_relied_on > 0


@pytest.mark.parametrize("page", [1, 16])
def test_a_window_taken_back_too_early_is_unmapped(page: int) -> None:
    engine, a = _windowed(page)
    full = engine.table[a.row, 32:48].long()
    engine.allocator.free_swa(full)
    found = look(engine, a)
    assert {(r.group, r.position, r.reasons) for r in found} == {
        ("swa", p, ("UNMAPPED",)) for p in range(a.cached - WINDOW, 48)
    }


@pytest.mark.parametrize("page", [1, 16])
def test_a_stale_entry_of_the_window_s_table_is_found_before_and_after_the_slot_is_used_again(page: int) -> None:
    engine, a = _windowed(page)
    full = engine.table[a.row, 32:48].long()
    lut = engine.pool.full_to_swa_index_mapping
    stale = lut[full].clone()
    engine.retire(engine.group("swa"), stale, owner=a.owner)
    engine.allocator.free_swa(full)
    lut[full] = stale
    window = set(range(a.cached - WINDOW, 48))
    assert {(r.group, r.position, r.reasons) for r in look(engine, a)} == {("swa", p, ("FREED",)) for p in window}
    taken: set[int] = set()
    for i in range(8):
        other = engine.add(f"{i}", 60)
        engine.step((other, 60))
        taken |= set(lut[engine.table[other.row, :60].long()].tolist())
        if set(stale.tolist()) <= taken:
            break
        engine.finish(other)
    assert set(stale.tolist()) <= taken
    found = look(engine, a)
    slots = {engine.slot_of(engine.group("swa"), a, p): p for p in window}
    assert {(r.group, r.position) for r in found if r.slot in slots} == {("swa", p) for p in window}
    assert all({"TOKEN", "FREED"} & set(r.reasons) for r in found if r.slot in slots)


def _windowed(page: int) -> tuple[PoolEngine, Request]:
    """Return an engine with a request of 50 cached tokens, whose window begins at 38."""
    engine = PoolEngine(KINDS["swa"], page, config={"check_tokens": True})
    a = engine.add("a", 100)
    engine.step((a, 49))
    engine.step((a, 1))
    return engine, a
