"""Records that are made outside of any forward, of the bytes that lie there: nothing is counted or reported."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kv_canary import ops
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.host import aligned, send
from kv_canary.runtime.pools import BufferGroup
from kv_canary.runtime.seals import seal_written
from kv_canary.runtime.tails import anchor_of
from kv_canary.specs.structures import Endpoint, ViolationLog, WritePlan

# Tokens are padded to a multiple of so many: kernels are compiled for one kind of number.
_ROOM = 4096


def write_aside(
    context: CanaryContext,
    endpoint: Endpoint,
    *,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    chain: int = 0,
    owner: int = 0,
) -> None:
    """Record tokens outside of any forward, of the bytes that lie there now: nothing is counted or reported.

    Args:
        context: of the canary.
        endpoint: whose records are written.
        tokens, positions, slots: int64 [n] on the manager's device; nothing is recorded for slot 0.
        chain: of what comes before the first token, signed.
        owner: serial number that the records name.
    """
    device, count = context.device, len(slots)
    # The plan's one request has row 1 and no prefix.
    offsets, owners, tails = send(device, [0, count], [owner], [0, chain])
    flat = torch.zeros(3, -(-count // _ROOM) * _ROOM, dtype=torch.int64, device=device)
    for row, column in zip(flat, (tokens, positions, slots), strict=True):
        row[:count] = column
    plan = WritePlan.allocate(write_cap=1, device=device)
    plan.rows.fill_(1)
    plan.owners.copy_(owners)
    plan.offsets.copy_(offsets)
    plan.num_requests.fill_(1)
    ops.write(
        write_plan=plan,
        input_ids=flat[0],
        positions=flat[1],
        out_slots=flat[2],
        endpoint=endpoint,
        tails=tails,
        step=context.state.step,
        check_positions=torch.zeros(1, dtype=torch.int32, device=device),
        track_lifetime=False,
        violations=ViolationLog.allocate(ring_cap=1, device=device),
        counters=torch.zeros_like(context.state.counters),
        backend=context.backend,
    )


def record_prefix(
    context: CanaryContext,
    group: BufferGroup,
    *,
    slots: torch.Tensor,
    tokens: Sequence[int],
    owner: int,
    identity: int = 0,
) -> None:
    """Record `tokens` as the content of `slots`, whose bytes are what they are now; nothing is counted or reported.

    Args:
        context: of the canary.
        group: one of its groups.
        slots: int64 [n] on the manager's device, the slot of every position from 0 on, 0 where none is to be recorded.
        tokens: [n] the token that each of them holds: `group.token_offset` later than the position.
        owner: the request's serial number.
        identity: its identity word.
    """
    given, positions = send(context.device, tokens, range(len(tokens)))
    tags = (group.tail_tag,) if group.pool.head_records is None else (group.head_tag, group.tail_tag)
    for tag in tags:
        write_aside(
            context,
            context.endpoint(group, tag, with_bytes=True),
            tokens=given,
            positions=positions,
            slots=slots,
            chain=anchor_of(identity),
            owner=owner,
        )
    seal_written(context, group, aligned(slots))


def warm_up(context: CanaryContext) -> None:
    """Record nothing in every group, so that all kernels are compiled."""
    for group in context.groups:
        nothing = torch.zeros(1, dtype=torch.int64, device=context.device)
        record_prefix(context, group, slots=nothing, tokens=[0], owner=0)
