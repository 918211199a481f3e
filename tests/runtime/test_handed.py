"""What the model hands over is what must lie in the pool: damage that the writing forward itself does is found."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kv_canary as kc
from kv_canary import output
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.replays import Replays

from .engine import BYTES, LAYERS, Engine, full_engine, make_pool

BACKENDS = ("reference", "triton")
Rows = dict[tuple[str, int], torch.Tensor]


class Handing(Engine):
    """An engine whose model hands its K and V over, layer by layer, and writes them, unless told otherwise.

    Args:
        spoil: called with what is about to be written, by half and layer, and the slots; changes what is.
    """

    def __init__(self, *, num_slots: int = 72, groups: list[kc.BufferGroup] | None = None, **options: object) -> None:
        settings = {"backend": "reference", "seals": "layer", "check_writes": True, "scrub_share": 0.0, **options}
        groups = groups or [kc.BufferGroup(name="full", pool=make_pool(num_slots, read_bytes=1))]
        super().__init__(groups, kc.CanaryConfig(**settings))  # type: ignore[arg-type]
        self.spoil: Callable[[Rows, torch.Tensor], None] = lambda rows, slots: None
        # Rows behind the tokens', as captured graphs have them; and layers that are not handed over.
        self.padding, self.silent_layers = 0, set[int]()

    def write_bytes(self, batch: kc.ForwardBatch) -> None:
        for group in self.groups:
            pool, slots = group.pool, batch.out_slots[group.name]
            sources = {"K": pool.k_source, "V": pool.v_source}
            rows: Rows = {}
            for layer in range(LAYERS):
                shape = (len(slots) + self.padding, 2, BYTES // 4)
                for half in sources:
                    rows[half, layer] = torch.randint(0, 1 << 15, shape, dtype=torch.int16)
                if layer not in self.silent_layers:
                    self.manager.handed(pool, layer, rows["K", layer], rows["V", layer])
            written = {key: row[: len(slots)].clone() for key, row in rows.items()}
            self.spoil(written, slots)
            for (half, layer), row in written.items():
                source = sources[half]
                assert source is not None
                tokens = source.layers[layer].view(-1, BYTES)
                for slot, token in zip(slots.tolist(), row, strict=True):
                    tokens[slot] = token.contiguous().view(torch.uint8).view(-1)


def swap_halves(rows: Rows, slots: torch.Tensor) -> None:
    rows["K", 1][2], rows["V", 1][2] = rows["V", 1][2].clone(), rows["K", 1][2].clone()


def other_layer(rows: Rows, slots: torch.Tensor) -> None:
    rows["K", 0][3] = rows["K", 1][3]


def constant_padding(rows: Rows, slots: torch.Tensor) -> None:
    for row in rows.values():
        row[-1] = 77


def dropped(rows: Rows, slots: torch.Tensor) -> None:
    rows["V", 0][0] = 0


def rotated(rows: Rows, slots: torch.Tensor) -> None:
    rows["K", 0][:] = rows["K", 0].roll(1, dims=0)


BUGS: dict[Callable[[Rows, torch.Tensor], None], tuple[list[int], set[str]]] = {
    swap_halves: ([2], {"SEAL_K", "SEAL_V"}),
    other_layer: ([3], {"SEAL_K"}),
    constant_padding: ([4], {"SEAL_K", "SEAL_V"}),
    dropped: ([0], {"SEAL_V"}),
    rotated: ([0, 1, 2, 3, 4], {"SEAL_K"}),
}


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launches be for rounded sizes and by graphs, which only call them here."""
    monkeypatch.setattr(CanaryContext, "new_replays", lambda _: Replays(lambda launch: launch))


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_launches_that_are_replayed_find_the_same(bug: Callable[[Rows, torch.Tensor], None]) -> None:
    test_what_the_writing_forward_spoils_is_found_in_that_forward(bug, "reference")


@pytest.mark.usefixtures("replayed")
def test_launches_that_are_replayed_are_silent_in_healthy_forwards() -> None:
    test_healthy_forwards_are_silent_whatever_they_are_like("reference")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_what_the_writing_forward_spoils_is_found_in_that_forward(
    bug: Callable[[Rows, torch.Tensor], None], backend: str
) -> None:
    engine = Handing(backend=backend)
    a = engine.add("a", 60)
    engine.step((a, 4))
    engine.spoil = bug
    engine.step((a, 5))
    engine.spoil = lambda rows, slots: None
    slots = engine.tables["full"][a.row, 4:9].tolist()
    wrong, reasons = BUGS[bug]
    found = engine.found()
    assert {r.slot for r in found} == {slots[i] for i in wrong}
    assert {reason for r in found for reason in r.reasons} == reasons
    assert {(r.tag, r.step) for r in found} == {("TAIL_FULL", 2)}
    assert all("as the model handed them over" in r.sentence for r in found)
    assert all("not what the model handed over" in r.cause for r in found)
    writes = engine.manager.summary().writes
    assert writes is not None
    assert (writes.forwards, writes.slots, writes.differ, writes.unknown) == (2, 9, len(wrong), 0)
    # The seal is of what was handed over: whoever looks later finds it too.
    engine.manager.scrub()
    assert {r.slot for r in engine.found()} == {slots[i] for i in wrong}


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_it_the_same_is_taken_for_right(backend: str) -> None:
    engine = Handing(backend=backend, check_writes=False)
    a = engine.add("a", 60)
    engine.spoil = swap_halves
    engine.step((a, 5))
    engine.step((a, 4))
    engine.manager.scrub()
    assert engine.found() == []
    assert engine.manager.summary().writes is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_healthy_forwards_are_silent_whatever_they_are_like(backend: str) -> None:
    pool = make_pool(72, read_bytes=1)
    groups = [
        kc.BufferGroup(name="full", pool=pool),
        kc.BufferGroup(name="ring", pool=make_pool(72, name="ring", read_bytes=1), window=5, ring=True),
    ]
    engine = Handing(groups=groups, backend=backend)
    a, b = engine.add("a", 60), engine.add("b", 60)
    engine.padding = 3
    for work in (((a, 5), (b, 3)), ((a, 1), (b, 1)), ((a, 1),), ((b, 4), (a, 1))):
        engine.step(*work)
    engine.manager.scrub()
    assert [r.sentence for r in engine.found()] == []
    writes = engine.manager.summary().writes
    assert writes is not None
    assert (writes.forwards, writes.differ, writes.unknown) == (8, 0, 0)
    assert writes.slots == 2 * (8 + 2 + 1 + 5)
    assert engine.manager.summary().as_dict()["writes"]["slots"] == writes.slots


