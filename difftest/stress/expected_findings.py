"""An engine that works out from its own books what a canary must say of an injected fault, and what it may say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kv_canary.config import CanaryConfig
from kv_canary.constants import Reason, Tag
from kv_canary.difftest.simulator import EngineConfig
from kv_canary.difftest.simulator.canary_engine import CanaryEngine
from kv_canary.difftest.simulator.groups import Group
from kv_canary.perturb import Injection, PerturbConfig
from kv_canary.reports import ViolationReport
from kv_canary.runtime.batch import ForwardBatch
from kv_canary.runtime.composition import ForwardRequest
from kv_canary.runtime.pools import BufferGroup


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place that a report names: the step and launch site, and the row, position and slot verified or written."""

    step: int
    tag: str
    row: int
    position: int
    slot: int


NOTHING = Reason(0)
# What HEAD, TAIL and sweeps report of changed bytes; and what a scrub does.
SAMPLED, SEALED = Reason.K | Reason.V, Reason.SEAL_K | Reason.SEAL_V
SEALED_AS = {Reason.K: Reason.SEAL_K, Reason.V: Reason.SEAL_V}
# The slot of each cached position, by row.
Slots = dict[int, list[int]]


class FaultyEngine(CanaryEngine):
    """A healthy engine into which one fault is injected, and every consequence that the fault has for a canary.

    It follows damaged bytes and records from slot to slot by the engine's own books, never by the canary's records:
    through shared prefixes, forks and compaction, until the slot is written again; its seal is there until the slot is
    freed. `required` holds, of every entry that a forward, a sweep or a scrub relies on and that the fault has made
    wrong, the reasons that its report cannot lack; `allowed`, those that it can have. A report that is not in `allowed`
    blames what is not to blame.

    All of it is for a canary that verifies every position in every step.

    Args:
        config: the engine's; owners must be serial numbers.
        canary: the canary's; without quarantine.
        perturb: the fault; one injection.
        device: see `CanaryEngine`.
    """

    def __init__(
        self, config: EngineConfig, *, canary: CanaryConfig, perturb: PerturbConfig, device: torch.device | str = "cpu"
    ) -> None:
        self.reports: list[ViolationReport] = []
        super().__init__(config, canary=canary, perturb=perturb, device=device, on_report=self.reports.append)
        self.required: dict[Place, Reason] = {}
        self.allowed: dict[Place, Reason] = {}
        self.buffer_groups = {g.name: g for g in self.manager.groups}
        # Whether a forward or a sweep has read changed bytes, which it may not have sampled.
        self.was_read = False
        # By group: slots whose bytes were changed and how that can be reported, and slots whose records are of a token
        # that is not theirs.
        self.bytes: dict[str, dict[int, Reason]] = {name: {} for name in self.buffer_groups}
        self.records: dict[str, set[int]] = {name: set() for name in self.buffer_groups}
        self._noted = 0
        self._healthy: dict[str, Slots] = {}
        self._named: dict[str, Slots] = {}
        # Flat indices of tokens that the model is given wrongly.
        self._wrong_inputs: frozenset[int] = frozenset()
        self.before_forward, self.during_forward, self.after_forward = self._before, self._during, self._after

    @property
    def injection(self) -> Injection | None:
        """The injected fault; None as long as there is none."""
        perturber = self.manager.perturber
        return perturber.injections[0] if perturber is not None and perturber.injections else None

    def move(self, group: Group, src: Sequence[int], dst: Sequence[int], *, owner: int) -> Iterator[Any]:
        yield from super().move(group, src, dst, owner=owner)
        if src and len(set(dst)) == len(dst):
            damaged, wrong = self.bytes[group.name], self.records[group.name]
            copied = {d: damaged[s] for s, d in zip(src, dst, strict=True) if s in damaged}
            wrong_too = {d for s, d in zip(src, dst, strict=True) if s in wrong}
            self._heal(group.name, dst)
            damaged.update(copied)
            wrong.update(wrong_too)

    def retire(self, group: Group, slots: Sequence[int], *, owner: int) -> Iterator[Any]:
        yield from super().retire(group, slots, owner=owner)
        damaged = self.bytes[group.name]
        damaged.update({slot: damaged[slot] & ~SEALED for slot in slots if slot in damaged})

    def scrub(self) -> None:
        """Sweep, and hold every slot against its seal, between two forwards."""
        self._sweep()
        self._scrub(must=True)
        self.manager.scrub()

    def flush(self) -> None:
        super().flush()
        for name in self.buffer_groups:
            self.bytes[name].clear()
            self.records[name].clear()

    def _before(self, batch: ForwardBatch) -> None:
        self._healthy = self._slots(batch)

    def _during(self, batch: ForwardBatch) -> None:
        """Work out what HEAD must say; it has just verified what the model is about to read."""
        self._named = self._slots(batch)
        self._note_damage()
        self._wrong_inputs = frozenset()
        if self.injection is not None and self.injection.step == self.manager.step:
            self._wrong_inputs = frozenset(_differences(self._inputs(batch), batch.input_ids))
        for group in self.buffer_groups.values():
            apart = group.pool.head_records is not None
            self._verify(batch, group, group.head_tag, with_bytes=not apart)
            if apart:
                self._write(batch, group, group.head_tag)
            # TAIL writes once the model is through; of the seeds it says what is so now.
            self._write(batch, group, group.tail_tag)

    def _after(self, batch: ForwardBatch) -> None:
        """Work out what TAIL must say, and a sweep; the model and TAIL have written."""
        config = self.manager.config
        for name, group in self.buffer_groups.items():
            slots = batch.out_slots[name].tolist()
            self._heal(name, slots)
            self.records[name].update({slots[i] for i in self._wrong_inputs} - {0})
            with_bytes = config.verify_bytes_at_tail or group.pool.head_records is not None
            self._verify(batch, group, group.tail_tag, with_bytes=with_bytes, at_tail=True)
        self._note_damage()
        if config.sweep_every and self.manager.step % config.sweep_every == 0:
            self._sweep()
        # How far a piece of a scrub has come is a matter of time.
        self._scrub(must=False)

    def _verify(
        self, batch: ForwardBatch, group: BufferGroup, tag: Tag, *, with_bytes: bool, at_tail: bool = False
    ) -> None:
        """Work out what a launch of verify finds of the positions that the requests rely on."""
        name = group.name
        healthy, named = self._healthy[name], self._named[name]
        damaged, wrong = self.bytes[name], self.records[name]
        for request in batch.requests:
            row = request.row
            first = _first_verified(request, group, at_tail=at_tail)
            for position in range(first, request.prefix_len):
                slot = named[row][position]
                must = may = NOTHING
                if slot == 0:
                    # The other entry's page has left this group's window: its LUT has no slot for it.
                    self._note(tag, row, position, slot, must=Reason.UNMAPPED)
                    continue
                if slot != healthy[row][position]:
                    must |= Reason.POSITION
                    may |= Reason.POSITION | Reason.TOKEN | Reason.CHAIN
                if slot in wrong:
                    must |= Reason.TOKEN if self.manager.state.token_pool is not None else NOTHING
                    may |= Reason.TOKEN | Reason.CHAIN
                self.was_read |= slot in damaged
                if with_bytes and slot in damaged:
                    must |= damaged[slot] & SAMPLED
                if position > first:
                    before = named[row][position - 1]
                    if before in wrong:
                        must |= Reason.CHAIN
                    if before != healthy[row][position - 1]:
                        may |= Reason.CHAIN
                self._note(tag, row, position, slot, must=must, may=may)

    def _write(self, batch: ForwardBatch, group: BufferGroup, tag: Tag) -> None:
        """Work out what a launch of write finds of the requests' seeds and of their new tokens."""
        name, at = group.name, 0
        slots = batch.out_slots[name].tolist()
        oracle = batch.expected_input_ids is not None or self.manager.config.check_inputs
        for request in batch.requests:
            row, last = request.row, request.prefix_len - 1
            if request.extend_len and last >= 0:
                seed = self._named[name][row][last]
                if seed and (seed != self._healthy[name][row][last] or seed in self.records[name]):
                    self._note(tag, row, last, seed, must=Reason.PREFIX)
            for k in range(request.extend_len):
                position, slot = request.prefix_len + k, slots[at]
                if at in self._wrong_inputs:
                    # A shared slot may have held another's token, which was the right one.
                    must = Reason.WRITE_TOKEN if oracle else NOTHING
                    self._note(tag, row, position, slot, must=must, may=Reason.OVERWRITE)
                elif slot in self.records[name]:
                    self._note(tag, row, position, slot, may=Reason.OVERWRITE)
                at += 1

    def _sweep(self) -> None:
        """Work out what a sweep finds of what the prefix cache holds."""
        for part in self.cached_slots():
            damaged, wrong = self.bytes[part.group], self.records[part.group]
            tag = self.buffer_groups[part.group].sweep_tag
            columns = (part.slots.tolist(), part.positions.tolist(), part.previous.tolist())
            for slot, position, previous in zip(*columns, strict=True):
                self.was_read |= slot in damaged
                must = damaged.get(slot, NOTHING) & SAMPLED | (Reason.CHAIN if previous in wrong else NOTHING)
                self._note(tag, 0, position, slot, must=must, may=Reason.CHAIN if slot in wrong else NOTHING)

    def _scrub(self, *, must: bool) -> None:
        """Work out what a scrub finds of the slots that it holds against their seals: all of them, or it may be any."""
        injection = self.injection
        if injection is None or injection.position is None:
            return
        for name, damaged in self.bytes.items():
            for slot, how in damaged.items():
                reasons, tag = how & SEALED, self.buffer_groups[name].sweep_tag
                self._note(tag, 0, injection.position, slot, must=reasons if must else NOTHING, may=reasons)

    def _note(
        self, tag: Tag, row: int, position: int, slot: int, *, must: Reason = NOTHING, may: Reason = NOTHING
    ) -> None:
        if not must and not may:
            return
        place = Place(step=self.manager.step, tag=tag.name, row=row, position=position, slot=slot)
        if must:
            self.required[place] = self.required.get(place, NOTHING) | must
        self.allowed[place] = self.allowed.get(place, NOTHING) | must | may

    def _note_damage(self) -> None:
        """Take in the bytes that were flipped since the last look."""
        injections = [] if self.manager.perturber is None else self.manager.perturber.injections
        for injection in injections[self._noted :]:
            if injection.position is not None:
                how = injection.reasons
                if injection.sampled and self.buffer_groups[injection.group].pool.seals is not None:
                    how |= SEALED_AS[how]
                self.bytes[injection.group].update(dict.fromkeys(injection.slots, how))
        self._noted = len(injections)

    def _heal(self, group: str, slots: Sequence[int]) -> None:
        """Forget the damage of slots that have been written, bytes and record."""
        for slot in slots:
            self.bytes[group].pop(slot, None)
        self.records[group].difference_update(slots)

    def _slots(self, batch: ForwardBatch) -> dict[str, Slots]:
        """Return the slots that the tables name now, by group."""
        found: dict[str, Slots] = {}
        for name, group in self.buffer_groups.items():
            table = batch.tables[name]
            named = {r.row: table[r.row, : r.prefix_len].long() for r in batch.requests}
            found[name] = {row: (s if group.lut is None else group.lut[s]).tolist() for row, s in named.items()}
        return found

    def _inputs(self, batch: ForwardBatch) -> list[int]:
        """Return the tokens that the model should be given: the requests' own."""
        offset = self.config.token_offset
        ends = [(r, r.prefix_len + offset) for r in batch.requests]
        return [token for r, start in ends for token in r.tokens(start, start + r.extend_len)]


