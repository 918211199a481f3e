"""What a rank says of its requests, and what is made of what several say."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.constants import HEAD_OF_CHAIN, MASK64
from kv_canary.ranks import digest
from kv_canary.ranks.compare import Flag, RankDifference, RankReport, Word, compare
from kv_canary.redact import Redactor

from .engine import Engine, Request, full_engine, make_pool


def line(key: int = 7, **changes: int) -> list[int]:
    """Return what a healthy rank says of one request: 32 tokens cached, their chain 99, in slot 40."""
    words = {"KEY": key, "PREFIX_LEN": 32, "FLAGS": 0, "TAIL": 99, "SEED_SLOT": 40, "SEED_CHAIN": 99, "ENTRIES": 32}
    words |= {"VIOLATIONS": 0} | changes
    return [words[word.name] for word in Word]


def told(*ranks: list[list[int]], **options: Any) -> list[RankReport]:
    """Compare the lines of ranks in one group, of at most three requests."""
    lines = {r: torch.tensor([[*part, *[[0] * 8] * (3 - len(part))]]) for r, part in enumerate(ranks)}
    return compare(lines, step=5, groups=["full"], names={7: "a"}, **options)


HEALTHY = line()
# What one rank may have instead, and how that is called.
ODD = {
    "NOT_LOADED": line(SEED_CHAIN=0, VIOLATIONS=32),
    "OTHER_KV": line(SEED_CHAIN=11, VIOLATIONS=1),
    "TAIL": line(TAIL=11, SEED_CHAIN=11),
    "PREFIX_LEN": line(PREFIX_LEN=16, TAIL=5, SEED_CHAIN=5),
    "VIOLATIONS": line(VIOLATIONS=3),
}


def test_equal_ranks_are_not_told_of() -> None:
    assert told([HEALTHY], [HEALTHY], [HEALTHY]) == []
    assert told([HEALTHY]) == []
    # Slots and entries are each rank's own matter.
    assert told([HEALTHY], [line(SEED_SLOT=41, ENTRIES=2)]) == []


@pytest.mark.parametrize("name", list(ODD))
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_of_three_ranks_the_odd_one_is_named(name: str, odd: int) -> None:
    (report,) = told(*([ODD[name] if rank == odd else HEALTHY] for rank in range(3)))
    assert (report.differences, report.ranks, report.request_id) == ((name,), (odd,), "a")
    assert [s.rank for s in report.stands if s.differences] == [odd]
    assert f"step 5: rank {odd} of 3 differs on request a in full: {name}. " in report.sentence
    assert report.cause == RankDifference[name].value


@pytest.mark.parametrize("name", list(ODD))
def test_of_two_ranks_the_odd_one_is_named_where_the_chain_says_so(name: str) -> None:
    (report,) = told([HEALTHY], [ODD[name]])
    # A length and a tail are one word against the other; a record is held against the request's own tokens.
    assert report.ranks == ((0, 1) if name in ("TAIL", "PREFIX_LEN") else (1,))
    assert report.differences == (name,)


@pytest.mark.parametrize("name", ["NOT_LOADED", "OTHER_KV", "VIOLATIONS"])
def test_what_all_ranks_have_alike_is_no_difference(name: str) -> None:
    assert told([ODD[name]], [ODD[name]]) == []
    # Nor is it if they differ in what does not matter.
    assert told([ODD[name]], [[*ODD[name][:-1], 5]]) == []


def test_ranks_that_are_wrong_in_different_ways_are_all_named() -> None:
    (report,) = told([ODD["NOT_LOADED"]], [ODD["OTHER_KV"]], [HEALTHY])
    assert report.ranks == (0, 1)
    assert [s.differences for s in report.stands] == [("NOT_LOADED",), ("OTHER_KV",), ()]


def test_two_against_two_names_all_four() -> None:
    (report,) = told([HEALTHY], [ODD["TAIL"]], [HEALTHY], [ODD["TAIL"]])
    assert report.ranks == (0, 1, 2, 3)


def test_a_rank_whose_own_tail_is_wrong_is_not_told_to_hold_other_kv() -> None:
    (report,) = told([HEALTHY], [line(TAIL=11, SEED_CHAIN=99, VIOLATIONS=1)], [HEALTHY])
    assert (report.differences, report.ranks) == (("TAIL",), (1,))


def test_a_shorter_hit_of_another_prefix_is_both() -> None:
    (report,) = told([HEALTHY], [line(PREFIX_LEN=16, TAIL=5, SEED_CHAIN=6)], [HEALTHY])
    assert (report.differences, report.ranks) == (("PREFIX_LEN", "OTHER_KV"), (1,))


def test_violations_are_held_against_ranks_that_verified_as_much_alone() -> None:
    hit = line(ENTRIES=16, VIOLATIONS=1)
    assert told([hit], [line(ENTRIES=8)]) == []
    assert told([hit], [line(ENTRIES=32, VIOLATIONS=2)], [line(ENTRIES=8)]) == []
    for enough in (16, 32):
        (report,) = told([line(ENTRIES=8)], [hit], [line(ENTRIES=enough)])
        assert (report.differences, report.ranks) == (("VIOLATIONS",), (1,))


@pytest.mark.parametrize(("ranks", "named"), [([1, 0], (0, 1)), ([1, 1, 0], (2,)), ([0, 0, 1], (2,))])
def test_a_request_that_some_ranks_do_not_have(ranks: list[int], named: tuple[int, ...]) -> None:
    other = line(key=8)
    (report,) = told(*([HEALTHY, other] if there else [other] for there in ranks))
    assert (report.differences, report.ranks) == (("REQUESTS",), named)
    absent = [stand for stand in report.stands if stand.prefix_len is None]
    assert [s.rank for s in absent] == [r for r, there in enumerate(ranks) if not there]
    assert "did not run it" in report.sentence


def test_a_request_that_this_rank_does_not_know_has_no_name() -> None:
    (report,) = told([HEALTHY, line(key=8)], [HEALTHY])
    assert (report.key, report.request_id) == (8, None)
    assert "a request that this rank does not have" in report.sentence


def test_a_name_of_a_request_stays_within_its_line() -> None:
    # Names may come from a client.
    lines = {rank: torch.tensor([[part]]) for rank, part in enumerate((HEALTHY, ODD["TAIL"]))}
    (report,) = compare(lines, step=5, groups=["full"], names={7: "a\nkv-canary: forged \x1b[2J\u202e"})
    assert "differ on request a\\nkv-canary: forged \\x1b[2J\\u202e in full" in report.sentence
    assert report.sentence.isprintable()
    # Who asks for the name gets the name.
    assert report.request_id == "a\nkv-canary: forged \x1b[2J\u202e"


def test_the_order_of_requests_does_not_matter() -> None:
    assert told([HEALTHY, line(key=8)], [line(key=8), HEALTHY]) == []


@pytest.mark.parametrize("name", list(ODD))
def test_what_the_engine_threw_away_on_any_rank_is_not_compared(name: str) -> None:
    thrown = [*ODD[name]]
    thrown[Word.FLAGS] = Flag.DISCARDED
    assert told([HEALTHY], [thrown]) == []
    assert told([line(FLAGS=Flag.DISCARDED)], [ODD[name]]) == []


def test_a_seed_that_is_not_there_to_be_read_is_not_missed() -> None:
    for changes in ({"SEED_SLOT": HEAD_OF_CHAIN, "SEED_CHAIN": 0}, {"FLAGS": Flag.SEED_GONE, "SEED_CHAIN": 0}):
        assert told([HEALTHY], [line(**changes)]) == []
        (report,) = told([ODD["NOT_LOADED"]], [line(**changes)])
        assert report.ranks == (0,)
        assert report.stands[1].seed_chain is None


@pytest.mark.parametrize("slot", [0, -3])
def test_a_seed_that_maps_nowhere_was_not_loaded(slot: int) -> None:
    (report,) = told([HEALTHY], [line(SEED_SLOT=slot, SEED_CHAIN=0)])
    assert (report.differences, report.ranks) == (("NOT_LOADED",), (1,))


def test_steps_that_may_be_apart_are_compared_where_they_look_alike() -> None:
    assert told([HEALTHY], [ODD["PREFIX_LEN"]], steps_match=False) == []
    assert told([HEALTHY], [HEALTHY, line(key=8)], steps_match=False) == []
    (report,) = told([HEALTHY], [ODD["NOT_LOADED"]], steps_match=False)
    assert report.ranks == (1,)


def test_groups_in_which_ranks_differ_are_named_together() -> None:
    healthy, odd = [HEALTHY], [ODD["NOT_LOADED"]]
    ranks = {0: torch.tensor([healthy, healthy, healthy]), 1: torch.tensor([healthy, odd, odd])}
    (report,) = compare(ranks, step=5, groups=["full", "swa", "draft"], names={})
    assert report.groups == ("swa", "draft")


def test_a_report_is_ready_for_json() -> None:
    (report,) = told([line(TAIL=-1, SEED_CHAIN=-1)], [line(TAIL=-1, SEED_CHAIN=0)])
    words = json.loads(json.dumps(report.as_dict()))
    assert words["stands"][0]["tail"] == MASK64
    assert words["stands"][1]["differences"] == ["NOT_LOADED"]
    assert words["ranks"] == [1]


def digest_of(engine: Engine, *work: tuple[Request, int], batch: kc.ForwardBatch | None = None) -> torch.Tensor:
    """Run one forward, and return the lines that its rank would send."""
    gatherer = digest.Gatherer(engine.manager)
    batch = batch or engine.batch(*work)
    engine.run(batch)
    gatherer.see(engine.forward, batch)
    words = torch.full(gatherer.shape, -1)
    names = gatherer.digest(engine.manager.step).pack(words)
    assert set(names.values()) == {r.request_id for r in batch.requests}
    for request, count in work:
        request.cached += count
    return words


def test_a_healthy_rank_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    # Entries are counted in several pieces here.
    monkeypatch.setattr(digest, "_CHUNK", 7)
    groups = [
        kc.BufferGroup(name="full", pool=make_pool()),
        kc.BufferGroup(name="swa", pool=make_pool(), window=5),
    ]
    engine = Engine(groups)
    a, b = engine.add("a", 60), engine.add("b", 60)
    first = digest_of(engine, (a, 20), (b, 7))
    assert first[:, :2, Word.PREFIX_LEN].eq(0).all()
    assert first[:, :2, Word.SEED_SLOT].eq(HEAD_OF_CHAIN).all()
    assert first[:, 2:].eq(0).all()
    second = digest_of(engine, (b, 1), (a, 3))
    assert second[:, :2, Word.KEY].eq(first[:, :2, Word.KEY].flip(1)).all()
    for i, group in enumerate(groups):
        for j, request in enumerate((b, a)):
            words = dict(zip(Word, second[i, j].tolist(), strict=True))
            cached = request.cached - (1, 3)[j]
            seed = engine.slot_of(group, request, cached - 1)
            assert words[Word.PREFIX_LEN] == cached
            assert words[Word.SEED_SLOT] == seed
            assert words[Word.TAIL] == words[Word.SEED_CHAIN] == int(group.pool.records[seed, 1])
            assert words[Word.ENTRIES] == (min(cached, 5) if group.window else cached)
            assert words[Word.VIOLATIONS] == words[Word.FLAGS] == 0
    assert engine.found() == []


def test_lines_of_another_step_leave_nothing_behind() -> None:
    engine = full_engine()
    a, b = engine.add("a", 60), engine.add("b", 60)
    gatherer = digest.Gatherer(engine.manager)
    for work in (((a, 5), (b, 5)), ((b, 1),)):
        batch = engine.step(*work)
        gatherer.see(engine.forward, batch)
        sent = gatherer.digest(engine.manager.step)
        gatherer.forget()
    words = torch.full(gatherer.shape, -1)
    assert list(sent.pack(words).values()) == ["b"]
    assert words[0, 1:].eq(0).all()


class Stream:
    """A stream that notes what waits for what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_the_copy_of_a_digest_waits_for_what_was_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    main, side, empty = Stream("main", log), Stream("side", log), torch.empty

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    engine = full_engine()
    a = engine.add("a", 60)
    gatherer = digest.Gatherer(engine.manager)
    # As on a GPU, where the lines are copied beside the forwards.
    monkeypatch.setattr(gatherer, "_side", side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: log.append("copied")))
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    batch = engine.step((a, 5))
    gatherer.see(engine.forward, batch)
    sent = gatherer.digest(engine.manager.step)
    assert log == ["side waits for main", "on side", "copied", "off side"]
    assert sent.lines is not None
    assert sent.lines[0, 0, Word.SEED_SLOT] == HEAD_OF_CHAIN


