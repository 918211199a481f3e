"""Audits: the bytes of a request are looked at before its first forward and behind its last, between forwards."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.observers import Observer, RequestVerdict
from kv_canary.runtime import audits as audits_module
from kv_canary.runtime import seals
from kv_canary.runtime.audits import slots_of
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.replays import Launch, Replays

from .engine import BYTES, LAYERS, MAX_LEN, Engine, Request, full_engine, make_pool

BACKENDS = ("reference", "triton")


class Verdicts(Observer):
    """Keeps what it is told of requests."""

    def __init__(self) -> None:
        self.seen: list[RequestVerdict] = []

    def on_request(self, verdict: RequestVerdict) -> None:
        self.seen.append(verdict)

    def told(self) -> list[tuple[str, str, int]]:
        """Return name, verdict and slots of each."""
        return [(v.request_id, v.verdict, v.slots) for v in self.seen]


def audited(*, read_bytes: int = 1, groups: list[kc.BufferGroup] | None = None, **options: object) -> Engine:
    """An engine whose bytes are sampled in few places and never scrubbed, so that only audits see the others."""
    settings = {"backend": "reference", "seals": "layer", "scrub_share": 0.0, **options}
    groups = groups or [kc.BufferGroup(name="full", pool=make_pool(256, read_bytes=read_bytes))]
    return Engine(groups, kc.CanaryConfig(**settings), observers=[Verdicts()])  # type: ignore[arg-type]


def verdicts(engine: Engine) -> Verdicts:
    engine.manager.flush()
    return next(o for o in engine.manager.accounts.observers if isinstance(o, Verdicts))


def slots_in(engine: Engine, request: Request, group: str = "full") -> torch.Tensor:
    return engine.tables[group][request.row, : request.cached].long().clone()


def damage(engine: Engine, slot: int, *, half: str = "V", layer: int = 1, byte: int = 31) -> None:
    pool = engine.groups[0].pool
    source = pool.k_source if half == "K" else pool.v_source
    assert source is not None
    source.layers[layer].view(-1, source.bytes_per_token)[slot, byte] ^= 128


def hit(engine: Engine, name: str, other: Request, count: int, *, more: int = 20) -> Request:
    """Return a new request whose first `count` tokens are another's, and cached where that has them."""
    request = engine.add(name, [*other.tokens[:count], *range(7000, 7000 + more)])
    for table in engine.tables.values():
        table[request.row, :count] = table[other.row, :count]
    request.cached = count
    return request


def complete(engine: Engine, request: Request) -> None:
    engine.manager.complete(request.name, {g.name: slots_in(engine, request, g.name) for g in engine.groups})


