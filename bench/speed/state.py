"""The state of a pool in which a case's requests are being served: tables, records, bytes, and the batch to come."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import kv_canary as kc
from kv_canary.bench.speed.cases import Case, Request

OWNERS = 1000
STEP = 7
SEED = 0
RING = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class Flat:
    """Tokens of all requests, one request after the other; int64 on the device.

    Args:
        tokens, positions, slots: [tokens]; slot 0 where the token has left the window.
        offsets: [requests + 1].
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """A pool and a batch, on the device. Every cached token is recorded, with the fingerprints of its bytes.

    Args:
        case: what it is for.
        backend: whose records they are.
        rows, owners, cached, new, strides: int64 [requests].
        table: int32 [requests + 1, length], the slot of every position.
        lut: int64, full slot -> slot of the pool, for a sliding window; else None.
        history: the cached tokens.
        batch: the new tokens.
        free: slots of the pool that nobody holds.
        k_source, v_source: the bytes; `layers` of them each.
        records, tails, anchors, step, violations, counters: as the ops take them.
    """

    case: Case
    backend: str
    rows: torch.Tensor
    owners: torch.Tensor
    cached: torch.Tensor
    new: torch.Tensor
    strides: torch.Tensor
    table: torch.Tensor
    lut: torch.Tensor | None
    history: Flat
    batch: Flat
    free: torch.Tensor
    k_source: kc.KvSource
    v_source: kc.KvSource
    records: torch.Tensor
    tails: torch.Tensor
    anchors: torch.Tensor
    step: torch.Tensor
    violations: kc.ViolationLog
    counters: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.records.device

    @property
    def num_slots(self) -> int:
        return self.records.shape[0]

    @property
    def layers(self) -> int:
        return len(self.k_source.layers)

    def endpoint(self, tag: kc.Tag, *, with_bytes: bool) -> kc.Endpoint:
        """Return an endpoint of the pool; `tag` names it in a full pool, and its twin is taken in a windowed one."""
        if self.case.window:
            tag = kc.Tag(tag + kc.Tag.HEAD_SWA)
        k, v = (self.k_source, self.v_source) if with_bytes else (None, None)
        return kc.Endpoint(tag=tag, records=self.records, k_source=k, v_source=v)


