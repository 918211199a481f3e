"""One cause, one incident: what is grouped, what goes on, and the likely cause by the shape of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.reports import Decoder, Incident, reporter
from kv_canary.reports.incidents import IncidentTracker, goes_on, ranges, ranges_text
from kv_canary.runtime.cached import CachedSlots
from kv_canary.specs.violation_row import ViolationRow

from .engine import BYTES, Engine, full_engine, make_pool

PAGE = 4


class PagedEngine(Engine):
    """An engine whose K and V lie in pages of 4 tokens, and whose slots begin at a page."""

    def __init__(self, group: kc.BufferGroup | None = None, **options: Any) -> None:
        config = kc.CanaryConfig(backend="reference", **options)
        super().__init__([group or kc.BufferGroup(name="full", pool=paged_pool())], config)
        self.next_slot[self.groups[0].pool] = PAGE


def paged_pool(pages: int = 32) -> kc.KvPool:
    return make_pool(pages * PAGE, page_size=PAGE)


def flat_layers(pool: kc.KvPool, half: str) -> list[torch.Tensor]:
    source = pool.k_source if half == "K" else pool.v_source
    assert source is not None
    return [layer.view(-1, BYTES) for layer in source.layers]


@pytest.fixture
def engine() -> PagedEngine:
    """Requests `a`, with 16 tokens in whole pages from slot 4 on, and `b`, with 8 behind them."""
    engine = PagedEngine()
    engine.step((engine.add("a", 40), 16))
    engine.step((engine.add("b", 40), 8))
    return engine


def incidents(engine: Engine) -> list[Incident]:
    engine.manager.flush()
    return engine.manager.accounts.incidents


def only(engine: Engine) -> Incident:
    found = incidents(engine)
    assert len(found) == 1, [i.sentence for i in found]
    return found[0]


def read(engine: Engine, *names: str) -> None:
    """Run one more forward of these requests."""
    engine.step(*((engine.requests[name], 1) for name in names or ("a",)))


def flip(engine: Engine, *positions: int, half: str = "K", request: str = "a") -> None:
    """Flip a bit in every layer, at these positions of a request."""
    row = engine.tables["full"][engine.requests[request].row]
    for layer in flat_layers(engine.groups[0].pool, half):
        layer[row[list(positions)].long(), 0] ^= 1


def test_many_violations_of_one_cause_are_one_incident_and_one_line(
    engine: PagedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    flip(engine, 2, 3, 4, 9, 11, 12)
    read(engine)
    incident = only(engine)
    assert (incident.number, incident.count, incident.requests) == (1, 6, ("a",))
    assert incident.positions == ((2, 4), (9, 9), (11, 12))
    assert incident.slots == ((6, 8), (13, 13), (15, 16))
    assert (incident.tags, incident.reasons, incident.group) == (("HEAD_FULL",), ("K",), "full")
    assert "request a reads positions 2 to 4, 9, 11 to 12 in slots 6 to 8, 13, 15 to 16 of full: K (6 " in caplog.text
    assert [r.message for r in caplog.records] == [f"kv-canary: {incident.sentence}"]
    assert len(engine.manager.reports) == 6
    assert incident.cause.startswith("the bytes of 6 slots changed after they were written: a stray write")


def test_head_and_tail_that_find_the_same_slot_are_one_incident(engine: PagedEngine) -> None:
    engine.tables["full"][engine.requests["a"].row, 6] = 100
    read(engine)
    incident = only(engine)
    assert (incident.tags, incident.count, incident.slots) == (("HEAD_FULL", "TAIL_FULL"), 2, ((100, 100),))
    assert [r.tag for r in engine.manager.reports] == ["HEAD_FULL", "TAIL_FULL"]


def test_tail_that_sees_less_than_head_adds_nothing_of_its_own(engine: PagedEngine) -> None:
    a, b = engine.requests["a"], engine.requests["b"]
    table = engine.tables["full"]
    table[a.row, 6] = table[b.row, 3]
    flip(engine, 6)
    read(engine)
    # HEAD sees bytes, TAIL does not.
    by_tag = {r.tag: set(r.reasons) for r in engine.manager.reports or engine.found() if r.position == 6}
    assert by_tag["HEAD_FULL"] - by_tag["TAIL_FULL"] == {"K"}
    incident = only(engine)
    assert incident.positions == ((6, 6),)
    assert set(incident.reasons) == {"TOKEN", "POSITION", "CHAIN", "K"}


def test_damage_that_stays_is_one_incident_that_goes_on(engine: PagedEngine) -> None:
    flip(engine, 5)
    for _ in range(4):
        read(engine)
    incident = only(engine)
    assert (incident.first_step, incident.last_step, incident.count) == (3, 6, 4)
    assert incident.first.step == 3
    assert "incident 1 goes on: 4 violations in steps 3 to 6, position 5 of full: K." in goes_on(incident)


def test_an_incident_that_goes_on_is_told_again_only_now_and_then(
    engine: PagedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    engine.manager.accounts._desk._limit._clock = lambda: now[0]
    flip(engine, 5)
    lines = []
    for _ in range(8):
        caplog.clear()
        read(engine)
        engine.manager.flush()
        lines.append(len(caplog.records))
        now[0] += 4
    # At 0 when it was new, then at 12 and at 24 seconds.
    assert lines == [1, 0, 0, 1, 0, 0, 1, 0]
    assert engine.manager.summary().violations == only(engine).count == 8


def test_damage_in_further_slots_of_the_same_kind_lets_an_incident_grow(engine: PagedEngine) -> None:
    flip(engine, 5)
    read(engine)
    flip(engine, 9)
    read(engine)
    incident = only(engine)
    assert incident.positions == ((5, 5), (9, 9))
    assert incident.count == 3


def test_long_after_it_was_seen_last_an_incident_does_not_grow() -> None:
    engine = full_engine()
    a = engine.add("a", 100)
    engine.step((a, 8))
    pool = engine.groups[0].pool
    pool.k_source.layers[1][engine.slot_of(engine.groups[0], a, 5), 0] ^= 1
    engine.step((a, 1))
    pool.k_source.layers[1][engine.slot_of(engine.groups[0], a, 5), 0] ^= 1
    for _ in range(65):
        engine.step((a, 1))
    pool.k_source.layers[1][engine.slot_of(engine.groups[0], a, 7), 0] ^= 1
    engine.step((a, 1))
    assert [i.positions for i in incidents(engine)] == [((5, 5),), ((7, 7),)]


def test_other_requests_and_other_reasons_are_other_incidents(engine: PagedEngine) -> None:
    flip(engine, 5)
    flip(engine, 6, half="V")
    flip(engine, 2, request="b")
    read(engine, "a", "b")
    found = {(i.requests, i.reasons, i.positions) for i in incidents(engine)}
    assert found == {
        (("a",), ("K",), ((5, 5),)),
        (("a",), ("V",), ((6, 6),)),
        (("b",), ("K",), ((2, 2),)),
    }


def share_prefix(engine: Engine, *, length: int) -> None:
    """Add a request `c` that hits the first tokens of `a` in the cache."""
    a = engine.requests["a"]
    c = engine.add("c", a.tokens[:length] + [9] * 20)
    engine.tables["full"][c.row, :length] = engine.tables["full"][a.row, :length]
    c.cached = length


def test_a_slot_that_several_requests_share_is_one_incident_of_them_all(engine: PagedEngine) -> None:
    share_prefix(engine, length=8)
    flip(engine, 5)
    read(engine, "a", "c")
    incident = only(engine)
    assert (incident.requests, incident.count) == (("a", "c"), 2)
    assert "requests a, c read position 5 in slot 9 of full: K (2 violations)" in incident.sentence
    # Also where the second one comes later.
    read(engine, "a")
    read(engine, "c")
    assert only(engine).count == 4


def test_a_request_that_shares_a_part_of_the_damage_joins(engine: PagedEngine) -> None:
    share_prefix(engine, length=6)
    flip(engine, 5, 7)
    read(engine, "c", "a")
    incident = only(engine)
    assert (incident.positions, incident.count, set(incident.requests)) == (((5, 5), (7, 7)), 3, {"a", "c"})


def test_a_sweep_that_finds_what_a_request_found_joins(engine: PagedEngine) -> None:
    flip(engine, 5)
    read(engine)
    row = engine.tables["full"][engine.requests["a"].row, :16].long()
    previous = torch.cat([torch.tensor([kc.HEAD_OF_CHAIN]), row[:-1]])
    cached = CachedSlots(group="full", slots=row, positions=torch.arange(16), previous=previous)
    engine.manager._steps._sweeper.cached = lambda: [cached]
    engine.manager._steps._sweeper.sweep()
    incident = only(engine)
    assert (incident.tags, incident.requests, incident.count) == (("HEAD_FULL", "SWEEP_FULL"), ("a",), 2)
    assert (incident.first.tag, incident.first.row) == ("HEAD_FULL", engine.requests["a"].row)


def test_a_chain_that_breaks_behind_changed_bytes_has_its_own_cause(engine: PagedEngine) -> None:
    flip(engine, 5)
    engine.groups[0].pool.records[int(engine.tables["full"][engine.requests["a"].row, 6]), 1] ^= 1
    read(engine)
    chain, kv = sorted(incidents(engine), key=lambda i: i.reasons)
    assert (chain.reasons, chain.positions, chain.followers) == (("CHAIN",), ((6, 6),), ((7, 7),))
    assert (kv.reasons, kv.positions, kv.followers) == (("K",), ((5, 5),), ())


def test_a_follower_that_is_found_later_than_its_leader_belongs_to_it() -> None:
    decoder = Decoder(
        [kc.BufferGroup(name="full", pool=make_pool())],
        name_of_row=lambda step, row: "a",
        name_of_owner=lambda owner: "a",
    )
    book = IncidentTracker(decoder, arrived=lambda step, row: None)

    def row(step: int, reasons: kc.Reason, position: int, stored: int) -> ViolationRow:
        return ViolationRow(
            reasons=int(reasons),
            slot=20 + position,
            row=1,
            position=position,
            identity=stored << 32 | 7,
            chain=5,
            writer=3 << 24 | 1,
            step=step,
            previous=19 + position,
        )

    # A strided canary verifies blocks of 16 in turn.
    assert book.take([row(4, kc.Reason.POSITION, 15, 3)]) == {1: "new"}
    assert book.take([row(5, kc.Reason.CHAIN, 16, 16)]) == {1: "grows"}
    assert book.take([row(9, kc.Reason.CHAIN, 16, 16)]) == {1: "again"}
    incident = book.incident(1)
    assert (incident.positions, incident.followers, incident.count) == (((15, 15),), ((16, 16),), 3)


def test_unmapped_positions_of_two_requests_are_two_incidents(engine: PagedEngine) -> None:
    for name in "ab":
        engine.tables["full"][engine.requests[name].row, 3] = 0
    read(engine, "a", "b")
    assert [i.requests for i in incidents(engine)] == [("a",), ("b",)]


@pytest.mark.parametrize("seed", range(6))
def test_every_violation_counts_in_exactly_one_incident(seed: int) -> None:
    engine = PagedEngine(max_reports_per_step=2)
    generator = torch.Generator().manual_seed(seed)

    def pick(n: int) -> int:
        return int(torch.randint(0, n, (1,), generator=generator))

    for name in "abc":
        engine.step((engine.add(name, 60), 12))
    for _ in range(12):
        table, row = engine.tables["full"], engine.requests["abc"[pick(3)]].row
        match pick(5):
            case 0:
                flip(engine, pick(12), request="abc"[pick(3)])
            case 1:
                table[row, pick(12)] = int(table[engine.requests["abc"[pick(3)]].row, pick(12)])
            case 2:
                table[row, pick(12)] = pick(130) - 1
            case 3:
                engine.manager.retire(engine.groups[0].pool, table[row, pick(12)].long().view(1), owner=1)
            case 4:
                table[row, 4:8] = table[engine.requests["abc"[pick(3)]].row, :4].clone()
        read(engine, "a", "b", "c")
    found = incidents(engine)
    assert sum(i.count for i in found) == engine.manager.summary().violations > 30
    assert len(found) < engine.manager.summary().violations / 3


def test_raise_mode_raises_with_the_incidents() -> None:
    engine = PagedEngine(mode="raise")
    engine.step((engine.add("a", 40), 16))
    flip(engine, 5, 6)
    read(engine)
    with pytest.raises(kc.CanaryViolationError) as caught:
        engine.manager.flush()
    assert [(i.count, i.positions) for i in caught.value.incidents] == [(2, ((5, 6),))]


def test_a_fault_in_the_grouping_costs_no_report(
    engine: PagedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(reporter.IncidentTracker, "take", broken)
    flip(engine, 5)
    read(engine)
    engine.manager.flush()
    assert "grouping the reports failed" in caplog.text
    assert f"kv-canary: {engine.manager.reports[0].sentence}" in [r.message for r in caplog.records]
    assert engine.manager.summary().violations == 1


def test_more_incidents_than_lines_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    engine = PagedEngine(max_reports_per_step=2)
    for name in "abc":
        engine.step((engine.add(name, 20), 4))
        flip(engine, 1, request=name)
    read(engine, "a", "b", "c")
    engine.manager.flush()
    assert "1 more incidents are not written out" in caplog.text
    assert sum("Changed: K of" in r.message for r in caplog.records) == 2


def test_a_name_cannot_forge_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    engine = full_engine()
    a = engine.add("a\nkv-canary: all is well\x1b[2J", 20)
    engine.step((a, 6))
    engine.tables["full"][a.row, 3] = 0
    engine.step((a, 1))
    engine.manager.flush()
    assert "\n" not in caplog.records[0].message
    assert "\x1b" not in caplog.records[0].message
    assert "a\\nkv-canary" in caplog.records[0].message


# Causes, by shape.


def zero(engine: Engine, *positions: int) -> None:
    row = engine.tables["full"][engine.requests["a"].row]
    for half in "KV":
        for layer in flat_layers(engine.groups[0].pool, half):
            layer[row[list(positions)].long()] = 0


def test_whole_pages_of_zeros_are_called_that(engine: PagedEngine) -> None:
    zero(engine, *range(4, 12))
    read(engine)
    assert only(engine).cause == "the bytes of 2 whole pages are all zero: they were zeroed after they were written"


def test_zeroed_slots_that_are_no_page_are_called_slots(engine: PagedEngine) -> None:
    zero(engine, 5, 6)
    read(engine)
    assert only(engine).cause == "the bytes of 2 slots are all zero: they were zeroed after they were written"


def test_bytes_of_whole_pages_are_a_copy_without_a_record(engine: PagedEngine) -> None:
    for half in "KV":
        flip(engine, 4, 5, 6, 7, half=half)
    read(engine)
    assert "the bytes of 1 whole page changed with no record: a copy or load over them" in only(engine).cause


def test_bytes_of_one_layer_are_a_stray_write_of_that_layer(engine: PagedEngine) -> None:
    row = engine.tables["full"][engine.requests["a"].row].long()
    flat_layers(engine.groups[0].pool, "V")[1][row[2:13], 3] ^= 4
    read(engine)
    incident = only(engine)
    # Every other position is covered in that layer.
    assert incident.positions == tuple((p, p) for p in (3, 5, 7, 9, 11))
    assert incident.cause == "only one layer's bytes changed, in 5 slots: a stray write of that layer"


def test_a_byte_in_one_slot_is_memory_corruption(engine: PagedEngine) -> None:
    flip(engine, 5)
    read(engine)
    assert "a stray write, a copy race or memory corruption" in only(engine).cause


def test_a_page_that_was_handed_on_is_called_that(engine: PagedEngine) -> None:
    a, b = engine.requests["a"], engine.requests["b"]
    table = engine.tables["full"]
    page = table[a.row, 4:8].clone()
    engine.manager.retire(engine.groups[0].pool, page.long(), owner=a.owner)
    table[b.row, 8:12] = page
    engine.step((b, 4), map_new=False)
    read(engine)
    incident = only(engine)
    assert incident.cause == "a page reused while in use: request b wrote 1 whole page at step 3"
    assert (incident.positions, incident.followers, incident.writer) == (((4, 7),), ((8, 8),), "request b")
    assert "Behind it the chain breaks at position 8." in incident.sentence


def test_a_page_that_was_seen_to_be_overwritten_names_that_incident(engine: PagedEngine) -> None:
    a, b = engine.requests["a"], engine.requests["b"]
    table = engine.tables["full"]
    table[b.row, 8:12] = table[a.row, 4:8]
    engine.step((b, 4), map_new=False)
    read(engine)
    overwrite, content = incidents(engine)
    assert (overwrite.reasons, overwrite.requests, overwrite.count) == (("OVERWRITE",), ("b",), 4)
    assert overwrite.writer == "request a"
    assert content.cause == "reused while in use: request b was seen to overwrite it at step 3 (incident 1)"


def test_a_page_written_before_the_request_came_is_a_wrong_block(engine: PagedEngine) -> None:
    a = engine.requests["a"]
    c = engine.add("c", 30)
    # The first page is rightly shared; the second is a wrong hit.
    c.tokens[:4] = a.tokens[:4]
    engine.tables["full"][c.row, :8] = engine.tables["full"][a.row, :8]
    c.cached = 8
    read(engine, "c")
    incident = only(engine)
    assert (incident.positions, incident.reasons) == (((4, 7),), ("TOKEN", "PREFIX"))
    assert incident.cause == (
        "a wrong block from position 4 on: the table names what request a wrote before this request came: "
        "a stale or wrong prefix hit"
    )


@pytest.mark.parametrize("position", [4, 5])
def test_a_wrong_block_one_of_whose_tokens_happens_to_be_right(engine: PagedEngine, position: int) -> None:
    a = engine.requests["a"]
    c = engine.add("c", 30)
    c.tokens[:4] = a.tokens[:4]
    c.tokens[position] = a.tokens[position]
    engine.tables["full"][c.row, :8] = engine.tables["full"][a.row, :8]
    c.cached = 8
    read(engine, "c")
    assert only(engine).cause.endswith("a stale or wrong prefix hit")


def test_a_run_that_begins_at_a_page_is_a_wrong_block(engine: PagedEngine) -> None:
    a, b = engine.requests["a"], engine.requests["b"]
    table = engine.tables["full"]
    table[a.row, 4:6] = table[b.row, 4:6]
    read(engine)
    incident = only(engine)
    assert incident.positions == ((4, 5),)
    assert "a wrong block from position 4 on: the table names a page of request b" in incident.cause


def test_a_run_that_begins_inside_a_page_is_no_block(engine: PagedEngine) -> None:
    a, b = engine.requests["a"], engine.requests["b"]
    table = engine.tables["full"]
    table[a.row, 5:7] = table[b.row, 5:7]
    read(engine)
    assert "block" not in only(engine).cause
    assert "a wrong or stale table entry" in only(engine).cause


def test_a_whole_foreign_prefix_is_one_incident(engine: PagedEngine) -> None:
    a, b = engine.requests["a"], engine.requests["b"]
    table = engine.tables["full"]
    table[b.row, :8] = table[a.row, :8]
    read(engine, "b")
    incident = only(engine)
    assert set(incident.reasons) == {"TOKEN", "PREFIX"}
    assert incident.cause.startswith("the whole prefix, positions 0 to 7, is not this request's own: a stale or wrong")


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shifted_table_is_off_by_one(engine: PagedEngine, shift: int) -> None:
    table = engine.tables["full"][engine.requests["a"].row]
    table[3:10] = table[3 + shift : 10 + shift].clone()
    read(engine)
    incident = only(engine)
    assert incident.cause == "the table is off by one from position 3 on"
    assert (incident.positions, incident.followers) == (((3, 9),), ((10, 10),))


def test_freed_pages_are_a_use_after_free_of_pages(engine: PagedEngine) -> None:
    slots = engine.tables["full"][engine.requests["a"].row, 4:12].long()
    engine.manager.retire(engine.groups[0].pool, slots, owner=engine.requests["b"].owner)
    read(engine)
    incident = only(engine)
    assert incident.cause == (
        "use after free: 2 whole pages freed by request b at step 2 while a request still reads there"
    )
    assert incident.writer == "request b"


def test_pages_that_another_request_is_handed_have_two_owners_and_were_freed_by_nobody(engine: PagedEngine) -> None:
    a, b = engine.requests["a"], engine.requests["b"]
    slots = engine.tables["full"][a.row, 4:12].long()
    engine.manager.retire(engine.groups[0].pool, slots, owner=b.owner, handed_out=True)
    read(engine)
    incident = only(engine)
    assert incident.cause == (
        "two owners: 2 whole pages handed out to request b at step 2 while a request still reads there"
    )
    sentence = engine.found()[0].sentence
    assert "handed out to request b at step 2" in sentence
    assert "freed" not in sentence


@pytest.mark.parametrize("owner", ["b", ""])
def test_a_page_that_is_freed_too_early_and_taken_slot_by_slot_is_one_incident(engine: PagedEngine, owner: str) -> None:
    """The slots that somebody has written since look like a stale table; those beside them say what it is."""
    a, b = engine.requests["a"], engine.requests["b"]
    freed = engine.tables["full"][a.row, 4:8].clone()
    number = b.owner if owner else 0
    engine.manager.retire(engine.groups[0].pool, freed.long(), owner=number)
    engine.tables["full"][b.row, 8:12] = freed
    for _ in range(4):
        engine.step((b, 1), map_new=False)
        read(engine)
        incident = only(engine)
        assert incident.positions == ((4, 7),)
        assert incident.requests == ("a",)
    assert incident.cause.startswith(
        f"use after free: 1 whole page freed{' by request b' if owner else ''} at step 2 while a request still reads "
        "there; request b has written to 1 of these slots since"
    )


@pytest.mark.parametrize("owner", ["b", "a", ""])
@pytest.mark.parametrize("reads", [1, 3])
@pytest.mark.parametrize("first", [4, 0], ids=["a page", "the first page"])
def test_a_page_that_is_freed_too_early_and_handed_on_whole_names_the_free(
    engine: PagedEngine, first: int, reads: int, owner: str
) -> None:
    """What the newcomer has written is another incident, which says who had freed the page."""
    a, b = engine.requests["a"], engine.requests["b"]
    freed = engine.tables["full"][a.row, first : first + 4].clone()
    number = engine.requests[owner].owner if owner else 0
    engine.manager.retire(engine.groups[0].pool, freed.long(), owner=number)
    for _ in range(reads):
        read(engine)
    engine.tables["full"][b.row, 8:12] = freed
    engine.step((b, 4), map_new=False)
    for _ in range(reads):
        read(engine)
    early, handed_on = incidents(engine)
    assert early.cause.startswith(
        f"use after free: 1 whole page freed{f' by request {owner}' if owner else ''} at step 2"
    )
    assert handed_on.positions == ((first, first + 3),)
    assert handed_on.cause == (
        f"use after free: 1 whole page freed{f' by request {owner}' if owner else ''} at step 2 while a request still "
        f"reads there (incident 1), and handed on: request b has written there at step {3 + reads}"
    )


def test_whoever_names_a_page_wrongly_that_another_had_lost_is_told_by_itself(engine: PagedEngine) -> None:
    a, b, c = engine.requests["a"], engine.requests["b"], engine.add("c", 40)
    engine.step((c, 16))
    table = engine.tables["full"]
    freed = table[a.row, 4:8].clone()
    engine.manager.retire(engine.groups[0].pool, freed.long(), owner=b.owner)
    read(engine)
    table[b.row, 8:12] = freed
    engine.step((b, 4), map_new=False)
    # It never read them as long as they were free.
    table[c.row, 8:12] = freed
    read(engine, "c")
    assert [i.requests for i in incidents(engine)] == [("a",), ("c",)]
    assert incidents(engine)[1].cause == "a page reused while in use: request b wrote 1 whole page at step 5"


def test_what_was_written_before_a_page_was_freed_was_not_handed_on(engine: PagedEngine) -> None:
    a, b = engine.requests["a"], engine.requests["b"]
    table = engine.tables["full"]
    mine, theirs = table[a.row, 4:8].clone(), table[b.row, 4:8].clone()
    engine.manager.retire(engine.groups[0].pool, mine.long(), owner=a.owner)
    read(engine)
    # The table names another page by now, which was written before that.
    table[a.row, 4:8] = theirs
    read(engine)
    assert "handed on:" not in incidents(engine)[1].cause


def test_a_slot_that_somebody_wrote_before_another_was_freed_is_another_cause(engine: PagedEngine) -> None:
    a, b = engine.requests["a"], engine.requests["b"]
    # A stale entry, right beside a slot that is freed later.
    engine.tables["full"][a.row, 5] = int(engine.tables["full"][b.row, 3])
    engine.manager.retire(engine.groups[0].pool, engine.tables["full"][a.row, 6:8].long())
    read(engine)
    assert sorted(i.cause.partition(":")[0] for i in incidents(engine))[-1] == "use after free"
    assert len(incidents(engine)) == 2


def test_pages_that_nothing_wrote_are_a_missing_load(engine: PagedEngine) -> None:
    engine.tables["full"][engine.requests["a"].row, 4:8] = torch.arange(100, 104)
    read(engine)
    assert "the copy or load of 1 whole page is missing" in only(engine).cause


def windowed(**options: Any) -> tuple[Engine, str]:
    """Return an engine with a windowed group, whose request `a` has 12 tokens, and that group's name."""
    groups = [kc.BufferGroup(name="full", pool=make_pool(name="full"))]
    if options.get("ring"):
        groups.append(kc.BufferGroup(name="swa", pool=make_pool(name="swa"), window=5, ring=True))
    else:
        lut = torch.arange(128) if options.get("identity_lut") else torch.arange(128).roll(-1)
        groups.append(kc.BufferGroup(name="swa", pool=make_pool(name="swa"), window=5, lut=lut))
    engine = Engine(groups)
    engine.step((engine.add("a", 60), 6))
    engine.step((engine.requests["a"], 6))
    return engine, "swa"


