"""The injections themselves, right before a forward or right behind it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kv_canary.constants import Reason, Tag
from kv_canary.forward import ForwardBatch
from kv_canary.perturb.config import PerturbConfig
from kv_canary.perturb.slots import ActiveSlot, collect_active_slots, pick_out_cache_loc_slot
from kv_canary.pools import BufferGroup
from kv_canary.specs.structures import KvSource
from kv_canary.sweep import CachedSlots


@dataclass(frozen=True, kw_only=True)
class Injection:
    """What was done, and how it must be found.

    Args:
        step: of the forward that it was done before, or behind.
        group: name of the damaged group.
        slots: where it is.
        reasons: each report of it names one of these or more, and the first of them names all that are certain.
        tag: the launch site that finds it first.
        where: what was done, in words.
    """

    step: int
    group: str
    slots: frozenset[int]
    reasons: Reason
    tag: Tag
    where: str


class Perturber:
    """Injects faults as a configuration says.

    Args:
        config: what and when.
        groups: those that there are.

    Raises:
        ValueError: the configuration names a group that is not there.
    """

    def __init__(self, config: PerturbConfig, groups: Sequence[BufferGroup]) -> None:
        known = {g.name: g for g in groups}
        if config.group and config.group not in known:
            raise ValueError(f"kv-canary: PerturbConfig: group must be one of {', '.join(known)}, got {config.group!r}")
        self.config = config
        self.groups = [known[config.group]] if config.group else list(groups)
        self.injections: list[Injection] = []
        self._rng = random.Random(config.seed)
        self._undo: list[Callable[[], None]] = []

    def before(self, batch: ForwardBatch, *, step: int, cached: Sequence[CachedSlots] = ()) -> ForwardBatch:
        """Inject what belongs before a forward; return the batch as the model is to get it.

        Args:
            batch: the forward.
            step: its number.
            cached: what the prefix cache holds, for "real_kv_unused_cache".
        """
        if not self._due(step):
            return batch
        match self.config.mode:
            case "req_to_token":
                self._swap_entries(batch, step)
            case "real_kv_used":
                self._flip(self._pick(collect_active_slots(batch, g) for g in self.groups), step, at_tail=False)
            case "real_kv_unused_cache":
                self._flip_idle(batch, cached, step)
            case "next_token_swap":
                return self._swap_tokens(batch, step)
        return batch

    def after(self, batch: ForwardBatch | None, *, step: int) -> None:
        """Undo what was for one forward only; inject what belongs behind one, TAIL included."""
        while self._undo:
            self._undo.pop()()
        if batch is not None and self.config.mode == "real_kv_post_forward" and self._due(step):
            written = [pick_out_cache_loc_slot(batch, g, self._rng) for g in self.groups]
            self._flip(self._pick([[slot for slot in written if slot is not None]]), step, at_tail=True)

    def _due(self, step: int) -> bool:
        config = self.config
        if step <= config.warm_up or (config.count and len(self.injections) >= config.count):
            return False
        return not self.injections or step >= self.injections[-1].step + config.every

    def _pick(self, choices: object) -> ActiveSlot | None:
        slots = [slot for part in choices for slot in part]  # type: ignore[attr-defined]
        return self._rng.choice(slots) if slots else None

    def _swap_entries(self, batch: ForwardBatch, step: int) -> None:
        """Let two positions of a request name each other's slots, until the forward is over."""
        group = self._rng.choice(self.groups)
        by_request: dict[int, list[ActiveSlot]] = {}
        for active in collect_active_slots(batch, group):
            by_request.setdefault(active.request.row, []).append(active)
        pairs = [slots for slots in by_request.values() if len({s.slot for s in slots}) > 1]
        if not pairs:
            return
        slots = self._rng.choice(pairs)
        first = self._rng.choice(slots)
        second = self._rng.choice([s for s in slots if s.slot != first.slot])
        holder = batch.tables[group.name][first.request.row]
        index = [first.position, second.position]
        if group.lut is not None:
            # Its tables are another group's as well: the LUT is this one's alone.
            index, holder = holder[index].tolist(), group.lut
        kept = holder[index].clone()
        holder[index] = kept.flip(0)

        def undo() -> None:
            holder[index] = kept

        self._undo.append(undo)
        where = f"positions {first.position} and {second.position} of {first.request.request_id} swapped"
        self._note(step, group, {first.slot, second.slot}, Reason.POSITION, at_tail=False, where=where)

    def _swap_tokens(self, batch: ForwardBatch, step: int) -> ForwardBatch:
        """Give two requests each other's next token."""
        if batch.input_ids is None:
            return batch
        offsets = [0]
        for request in batch.requests:
            offsets.append(offsets[-1] + request.extend_len)
        ids = batch.input_ids.clone()
        ends = [offsets[i + 1] - 1 for i, r in enumerate(batch.requests) if r.extend_len and r.prefix_len]
        pairs = [(a, b) for a in ends for b in ends if a < b and int(ids[a]) != int(ids[b])]
        if not pairs:
            return batch
        a, b = self._rng.choice(pairs)
        ids[[a, b]] = ids[[b, a]]
        group = self._rng.choice(self.groups)
        slots = {int(batch.out_slots[group.name][i]) for i in (a, b)} - {0}
        where = f"tokens {a} and {b} of the forward swapped"
        self._note(step, group, slots, Reason.WRITE_TOKEN, at_tail=True, where=where)
        return dataclasses.replace(batch, input_ids=ids)

    def _flip_idle(self, batch: ForwardBatch, cached: Sequence[CachedSlots], step: int) -> None:
        groups = {g.name: g for g in self.groups}
        idle = []
        for part in cached:
            group = groups.get(part.group)
            if group is None:
                continue
            used = {s.slot for s in collect_active_slots(batch, group)} | set(batch.out_slots[group.name].tolist())
            found = zip(part.slots.tolist(), part.positions.tolist(), strict=True)
            idle += [(group, slot, position) for slot, position in found if slot not in used]
        if idle:
            group, slot, position = self._rng.choice(idle)
            self._flip_bit(group, slot, position, step, tag=group.sweep_tag, whose="the prefix cache")

    def _flip(self, active: ActiveSlot | None, step: int, *, at_tail: bool) -> None:
        if active is not None:
            # What is damaged behind TAIL is seen by the HEAD of the next forward.
            group = active.group
            self._flip_bit(
                group, active.slot, active.position, step, tag=group.head_tag, whose=active.request.request_id
            )

    def _flip_bit(self, group: BufferGroup, slot: int, position: int, step: int, *, tag: Tag, whose: str) -> None:
        halves = [
            (name, reason, source)
            for name, reason, source in (
                ("K", Reason.K, group.pool.k_source),
                ("V", Reason.V, group.pool.v_source),
            )
            if source is not None
        ]
        if not halves:
            return
        name, reason, source = self._rng.choice(halves)
        layer, start, end = source.coverage(position)
        if not self.config.covered_only:
            layer, start, end = self._rng.randrange(len(source.layers)), 0, source.bytes_per_token
        byte = self._rng.randrange(start, end)
        bytes_of(source, slot, layer)[byte] ^= 1 << self._rng.randrange(8)
        where = f"{name} of layer {layer}, byte {byte}, position {position} of {whose}"
        self.injections.append(
            Injection(step=step, group=group.name, slots=frozenset({slot}), reasons=reason, tag=tag, where=where)
        )

    def _note(
        self, step: int, group: BufferGroup, slots: set[int], reasons: Reason, *, at_tail: bool, where: str
    ) -> None:
        tag = group.tail_tag if at_tail else group.head_tag
        self.injections.append(
            Injection(step=step, group=group.name, slots=frozenset(slots), reasons=reasons, tag=tag, where=where)
        )


def bytes_of(source: KvSource, slot: int, layer: int) -> torch.Tensor:
    """Return the bytes of a slot's token in a layer, uint8 [bytes_per_token], as a view."""
    row, offset = divmod(slot - source.slot_bias, source.page_size)
    start = source.offset_bytes + offset * source.bytes_per_token
    return source.layers[layer][row].reshape(-1).view(torch.uint8)[start : start + source.bytes_per_token]
