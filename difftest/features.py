"""The features of the domain that a call has, read off its arguments alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch

from kv_canary.constants import OWNER_BITS, STEP_BITS
from kv_canary.specs.sealing import seal_words
from kv_canary.specs.structures import Endpoint, KvSource

# A tensor that spans more elements than this has addresses that 32 bits cannot hold.
GIANT = 1 << 31

# What a segment's tiles are called in the features of an op.
_SEGMENTS = {"write": "write", "chain_tails": "chain", "open_step": "chain", "scatter_token_ids": "scatter"}

Features = Iterator[str]


def of_call(op: str, arguments: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the features that a complete call has, each `axis:value`; none for an op not built in."""
    reader = _READERS.get(op)
    return frozenset(reader(arguments)) if reader is not None else frozenset()


def _plan(a: Mapping[str, Any]) -> Features:
    yield from _prefixes(
        a, capacity=len(a["verify_plan"].slots), after_write=a["after_write"], op="plan", tile="entries"
    )
    if a["step"] is not None:
        yield from _step(a["step"])


def _verify_prefixes(a: Mapping[str, Any]) -> Features:
    slots = yield from _prefixes(
        a, capacity=len(a["resolved"].entries), after_write=False, op="verify_prefixes", tile="verify"
    )
    yield from _checked(a, slots)


