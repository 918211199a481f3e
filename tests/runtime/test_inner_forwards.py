"""Forwards inside a step: a draft model's, over tokens that may yet be rejected, beside the target's."""

from __future__ import annotations

import random

import pytest
import torch

import kv_canary as kc

from .engine import BYTES, MAX_LEN, MAX_ROWS, Engine, Request, make_pool


class Speculating(Engine):
    """A target and a draft model: the draft's pool holds, at position p, the token that follows p."""

    def __init__(self, **options: object) -> None:
        super().__init__(
            [
                kc.BufferGroup(name="full", pool=make_pool(512, name="target")),
                kc.BufferGroup(name="draft", pool=make_pool(512, name="draft"), token_offset=1),
            ],
            kc.CanaryConfig(backend="reference", **options),
        )
        self.target = self.manager.forward("verify", groups=["full"])
        self.drafts = self.manager.forward("draft", groups=["draft"], inner=True)
        self.extend = self.manager.forward("draft extend", groups=["draft"])

    def forward_batch(
        self, name: str, work: list[tuple[Request, int, list[int]]], *, shift: int = 0
    ) -> kc.ForwardBatch:
        """Return the forward of one model that puts these tokens behind so many cached positions of each request."""
        group = next(g for g in self.groups if g.name == name)
        starts = [start for _, start, _ in work]
        slots = [self.slot_of(group, r, s + i) for r, s, tokens in work for i in range(len(tokens))]
        return kc.ForwardBatch(
            requests=[
                kc.ForwardRequest(
                    request_id=r.name,
                    row=r.row,
                    owner=r.owner,
                    prefix_len=start,
                    extend_len=len(tokens),
                    tokens=lambda a, b, r=r: r.tokens[a:b],
                )
                for r, start, tokens in work
            ],
            input_ids=torch.tensor([t for _, _, tokens in work for t in tokens], dtype=torch.int64),
            positions=torch.tensor(
                [s + i + shift for s, (_, _, tokens) in zip(starts, work, strict=True) for i in range(len(tokens))],
                dtype=torch.int64,
            ),
            out_slots={name: torch.tensor(slots, dtype=torch.int64)},
            tables={name: self.tables[name]},
        )

    def write_group(self, batch: kc.ForwardBatch) -> None:
        for name, slots in batch.out_slots.items():
            pool = next(g.pool for g in self.groups if g.name == name)
            for source in (pool.k_source, pool.v_source):
                for layer in source.layers:
                    layer[slots] = torch.randint(0, 256, (len(slots), BYTES), dtype=torch.uint8)

    def make(self, forward: kc.SingleForwardManager, batch: kc.ForwardBatch) -> None:
        with forward.around(batch):
            self.write_group(batch)

    def prefill(self, *requests: Request, draft: bool = True) -> None:
        """Put all tokens but the last of each prompt into both pools."""
        work = [(r, 0, r.tokens[:-1]) for r in requests]
        for r, _, tokens in work:
            self.map(r, 0, len(tokens))
        with self.manager.one_step():
            self.make(self.target, self.forward_batch("full", work))
            if draft:
                self.make(self.extend, self.forward_batch("draft", [(r, 0, r.tokens[1:]) for r in requests]))
        for r, _, tokens in work:
            r.cached = len(tokens)

    def speculate(self, accepted: dict[str, int], *, count: int, shift: int = 0) -> None:
        """Run one step: `count` drafts for each request, verified by the target, so many of which it accepts."""
        requests = [self.requests[name] for name in accepted]
        for r in requests:
            self.map(r, r.cached, r.cached + count + 1)
        drafts = {r.name: [7000 + 100 * r.row + i for i in range(count)] for r in requests}
        with self.manager.one_step():
            for i in range(count):
                work = [(r, r.cached + i, [drafts[r.name][i]]) for r in requests]
                self.make(self.drafts, self.forward_batch("draft", work, shift=shift if i else 0))
            work = [(r, r.cached, [r.tokens[r.cached], *drafts[r.name]]) for r in requests]
            self.make(self.target, self.forward_batch("full", work))
        for r in requests:
            kept = accepted[r.name]
            r.tokens += [*drafts[r.name][:kept], 9000 + r.row]
            r.cached += kept + 1
            # The draft's slots hold the target's own last token only once it has been put there.
        with self.manager.one_step():
            missing = [(r, r.cached - 1, [r.tokens[r.cached]]) for r in requests]
            self.make(self.extend, self.forward_batch("draft", missing))


@pytest.mark.parametrize("check_tokens", [True, False])
@pytest.mark.parametrize("stride", [1, 3])
def test_drafts_are_clean_whatever_the_target_accepts(check_tokens: bool, stride: int) -> None:
    rng = random.Random(3)
    engine = Speculating(check_tokens=check_tokens, stride=stride)
    a, b = engine.add("a", 12), engine.add("b", 5)
    engine.prefill(a, b)
    for _ in range(6):
        count = rng.randrange(1, 5)
        engine.speculate({"a": rng.randrange(count + 1), "b": rng.randrange(count + 1)}, count=count)
    assert [r.sentence for r in engine.found()] == []
    assert engine.manager.summary().watching == "complete"


def test_the_tail_of_a_step_never_holds_a_draft() -> None:
    engine = Speculating()
    a = engine.add("a", 6)
    engine.prefill(a)
    tails = engine.manager.state.tails[1]
    engine.speculate({"a": 1}, count=3)
    before = int(tails.chains[a.row])
    assert before != int(tails.scratch[a.row])
    engine.speculate({"a": 0}, count=3)
    assert engine.found() == []