def test_a_draft_group_has_the_tail_of_its_shifted_tokens() -> None:
    engine = Engine([kc.BufferGroup(name="draft", pool=make_pool(), token_offset=1)])
    a = engine.add("a", 60)
    digest_of(engine, (a, 10))
    words = digest_of(engine, (a, 1))
    assert words[0, 0, Word.TAIL] == engine.manager.state.tails[1].chains[a.row]
    # This engine writes its own tokens there, not the next ones.
    assert words[0, 0, Word.SEED_CHAIN] not in (0, words[0, 0, Word.TAIL])


def test_violations_of_this_step_alone_are_counted_to_their_request() -> None:
    engine = full_engine()
    a, b = engine.add("a", 60), engine.add("b", 60)
    engine.step((a, 10), (b, 10))
    source = engine.groups[0].pool.k_source
    for request, positions in ((a, (1, 2)), (b, (3,))):
        for position in positions:
            layer, start, _ = source.coverage(position)
            source.layers[layer][engine.slot_of(engine.groups[0], request, position), start] ^= 1
    found = digest_of(engine, (b, 1), (a, 1))
    assert found[0, :2, Word.VIOLATIONS].tolist() == [1, 2]
    again = digest_of(engine, (a, 1), (b, 1))
    # The ring still holds those of the step before.
    assert again[0, :2, Word.VIOLATIONS].tolist() == [2, 1]