def _prefixes(
    a: Mapping[str, Any], *, capacity: int, after_write: bool, op: str, tile: str
) -> Generator[str, None, torch.Tensor]:
    """What plan and verify_prefixes have in common; return the slots that entries are found in, where there is one."""
    table, lut, window, size = a["req_to_token"], a["lut"], a["window"], a["page_size"]
    rows, prefix, extend = a["rows"], a["prefix_lens"], a["extend_lens"]
    places = rows if a["table_rows"] is None else a["table_rows"]
    live = yield from _described(a, op=op)
    yield (
        "attention:lut"
        if lut is not None
        else "attention:full"
        if not window
        else ("attention:ring" if after_write else "attention:window")
    )
    first = prefix + extend - 1 if after_write else prefix
    start = (first - window).clamp(min=0) if window else torch.zeros_like(prefix)
    counts = torch.where(live, prefix - start, 0).clamp(min=0)
    request = torch.repeat_interleave(torch.arange(len(rows)), counts)
    position = start[request] + torch.arange(len(request)) - (counts.cumsum(0) - counts)[request]
    if a["strides"] is not None:
        n = a["strides"].clamp(min=1)[request]
        kept = (position // 16) % n == (-a["step"]) % n
        kept |= position == prefix[request] - 1
        request, position = request[kept], position[kept]
    if len(request) > capacity:
        yield "capacity:truncated"
        request, position = request[:capacity], position[:capacity]
    yield from _tile(tile, len(request), of=(op, "entries"))
    pages = table[places[request], position // size].to(torch.int64)
    slots: torch.Tensor = torch.where(pages < 0, pages, pages * size + position % size)
    if lut is not None:
        if bool((lut < 0).any()) or bool(((table < 0) | (table.long() * size >= len(lut))).any()):
            yield "hostile:value"
        if bool((lut[1:] == 0).any()):
            yield "residency:evicted"
    yield from _shared(slots, rows[request])
    yield from _expected(a)
    yield from _owners(a["owners"])
    if lut is not None:
        slots = lut[slots[(slots >= 0) & (slots < len(lut))]]
    return slots


def _described(a: Mapping[str, Any], *, op: str) -> Generator[str, None, torch.Tensor]:
    """What all have in common that take a batch and its tables; return which requests live."""
    table, size = a["req_to_token"], a["page_size"]
    num_rows, max_len = table.shape[0], table.shape[1] * size
    rows, prefix, extend = a["rows"], a["prefix_lens"], a["extend_lens"]
    places = rows if a["table_rows"] is None else a["table_rows"]
    in_range = (rows >= 0) & (rows < 1 << 31) & (places >= 0) & (places < num_rows)
    in_range = in_range & (prefix >= 0) & (prefix <= max_len) & (extend >= 0)
    live: torch.Tensor = in_range & (rows > 0) & (extend < 1 << 31)
    yield from _batch(prefix[live], extend[live])
    yield from _requests(rows)
    yield from _tile("requests", len(rows), of=(op, "requests"))
    if not bool(in_range.all()) or bool((extend >= 1 << 31).any()) or bool((table < 0).any()):
        yield "hostile:value"
    if a["strides"] is not None and bool((a["strides"] > 1).any()):
        yield "strides:some"
    if size > 1:
        yield "table:odd" if size & (size - 1) else "table:pages"
    if a["table_rows"] is not None:
        yield "table:rows"
    yield from _tables(table)
    return live


def _expected(a: Mapping[str, Any]) -> Features:
    """The features of the tokens to expect."""
    if a["expected_tokens"] is not None:
        yield "tokens:expected"
    if a["token_offset"]:
        yield "tokens:shifted"
    yield from _tables(a["expected_tokens"])


def _verify(a: Mapping[str, Any]) -> Features:
    plan, endpoint = a["verify_plan"], a["endpoint"]
    valid, num_slots = int(plan.num_valid), len(endpoint.records)
    n = min(max(valid, 0), len(plan.slots))
    slots, previous, rows = plan.slots[:n], plan.prev_slots[:n], plan.rows[:n]
    if valid != n or bool(((slots < 0) | (slots >= num_slots) | (previous < -2) | (previous >= num_slots)).any()):
        yield "hostile:value"
    yield from _tile("verify", n, of=("verify", "entries"))
    yield from _shared(slots, rows)
    if bool((plan.tokens[:n] >= 0).any()):
        yield "tokens:expected"
    yield from _checked(a, slots)


def _verify_resolved(a: Mapping[str, Any]) -> Features:
    resolved, rows, num_slots = a["resolved"], a["rows"], len(a["endpoint"].records)
    valid = int(resolved.num_valid)
    n = min(max(valid, 0), len(resolved.entries))
    slots, previous, _, request = resolved.unfold(0, n)
    inside = (request >= 0) & (request < len(rows))
    if valid != n or bool(((slots < 0) | (slots >= num_slots) | (previous < -2) | (previous >= num_slots)).any()):
        yield "hostile:value"
    if not bool(inside.all()):
        yield "hostile:value"
    yield from _requests(rows)
    yield from _tile("verify", n, of=("verify_resolved", "entries"))
    yield from _shared(slots[inside], rows[request[inside]])
    yield from _expected(a)
    yield from _checked(a, slots)


def _checked(a: Mapping[str, Any], slots: torch.Tensor) -> Features:
    """The features that the ops which check the records of `slots` have in common."""
    records = a["endpoint"].records
    if bool((slots == 0).any()):
        yield "slot:unmapped"
    if a["anchors"] is not None:
        yield "anchors:given"
    yield from _records(records[slots[(slots > 0) & (slots < len(records))]])
    yield from _launch(a)


def _write(a: Mapping[str, Any]) -> Features:
    plan, endpoint, slots = a["write_plan"], a["endpoint"], a["out_slots"]
    num_rows, num_slots, num_tokens = len(a["tails"]), len(endpoint.records), len(slots)
    count = int(plan.num_requests)
    n = min(max(count, 0), len(plan.rows))
    rows, offsets, seeds = plan.rows[:n], plan.offsets[: n + 1], plan.seed_slots[:n]
    first, last = offsets[:-1].clamp(min=0), offsets[1:].clamp(max=num_tokens)
    extend = (last - first).clamp(min=0)
    live = (rows > 0) & (rows < num_rows)
    yield from _batch(plan.prefix_lens[:n][live], extend[live])
    yield from _requests(rows)
    yield from _segments(offsets, rows, num_rows=num_rows, total=num_tokens, op="write")
    outside = (slots < 0) | (slots >= num_slots)
    if count != n or bool(outside.any()) or bool(((seeds < -1) | (seeds >= num_slots)).any()):
        yield "hostile:value"
    written = torch.zeros(num_tokens, dtype=torch.bool)
    for r in live.nonzero().view(-1).tolist():
        written[int(first[r]) : max(int(last[r]), 0)] = True
    if bool((slots[written] == 0).any()):
        yield "slot:trash"
    stored = slots[written & ~outside & (slots != 0)]
    if len(stored.unique()) < len(stored):
        yield "slot:twice"
    old = endpoint.records[stored]
    yield from _records(old)
    if bool(((old != 0).any(dim=1) & (old[:, 3] >= 0)).any()):
        yield "record:rewritten"
    if a["expected_input_ids"] is not None:
        yield "tokens:oracle"
    if not int(a["check_positions"]):
        yield "positions:unchecked"
    yield from _owners(plan.owners[:n])
    yield from _launch(a)


def _move(a: Mapping[str, Any]) -> Features:
    src, dst, num_slots = a["src"], a["dst"], len(a["records"][0])
    yield from _slots(a, src, dst)
    inside = set(src[(src > 0) & (src < num_slots)].tolist())
    if inside & set(dst.tolist()):
        yield "move:overlapping"
    yield from _records(a["records"][0][list(inside)])


def _retire(a: Mapping[str, Any]) -> Features:
    slots, records = a["slots"], a["records"][0]
    yield from _slots(a, slots)
    yield from _records(records[slots[(slots > 0) & (slots < len(records))]])
    if len(set(slots.tolist())) < len(slots):
        yield "retire:twice"


def _slots(a: Mapping[str, Any], *slots: torch.Tensor) -> Features:
    """The features that move and retire have in common."""
    num_slots = len(a["records"][0])
    if any(bool(((s < 0) | (s >= num_slots)).any()) for s in slots):
        yield "hostile:value"
    yield from _tile("slots", len(slots[0]), of=("move", "slots"))
    yield from _owners(torch.as_tensor(a["owner"]).view(-1))
    yield from _step(a["step"])
    yield from _tables(*a["records"])
    if len(a["records"]) > 1:
        yield "buffers:two"


def _seal(a: Mapping[str, Any]) -> Features:
    endpoint: Endpoint = a["endpoint"]
    num_slots, (first, count) = len(endpoint.records), a["span"].tolist()
    slots = torch.arange(num_slots) if a["slots"] is None else a["slots"]
    yield "slots:range" if a["slots"] is None else "slots:list"
    if not 0 <= first <= len(slots) or not 0 <= count <= len(slots) - first:
        yield "hostile:value"
    if bool(((slots < 0) | (slots >= num_slots)).any()):
        yield "hostile:value"
    taken = slots[first : first + max(count, 0)] if 0 <= first <= len(slots) else slots[:0]
    if 0 < len(taken) < len(slots):
        yield "span:piece"
    if endpoint.k_scales is not None or endpoint.v_scales is not None:
        yield "scales:given"
    yield "bands:one" if seal_words(endpoint, a["layers_per_band"]) == 2 else "bands:several"
    if a["layers_per_band"] > 1:
        yield "band:wide"
    yield from _sources(endpoint)
    yield from _records(endpoint.records[taken[(taken > 0) & (taken < num_slots)]])
    yield from _tables(endpoint.records, a["seals"])


def _new_seals(a: Mapping[str, Any]) -> Features:
    yield from _seal(a)
    if a["written_in"] is not None:
        yield "seal:fresh"
        yield from _step(a["written_in"])


def _verify_seals(a: Mapping[str, Any]) -> Features:
    yield from _seal(a)
    if a["ends"] is not None:
        yield "lists:given"
    yield from _log(a)
    yield from _step(a["step"])


def _scatter_token_ids(a: Mapping[str, Any]) -> Features:
    yield from _requests(a["rows"])
    yield from _segments(
        a["offsets"],
        a["rows"],
        num_rows=len(a["pool"]),
        total=len(a["flat"]),
        op="scatter_token_ids",
        starts=a["starts"],
    )
    yield from _tables(a["pool"])


def _chain_tails(a: Mapping[str, Any]) -> Features:
    yield from _requests(a["rows"])
    yield from _advance(a, op="chain_tails")


def _advance(a: Mapping[str, Any], *, op: str) -> Features:
    """The features of what advances chains."""
    yield from _segments(
        a["offsets"], a["rows"], num_rows=len(a["tails"]), total=len(a["flat"]), op=op, starts=a["starts"]
    )
    if a["anchors"] is not None:
        yield "anchors:given"
    if a["pool"] is not None:
        yield "tokens:kept"
        yield from _tables(a["pool"])


def _open_step(a: Mapping[str, Any]) -> Features:
    yield from _described(a, op="open_step")
    yield "attention:window" if a["window"] else "attention:full"
    if a["step"] is not None:
        yield from _step(a["step"])
    yield from _advance({**a, "rows": a["advance_rows"]}, op="open_step")


def _segments(
    offsets: torch.Tensor,
    rows: torch.Tensor,
    *,
    num_rows: int,
    total: int,
    op: str,
    starts: torch.Tensor | None = None,
) -> Features:
    extend = offsets[1:].clamp(max=total) - offsets[:-1].clamp(min=0)
    live = (rows > 0) & (rows < num_rows)
    if not bool(((rows >= 0) & (rows < num_rows)).all()) or bool((offsets.diff() < 0).any()):
        yield "hostile:value"
    if bool(((offsets < 0) | (offsets > total)).any()) or (starts is not None and bool((starts < 0).any())):
        yield "hostile:value"
    if bool((extend[live] <= 0).any()):
        yield "segment:empty"
    for n in extend[live].tolist():
        yield from _tile(_SEGMENTS[op], n, of=(op, "tokens"))
    if starts is not None and bool((starts > 0).any()):
        yield "starts:later"


def _batch(prefix: torch.Tensor, extend: torch.Tensor) -> Features:
    kinds = set()
    if bool((prefix <= 0).any()):
        kinds.add("fresh")
    if bool(((prefix > 0) & (extend == 1)).any()):
        kinds.add("decode")
    if bool(((prefix > 0) & (extend != 1)).any()):
        kinds.add("continued")
    yield "batch:" + ("empty" if not kinds else kinds.pop() if len(kinds) == 1 else "mixed")


def _requests(rows: torch.Tensor) -> Features:
    if len(rows):
        yield "requests:one" if len(rows) == 1 else "requests:several"
    if bool((rows == 0).any()):
        yield "padding:rows"


def _launch(a: Mapping[str, Any]) -> Features:
    """The features that write and the ops that verify have in common."""
    endpoint: Endpoint = a["endpoint"]
    yield from _sources(endpoint)
    for source in (endpoint.k_source, endpoint.v_source):
        if source is not None:
            yield from _windows(source)
    yield from _log(a)
    if a["track_lifetime"]:
        yield "lifetime:tracked"
    yield from _step(a["step"])
    yield from _tables(endpoint.records)


def _log(a: Mapping[str, Any]) -> Features:
    log = a["violations"]
    capacity = len(log.ring)
    yield "ring:none" if not capacity else "ring:full" if int(log.count) >= capacity else "ring:room"


def _sources(endpoint: Endpoint) -> Features:
    sources = {"k": endpoint.k_source, "v": endpoint.v_source}
    given = [name for name, source in sources.items() if source is not None]
    yield "source:" + ("both" if len(given) == 2 else given[0] if given else "none")
    for source in sources.values():
        if source is not None:
            yield from _source(source, len(endpoint.records))


def _windows(source: KvSource) -> Features:
    """The features of a source that tokens are covered of in turns."""
    windows = source.num_windows
    yield "windows:one" if windows == 1 else "windows:many"
    if windows > 1 and source.bytes_per_token % source.read_bytes:
        yield "windows:ragged"


def _source(source: KvSource, num_slots: int) -> Features:
    page = source.page_size
    yield "page:one" if page == 1 else "page:many" if page & (page - 1) == 0 else "page:odd"
    yield "layers:one" if len(source.layers) == 1 else "layers:many"
    yield "alignment:word" if source.alignment >= 8 else "alignment:less"
    if source.slot_bias:
        yield "layout:bias"
    if source.token_stride_bytes > source.bytes_per_token and source.page_size > 1:
        yield "layout:between"
    if source.offset_bytes:
        yield "layout:offset"
    if source.row_stride_bytes > source.row_bytes:
        yield "layout:gaps"
    if (num_slots - 1 - source.slot_bias) // page >= source.num_rows:
        yield "layout:short"
    yield from _giant(source.layers[0])


def _records(records: torch.Tensor) -> Features:
    written = (records != 0).any(dim=1)
    if not bool(written.all()):
        yield "record:zero"
    if bool((written & (records[:, 3] < 0)).any()):
        yield "record:retired"


def _shared(slots: torch.Tensor, rows: torch.Tensor) -> Features:
    """Two rows rely on one slot."""
    pairs = {(s, r) for s, r in zip(slots.tolist(), rows.tolist(), strict=True) if s > 0}
    if len({s for s, _ in pairs}) < len(pairs):
        yield "sharing:prefix"


def _tables(*tables: torch.Tensor | None) -> Features:
    for table in tables:
        if table is not None:
            if table.shape[0] > 1 and table.stride(0) > table.shape[1]:
                yield "rows:apart"
            yield from _giant(table)


def _giant(tensor: torch.Tensor) -> Features:
    if sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) > GIANT:
        yield "rows:giant"


def _tile(name: str, n: int, *, of: tuple[str, str]) -> Features:
    """The relation of `n` elements of a kind to the tiles of an op's Triton kernel."""
    op, kind = of
    # Not imported earlier: whether Triton interprets is settled when it is imported.
    size = importlib.import_module(f"kv_canary.kernels.{op}").TILES[kind]
    if n > size:
        yield f"tile:{name}"
    if n >= size - 1 and (n + 1) % size <= 2:
        yield "tile:edge"


def _step(step: torch.Tensor) -> Features:
    if not 0 <= int(step) < 1 << STEP_BITS:
        yield "step:wrapped"


def _owners(owners: torch.Tensor | None) -> Features:
    if owners is not None and bool(((owners < 0) | (owners >= 1 << OWNER_BITS)).any()):
        yield "owner:wrapped"


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Iterable[str]]] = {
    "plan": _plan,
    "verify": _verify,
    "verify_prefixes": _verify_prefixes,
    "verify_resolved": _verify_resolved,
    "write": _write,
    "move": _move,
    "retire": _retire,
    "scatter_token_ids": _scatter_token_ids,
    "chain_tails": _chain_tails,
    "open_step": _open_step,
    "seal": _new_seals,
    "verify_seals": _verify_seals,
}
