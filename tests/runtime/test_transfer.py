"""What a transfer list is, what landing does, and what two processes with messages between them find."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import kv_canary as kc
from kv_canary.constants import OWNER_MASK
from kv_canary.difftest.simulator.transfer import FULL, LAYERS, PAGE, SWA, WINDOW
from kv_canary.difftest.stress import transfer as campaign
from kv_canary.difftest.stress.transfer_faults import FAULTS
from kv_canary.runtime.aside import write_aside
from kv_canary.runtime.tails import anchor_of
from kv_canary.transfer import Landing, buffers, compare_geometry, geometry_word, is_of_the_canary, land

from .engine import BYTES, Engine, full_engine, make_pool

ROOT = Path(__file__).parents[2]


def source(num_rows: int = 8, page_size: int = 4, layers: int = 2, **options: Any) -> kc.KvSource:
    options = {"bytes_per_token": 24, "read_bytes": 8, **options}
    shape = (num_rows, options.get("offset_bytes", 0) + page_size * options["bytes_per_token"])
    tensors = tuple(torch.randint(0, 256, shape, dtype=torch.uint8) for _ in range(layers))
    return kc.KvSource(layers=tensors, page_size=page_size, **options)


def pool_of(k: kc.KvSource | None, v: kc.KvSource | None, *, num_slots: int = 32) -> kc.KvPool:
    pool = kc.KvPool(name="pool", num_slots=num_slots, k_source=k, v_source=v, layer_names=("first",), device="cpu")
    pool.keep_head_records()
    for records in pool.buffers:
        records.copy_(torch.randint(-(1 << 63), (1 << 63) - 1, records.shape))
    return pool


# The transfer list.


def test_heads_records_are_first_and_tails_last_and_both_halves_are_equally_long() -> None:
    pool = pool_of(source(), source())
    entries = buffers(pool)
    assert [e.name for e in entries] == ["HEAD", "K of first", "K of layer 1", "V of first", "V of layer 1", "TAIL"]
    addresses = [t.data_ptr() for t in (pool.head_records, *pool.k_source.layers, *pool.v_source.layers, pool.records)]
    assert [e.address for e in entries] == addresses
    assert [e.item_bytes for e in entries] == [4 * 32, *[4 * 24] * 4, 4 * 32]
    assert {e.num_pages for e in entries} == {8}
    assert all(e.num_bytes == 8 * e.item_bytes == 8 * e.stride_bytes for e in entries)


def test_a_pool_without_v_has_a_list_without_v() -> None:
    assert [e.name for e in buffers(pool_of(source(layers=1), None))] == ["HEAD", "K of first", "TAIL"]


def test_seals_are_sent_with_records_and_both_halves_stay_equally_long() -> None:
    pool = pool_of(source(slot_bias=1), source(slot_bias=1), num_slots=33)
    before = geometry_word(pool)
    pool.keep_seals(by_layer=False, seed=3)
    assert pool.seals is not None
    names = ["HEAD", "SEALS", "K of first", "K of layer 1", "V of first", "V of layer 1", "FILLER", "TAIL"]
    entries = buffers(pool)
    assert [e.name for e in entries] == names
    assert [is_of_the_canary(e) for e in entries] == [True, True, False, False, False, False, True, True]
    assert entries[1].address == pool.seals.words[1].data_ptr()
    assert entries[1].item_bytes == 4 * 8 * pool.seals.words.shape[1]
    assert {e.num_pages for e in entries} == {8}
    # The other side must have seals that are as fine.
    assert geometry_word(pool) != before


@pytest.mark.parametrize("same_geometry", [True, False])
@pytest.mark.parametrize("is_damaged", [True, False])
def test_what_lands_is_held_against_the_seals_that_came_with_it(is_damaged: bool, same_geometry: bool) -> None:
    ours, theirs = (landing_engine(seals="layer", scrub_share=0.0) for _ in range(2))
    sender, receiver = ours.manager.pools[0], theirs.manager.pools[0]
    ours.step((ours.add("a", 16), 12))
    for mine, there in zip(buffers(sender, page_size=4), buffers(receiver, page_size=4), strict=True):
        there.pages.copy_(mine.pages)
    slots = torch.arange(1, 17)
    if is_damaged:
        assert receiver.v_source is not None
        receiver.v_source.layers[1][6, 31] ^= 1
    land(theirs.manager, receiver, slots=slots, length=12, owner=77, same_geometry=same_geometry)
    found = [(r.slot, r.reasons) for r in theirs.found()]
    assert found == ([(6, ("SEAL_V",))] if is_damaged and same_geometry else [])
    theirs.manager.scrub()
    theirs.manager.flush()
    scrub = theirs.manager.summary().scrub
    assert scrub is not None
    # They are of the receiver's records now; without seals that hold, it has none.
    assert (scrub.verified, scrub.unsealed) == ((12, 0) if same_geometry else (0, 12))


@pytest.mark.parametrize("page_size", [4, 8])
@pytest.mark.parametrize("bias", [0, 1])
def test_bytes_copied_by_address_are_the_pages_slots(page_size: int, bias: int) -> None:
    """What a transfer engine does: it copies (address + page * item length, item length), and knows nothing else."""
    ours, theirs = (pool_of(source(slot_bias=bias), source(slot_bias=bias), num_slots=32 + bias) for _ in range(2))
    before = [records.clone() for records in theirs.buffers]
    src, dst = 2, 1
    for a, b in zip(buffers(ours, page_size=page_size), buffers(theirs, page_size=page_size), strict=True):
        ctypes.memmove(b.address + dst * b.item_bytes, a.address + src * a.item_bytes, a.item_bytes)
    slots = torch.arange(page_size) + bias
    for a, b, old in zip(ours.buffers, theirs.buffers, before, strict=True):
        assert torch.equal(b[slots + dst * page_size], a[slots + src * page_size])
        elsewhere = torch.ones(len(b), dtype=torch.bool)
        elsewhere[slots + dst * page_size] = False
        assert torch.equal(b[elsewhere], old[elsewhere])
    for a, b in zip(
        (*ours.k_source.layers, *ours.v_source.layers), (*theirs.k_source.layers, *theirs.v_source.layers), strict=True
    ):
        at = [(slots + page * page_size - bias) for page in (src, dst)]
        assert torch.equal(b.view(-1, 24)[at[1]], a.view(-1, 24)[at[0]])


def test_pages_of_a_pool_with_one_token_in_a_row_are_the_engines() -> None:
    pool = make_pool(22)
    pool.keep_head_records()
    entries = buffers(pool, page_size=4)
    # The last two slots are no whole page.
    assert {e.num_pages for e in entries} == {5}
    assert [e.item_bytes for e in entries] == [128, *[4 * BYTES] * 4, 128]


def test_k_and_v_that_take_turns_in_memory_lie_a_stride_apart() -> None:
    both = torch.zeros(8, 2, 4 * 24, dtype=torch.uint8)
    k, v = (kc.KvSource(layers=(both[:, i],), page_size=4, bytes_per_token=24) for i in range(2))
    _, k_entry, v_entry, _ = buffers(pool_of(k, v))
    assert (k_entry.item_bytes, k_entry.stride_bytes) == (96, 192)
    assert v_entry.address - k_entry.address == 96
    assert k_entry.num_bytes == 7 * 192 + 96
    with pytest.raises(ValueError, match="page_size must be 4, because the rows of the sources lie apart"):
        buffers(pool_of(k, v), page_size=8)


def test_a_pool_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ValueError, match='pool must be of a canary with records="head_and_tail", got pool: one'):
        buffers(make_pool())
    with pytest.raises(ValueError, match="page_size must be a multiple of 4"):
        buffers(pool_of(source(), source()), page_size=6)
    with pytest.raises(ValueError, match="page_size must be a multiple of 4"):
        buffers(pool_of(source(), source()), page_size=2)
    with pytest.raises(ValueError, match="slot_bias must be the same"):
        buffers(pool_of(source(), source(slot_bias=1)))
    with pytest.raises(ValueError, match="slot_bias must be the same for K and V, one of which is there"):
        buffers(pool_of(None, None))


# Geometry.


def test_the_geometry_word_is_the_same_for_ever() -> None:
    assert geometry_word(pool_of(source(), source())) == GEOMETRY


GEOMETRY = 0x501BBD8A820A4627


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (source(layers=3), source()),
        (source(), source(layers=3)),
        (source(bytes_per_token=32), source()),
        (source(), source(read_bytes=16)),
        (source(), None),
        (None, source()),
    ],
)
def test_other_coverage_is_another_geometry(k: kc.KvSource | None, v: kc.KvSource | None) -> None:
    assert geometry_word(pool_of(k, v)) != geometry_word(pool_of(source(), source()))


def test_where_tokens_lie_is_no_part_of_the_geometry() -> None:
    word = geometry_word(pool_of(source(), source()))
    assert geometry_word(pool_of(source(num_rows=3, page_size=12, offset_bytes=8), source())) == word
    # More than a token has is all of it.
    whole = [geometry_word(pool_of(source(read_bytes=n), source(read_bytes=n))) for n in (24, 25, 100)]
    assert len(set(whole)) == 1
    assert whole[0] != word


def test_another_geometry_is_told_once_it_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of(source(), source())
    with caplog.at_level(logging.WARNING, logger="kv_canary"):
        assert compare_geometry(pool, geometry_word(pool))
        assert caplog.records == []
        assert not compare_geometry(pool, geometry_word(pool) ^ 1)
    assert "not covered" in caplog.text


# Landing.


def landing_engine(**options: Any) -> Engine:
    return full_engine(records="head_and_tail", **options)


def test_landing_stamps_what_was_received_and_clears_the_rest_of_the_page() -> None:
    engine = landing_engine()
    pool = engine.manager.pools[0]
    a = engine.add("a", 16)
    engine.step((a, 12))
    before = [records.clone() for records in pool.buffers]
    slots = torch.arange(5, 13)
    assert land(engine.manager, pool, slots=slots, length=6, owner=77) == Landing(received=6, cleared=2, uncovered=0)
    for records, old in zip(pool.buffers, before, strict=True):
        assert torch.equal(records[5:11, :3], old[5:11, :3])
        assert {w & OWNER_MASK for w in records[5:11, 3].tolist()} == {77}
        assert not records[11:13].any()
        assert torch.equal(records[:5], old[:5])
        assert torch.equal(records[13:], old[13:])


def test_slots_that_are_not_resident_are_passed_over() -> None:
    engine = landing_engine()
    pool = engine.manager.pools[0]
    engine.step((engine.add("a", 16), 12))
    land(engine.manager, pool, slots=torch.tensor([0, 3, 0, 5]), length=2, owner=77, same_geometry=False)
    for records in pool.buffers:
        assert not records[0].any()
        assert int(records[3, 3]) & OWNER_MASK == 77
        assert not records[5].any()


@pytest.mark.parametrize("same_geometry", [True, False])
def test_what_was_retired_or_never_came_has_no_record_after_landing(same_geometry: bool) -> None:
    engine = landing_engine()
    pool = engine.manager.pools[0]
    a = engine.add("a", 16)
    engine.step((a, 4))
    engine.manager.retire(pool, torch.tensor([2]), owner=a.owner)
    land(engine.manager, pool, slots=torch.arange(1, 9), length=8, owner=77, same_geometry=same_geometry)
    for records in pool.buffers:
        assert [bool(r.any()) for r in records[1:9]] == [True, False, True, True, False, False, False, False]


@pytest.mark.parametrize("landed", [True, False])
def test_without_landing_what_lies_behind_the_length_looks_like_a_second_owner(landed: bool) -> None:
    """The sender's page goes on behind what the receiver takes over, as with tokens of a rejected draft."""
    sender, receiver = landing_engine(), landing_engine()
    theirs, ours = sender.manager.pools[0], receiver.manager.pools[0]
    sender.next_slot[theirs] = receiver.next_slot[ours] = 4
    sender.rows.owner("somebody")
    sender.step((sender.add("a", [1, 2, 3, 4, 95, 96, 97, 98]), 8))
    for a, b in zip(buffers(theirs, page_size=4), buffers(ours, page_size=4), strict=True):
        b.pages[1:3] = a.pages[1:3]
    request = receiver.add("a", [1, 2, 3, 4, 5, 6, 7, 8])
    receiver.map(request, 0, 4)
    request.cached = 4
    if landed:
        land(receiver.manager, ours, slots=torch.arange(4, 12), length=4, owner=request.owner)
    receiver.step((request, 4))
    expected = set() if landed else {("OVERWRITE", p) for p in range(4, 8)}
    assert {(reason, r.position) for r in receiver.found() for reason in r.reasons} == expected