def test_a_seed_that_was_never_loaded_or_is_anothers_is_read_as_it_is() -> None:
    engine = full_engine()
    group = engine.groups[0]
    a, b, c = (engine.add(name, 60) for name in "abc")
    engine.step((a, 10), (b, 10))
    # c's slots are mapped, and nothing has come into them.
    engine.map(c, 0, 4)
    c.cached = 4
    a.tokens[9] += 1
    words = digest_of(engine, (c, 1), (b, 1))
    assert words[0, 0, Word.SEED_CHAIN] == 0
    assert words[0, 1, Word.SEED_CHAIN] == words[0, 1, Word.TAIL]
    engine.tables["full"][b.row, 10] = engine.slot_of(group, a, 9)
    words = digest_of(engine, (b, 1))
    assert words[0, 0, Word.SEED_CHAIN] == group.pool.records[engine.slot_of(group, a, 9), 1]
    assert words[0, 0, Word.SEED_CHAIN] != words[0, 0, Word.TAIL]


def test_violations_of_earlier_steps_and_past_the_count_are_not_counted() -> None:
    log = kc.ViolationLog.allocate(ring_cap=4)
    rows_and_steps = [(1, 5), (1, 6), (2, 6), (1, 6)]
    for violation, (row, step) in zip(log.ring, rows_and_steps, strict=True):
        violation[3], violation[12] = row, step
    log.count.fill_(3)
    step = torch.tensor([6])
    assert digest._violations(log, step, rows=4).tolist() == [0, 1, 1, 0]
    # A ring that overflowed is full.
    log.count.fill_(9)
    assert digest._violations(log, step, rows=4).tolist() == [0, 2, 1, 0]


