"""A tier in host memory: records and seals go along with the bytes, and what goes wrong there is found."""

from __future__ import annotations

import mmap
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kv_canary as kc
from kv_canary import backends
from kv_canary import tier as tier_module
from kv_canary.host_seals import ChunkSource, HostSeals
from kv_canary.reference.seals import band_words
from kv_canary.reports import reporter
from kv_canary.specs.structures import Endpoint, KvSource
from kv_canary.tier import HostTier

from .engine import BYTES, LAYERS, Engine, Request, full_engine, make_pool

HOST_SLOTS = 64
BACKENDS = ("reference", "triton")


class Tiered:
    """An engine with a tier, which copies in the order of SGLang's."""

    def __init__(self, *, is_seen: bool = True, **options: object) -> None:
        config = kc.CanaryConfig(**{"backend": "reference", "seals": "layer", **options})  # type: ignore[arg-type]
        self.group = kc.BufferGroup(name="full", pool=make_pool())
        self.engine = Engine([self.group], config)
        self.halves = [torch.zeros(LAYERS, HOST_SLOTS, BYTES, dtype=torch.uint8) for _ in range(2)]
        k, v = (KvSource(layers=tuple(half), page_size=1, bytes_per_token=BYTES, slot_bias=1) for half in self.halves)
        self.tier = HostTier(
            self.engine.manager,
            self.group,
            num_slots=HOST_SLOTS,
            k_source=k,
            v_source=v if is_seen else None,
        )

    def slots(self, request: Request, start: int, end: int) -> torch.Tensor:
        return self.engine.tables["full"][request.row, start:end].long().clone()

    def copied(self, host: torch.Tensor, device: torch.Tensor, *, back: bool, layers: range = range(LAYERS)) -> None:
        pool = self.group.pool
        for source, half in zip((pool.k_source, pool.v_source), self.halves, strict=True):
            assert source is not None
            for layer in layers:
                rows = source.layers[layer].view(-1, BYTES)
                if back:
                    rows[device] = half[layer, host]
                else:
                    half[layer, host] = rows[device]

    def backup(self, device: torch.Tensor, host: torch.Tensor) -> None:
        backup = self.tier.backup(device, host)
        self.copied(host, device, back=False)
        self.tier.backed_up(backup)

    def load(self, host: torch.Tensor, request: Request, start: int, *, layers: range = range(LAYERS)) -> torch.Tensor:
        """Bring a request's positions from `start` on back into new slots."""
        first = self.engine.allocate(self.group.pool, len(host))
        device = torch.arange(first, first + len(host))
        self.tier.load(host, device)
        self.copied(host, device, back=True, layers=layers)
        self.tier.loaded()
        self.engine.tables["full"][request.row, start : start + len(host)] = device.int()
        self.tier.land()
        return device

    def step(self, *work: tuple[Request, int]) -> None:
        self.tier.settle()
        self.engine.step(*work)

    def found(self) -> dict[tuple[str, ...], set[str]]:
        """Return the groups that each set of reasons was found in, with all that there is to look at on the host."""
        self.tier.settle()
        self.tier.check(whole=True)
        self.engine.manager.flush()
        seen: dict[tuple[str, ...], set[str]] = {}
        for report in self.engine.manager.reports:
            seen.setdefault(report.reasons, set()).add(report.group)
        return seen