@pytest.mark.parametrize("owner_of", ["receiver", "sender"])
def test_a_landed_slot_is_its_owners_to_rewrite(owner_of: str) -> None:
    engine = landing_engine()
    a = engine.add("a", [1, 2, 3, 4, 5, 6])
    engine.step((a, 4))
    # The records now are another process's, whose owner 4000 is nobody here.
    slots = torch.arange(1, 5)
    engine.manager.move(engine.manager.pools[0], slots, slots, owner=4000)
    if owner_of == "receiver":
        land(engine.manager, engine.manager.pools[0], slots=slots, length=4, owner=a.owner)
    a.tokens[3], a.cached = 99, 3
    engine.step((a, 2), map_new=False)
    found = {reason for r in engine.found() for reason in r.reasons}
    assert ("OVERWRITE" in found) == (owner_of == "sender")


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("same_geometry", [True, False])
def test_where_geometries_differ_fingerprints_are_taken_of_what_arrived(backend: str, same_geometry: bool) -> None:
    pool = make_pool(read_bytes=8)
    config = kc.CanaryConfig(backend=backend, records="head_and_tail")
    engine = Engine([kc.BufferGroup(name="full", pool=pool)], config)
    # Token 0 at position 0 is a record whose first word is 0.
    a = engine.add("a", [0, *range(1000, 1015)])
    engine.step((a, 12))
    slots = torch.arange(1, 17)
    engine.manager.retire(pool, torch.tensor([12]), owner=a.owner)
    # Other bytes than those whose fingerprints came with them, in every layer and window.
    for layer in (*pool.k_source.layers, *pool.v_source.layers):
        layer[slots] ^= 0x55
    before = [records.clone() for records in pool.buffers]
    landing = land(engine.manager, pool, slots=slots, length=11, owner=a.owner, same_geometry=same_geometry)
    assert landing == Landing(received=11, cleared=5, uncovered=0 if same_geometry else 11)
    for records, old in zip(pool.buffers, before, strict=True):
        assert torch.equal(records[1:12, [0, 1]], old[1:12, [0, 1]])
        assert not records[12:17].any()
    assert torch.equal(pool.head_records[1:12, 2], before[0][1:12, 2])
    assert (pool.records[1:12, 2] != before[1][1:12, 2]).all() != same_geometry
    a.cached = 11
    engine.tables["full"][a.row, 11] = 0
    engine.step((a, 1))
    found = [(r.reasons, r.tag, r.position) for r in engine.found()]
    assert found == ([(("K", "V"), "TAIL_FULL", p) for p in range(11)] if same_geometry else [])
    # From here on they cover what happens.
    pool.v_source.layers[1][4] ^= 1
    engine.step((a, 1))
    assert ("TAIL_FULL", 3) in {(r.tag, r.position) for r in engine.found() if "V" in r.reasons}


