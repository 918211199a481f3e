"""A forward that repeats the one before leaves what one that is begun anew leaves, and is refused where it is none."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import getitem
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import kv_canary as kc
from kv_canary import ops
from kv_canary.observers import Observer
from kv_canary.runtime import forward as forward_module
from kv_canary.runtime import replays as replays_module
from kv_canary.runtime.batch import ModelInputs
from kv_canary.runtime.composition import BatchRequests, Composition, Int64s
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.forward import SingleForwardManager
from kv_canary.runtime.replays import MAX_GRAPHS, RUNS_BEFORE_CAPTURE, RUNS_BEFORE_EXCHANGE, Launch, Replays
from kv_canary.runtime.steps import Steps

from .engine import MAX_LEN, MAX_ROWS, make_pool

Text = list[int]


class Texts:
    """Answers for requests that are their own texts."""

    def name(self, member: Text) -> str:
        return f"text {member[0]}"

    def tokens(self, member: Text, start: int, end: int) -> Sequence[int]:
        return member[start:end]

    def newest(self, members: Sequence[Text], ends: Int64s) -> Int64s | None:
        return np.fromiter(map(getitem, members, (ends - 1).tolist()), np.int64, len(members))

    def discarded(self, member: Text, length: int) -> bool:
        return False


class Decoder:
    """An engine that decodes from a graph: its tensors stay, and each request takes the next free slot.

    Args:
        repeats: whether it asks for repetitions.
        narrow: whether the model is given tokens and lengths of int32, and no rows.
        in_place: whether prefills, too, read tensors that stay.
        extra_slots: of a host tier.
        watch: called with each batch of a step that is begun anew, before its begin.
    """

    def __init__(
        self,
        *,
        repeats: bool,
        windows: Sequence[int] = (0,),
        narrow: bool = False,
        in_place: bool = False,
        extra_slots: int = 0,
        **options: Any,
    ) -> None:
        torch.manual_seed(3)
        self.narrow, self.in_place = narrow, in_place
        self.repeats, self.repeated, self.begun, self.prefilled = repeats, 0, 0, 0
        pools = [make_pool(512, name=f"p{i}", extra_slots=extra_slots) for i in range(len(windows))]
        groups = [
            kc.BufferGroup(name=f"g{i}", pool=pool, window=w)
            for i, (pool, w) in enumerate(zip(pools, windows, strict=True))
        ]
        limits = kc.CanaryLimits(max_rows=MAX_ROWS, max_requests=4, max_tokens=64, max_len=4 * MAX_LEN)
        config = kc.CanaryConfig(**{"backend": "reference", **options})
        self.manager = kc.CanaryManager(groups, limits=limits, config=config)
        self.forward = self.manager.forward()
        self.tables = {g.name: torch.zeros(MAX_ROWS, 4 * MAX_LEN, dtype=torch.int32) for g in groups}
        self.slots = iter(range(1, 512))
        self.texts: dict[int, Text] = {}
        self.cached: dict[int, int] = {}
        self.composition: Composition | None = None
        types = dict.fromkeys(("input_ids", "positions", "rows", "lengths"), torch.int64)
        if narrow:
            types = {"input_ids": torch.int32, "positions": torch.int64, "lengths": torch.int32}
        # Of a decode's graph, or of the largest forward.
        room = {name: 4 if name in ("rows", "lengths") or not in_place else 64 for name in types}
        self.graph = {name: torch.zeros(room[name], dtype=dtype) for name, dtype in types.items()}
        self.out = torch.zeros(64 if in_place else 4, dtype=torch.int64)
        self.inputs = ModelInputs(**self.graph, out_slots=dict.fromkeys(self.tables, self.out), stays=True)
        self.given: ModelInputs | None = self.inputs
        # What the last decode step was of, where the next ones are said to follow it.
        self.last: BatchRequests | None = None
        self.follows = False

    def admit(self, *texts: Text) -> None:
        """Let requests come, in the first free rows."""
        for text in texts:
            row = min(set(range(1, MAX_ROWS)) - set(self.texts))
            self.texts[row], self.cached[row] = text, 0
        self.compose()

    def finish(self, row: int) -> None:
        """Let a request go."""
        del self.texts[row], self.cached[row]
        self.compose()

    def compose(self) -> None:
        rows = np.array(list(self.texts), np.int64)
        owners = np.array([text[-1] for text in self.texts.values()], np.int64)
        self.composition = Composition(list(self.texts.values()), rows=rows, owners=owners, source=SOURCE)

    def requests(self, extends: Mapping[int, int] | None = None) -> BatchRequests:
        assert self.composition is not None
        prefix = np.array(list(self.cached.values()), np.int64)
        if extends is None:
            extend: Int64s = ONES[len(prefix)]
            newest = SOURCE.newest(self.composition.members, prefix)
            last = self.last if self.follows else None
            goes_on = last is not None and last.composition is self.composition and len(last) == last.num_tokens
            if last is not None and newest is not None and goes_on and (last.ends == prefix).all():
                self.last = last.following(newest)
                return self.last
        else:
            extend, newest = np.array([extends[row] for row in self.texts], np.int64), None
        self.last = BatchRequests(self.composition, prefix=prefix, extend=extend, newest=newest)
        return self.last

    def batch(self, requests: BatchRequests) -> kc.ForwardBatch:
        """Take slots for a forward, enter them into the tables, and return it."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        columns = (requests.rows, requests.prefix, requests.extend)
        for row, prefix, extend in zip(*(column.tolist() for column in columns), strict=True):
            ids += self.texts[row][prefix : prefix + extend]
            positions += range(prefix, prefix + extend)
            mine = [next(self.slots) for _ in range(extend)]
            slots += mine
            for table in self.tables.values():
                table[row, prefix : prefix + extend] = torch.tensor(mine, dtype=torch.int32)
        out = torch.tensor(slots)
        return kc.ForwardBatch(
            requests=requests,
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            out_slots=dict.fromkeys(self.tables, out),
            tables=self.tables,
            rows=None if self.narrow else torch.from_numpy(requests.rows.copy()),
            lengths=torch.from_numpy(requests.prefix + requests.extend),
            is_given_at_tail=True,
        )

    def prefill(self, extends: Mapping[int, int]) -> None:
        """Run one forward of several tokens each."""
        batch = self.batch(self.requests(extends))
        given = None if self.in_place else lambda: self.given_by(batch)
        if self.repeats and self.forward.repeat(batch.arrays, out_slots=lambda: batch.out_slots, given=given):
            self.prefilled += 1
        else:
            self.forward.begin(dataclasses.replace(batch, is_given_at_tail=self.in_place))
            self.forward.head()
        self.write(batch)
        if self.in_place:
            self.fill(batch)
        self.forward.tail(given=self.given if self.in_place else None)
        self.forward.end()
        self.grow(batch)

    def given_by(self, batch: kc.ForwardBatch) -> ModelInputs:
        """Return what the model reads of a forward without a graph."""
        if batch.input_ids is None or batch.positions is None:
            raise ValueError("a batch must have its tokens here, got none")
        return ModelInputs(
            input_ids=batch.input_ids,
            positions=batch.positions,
            out_slots=batch.out_slots,
            rows=batch.rows,
            lengths=batch.lengths,
        )

    def begin(self, batch: kc.ForwardBatch) -> None:
        requests = batch.arrays
        if self.repeats and self.forward.repeat(requests, out_slots=lambda: batch.out_slots):
            self.repeated += 1
        else:
            self.begun += 1
            self.forward.begin(batch)
            self.forward.head()

    def decode(self, count: int = 1) -> None:
        """Run forwards of one token each."""
        for _ in range(count):
            batch = self.batch(self.requests())
            self.begin(batch)
            self.write(batch)
            self.fill(batch)
            self.forward.tail(given=self.given)
            self.forward.end()
            self.grow(batch)

    def fill(self, batch: kc.ForwardBatch) -> None:
        for name, tensor in (*self.graph.items(), ("out", self.out)):
            value = batch.out_slots["g0"] if name == "out" else getattr(batch, name)
            tensor.zero_()[: len(value)] = value

    def write(self, batch: kc.ForwardBatch) -> None:
        """Give the slots bytes that say what is in them."""
        assert batch.input_ids is not None
        for group in self.manager.groups:
            for source in (group.pool.k_source, group.pool.v_source):
                assert source is not None
                for layer in source.layers:
                    layer.view(512, -1)[batch.out_slots[group.name]] = batch.input_ids[:, None].to(layer.dtype)

    def grow(self, batch: kc.ForwardBatch) -> None:
        for row, extend in zip(batch.arrays.rows.tolist(), batch.arrays.extend.tolist(), strict=True):
            self.cached[row] += extend

    def leavings(self) -> dict[str, torch.Tensor]:
        """Return what lies on the device in the end."""
        self.manager.flush()
        state = self.manager.state
        found = {"words": state.words, "chains": state.tails[0].chains, "ring": state.violations.ring}
        if state.token_pool is not None:
            found["tokens"] = state.token_pool
        found |= {pool.name: pool.records for pool in self.manager.pools}
        return {name: tensor.clone() for name, tensor in found.items()}