def lived(**options: Any) -> tuple[Tiered, Request, torch.Tensor, torch.Tensor]:
    """Return an engine, a request with ten positions, and their slots on the device and on the host."""
    t = Tiered(**options)
    a = t.engine.add("a", 40)
    t.step((a, 10))
    return t, a, t.slots(a, 0, 10), torch.arange(20, 30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_goes_to_the_host_and_back_is_verified_like_any_other(backend: str) -> None:
    t, a, device, host = lived(backend=backend)
    t.backup(device, host)
    t.step((a, 1))
    t.engine.manager.retire(t.group.pool, device, owner=a.owner)
    # Others write there now.
    t.copied(torch.arange(10), device, back=True)
    t.load(host, a, 0)
    for _ in range(3):
        t.step((a, 1))
    assert t.found() == {}
    summary = t.engine.manager.summary()
    assert summary.positions_verified == summary.positions_relied_on
    assert summary.unverified == 0
    facts = t.tier.facts
    assert (facts.backed_up, facts.loaded, facts.verified, facts.unsealed) == (10, 10, 10, 0)
    audits = summary.audits
    assert audits is not None
    assert audits.admitted >= 10


@pytest.mark.parametrize("half", ["K", "V"])
def test_a_bit_that_flips_on_the_host_is_found_there(half: str) -> None:
    t, _, device, host = lived()
    t.backup(device, host)
    t.halves["KV".index(half)][1, 24, 3] ^= 4
    assert t.found() == {(f"SEAL_{half}",): {"full on the host"}}
    [report] = t.engine.manager.reports
    assert (report.slot, report.position) == (25, 4)
    assert report.places == (f"{half} somewhere from layer 0 to layer 1",)
    assert "written by request a" in report.sentence


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seals", ["layer", "model"])
def test_what_is_found_on_the_host_is_told_with_its_neighbours(backend: str, seals: str) -> None:
    t, _, device, host = lived(backend=backend, seals=seals)
    t.backup(device, host)
    t.halves[0][1, 24, 3] ^= 4
    assert set(t.found()) == {("SEAL_K",)}
    assert t.engine.manager.summary().failures == {}
    [incident] = t.engine.manager.incidents
    assert incident.neighbourhood is not None
    around = {row.slot: row for row in incident.neighbourhood.rows}
    assert set(around) == set((host + 1).tolist())
    assert {around[slot].position for slot in (24, 25, 26)} == {3, 4, 5}
    assert {row.writer for row in around.values()} == {"a"}


def test_kernels_that_want_a_gpu_do_not_look_around_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    t, _, device, host = lived(backend="triton")
    t.backup(device, host)
    t.engine.manager.flush()
    t.halves[0][1, 24, 3] ^= 4
    for module in (backends, reporter):
        monkeypatch.setattr(module, "interpreting", lambda: False, raising=False)
    assert set(t.found()) == {("SEAL_K",)}
    [incident] = t.engine.manager.incidents
    assert incident.neighbourhood is not None
    assert len(incident.neighbourhood.rows) == 10


def test_a_bit_that_flips_on_the_host_is_found_when_it_is_loaded() -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    t.tier.settle()
    t.halves[0][1, 24, 3] ^= 4
    t.load(host, a, 0)
    t.engine.manager.flush()
    assert {(r.reasons, r.group, r.position) for r in t.engine.manager.reports} == {(("SEAL_K",), "full", 4)}


def test_a_layer_that_is_not_loaded_is_found() -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    t.load(host, a, 0, layers=range(1))
    t.step((a, 1))
    t.engine.manager.flush()
    assert {r.position for r in t.engine.manager.reports} == set(range(10))


def test_slots_whose_bytes_change_while_they_are_copied_are_found() -> None:
    t, a, device, host = lived()
    backup = t.tier.backup(device, host)
    # The device slots are another's before the copy comes.
    b = t.engine.add("b", 20)
    t.engine.tables["full"][b.row, :4] = device[:4].int()
    t.engine.run(t.engine.batch((b, 4), map_new=False))
    t.copied(host, device, back=False)
    t.tier.backed_up(backup)
    found = t.found()
    assert {"full on the host"} in found.values()
    assert {r.position for r in t.engine.manager.reports if r.group == "full on the host"} == {0, 1, 2, 3}
    assert a.name in {r.record.request_id for r in t.engine.manager.reports if r.record is not None}


def test_a_load_of_what_was_never_backed_up_is_found() -> None:
    t, a, device, host = lived()
    t.backup(device[:5], host[:5])
    t.load(host, a, 0)
    t.step((a, 1))
    t.engine.manager.flush()
    reports = t.engine.manager.reports
    assert {(r.position, r.reasons) for r in reports if r.tag == "HEAD_FULL"} >= {
        (p, ("NEVER_WRITTEN",)) for p in range(5, 10)
    }


def test_a_host_slot_that_is_freed_and_given_to_another_is_not_the_first_ones_any_more() -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    t.tier.settle()
    b = t.engine.add("b", 20)
    t.step((b, 10))
    t.tier.free(host)
    t.backup(t.slots(b, 0, 10), host)
    t.load(host, a, 0)
    t.step((a, 1))
    t.engine.manager.flush()
    assert {r.position for r in t.engine.manager.reports if "TOKEN" in r.reasons} == set(range(10))


def test_a_backup_of_what_nobody_has_written_or_has_any_more_is_found() -> None:
    t, a, device, host = lived()
    t.backup(torch.arange(100, 103), torch.arange(3))
    t.engine.manager.retire(t.group.pool, device, owner=a.owner)
    t.backup(device, host)
    assert t.found() == {("NEVER_WRITTEN",): {"full on the host"}, ("FREED",): {"full on the host"}}


def test_what_nobody_has_followed_is_a_gap_on_the_host_too() -> None:
    t, a, device, host = lived()
    t.engine.manager.unverify(t.group.pool, device[2:5])
    t.backup(device, host)
    t.load(host, a, 0)
    t.step((a, 1))
    t.step((a, 1))
    assert t.found() == {}
    assert t.engine.manager.summary().unverified >= 3


def test_a_slot_that_changes_while_it_is_looked_at_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    t, _, device, host = lived()
    t.backup(device, host)
    t.tier.settle()
    assert t.tier._hash is not None
    look = t.tier._hash.words

    def freed_meanwhile(slots: np.ndarray) -> np.ndarray:
        t.tier.free(host)
        t.halves[0][:] = 7
        return look(slots)

    t.halves[0][1, 24, 3] ^= 4
    monkeypatch.setattr(t.tier._hash, "words", freed_meanwhile)
    t.tier.check()
    monkeypatch.undo()
    assert t.found() == {}


@pytest.mark.parametrize("width", [8, 13, 64])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("halves", ["K and V", "K", "V"])
def test_the_host_hashes_as_the_reference_does(width: int, page: int, halves: str) -> None:
    random = torch.Generator().manual_seed(width + page)
    gap, per_band, layers, seed = 3, 2, 5, (1 << 63) - 5

    def source() -> KvSource:
        shape = (12, 2 + page * (width + gap))
        rows = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=random) for _ in range(layers)]
        return KvSource(
            layers=tuple(rows),
            page_size=page,
            bytes_per_token=width,
            offset_bytes=2,
            slot_bias=1,
            token_stride_bytes=width + gap,
        )

    k, v = (source() if half in halves else None for half in "KV")
    slots = torch.randperm(12 * page, generator=random)[:7] + 1
    endpoint = Endpoint(tag=kc.Tag.SWEEP_FULL, records=torch.zeros(64, 4, dtype=torch.int64), k_source=k, v_source=v)
    expected = band_words(endpoint, slots, layers_per_band=per_band, seed=seed)
    hashed = HostSeals(k, v, layers_per_band=per_band, seed=seed).words(slots.numpy())
    assert torch.equal(torch.from_numpy(hashed.view(np.int64)), expected)