def test_a_ring_that_has_gone_round_is_a_stale_window_entry() -> None:
    engine, name = windowed(ring=True)
    a, group = engine.requests["a"], engine.groups[1]
    records = group.pool.records
    # The record of position 9 is that of a later round: 9 + 6.
    slot = engine.slot_of(group, a, 9)
    records[slot, 0] += 6 << 32
    engine.step((a, 1))
    incident = next(i for i in incidents(engine) if i.group == name and "POSITION" in i.reasons)
    assert "a stale window entry: the ring has gone round" in incident.cause


def test_a_stale_lut_is_called_that() -> None:
    engine, name = windowed(identity_lut=True)
    a, group = engine.requests["a"], engine.groups[1]
    group.lut[engine.tables[name][a.row, 9]] = 0
    engine.step((a, 1))
    incident = only(engine)
    assert (incident.group, incident.positions) == (name, ((9, 9),))
    assert "its window entry was evicted, or the LUT lost it" in incident.cause


def test_ranges() -> None:
    assert ranges([]) == ()
    assert ranges([3]) == ((3, 3),)
    assert ranges([7, 1, 2, 3, 9, 8]) == ((1, 3), (7, 9))
    assert ranges_text("position", ((3, 3),)) == "position 3"
    assert ranges_text("position", ((16, 31), (40, 40))) == "positions 16 to 31, 40"
    assert ranges_text("slot", ((1, 1), (3, 3), (5, 5)), most=2) == "slots 1, 3 and 1 runs more"


