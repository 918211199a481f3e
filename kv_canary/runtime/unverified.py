"""Slots of which the records say nothing, because a forward was given up or the canary itself has failed.

What is known of a slot is a bit each. In DOUBT are bytes that a forward may have overwritten before it was given
up: a freed slot among them may have changed, which is no fault. A GAP is a slot that was written, freed or copied while
the canary could not record it: its record is dropped, and who relies on it next has it taken in anew, from its own
tokens and the bytes that lie there then. That is counted, and says nothing of what befell the slot before. A row that
goes on is not looked through again; an engine that lets such a row name another slot, as it does where two requests
have the same prefix, may have a gap read as it is, and what is reported of that is known by the mark, and taken back.
TAKEN are slots that were gaps until a moment ago: such a report may still be under way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from kv_canary import ops
from kv_canary.constants import UNCHECKED, Reason
from kv_canary.runtime.aside import record_prefix
from kv_canary.runtime.cached import CachedSlots
from kv_canary.runtime.composition import ForwardRequest
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.drain import Findings
from kv_canary.runtime.host import on_device, send
from kv_canary.runtime.pools import BufferGroup, KvPool
from kv_canary.specs.structures import VerifyPlan, WritePlan
from kv_canary.specs.violation_row import ViolationRow

_DOUBT, _GAP, _TAKEN = 1, 2, 4
# Who a row was looked through for, as of which marking, and how many of its positions need no second look.
_Look = tuple[int, int, int, int]


class Unverified:
    """The marks of every pool, one byte a slot, and what takes slots in again. Nothing is launched where none is set.

    Args:
        context: of the canary.
    """

    def __init__(self, context: CanaryContext) -> None:
        self._context = context
        self._marks = {
            pool: torch.zeros(len(pool.records), dtype=torch.uint8, device=context.device) for pool in context.pools
        }
        # Where any bit, or any GAP, may be set; and where all slots are to be marked, because marking some has failed.
        self._marked: set[KvPool] = set()
        self._gaps: set[KvPool] = set()
        # Where slots behind the engine's are, as those of a host tier, which no forward reads before they are moved.
        self._behind: set[KvPool] = set()
        self._owed: set[KvPool] = set()
        self._markings = 0
        self._looks: dict[str, dict[int, _Look]] = {}
        # Positions that were taken in anew, and reports that were taken back.
        self.taken_in = self.taken_back = 0

    @property
    def is_clean(self) -> bool:
        """Whether no slot is marked, or to be marked."""
        return not (self._marked or self._owed)

    @property
    def any_marked(self) -> bool:
        """Whether any slot may be marked."""
        return bool(self._marked)

    def doubt(self, pool: KvPool, slots: torch.Tensor) -> None:
        """Take in that int64 `slots` may have been overwritten by a forward that was given up."""
        marks, slots = self._marks[pool], pool.inside(slots)
        marks[slots] |= _DOUBT
        self._spare_padding(pool)
        self._marked.add(pool)

    def forget(self, pool: KvPool, slots: torch.Tensor) -> None:
        """Drop the records of int64 `slots`, and mark them as gaps. Never raises: else, all slots of the pool are.

        To be called on the stream of the forwards.
        """
        self._marked.add(pool)
        self._gaps.add(pool)
        self._markings += 1
        try:
            slots = pool.inside(on_device(slots, pool.records.device).to(torch.int64))
            for records in pool.buffers:
                records[slots] = 0
            self._marks[pool][slots] = _GAP
            self._spare_padding(pool)
        except Exception:
            self._owed.add(pool)

    def forget_all(self, pool: KvPool) -> None:
        """Drop every record of a pool, and mark all of its slots as gaps, before the next forward."""
        self._owed.add(pool)

    def settle_debts(self) -> None:
        """Mark what could not be marked when it should have been; a forward must not begin before that."""
        for pool in list(self._owed):
            for records in pool.buffers:
                records.zero_()
            self._marks[pool].fill_(_GAP)
            self._spare_padding(pool)
            self._marked.add(pool)
            self._gaps.add(pool)
            self._markings += 1
            self._owed.discard(pool)

    def clear(self) -> None:
        """Take in that the engine emptied its cache: no slot holds anything."""
        for pool in self._marked | self._behind:
            self._marks[pool].zero_()
        self._marked.clear()
        self._gaps.clear()
        self._behind.clear()

    def written(self, pool: KvPool, slots: torch.Tensor) -> None:
        """Take in that int64 `slots` have new records."""
        if pool in self._marked:
            self._marks[pool][pool.inside(slots)] = 0

    def moved(self, pool: KvPool, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Take in that the content of int64 `src`, and its records, now lie in `dst` too."""
        if pool in self._behind:
            # What is moved may be marked, and where the engine's slots are from now on.
            self._behind.discard(pool)
            self._marked.add(pool)
            self._gaps.add(pool)
        if pool in self._marked:
            marks = self._marks[pool]
            marks[pool.inside(dst)] = marks[pool.inside(src)]
            self._spare_padding(pool)
            if pool in self._gaps:
                self._markings += 1

    def freed(self, pool: KvPool, slots: torch.Tensor) -> None:
        """Take in that int64 `slots` were freed: nobody should rely on what they hold."""
        if pool in self._gaps:
            marks, slots = self._marks[pool], pool.inside(slots)
            marks[slots] &= ~_GAP & 0xFF

    def take_back(self, findings: Findings, groups: Sequence[BufferGroup]) -> Findings:
        """Return what was drained less what was found only because a slot is a gap, or was one a moment ago."""
        rows = [row for row in findings.rows if not self._is_gap(groups[row.group - 1].pool, row)]
        count = len(findings.rows) - len(rows)
        if not count:
            return findings
        # The rows that read them are to be looked through again.
        self._markings += 1
        self.taken_back += count
        # Of those that the ring had no room for nobody can say.
        total = findings.total - count if rows else 0
        return dataclasses.replace(findings, rows=rows, total=total)

    def _is_gap(self, pool: KvPool, row: ViolationRow) -> bool:
        """Whether a violation row says no more than that a gap has no record."""
        marks, slot = self._marks[pool], row.slot
        if row.reasons != Reason.NEVER_WRITTEN or not 0 < slot < len(marks):
            return False
        if pool not in self._marked and pool not in self._behind:
            return False
        return bool(marks[slot] & (_GAP | _TAKEN))

    def tidy(self) -> None:
        """Look whether any mark is left; waits for the device where there were any. Behind a drain that has waited."""
        for pool in list(self._marked):
            marks = self._marks[pool]
            marks &= ~_TAKEN & 0xFF
            mine = marks[: pool.num_slots]
            if not bool((mine & _GAP).any()):
                self._gaps.discard(pool)
            if not bool(mine.any()):
                self._marked.discard(pool)
            if bool(marks[pool.num_slots :].any()):
                self._behind.add(pool)

    def settled(self, pool: KvPool) -> torch.Tensor | None:
        """Return bool [slots] of the engine's slots whose bytes are as recorded for all we know; None: all are."""
        return (self._marks[pool][: pool.num_slots] & _DOUBT) == 0 if pool in self._marked else None

    def without_gaps(self, pool: KvPool, cached: CachedSlots) -> CachedSlots:
        """Return what the prefix cache holds less the slots that have no record."""
        if pool not in self._gaps:
            return cached
        gaps = (self._marks[pool] & _GAP) != 0
        slots, previous = (on_device(x, gaps.device) for x in (cached.slots, cached.previous))
        keep = ~gaps[pool.inside(slots)]
        broken = (previous > 0) & gaps[pool.inside(previous)]
        return CachedSlots(
            group=cached.group,
            slots=slots[keep],
            positions=on_device(cached.positions, gaps.device)[keep],
            previous=torch.where(broken, UNCHECKED, previous)[keep],
        )

    def take_in(self, group: BufferGroup, table: torch.Tensor, requests: Sequence[ForwardRequest]) -> None:
        """Record anew what `requests` are about to read in slots that are gaps. Outside any graph.

        Waits for the device where a request comes with positions that nobody has looked at since the last marking;
        rows that go on from where they were cost nothing.

        Raises:
            ValueError: a request does not give the tokens of its prefix.
        """
        if group.pool not in self._gaps:
            return
        looks = self._looks.setdefault(group.name, {})
        new = [r for r in requests if r.prefix_len - r.pending > 0 and not self._has_seen(looks.get(r.row), r)]
        if new:
            self._take_in(group, table, new)
        for r in requests:
            looks[r.row] = (r.owner, r.identity, self._markings, r.prefix_len + r.extend_len)

    def has_gaps(self, pool: KvPool) -> bool:
        """Whether some slot of a pool may be a gap, which `take_in` would take in."""
        return pool in self._gaps

    def look_again(self, rows: Iterable[int]) -> None:
        """Take in that what these rows of the tables name may have changed, by the engine's prefix cache, say."""
        for looks in self._looks.values():
            for row in rows:
                looks.pop(row, None)

    def _has_seen(self, look: _Look | None, request: ForwardRequest) -> bool:
        return (
            look is not None
            and look[:3] == (request.owner, request.identity, self._markings)
            and (request.prefix_len <= look[3])
        )

    def _take_in(self, group: BufferGroup, table: torch.Tensor, requests: Sequence[ForwardRequest]) -> None:
        device, pool = self._context.device, group.pool
        there = [r.prefix_len - r.pending for r in requests]
        plan = VerifyPlan.allocate(verify_cap=max(1, sum(there)), device=device)
        rows, table_rows, prefixes, extends = send(
            device,
            [r.row for r in requests],
            [r.row_in_tables for r in requests],
            there,
            [r.pending + 1 for r in requests],
        )
        ops.plan(
            rows=rows,
            prefix_lens=prefixes,
            extend_lens=extends if any(r.pending for r in requests) else torch.zeros_like(prefixes),
            req_to_token=table,
            table_rows=table_rows,
            page_size=group.page_size,
            window=group.window,
            # As HEAD plans it.
            after_write=any(r.pending for r in requests),
            lut=group.lut,
            verify_plan=plan,
            write_plan=WritePlan.allocate(write_cap=len(requests), device=device),
            status=torch.zeros(1, dtype=torch.int32, device=device),
            backend=self._context.backend,
        )
        valid = torch.arange(len(plan.slots), device=device) < plan.num_valid
        slots = torch.where(valid, pool.inside(plan.slots), 0)
        gaps = ((self._marks[pool][slots] & _GAP) != 0).nonzero().view(-1)
        if not len(gaps):
            return
        slots, positions, rows = slots[gaps], plan.positions[gaps], plan.rows[gaps].to(torch.int64)
        for request in requests:
            mine = (rows == request.row).nonzero().view(-1)
            if len(mine):
                self._record(group, request, slots[mine], positions[mine])
        self._marks[pool][slots] = _TAKEN
        self._spare_padding(pool)

    def _record(
        self, group: BufferGroup, request: ForwardRequest, slots: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Record a request's own tokens at `positions`, with the bytes that lie in `slots`."""
        context, end = self._context, int(positions.max()) + 1
        tokens = list(request.tokens(group.token_offset, end + group.token_offset))
        if len(tokens) != end:
            raise ValueError(
                f"kv-canary: request {request.request_id}: tokens of its prefix must be {end}, got {len(tokens)}"
            )
        out_slots = torch.zeros(end, dtype=torch.int64, device=context.device)
        out_slots[positions] = slots
        record_prefix(context, group, slots=out_slots, tokens=tokens, owner=request.owner, identity=request.identity)
        self.taken_in += len(slots)

    def _spare_padding(self, pool: KvPool) -> None:
        """Take the marks off padding, which nobody relies on: no forward, and nothing that is freed, would ever."""
        self._marks[pool][: pool.first_slot] = 0