SOURCE = Texts()
ONES = {n: np.ones(n, np.int64) for n in range(9)}


def text(seed: int, length: int = 500) -> Text:
    return [seed, *range(seed + 1, seed + length)]


def life(engine: Decoder) -> None:
    """Serve requests that come and go, some of which grow alone."""
    engine.admit(text(10), text(1000))
    engine.prefill({1: 20, 2: 7})
    engine.decode(6)
    engine.admit(text(3000))
    engine.prefill({1: 1, 2: 1, 3: 30})
    engine.decode(6)
    engine.finish(2)
    engine.decode(5)
    engine.manager.flush()
    engine.decode(4)
    engine.admit(text(5000))
    engine.prefill({1: 1, 3: 1, 2: 2})
    engine.decode(9)


@pytest.fixture(params=[False, True], ids=["as it is", "rounded"])
def rounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let launches be as they are, or for rounded sizes and by graphs, which only call them here."""
    if request.param:
        monkeypatch.setattr(CanaryContext, "new_replays", lambda _: Replays(lambda launch: launch))
    return bool(request.param)


OPTIONS: list[dict[str, Any]] = [{}, {"stride": 4}, {"check_tokens": False}, {"verify_bytes_at_tail": True}]


WINDOWS = [(0,), (16,), (0, 16)]


@pytest.mark.every_day(
    # Every value of each parameter with every value of each other one.
    *(
        f"{('as it is', 'rounded')[(i + j) % 2]}-{windows}-{options}-{('', 'following')[(i + j // 2) % 2]}"
        for i, windows in enumerate(WINDOWS)
        for j, options in enumerate(OPTIONS)
    )
)
@pytest.mark.parametrize("follows", [False, True], ids=["", "following"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_repetitions_leave_what_forwards_leave_that_are_begun_anew(
    rounds: bool, options: dict[str, Any], windows: Sequence[int], follows: bool
) -> None:
    engines = [Decoder(repeats=repeats, windows=windows, **options) for repeats in (False, True)]
    engines[1].follows = follows
    for engine in engines:
        life(engine)
    anew, repeated = engines
    assert (anew.repeated, repeated.repeated + repeated.begun) == (0, anew.begun)
    # One decode step of each size comes before what repeats it, two where its launches are captured.
    assert repeated.begun <= (8 if rounds else 4)
    first, second = anew.leavings(), repeated.leavings()
    assert {name for name in first if not torch.equal(first[name], second[name])} == set()
    summary = repeated.manager.summary()
    assert summary == anew.manager.summary()
    assert summary.watching == "complete"
    if "stride" not in options:
        assert summary.positions_verified == summary.positions_relied_on > 0


@pytest.mark.parametrize("windows", [(0,), (16, 0)], ids=str)
def test_a_repeated_step_begins_with_one_launch(
    rounds: bool, windows: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copies, brings rows up and lays out the first group's batch, which HEAD of that group is told."""
    engine, made = Decoder(repeats=True, windows=windows), list[tuple[str, bool]]()
    life(engine)

    def noted(op: Callable[..., None], name: str) -> Callable[..., None]:
        def call(**arguments: Any) -> None:
            made.append((name, arguments.get("laid_out") is not None))
            op(**arguments)

        return call

    for name in ("open_step", "chain_tails", "verify_prefixes", "write", "verify_resolved"):
        monkeypatch.setattr(ops, name, noted(getattr(ops, name), name))
    repeated = engine.repeated
    engine.decode()
    assert engine.repeated == repeated + 1
    heads = [("verify_prefixes", not i) for i in range(len(windows))]
    tails = [*[("write", False)] * len(windows), *[("verify_resolved", False)] * len(windows)]
    assert made == [("open_step", False), *heads, *tails]


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_a_step_that_cannot_be_opened_goes_by_unwatched_and_its_rows_start_anew(
    rounds: bool, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Decoder(repeats=True)
    life(engine)
    with monkeypatch.context() as patch:
        real = ops.open_step

        def fail(**arguments: Any) -> None:
            if behind:
                real(**arguments)
            raise RuntimeError("not now")

        patch.setattr(ops, "open_step", fail)
        engine.decode()
    assert engine.manager.summary().skipped == 1
    engine.decode(4)
    engine.manager.flush()
    # What goes by unwatched has no records, and is taken in anew.
    assert not engine.manager.reports
    repeated = engine.repeated
    engine.decode()
    assert engine.repeated == repeated + 1


@pytest.mark.parametrize("fault", [None, "input_ids", "lengths"])
def test_tensors_of_the_models_that_are_narrower_are_read_where_they_are_too(rounds: bool, fault: str | None) -> None:
    engine = Decoder(repeats=True, narrow=True)
    assert engine.inputs.is_in_place
    life(engine)
    assert engine.repeated > 20
    if fault is None:
        wide = Decoder(repeats=True)
        life(wide)
        first, second = engine.leavings(), wide.leavings()
        assert {name for name in first if not torch.equal(first[name], second[name])} == set()
        assert (engine.repeated, engine.begun) == (wide.repeated, wide.begun)
        assert engine.manager.summary() == wide.manager.summary()
        return
    batch = engine.batch(engine.requests())
    engine.begin(batch)
    engine.write(batch)
    engine.fill(batch)
    engine.graph[fault][1] += 1
    engine.forward.tail(given=engine.given)
    engine.forward.end()
    engine.grow(batch)
    # A token that was another's is one of the prefix from the next step on.
    engine.decode()
    engine.manager.flush()
    assert {r for report in engine.manager.reports for r in report.reasons} == {
        "input_ids": {"TOKEN", "PREFIX"},
        "lengths": {"BATCH"},
    }[fault]


@pytest.mark.every_day("as it is-0-copied", "rounded-1-in place", "rounded-2-copied", "as it is-3-in place")
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("seed", range(6))
def test_lists_that_change_at_every_other_step_are_repeated_too(rounds: bool, seed: int, in_place: bool) -> None:
    engines = [Decoder(repeats=repeats, in_place=in_place) for repeats in (False, True)]
    engines[1].follows = bool(seed % 2)
    for engine in engines:
        draw = random.Random(seed)
        engine.admit(*(text(1000 * n) for n in range(1, 4)))
        engine.prefill({row: draw.randint(1, 9) for row in (1, 2, 3)})
        for n in range(4, 25):
            if len(engine.texts) == 4 or (len(engine.texts) > 1 and draw.random() < 0.4):
                engine.finish(draw.choice(sorted(engine.texts)))
            else:
                known = set(engine.texts)
                engine.admit(text(1000 * n))
                # Those that decode go on in the same forward.
                engine.prefill({row: 1 if row in known else draw.randint(1, 20) for row in engine.texts})
            engine.decode(draw.randint(1, 2))
    anew, repeated = engines
    assert repeated.begun <= 12
    # Of sizes that are not rounded, few come again, or none.
    assert anew.prefilled == 0
    assert repeated.prefilled >= (5 if rounds else 0)
    assert repeated.repeated + repeated.begun == anew.begun
    first, second = anew.leavings(), repeated.leavings()
    assert {name for name in first if not torch.equal(first[name], second[name])} == set()
    assert repeated.manager.summary() == anew.manager.summary()
    assert repeated.manager.summary().violations == 0


def decoding(**options: Any) -> Decoder:
    """Return an engine whose next decode repeats the one before."""
    engine = Decoder(repeats=True, **options)
    engine.admit(text(10), text(1000))
    engine.prefill({1: 20, 2: 7})
    engine.decode(3)
    assert (engine.begun, engine.repeated) == (1, 2)
    engine.begun = engine.repeated = 0
    return engine


def spoil(engine: Decoder, row: int = 2, position: int = 5) -> None:
    """Overwrite the bytes of a cached token."""
    slot = int(engine.tables["g0"][row, position])
    source = engine.manager.pools[0].k_source
    assert source is not None
    for layer in source.layers:
        layer.view(512, -1)[slot] = 99


def test_the_words_of_several_repeated_steps_are_read_together_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in log mode on a GPU: each step is counted, and what one has found is told of that step."""
    at_once, together = decoding(), decoding()
    # Words wait until then, or until a lap is needed again.
    monkeypatch.setattr(together.manager._steps, "_most_unread", 8)
    looks = {engine: list[int]() for engine in (at_once, together)}
    for engine, seen in looks.items():

        def look(engine: Decoder = engine, seen: list[int] = seen, **options: Any) -> None:
            seen.append(engine.manager.context.step)
            type(engine.manager._steps).look(engine.manager._steps, **options)

        monkeypatch.setattr(engine.manager._steps, "look", look)
        engine.decode(10)
        spoil(engine)
        engine.decode(10)
        assert (engine.begun, engine.repeated) == (0, 20)
        assert max(b - a for a, b in itertools.pairwise(seen)) <= 9
        engine.manager.flush()
    assert len(looks[together]) < len(looks[at_once]) / 2
    reports = [[(r.step, r.request_id, r.reasons) for r in engine.manager.reports] for engine in looks]
    assert reports[0] == reports[1] != []
    assert together.manager.summary() == at_once.manager.summary()


@pytest.mark.parametrize(("mode", "device", "most"), [("log", "cuda", 8), ("raise", "cuda", 0), ("log", "cpu", 0)])
def test_words_wait_to_be_read_in_log_mode_on_a_gpu_alone(mode: str, device: str, most: int) -> None:
    """Who is to raise does so at the next step, and on a CPU there is nothing to wait for."""
    context = SimpleNamespace(device=SimpleNamespace(type=device), config=SimpleNamespace(mode=mode), state=None)
    parts = "accounts budget costs unverified sweeper scrub audits handed perturber ranks"
    steps = Steps(cast("CanaryContext", context), **dict.fromkeys(parts.split(), cast("Any", None)))
    assert steps._most_unread == most


def test_what_is_damaged_between_repetitions_is_found_and_named() -> None:
    engine = decoding()
    spoil(engine)
    engine.decode()
    engine.decode()
    assert engine.repeated == 2
    report = engine.manager.reports[0]
    assert (report.request_id, report.position, report.reasons, report.step) == ("text 1000", 5, ("K",), 5)


def prefilling(**options: Any) -> Decoder:
    """Return an engine whose next prefill of 9 tokens of a request, which is its row 3, repeats the one before."""
    engine = Decoder(repeats=True, **options)
    engine.admit(text(10), text(1000))
    engine.prefill({1: 20, 2: 7})
    for n in range(2, 6):
        engine.admit(text(1000 * n))
        engine.prefill({1: 1, 2: 1, 3: 9})
        engine.decode()
        engine.finish(3)
    assert engine.prefilled == 3
    engine.admit(text(9000))
    engine.prefilled = 0
    return engine


@pytest.mark.parametrize(
    ("field", "reasons"),
    [
        ("positions", {"WRITE_POSITION"}),
        ("lengths", {"BATCH"}),
        ("rows", {"BATCH"}),
        ("input_ids", {"TOKEN", "PREFIX"}),
    ],
)
def test_a_repeated_prefill_holds_what_the_model_is_given_against_what_it_should_be(
    field: str, reasons: set[str]
) -> None:
    engine = prefilling()
    given_by = engine.given_by

    def wrong(batch: kc.ForwardBatch) -> ModelInputs:
        given = given_by(batch)
        getattr(given, field)[-1] += 1
        return given

    engine.given_by = wrong  # type: ignore[method-assign]
    engine.prefill({1: 1, 2: 1, 3: 9})
    engine.given_by = given_by  # type: ignore[method-assign]
    engine.decode(2)
    engine.manager.flush()
    assert engine.prefilled == 1
    found = {reason for report in engine.manager.reports for reason in report.reasons}
    assert reasons <= found <= reasons | {"POSITION", "TOKEN", "PREFIX", "CHAIN"}


def test_a_repeated_prefill_verifies_what_is_cached_already() -> None:
    engine = prefilling()
    spoil(engine)
    engine.prefill({1: 1, 2: 1, 3: 9})
    engine.decode()
    engine.manager.flush()
    assert engine.prefilled == 1
    report = engine.manager.reports[0]
    assert (report.request_id, report.position, report.reasons) == ("text 1000", 5, ("K",))


def test_a_prefix_that_comes_with_a_repeated_prefill_is_held_against_its_seals() -> None:
    engines = [Decoder(repeats=repeats, seals="layer") for repeats in (False, True)]
    for engine in engines:
        engine.admit(text(10))
        engine.prefill({1: 20})
        shared = engine.tables["g0"][1, :16].clone()
        for n in range(4):
            # The same beginning, in the slots of the first.
            engine.admit([*text(10, 16), *text(2000 * (n + 1), 100)])
            engine.cached[2] = 16
            engine.tables["g0"][2, :16] = shared
            engine.prefill({1: 1, 2: 9})
            engine.decode()
            engine.finish(2)
            engine.manager.row_ended(2)
        engine.manager.flush()
    anew, repeated = (engine.manager.summary() for engine in engines)
    assert engines[1].prefilled >= 2
    assert anew.audits is not None
    assert anew.audits == repeated.audits
    assert repeated.audits is not None
    assert repeated.audits.admitted == 4 * 16
    assert repeated.violations == 0


def expect_watched_behind_a_failure(engine: Decoder) -> None:
    """See that an engine in which the canary has failed once goes on without an alarm, and is watched again."""
    engine.decode(6)
    engine.manager.flush()
    summary = engine.manager.summary()
    assert (summary.violations, sum(summary.failures.values()) >= 1) == (0, True)
    spoil(engine, position=engine.cached[2] - 2)
    engine.decode(2)
    assert {r.reasons for r in engine.manager.reports} == {("K",)}


@pytest.mark.parametrize("part", ["begin", "admit", "head", "tail", "end"])
def test_a_failure_inside_a_repeated_prefill_goes_by_unwatched_and_no_further(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = prefilling()

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        if part == "begin":
            patch.setattr(engine.manager.state, "go_ahead", fails)
        elif part == "admit":
            patch.setattr(engine.manager._steps, "admit", fails)
        elif part == "end":
            patch.setattr(engine.manager._steps, "_end_step", fails)
        else:
            for repetition in engine.forward._forwards.values():
                for lap in repetition._laps:
                    patch.setattr(lap, part, fails)
        engine.prefill({1: 1, 2: 1, 3: 9})
    assert engine.prefilled == 1
    expect_watched_behind_a_failure(engine)


def test_a_longer_prefix_than_is_brought_up_at_once_is_no_repetition(
    rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("forward", "device_state"):
        monkeypatch.setattr(f"kv_canary.runtime.{module}.MOST_REPLAYED", 16)
    engines = [Decoder(repeats=repeats) for repeats in (False, True)]
    prefilled = list[int]()
    for engine in engines:
        engine.admit(text(10))
        engine.prefill({1: 60})
        shared = engine.tables["g0"][1, :60].clone()
        # The last one has more in the cache than fits where those before it had theirs.
        for hit in (9, 12, 11, 14, 50):
            prefilled.append(engine.prefilled)
            engine.admit([*text(10, hit), *text(1000 * hit, 100)])
            engine.cached[2] = hit
            engine.tables["g0"][2, :hit] = shared[:hit]
            engine.prefill({1: 1, 2: 9})
            engine.decode()
            engine.finish(2)
            engine.manager.row_ended(2)
    anew, repeated = engines
    assert repeated.prefilled == prefilled[-1]
    assert (repeated.prefilled > 0) == rounds
    first, second = anew.leavings(), repeated.leavings()
    assert {name for name in first if not torch.equal(first[name], second[name])} == set()
    assert repeated.manager.summary() == anew.manager.summary()
    assert repeated.manager.summary().violations == 0


class Member(list[int]):
    """A text that can be seen to be gone."""


def test_what_is_kept_for_repetition_keeps_no_request_alive() -> None:
    engine = Decoder(repeats=True)
    engine.admit(text(10, 500), Member(text(1000, 500)))
    gone = weakref.ref(engine.texts[2])
    for _ in range(3):
        engine.prefill({1: 8, 2: 8})
        engine.decode(3)
    assert engine.prefilled
    assert engine.repeated
    engine.finish(2)
    # As many steps as are remembered, and more.
    engine.decode(80)
    engine.manager.flush()
    gc.collect()
    assert gone() is None


def test_raise_mode_raises_before_the_repetition_begins() -> None:
    engine = decoding(mode="raise")
    spoil(engine)
    engine.decode()
    with pytest.raises(kc.CanaryViolationError):
        engine.decode()
    # Nothing was begun.
    engine.repeated = engine.begun = 0
    with pytest.raises(kc.CanaryViolationError):
        engine.decode(3)


class Perturber:
    """Injects nothing."""

    def before(self, *_: Any, **__: Any) -> None:
        pass

    after = restore = before


def move_tokens(engine: Decoder) -> None:
    state = engine.manager.state
    assert state.token_pool is not None
    state.token_pool = state.token_pool.clone()


def refusals() -> Iterator[tuple[str, Callable[[Decoder], Any]]]:
    """Yield what makes a repetition impossible, by name."""
    yield "marked slots", lambda e: e.manager.unverify(e.manager.pools[0], torch.tensor([400]))
    yield "all slots to be marked", lambda e: e.manager.unverified.forget_all(e.manager.pools[0])
    yield "a row whose tail is not known", lambda e: e.manager.state.forget(np.array([1]))
    yield "an owner whose text may be another", lambda e: e.manager.state.forget_owner(1499)
    yield "a table of tokens that was moved", move_tokens
    yield "faults to inject", lambda e: setattr(e.manager, "perturber", Perturber())


@pytest.mark.parametrize("why", [why for why, _ in refusals()])
def test_what_is_no_repetition_is_begun_anew(why: str) -> None:
    engine, other = decoding(), decoding()
    other.repeats = False
    for each in (engine, other):
        dict(refusals())[why](each)
        each.decode()
    assert (engine.begun, engine.repeated) == (1, 0)
    engine.decode(4)
    other.decode(4)
    stays = "mark" in why or "inject" in why
    assert (engine.repeated > 0) != stays
    first, second = engine.leavings(), other.leavings()
    assert {name for name in first if not torch.equal(first[name], second[name])} == set()
    assert engine.manager.summary().violations == 0


def test_a_forward_inside_a_step_of_several_is_no_repetition() -> None:
    engine = decoding()
    with engine.manager.one_step():
        engine.decode()
    assert (engine.begun, engine.repeated) == (1, 0)
    assert engine.forward.repeat(engine.requests({1: 1, 2: 1}), out_slots=dict) is False


def test_more_entries_than_there_is_room_for_are_no_repetition(rounds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.runtime.launches._FEW_ENTRIES", 128)
    engine = Decoder(repeats=True)
    engine.admit(*(text(1000 * n) for n in range(1, 5)))
    engine.slots = iter(range(1, 512))
    engine.prefill(dict.fromkeys(range(1, 5), 16))
    engine.decode(12)
    before = engine.forward.entry_capacities["g0"]
    engine.decode(88)
    assert before == 128 < 4 * 115 <= engine.forward.entry_capacities["g0"]
    engine.manager.flush()
    summary = engine.manager.summary()
    assert (summary.steps, summary.watching, summary.incomplete) == (101, "complete", {})
    assert summary.positions_verified == summary.positions_relied_on == sum(4 * n for n in range(16, 116))
    assert engine.repeated > 80


@pytest.mark.parametrize("stays", [False, True])
def test_a_forward_that_ran_without_its_graph_is_recorded_from_what_it_was_given(stays: bool) -> None:
    engine = decoding()
    requests = engine.requests()
    batch = engine.batch(requests)
    engine.given = dataclasses.replace(engine.given_by(batch), stays=stays)
    assert engine.forward.repeat(requests, out_slots=lambda: batch.out_slots)
    engine.write(batch)
    engine.forward.tail(given=engine.given)
    engine.forward.end()
    engine.grow(batch)
    engine.given = engine.inputs
    engine.decode(5)
    assert engine.manager.summary().violations == 0
    engine.manager.flush()
    assert engine.manager.summary().violations == 0


def test_what_was_given_has_to_be_said_behind_a_repetition() -> None:
    engine = decoding(mode="raise")
    engine.given = None
    with pytest.raises(ValueError, match=r"given must be said behind `repeat`, got nothing"):
        engine.decode()
    engine.forward.abort()
    engine.given = engine.inputs
    engine.manager.close()


@pytest.mark.parametrize("part", ["begin", "head", "tail", "end"])
def test_a_failure_inside_a_repetition_goes_by_unwatched_and_no_further(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoding()
    forward: SingleForwardManager = engine.forward

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        if part == "begin":
            patch.setattr(engine.manager.state, "went_on", fails)
        elif part == "end":
            patch.setattr(engine.manager._steps, "_end_step", fails)
        else:
            for lap in forward._decodes[2]._laps:
                patch.setattr(lap, part, fails)
        engine.decode()
    assert engine.repeated == 1
    expect_watched_behind_a_failure(engine)


def test_a_repetition_that_is_given_up_leaves_its_slots_in_doubt() -> None:
    engine = decoding(quarantine=True, track_lifetime=True, sweep_every=50)
    requests = engine.requests()
    batch = engine.batch(requests)
    assert engine.forward.repeat(requests, out_slots=lambda: batch.out_slots)
    engine.write(batch)
    engine.forward.abort()
    assert engine.manager.unverified.any_marked
    engine.grow(batch)
    for row in engine.cached:
        engine.cached[row] -= 1
    engine.decode(5)
    assert engine.manager.summary().violations == 0


class Watcher(Observer):
    """Remembers the lengths of the forwards that it is shown."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []

    def on_forward(self, forward: Any, batch: kc.ForwardBatch) -> None:
        self.lengths.append([r.prefix_len for r in batch.requests])


def test_an_observer_is_shown_each_repetition_as_it_was() -> None:
    engine = decoding()
    watcher = Watcher()
    engine.manager.accounts.join(watcher)
    engine.decode(3)
    assert watcher.lengths == [[23, 10], [24, 11], [25, 12]]
    assert engine.repeated == 3


def test_decode_steps_that_come_once_all_graphs_are_taken_are_repeated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CanaryContext, "new_replays", lambda _: Replays(lambda launch: launch))
    engine = Decoder(repeats=True)
    for i in range(MAX_GRAPHS):
        for _ in range(RUNS_BEFORE_CAPTURE):
            engine.forward._replays.run(("prefill", i), lambda: None)
    engine.admit(text(10), text(1000))
    engine.prefill({1: 8, 2: 8})
    engine.decode(RUNS_BEFORE_EXCHANGE)
    assert engine.repeated == 0
    engine.decode(20)
    assert engine.repeated >= 19


