"""The injections themselves, right before a forward or right behind it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kv_canary.constants import Reason, Tag
from kv_canary.errors import must_be
from kv_canary.perturb.slots import ActiveSlot, collect_active_slots, pick_out_cache_loc_slot
from kv_canary.perturb_settings import BYTE_MODES, PerturbConfig
from kv_canary.runtime.batch import ForwardBatch
from kv_canary.runtime.cached import CachedSlots
from kv_canary.runtime.pools import BufferGroup
from kv_canary.specs.structures import KvSource

# What a scrub reports of a changed byte, by what HEAD does.
_SEALED_AS = {Reason.K: Reason.SEAL_K, Reason.V: Reason.SEAL_V}


@dataclass(frozen=True, kw_only=True)
class Injection:
    """An injected fault, and how it must be found.

    Other groups are hit as well where they read the same table, and all are where tokens are swapped.

    Args:
        step: of the forward that it was done before, or behind.
        group: name of the damaged group.
        slots: where it is.
        reasons: what reports at these slots certainly name; none where nothing can see it.
        tag: the launch site that finds it first, or None where none can.
        where: what was done, in words.
        position: of the token whose byte was changed, where one was.
        sampled: whether that byte is of those that the slot's record has a fingerprint of.
    """

    step: int
    group: str
    slots: frozenset[int]
    reasons: Reason
    tag: Tag | None
    where: str
    position: int | None = None
    sampled: bool = True


class Perturber:
    """Injects faults as a configuration says.

    The tables, tokens and bytes that it changes are the engine's own. It reads them on the host, which waits for the
    device, in those steps only in which an injection is due.

    Args:
        config: what and when.
        groups: those that there are.

    Raises:
        ValueError: the configuration names a group that is not there, or bytes that no group has.
    """

    def __init__(self, config: PerturbConfig, groups: Sequence[BufferGroup]) -> None:
        known = {g.name: g for g in groups}
        # Of groups that share a pool, a scrub reports under the last.
        self._scrubbed_as = {g.pool: g.sweep_tag for g in groups}
        if config.group and config.group not in known:
            raise ValueError(must_be("PerturbConfig", "group", f"one of {', '.join(known)}", repr(config.group)))
        self.config = config
        self.groups = [known[config.group]] if config.group else list(groups)
        if config.mode in BYTE_MODES:
            self.groups = [g for g in self.groups if self._halves(g)]
            if not self.groups:
                got = f"group {config.group!r}, half {config.half!r}, layer {config.layer}"
                raise ValueError(must_be("PerturbConfig", "group, half and layer", "bytes that there are", got))
        self.injections: list[Injection] = []
        self._rng = random.Random(config.seed)
        self._undo: list[Callable[[], None]] = []

    # The engine's tensors may have been made in inference mode, and can then be changed nowhere else.
    @torch.inference_mode()
    def before(
        self,
        batch: ForwardBatch,
        *,
        step: int,
        checks_inputs: bool = False,
        cached: Callable[[], Sequence[CachedSlots]] = tuple,
    ) -> None:
        """Inject what belongs before a forward, once its tails are up to the prefix.

        Args:
            batch: the forward.
            step: its number.
            checks_inputs: whether it is known which tokens the model should be given.
            cached: returns what the prefix cache holds; called for "real_kv_unused_cache".
        """
        if self._undo and step != self.injections[-1].step:
            # That forward was lost between its begin and its end.
            self.restore()
        if not self._due(step):
            return
        groups = [g for g in self.groups if g.name in batch.tables]
        match self.config.mode:
            case "req_to_token":
                self._swap_entries(batch, groups, step)
            case "real_kv_used":
                self._flip_one((a for g in groups for a in collect_active_slots(batch, g)), step)
            case "real_kv_unused_cache":
                self._flip_idle(batch, groups, cached(), step)
            case "next_token_swap":
                self._swap_tokens(batch, groups, step, checks_inputs=checks_inputs)

    @torch.inference_mode()
    def after(self, batch: ForwardBatch, *, step: int) -> None:
        """Undo what was for one forward only; inject what belongs behind one, TAIL included."""
        self.restore()
        if self.config.mode == "real_kv_post_forward" and self._due(step):
            written = [pick_out_cache_loc_slot(batch, g, self._rng) for g in self.groups if g.name in batch.out_slots]
            self._flip_one((a for a in written if a is not None), step)

    @torch.inference_mode()
    def restore(self) -> None:
        """Undo what was for one forward only, because the forward is over or was given up."""
        while self._undo:
            self._undo.pop()()

    def _due(self, step: int) -> bool:
        config = self.config
        if step <= config.warm_up or (config.count and len(self.injections) >= config.count):
            return False
        return not self.injections or step >= self.injections[-1].step + config.every

    def _swap_entries(self, batch: ForwardBatch, groups: Sequence[BufferGroup], step: int) -> None:
        """Make two positions of a request name each other's slots."""
        by_request: dict[tuple[str, int], list[ActiveSlot]] = {}
        for group in groups:
            for active in collect_active_slots(batch, group):
                by_request.setdefault((group.name, active.request.row), []).append(active)
        choices = [slots for slots in by_request.values() if len({_entry_of(s) for s in slots}) > 1]
        if not choices:
            return
        slots = self._rng.choice(choices)
        first = self._rng.choice(slots)
        second = self._rng.choice([s for s in slots if _entry_of(s) != _entry_of(first)])
        group, request = first.group, first.request
        table, row = batch.tables[group.name], request.row_in_tables
        holder, index = table[row], [active.position // group.page_size for active in (first, second)]
        if group.lut is not None:
            # Its table is another group's as well: the LUT is this one's alone.
            index = [int(group.slots_named(table, row, active.position)) for active in (first, second)]
            holder = group.lut
        self._swap(holder, index)
        where = f"positions {first.position} and {second.position} of {request.request_id} swapped"
        # With a page, all that lies in it changes places: what is read at a position is what was at the other.
        named = {first.slot, second.slot}
        if group.lut is None and group.page_size > 1:
            pages = {slot // group.page_size for slot in named}
            named = {a.slot for a in slots if a.slot // group.page_size in pages}
        self._note(group, named, Reason.POSITION, group.head_tag, step=step, where=where)

    def _swap_tokens(
        self, batch: ForwardBatch, groups: Sequence[BufferGroup], step: int, *, checks_inputs: bool
    ) -> None:
        """Give two requests each other's next token."""
        if batch.input_ids is None or not groups:
            return
        ends = list(accumulate(r.extend_len for r in batch.requests))
        ids = batch.input_ids.tolist()
        last = [end - 1 for end, r in zip(ends, batch.requests, strict=True) if r.extend_len and r.prefix_len]
        pairs = [(a, b) for i, a in enumerate(last) for b in last[i + 1 :] if ids[a] != ids[b]]
        if not pairs:
            return
        pair = self._rng.choice(pairs)
        self._swap(batch.input_ids, list(pair))
        group = self._rng.choice(list(groups))
        slots = set(batch.out_slots[group.name][list(pair)].tolist()) - {0}
        # Else it shows when the next token follows: the record is not what the request's own tokens imply.
        reason = Reason.WRITE_TOKEN if checks_inputs else Reason.PREFIX
        tag = group.tail_tag if group.pool.head_records is None else group.head_tag
        self._note(group, slots, reason, tag, step=step, where=f"tokens {pair[0]} and {pair[1]} of the forward swapped")

    def _swap(self, holder: torch.Tensor, index: list[int]) -> None:
        """Exchange two elements until the forward is over; what the engine has changed by then stays."""
        kept = holder[index].clone()
        swapped = kept.flip(0)
        holder[index] = swapped

        def undo() -> None:
            now = holder[index]
            holder[index] = torch.where(now == swapped, kept, now)

        self._undo.append(undo)

    def _flip_one(self, choices: Iterable[ActiveSlot], step: int) -> None:
        active = self._rng.choice([a for a in choices if self._halves(a.group, a.position)] or [None])
        if active is not None:
            group = active.group
            # HEAD's own records have no bytes. What is damaged behind TAIL is seen in the next forward.
            tag = group.head_tag if group.pool.head_records is None else group.tail_tag
            self._flip_bit(group, active.slot, active.position, tag, step=step, whose=active.request.request_id)

    def _flip_idle(
        self, batch: ForwardBatch, groups: Sequence[BufferGroup], cached: Sequence[CachedSlots], step: int
    ) -> None:
        known = {g.name: g for g in groups}
        idle = []
        for part in cached:
            group = known.get(part.group)
            if group is None:
                continue
            used = {s.slot for s in collect_active_slots(batch, group)} | set(batch.out_slots[group.name].tolist())
            found = zip(part.slots.tolist(), part.positions.tolist(), strict=True)
            idle += [(group, slot, at) for slot, at in found if slot not in used and self._halves(group, at)]
        if idle:
            group, slot, position = self._rng.choice(idle)
            self._flip_bit(group, slot, position, group.sweep_tag, step=step, whose="the prefix cache")

    def _halves(self, group: BufferGroup, position: int | None = None) -> list[tuple[str, Reason, KvSource]]:
        """Return the halves of a group in which a bit may flip: at a position, or at any."""
        config, found = self.config, []
        for name, reason, source in (("K", Reason.K, group.pool.k_source), ("V", Reason.V, group.pool.v_source)):
            if source is None or config.half not in ("", name):
                continue
            layer = config.layer
            if layer is not None:
                if layer >= len(source.layers):
                    continue
                if position is not None and config.covered_only and source.coverage(position)[0] != layer:
                    continue
            found.append((name, reason, source))
        return found

    def _flip_bit(self, group: BufferGroup, slot: int, position: int, tag: Tag, *, step: int, whose: str) -> None:
        name, reason, source = self._rng.choice(self._halves(group, position))
        covered, start, end = source.coverage(position)
        layer, first, last = covered, start, end
        if not self.config.covered_only:
            layer = self._rng.randrange(len(source.layers)) if self.config.layer is None else self.config.layer
            first, last = 0, source.bytes_per_token
        byte = self._rng.randrange(first, last)
        bytes_of(source, slot, layer)[byte] ^= 1 << self._rng.randrange(8)
        sampled = layer == covered and start <= byte < end
        found_by: Tag | None = tag
        if not sampled:
            sealed = group.pool.seals is not None
            reason = _SEALED_AS[reason] if sealed else Reason(0)
            found_by = self._scrubbed_as[group.pool] if sealed else None
        names = group.pool.layer_names
        layer_name = names[layer] if layer < len(names) else f"layer {layer}"
        where = f"{name} of {layer_name}, byte {byte}, position {position} of {whose}"
        self._note(group, {slot}, reason, found_by, step=step, where=where, position=position, sampled=sampled)

    def _note(
        self,
        group: BufferGroup,
        slots: Iterable[int],
        reasons: Reason,
        tag: Tag | None,
        *,
        step: int,
        where: str,
        position: int | None = None,
        sampled: bool = True,
    ) -> None:
        self.injections.append(
            Injection(
                step=step,
                group=group.name,
                slots=frozenset(slots),
                reasons=reasons,
                tag=tag,
                where=where,
                position=position,
                sampled=sampled,
            )
        )


def bytes_of(source: KvSource, slot: int, layer: int) -> torch.Tensor:
    """Return the bytes of a slot's token in a layer, uint8 [bytes_per_token], as a view."""
    row, offset = divmod(slot - source.slot_bias, source.page_size)
    start = source.offset_bytes + offset * source.token_stride_bytes
    return source.layers[layer][row].reshape(-1).view(torch.uint8)[start : start + source.bytes_per_token]


def _entry_of(active: ActiveSlot) -> int:
    """Return what names the slot: its page, or with a LUT its place in that."""
    return active.slot if active.group.lut is not None else active.slot // active.group.page_size