def test_landing_reports_nothing_and_counts_nothing() -> None:
    sources = make_pool()
    pool = kc.KvPool(
        name="pool",
        num_slots=128,
        extra_slots=8,
        k_source=sources.k_source,
        v_source=sources.v_source,
        device="cpu",
    )
    engine = Engine([kc.BufferGroup(name="full", pool=pool)], kc.CanaryConfig(records="head_and_tail"))
    engine.step((engine.add("a", 16), 12))
    pool.records[130] = pool.records[7]
    counters, step = engine.manager.state.counters.clone(), engine.manager.step
    # Slots that no source has are the engine's mistake, which its next forward will tell.
    slots = torch.tensor([5, 1 << 40, -7, 6, 130])
    land(engine.manager, pool, slots=slots, length=5, owner=1, same_geometry=False)
    assert torch.equal(engine.manager.state.counters, counters)
    assert int(engine.manager.state.violations.count) == 0
    assert engine.manager.step == step


def test_records_written_aside_are_those_of_a_forward() -> None:
    engine = full_engine()
    [group], manager = engine.groups, engine.manager
    request = engine.add("a", 20)
    batch = engine.batch((request, 20))
    batch = dataclasses.replace(batch, requests=[dataclasses.replace(batch.requests[0], identity=77)])
    engine.run(batch)
    assert engine.found() == []
    by_forward, counted = group.pool.records.clone(), manager.state.counters.clone()
    # What lies there is no reason to report anything.
    group.pool.records[1:] = torch.randint(1, 1 << 60, group.pool.records[1:].shape)
    before = group.pool.records.clone()
    slots = batch.out_slots["full"].clone()
    slots[3] = 0
    write_aside(
        manager.context,
        manager.context.endpoint(group, group.tail_tag, with_bytes=True),
        tokens=batch.input_ids.long(),
        positions=batch.positions.long(),
        slots=slots,
        chain=anchor_of(77),
        owner=request.owner,
    )
    assert torch.equal(group.pool.records[slots], by_forward[slots])
    others = torch.ones(len(before), dtype=torch.bool)
    others[slots] = False
    assert torch.equal(group.pool.records[others], before[others])
    assert torch.equal(manager.state.counters, counted)
    assert engine.found() == []


