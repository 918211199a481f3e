"""Numbers worked out by hand from the formulas, in plain Python integers, not from this project's code."""

from __future__ import annotations

import pytest
import torch

import kv_canary as kc

TWO64 = 1 << 64

BACKENDS = ["reference", "triton"]


def splitmix64(x: int) -> int:
    """As in Steele, Lea & Flood 2014, figure 13, one step from state x."""
    z = (x + 0x9E3779B97F4A7C15) % TWO64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % TWO64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % TWO64
    return z ^ (z >> 31)


def signed(x: int) -> int:
    return x - TWO64 if x >= 1 << 63 else x


def test_splitmix64_is_the_published_one() -> None:
    # The first outputs of the generator seeded with 0, as published with its C sources.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


# Three tokens 7, 300, 65537 at positions 0, 1, 2: identities, then c(i) = c(i-1) * M + mix(identity(i)).
IDENTITIES = [7, 300 + (1 << 32), 65537 + (2 << 32)]


def expected_chains(start: int = 0x6B765F63616E6172) -> list[int]:
    chain, chains = start, []
    for ident in IDENTITIES:
        chain = (chain * 0x9E3779B97F4A7C15 + splitmix64(ident)) % TWO64
        chains.append(signed(chain))
    return chains


@pytest.mark.parametrize("backend", BACKENDS)
def test_chain_of_three_tokens(backend: str, device: torch.device) -> None:
    tails = torch.zeros(3, dtype=torch.int64, device=device)
    kc.ops.chain_tails(
        flat=torch.tensor([7, 300, 65537], device=device),
        offsets=torch.tensor([0, 3], device=device),
        rows=torch.tensor([2], device=device),
        starts=torch.tensor([0], device=device),
        tails=tails,
        status=torch.ones(1, dtype=torch.int32, device=device),
        backend=backend,
    )
    assert tails.tolist() == [0, 0, expected_chains()[-1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_records_of_three_tokens_with_fingerprints(backend: str, device: torch.device) -> None:
    # Two layers of 20 bytes a token, 8 bytes read: windows [0,8), [8,16), [16,20). Token at position p is covered
    # in layer p % 2, window (p // 2) % 3: position 0 -> layer 0 [0,8); 1 -> layer 1 [0,8); 2 -> layer 0 [8,16).
    k = [torch.arange(100, dtype=torch.uint8, device=device).view(5, 20) + 100 * layer for layer in range(2)]
    v = [torch.full((5, 20), 9 + layer, dtype=torch.uint8, device=device) for layer in range(2)]

    def source(layers: list[torch.Tensor]) -> kc.KvSource:
        return kc.KvSource(layers=tuple(layers), page_size=1, bytes_per_token=20, read_bytes=8)

    records = torch.zeros(5, 4, dtype=torch.int64, device=device)
    endpoint = kc.Endpoint(tag=kc.Tag.TAIL_FULL, records=records, k_source=source(k), v_source=source(v))
    log = kc.ViolationLog.allocate(ring_cap=4, device=device)
    counters = torch.zeros(6, 2, dtype=torch.int64, device=device)
    kc.ops.write(
        write_plan=kc.WritePlan(
            rows=torch.tensor([1], device=device),
            owners=torch.tensor([(1 << 24) + 5], device=device),
            offsets=torch.tensor([0, 3], device=device),
            prefix_lens=torch.tensor([0], device=device),
            seed_slots=torch.tensor([-1], device=device),
            num_requests=torch.tensor([1], dtype=torch.int32, device=device),
        ),
        input_ids=torch.tensor([7, 300, 65537], device=device),
        positions=torch.arange(3, device=device),
        out_slots=torch.tensor([4, 2, 3], device=device),
        endpoint=endpoint,
        tails=torch.full((2,), kc.ANCHOR, device=device),
        step=torch.tensor([3], device=device),
        check_positions=torch.ones(1, dtype=torch.int32, device=device),
        violations=log,
        counters=counters,
        backend=backend,
    )

    def one_word(data: list[int]) -> int:
        x = splitmix64(int.from_bytes(bytes(data), "little") ^ splitmix64(0))
        return (x ^ (x >> 32)) % (1 << 32)

    k_words = [list(range(80, 88)), list(range(140, 148)), list(range(68, 76))]
    v_words = [[9] * 8, [10] * 8, [9] * 8]
    for i, slot in enumerate([4, 2, 3]):
        kv = one_word(k_words[i]) + (one_word(v_words[i]) << 32)
        assert records[slot].tolist() == [IDENTITIES[i], expected_chains()[i], signed(kv), (3 << 24) + 5]
    assert records[:2].eq(0).all()
    assert int(log.count) == 0
    assert counters.tolist() == [[0, 0], [1, 3], [0, 0], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prefix_found_behind_a_lut_and_checked_at_head_and_tail(backend: str, device: torch.device) -> None:
    # Row 2 has its three tokens in the slots 4, 2, 3, which the table names 1, 3, 2; a second request is padding.
    chains, slots = expected_chains(), [4, 2, 3]
    records = torch.zeros(5, 4, dtype=torch.int64, device=device)
    for slot, ident, chain in zip(slots, IDENTITIES, chains, strict=True):
        records[slot] = torch.tensor([ident, chain, 0, (3 << 24) + 5])
    # The slot in the middle holds another token now; whoever wrote it took no care of the chain.
    wrong = 301 + (1 << 32)
    records[2, 0] = wrong
    rows, lens = (torch.tensor(values, device=device) for values in ([2, 0], [3, 1]))
    tokens = torch.zeros(3, 4, dtype=torch.int32)
    tokens[2, 1:] = torch.tensor([7, 300, 65537])
    # The pool holds tokens one further on than their positions.
    told = {"rows": rows, "expected_tokens": tokens.to(device), "expected_lens": lens + 1, "token_offset": 1}
    resolved = kc.ResolvedSlots.allocate(entry_cap=4, device=device)
    plan = kc.WritePlan.allocate(write_cap=2, device=device)
    status = torch.ones(1, dtype=torch.int32, device=device)
    counters = torch.zeros(6, 2, dtype=torch.int64, device=device)
    logs = [kc.ViolationLog.allocate(ring_cap=4, device=device) for _ in range(2)]
    step = torch.tensor([9], device=device)
    kc.ops.verify_prefixes(
        **told,
        prefix_lens=lens,
        extend_lens=torch.tensor([2, 1], device=device),
        req_to_token=torch.tensor([[0] * 3, [0] * 3, [1, 3, 2]], dtype=torch.int32, device=device),
        lut=torch.tensor([0, 4, 3, 2], device=device),
        step=step,
        endpoint=kc.Endpoint(tag=kc.Tag.HEAD_SWA, records=records),
        resolved=resolved,
        write_plan=plan,
        status=status,
        violations=logs[0],
        counters=counters,
        backend=backend,
    )
    # One run: it begins at position 0, of the request 0.
    assert resolved.entries.tolist() == [[4, ~0], [2, 1], [3, 2], [0, 0]]
    assert resolved.runs.tolist() == [[-1, 0], [0, 0], [0, 0], [0, 0]]
    assert [x.tolist() for x in resolved.unfold(1, 3)] == [[2, 3], [4, 2], [1, 2], [0, 0]]
    assert (resolved.num_valid.item(), resolved.num_requested.item(), status.item()) == (3, 3, 0)
    assert [plan.rows.tolist(), plan.offsets.tolist(), plan.seed_slots.tolist()] == [[2, 0], [0, 2, 3], [3, -1]]
    kc.ops.verify_resolved(
        **told,
        resolved=resolved,
        endpoint=kc.Endpoint(tag=kc.Tag.TAIL_SWA, records=records),
        step=step,
        violations=logs[1],
        counters=counters,
        backend=backend,
    )
    assert counters.tolist() == [[0, 0], [0, 0], [0, 0], [1, 3], [1, 3], [0, 0]]
    chain = signed((chains[0] * 0x9E3779B97F4A7C15 + splitmix64(wrong)) % TWO64)
    for tag, log in zip((3, 4), logs, strict=True):
        assert log.count.item() == 1
        # TOKEN + CHAIN at position 1; the next one follows the chain that the record still has.
        assert log.ring[0].tolist() == [tag, 17, 2, 2, 1, wrong, 300, chains[1], chain, 0, 0, (3 << 24) + 5, 9, 4, 0, 0]


def test_the_short_last_window_pads_with_zeros() -> None:
    # Position 4 is covered in layer 0, window 2: bytes [16, 20), padded to one word.
    from kv_canary.reference.hashing import fingerprint

    layers = tuple(torch.arange(100, dtype=torch.uint8).view(5, 20) for _ in range(2))
    source = kc.KvSource(layers=layers, page_size=1, bytes_per_token=20, read_bytes=8)
    assert source.coverage(4) == (0, 16, 20)
    x = splitmix64(int.from_bytes(bytes([36, 37, 38, 39, 0, 0, 0, 0]), "little") ^ splitmix64(0))
    expected = (x ^ (x >> 32)) % (1 << 32)
    assert fingerprint(source, torch.tensor([1]), torch.tensor([4])).item() == expected


def test_a_fingerprint_sums_over_words() -> None:
    from kv_canary.reference.hashing import fingerprint

    layer = torch.arange(48, dtype=torch.uint8).view(3, 16)
    source = kc.KvSource(layers=(layer,), page_size=1, bytes_per_token=16)
    words = [int.from_bytes(bytes(range(start, start + 8)), "little") for start in (16, 24)]
    x = sum(splitmix64(word ^ splitmix64(j)) for j, word in enumerate(words)) % TWO64
    assert fingerprint(source, torch.tensor([1]), torch.tensor([0])).item() == (x ^ (x >> 32)) % (1 << 32)


def test_mix_is_the_published_one() -> None:
    from kv_canary.reference.hashing import mix

    assert mix(torch.tensor([0])).item() == signed(0xE220A8397B1DCDAF)
    values = [0, 1, -1, 1 << 62, -(1 << 63)]
    assert mix(torch.tensor(values)).tolist() == [signed(splitmix64(v % TWO64)) for v in values]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_is_opened_from_numbers_that_lie_together(backend: str, device: torch.device) -> None:
    # Rows 2 and 3 go on by a token each, 300 at position 1 and 9 at position 0; rows 3 and 2 have 40 and 33 cached,
    # and padding is between them.
    words = torch.tensor([300, 9, 0, 1, 2, 2, 3, 1, 0, 3, 0, 2, 40, 5, 33, 1, 1, 1, 3, 1, 2, 7, 0], device=device)
    flat, offsets, rows, starts, batch, prefix, extend, strides, step, spare = words.split(
        [2, 3, 2, 2, 3, 3, 3, 3, 1, 1]
    )
    first = signed((0x6B765F63616E6172 * 0x9E3779B97F4A7C15 + splitmix64(7)) % TWO64)
    tails = torch.tensor([0, 0, first, 5], device=device)
    pool = torch.zeros(4, 2, dtype=torch.int32, device=device)
    copy = torch.ones_like(words)
    entry_offsets = torch.ones(4, dtype=torch.int64, device=device)
    longest_stride = torch.zeros(1, dtype=torch.int64, device=device)
    status = torch.ones(1, dtype=torch.int32, device=device)
    kc.ops.open_step(
        words=words,
        copy=copy,
        flat=flat,
        offsets=offsets,
        advance_rows=rows,
        starts=starts,
        tails=tails,
        pool=pool,
        status=status,
        rows=batch,
        prefix_lens=prefix,
        extend_lens=extend,
        req_to_token=torch.zeros(4, 50, dtype=torch.int32, device=device),
        strides=strides,
        step=step,
        entry_offsets=entry_offsets,
        longest_stride=longest_stride,
        backend=backend,
    )
    assert copy.tolist() == words.tolist()
    assert spare.tolist() == [0]
    second = signed((0x6B765F63616E6172 * 0x9E3779B97F4A7C15 + splitmix64(9)) % TWO64)
    assert tails.tolist() == [0, 0, expected_chains()[1], second]
    assert pool.tolist() == [[0, 0], [0, 0], [0, 300], [9, 0]]
    # Of row 3 every third block of 16 positions, whose number and 7 make a multiple of 3: the last one, of 8. Of row 2
    # every second one: that of 16 in the middle, and the last position.
    assert entry_offsets.tolist() == [0, 8, 8, 25]
    assert (longest_stride.item(), status.item()) == (3, 0)