def test_a_size_that_comes_now_takes_the_place_of_one_that_was_long_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CanaryContext, "new_replays", lambda _: Replays(lambda launch: launch))
    monkeypatch.setattr(forward_module, "_MOST_FORWARDS", 1)
    monkeypatch.setattr(forward_module, "_LONG", 5)
    engine = Decoder(repeats=True, in_place=True)

    def prefills(tokens: int, count: int) -> int:
        before = engine.prefilled
        for _ in range(count):
            engine.prefill({1: tokens})
        return engine.prefilled - before

    engine.admit(text(10))
    assert prefills(20, 4) >= 2
    # The other one was repeated just now.
    assert prefills(3, 4) == 0
    engine.decode(6)
    assert prefills(3, 4) >= 2
    assert prefills(20, 2) == 0


def test_a_capture_that_fails_puts_repetitions_off_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = [True]

    def capture(launch: Launch) -> Launch:
        if fails[0] and captured:
            raise RuntimeError("no memory left")
        captured.append(launch)
        return launch

    captured: list[Launch] = []
    monkeypatch.setattr(replays_module, "RUNS_BEFORE_RETRY", 10)
    engine = Decoder(repeats=True)
    engine.admit(text(10), text(1000))
    engine.prefill({1: 8, 2: 8})
    engine.decode(3)
    before = engine.repeated
    engine.forward.forget_graphs()
    engine.forward._replays = Replays(capture)
    # HEAD and TAIL are captured; what is kept for repetition is not.
    fails[0] = False
    engine.decode(2)
    fails[0] = True
    engine.forward._decodes.clear()
    engine.decode(4)
    assert engine.repeated == before
    assert engine.manager.summary().failures == {"capturing a graph: RuntimeError": 1}
    assert engine.manager.summary().unverified == 0
    fails[0] = False
    engine.decode(12)
    assert engine.repeated > before


@pytest.mark.parametrize("extra_slots", [0, 64])
def test_a_pool_that_was_forgotten_is_repeated_again_once_all_its_slots_were_handed_out(extra_slots: int) -> None:
    engine = Decoder(repeats=True, extra_slots=extra_slots)
    [pool] = engine.manager.pools
    # The engine keeps the first page for padding.
    pool.first_slot = 16
    engine.slots = iter(range(16, 512))
    engine.admit(text(10), text(1000))
    engine.prefill({1: 8, 2: 8})
    engine.decode(5)
    engine.manager.unverified.forget_all(pool)
    engine.decode()
    before = engine.repeated
    engine.decode()
    assert engine.repeated == before
    live = {int(engine.tables["g0"][row, i]) for row, cached in engine.cached.items() for i in range(cached)}
    engine.manager.retire(pool, torch.tensor([slot for slot in range(16, 512) if slot not in live]))
    engine.manager.flush()
    engine.decode(3)
    assert engine.manager.unverified.is_clean
    assert engine.repeated > before