def test_landing_nothing_is_fine() -> None:
    engine = landing_engine()
    none = torch.zeros(0, dtype=torch.int64)
    for same in (True, False):
        landing = land(engine.manager, engine.manager.pools[0], slots=none, length=0, owner=1, same_geometry=same)
        assert landing == Landing(received=0, cleared=0, uncovered=0)


def test_what_cannot_be_landed_is_refused() -> None:
    manager = landing_engine().manager
    pool, slots = manager.pools[0], torch.arange(1, 5)
    with pytest.raises(ValueError, match=r"land: pool must be one of the manager's \(pool\), got other"):
        land(manager, make_pool(name="other"), slots=slots, length=4, owner=1)
    with pytest.raises(TypeError, match=r"slots must be of dtype torch\.int64, got torch\.int32"):
        land(manager, pool, slots=slots.int(), length=4, owner=1)
    with pytest.raises(ValueError, match=r"slots must be of shape \[n\], got \[1, 4\]"):
        land(manager, pool, slots=slots[None], length=4, owner=1)
    for length in (-1, 5):
        with pytest.raises(ValueError, match=rf"length must be in \[0, 4\], the number of slots, got {length}"):
            land(manager, pool, slots=slots, length=length, owner=1)


# Two processes.

# The target's positions that its first decode forward verifies; its pages begin at multiples of 4.
LENGTH = 18
VERIFIED = {FULL: range(LENGTH), SWA: range(LENGTH - WINDOW, LENGTH)}
# The second of the pages that are sent: in the windowed pool those from position 8 on are.
SECOND_PAGE = {FULL: range(4, 8), SWA: range(12, 16)}
# Who, where in the forward, position -> reasons.
Expected = dict[tuple[str, str], dict[int, set[str]]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return what came of the runs that tests ask for; of all, where one of the long tests is among them."""
    mine = [item for item in request.session.items if item.path == request.path and "results" in item.fixturenames]
    if any(item.get_closest_marker("long") for item in mine):
        return {r["run"]: r for r in campaign.measure(campaign.RUNS)}
    asked = [item.callspec.params["run"] for item in mine if hasattr(item, "callspec")]
    always = (campaign.RUNS[0], of_faults(other_geometry=False)[0])
    asked = [run for run in campaign.RUNS if run in asked or run in always]
    return {r["run"]: r for r in campaign.measure(asked)}


def in_both(who: str, reasons: dict[int, set[str]]) -> Expected:
    return {(who, "HEAD"): reasons, (who, "TAIL"): reasons}


def like_this(positions: Any, *reasons: str) -> dict[int, set[str]]:
    return {p: set(reasons) for p in positions}


def expected(fault: str, pool: str) -> Expected:
    """What the first forward that can see a fault reports, as it follows from what the fault did."""
    seen = VERIFIED[pool]
    # K's first layer covers every so many-th position.
    in_first_layer = [p for p in seen if p % LAYERS[pool] == 0]
    page = SECOND_PAGE[pool]
    moved = {p: {"POSITION", "TOKEN"} for p in page} | {page[0]: {"POSITION", "TOKEN", "CHAIN"}}
    behind = {page[-1] + 1: {"CHAIN"}}
    if fault in ("a K byte changed", "a V byte changed"):
        return {("target", "TAIL"): like_this([15], fault[2])}
    if fault in ("freed too early", "nothing sent"):
        return in_both("target", like_this(seen, "NEVER_WRITTEN"))
    if fault in ("the end cut off", "the second half lost"):
        return {("target", "TAIL"): like_this(seen, "NEVER_WRITTEN")}
    if fault == "the beginning cut off":
        return {
            ("target", "HEAD"): like_this(seen, "NEVER_WRITTEN"),
            ("target", "TAIL"): like_this(in_first_layer, "K"),
        }
    if fault == "the first half lost":
        return {("target", "HEAD"): like_this(seen, "NEVER_WRITTEN"), ("target", "TAIL"): like_this(seen, "K")}
    if fault == "a page lost":
        return in_both("target", like_this(page, "NEVER_WRITTEN"))
    if fault == "a page of one layer lost":
        return {("target", "TAIL"): like_this(set(page) & set(in_first_layer), "K")}
    if fault == "half of each page":
        return in_both("target", like_this([p for p in seen if p % PAGE >= PAGE // 2], "NEVER_WRITTEN"))
    if fault == "too few pages":
        return in_both("target", like_this(range(12 if pool == FULL else 16, LENGTH), "NEVER_WRITTEN"))
    if fault == "too many pages":
        # Over positions 8 to 11 of `ahead`: the other's first page, in the windowed pool that of the same positions.
        place = {"POSITION"} if pool == FULL else set()
        foreign = {p: {"TOKEN"} | place for p in range(8, 12)}
        return in_both("ahead", {**foreign, 8: foreign[8] | {"CHAIN"}, 12: {"CHAIN"}})
    if fault == "pages swapped":
        both = moved | {p - PAGE: reasons for p, reasons in moved.items()} | behind
        if pool == SWA:
            # The window begins inside the first of them, with an entry whose predecessor may be gone.
            both = {p: reasons for p, reasons in both.items() if p in seen}
        return in_both("target", both)
    if fault == "pages of one layer swapped":
        pages = range(page[0] - PAGE, page[-1] + 1)
        return {("target", "TAIL"): like_this(set(pages) & set(in_first_layer), "K")}
    if fault == "another request's pages":
        # The records agree with each other; they are not this request's. The write says so at the last of them.
        return in_both("target", like_this(seen, "TOKEN") | {LENGTH - 1: {"TOKEN", "PREFIX"}})
    if fault == "read in the old layout":
        # Token t of a page, half h of it, was item h * PAGE + t there and is item 2 * t + h here.
        def stays(p: int) -> bool:
            item = 2 * (p % PAGE) + p // LAYERS[pool] % 2
            return item == 2 * (item % PAGE) + item // PAGE

        return {("target", "TAIL"): like_this([p for p in seen if not stays(p)], "K", "V")}
    if fault == "overwritten before landing":
        return in_both("intruder", like_this(range(PAGE), "OVERWRITE")) | in_both("target", moved | behind)
    raise LookupError(fault)


def first_seen(reports: list[dict[str, Any]]) -> Expected:
    """What each request's first forward that reports anything reports."""
    steps: dict[str, int] = {}
    found: Expected = {}
    for r in reports:
        if r["step"] == steps.setdefault(r["request"], r["step"]):
            reasons = found.setdefault((r["request"], r["tag"].split("_")[0]), {})
            reasons.setdefault(r["position"], set()).update(r["reasons"])
    return found


def of_faults(*, other_geometry: bool) -> list[campaign.Run]:
    return [run for run in campaign.RUNS if run.fault is not None and run.other_geometry == other_geometry]


@pytest.mark.parametrize("run", [r for r in campaign.RUNS if r.fault is None], ids=lambda r: r.name)
def test_a_healthy_pair_is_silent(results: dict[str, Any], run: campaign.Run) -> None:
    result = results[run.name]
    for side in campaign.SIDES:
        assert result[side]["reports"] == []
        summary = result[side]["summary"]
        assert summary["watching"] == "complete"
        assert summary["violations"] == summary["discarded"] == 0
        assert summary["positions_verified"] == summary["positions_relied_on"] > 0
        assert set(summary["launches"]) == {"HEAD_FULL", "TAIL_FULL", "HEAD_SWA", "TAIL_SWA"}
    landed = result["decode"]["landed"]
    assert landed["received"] > 0
    assert landed["cleared"] > 0
    assert landed["uncovered"] == (landed["received"] if run.other_geometry else 0)


def test_the_healthy_pair_meets_what_hides_bugs(results: dict[str, Any]) -> None:
    """Lengths around multiples of the page, decoding over several pages, other slots there, and slots used again."""
    run = campaign.RUNS[0]
    lengths = {length for wave in run.waves for _, _, length in wave}
    assert {n * PAGE + d for n in range(1, 5) for d in (-1, 0, 1)} <= lengths
    assert run.new_tokens > 2 * PAGE
    decode, prefill = (results[run.name][side]["slots"] for side in ("decode", "prefill"))
    assert set(decode) == set(prefill) == {name for wave in run.waves for name, _, _ in wave}
    for pool in (FULL, SWA):
        assert all(decode[name][pool] != prefill[name][pool] for name in decode)
        for side in (decode, prefill):
            used: set[int] = set()
            again = 0
            for name in side:
                slots = {s for s in side[name][pool] if s}
                again += bool(slots & used)
                used |= slots
            assert again > len(side) // 3


@pytest.mark.every_day(*(run.name for run in of_faults(other_geometry=False)[::3]))
@pytest.mark.parametrize("run", of_faults(other_geometry=False), ids=lambda r: r.name)
def test_a_fault_is_found_where_it_is_and_nowhere_else(results: dict[str, Any], run: campaign.Run) -> None:
    result = results[run.name]
    assert result["prefill"]["reports"] == []
    reports = result["decode"]["reports"]
    assert result["decode"]["summary"]["violations"] == len(reports)
    wanted = expected(run.fault, run.pool)
    assert first_seen(reports) == wanted
    assert campaign.is_as_it_should_be(run, result)
    # By the first forward that reads it; what later ones add is the token behind it, which follows another prefix.
    first_step = result["decode"]["first_steps"]["target"]
    assert all(r["step"] >= first_step for r in reports if r["request"] != "intruder")
    assert any(r["step"] == first_step for r in reports)
    hit = {(who, p) for (who, _), reasons in wanted.items() for p in reasons}
    for r in reports:
        if (r["request"], r["position"]) not in hit:
            assert (r["request"], r["position"] - 1) in hit
            assert r["reasons"] == ["CHAIN"]
    slots = result["decode"]["slots"]
    for r in reports:
        position, owner = r["position"], r["request"]
        if owner == "intruder":
            position, owner = SECOND_PAGE[run.pool][position], "target"
        if position < len(slots[owner][run.pool]):
            assert r["slot"] == slots[owner][run.pool][position]


@pytest.mark.every_day(of_faults(other_geometry=True)[0].name)
@pytest.mark.parametrize("run", of_faults(other_geometry=True), ids=lambda r: r.name)
def test_with_another_geometry_records_are_covered_and_bytes_on_the_way_are_not(
    results: dict[str, Any], run: campaign.Run
) -> None:
    result = results[run.name]
    assert result["decode"]["landed"]["uncovered"] == result["decode"]["landed"]["received"]
    assert first_seen(result["decode"]["reports"]) == (
        {} if run.fault == "a K byte changed" else expected(run.fault, run.pool)
    )
    assert campaign.is_as_it_should_be(run, result)


def test_a_verdict_sees_silence_noise_and_wrong_blame(results: dict[str, Any]) -> None:
    healthy, faulty = campaign.RUNS[0], of_faults(other_geometry=False)[0]
    good, bad = results[healthy.name], results[faulty.name]
    assert campaign.is_as_it_should_be(healthy, good)
    assert not campaign.is_as_it_should_be(healthy, bad)
    assert not campaign.is_as_it_should_be(faulty, good)
    assert not campaign.is_as_it_should_be(dataclasses.replace(faulty, pool=SWA), bad)
    assert not campaign.is_as_it_should_be(faulty, {**bad, "prefill": bad["decode"]})
    stale = {**good["decode"], "summary": {**good["decode"]["summary"], "watching": "stale"}}
    assert not campaign.is_as_it_should_be(healthy, {**good, "decode": stale})


@pytest.mark.long
def test_the_table_in_the_docs_is_what_was_found(results: dict[str, Any]) -> None:
    text = (ROOT / "docs/transfer.md").read_text(encoding="utf-8")
    for line in table(results):
        assert line in text


def table(results: dict[str, Any]) -> list[str]:
    """The lines of the table: of every fault, what was found, in which pools."""
    pools: dict[tuple[str, ...], list[str]] = {}
    for run in of_faults(other_geometry=False):
        found: dict[str, dict[str, set[str]]] = {}
        for r in results[run.name]["decode"]["reports"]:
            found.setdefault(r["request"], {}).setdefault(r["tag"].split("_")[0], set()).update(r["reasons"])
        for who in sorted(found):
            head, tail = (", ".join(sorted(found[who].get(tag, ()))) or "-" for tag in ("HEAD", "TAIL"))
            pools.setdefault((run.fault or "", who, head, tail), []).append(run.pool)
    return [
        f"| {fault} | {', '.join(where)} | {who} | {head} | {tail} |"
        for (fault, who, head, tail), where in pools.items()
    ]


@pytest.mark.long
def test_the_benchmark_writes_what_it_saw(
    results: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(campaign, "measure", lambda runs, **_: [results[run.name] for run in runs])
    out = tmp_path / "campaign.json"
    assert CliRunner().invoke(campaign.main, ["--json", str(out)]).exit_code == 0
    facts = json.loads(out.read_text())
    assert facts["device"].startswith("CPU")
    assert facts["faults"] == facts["faults_found"] == 2 * len(FAULTS) + 2
    assert facts["wrong"] == []
    assert [r["run"] for r in facts["runs"]] == [run.name for run in campaign.RUNS]
    # A fault that nobody found.
    silent = {**results[campaign.RUNS[0].name], "run": campaign.RUNS[2].name}
    monkeypatch.setattr(campaign, "measure", lambda runs, **_: [*(results[run.name] for run in runs[:2]), silent])
    monkeypatch.setattr(campaign, "RUNS", campaign.RUNS[:3])
    assert CliRunner().invoke(campaign.main, ["--json", str(out)]).exit_code == 1
    assert json.loads(out.read_text())["wrong"] == [campaign.RUNS[2].name]


@pytest.mark.long
def test_a_process_that_fails_takes_the_other_along() -> None:
    program = Path(__file__).with_name("transfer_processes.py")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=True, cwd="/"
    )
    first, second = done.stdout.splitlines()
    assert "exit code 3" in first
    assert "must end in 5 s" in second
    assert all(line.endswith("left behind: 0") for line in (first, second))
