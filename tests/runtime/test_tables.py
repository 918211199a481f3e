"""Tables in pages, in rows of their own: what is recorded, verified and reported is what tables of slots give."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.difftest.simulator.scripted_engine import ScriptedEngine
from kv_canary.runtime.batch import ForwardBatch

from .engine import MAX_LEN, MAX_ROWS, Request, make_pool
from .test_captured import Tape

PAGE = 4
LIMITS = kc.CanaryLimits(max_rows=MAX_ROWS, max_requests=4, max_tokens=64, max_len=4 * MAX_LEN)


class PagedEngine(ScriptedEngine):
    """An engine whose slots come in pages.

    Args:
        kind: of groups, see `groups_of`.
        in_pages: whether the canary is given tables of pages, gathered in the order of the batch, the rest of which is
            what earlier batches had there; else tables of slots by row.
        page_size: slots of a page.
    """

    def __init__(self, kind: str, *, in_pages: bool, page_size: int = PAGE, **options: Any) -> None:
        self.in_pages, self.page_size = in_pages, page_size
        groups = groups_of(kind, page_size=page_size if in_pages else 1)
        config = kc.CanaryConfig(**{"backend": "reference", **options})
        super().__init__(groups, config, limits=LIMITS, random=torch.Generator().manual_seed(5))
        width = -(-LIMITS.max_len // page_size)
        self.gathered = {g.name: torch.full((4, width), 777_777, dtype=torch.int32) for g in self.groups}

    def map(self, request: Request, start: int, end: int) -> None:
        for group in self.groups:
            table = self.tables[group.name][request.row]
            if group.lut is not None:
                table[start:end] = self.tables[self.groups[0].name][request.row, start:end]
                continue
            for p in range(start, end):
                if p % self.page_size == 0:
                    table[p] = (1 + self.allocate(group.pool, 1)) * self.page_size
                else:
                    table[p] = table[p - 1] + 1

    def batch(self, *work: tuple[Request, int], map_new: bool = True) -> ForwardBatch:
        batch = super().batch(*work, map_new=map_new)
        if not self.in_pages:
            return batch
        for name, gathered in self.gathered.items():
            for i, (request, count) in enumerate(work):
                firsts = self.tables[name][request.row, : request.cached + count : self.page_size]
                gathered[i, : len(firsts)] = torch.where(firsts < 0, firsts, firsts // self.page_size)
        requests = [dataclasses.replace(r, table_row=i) for i, r in enumerate(batch.requests)]
        return dataclasses.replace(batch, requests=requests, tables=self.gathered)


def groups_of(kind: str, *, page_size: int) -> list[kc.BufferGroup]:
    full = kc.BufferGroup(name="full", pool=make_pool(1600, name="full"), page_size=page_size)
    match kind:
        case "full":
            return [full]
        case "window":
            return [full, kc.BufferGroup(name="swa", pool=full.pool, window=6, page_size=page_size)]
        case _:
            lut = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(1, 1600).roll(40)])
            pool = make_pool(1600, name="swa")
            return [full, kc.BufferGroup(name="swa", pool=pool, window=6, lut=lut, page_size=page_size)]


def live(engine: PagedEngine, *, seed: int, steps: int = 30) -> None:
    """Let requests come, prefill in chunks, decode, fork and go."""
    rng = random.Random(seed)
    running: list[Request] = []
    for number in range(steps):
        if len(running) < 4 and rng.random() < 0.4:
            request = engine.add(f"r{number}", 64)
            running.append(request)
            if len(running) > 1 and rng.random() < 0.5:
                # A prefix that the cache has already, in whole pages.
                other = running[0]
                shared = other.cached // engine.page_size * engine.page_size
                request.tokens[:shared], request.cached = other.tokens[:shared], shared
                for table in engine.tables.values():
                    table[request.row, :shared] = table[other.row, :shared]
        work = [(r, rng.choice([1, 1, 1, 5])) for r in running if rng.random() < 0.9]
        rng.shuffle(work)
        if work:
            engine.step(*work)
        for request in [r for r in running if r.cached > 50]:
            running.remove(request)
            engine.rows.release(request.name)


def left_by(engine: PagedEngine) -> list[torch.Tensor]:
    """Return what an engine's canary has on its device."""
    engine.manager.flush()
    state = engine.manager.state
    tensors = [*dict.fromkeys(g.pool.records for g in engine.groups), state.counters, state.tails[0].chains]
    return tensors if state.token_pool is None else [*tensors, state.token_pool[:, :64]]


