"""plan: the reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kv_canary.constants import BAD_SLOT, HEAD_OF_CHAIN, STRIDE_BLOCK, UNCHECKED, Status
from kv_canary.reference.segments import elements
from kv_canary.specs.plan import longest_prefix
from kv_canary.specs.structures import VerifyPlan, WritePlan


def plan(
    *,
    rows: torch.Tensor,
    owners: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    table_rows: torch.Tensor | None,
    page_size: int,
    window: int,
    after_write: bool,
    lut: torch.Tensor | None,
    expected_tokens: torch.Tensor | None,
    expected_lens: torch.Tensor | None,
    token_offset: int,
    strides: torch.Tensor | None,
    step: torch.Tensor | None,
    verify_plan: VerifyPlan,
    write_plan: WritePlan,
    status: torch.Tensor,
    entry_offsets: torch.Tensor,
) -> None:
    """Turn a batch's rows and lengths into the entries to verify and the segments to write; see specs/plan.py."""
    bs = len(rows)
    table = Table(req_to_token, rows if table_rows is None else table_rows, page_size=page_size, lut=lut)
    row_ok, lens_ok, extend_ok = _in_range(rows, prefix_lens, extend_lens, table)
    live = row_ok & lens_ok & (rows != 0)
    bits = 0
    bits |= Status.ROW_RANGE if bool((~row_ok).any()) else 0
    bits |= Status.LENGTH_RANGE if bool((~lens_ok).any()) else 0
    request, position, first = cached_entries(
        rows=rows,
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        table=table,
        window=window,
        after_write=after_write,
        strides=strides,
        step=step,
    )
    requested = len(request)
    num_valid = min(requested, len(verify_plan.slots))
    bits |= Status.OVERFLOW if requested > num_valid else 0
    request, position, first = request[:num_valid], position[:num_valid], first[:num_valid]

    row = rows.take(request)
    slot, lut_bad = table.look_up(request, position)
    bits |= Status.LUT_RANGE if bool(lut_bad.any()) else 0
    previous, _ = table.look_up(request, (position - 1).clamp(min=0))
    previous = torch.where(position == first, UNCHECKED, previous)
    previous = torch.where(position == 0, HEAD_OF_CHAIN, previous)

    verify_plan.slots[:num_valid] = slot
    verify_plan.prev_slots[:num_valid] = previous
    verify_plan.positions[:num_valid] = position
    verify_plan.tokens[:num_valid] = expected_tokens_of(
        expected_tokens, expected_lens, request, row, position, token_offset
    )
    verify_plan.rows[:num_valid] = row.to(torch.int32)
    verify_plan.num_valid[0] = num_valid
    verify_plan.num_requested[0] = requested

    write_plan.rows[:bs] = torch.where(live, rows, 0)
    write_plan.owners[:bs] = rows if owners is None else owners
    # Padding's tokens stand in the flat inputs too, so they count in the offsets.
    write_plan.offsets[0] = 0
    write_plan.offsets[1 : bs + 1] = torch.where(extend_ok, extend_lens, 0).cumsum(0)
    write_plan.prefix_lens[:bs] = prefix_lens
    seed = torch.full_like(rows, HEAD_OF_CHAIN)
    seeded = live & (prefix_lens > 0)
    seed[seeded], _ = table.look_up(seeded.nonzero()[:, 0], prefix_lens[seeded] - 1)
    write_plan.seed_slots[:bs] = seed
    write_plan.num_requests[0] = bs
    status[0] = bits


def cached_entries(
    *,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    table: Table,
    window: int,
    after_write: bool,
    strides: torch.Tensor | None,
    step: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return request, position and the request's first position of every entry to verify: by request, then position."""
    row_ok, lens_ok, _ = _in_range(rows, prefix_lens, extend_lens, table)
    prefix = torch.where(row_ok & lens_ok & (rows != 0), prefix_lens, 0)
    start = torch.zeros_like(prefix)
    if window > 0:
        first_read = torch.where(prefix > 0, prefix + extend_lens - 1, 0) if after_write else prefix
        start = (first_read - window).clamp(min=0)

    # One candidate entry per cached position of [start, prefix).
    request, position = elements(start, (prefix - start).clamp(min=0))
    if strides is not None and step is not None:
        n = strides.take(request).clamp(min=1)
        # The block's remainder that makes block + step a multiple of n; -step itself may not fit 64 bits.
        keep = (position // STRIDE_BLOCK) % n == (n - step % n) % n
        keep |= position == prefix.take(request) - 1
        request, position = request[keep], position[keep]
    return request, position, start.take(request)


def _in_range(
    rows: torch.Tensor, prefix_lens: torch.Tensor, extend_lens: torch.Tensor, table: Table
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return whether each request's row, its lengths, and what it writes are in range."""
    num_rows, num_pages = table.pages.shape
    max_len = longest_prefix(num_pages, table.page_size)
    extend_ok = (extend_lens >= 0) & (extend_lens < 1 << 31)
    lens_ok = (prefix_lens >= 0) & (prefix_lens <= max_len) & extend_ok
    row_ok = (rows >= 0) & (rows < 1 << 31) & (table.rows >= 0) & (table.rows < num_rows)
    return row_ok, lens_ok, extend_ok


@dataclass(frozen=True)
class Table:
    """Where the cached positions of a batch lie: the pages of each row, and the row of each request."""

    pages: torch.Tensor
    rows: torch.Tensor
    page_size: int = field(kw_only=True)
    lut: torch.Tensor | None = field(kw_only=True)

    def look_up(self, requests: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slot of each (request, position), all in range, and whether the LUT was asked out of range."""
        page = self.pages[self.rows.take(requests), positions // self.page_size].to(torch.int64)
        slot = torch.where(page < 0, page, page * self.page_size + positions % self.page_size)
        bad = torch.zeros_like(slot, dtype=torch.bool)
        if self.lut is not None:
            bad = (slot < 0) | (slot >= len(self.lut))
            slot[~bad] = self.lut[slot[~bad]]
            slot[bad] = BAD_SLOT
        return torch.where(slot < 0, BAD_SLOT, slot), bad


def expected_tokens_of(
    expected_tokens: torch.Tensor | None,
    expected_lens: torch.Tensor | None,
    request: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    token_offset: int,
) -> torch.Tensor:
    """Return the token that the pool expects at each entry, or -1 where it says nothing."""
    result = torch.full_like(positions, -1)
    if expected_tokens is None or expected_lens is None:
        return result
    token_rows, token_len = expected_tokens.shape
    index = positions + token_offset
    known = (index >= 0) & (index < expected_lens.take(request).clamp(max=token_len)) & (rows > 0) & (rows < token_rows)
    result[known] = expected_tokens[rows[known], index[known]].to(torch.int64)
    return result