@pytest.fixture(params=[False, True], ids=["as it is", "replayed"])
def replays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let launches be as they are, or for rounded sizes and by graphs, which only call them here."""
    if request.param:
        monkeypatch.setattr(CanaryContext, "new_replays", lambda _: Replays(lambda launch: launch))
    return bool(request.param)


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prefix_hit_is_looked_at_before_anybody_reads_it(backend: str) -> None:
    engine = audited(backend=backend)
    a = engine.add("a", 60)
    engine.step((a, 9))
    slot = int(slots_in(engine, a)[4])
    damage(engine, slot)
    engine.step((a, 1))
    # Nobody has come, and its own forward reads another byte.
    assert engine.found() == []
    b = hit(engine, "b", a, 8)
    batch = engine.batch((b, 2))
    engine.forward.begin(batch)
    # What was found is there before HEAD.
    assert int(engine.manager.state.violations.count) == 1
    engine.forward.head()
    engine.write_bytes(batch)
    engine.forward.tail()
    engine.forward.end()
    (report,) = engine.found()
    assert (report.reasons, report.slot, report.position) == (("SEAL_V",), slot, 4)
    assert report.places == ("V somewhere from layer 0 to layer 1",)
    audits = engine.manager.summary().audits
    assert audits is not None
    assert (audits.admitted, audits.unsealed) == (8, 0)


@pytest.mark.usefixtures("replays")
def test_a_request_is_admitted_once_and_again_when_it_comes_back() -> None:
    engine = audited()

    def admitted() -> int:
        engine.manager.flush()
        audits = engine.manager.summary().audits
        return -1 if audits is None else audits.admitted

    a = engine.add("a", 80)
    for count in (9, 1, 5, 1):
        engine.step((a, count))
    assert admitted() == 0
    b = hit(engine, "b", a, 10)
    engine.step((b, 2), (a, 1))
    engine.step((b, 1), (a, 1))
    assert admitted() == 10
    # Put off: its row is given back, and it comes again with all that it had.
    engine.manager.row_ended(b.row)
    engine.step((b, 1), (a, 1))
    assert admitted() == 10 + 13
    # Another request in a row that was somebody's.
    c = engine.add("c", [*a.tokens[:6], 1, 2, 3], row=b.row)
    c.cached = 6
    engine.tables["full"][c.row, :6] = engine.tables["full"][a.row, :6]
    engine.step((c, 1))
    assert admitted() == 23 + 6
    engine.manager.clear()
    assert engine.found() == []


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_verdict_on_a_request_that_has_ended(backend: str) -> None:
    engine = audited(backend=backend)
    a, b = engine.add("a", 60), engine.add("b", 60)
    engine.step((a, 9), (b, 5))
    damage(engine, int(slots_in(engine, a)[2]))
    damage(engine, int(slots_in(engine, a)[2]), half="K")
    damage(engine, int(slots_in(engine, a)[3]), half="K")
    complete(engine, a)
    complete(engine, b)
    assert verdicts(engine).told() == [("a", "damaged", 9), ("b", "intact", 5)]
    (first, second) = verdicts(engine).seen
    # Two slots, each of one band: of layers 0 and 1.
    assert (first.damaged, first.unsealed, first.layers, first.step) == (2, 0, LAYERS, 1)
    assert second.damaged == 0
    assert {r.reasons for r in engine.found()} == {("SEAL_K",), ("SEAL_K", "SEAL_V")}
    # The same memory counts for others.
    engine.step((b, 1))
    for _ in range(3):
        complete(engine, b)
        assert verdicts(engine).told()[-1] == ("b", "intact", 6)
    audits = engine.manager.summary().audits
    assert audits is not None
    assert (audits.completed, audits.verified) == (5, 9 + 5 + 3 * 6)


@pytest.mark.parametrize("seals_are", ["layer", "off"])
def test_a_page_that_is_zeroed_shortly_before_the_end_is_found_however_seldom_heads_look(seals_are: str) -> None:
    named = 0
    for n in range(10):
        engine = audited(read_bytes=BYTES, seals=seals_are, stride=32)
        request = engine.add("a", 60)
        engine.step((request, 30 + n))
        engine.step((request, 1))
        page = slots_in(engine, request)[8:12]
        for source in (engine.groups[0].pool.k_source, engine.groups[0].pool.v_source):
            assert source is not None
            for layer in source.layers:
                layer.view(-1, source.bytes_per_token)[page] = 0
        for _ in range(6):
            engine.step((request, 1))
        if seals_are != "off":
            complete(engine, request)
            assert verdicts(engine).told() == [("a", "damaged", 37 + n)]
            assert verdicts(engine).seen[0].damaged == 4
        named += bool(engine.found())
    # Without, a HEAD finds it that looks at one of the four by chance.
    assert named == 10 if seals_are != "off" else named < 10


def test_what_has_no_seal_is_said() -> None:
    engine = audited()
    a = engine.add("a", 60)
    engine.step((a, 9))
    pool, slots = engine.groups[0].pool, slots_in(engine, a)
    pool.drop_seals(slots[:2])
    complete(engine, a)
    assert verdicts(engine).told() == [("a", "partial", 7)]
    # Freed first, which ends the seals: there is nothing left to look at.
    engine.manager.retire(pool, slots, owner=a.owner)
    complete(engine, a)
    assert verdicts(engine).told()[-1] == ("a", "intact", 0)
    assert engine.found() == []


@pytest.mark.usefixtures("replays")
def test_slots_come_in_any_form() -> None:
    engine = audited(backend="triton")
    a = engine.add("a", 60)
    engine.step((a, 9))
    row = engine.tables["full"][a.row]
    strange = torch.tensor([-1, 0, *slots_in(engine, a).tolist(), 1 << 40])
    for slots in (row[1:9], strange[1:], strange[::1], slots_in(engine, a).repeat_interleave(2)[::2], row[:0]):
        engine.manager.complete("a", {"full": slots})
    assert [slots for _, _, slots in verdicts(engine).told()] == [8, 9, 9, 9, 0]
    # More than any request can have.
    engine.manager.complete("a", {"full": slots_in(engine, a).repeat(16)})
    assert MAX_LEN < 9 * 16
    assert verdicts(engine).told()[-1] == ("a", "intact", 9 * 16)
    assert engine.found() == []


def test_launches_that_are_replayed_find_what_is_there_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = 0

    def capture(launch: Launch) -> Launch:
        nonlocal captured
        captured += 1
        return launch

    monkeypatch.setattr(CanaryContext, "new_replays", lambda _: Replays(capture))
    engine = audited()
    a = engine.add("a", 200)
    engine.step((a, 30))
    told = []
    for step in range(6):
        complete(engine, a)
        told.append(verdicts(engine).told()[-1])
        engine.step((a, 1))
        # Fewer than before: none of the last ones may be looked at again.
        engine.manager.complete("few", {"full": slots_in(engine, a)[:3]})
        told.append(verdicts(engine).told()[-1])
        if step == 4:
            damage(engine, int(slots_in(engine, a)[12]))
    assert captured
    assert told[::2] == [("a", "intact", 30 + n) for n in range(5)] + [("a", "damaged", 35)]
    assert told[1::2] == [("few", "intact", 3)] * 6
    # In the step in which it was looked at, whatever was captured.
    assert [(r.step, r.position) for r in engine.found()] == [(6, 12)]


def test_a_look_goes_no_further_than_there_is_something_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a place in the list that nobody is to look at takes as long as one that somebody is."""
    monkeypatch.setattr(CanaryContext, "new_replays", lambda _: Replays(lambda launch: launch))
    engine = audited()
    pool = engine.groups[0].pool
    a = engine.add("a", 60)
    engine.step((a, 20))
    looks: list[tuple[int, list[int]]] = []
    original = seals.verify_sealed

    def verify(*args: Any, slots: torch.Tensor, span: torch.Tensor, **kwargs: Any) -> None:
        looks.append((len(slots), span.tolist()))
        original(*args, slots=slots, span=span, **kwargs)

    monkeypatch.setattr(seals, "verify_sealed", verify)
    complete(engine, a)
    came = slots_in(engine, a)[:17]
    engine.manager.arrived(pool, came, pool.take_seals(came))
    b = hit(engine, "b", a, 20)
    engine.step((b, 1))
    assert looks == [(32, [0, 20]), (32, [0, 17]), (32, [0, 3])]
    assert engine.found() == []