@pytest.mark.every_day("4-full", "3-window", "4-lut")
@pytest.mark.parametrize("kind", ["full", "window", "lut"])
@pytest.mark.parametrize("page_size", [4, 3])
def test_pages_in_the_order_of_the_batch_leave_what_slots_by_row_leave(kind: str, page_size: int) -> None:
    for seed in range(2):
        paged, plain = (
            PagedEngine(kind, in_pages=pages, page_size=page_size, check_tokens=True) for pages in (True, False)
        )
        for engine in (paged, plain):
            live(engine, seed=seed)
        assert all(torch.equal(a, b) for a, b in zip(left_by(paged), left_by(plain), strict=True))
        assert not paged.found()
        assert not plain.found()
        summary = paged.manager.summary()
        assert summary.positions_verified == summary.positions_relied_on > 500


@pytest.mark.parametrize("kind", ["full", "window", "lut"])
def test_a_wrong_page_is_found_at_every_position_of_it(kind: str) -> None:
    found = []
    for pages in (True, False):
        engine = PagedEngine(kind, in_pages=pages, check_tokens=True)
        a, b = engine.add("a", 64), engine.add("b", 64)
        engine.step((a, 9), (b, 9))
        engine.tables["full"][a.row, 4:8] = engine.tables["full"][b.row, 4:8]
        engine.step((b, 1), (a, 1))
        reports = [r for r in engine.found() if r.group == "full" and r.tag == "HEAD_FULL"]
        found.append([(r.group, r.tag, r.slot, r.row, r.position, r.reasons) for r in reports])
        assert {r.position for r in reports if "TOKEN" in r.reasons} == {4, 5, 6, 7}
    assert found[0] == found[1]


@pytest.mark.parametrize("entry", [-1, 400, 2**31 - 1])
def test_a_page_that_no_pool_has_is_found(entry: int) -> None:
    engine = PagedEngine("full", in_pages=True)
    a = engine.add("a", 64)
    engine.step((a, 9))
    batch = engine.batch((a, 1))
    engine.gathered["full"][0, 1] = entry
    engine.run(batch)
    assert {r.position for r in engine.found() if "SLOT_RANGE" in r.reasons or "UNMAPPED" in r.reasons} == {4, 5, 6, 7}