def test_bytes_that_change_while_the_model_runs_have_changed(engine: PagedEngine) -> None:
    """TAIL finds K and V alone, where it reads them again: nothing was handed over that it could be held against."""
    engine = PagedEngine(verify_bytes_at_tail=True)
    engine.step((engine.add("a", 40), 16))
    batch = engine.batch((engine.requests["a"], 1))
    with engine.forward.around(batch):
        engine.write_bytes(batch)
        flip(engine, 3)
    incident = only(engine)
    assert (incident.tags, incident.reasons) == (("TAIL_FULL",), ("K",))
    assert incident.cause == (
        "the K/V bytes changed after they were written: a stray write, a copy race or memory corruption"
    )


def test_places_are_kept_up_to_so_many(engine: PagedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.reports.incidents.MOST_PLACES", 3)
    flip(engine, 2, 4, 6, 8, 10)
    read(engine)
    incident = only(engine)
    assert incident.positions == ((2, 2), (4, 4), (6, 6))
    assert "(5 violations)" in incident.sentence


def test_a_chain_that_breaks_elsewhere_is_an_incident_of_its_own(engine: PagedEngine) -> None:
    """Behind a wrong entry it follows from that one; behind a right one, or behind another slot, it does not."""
    table, a = engine.tables["full"], engine.requests["a"]
    table[a.row, 2] = int(table[engine.requests["b"].row, 2])
    read(engine)
    [first] = incidents(engine)
    # The record of a position further on is damaged alone.
    engine.groups[0].pool.records[int(table[a.row, 9]), 1] += 2
    read(engine)
    assert [i.positions[0] for i in incidents(engine)] == [first.positions[0], (9, 9)]
    assert incidents(engine)[1].reasons == ("CHAIN",)


def test_a_chain_that_breaks_behind_a_mended_entry_is_an_incident_of_its_own(engine: PagedEngine) -> None:
    """The position before it was wrong once, in another slot: the record is damaged alone."""
    table, a = engine.tables["full"], engine.requests["a"]
    right = int(table[a.row, 2])
    table[a.row, 2] = int(table[engine.requests["b"].row, 2])
    read(engine)
    assert only(engine).positions == ((2, 2),)
    table[a.row, 2] = right
    engine.groups[0].pool.records[int(table[a.row, 3]), 1] ^= 3
    read(engine)
    first, second = incidents(engine)
    assert (first.positions, first.followers, first.last_step) == (((2, 2),), ((3, 3),), 3)
    assert (second.reasons, second.positions, second.followers) == (("CHAIN",), ((3, 3),), ((4, 4),))


@pytest.mark.parametrize("reads", [False, True])
def test_a_page_written_before_the_request_was_last_seen_whole_was_not_reused(engine: PagedEngine, reads: bool) -> None:
    c, d = engine.add("c", 40), engine.add("d", 40)
    engine.step((c, 8))
    engine.step((d, 8))
    if reads:
        read(engine, "c")
    table = engine.tables["full"]
    table[c.row, 4:8] = table[d.row, 4:8]
    read(engine, "c")
    cause = only(engine).cause
    if reads:
        assert cause.endswith(
            "the table names what request d wrote when this request's own was in place: a wrong or stale table entry"
        )
    else:
        assert cause == "a page reused while in use: request d wrote 1 whole page at step 4"


def test_a_page_written_in_the_step_in_which_the_request_came_was_not_written_before(engine: PagedEngine) -> None:
    c, d = engine.add("c", 40), engine.add("d", 40)
    engine.step((c, 8), (d, 8))
    table = engine.tables["full"]
    table[c.row, 4:8] = table[d.row, 4:8]
    read(engine, "c")
    incident = only(engine)
    assert incident.positions == ((4, 7),)
    assert incident.cause == (
        "a wrong block from position 4 on: the table names what request d wrote when this request's own was in "
        "place: a wrong or stale table entry"
    )


@pytest.mark.parametrize("zeroed", [False, True])
def test_bytes_that_a_copy_should_have_brought_are_not_said_to_have_changed(engine: PagedEngine, zeroed: bool) -> None:
    a, table, pool = engine.requests["a"], engine.tables["full"], engine.groups[0].pool
    # Another page gets the records; its bytes never come, or come from elsewhere.
    src, dst = table[a.row, 4:8].long().clone(), torch.arange(100, 104)
    engine.manager.move(pool, src, dst, owner=a.owner)
    for half in "KV":
        for layer in flat_layers(pool, half):
            layer[dst] = 0 if zeroed else 7
    table[a.row, 4:8] = dst.to(table.dtype)
    read(engine, "a")
    incident = only(engine)
    said = "all zero: the copy or load that was to bring them" if zeroed else "are not those that a copy or load was"
    assert said in incident.cause
    assert "changed after they were written" not in incident.cause


def test_a_freed_slot_of_another_token_was_never_filled(engine: PagedEngine) -> None:
    c, d = engine.add("c", 40), engine.add("d", 40)
    engine.step((c, 8), (d, 12))
    table = engine.tables["full"]
    theirs = table[c.row, 4:8].long()
    engine.manager.retire(engine.groups[0].pool, theirs)
    table[d.row, 4:8] = theirs.to(table.dtype)
    read(engine, "d")
    incident = incidents(engine)[0]
    assert "nobody has written to any of" in incident.cause
    assert "handed out or cached and never filled" in incident.cause