def test_a_draft_position_off_by_one_is_reported_where_it_is_written() -> None:
    engine = Speculating()
    a = engine.add("a", 8)
    engine.prefill(a)
    engine.speculate({"a": 1}, count=3, shift=1)
    found = [r for r in engine.found() if "WRITE_POSITION" in r.reasons]
    # The first of three drafts has its right position.
    assert [(r.tag, r.position) for r in found] == [("TAIL_FULL", p) for p in (8, 9)]


def test_draft_kv_that_a_prefix_hit_never_wrote_is_reported() -> None:
    engine = Speculating()
    a = engine.add("a", 8)
    engine.prefill(a, draft=False)
    engine.speculate({"a": 1}, count=2)
    found = engine.found()
    assert found
    never = {r.position for r in found if r.reasons == ("NEVER_WRITTEN",)}
    assert never == set(range(7))


def test_a_wrong_draft_input_is_found_once_it_counts_as_the_request_s_own() -> None:
    engine = Speculating()
    a = engine.add("a", 8)
    engine.prefill(a)
    engine.map(a, 7, 12)
    with engine.manager.one_step():
        engine.make(engine.drafts, engine.forward_batch("draft", [(a, 7, [7000])]))
    assert engine.found() == []
    # The request goes on with another token than its draft pool holds.
    a.tokens += [1, 2]
    a.cached = 8
    with engine.manager.one_step():
        engine.make(engine.extend, engine.forward_batch("draft", [(a, 8, [1])]))
    assert {r.position for r in engine.found() if "TOKEN" in r.reasons} == {7}


def test_an_inner_forward_serves_requests_that_an_earlier_one_did_not() -> None:
    engine = Speculating()
    a, b = engine.add("a", 8), engine.add("b", 8)
    engine.prefill(a, b)
    for r in (a, b):
        engine.map(r, 7, 10)
    with engine.manager.one_step():
        engine.make(engine.drafts, engine.forward_batch("draft", [(a, 7, [7000])]))
        engine.make(engine.drafts, engine.forward_batch("draft", [(a, 8, [7001]), (b, 7, [7100])]))
        engine.make(engine.drafts, engine.forward_batch("draft", [(b, 8, [7101])]))
    assert [r.sentence for r in engine.found()] == []


@pytest.mark.parametrize("phase", ["model", "tail"])
@pytest.mark.parametrize("from_the_first", [True, False])
def test_an_inner_forward_that_was_given_up_is_made_again_in_the_same_step(phase: str, from_the_first: bool) -> None:
    engine = Speculating()
    a = engine.add("a", 8)
    engine.prefill(a)
    engine.map(a, 7, 12)
    with engine.manager.one_step():
        engine.make(engine.drafts, engine.forward_batch("draft", [(a, 7, [7000])]))
        batch = engine.forward_batch("draft", [(a, 8, [7001])])
        engine.drafts.begin(batch)
        engine.drafts.head()
        engine.write_group(batch)
        if phase == "tail":
            engine.drafts.tail()
        engine.drafts.abort()
        # Nobody knows how far it came: what there is of its prefix is told anew.
        a.tokens += [7000]
        for i, token in list(enumerate([7000, 7001, 7002]))[not from_the_first :]:
            engine.make(engine.drafts, engine.forward_batch("draft", [(a, 7 + i, [token])]))
    assert [r.sentence for r in engine.found()] == []


def test_what_an_earlier_forward_of_the_same_name_could_not_plan_is_told() -> None:
    engine = Speculating()
    a = engine.add("a", 8)
    engine.prefill(a)
    engine.map(a, 7, 12)
    short = engine.tables["draft"][:, :4].clone()
    with engine.manager.one_step():
        batch = engine.forward_batch("draft", [(a, 7, [7000])])
        batch.tables["draft"] = short
        engine.make(engine.drafts, batch)
        engine.make(engine.drafts, engine.forward_batch("draft", [(a, 7, [7000])]))
    engine.manager.flush()
    assert engine.manager.summary().watching == "partial"


def test_what_one_of_several_forwards_could_not_plan_is_told_of_its_own_step_alone() -> None:
    engine = Speculating()
    a = engine.add("a", 8)
    engine.prefill(a)
    engine.map(a, 7, 12)
    # Of the first of three forwards; of none of two, twice; and of the second of three.
    for short, told in (((0,), 1), ((), 1), ((), 1), ((1,), 2)):
        with engine.manager.one_step():
            for i in range(3 if short else 2):
                batch = engine.forward_batch("draft", [(a, 7, [7000])])
                if i in short:
                    batch.tables["draft"] = engine.tables["draft"][:, :4].clone()
                engine.make(engine.drafts, batch)
        engine.manager.flush()
        assert sum(engine.manager.summary().incomplete.values()) == told


def test_what_was_expected_is_what_is_known() -> None:
    """Nothing is expected of a position whose token is not among the request's own yet."""
    engine = Speculating(check_tokens=True)
    a = engine.add("a", 8)
    engine.prefill(a)
    engine.map(a, 7, 12)
    # Another request has left its tokens in the row, further on than this one has come.
    engine.manager.state.token_pool = torch.full((MAX_ROWS, MAX_LEN), 55, dtype=torch.int32)
    engine.manager.state.token_pool[a.row, :8] = torch.tensor(a.tokens, dtype=torch.int32)
    with engine.manager.one_step():
        for i, token in enumerate([7000, 7001, 7002]):
            engine.make(engine.drafts, engine.forward_batch("draft", [(a, 7 + i, [token])]))
    assert [r.sentence for r in engine.found()] == []
