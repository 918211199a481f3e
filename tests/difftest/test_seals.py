"""What seals see: every change of a byte, wherever it is; and what ends one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import kv_canary as kc
from kv_canary.specs.sealing import seal_words
from kv_canary.specs.violation_row import ViolationRow

BACKENDS = ("reference", "triton")
SLOTS, PAGE = 40, 4
SEED = 0x5EA1


@dataclass
class Pool:
    """A pool of random bytes with a live record in every slot but 0, and seals of all of them."""

    endpoint: kc.Endpoint
    layers_per_band: int
    seals: torch.Tensor
    backend: str
    log: kc.ViolationLog
    checked: torch.Tensor

    def seal(self, slots: list[int] | None = None) -> None:
        kc.ops.seal(
            slots=None if slots is None else torch.tensor(slots),
            span=torch.tensor([0, SLOTS]),
            endpoint=self.endpoint,
            layers_per_band=self.layers_per_band,
            seed=SEED,
            seals=self.seals,
            backend=self.backend,
        )

    def verify(self, slots: list[int] | None = None) -> list[tuple[int, int, int]]:
        """Return slot, band and reasons of what is found."""
        self.log.count.zero_()
        self.checked.zero_()
        kc.ops.verify_seals(
            slots=None if slots is None else torch.tensor(slots, dtype=torch.int64),
            span=torch.tensor([0, SLOTS]),
            endpoint=self.endpoint,
            layers_per_band=self.layers_per_band,
            seed=SEED,
            seals=self.seals,
            step=torch.tensor([9]),
            violations=self.log,
            checked=self.checked,
            backend=self.backend,
        )
        rows = [ViolationRow(*row) for row in self.log.ring[: int(self.log.count)].tolist()]
        assert int(self.checked[3]) == int(self.log.count)
        return sorted((row.slot, row.given, row.reasons) for row in rows)

    def token(self, source: kc.KvSource, layer: int, slot: int) -> torch.Tensor:
        """The bytes of a slot's token in a layer; a view."""
        row, token = divmod(slot - source.slot_bias, source.page_size)
        whole = source.layers[layer][row].reshape(-1).view(torch.uint8)
        begin = source.offset_bytes + token * source.token_stride_bytes
        return whole[begin : begin + source.bytes_per_token]


def pool_of(
    backend: str, *, layers: int = 5, layers_per_band: int = 2, width: int = 40, scales: bool = False, v: bool = True
) -> Pool:
    rng = np.random.default_rng(layers * 1000 + width)

    def source(size: int, page: int) -> kc.KvSource:
        shape = (SLOTS // page, page * size)
        tensors = tuple(torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(layers))
        return kc.KvSource(layers=tensors, page_size=page, bytes_per_token=size)

    records = torch.from_numpy(rng.integers(1, 1 << 62, (SLOTS, 4)))
    endpoint = kc.Endpoint(
        tag=kc.Tag.SWEEP_FULL,
        records=records,
        k_source=source(width, PAGE),
        v_source=source(width, PAGE) if v else None,
        k_scales=source(8, 1) if scales else None,
    )
    seals = torch.zeros(SLOTS, seal_words(endpoint, layers_per_band), dtype=torch.int64)
    log = kc.ViolationLog.allocate(ring_cap=4096)
    made = Pool(endpoint, layers_per_band, seals, backend, log, torch.zeros(4, dtype=torch.int64))
    made.seal()
    return made


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_not_changed_is_found_right(backend: str) -> None:
    pool = pool_of(backend, scales=True)
    assert pool.verify() == []
    assert pool.checked.tolist()[:3] == [1, SLOTS - 1, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_lists_are_counted_apart(backend: str) -> None:
    """A list may be empty, and what is behind the last one is of none."""
    pool = pool_of(backend)
    pool.token(pool.endpoint.k_source, 3, 7)[0] ^= 1
    pool.token(pool.endpoint.v_source, 0, 7)[1] ^= 1
    pool.seals[9, 0] = 0
    counts = torch.zeros(4, 3, dtype=torch.int64)
    kc.ops.verify_seals(
        slots=torch.tensor([1, 7, 0, 9, 7, 2, 3, 9]),
        span=torch.tensor([1, 7]),
        endpoint=pool.endpoint,
        layers_per_band=pool.layers_per_band,
        seed=SEED,
        seals=pool.seals,
        step=torch.tensor([9]),
        violations=pool.log,
        checked=pool.checked,
        ends=torch.tensor([2, 2, 5, 7]),
        counts=counts,
        backend=backend,
    )
    # Slot 1 is not in the span; 7 of the first list; none; 0, 9 and 7; 2 and 3; and 9 behind all of them.
    assert counts.tolist() == [[1, 0, 2], [0, 0, 0], [1, 1, 2], [2, 0, 0]]
    assert pool.checked.tolist() == [1, 4, 2, 4]


@pytest.mark.parametrize("layers", [32, 80])
def test_every_one_of_a_thousand_bits_is_found(layers: int) -> None:
    pool = pool_of("reference", layers=layers, layers_per_band=1, width=64)
    rng = np.random.default_rng(layers)
    flipped = 0
    while flipped < 1000:
        expected, tokens = [], []
        # One bit in each slot, of any layer.
        for slot in range(1, SLOTS):
            layer, half, byte, bit = (int(rng.integers(n)) for n in (layers, 2, 64, 8))
            source = (pool.endpoint.k_source, pool.endpoint.v_source)[half]
            assert source is not None
            tokens.append((pool.token(source, layer, slot), byte, 1 << bit))
            expected.append((slot, layer, int((kc.Reason.SEAL_K, kc.Reason.SEAL_V)[half])))
        for token, byte, mask in tokens:
            token[byte] ^= mask
        assert pool.verify() == expected
        for token, byte, mask in tokens:
            token[byte] ^= mask
        flipped += len(tokens)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 7, 8, 73, 584, 2048, 2056])