def random_bytes(size: int, device: torch.device) -> torch.Tensor:
    """Return `size` random bytes: the memory that all cases' K and V lie in, one case after the other."""
    words = torch.empty(-(-size // 8), dtype=torch.int64, device=device)
    return words.random_().view(torch.uint8)


def pool_bytes(case: Case, layers: int) -> int:
    """Return the bytes of K and V of a case's pool."""
    return 2 * layers * _pool_slots(case) * case.row_bytes


def build(case: Case, memory: torch.Tensor, *, backend: str) -> State:
    """Lay out the requests, write their history with `backend`, and return the state.

    Args:
        memory: uint8, of which K and V take views: as many layers as fit, `case.most_layers` at most.

    Raises:
        ValueError: not even one layer fits.
    """
    device = memory.device
    layers = min(case.most_layers, len(memory) // pool_bytes(case, 1))
    if layers == 0:
        raise ValueError(
            f"kv-canary: bench: {case.name}: needs {pool_bytes(case, 1)} bytes a layer, got {len(memory)} in all"
        )
    random = torch.Generator().manual_seed(SEED)
    slots, tokens = _place(case, random)
    n = len(case.requests)
    table = torch.zeros(n + 1, max(len(s) for s in slots), dtype=torch.int32)
    for r, row in enumerate(slots):
        table[r + 1, : len(row)] = row
    num_slots = _pool_slots(case)
    lut = _evict(case, slots, random) if case.window else None
    used = torch.zeros(num_slots, dtype=torch.bool)
    used[0 : case.page] = True
    for row in slots:
        used[lut[row] if lut is not None else row] = True

    def flat(history: bool) -> Flat:
        spans = [(0, q.cached) if history else (q.cached, q.cached + q.new) for q in case.requests]
        where = torch.cat([s[a:b] for s, (a, b) in zip(slots, spans, strict=True)])
        lengths = torch.tensor([0, *(b - a for a, b in spans)])
        return Flat(
            tokens=torch.cat([t[a:b] for t, (a, b) in zip(tokens, spans, strict=True)]).to(device),
            positions=torch.cat([torch.arange(a, b) for a, b in spans]).to(device),
            slots=(lut[where] if lut is not None else where).to(device),
            offsets=lengths.cumsum(0).to(device),
        )

    size = num_slots * case.row_bytes
    views = [memory[i * size : (i + 1) * size].view(num_slots, case.row_bytes) for i in range(2 * layers)]
    k_source, v_source = (
        kc.KvSource(layers=tuple(part), page_size=1, bytes_per_token=case.row_bytes, read_bytes=case.read_bytes)
        for part in (views[:layers], views[layers:])
    )

    def per_request(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    state = State(
        case=case,
        backend=backend,
        rows=torch.arange(1, n + 1, device=device),
        owners=torch.arange(OWNERS, OWNERS + n, device=device),
        cached=per_request([q.cached for q in case.requests]),
        new=per_request([q.new for q in case.requests]),
        strides=per_request([case.stride] * n),
        table=table.to(device),
        lut=None if lut is None else lut.to(device),
        history=flat(history=True),
        batch=flat(history=False),
        free=(~used).nonzero().view(-1).to(device),
        k_source=k_source,
        v_source=v_source,
        records=torch.zeros(num_slots, 4, dtype=torch.int64, device=device),
        tails=torch.full((n + 1,), kc.ANCHOR, dtype=torch.int64, device=device),
        anchors=torch.full((n + 1,), kc.ANCHOR, dtype=torch.int64, device=device),
        step=torch.full((1,), STEP, dtype=torch.int64, device=device),
        violations=kc.ViolationLog.allocate(ring_cap=RING, device=device),
        counters=torch.zeros(len(kc.Tag), 2, dtype=torch.int64, device=device),
    )
    _write_history(state)
    return state


def _pool_slots(case: Case) -> int:
    """Slots of the pool that the records and bytes are of."""
    if case.window:
        return 1 + sum(_resident(case, q) + q.new for q in case.requests)
    return (1 + case.pool_times * _pages(case)) * case.page


def _pages(case: Case) -> int:
    """Pages that the requests hold together."""
    shared = {block for q in case.requests for block in q.shared}
    own = sum(-(-(q.cached + q.new - len(q.shared) * case.block) // case.page) for q in case.requests)
    return len(shared) * (case.block // case.page) + own


def _resident(case: Case, request: Request) -> int:
    """Cached tokens of a request that a windowed pool holds: the window, and the one before it."""
    return min(request.cached, case.window + 1)


def _place(case: Case, random: torch.Generator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return slots and tokens, int64 [length], of each request: pages in random order, shared blocks the same."""
    # Page 0 holds the padding slot.
    pages = 1 + torch.randperm(case.pool_times * _pages(case), generator=random)
    taken = 0
    blocks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def take(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal taken
        count = -(-length // case.page)
        own = pages[taken : taken + count]
        taken += count
        slots = (own[:, None] * case.page + torch.arange(case.page)).view(-1)[:length]
        return slots, torch.randint(1, 1 << 17, (length,), generator=random)

    slots, tokens = [], []
    for request in case.requests:
        parts = []
        for name in request.shared:
            if name not in blocks:
                blocks[name] = take(case.block)
            parts.append(blocks[name])
        parts.append(take(request.cached + request.new - len(request.shared) * case.block))
        slots.append(torch.cat([s for s, _ in parts]))
        tokens.append(torch.cat([t for _, t in parts]))
    return slots, tokens


def _evict(case: Case, slots: list[torch.Tensor], random: torch.Generator) -> torch.Tensor:
    """Return the LUT of a pool that holds the windows and the new tokens only, in random order; 0 for the rest."""
    kept = [s[q.cached - _resident(case, q) :] for s, q in zip(slots, case.requests, strict=True)]
    resident = torch.cat(kept)
    lut = torch.zeros(1 + int(max(s.max() for s in slots)), dtype=torch.int64)
    lut[resident] = 1 + torch.randperm(len(resident), generator=random)
    return lut


def _write_history(state: State) -> None:
    """Record every cached token, and bring the tails up to it."""
    n, history = len(state.case.requests), state.history
    if not len(history.tokens):
        return
    zeros = torch.zeros(n, dtype=torch.int64, device=state.device)
    plan = kc.WritePlan(
        rows=state.rows,
        owners=state.owners,
        offsets=history.offsets,
        prefix_lens=zeros,
        seed_slots=torch.full_like(zeros, kc.HEAD_OF_CHAIN),
        num_requests=torch.full((1,), n, dtype=torch.int32, device=state.device),
    )
    kc.ops.write(
        write_plan=plan,
        input_ids=history.tokens,
        positions=history.positions,
        out_slots=history.slots,
        endpoint=state.endpoint(kc.Tag.TAIL_FULL, with_bytes=True),
        tails=state.tails,
        step=state.step - 1,
        check_positions=torch.ones(1, dtype=torch.int32, device=state.device),
        violations=state.violations,
        counters=state.counters,
        backend=state.backend,
    )
    kc.ops.chain_tails(
        flat=history.tokens,
        offsets=history.offsets,
        rows=state.rows,
        starts=zeros,
        anchors=state.anchors,
        tails=state.tails,
        status=torch.zeros(1, dtype=torch.int32, device=state.device),
        backend=state.backend,
    )