@pytest.mark.parametrize("what", ["table_row", "row", "prefix_len", "dtype", "shape"])
def test_a_forward_whose_table_has_not_what_it_reads_goes_by_unwatched(what: str) -> None:
    said = {
        "table_row": r"table_row of a must be in \[0, 4\), the rows of tables\[full\], got 4",
        "row": r"row of a must be in \[0, 1\), the rows of tables\[full\], got 1",
        "prefix_len": r"prefix_len of a must be at most 8, as many positions as tables\[full\] has, got 9",
        "dtype": r"tables\[full\] must be int32 of shape \[rows, entries\], got torch.int64",
        "shape": r"tables\[full\] must be int32 of shape \[rows, entries\], got torch.int32 \[",
    }
    for mode in ("raise", "log"):
        engine = PagedEngine("full", in_pages=True, mode=mode)
        engine.manager.guard.contains = mode == "log"
        a = engine.add("a", 64)
        engine.step((a, 9))
        batch = engine.batch((a, 1))
        [name], [table] = batch.tables, batch.tables.values()
        [request] = batch.requests
        request = dataclasses.replace(request, table_row={"table_row": len(table), "row": None}.get(what, 0))
        table = {
            "row": table[:1],
            "prefix_len": table[:, : 8 // engine.groups[0].page_size],
            "dtype": table.long(),
            "shape": table[0],
        }.get(what, table)
        wrong = dataclasses.replace(batch, requests=[request], tables={name: table})
        if mode == "raise":
            with pytest.raises((ValueError, TypeError), match=said[what]):
                engine.run(wrong)
            continue
        engine.run(wrong)
        assert engine.manager.guard.failures == {"forward target: begin: ValueError": 1}
        # What it has written is taken in by who reads it next.
        a.cached += 1
        engine.step((a, 3))
        engine.manager.flush()
        assert engine.manager.summary().violations == 0


def test_rows_of_tables_change_under_a_captured_forward() -> None:
    twins = [PagedEngine("window", in_pages=True, check_tokens=True) for _ in range(2)]
    tape, launched = None, torch.zeros(0)
    for number, engine in enumerate(twins):
        a, b, c = (engine.add(name, 64) for name in "abc")
        engine.step((a, 9), (b, 5), (c, 7))
        if number:
            engine.tables, tables = engine.gathered, engine.tables
            before = engine.manager.state.counters.clone()
            tape = Tape(engine, requests=4, tokens=4, has_table_rows=True)  # type: ignore[arg-type]
            # A capture launches what it compiles, on nothing.
            launched = engine.manager.state.counters - before
            engine.tables = tables
        for work in ([(a, 1), (b, 1)], [(c, 1), (b, 1), (a, 1)], [(b, 1)], [(c, 1), (a, 1)]):
            batch = engine.batch(*work)
            if number and tape is not None:
                tape.run(batch)
            else:
                engine.run(batch)
            for request, count in work:
                request.cached += count
    twins[1].manager.flush()
    twins[1].manager.state.counters -= launched
    assert all(torch.equal(a, b) for a, b in zip(*map(left_by, twins), strict=True))
    assert not twins[0].found()
    assert not twins[1].found()


def test_rows_of_tables_are_refused_where_they_were_not_captured() -> None:
    engine = PagedEngine("full", in_pages=True)
    a = engine.add("a", 64)
    engine.step((a, 5))
    engine.tables, tables = engine.gathered, engine.tables
    tape = Tape(engine, requests=4, tokens=4)  # type: ignore[arg-type]
    engine.tables = tables
    with pytest.raises(ValueError, match="table_row must be left out, as captured, got given"):
        tape.run(engine.batch((a, 1)))


def test_lengths_may_be_given_without_rows() -> None:
    engine = PagedEngine("full", in_pages=True)
    a, b = engine.add("a", 64), engine.add("b", 64)
    engine.step((a, 9), (b, 5))
    batch = engine.batch((b, 1), (a, 1))
    engine.run(dataclasses.replace(batch, lengths=torch.tensor([6, 10], dtype=torch.int32)))
    assert not engine.found()
    a.cached, b.cached = 10, 6
    batch = engine.batch((b, 1), (a, 1))
    engine.run(dataclasses.replace(batch, lengths=torch.tensor([7, 12], dtype=torch.int32)))
    [report] = engine.found()
    assert report.reasons == ("BATCH",)
    assert report.request_id == "a"
    assert report.given == (a.row, 12)


def test_two_windows_over_one_pool_are_told_apart() -> None:
    pool = make_pool(400, name="kv")
    groups = [kc.BufferGroup(name=f"sliding {i}", pool=pool, window=6, page_size=PAGE) for i in range(2)]
    engine = PagedEngine.__new__(PagedEngine)
    engine.in_pages, engine.page_size = True, PAGE
    ScriptedEngine.__init__(engine, groups, kc.CanaryConfig(backend="reference"), limits=LIMITS)
    engine.gathered = {g.name: torch.zeros(4, 64, dtype=torch.int32) for g in groups}
    a = engine.add("a", 64)
    engine.step((a, 9))
    slot = int(engine.tables["sliding 1"][a.row, 8])
    engine.flip(groups[1], "K", slot, 8)
    engine.step((a, 1))
    assert {r.group for r in engine.found()} == {"sliding 1"}
    assert [i.group for i in engine.manager.incidents] == ["sliding 1"]