def test_every_byte_of_a_token_counts(backend: str, width: int) -> None:
    pool = pool_of(backend, layers=1, layers_per_band=1, width=width, v=False)
    assert pool.endpoint.k_source is not None
    for byte in sorted({0, 1, 7, 8, width // 2, width - 9, width - 2, width - 1} & set(range(width))):
        token = pool.token(pool.endpoint.k_source, 0, 17)
        token[byte] ^= 0x80
        # Those beside it too, and not all: where Triton is interpreted each takes long.
        assert pool.verify([16, 17, 18]) == [(17, 0, int(kc.Reason.SEAL_K))], byte
        token[byte] ^= 0x80
    assert pool.verify() == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_in_another_place_are_found(backend: str) -> None:
    pool = pool_of(backend, layers=4, layers_per_band=4)
    k, v = pool.endpoint.k_source, pool.endpoint.v_source
    assert k is not None
    assert v is not None

    def swapped(first: torch.Tensor, second: torch.Tensor) -> list[tuple[int, int, int]]:
        kept = first.clone(), second.clone()
        first.copy_(kept[1])
        second.copy_(kept[0])
        found = pool.verify()
        first.copy_(kept[0])
        second.copy_(kept[1])
        return found

    both = int(kc.Reason.SEAL_K | kc.Reason.SEAL_V)
    # Two layers of one band, K and V of one layer, two words of one token, the halves of one word, two tokens.
    assert swapped(pool.token(k, 0, 5), pool.token(k, 3, 5)) == [(5, 0, int(kc.Reason.SEAL_K))]
    assert swapped(pool.token(k, 2, 5), pool.token(v, 2, 5)) == [(5, 0, both)]
    assert swapped(pool.token(k, 1, 5)[:8], pool.token(k, 1, 5)[8:16]) == [(5, 0, int(kc.Reason.SEAL_K))]
    assert swapped(pool.token(v, 1, 5)[:4], pool.token(v, 1, 5)[4:8]) == [(5, 0, int(kc.Reason.SEAL_V))]
    assert swapped(pool.token(k, 1, 5), pool.token(k, 1, 6)) == [(s, 0, int(kc.Reason.SEAL_K)) for s in (5, 6)]
    assert pool.verify() == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_of_one_layer_is_found(backend: str) -> None:
    pool = pool_of(backend, layers=32, layers_per_band=3)
    assert pool.endpoint.v_source is not None
    pool.endpoint.v_source.layers[31][3] = 0
    assert pool.verify() == [(slot, 10, int(kc.Reason.SEAL_V)) for slot in range(12, 16)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_are_part_of_a_seal(backend: str) -> None:
    pool = pool_of(backend, scales=True)
    assert pool.endpoint.k_scales is not None
    pool.endpoint.k_scales.layers[4][7, 7] ^= 1
    assert pool.verify() == [(7, 2, int(kc.Reason.SEAL_K))]
    # Bytes that go over from the source to the scales do not cancel out.
    plain = replace(pool.endpoint, k_scales=None)
    pool.endpoint = plain
    assert len(pool.verify()) == (SLOTS - 1) * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_seal_is_of_one_record(backend: str) -> None:
    pool = pool_of(backend)
    records = pool.endpoint.records
    # Written anew, retired, never written: nothing is held against the seal of what was there before.
    records[3, 3] += 1
    records[4, 3] |= -(1 << 63)
    records[5] = 0
    assert pool.verify() == []
    assert pool.checked.tolist()[:3] == [1, SLOTS - 4, 1]
    pool.seal()
    assert pool.verify() == []
    assert pool.checked.tolist()[:3] == [1, SLOTS - 3, 0]
    assert not pool.seals[4].any()
    assert not pool.seals[5].any()
    assert pool.seals[3].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_record_of_step_and_owner_zero_without_a_seal_is_no_finding(backend: str) -> None:
    pool = pool_of(backend)
    pool.endpoint.records[6, 3] = 0
    pool.seals[6] = 0
    assert pool.verify() == []
    assert pool.checked.tolist()[:3] == [1, SLOTS - 2, 1]
    pool.seal([6])
    assert pool.verify() == []
    assert pool.checked.tolist()[:3] == [1, SLOTS - 1, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_step_has_written_is_sealed(backend: str) -> None:
    pool = pool_of(backend)
    pool.seals.zero_()
    records = pool.endpoint.records
    records[:, 3] = 8 << 24 | 5
    records[7, 3] = 9 << 24 | 6
    # Retired in this step, after it was written.
    records[8, 3] = -(1 << 63) | 9 << 24
    pool.seals[8] = 1
    kc.ops.seal(
        slots=torch.tensor([6, 7, 8]),
        span=torch.tensor([0, 3]),
        endpoint=pool.endpoint,
        layers_per_band=2,
        seed=SEED,
        written_in=torch.tensor([9]),
        seals=pool.seals,
        backend=backend,
    )
    assert pool.seals.any(dim=1).nonzero().view(-1).tolist() == [7]
    assert pool.verify() == []
    assert pool.checked.tolist()[:3] == [1, 1, SLOTS - 3]


def test_other_seeds_make_other_seals() -> None:
    pool = pool_of("reference")
    before = pool.seals.clone()
    for seed in (0, 1, SEED + 1, SEED - 1, -1):
        kc.ops.seal(
            slots=None,
            span=torch.tensor([0, SLOTS]),
            endpoint=pool.endpoint,
            layers_per_band=2,
            seed=seed,
            seals=pool.seals,
            backend="reference",
        )
        halves = torch.stack([pool.seals[1:, 1:] & 0xFFFFFFFF, pool.seals[1:, 1:] >> 32])
        kept = torch.stack([before[1:, 1:] & 0xFFFFFFFF, before[1:, 1:] >> 32])
        assert int((halves == kept).sum()) == 0


def test_what_cannot_be_sealed_is_refused() -> None:
    pool = pool_of("reference")
    with pytest.raises(ValueError, match="kv-canary: seal: seals must be of at least 4 words a slot"):
        kc.ops.seal(
            slots=None,
            span=torch.tensor([0, 1]),
            endpoint=pool.endpoint,
            layers_per_band=2,
            seed=0,
            seals=pool.seals[:, :3].contiguous(),
        )
    bare = kc.Endpoint(tag=kc.Tag.SWEEP_FULL, records=pool.endpoint.records)
    with pytest.raises(ValueError, match="kv-canary: seal: endpoint must be of K or V bytes, or both, got neither"):
        kc.ops.seal(slots=None, span=torch.tensor([0, 1]), endpoint=bare, seed=0, seals=pool.seals)
    with pytest.raises(ValueError, match="kv-canary: Endpoint: k_scales must be of 5 layers"):
        replace(pool.endpoint, k_scales=kc.KvSource(layers=(torch.zeros(4, 4),), page_size=1, bytes_per_token=4))
    with pytest.raises(ValueError, match="kv-canary: Endpoint: v_scales must be None where there is no source"):
        replace(pool.endpoint, v_source=None, v_scales=pool.endpoint.k_source)