def test_slots_of_a_look_that_failed_are_not_looked_at_with_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CanaryContext, "new_replays", lambda _: Replays(lambda launch: launch))
    engine = audited()
    engine.manager.guard.contains = True
    a, b = engine.add("a", 60), engine.add("b", 60)
    engine.step((a, 9), (b, 5))

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as broken:
        broken.setattr(seals, "verify_sealed", fails)
        complete(engine, a)
    complete(engine, b)
    assert verdicts(engine).told() == [("b", "intact", 5)]


def test_a_request_of_which_only_a_part_was_looked_at_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = make_pool(256, read_bytes=1), make_pool(256, name="other", read_bytes=1)
    groups = [kc.BufferGroup(name=name, pool=pool) for name, pool in zip(("full", "more"), pools, strict=True)]
    engine = audited(groups=groups)
    engine.manager.guard.contains = True
    a, b = engine.add("a", 60), engine.add("b", 60)
    engine.step((a, 9), (b, 5))
    damage(engine, int(slots_in(engine, a)[2]))
    real = seals.verify_sealed

    def fails(context: CanaryContext, group: kc.BufferGroup, **arguments: Any) -> None:
        if group.name == "more":
            raise RuntimeError("no")
        real(context, group, **arguments)

    monkeypatch.setattr(seals, "verify_sealed", fails)
    complete(engine, a)
    monkeypatch.undo()
    complete(engine, b)
    assert verdicts(engine).told() == [("b", "intact", 10)]
    assert engine.manager.summary().failures == {"completing requests: RuntimeError": 1}
    # It is not lost for that.
    assert {r.reasons for r in engine.found()} == {("SEAL_V",)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("most", [1 << 17, 24])
def test_each_of_many_that_end_at_once_has_its_verdict(
    backend: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one launch, or by as few as there may be where they have more slots than one takes."""
    monkeypatch.setattr(seals, "_MOST_LISTED", most)
    engine = audited(backend=backend)
    requests = [engine.add(name, 60) for name in "abcde"]
    a, b, _, d, e = requests
    engine.step((a, 9), (b, 5), (d, 12))
    engine.step((e, 30))
    damage(engine, int(slots_in(engine, d)[2]))
    unsealed = engine.groups[0].pool.seals
    assert unsealed is not None
    unsealed.words[slots_in(engine, b)[:2]] = 0
    ended = [(r.name, {"full": slots_in(engine, r)}) for r in requests]
    launches = list[int]()
    real = seals.verify_sealed

    def seen(context: CanaryContext, group: kc.BufferGroup, **arguments: Any) -> None:
        launches.append(len(arguments["slots"]))
        real(context, group, **arguments)

    monkeypatch.setattr(seals, "verify_sealed", seen)
    engine.manager.complete_all(ended)
    assert launches == ([56] if most > 56 else [14, 12, 30])
    # Those that end later are counted for themselves.
    engine.manager.complete("again", ended[1][1])
    told = [(v.request_id, v.verdict, v.slots, v.unsealed, v.damaged) for v in verdicts(engine).seen]
    assert told == [
        ("a", "intact", 9, 0, 0),
        ("b", "partial", 3, 2, 0),
        ("c", "intact", 0, 0, 0),
        ("d", "damaged", 12, 0, 1),
        ("e", "intact", 30, 0, 0),
        ("again", "partial", 3, 2, 0),
    ]


def test_more_requests_end_than_one_launch_takes_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = audited()
    request = engine.add("a", 60)
    engine.step((request, 9))
    slots = {"full": slots_in(engine, request)}
    engine.manager.complete_all([(str(n), slots) for n in range(2 * seals.MOST_LISTS + 3)])
    assert verdicts(engine).told() == [(str(n), "intact", 9) for n in range(2 * seals.MOST_LISTS + 3)]


def test_a_group_that_is_not_there_is_told_in_raise_mode_and_contained_in_the_other() -> None:
    for mode in ("raise", "log"):
        engine = audited(mode=mode)
        engine.manager.guard.contains = mode == "log"
        a = engine.add("a", 60)
        engine.step((a, 9))
        slots = {"ful": slots_in(engine, a)}
        if mode == "raise":
            with pytest.raises(ValueError, match="slots must be of the groups full, got 'ful'"):
                engine.manager.complete("a", slots)
        else:
            engine.manager.complete("a", slots)
            assert engine.manager.summary().failures == {"completing requests: ValueError": 1}


def test_either_is_off_where_it_is_not_wanted() -> None:
    for options in ({"admission": False}, {"completion": False}, {"seals": "off"}, {"mode": "off"}):
        engine = audited(**options)
        a = engine.add("a", 60)
        engine.step((a, 9))
        damage(engine, int(slots_in(engine, a)[4]))
        b = hit(engine, "b", a, 8)
        engine.step((b, 2))
        admitted = len(engine.found())
        complete(engine, a)
        completed = len(verdicts(engine).seen)
        assert engine.manager.completes == (completed == 1)
        expected = {"admission": (0, 1), "completion": (1, 0), "seals": (0, 0), "mode": (0, 0)}
        assert (admitted, completed) == expected[next(iter(options))]
        audits = engine.manager.summary().audits
        assert (audits is None) == (next(iter(options)) in ("seals", "mode"))


def test_a_verdict_is_an_event_and_hides_what_is_to_be_hidden(tmp_path: Path) -> None:
    for redact in (False, True):
        path = tmp_path / f"{redact}.jsonl"
        engine = audited(event_log=path, redact=redact)
        a = engine.add("a secret", 60)
        engine.step((a, 9))
        damage(engine, int(slots_in(engine, a)[2]))
        complete(engine, a)
        engine.manager.flush()
        engine.manager.close()
        (event,) = [e for e in map(json.loads, path.read_text().splitlines()) if e["event"] == "request_verified"]
        counts = {"slots": 9, "layers": LAYERS, "unsealed": 0, "damaged": 1}
        assert {name: event[name] for name in counts} == counts
        assert (event["verdict"], event["step"]) == ("damaged", 1)
        assert (event["request_id"] == "a secret") is not redact


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_that_come_back_are_held_against_the_seals_that_they_left_with(backend: str) -> None:
    for is_damaged in (False, True):
        engine = audited(backend=backend)
        pool = engine.groups[0].pool
        a = engine.add("a", 60)
        engine.step((a, 9))
        slots = slots_in(engine, a)
        there = torch.arange(100, 109)
        records, seals = pool.records[slots].clone(), pool.take_seals(slots)
        kept = [[layer[slots].clone() for layer in s.layers] for s in (pool.k_source, pool.v_source) if s is not None]
        if is_damaged:
            kept[1][0][5, 3] ^= 1
        engine.manager.retire(pool, slots, owner=a.owner)
        for source, layers in zip((pool.k_source, pool.v_source), kept, strict=True):
            assert source is not None
            for layer, part in zip(source.layers, layers, strict=True):
                layer[there] = part
        pool.records[there] = records
        engine.manager.arrived(pool, there, seals)
        # Back at an odd place of a list, too.
        engine.manager.arrived(pool, torch.arange(99, 109)[1:], seals)
        found = engine.found()
        assert {(r.slot, r.reasons) for r in found} == ({(105, ("SEAL_V",))} if is_damaged else set())
        audits = engine.manager.summary().audits
        assert audits is not None
        assert audits.admitted == 18


@pytest.mark.parametrize("kind", ["window", "pages", "lut", "ring"])
def test_slots_of_a_request_are_those_that_it_may_still_read(kind: str) -> None:
    pool = make_pool(256)
    lut = torch.randperm(256) if kind == "lut" else None
    group = kc.BufferGroup(
        name="g",
        pool=pool,
        window=6 if kind in ("window", "lut", "ring") else 0,
        ring=kind == "ring",
        lut=lut,
        page_size=4 if kind == "pages" else 1,
    )
    table = torch.randint(1, 60, (5, 40), dtype=torch.int32)
    table[3, 1] = -1
    spans = [(2, 13), (3, 5), (4, 1)]
    found = torch.cat(list(slots_of(group, table, spans))).tolist()
    expected = []
    for row, count in spans:
        for position in range(max(0, count - group.window) if group.window else 0, count):
            slot = int(table[row, position // group.page_size])
            slot = slot if slot < 0 else slot * group.page_size + position % group.page_size
            expected.append(slot if lut is None else 0 if slot < 0 else int(lut[slot]))
    assert {s for s in expected if s > 0} <= set(found)
    if kind != "pages":
        assert [s for s in found if s > 0] == [s for s in expected if s > 0]
    # No more than the rest of a page.
    assert len(found) <= len(expected) + len(spans) * (group.page_size - 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_of_one_pool_and_of_several(backend: str) -> None:
    full, windowed = make_pool(256, read_bytes=1), make_pool(256, name="windowed", read_bytes=1)
    groups = [
        kc.BufferGroup(name="full", pool=full),
        kc.BufferGroup(name="local", pool=full, window=4),
        kc.BufferGroup(name="swa", pool=windowed, window=4),
    ]
    engine = audited(groups=groups, backend=backend)
    a = engine.add("a", 60)
    engine.step((a, 12))
    b = hit(engine, "b", a, 10)
    engine.step((b, 2))
    assert engine.found() == []
    audits = engine.manager.summary().audits
    assert audits is not None
    # All of the pool with full attention once, and of the other the window.
    assert audits.admitted == 10 + 4


def test_memory_is_told_by_what_it_is_for() -> None:
    engine = audited(check_tokens=True)
    memory = engine.manager.summary().memory
    pool = engine.groups[0].pool
    assert pool.seals is not None
    assert memory["kv"] == 256 * LAYERS * 2 * BYTES
    assert memory["records"] == pool.records.nbytes == 256 * 32
    assert memory["seals"] == 256 * 8 * pool.seals.words.shape[1]
    assert memory["tokens"] > 0
    assert engine.manager.summary().as_dict()["memory"] == memory
    assert audited(seals="off").manager.summary().memory["seals"] == 0


def test_damage_before_the_window_is_found_at_admission_where_the_windowed_group_is_named_first() -> None:
    pool = make_pool(256, read_bytes=1)
    engine = audited(groups=[kc.BufferGroup(name="local", pool=pool, window=4), kc.BufferGroup(name="full", pool=pool)])
    a = engine.add("a", 60)
    engine.step((a, 12))
    damage(engine, int(slots_in(engine, a)[2]))
    engine.step((hit(engine, "b", a, 10), 2))
    assert [(r.group, r.position, r.reasons) for r in engine.found()] == [("full", 2, ("SEAL_V",))]
    audits = engine.manager.summary().audits
    assert audits is not None
    assert audits.admitted == 10


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("waits", [False, True])
def test_what_has_just_come_back_is_not_looked_at_twice_unless_somebody_ran_meanwhile(
    backend: str, waits: bool
) -> None:
    engine = audited(backend=backend)
    pool = engine.groups[0].pool
    a, other = engine.add("a", 60), engine.add("other", 40)
    engine.step((a, 9), (other, 2))
    slots = slots_in(engine, a)
    # Four of its slots come back, five were there all the time.
    engine.manager.arrived(pool, slots[:4], pool.take_seals(slots[:4]))
    # What is said to have come to slots that there are not is nobody's.
    engine.manager._steps.audits.arrived(pool, torch.tensor([-3, 0, pool.num_slots, 1 << 40]))
    if waits:
        engine.step((other, 1))
        damage(engine, int(slots[2]))
    b = hit(engine, "b", a, 9)
    engine.step((b, 1), (other, 1))
    # What is known of them is known of that step alone.
    engine.manager.row_ended(b.row)
    engine.step((b, 1), (other, 1))
    found = engine.found()
    audits = engine.manager.summary().audits
    assert audits is not None
    assert audits.admitted == 4 + (9 if waits else 5) + 10
    assert {r.slot for r in found} == ({int(slots[2])} if waits else set())


def test_requests_that_end_while_no_step_begins_are_only_so_many_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits_module, "_MOST_UNDER_WAY", 8)
    engine = full_engine(seals="layer")
    request = engine.add("a", 60)
    engine.step((request, 8))
    audits = engine.manager._steps.audits
    audits._arrived = deque(maxlen=8)
    for i in range(50):
        engine.manager.complete(f"request {i}", {"full": torch.tensor([1, 2, 3])})
        assert len(audits._under_way) <= 9
    verdicts = audits.poll(wait=True)
    # The newest are told, and each of its own slots.
    assert [v.request_id for v in verdicts] == [f"request {i}" for i in range(50 - len(verdicts), 50)]
    assert 8 <= len(verdicts) <= 17
    assert {v.slots for v in verdicts} == {3}
    assert audits.is_idle


def test_slots_that_come_again_and_again_behind_one_step_keep_few_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits_module, "_MOST_CAME", 4)
    engine = full_engine(seals="layer")
    request = engine.add("a", 60)
    engine.step((request, 8))
    [pool], audits = engine.manager.pools, engine.manager._steps.audits
    for _ in range(30):
        audits.arrived(pool, torch.tensor([1, 2]))
        assert len(audits._came[pool][1]) <= 4
    assert audits._marks[pool].nonzero().view(-1).tolist() == [1, 2]
