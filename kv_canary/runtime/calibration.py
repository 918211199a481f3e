"""What a step of the canary costs on the device it runs on: measured once, when it is installed on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from kv_canary import ops
from kv_canary.runtime.budget import StepCost
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.replays import capture_graph
from kv_canary.specs.structures import ResolvedSlots, ViolationLog, WritePlan

_FEW, _MANY = 1 << 10, 1 << 18
_REPLAYS = 10


def measure_cost(context: CanaryContext) -> StepCost:
    """Return the cost of a step over all groups, from CUDA-graph replays of one that relies on few and on many slots.

    Slots are random, as they are in a pool that has been used for a while. Records are read only, and what is found
    there means nothing and is dropped. Waits for the device; draws from no generator but its own.
    """
    few, many = (_replay_seconds(context, entries) for entries in (_FEW, _MANY))
    # What is relied on is counted per group, as entries are.
    entry = max(many - few, 0.0) / (len(context.groups) * (_MANY - _FEW))
    return StepCost(fixed=max(few - len(context.groups) * _FEW * entry, 0.0), entry=entry)


def _replay_seconds(context: CanaryContext, entries: int) -> float:
    """Return the median time of a step that relies on `entries` slots in every group."""
    device = context.device
    one, nothing = (torch.full((1,), value, dtype=torch.int64, device=device) for value in (1, 0))
    prefix, step = torch.full((1,), entries, dtype=torch.int64, device=device), torch.zeros_like(one)
    no_token, offsets = (torch.zeros(n, dtype=torch.int64, device=device) for n in (0, 2))
    status, longest = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros_like(one)
    log = ViolationLog.allocate(ring_cap=1, device=device)
    counters, tails = torch.zeros_like(context.state.counters), torch.zeros_like(context.state.anchors)
    # The engine's requests may be sampled from the device's own one, whose draws are to stay as they are.
    generator = torch.Generator(device).manual_seed(0)
    work = []
    for group in context.groups:
        pages, length = max(1, group.pool.num_slots // group.page_size), -(-entries // group.page_size)
        table = torch.randint(0, pages, (2, length), generator=generator, dtype=torch.int32, device=device)
        resolved = ResolvedSlots.allocate(entry_cap=entries, device=device)
        work.append((group, table, resolved, WritePlan.allocate(write_cap=1, device=device)))

    def run() -> None:
        for group, table, resolved, write_plan in work:
            bytes_at_tail = context.config.verify_bytes_at_tail
            found: dict[str, Any] = {"violations": log, "counters": counters, "backend": context.backend}
            ops.verify_prefixes(
                rows=one,
                prefix_lens=prefix,
                extend_lens=nothing,
                req_to_token=table,
                page_size=group.page_size,
                step=step,
                endpoint=context.endpoint(group, group.head_tag, with_bytes=True),
                resolved=resolved,
                write_plan=write_plan,
                status=status,
                entry_offsets=offsets,
                longest_stride=longest,
                **found,
            )
            ops.verify_resolved(
                rows=one,
                resolved=resolved,
                endpoint=context.endpoint(group, group.tail_tag, with_bytes=bytes_at_tail),
                step=step,
                **found,
            )
            ops.write(
                write_plan=write_plan,
                input_ids=no_token,
                positions=no_token,
                out_slots=no_token,
                endpoint=context.endpoint(group, group.tail_tag, with_bytes=True),
                tails=tails,
                step=step,
                check_positions=status,
                **found,
            )

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    times: list[float] = []
    with torch.cuda.stream(stream):
        run()
        replay = capture_graph(run)
        for _ in range(_REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[_REPLAYS // 2]