def test_the_first_slot_of_the_pool_can_be_a_seed() -> None:
    engine = full_engine()
    a = engine.add("a", 60)
    engine.step((a, 1))
    words = digest_of(engine, (a, 1))
    assert words[0, 0, Word.SEED_SLOT] == 1
    assert words[0, 0, Word.SEED_CHAIN] == words[0, 0, Word.TAIL]


def test_a_step_without_a_digest_packs_nothing() -> None:
    words = torch.full((1, 2, len(Word)), -1)
    assert digest.Digest(step=3).pack(words) == {}
    assert words.eq(0).all()


@pytest.mark.parametrize("slot", [0, -1, 10**6])
def test_a_seed_outside_the_pool_is_read_as_nothing(slot: int) -> None:
    engine = full_engine()
    a = engine.add("a", 60)
    engine.step((a, 10))
    engine.tables["full"][a.row, 9] = slot
    words = digest_of(engine, (a, 1))
    assert words[0, 0, Word.SEED_CHAIN] == 0
    assert words[0, 0, Word.SEED_SLOT] != HEAD_OF_CHAIN


@pytest.mark.parametrize(("new", "gone"), [(5, False), (6, True), (20, True)])
def test_a_ring_that_wrote_over_the_seed_says_so(new: int, gone: bool) -> None:
    group = kc.BufferGroup(name="ring", pool=make_pool(), window=5, ring=True)
    engine = Engine([group])
    a = engine.add("a", 60)
    engine.step((a, 10))
    words = digest_of(engine, (a, new))
    flag = Flag.SEED_GONE if gone else 0
    assert words[0, 0, Word.FLAGS] == flag
    assert words[0, 0, Word.SEED_CHAIN] == (0 if gone else words[0, 0, Word.TAIL])