def unexplained(engine: FaultyEngine) -> list[ViolationReport]:
    """Return the reports that no consequence of the fault explains."""
    return [r for r in engine.reports if not _reasons(r) or _reasons(r) & ~engine.allowed.get(place_of(r), NOTHING)]


def unreported(engine: FaultyEngine) -> list[Place]:
    """Return the places that lack a report, or whose report lacks a reason that it must have."""
    said: dict[Place, Reason] = {}
    for report in engine.reports:
        said[place_of(report)] = said.get(place_of(report), NOTHING) | _reasons(report)
    return [place for place, must in engine.required.items() if must & ~said.get(place, NOTHING)]


def place_of(report: ViolationReport) -> Place:
    """Return where a report points."""
    return Place(step=report.step, tag=report.tag, row=report.row, position=report.position, slot=report.slot)


def _reasons(report: ViolationReport) -> Reason:
    result = NOTHING
    for name in report.reasons:
        result |= Reason[name]
    return result


def _first_verified(request: ForwardRequest, group: BufferGroup, *, at_tail: bool) -> int:
    """Return the first position that is verified: of a ring TAIL verifies what the step has left of it."""
    if not group.window:
        return 0
    if at_tail and group.ring:
        return max(0, request.prefix_len + request.extend_len - group.window - 1)
    return max(0, request.prefix_len - group.window)


def _differences(expected: Sequence[int], got: torch.Tensor | None) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(expected, [] if got is None else got.tolist(), strict=False)) if a != b]


def first_steps(places: Mapping[Place, Reason], slots: frozenset[int]) -> dict[str, int]:
    """Return the first step in which each launch site could see a fault at `slots`, by tag."""
    first: dict[str, int] = {}
    for place in places:
        if place.slot in slots:
            first[place.tag] = min(place.step, first.get(place.tag, place.step))
    return first
