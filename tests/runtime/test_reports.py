"""What a person reads: one damaged engine per cause, and the words that must be in the report."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kv_canary as kc
from kv_canary.reports import Decoder
from kv_canary.reports.lost import LostRecords
from kv_canary.specs.violation_row import ViolationRow, site_of

from .engine import Engine, full_engine, make_pool


@pytest.fixture
def engine() -> Engine:
    """An engine whose request `a` has 6 tokens cached in slots 1 to 6, and `b` 6 in slots 7 to 12."""
    engine = full_engine()
    engine.step((engine.add("a", 20), 6))
    engine.step((engine.add("b", 20), 6))
    return engine


def run_and_report(engine: Engine, *, tag: str = "HEAD_FULL") -> kc.ViolationReport:
    """Run one more forward of `a` and return the one report with `tag`."""
    engine.step((engine.requests["a"], 1))
    reports = [r for r in engine.found() if r.tag == tag]
    assert len(reports) == 1, [r.sentence for r in reports]
    return reports[0]


def layers(engine: Engine, half: str) -> tuple[torch.Tensor, ...]:
    pool = engine.groups[0].pool
    return (pool.k_source if half == "K" else pool.v_source).layers


def test_changed_bytes_name_the_half_the_layer_and_the_bytes(engine: Engine) -> None:
    layers(engine, "V")[1][4, 7] ^= 16
    report = run_and_report(engine)
    assert report.reasons == ("V",)
    assert report.places == ("V of layer 1, bytes 0 to 32",)
    assert "a stray write, a copy race or memory corruption" in report.cause
    assert "HEAD_FULL: request a reads position 3 in slot 4 of full: V. Changed: V of layer 1" in report.sentence
    assert "written by request a at step 1; expected token" in report.sentence


def test_a_zeroed_page_is_called_that(engine: Engine) -> None:
    for half in "KV":
        for layer in layers(engine, half):
            layer[4] = 0
    report = run_and_report(engine)
    assert report.reasons == ("K", "V")
    assert report.places == ("K of layer 1, bytes 0 to 32", "V of layer 1, bytes 0 to 32")
    assert "the bytes are all zero: the slot or its page was zeroed" in report.cause


def test_one_zeroed_half_beside_a_changed_one_is_no_zeroed_page(engine: Engine) -> None:
    layers(engine, "K")[1][4] = 0
    layers(engine, "V")[1][4, 0] ^= 1
    report = run_and_report(engine)
    assert report.reasons == ("K", "V")
    assert "zero" not in report.cause


def test_a_freed_slot_is_a_use_after_free(engine: Engine) -> None:
    engine.manager.retire(engine.groups[0].pool, torch.tensor([4]), owner=engine.requests["b"].owner)
    report = run_and_report(engine)
    assert report.reasons == ("FREED",)
    assert "use after free" in report.cause
    assert "freed by request b at step 2" in report.sentence


def test_a_slot_that_is_handed_out_in_use_has_two_owners(engine: Engine) -> None:
    engine.manager.retire(engine.groups[0].pool, torch.tensor([4]), owner=engine.requests["b"].owner, handed_out=True)
    report = run_and_report(engine)
    assert report.reasons == ("FREED",)
    assert report.cause == "two owners: the slot was handed out while a request still reads it"
    assert "handed out to request b at step 2" in report.sentence
    assert report.record is not None
    assert report.record.handed_out


def test_a_table_off_by_one_is_called_that(engine: Engine) -> None:
    table = engine.tables["full"][engine.requests["a"].row]
    table[3] = table[4]
    engine.step((engine.requests["a"], 1))
    report = next(r for r in engine.found() if r.tag == "HEAD_FULL" and r.position == 3)
    assert {"POSITION", "TOKEN"} <= set(report.reasons)
    assert "the table is off by one" in report.cause


def test_another_position_of_the_same_request_is_called_that(engine: Engine) -> None:
    table = engine.tables["full"][engine.requests["a"].row]
    table[4] = table[0]
    engine.step((engine.requests["a"], 1))
    report = next(r for r in engine.found() if r.tag == "HEAD_FULL" and r.position == 4)
    assert "another position of the same request" in report.cause


def test_a_table_entry_of_another_request_is_called_that(engine: Engine) -> None:
    a, b = engine.requests["a"], engine.requests["b"]
    engine.tables["full"][a.row, 3] = engine.tables["full"][b.row, 5]
    engine.step((a, 1))
    report = next(r for r in engine.found() if r.tag == "HEAD_FULL" and r.position == 3)
    assert {"POSITION", "TOKEN", "CHAIN"} <= set(report.reasons)
    assert "it holds another request's token" in report.cause
    assert "written by request b at step 2" in report.sentence


@pytest.mark.parametrize("maps", [True, False])
def test_a_write_to_another_slot_than_the_table_names_is_a_wrong_mapping(engine: Engine, maps: bool) -> None:
    a, b = engine.requests["a"], engine.requests["b"]
    batch = engine.batch((b, 1))
    own = f"slot {int(batch.out_slots['full'])}" if maps else "no slot"
    batch.out_slots["full"][0] = engine.tables["full"][a.row, 3]
    if not maps:
        engine.tables["full"][b.row, 6] = -1
    engine.run(batch)
    b.cached += 1
    overwrite = engine.found()[0]
    assert (overwrite.reasons, overwrite.slot) == (("OVERWRITE",), 4)
    assert overwrite.cause == (
        f"the forward wrote to slot 4 where the table names {own}: a wrong or stale entry of the slot mapping"
    )


@pytest.mark.parametrize(("newest", "row", "named"), [(3, 2, 13), (4, 2, None), (3, 9, None)])
def test_a_table_is_asked_as_long_as_its_row_is_known_to_be_the_requests(
    engine: Engine, newest: int, row: int, named: int | None
) -> None:
    """A step that has come since, without the request, may have given its row to another one."""
    group, table = engine.groups[0], engine.tables["full"]
    engine.map(engine.requests["b"], 6, 7)
    step = SimpleNamespace(number=3, tables={group.name: table})
    steps = SimpleNamespace(
        latest=lambda *_: (step, SimpleNamespace(row_in_tables=row)), newest=SimpleNamespace(number=newest)
    )
    lost = LostRecords(steps, group_of=lambda _: group, came=lambda _: None)
    assert lost.named(ViolationRow(step=3, row=2, position=6)) == named


def test_a_slot_reused_while_in_use_is_called_that(engine: Engine) -> None:
    a, b = engine.requests["a"], engine.requests["b"]
    engine.tables["full"][b.row, 6] = engine.tables["full"][a.row, 3]
    engine.step((b, 1), map_new=False)
    overwrite = engine.found()[0]
    assert overwrite.reasons == ("OVERWRITE",)
    assert "two owners" in overwrite.cause
    assert "request b writes position 6 in slot 4" in overwrite.sentence
    assert "over a record of request a (step 1)" in overwrite.sentence
    # And its bytes change as well.
    layers(engine, "K")[6 % 2][4, 0] ^= 1
    engine.step((a, 1))
    report = next(r for r in engine.found() if r.tag == "HEAD_FULL" and r.position == 3)
    assert "reused while in use, and its bytes changed as well" in report.cause


def test_another_token_at_the_right_position_is_called_an_old_branch(engine: Engine) -> None:
    a = engine.requests["a"]
    a.tokens[3] += 1
    # The engine goes on with another text than the one it has cached; its tail was advanced over the new one.
    a.owner += 1000
    engine.rows._numbers._names[a.owner] = "a"
    engine.step((a, 1))
    reports = engine.found()
    token = next(r for r in reports if r.tag == "HEAD_FULL")
    assert (token.reasons, token.position) == (("TOKEN",), 3)
    prefix = next(r for r in reports if "PREFIX" in r.reasons)
    assert "not this request's own" in prefix.cause
    assert prefix.position == 5


def test_an_old_branch_of_the_same_owner_is_called_that(engine: Engine) -> None:
    a = engine.requests["a"]
    a.tokens[3] += 1
    state = engine.manager.state
    for progress in (state.tails[0].progress, state._tokens):
        progress._lengths[a.row] = 0
    report = run_and_report(engine)
    assert report.reasons == ("TOKEN",)
    assert "given another token than the request's own: a wrong input, or an old branch" in report.cause
    assert f"expected token {a.tokens[3]} of position 3" in report.sentence


def test_the_right_token_after_another_prefix_is_called_that(engine: Engine) -> None:
    # More than a bit of it, which would be the record's own damage.
    engine.groups[0].pool.records[4, 1] ^= 3
    engine.step((engine.requests["a"], 1))
    reports = [r for r in engine.found() if r.tag == "HEAD_FULL"]
    assert [(r.reasons, r.position) for r in reports] == [(("CHAIN",), 3), (("CHAIN",), 4)]
    assert "the right token after another prefix" in reports[0].cause


def test_a_slot_that_nothing_wrote_is_called_that(engine: Engine) -> None:
    engine.tables["full"][engine.requests["a"].row, 3] = 100
    report = run_and_report(engine)
    assert (report.reasons, report.slot, report.record) == (("NEVER_WRITTEN",), 100, None)
    assert "nothing ever wrote there" in report.cause


def test_a_live_position_on_the_padding_slot_is_called_that(engine: Engine) -> None:
    engine.tables["full"][engine.requests["a"].row, 3] = 0
    report = run_and_report(engine)
    assert (report.reasons, report.slot) == (("UNMAPPED",), 0)
    assert "maps to the padding slot" in report.cause


@pytest.mark.parametrize(
    ("entry", "cause"),
    [(128, "outside the pool"), (1 << 30, "outside the pool"), (-7, "an index that no pool has")],
)
def test_a_slot_that_no_pool_has_is_called_that(engine: Engine, entry: int, cause: str) -> None:
    engine.tables["full"][engine.requests["a"].row, 3] = entry
    report = run_and_report(engine)
    assert report.reasons == ("SLOT_RANGE",)
    assert cause in report.cause


@pytest.mark.parametrize(("off", "words"), [(1, "off by one"), (-1, "off by one"), (3, "off by 3")])
def test_positions_that_are_off_are_called_that(engine: Engine, off: int, words: str) -> None:
    a = engine.requests["a"]
    batch = engine.batch((a, 1))
    batch.positions[0] += off
    engine.run(batch)
    reports = engine.found()
    assert [r.reasons for r in reports] == [("WRITE_POSITION",)]
    assert reports[0].position == 6
    assert f"positions are {words}" in reports[0].cause
    assert f"Stored: token {a.tokens[6]} at position {6 + off}." in reports[0].sentence


def test_a_stale_prefix_is_called_that(engine: Engine) -> None:
    a, b = engine.requests["a"], engine.requests["b"]
    engine.tables["full"][a.row, :6] = engine.tables["full"][b.row, :6]
    engine.step((a, 1))
    report = next(r for r in engine.found() if "PREFIX" in r.reasons)
    assert (report.tag, report.position, report.slot) == ("TAIL_FULL", 5, 12)
    assert "a stale or wrong prefix hit" in report.cause
    assert "written by request b at step 2" in report.sentence


def decoder(groups: list[kc.BufferGroup] | None = None) -> Decoder:
    groups = groups or [kc.BufferGroup(name="full", pool=make_pool())]
    return Decoder(groups, name_of_row=lambda step, row: None, name_of_owner=lambda owner: None)


def row(**words: int) -> ViolationRow:
    return ViolationRow(**{"token": -1, **words})


def test_a_swapped_input_id_is_called_that() -> None:
    words = row(
        site=1, reasons=int(kc.Reason.WRITE_TOKEN), slot=5, row=2, position=3, identity=3 << 32 | 9, token=8, owner=4
    )
    report = decoder().decode(words)
    assert report.cause == "the forward was given another token than the one that was sampled"
    assert "row 2 writes position 3 in slot 5 of full: WRITE_TOKEN" in report.sentence
    assert (report.expected_token, report.request_id) == (8, None)


def test_words_are_read_back_unsigned() -> None:
    words = row(
        reasons=int(kc.Reason.K), identity=-1, chain=-2, kv=-3, writer=-1, observed_kv=-4, expected_chain=-5, step=7
    )
    report = decoder().decode(words)
    record = report.record
    assert record is not None
    assert (record.token, record.position) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert (record.chain, record.kv) == ((1 << 64) - 2, (1 << 64) - 3)
    assert (record.owner, record.step, record.retired) == ((1 << 24) - 1, (1 << 39) - 1, True)
    assert (report.observed_kv, report.expected_chain) == ((1 << 64) - 4, (1 << 64) - 5)


def test_a_report_names_the_group_that_the_row_says() -> None:
    pool = make_pool()
    groups = [kc.BufferGroup(name=n, pool=pool, window=w) for n, w in (("near", 4), ("far", 9), ("all", 0))]
    for number, name in ((1, "near"), (2, "far")):
        words = row(site=site_of(kc.Tag.HEAD_SWA, number), reasons=int(kc.Reason.UNMAPPED))
        report = decoder(groups).decode(words)
        assert (report.group, report.tag) == (name, "HEAD_SWA")


def test_a_row_that_names_no_group_is_of_the_first_one_of_its_tag() -> None:
    groups = [kc.BufferGroup(name=n, pool=make_pool(), window=w) for n, w in (("all", 0), ("near", 4), ("far", 9))]
    words = row(site=int(kc.Tag.TAIL_SWA), reasons=int(kc.Reason.UNMAPPED))
    assert decoder(groups).decode(words).group == "near"


def test_a_step_long_past_is_reported_by_its_row() -> None:
    engine = full_engine()
    a = engine.add("a", 100)
    engine.step((a, 4))
    words = row(reasons=int(kc.Reason.UNMAPPED), row=a.row, step=1)
    assert engine.manager.accounts._decoder.decode(words).request_id == "a"
    for _ in range(64):
        engine.step((a, 1))
    assert engine.manager.accounts._decoder.decode(words).request_id is None


def test_a_request_that_the_engine_cannot_name_is_told_of_by_its_row(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever fails there, what was found is not lost with it."""

    class Source:
        def name(self, member: object) -> str:
            raise KeyError("no name")

        def tokens(self, member: object, start: int, end: int) -> list[int]:
            return list(range(start, end))

        def newest(self, members: object, ends: object) -> None:
            return None

        def discarded(self, member: object, length: int) -> bool:
            return False

    engine = full_engine()
    engine.manager.guard.contains = True
    request = engine.add("a", list(range(60)))
    one = np.array([request.row])
    composition = kc.Composition([object()], rows=one, owners=np.array([request.owner]), source=Source())
    for prefix, extend in ((0, 20), (20, 1), (21, 1)):
        batch = engine.batch((request, extend))
        arrays = kc.BatchRequests(composition, prefix=np.array([prefix]), extend=np.array([extend]))
        if prefix == 21:
            engine.flip(engine.groups[0], "K", engine.slot_of(engine.groups[0], request, 5), 5)
        engine.run(dataclasses.replace(batch, requests=arrays))
        request.cached += extend
    [report] = [r for r in engine.found() if r.tag == "HEAD_FULL"]
    assert (report.request_id, report.reasons, report.position) == (f"row {request.row}", ("K",), 5)
    assert engine.manager.summary().violations == 1
    assert engine.manager.summary().failures == {}
    assert caplog.text.count("Source.name failed") == 1