@pytest.mark.parametrize("pages", [1, 3])
def test_chunks_of_pages_are_hashed_as_the_pages_are(pages: int) -> None:
    random = torch.Generator().manual_seed(pages)
    gap, width, page, layers, seed = 3, 13, 4, 5, 7
    stride = page * (width + gap) + 5
    chunks = [
        torch.randint(0, 256, (6, 50 + pages * stride), dtype=torch.uint8, generator=random) for _ in range(layers)
    ]
    common = {"bytes_per_token": width, "offset_bytes": 2, "slot_bias": 1, "token_stride_bytes": width + gap}
    whole = ChunkSource(
        # Others lie between chunks.
        layers=tuple(chunk[:, 50:] for chunk in chunks),
        page_size=pages * page,
        pages=pages,
        page_stride_bytes=stride,
        **common,
    )
    alone = KvSource(
        layers=tuple(chunk[:, 50:].reshape(6 * pages, stride) for chunk in chunks), page_size=page, **common
    )
    slots = torch.randperm(6 * pages * page, generator=random).numpy() + 1
    hashes = [HostSeals(s, None, layers_per_band=2, seed=seed).words(slots) for s in (whole, alone)]
    assert np.array_equal(*hashes)


def test_the_thread_looks_at_what_arrives_first_and_then_at_all_of_it() -> None:
    t, _, device, host = lived()
    t.backup(device, host)
    t.tier.settle()
    t.halves[1][0, 21, 0] ^= 1
    t.tier.start()
    end = time.monotonic() + 20
    while t.tier.facts.rounds < 2 and time.monotonic() < end:
        time.sleep(0.02)
    t.tier.close()
    assert t.tier.facts.rounds >= 2
    assert t.tier.facts.waiting == 0
    t.engine.manager.flush()
    assert {(r.reasons, r.group) for r in t.engine.manager.reports} == {(("SEAL_V",), "full on the host")}
    # Found again and again, it is one incident.
    [incident] = t.engine.manager.incidents
    assert incident.count >= 2


@pytest.mark.parametrize(("scanned", "looked"), [(1 << 16, [4, 4, 2]), (8, [4, 4, 2, 0])])
def test_a_round_passes_over_what_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, scanned: int, looked: list[int]
) -> None:
    monkeypatch.setattr(tier_module, "_SCANNED_AT_ONCE", scanned)
    t, _, device, host = lived()
    t.backup(device, host)
    t.tier.settle()
    assert t.tier.check() == 10
    t.tier._at_once = 4
    for rounds in (1, 2):
        assert [t.tier.check() for _ in looked] == looked
        assert t.tier.facts.rounds == rounds
    t.halves[0][0, 29, 0] ^= 1
    for _ in looked:
        t.tier.check()
    t.engine.manager.flush()
    assert {r.slot for r in t.engine.manager.reports} == {30}
    # What has gone since it was next is passed over as well.
    t.tier.check()
    t.tier.free(host[4:])
    assert t.tier.check() == 0


def test_the_thread_keeps_to_its_share_in_a_large_tier_that_is_nearly_empty() -> None:
    slots = 1 << 20
    k, v = (
        KvSource(
            layers=tuple(torch.zeros(LAYERS, slots, BYTES, dtype=torch.uint8)),
            page_size=1,
            bytes_per_token=BYTES,
            slot_bias=1,
        )
        for _ in range(2)
    )
    engine = full_engine(seals="layer")
    tier = HostTier(engine.manager, engine.groups[0], num_slots=slots, k_source=k, v_source=v)
    tier._there[1:65] = tier._generations[1:65]
    tier.start()
    assert tier._thread is not None
    assert tier._thread.ident is not None
    clock = time.pthread_getcpuclockid(tier._thread.ident)
    began, before = time.monotonic(), time.clock_gettime(clock)
    time.sleep(1)
    took, passed = time.clock_gettime(clock) - before, time.monotonic() - began
    tier.close()
    # A look may have been under way at either end.
    assert took / passed < 0.1
    assert tier.facts.rounds > 0