def test_a_request_that_was_thrown_away_says_so_and_has_no_violations() -> None:
    engine = full_engine()
    a = engine.add("a", 60)
    engine.step((a, 10))
    source = engine.groups[0].pool.k_source
    layer, start, _ = source.coverage(1)
    source.layers[layer][engine.slot_of(engine.groups[0], a, 1), start] ^= 1
    batch = engine.batch((a, 1))
    thrown = dataclasses.replace(batch.requests[0], discarded=lambda: True)
    words = digest_of(engine, batch=dataclasses.replace(batch, requests=[thrown]))
    assert words[0, 0, Word.FLAGS] == Flag.DISCARDED
    assert words[0, 0, Word.VIOLATIONS] == 0


def test_what_another_request_of_the_forward_produces_has_no_seed() -> None:
    engine = full_engine()
    a = engine.add("a", 60)
    b = engine.add("b", a.tokens)
    batch = engine.batch((a, 10))
    engine.tables["full"][b.row, :10] = engine.tables["full"][a.row, :10]
    b.cached = 10
    both = engine.batch((a, 10), (b, 1), map_new=False)
    engine.map(b, 10, 11)
    both = engine.batch((a, 10), (b, 1), map_new=False)
    requests = [both.requests[0], dataclasses.replace(both.requests[1], pending=10)]
    words = digest_of(engine, batch=dataclasses.replace(both, requests=requests))
    assert words[0, 1, Word.SEED_SLOT] == HEAD_OF_CHAIN
    assert len(batch.requests) == 1
    assert engine.found() == []


def test_only_the_first_forward_of_a_group_counts_and_inner_ones_do_not() -> None:
    groups = [
        kc.BufferGroup(name="full", pool=make_pool()),
        kc.BufferGroup(name="draft", pool=make_pool(), token_offset=1),
    ]
    engine = Engine(groups)
    a = engine.add("a", 60)
    manager = engine.manager
    target, inner = manager.forward("t", groups=["full"]), manager.forward("d", groups=["draft"], inner=True)
    gatherer = digest.Gatherer(manager)

    def run(forward: kc.SingleForwardManager, name: str, count: int, start: int) -> None:
        a.cached = start
        whole = engine.batch((a, count))
        batch = dataclasses.replace(whole, out_slots={name: whole.out_slots[name]}, tables={name: whole.tables[name]})
        with forward.around(batch):
            pass
        gatherer.see(forward, batch)

    with manager.one_step():
        run(inner, "draft", 2, 0)
        run(target, "full", 4, 0)
        run(target, "full", 1, 4)
    words = torch.full(gatherer.shape, -1)
    gatherer.digest(1).pack(words)
    assert words[0, 0, Word.PREFIX_LEN] == 0
    assert words[0, 0, Word.KEY] != 0
    assert words[1].eq(0).all()


def test_a_report_can_be_told_without_names_and_chains() -> None:
    words = torch.zeros(2, 1, 1, 8, dtype=torch.int64)
    words[:, 0, 0] = torch.tensor([77, 5, 0, 4711, 3, 4711, 5, 0])
    words[1, 0, 0, 3] = 4712
    plain, hidden = (
        compare({0: words[0], 1: words[1]}, step=3, groups=["full"], names={77: "somebody"}, redactor=redactor)
        for redactor in (None, Redactor("key"))
    )
    (told,), (report,) = plain, hidden
    assert told.request_id == "somebody"
    assert report.differences == told.differences
    shown = str(report)
    assert not any(text in shown for text in ("somebody", "4711", f"{4711:016x}", "key=77,"))
