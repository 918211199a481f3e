"""Which layout of the slot records is fastest to verify: one record for K and V, two, or columns of words?

One fused plan+verify kernel runs over four layouts of the same content:

- one: a 32-byte record a slot for K and V together, int64 words identity, chain, both fingerprint halves, writer;
- apart: a 32-byte record for K and another for V, in two buffers, each checked whole;
- interleaved: the same two records side by side, 64 bytes a slot;
- columns: the words of `one`, each in an array of its own.

Mode `mapping` checks identity, position and chain; `mapping+bytes` also fingerprints 16 bytes of K and of V, the
layer and the window rotating with the position, in pools of 2 KiB a token, layer and half.

Per verified position the necessary bytes are 4 (table entry) + S * 32 (S sectors of records) + 64 in `mapping+bytes`
(one sector of K, one of V). S is 1 for one, 2 for apart and interleaved; for columns it is the words read (2, with
bytes 3) times sectors per word: 1 where slots are in random order, 1/4 where 4 neighbours of a page share a sector.
The predecessor's record is the neighbouring lane's and counts once. `fraction_of_copy` is those bytes over the time,
as a fraction of the copy bandwidth of the same run.

Each row is timed in two ways. The row itself is replays on an otherwise idle device, one after the other: what fits
stays in the L2 cache (records and table of 256 x 4096 in `one` are 38 MB of an H200's 60, so a fraction may pass 1),
and the replay's own cost (`empty_replay_ms`) is in it. Its `cold` entry evicts the cache before each replay, as a
model between two checks does, and hides the host's launch behind the eviction. Both are tuned, and the winner of
each is timed twice more: `ms` is the mean of those two medians, `spread_ms` their distance.

Not in the time: the layout of tiles (the same for all), and violation rows, which a healthy pool does not have. The
writer word is not read, which favours columns.
"""

# Kernels annotate their compile-time arguments only.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from kv_canary.bench.facts import commit_of_checkout
from kv_canary.constants import ANCHOR, CHAIN_MULTIPLIER, RECORD_WORDS, to_signed
from kv_canary.kernels.hashing import as_u64, mix, next_chain
from kv_canary.reference import hashing

LAYOUTS = ("one", "apart", "interleaved", "columns")
MODES = ("mapping", "mapping+bytes")

IDENTITY, CHAIN, KV, WRITER = range(RECORD_WORDS)
TOKEN_BYTES = 2048
WINDOW_BYTES = 16
NUM_WINDOWS = TOKEN_BYTES // WINDOW_BYTES
SECTOR_BYTES = 32
TABLE_ENTRY_BYTES = 4
# Slot counts are a multiple of this, so that columns begin at a sector.
SLOT_ALIGNMENT = 64

TUNING_REPLAYS = 20
FINAL_REPLAYS = 60
EVICTION_BYTES = 512 << 20
COPY_BYTES = 4 << 30

_ANCHOR = tl.constexpr(ANCHOR)


@triton.jit
def _load_word(records_ptr, slot, mask, num_slots, other, WORD: tl.constexpr, LAYOUT: tl.constexpr):
    """One word of each masked slot's record; 0 <= slot < num_slots where `mask`."""
    if LAYOUT == "columns":
        offset = slot + WORD * num_slots
    elif LAYOUT == "interleaved":
        offset = slot * 8 + WORD
    else:
        offset = slot * 4 + WORD
    return tl.load(records_ptr + offset, mask=mask, other=other)


@triton.jit
def _check_mapping(records_ptr, slot, previous, position, checked, follows, num_slots, LAYOUT: tl.constexpr):
    """Whether each record belongs elsewhere by its position or chain, and its stored position, uint32."""
    ident = _load_word(records_ptr, slot, checked, num_slots, 0, 0, LAYOUT)
    chain = _load_word(records_ptr, slot, checked, num_slots, 0, 1, LAYOUT)
    previous_chain = _load_word(records_ptr, previous, follows, num_slots, _ANCHOR, 1, LAYOUT)
    stored_position = as_u64(ident) >> 32
    wrong = as_u64(chain) != next_chain(as_u64(previous_chain), as_u64(ident))
    return wrong | (stored_position != as_u64(position)), stored_position.to(tl.uint32)