def test_of_a_forward_that_hands_over_less_nothing_is_said() -> None:
    engine = Handing()
    a = engine.add("a", 60)
    engine.step((a, 5))
    # Stale rows of the forward before must not be taken for this one's.
    engine.silent_layers = {1}
    engine.spoil = swap_halves
    engine.step((a, 4))
    engine.silent_layers = {0, 1}
    engine.step((a, 4))
    assert engine.found() == []
    writes = engine.manager.summary().writes
    assert writes is not None
    assert (writes.slots, writes.unknown) == (5, 2)
    # What lies there is sealed as ever.
    engine.manager.scrub()
    assert engine.found() == []


@pytest.mark.usefixtures("replayed")
def test_a_warm_up_counts_nothing() -> None:
    engine = Handing()
    engine.manager.forward()
    engine.manager.warm_up({"full": torch.zeros(8, 64, dtype=torch.int32)})
    writes = engine.manager.summary().writes
    assert writes is not None
    assert (writes.forwards, writes.slots, writes.differ, writes.unknown) == (0, 0, 0, 0)


def test_damage_behind_a_forward_that_hands_over_less_is_found() -> None:
    engine = Handing()
    a = engine.add("a", 60)
    engine.step((a, 5))
    engine.silent_layers = {1}
    engine.step((a, 4))
    slots = [engine.slot_of(engine.groups[0], a, position) for position in (2, 6)]
    source = engine.groups[0].pool.k_source
    assert source is not None
    for slot in slots:
        source.layers[1].view(-1, BYTES)[slot, 31] ^= 1
    engine.manager.scrub()
    assert [(r.slot, r.reasons) for r in engine.found()] == [(slot, ("SEAL_K",)) for slot in slots]


def test_two_tokens_in_one_slot_and_tokens_in_none() -> None:
    engine = Handing()
    a = engine.add("a", 60)
    batch = engine.batch((a, 5))
    slots = batch.out_slots["full"]
    # Position 1 goes nowhere.
    slots[1] = 0
    engine.tables["full"][a.row, 1] = 0
    engine.run(batch)
    assert {r.reasons for r in engine.found()} <= {("UNMAPPED",)}
    writes = engine.manager.summary().writes
    assert writes is not None
    assert writes.slots == 4


def test_more_tokens_than_are_kept_are_sealed_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.runtime.handed.MOST_TOKENS", 3)
    engine = Handing()
    a = engine.add("a", 60)
    engine.spoil = rotated
    engine.step((a, 5))
    assert {r.slot for r in engine.found()} == set(engine.tables["full"][a.row, :3].tolist())
    writes = engine.manager.summary().writes
    assert writes is not None
    assert writes.slots == 3


def test_what_cannot_be_is_told() -> None:
    engine = Handing(mode="raise")
    pool = engine.groups[0].pool
    rows = torch.zeros(3, 16, dtype=torch.int16)
    for arguments, says in (
        ((pool, LAYERS, rows, rows), r"layer must be in \[0, 2\), got 2"),
        ((pool, 0, rows, None), "v must be given, got None"),
        ((pool, 0, rows[:, :4], rows), "k must be rows of 32 bytes, got 8"),
    ):
        with pytest.raises(ValueError, match=says):
            engine.manager.handed(*arguments)
    # A pool that is not sealed has nothing to hold it against.
    engine.manager.handed(make_pool(), 0, rows, rows)
    for without in ({"seals": "off"}, {"track_lifetime": False}):
        with pytest.raises(ValueError, match="check_writes must be off where seals or track_lifetime are, got on"):
            kc.CanaryConfig(check_writes=True, **without)


def test_where_it_is_off_nothing_is_kept() -> None:
    engine = full_engine(seals="layer")
    rows = torch.zeros(3, 99, dtype=torch.int16)
    engine.manager.handed(engine.groups[0].pool, 77, rows, rows)
    assert engine.manager.summary().writes is None


class Lost:
    """Counts on a device that no longer answers."""

    def tolist(self) -> list[int]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_the_verdict_is_told_when_the_device_no_longer_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "events.jsonl"
    engine = Handing(mode=mode, event_log=path)
    engine.manager.guard.contains = mode == "log"
    a = engine.add("a", 9)
    engine.step((a, 6))
    engine.manager.flush()
    monkeypatch.setattr(engine.manager._steps.handed, "_checked", Lost())
    with contextlib.nullcontext() if mode == "log" else pytest.raises(RuntimeError, match="illegal memory access"):
        engine.manager.close()
    output.drain(10.0)
    last = json.loads(path.read_text().splitlines()[-1])
    assert last["event"] == "stop"
    if mode == "log":
        assert (last["step"], last["violations"]) == (1, 0)
        summary = engine.manager.summary()
        assert (summary.writes, summary.failures) == (None, {"counting the checked writes: RuntimeError": 2})