def test_of_too_many_that_wait_the_oldest_are_come_to_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "_MOST_WAITING", 12)
    t, _, device, _ = lived()
    for first in (20, 32, 44):
        t.backup(device, torch.arange(first, first + 10))
        t.tier.settle()
    assert t.tier.facts.waiting == 10
    # One of those that wait no more, and one that does.
    t.halves[0][0, 21, 0] ^= 1
    t.halves[0][0, 45, 0] ^= 1
    assert t.tier.check() == 10
    t.engine.manager.flush()
    assert {r.slot for r in t.engine.manager.reports} == {46}
    assert t.tier.facts.waiting == 0
    assert t.tier.check(whole=True) == 30
    t.engine.manager.flush()
    assert {r.slot for r in t.engine.manager.reports} == {46, 22}


def test_small_backups_are_looked_at_together() -> None:
    """A look at few bytes is many calls of Python's, which an engine's thread waits for."""
    t, _, device, _ = lived()
    for first in (20, 32, 44):
        t.backup(device, torch.arange(first, first + 10))
        t.tier.settle()
    t.tier._at_once = 24
    t.halves[0][0, 47, 0] ^= 1
    t.halves[0][0, 48, 0] ^= 1
    for looked, waiting, wrong in ((24, 6, {48}), (6, 0, {48, 49})):
        assert t.tier.check() == looked
        assert t.tier.facts.waiting == waiting
        t.engine.manager.flush()
        assert {r.slot for r in t.engine.manager.reports} == wrong