@triton.jit
def _fingerprint(layers_ptr, slot, stored_position, checked, num_layers, num_windows, TOKEN_BYTES: tl.constexpr):
    """The 32-bit fingerprint, uint64, of the 16 covered bytes of each checked slot."""
    layers = num_layers.to(tl.uint32)
    windows = num_windows.to(tl.uint32)
    layer = (stored_position % layers).to(tl.int64)
    window = ((stored_position // layers) % windows).to(tl.int64)
    # layer < num_layers: the table holds one address per layer
    address = tl.load(layers_ptr + layer, mask=checked, other=0) + slot * TOKEN_BYTES + window * 16
    words_ptr = address.to(tl.pointer_type(tl.uint64))
    # checked: 0 < slot < num_slots, and a window is 16 bytes inside the token
    first = tl.load(words_ptr, mask=checked, other=0)
    second = tl.load(words_ptr + 1, mask=checked, other=0)
    j = as_u64(tl.zeros([1], dtype=tl.int64))
    total = mix(first ^ mix(j)) + mix(second ^ mix(j + 1))
    return (total ^ (total >> 32)) & 0xFFFFFFFF


@triton.jit(do_not_specialize=["batch_size", "num_layers", "num_windows"])
def _plan_and_verify(
    # inputs
    rows_ptr,
    lengths_ptr,
    tile_offsets_ptr,
    batch_size,
    req_to_token_ptr,
    row_stride,
    k_records_ptr,
    v_records_ptr,
    num_slots,
    k_layers_ptr,
    v_layers_ptr,
    num_layers,
    num_windows,
    # outputs
    counts_ptr,
    # constants
    LAYOUT: tl.constexpr,
    TWO_RECORDS: tl.constexpr,
    BYTES: tl.constexpr,
    TOKEN_BYTES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Verify every cached position of every request; counts += (positions, violations).

    A tile is TILE consecutive positions of one request; tile_offsets is the exclusive cumsum of tiles per request.
    """
    slots = num_slots.to(tl.int64)
    seen = tl.zeros([TILE], dtype=tl.int32)
    violations = tl.zeros([TILE], dtype=tl.int32)
    first_tile = tl.program_id(0).to(tl.int64)
    for tile in range(first_tile, tl.load(tile_offsets_ptr + batch_size), tl.num_programs(0).to(tl.int64)):
        # The request whose tiles hold this one: tile_offsets[low] <= tile < tile_offsets[high].
        low = 0
        high = batch_size
        while high - low > 1:
            middle = (low + high) // 2
            is_right = tl.load(tile_offsets_ptr + middle) <= tile
            low = tl.where(is_right, middle, low)
            high = tl.where(is_right, high, middle)
        row = tl.load(rows_ptr + low)
        length = tl.load(lengths_ptr + low)
        position = (tile - tl.load(tile_offsets_ptr + low)) * TILE + tl.arange(0, TILE)
        live = position < length
        table_ptr = req_to_token_ptr + row * row_stride + position
        # live: position < length <= the table's row
        slot = tl.load(table_ptr, mask=live, other=0).to(tl.int64)
        previous = tl.load(table_ptr - 1, mask=live & (position > 0), other=0).to(tl.int64)
        checked = live & (slot > 0) & (slot < slots)
        follows = checked & (previous > 0) & (previous < slots)

        bad, k_position = _check_mapping(k_records_ptr, slot, previous, position, checked, follows, slots, LAYOUT)
        v_position = k_position
        if TWO_RECORDS:
            v_bad, v_position = _check_mapping(v_records_ptr, slot, previous, position, checked, follows, slots, LAYOUT)
            bad = bad | v_bad
        if BYTES:
            k_stored = as_u64(_load_word(k_records_ptr, slot, checked, slots, 0, 2, LAYOUT))
            k_print = _fingerprint(k_layers_ptr, slot, k_position, checked, num_layers, num_windows, TOKEN_BYTES)
            v_print = _fingerprint(v_layers_ptr, slot, v_position, checked, num_layers, num_windows, TOKEN_BYTES)
            if TWO_RECORDS:
                v_stored = as_u64(_load_word(v_records_ptr, slot, checked, slots, 0, 2, LAYOUT))
                bad = bad | (k_stored != k_print) | (v_stored != v_print)
            else:
                bad = bad | (k_stored != (k_print | (v_print << 32)))
        seen += live.to(tl.int32)
        violations += (live & (bad | ~checked)).to(tl.int32)
    tl.atomic_add(counts_ptr, tl.sum(seen, axis=0).to(tl.int64))
    num_violations = tl.sum(violations, axis=0)
    if num_violations > 0:
        tl.atomic_add(counts_ptr + 1, num_violations.to(tl.int64))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A decode batch: `batch` requests of `length` cached positions, their slots in random pages of `page`."""

    batch: int
    length: int
    page: int
    layers: int

    @property
    def name(self) -> str:
        """What the table calls the case."""
        order = "random slots" if self.page == 1 else f"random pages of {self.page}"
        return f"{self.batch}x{self.length}, {order}"

    @property
    def positions(self) -> int:
        """Positions that one launch verifies."""
        return self.batch * self.length


CASES = (
    Case(batch=256, length=4096, page=1, layers=8),
    Case(batch=256, length=4096, page=16, layers=8),
    Case(batch=256, length=10240, page=1, layers=4),
    Case(batch=8, length=512, page=1, layers=8),
)
# Tiles that are not full, more than one tile a request, and both slot orders.
SMOKE_CASES = (Case(batch=4, length=64, page=1, layers=2), Case(batch=3, length=80, page=16, layers=2))


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is launched."""

    tile: int
    warps: int
    programs_per_sm: int


DEFAULT_CONFIG = Config(tile=128, warps=4, programs_per_sm=16)
SMOKE_CONFIG = Config(tile=64, warps=4, programs_per_sm=1)
# One to eight positions a thread.
GRID = tuple(
    Config(tile=tile, warps=warps, programs_per_sm=programs)
    for tile in (64, 128, 256, 512)
    for warps in (1, 2, 4, 8)
    if 1 <= tile // (warps * 32) <= 8
    for programs in (8, 16, 32)
)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A healthy pool with a batch in it: its tables, its K and V, and the words of its records."""

    case: Case
    rows: torch.Tensor  # int64 [batch]
    lengths: torch.Tensor  # int64 [batch]
    req_to_token: torch.Tensor  # int32 [batch + 1, at least length]
    slots: torch.Tensor  # int64 [batch, length]
    layers: tuple[tuple[torch.Tensor, ...], ...]  # K's, then V's; each int64 [num_slots, words of a token]
    layer_tables: tuple[torch.Tensor, ...]  # their addresses: K's, then V's; int64 [layers]
    words: torch.Tensor  # int64 [5, batch, length]: identity, chain, K print, V print, writer

    @property
    def num_slots(self) -> int:
        """Slots of the pool, padding included."""
        return len(self.layers[0][0])


@dataclass(frozen=True, kw_only=True)
class Records:
    """The record of each slot for K and for V, int64 [num_slots, 4] views; the same view where one serves both."""

    layout: str
    k: torch.Tensor
    v: torch.Tensor

    @property
    def is_shared(self) -> bool:
        """Whether one record serves K and V."""
        return self.k is self.v


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One bit to flip: `tensor[slot, word] ^= 1 << bit`."""

    name: str
    tensor: torch.Tensor
    slot: int
    word: int
    bit: int

    def flip(self) -> None:
        """Flip the bit; a second time undoes it."""
        self.tensor[self.slot, self.word] ^= 1 << self.bit


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The fastest launch: the mean of two medians, and how far those lie apart."""

    ms: float
    spread_ms: float
    tile: int
    warps: int
    programs_per_sm: int
    fraction_of_copy: float


def make_pool(case: Case, device: torch.device) -> Pool:
    """Return a pool of random K and V, holding `case`'s batch in shuffled pages; page 0 is padding."""
    pages = torch.randperm(case.positions // case.page, device=device) + 1
    slots = (pages[:, None] * case.page + torch.arange(case.page, device=device)).view(case.batch, case.length)
    num_slots = triton.cdiv(case.positions + case.page, SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    req_to_token = torch.zeros(case.batch + 1, case.length + 16, dtype=torch.int32, device=device)
    req_to_token[1:, : case.length] = slots
    layers = tuple(
        tuple(
            torch.empty(num_slots, TOKEN_BYTES // 8, dtype=torch.int64, device=device).random_()
            for _ in range(case.layers)
        )
        for _ in range(2)
    )

    positions = torch.arange(case.length, device=device)
    tokens = torch.randint(0, 1 << 17, (case.batch, case.length), device=device)
    identities = hashing.identity(tokens, positions)
    words = torch.zeros(5, case.batch, case.length, dtype=torch.int64, device=device)
    words[0] = identities
    words[1] = _chains(identities)
    for half in range(2):
        for layer, pool in enumerate(layers[half]):
            where = positions[layer :: case.layers]
            first_word = where // case.layers % NUM_WINDOWS * (WINDOW_BYTES // 8)
            covered = slots[:, layer :: case.layers]
            mixed = [hashing.mix(pool[covered, first_word + j] ^ _mix_of(j, device)) for j in range(2)]
            prints = mixed[0] + mixed[1]
            words[2 + half, :, layer :: case.layers] = (prints ^ hashing.shift_right(prints, 32)) & hashing.LOW_32
    rows = torch.arange(1, case.batch + 1, device=device)
    words[4] = hashing.writer(torch.ones_like(rows), rows)[:, None]
    return Pool(
        case=case,
        rows=rows,
        lengths=torch.full((case.batch,), case.length, device=device),
        req_to_token=req_to_token,
        slots=slots,
        layers=layers,
        layer_tables=tuple(torch.tensor([pool.data_ptr() for pool in half], device=device) for half in layers),
        words=words,
    )


def make_records(layout: str, pool: Pool) -> Records:
    """Return the pool's records in `layout`."""
    num_slots = pool.num_slots
    device = pool.slots.device
    if layout == "columns":
        k = v = torch.zeros(RECORD_WORDS, num_slots, dtype=torch.int64, device=device).t()
    elif layout == "interleaved":
        both = torch.zeros(num_slots, 2 * RECORD_WORDS, dtype=torch.int64, device=device)
        k, v = both[:, :RECORD_WORDS], both[:, RECORD_WORDS:]
    else:
        k = v = torch.zeros(num_slots, RECORD_WORDS, dtype=torch.int64, device=device)
        if layout == "apart":
            v = torch.zeros_like(k)
    records = Records(layout=layout, k=k, v=v)
    identities, chains, k_prints, v_prints, writers = pool.words
    halves = [(k, k_prints | v_prints << 32)] if records.is_shared else [(k, k_prints), (v, v_prints)]
    for half, prints in halves:
        for word, values in ((IDENTITY, identities), (CHAIN, chains), (KV, prints), (WRITER, writers)):
            half[pool.slots, word] = values
    return records


def make_launch(pool: Pool, records: Records, mode: str, config: Config, counts: torch.Tensor) -> Callable[[], None]:
    """Return the call that verifies the whole batch once and adds to `counts`, int64 [2] (positions, violations)."""
    tiles = torch.full_like(pool.lengths, triton.cdiv(pool.case.length, config.tile))
    tile_offsets = torch.nn.functional.pad(tiles.cumsum(0), (1, 0))
    total = pool.case.batch * triton.cdiv(pool.case.length, config.tile)
    if counts.is_cuda:
        num_programs = torch.cuda.get_device_properties(counts.device).multi_processor_count * config.programs_per_sm
    else:
        num_programs = 3
    grid = (min(total, num_programs),)

    def launch() -> None:
        _plan_and_verify[grid](
            # inputs
            pool.rows,
            pool.lengths,
            tile_offsets,
            pool.case.batch,
            pool.req_to_token,
            pool.req_to_token.stride(0),
            records.k,
            records.v,
            pool.num_slots,
            *pool.layer_tables,
            pool.case.layers,
            NUM_WINDOWS,
            # outputs
            counts,
            # constants
            LAYOUT=records.layout,
            TWO_RECORDS=not records.is_shared,
            BYTES=mode == "mapping+bytes",
            TOKEN_BYTES=TOKEN_BYTES,
            TILE=config.tile,
            num_warps=config.warps,
        )

    return launch


def damages(pool: Pool, records: Records, mode: str) -> Iterator[Damage]:
    """Yield bits that exactly one violation must follow from, one for each word and byte source that is checked."""
    case = pool.case
    request, position = case.batch // 2, case.length // 2 + 1
    slot, last_slot = int(pool.slots[request, position]), int(pool.slots[request, -1])
    halves = {"record": records.k} if records.is_shared else {"K record": records.k, "V record": records.v}
    for name, tensor in halves.items():
        yield Damage(name=f"{name}, token", tensor=tensor, slot=slot, word=IDENTITY, bit=3)
        # The last position's: another's would be its successor's violation too.
        yield Damage(name=f"{name}, chain", tensor=tensor, slot=last_slot, word=CHAIN, bit=40)
    if mode == "mapping":
        return
    for name, tensor in halves.items():
        yield Damage(name=f"{name}, fingerprint", tensor=tensor, slot=slot, word=KV, bit=5)
    if records.is_shared:
        yield Damage(name="record, V fingerprint", tensor=records.k, slot=slot, word=KV, bit=37)
    first_word = position // case.layers % NUM_WINDOWS * (WINDOW_BYTES // 8)
    for name, layers in zip("KV", pool.layers, strict=True):
        for j in range(WINDOW_BYTES // 8):
            tensor = layers[position % case.layers]
            yield Damage(name=f"{name} bytes, word {j}", tensor=tensor, slot=slot, word=first_word + j, bit=50)


def expect(launch: Callable[[], object], counts: torch.Tensor, positions: int, violations: int, what: str) -> None:
    """Run `launch` once and raise RuntimeError unless it saw that many positions and violations."""
    counts.zero_()
    launch()
    seen = counts.tolist()
    if seen != [positions, violations]:
        raise RuntimeError(
            f"kv-canary: bench.layout: {what} must count [positions, violations] {[positions, violations]}, got {seen}"
        )


def check(pool: Pool, records: Records, mode: str, config: Config) -> None:
    """Raise RuntimeError unless a healthy pool has no violation and each damage exactly one."""
    counts = torch.zeros(2, dtype=torch.int64, device=pool.slots.device)
    launch = make_launch(pool, records, mode, config, counts)
    what = f"{records.layout}, {pool.case.name}, {mode}"
    expect(launch, counts, pool.case.positions, 0, f"{what}: a healthy pool")
    for damage in damages(pool, records, mode):
        damage.flip()
        expect(launch, counts, pool.case.positions, 1, f"{what}: {damage.name}")
        damage.flip()
    expect(launch, counts, pool.case.positions, 0, f"{what}: a repaired pool")


def necessary_bytes(case: Case, layout: str, mode: str) -> float:
    """Bytes that one launch has to move, by the formula of this module's docstring."""
    with_bytes = mode == "mapping+bytes"
    if layout == "columns":
        sectors_per_word: float = triton.cdiv(case.page * 8, SECTOR_BYTES) / case.page
        sectors = (3 if with_bytes else 2) * sectors_per_word
    else:
        sectors = 1 if layout == "one" else 2
    sectors += 2 if with_bytes else 0
    return case.positions * (TABLE_ENTRY_BYTES + sectors * SECTOR_BYTES)


def capture(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of one `launch`, which must have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def time_warm(replay: Callable[[], object], replays: int) -> float:
    """Median milliseconds of a replay on an idle device, by events, what it read before still in the cache."""
    times: list[float] = []
    for _ in range(3):
        replay()
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times))


def time_cold(replay: Callable[[], object], replays: int, eviction: torch.Tensor) -> float:
    """Median milliseconds of a replay after `eviction`, larger than the cache, was read."""
    replay()
    events = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Reading leaves no dirty lines behind, and takes the device longer than the host takes to launch.
        eviction.sum()
        start.record()
        replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in events))


def measure(
    pool: Pool, records: Records, mode: str, eviction: torch.Tensor, copy_bytes_per_ms: float
) -> tuple[Measurement, Measurement]:
    """Return the fastest launch with a warm cache, and the fastest with a cold one."""
    counts = torch.zeros(2, dtype=torch.int64, device=pool.slots.device)
    what = f"{records.layout}, {pool.case.name}, {mode}"
    # A graph does not keep what its launch reads alive.
    launches = {config: make_launch(pool, records, mode, config, counts) for config in GRID}
    graphs = {}
    for config, launch in launches.items():
        expect(launch, counts, pool.case.positions, 0, f"{what}: {config}")
        graphs[config] = capture(launch)
        # A graph that captured nothing would be fast.
        expect(graphs[config].replay, counts, pool.case.positions, 0, f"{what}: the graph of {config}")

    def fastest(timed: Callable[[Callable[[], object], int], float]) -> Measurement:
        tuned = {config: timed(graph.replay, TUNING_REPLAYS) for config, graph in graphs.items()}
        config = min(tuned, key=lambda c: tuned[c])
        first, second = (timed(graphs[config].replay, FINAL_REPLAYS) for _ in range(2))
        ms = (first + second) / 2
        return Measurement(
            ms=round(ms, 5),
            spread_ms=round(abs(first - second), 5),
            fraction_of_copy=round(necessary_bytes(pool.case, records.layout, mode) / ms / copy_bytes_per_ms, 3),
            **asdict(config),
        )

    return fastest(time_warm), fastest(lambda replay, replays: time_cold(replay, replays, eviction))


def measure_copy(device: torch.device) -> float:
    """Bytes per millisecond that a device-to-device copy moves, read and written."""
    source = torch.empty(COPY_BYTES // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / time_warm(lambda: target.copy_(source), TUNING_REPLAYS)


def measure_empty_replay(device: torch.device) -> float:
    """Milliseconds that `time_warm` gives for a graph of nearly nothing."""
    word = torch.zeros(1, device=device)
    word.add_(1)
    return time_warm(capture(lambda: word.add_(1)).replay, FINAL_REPLAYS)


def run_smoke(device: torch.device) -> None:
    """Check every layout and mode over tiny pools."""
    for case in SMOKE_CASES:
        pool = make_pool(case, device)
        for layout in LAYOUTS:
            records = make_records(layout, pool)
            for mode in MODES:
                check(pool, records, mode, SMOKE_CONFIG)
                print(f"{case.name}: {layout}, {mode}: healthy 0, each damage 1", flush=True)


def run_bench(device: torch.device, out: Path, commit: str) -> None:
    """Measure every layout, case and mode, and write `out` after each case."""
    began = time.monotonic()
    # Each capture collects garbage, which is slow while it has all of torch to look through.
    gc.collect()
    gc.freeze()
    copy_bytes_per_ms = measure_copy(device)
    torch.cuda.empty_cache()
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "copy_bandwidth_tb_s": round(copy_bytes_per_ms / 1e9, 3),
        "empty_replay_ms": round(measure_empty_replay(device), 5),
        "rows": rows,
    }
    print(json.dumps({key: value for key, value in report.items() if key != "rows"}), flush=True)
    eviction = torch.ones(EVICTION_BYTES // 4, dtype=torch.float32, device=device)
    for case in CASES:
        pool = make_pool(case, device)
        for layout in LAYOUTS:
            records = make_records(layout, pool)
            for mode in MODES:
                check(pool, records, mode, DEFAULT_CONFIG)
                warm, cold = measure(pool, records, mode, eviction, copy_bytes_per_ms)
                rows.append({"layout": layout, "case": case.name, "mode": mode, **asdict(warm), "cold": asdict(cold)})
                seconds = time.monotonic() - began
                print(f"[{seconds:5.0f} s] {case.name}: {layout}, {mode}: {warm.ms} ms, cold {cold.ms} ms", flush=True)
        # Free this pool before the next one is made: two would not fit.
        memory = torch.cuda.max_memory_allocated(device) / 1e9
        del pool, records
        torch.cuda.empty_cache()
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {out}; at most {memory:.1f} GB of GPU memory in use so far", flush=True)
    print_table(rows)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each row: warm, then cold."""
    side = f"{'ms':>8} {'spread':>7} {'launch':>12} {'of copy':>7}"
    print(f"{'':55} | {'warm':^37} | {'cold':^37}")
    print(f"{'case':27} {'layout':11} {'mode':15} | {side} | {side}")
    for row in rows:
        line = f"{row['case']:27} {row['layout']:11} {row['mode']:15}"
        for timed in (row, row["cold"]):
            launch = f"{timed['tile']}/{timed['warps']}/{timed['programs_per_sm']}"
            line += f" | {timed['ms']:8.4f} {timed['spread_ms']:7.4f} {launch:>12} {timed['fraction_of_copy']:7.3f}"
        print(line, flush=True)
    print("launch: tile / warps / programs per multiprocessor", flush=True)


def _chains(identities: torch.Tensor) -> torch.Tensor:
    """The chain of each row of `identities`, [batch, length]: the recurrence's prefix sum, see kernels/hashing.py."""
    length = identities.shape[1]
    inverse = pow(CHAIN_MULTIPLIER, -1, 1 << 64)
    power, inverse_power = 1, 1
    powers, inverse_powers = [], []
    for _ in range(length):
        power = power * CHAIN_MULTIPLIER % (1 << 64)
        inverse_power = inverse_power * inverse % (1 << 64)
        powers.append(to_signed(power))
        inverse_powers.append(to_signed(inverse_power))
    scales = torch.tensor([powers, inverse_powers], device=identities.device)
    return scales[0] * (ANCHOR + (hashing.mix(identities) * scales[1]).cumsum(dim=1))


def _mix_of(value: int, device: torch.device) -> torch.Tensor:
    return hashing.mix(torch.tensor(value, device=device))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or with --smoke its checks only, from the command line."""
    default_out = Path(__file__).resolve().parent / "results" / "h200_layout.json"
    parser = argparse.ArgumentParser(prog="python -m kv_canary.bench.layout", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=default_out, help="JSON to write (default: %(default)s)")
    parser.add_argument("--commit", help="commit to record (default: from git)")
    parser.add_argument(
        "--smoke", action="store_true", help="check tiny pools and time nothing; on a CPU with TRITON_INTERPRET=1"
    )
    arguments = parser.parse_args(argv)
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if interpreted and not arguments.smoke:
        parser.error("the interpreter cannot be timed: unset TRITON_INTERPRET, or add --smoke")
    if not interpreted and not torch.cuda.is_available():
        parser.error("no CUDA device; without one, use TRITON_INTERPRET=1 and --smoke")
    torch.manual_seed(0)
    device = torch.device("cpu" if interpreted else "cuda")
    if arguments.smoke:
        run_smoke(device)
    else:
        run_bench(device, arguments.out, arguments.commit or commit_of_checkout())
    return 0


if __name__ == "__main__":
    sys.exit(main())