def test_of_one_backup_that_is_too_large_the_last_slots_are_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "_MOST_WAITING", 4)
    t, _, device, host = lived()
    t.backup(device, host)
    t.tier.settle()
    assert t.tier.facts.waiting == 4
    # Records and seals, in whole records' words, and five numbers of what is known of a slot.
    assert t.tier.facts.memory == (-(-t.tier.width // 4) * 4 + 5) * 8 * t.tier.pool.num_slots
    last = int(host[-1])
    t.halves[0][0, last, 0] ^= 1
    assert t.tier.check() == 4
    t.engine.manager.flush()
    assert {r.slot for r in t.engine.manager.reports} == {last + 1}


def test_what_is_freed_or_written_anew_while_it_waits_is_not_held_against_what_it_was() -> None:
    t, _, device, host = lived()
    t.backup(device, host)
    t.tier.settle()
    assert t.tier.held.tolist() == (host + 1).tolist()
    t.tier.free(host[:4])
    # Others' bytes lie there by now, and with the last ones their records do.
    t.halves[0][:, 20:24] = 7
    t.backup(device[:2], host[8:])
    assert t.tier.held.tolist() == (host[4:8] + 1).tolist()
    t.tier.settle()
    assert t.tier.held.tolist() == (host[4:] + 1).tolist()
    assert t.found() == {}
    assert t.tier.rows_of(host[3:5]) is None
    rows = t.tier.rows_of(host[8:])
    assert rows is not None
    assert torch.equal(rows[:, :4], t.group.pool.records[device[:2]])


def test_a_tier_that_is_emptied_forgets_everything() -> None:
    t, _, device, host = lived()
    t.backup(device, host)
    t.tier.clear()
    t.tier.settle()
    t.halves[0][:] = 9
    assert t.found() == {}
    assert t.tier.facts.backed_up == 0


def test_a_tier_that_nobody_could_follow_is_taken_in_anew() -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    t.tier.forget()
    t.halves[0][:] = 9
    t.load(host, a, 0)
    t.step((a, 1))
    t.step((a, 1))
    assert t.found() == {}
    assert t.engine.manager.summary().unverified == 10
    # What is backed up from here on is known again.
    t.backup(t.slots(a, 0, 10), host)
    t.tier.settle()
    t.halves[0][1, 24, 3] ^= 4
    assert set(t.found()) == {("SEAL_K",)}


@pytest.mark.parametrize("when", ["on its way", "before it lands", "before it lands, and freed"])
def test_what_is_on_its_way_back_when_nobody_can_say_what_the_tier_holds_is_taken_in_anew(when: str) -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    first = t.engine.allocate(t.group.pool, len(host))
    new = torch.arange(first, first + len(host))
    t.tier.load(host, new)
    if when == "on its way":
        t.tier.forget()
    t.copied(host, new, back=True)
    t.tier.loaded()
    if when != "on its way":
        t.tier.forget()
    if "freed" in when:
        t.tier.free(host)
    t.engine.tables["full"][a.row, :10] = new.int()
    t.tier.settle()
    t.tier.land()
    t.step((a, 1))
    t.step((a, 1))
    assert t.found() == {}
    summary = t.engine.manager.summary()
    assert (summary.unverified, summary.violations) == (10, 0)
    # They have records again, which are verified like any other.
    source = t.group.pool.k_source
    assert source is not None
    source.layers[0].view(-1, BYTES)[new[4]] ^= 255
    t.step((a, 1))
    t.engine.manager.flush()
    assert {r.position for r in t.engine.manager.reports} == {4}


def test_where_the_host_s_bytes_are_not_known_seals_travel_and_nothing_is_looked_at_there() -> None:
    t, a, device, host = lived(is_seen=False)
    t.backup(device, host)
    t.halves[1][1, 24, 3] ^= 4
    assert t.found() == {}
    assert t.tier.check() == t.tier.facts.waiting == 0
    assert not t.tier.looks
    t.load(host, a, 0)
    t.engine.manager.flush()
    assert {(r.reasons, r.group, r.position) for r in t.engine.manager.reports} == {(("SEAL_V",), "full", 4)}


def test_without_seals_records_travel_all_the_same() -> None:
    t, a, device, host = lived(seals="off")
    t.backup(device, host)
    t.load(host, a, 0)
    t.step((a, 1))
    assert t.found() == {}
    assert t.tier.check() == 0
    t.halves[0][0] ^= 255
    t.load(host, a, 0)
    t.step((a, 1))
    t.engine.manager.flush()
    assert {"K"} <= {reason for r in t.engine.manager.reports for reason in r.reasons}


def test_misuse_is_refused() -> None:
    engine = full_engine()
    other = kc.BufferGroup(name="other", pool=make_pool())
    with pytest.raises(ValueError, match="HostTier: group must be one of the manager's, got other"):
        HostTier(engine.manager, other, num_slots=4, k_source=None, v_source=None)
    wide = KvSource(layers=(torch.zeros(4, 8, dtype=torch.uint8),), page_size=1, bytes_per_token=8, slot_bias=1)
    with pytest.raises(ValueError, match="HostTier: k_source must be of the pool's layers and bytes"):
        HostTier(engine.manager, engine.groups[0], num_slots=4, k_source=wide, v_source=None)
    HostTier(engine.manager, engine.groups[0], num_slots=4, k_source=None, v_source=None)
    with pytest.raises(ValueError, match="watch_place: group must be of another name"):
        HostTier(engine.manager, engine.groups[0], num_slots=4, k_source=None, v_source=None)
    split = full_engine(records="head_and_tail")
    with pytest.raises(ValueError, match="HostTier: records must be one of each slot"):
        HostTier(split.manager, split.groups[0], num_slots=4, k_source=None, v_source=None)


def test_a_half_that_the_pool_has_not_got_is_refused() -> None:
    pool = make_pool()
    alone = kc.KvPool(name="K alone", num_slots=128, k_source=pool.k_source, v_source=None, device="cpu")
    group = kc.BufferGroup(name="full", pool=alone)
    engine = Engine([group], kc.CanaryConfig(backend="reference", seals="layer"))
    half = torch.zeros(LAYERS, HOST_SLOTS, BYTES, dtype=torch.uint8)
    source = KvSource(layers=tuple(half), page_size=1, bytes_per_token=BYTES, slot_bias=1)
    with pytest.raises(ValueError, match="HostTier: v_source must be of the pool's layers and bytes"):
        HostTier(engine.manager, group, num_slots=HOST_SLOTS, k_source=source, v_source=source)


def test_slots_that_nobody_could_follow_are_known_again_once_they_are_loaded() -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    first = t.engine.next_slot[t.group.pool]
    t.engine.manager.unverify(t.group.pool, torch.arange(first, first + 10))
    t.load(host, a, 0)
    t.step((a, 1))
    assert t.found() == {}
    assert t.engine.manager.summary().unverified == 0


def test_bytes_that_are_still_on_their_way_are_waited_for_before_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    first = t.engine.allocate(t.group.pool, 10)
    new = torch.arange(first, first + 10)
    t.tier.load(host, new)
    forwards = object()

    class Arrival:
        """The event of a copy that is over once somebody has waited for it."""

        def wait(self, stream: object) -> None:
            assert stream is forwards
            t.copied(host, new, back=True)

    # As on a GPU, where the copy runs on.
    monkeypatch.setattr(t.tier._loads[-1], "arrived", Arrival())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: forwards)
    t.tier.loaded()
    t.tier.land()
    t.engine.tables["full"][a.row, :10] = new.int()
    t.step((a, 1))
    assert t.found() == {}


@pytest.mark.parametrize("by", ["freed", "cleared"])
def test_a_load_under_way_has_what_was_on_the_host_whoever_has_the_place_by_then(by: str) -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    first = t.engine.allocate(t.group.pool, 10)
    new = torch.arange(first, first + 10)
    t.tier.load(host, new)
    t.copied(host, new, back=True)
    t.tier.loaded()
    # Not before: the engine is about to launch what reads it.
    assert t.tier._loads[-1].fetched is None
    if by == "freed":
        t.tier.free(host)
        t.backup(device.flip(0), host)
        t.tier.settle()
    else:
        t.tier.clear()
    t.tier.land()
    t.engine.tables["full"][a.row, :10] = new.int()
    for _ in range(2):
        t.step((a, 1))
    assert t.found() == {}
    summary = t.engine.manager.summary()
    assert summary.unverified == 0
    assert summary.positions_verified == summary.positions_relied_on


def fetched_back(t: Tiered, request: Request, device: torch.Tensor, host: torch.Tensor) -> None:
    """Load a request's first ten positions into new slots, others having their places on the host before it is run."""
    fetched = t.tier.fetch(host)
    first = t.engine.allocate(t.group.pool, 10)
    new = torch.arange(first, first + 10)
    t.copied(host, new, back=True)
    t.tier.free(host)
    t.backup(device.flip(0), host)
    t.step()
    t.tier.put_back(fetched.only(torch.arange(4)), new[:4])
    t.tier.put_back(fetched.only(torch.tensor([9, 8, 7, 6, 5, 4])), new[4:].flip(0))
    t.engine.tables["full"][request.row, :10] = new.int()
    t.tier.land()
    t.step((request, 1))


def test_what_was_fetched_is_kept_whoever_has_the_place_on_the_host_by_then() -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    fetched_back(t, a, device, host)
    assert t.found() == {}
    assert t.engine.manager.summary().unverified == 0
    assert t.tier.facts.loaded == 10


def test_what_comes_back_is_held_against_what_was_fetched() -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    t.halves[0][1, 24, 3] ^= 4
    fetched_back(t, a, device, host)
    t.engine.manager.flush()
    assert {(r.reasons, r.group, r.position) for r in t.engine.manager.reports} == {(("SEAL_K",), "full", 4)}


def test_a_gap_that_was_fetched_is_one_whoever_has_the_place_on_the_host_by_then() -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    t.tier.forget()
    fetched_back(t, a, device, host)
    assert t.found() == {}
    assert t.engine.manager.summary().unverified > 0


def test_a_gap_that_comes_back_is_picked_by_its_number() -> None:
    """A mask on a GPU would have the host wait for what it picks."""
    t, _, device, host = lived()
    t.backup(device, host)
    t.tier.forget()
    first = t.engine.allocate(t.group.pool, 10)
    new = torch.arange(first, first + 10)
    t.tier.load(host, new)
    picked = []

    class Picks(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.index.Tensor and args[0].data_ptr() == new.data_ptr():
                picked.extend(index.dtype for index in args[1])
            return function(*args, **(kwargs or {}))

    t.copied(host, new, back=True)
    t.tier.loaded()
    with Picks():
        t.tier.land()
    # What is launched behind that picks as it likes, on a CPU.
    assert picked[0] == torch.int64


def test_what_is_fetched_while_its_backup_is_under_way_waits_for_it() -> None:
    t, _, device, host = lived()
    waited = []

    class Copy:
        """The event of a copy that is not over."""

        def record(self) -> None: ...

        def query(self) -> bool:
            return bool(waited)

        def synchronize(self) -> None:
            waited.append(True)

    t.tier.bring(t.tier.expect(torch.arange(40, 50)), None)
    backup = t.tier.backup(device, host)
    backup.arrived = Copy()  # type: ignore[assignment]
    t.copied(host, device, back=False)
    t.tier.backed_up(backup)
    t.tier.fetch(torch.tensor([], dtype=torch.int64))
    # What nobody can say anything of is not on its way.
    assert t.tier.fetch(torch.arange(40, 50)).gaps.all()
    assert waited == []
    assert t.tier.fetch(host).rows.any(dim=1).all()
    assert waited == [True]


def test_the_host_s_memory_can_be_closed_once_a_tier_has_let_go_of_it() -> None:
    group = kc.BufferGroup(name="full", pool=make_pool())
    engine = Engine([group], kc.CanaryConfig(backend="reference", seals="layer"))
    memory = mmap.mmap(-1, 2 * LAYERS * HOST_SLOTS * BYTES)

    def tier_of() -> HostTier:
        halves = torch.frombuffer(memoryview(memory), dtype=torch.uint8).view(2, LAYERS, HOST_SLOTS, BYTES)
        k, v = (KvSource(layers=tuple(half), page_size=1, bytes_per_token=BYTES, slot_bias=1) for half in halves)
        return HostTier(engine.manager, group, num_slots=HOST_SLOTS, k_source=k, v_source=v)

    tier = tier_of()
    tier.start()
    assert tier.looks
    tier.close()
    with pytest.raises(BufferError):
        memory.close()
    tier.release()
    memory.close()
    assert not tier.looks
    assert tier.check() == tier.check(whole=True) == 0


def test_an_empty_tier_has_nothing_to_look_at() -> None:
    t = Tiered()
    assert t.tier.check() == t.tier.check(whole=True) == 0


def kept_elsewhere(**options: Any) -> tuple[Tiered, Request, torch.Tensor, torch.Tensor]:
    """Return an engine, a request, what is kept of ten of its slots elsewhere, and other slots for it on the host."""
    t, a, device, host = lived(**options)
    t.backup(device, host)
    assert t.tier.rows_of(host) is None
    t.tier.settle()
    rows = t.tier.rows_of(host)
    assert rows is not None
    assert rows.shape == (10, t.tier.width)
    assert t.tier.rows_of(torch.tensor([19, 20])) is None
    t.engine.manager.retire(t.group.pool, device, owner=a.owner)
    there = torch.arange(40, 50)
    for half in t.halves:
        half[:, there] = half[:, host]
        half[:, host] = 0
    t.tier.free(host)
    return t, a, rows, there


@pytest.mark.parametrize("seals", ["layer", "off"])
def test_what_comes_from_elsewhere_is_held_against_what_was_kept(seals: str) -> None:
    t, a, rows, there = kept_elsewhere(seals=seals)
    expected = t.tier.expect(there)
    assert t.tier.is_quiet
    t.tier.bring(expected, rows)
    assert not t.tier.is_quiet
    t.load(there, a, 0)
    t.step((a, 1))
    assert t.found() == {}
    facts = t.tier.facts
    assert (facts.brought, facts.brought_unknown, facts.loaded) == (10, 0, 10)
    assert facts.verified == (10 if seals == "layer" else 0)
    assert t.engine.manager.summary().unverified == 0


def test_what_arrives_otherwise_than_it_was_kept_is_found_on_the_host() -> None:
    t, _, rows, there = kept_elsewhere()
    assert t.tier.check(whole=True) == 0
    t.halves[1][0, 44, 2] ^= 1
    t.tier.bring(t.tier.expect(there), rows)
    t.tier.settle()
    assert t.tier.facts.waiting == 10
    # What has just arrived comes first.
    assert t.tier.check() == 10
    t.engine.manager.flush()
    [report] = t.engine.manager.reports
    assert (report.group, report.slot, report.position, report.reasons) == ("full on the host", 45, 4, ("SEAL_V",))


def test_what_comes_without_records_is_taken_in_and_counted() -> None:
    t, a, _, there = kept_elsewhere()
    t.tier.bring(t.tier.expect(there), None)
    t.load(there, a, 0)
    t.step((a, 1))
    assert t.found() == {}
    assert (t.tier.facts.brought, t.tier.facts.brought_unknown) == (0, 10)
    assert t.engine.manager.summary().unverified == 10


def test_what_never_came_is_found_by_who_reads_it() -> None:
    t, a, rows, there = kept_elsewhere()
    t.tier.bring(t.tier.expect(there[:6]), rows[:6])
    t.load(there, a, 0)
    t.step((a, 1))
    assert t.found() == {("NEVER_WRITTEN",): {"full"}}
    assert {r.position for r in t.engine.manager.reports} == {6, 7, 8, 9}


@pytest.mark.parametrize("known", [True, False])
def test_what_comes_to_slots_that_are_anothers_by_then_is_left_out(known: bool) -> None:
    t, a, rows, there = kept_elsewhere()
    expected = t.tier.expect(there)
    t.tier.free(there[:4])
    t.tier.bring(expected, rows if known else None)
    t.tier.settle()
    assert (t.tier.facts.brought, t.tier.facts.brought_unknown) == ((6, 0) if known else (0, 6))
    assert (t.tier.rows_of(there[4:]) is not None) == known
    assert t.tier.rows_of(there[:4]) is None
    t.load(there, a, 0)
    t.step((a, 1))
    assert {r.position for r in t.engine.manager.reports} <= {0, 1, 2, 3}


@pytest.mark.parametrize("how", ["clear", "forget"])
def test_an_emptied_tier_takes_nothing_in_that_came_before(how: str) -> None:
    t, _, rows, there = kept_elsewhere()
    t.tier.bring(t.tier.expect(there), rows)
    getattr(t.tier, how)()
    assert t.tier.is_quiet
    t.tier.settle()
    assert t.tier.facts.brought == 0
    assert t.tier.rows_of(there) is None


def causes(t: Tiered) -> list[str]:
    """Return what the incidents say, with all that there is to look at on the host."""
    t.found()
    return [incident.cause for incident in t.engine.manager.incidents]


def test_what_was_not_right_when_it_came_to_the_host_is_said_to_have_come_so() -> None:
    t, _, device, host = lived()
    backup = t.tier.backup(device, host)
    # The copy is left out.
    t.tier.backed_up(backup)
    [cause] = causes(t)
    assert "the bytes of 10 slots are not those that were to come there" in cause


def test_what_changes_on_the_host_once_it_was_seen_is_said_to_have_changed() -> None:
    t, _, device, host = lived()
    t.backup(device, host)
    assert causes(t) == []
    t.halves[0][0, 21:24] ^= 1
    [cause] = causes(t)
    assert "the bytes of 3 slots changed after they were written" in cause


def test_a_place_on_the_host_that_is_anothers_was_not_seen_right_before() -> None:
    t, _, device, host = lived()
    t.backup(device, host)
    assert causes(t) == []
    t.tier.free(host)
    t.backup(device, host)
    t.halves[0][0, 25:27] ^= 1
    [cause] = causes(t)
    assert "the bytes of 2 slots are not those that were to come there" in cause


def test_a_load_that_leaves_out_a_layer_is_said_to_be_at_fault() -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    t.step((a, 1))
    t.load(host, a, 0, layers=range(1, LAYERS))
    t.step((a, 1))
    said = causes(t)
    assert said
    assert all("are not those that were to come there" in cause for cause in said)
    assert "at step 2: the copy was left out" in said[0]


def test_a_load_from_the_wrong_place_is_said_to_be_at_fault() -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    t.step((a, 1))
    # Records and bytes go together, to each other's places.
    t.load(host.flip(0), a, 0)
    t.step((a, 1))
    said = causes(t)
    assert said
    assert all("is another's, or of other positions: the copy took it from the wrong place" in cause for cause in said)


def test_what_changes_on_the_device_later_is_no_loads_fault() -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    t.step((a, 1))
    there = t.load(host, a, 0)
    t.step((a, 1))
    t.step((a, 1))
    source = t.group.pool.k_source
    assert source is not None
    for layer in source.layers:
        layer.view(-1, BYTES)[there[2:5]] ^= 255
    t.step((a, 1))
    said = causes(t)
    assert said
    assert not any("to come there" in cause for cause in said)


class Calls(TorchDispatchMode):
    """Counts what would be launched: all operations but those that only say how a tensor is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.count += not (function.is_view or "empty" in str(function))
        return found


def test_a_backup_is_few_launches() -> None:
    """The device has nothing to do meanwhile where the engine makes up its mind about the next batch."""
    t, _, device, host = lived()
    with Calls() as calls:
        backup = t.tier.backup(device, host)
    assert 0 < calls.count <= 5
    t.copied(host, device, back=False)
    t.tier.backed_up(backup)
    assert t.found() == {}


def test_a_load_leaves_what_has_arrived_for_the_forward_that_reads_it() -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    first = t.engine.allocate(t.group.pool, 10)
    new = torch.arange(first, first + 10)
    t.tier.load(host, new)
    assert (t.tier.facts.backed_up, len(t.tier.held)) == (0, 0)
    t.copied(host, new, back=True)
    t.tier.loaded()
    t.engine.tables["full"][a.row, :10] = new.int()
    t.tier.land()
    assert (t.tier.facts.backed_up, t.tier.facts.loaded) == (10, 10)
    t.step((a, 1))
    assert t.found() == {}
    assert t.engine.manager.summary().unverified == 0


def test_what_came_from_elsewhere_before_a_load_is_what_is_loaded() -> None:
    t, a, device, host = lived()
    t.backup(device, host)
    t.tier.settle()
    rows = t.tier.rows_of(host)
    assert rows is not None
    there = torch.arange(40, 50)
    expected = t.tier.expect(there)
    for half in t.halves:
        half[:, there] = half[:, host]
    t.tier.bring(expected, rows.clone())
    t.load(there, a, 0)
    t.step((a, 1))
    assert t.found() == {}
    assert t.engine.manager.summary().unverified == 0


def test_a_seal_that_is_not_its_record_s_does_not_go_to_the_host() -> None:
    t, a, device, host = lived()
    seals = t.group.pool.seals
    assert seals is not None
    seals.words[device[3], 0] += 1
    seals.words[device[5], 1] = 0
    t.backup(device, host)
    new = t.load(host, a, 0)
    sealed = seals.words[new].any(dim=1)
    assert sealed.tolist() == [n not in (3, 5) for n in range(10)]
    rows = t.tier.rows_of(host)
    assert rows is not None
    assert rows[:, 4:].any(dim=1).tolist() == sealed.tolist()


def test_slots_that_the_pool_has_not_got_are_no_error() -> None:
    t, a, device, host = lived()
    wrong = device.clone()
    wrong[0], wrong[1] = 1 << 40, -7
    t.tier.backed_up(t.tier.backup(wrong, host))
    t.tier.settle()
    assert t.tier.facts.backed_up == 10
    before = t.group.pool.records.clone()
    t.tier.load(host, wrong)
    t.tier.loaded()
    t.tier.land()
    assert t.tier.facts.loaded == 10
    # All that the pool has got have come back as they were, and nobody else has changed.
    assert torch.equal(t.group.pool.records, before)
    assert not t.group.pool.records[0].any()
    t.step((a, 1))
