"""Corruption: what goes wrong in engines, done to a healthy one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kv_canary.constants import RETIRED_BIT, to_signed
from kv_canary.difftest.simulator.kv_bytes import flip_bit
from kv_canary.difftest.simulator.op_calls import Call
from kv_canary.specs import get_spec
from kv_canary.specs.interface import Leaf

if TYPE_CHECKING:
    from kv_canary.difftest.simulator.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Change:
    """One element of one input that will differ in the next step's calls of an op.

    Args:
        op: the op.
        path: the tensor, as `argument.field`; None: the `pick`-th of the call's integer inputs.
        pick: which element, counted round.
        value: what it becomes, or is changed by where `add` is true.
        add: the value is added.
    """

    op: str
    path: str | None = None
    pick: int = 0
    value: int = 0
    add: bool = False

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        spec = get_spec(self.op)
        inputs = [leaf.path for leaf in spec.leaves(arguments) if _can_change(leaf)]
        path = inputs[self.pick % len(inputs)] if self.path is None else self.path
        return spec.map_tensors(arguments, lambda leaf: self._changed(leaf) if leaf.path == path else leaf.tensor)

    def _changed(self, leaf: Leaf) -> torch.Tensor:
        if not _can_change(leaf):
            return leaf.tensor
        copy = torch.empty_strided(leaf.tensor.shape, leaf.tensor.stride(), dtype=leaf.tensor.dtype)
        copy.copy_(leaf.tensor)
        # Tables have one or two dimensions.
        at = divmod(self.pick % copy.numel(), copy.shape[-1])[2 - copy.dim() :]
        value = to_signed(self.value + int(copy[at]) if self.add else self.value)
        bits = 8 * copy.element_size()
        copy[at] = (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
        return copy


def with_changes(call: Call, changes: Sequence[Change]) -> Call:
    """Return `call` with those of `changes` that are of its op."""
    mine = [c for c in changes if c.op == call.op]
    if not mine:
        return call

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        for each in mine:
            arguments = each(arguments)
        return arguments

    return replace(call, change=change)


def corrupt(engine: Engine, kind: str, *, pick: int, value: int) -> None:
    """Do one of FAULTS to `engine`, which is not healthy from then on, and to all its memories alike.

    Args:
        engine: the engine; what it does not have (a LUT, say) cannot be hit, and nothing happens.
        kind: which fault.
        pick: where, counted round.
        value: what is put there, or which of several things is done.
    """
    engine.healthy = False
    FAULTS[kind](engine, pick, value)


def _table_entry(engine: Engine, pick: int, value: int) -> None:
    """A table names another slot, or none at all."""
    group = engine.groups[pick % len(engine.groups)]
    for request in _picked(engine, pick):
        value = min(max(value, -(1 << 31)), (1 << 31) - 1)
        group.table[request.row, pick % max(request.cached, 1)] = value


def _unmap(engine: Engine, pick: int, value: int) -> None:
    """A position that a request relies on has lost its slot."""
    group = engine.groups[pick % len(engine.groups)]
    for request in _picked(engine, pick):
        if request.cached:
            position = request.cached - 1 - value % min(request.cached, group.config.window or request.cached)
            if group.lut is None:
                group.table[request.row, position] = 0
            else:
                group.lut[engine.pages.slots(request.pages)[position]] = 0


def _swap(engine: Engine, pick: int, value: int) -> None:
    """Two entries of a row are swapped."""
    group = engine.groups[pick % len(engine.groups)]
    for request in _picked(engine, pick):
        if request.cached:
            row, a, b = group.table[request.row], pick % request.cached, value % request.cached
            row[[a, b]] = row[[b, a]]


def _lut_entry(engine: Engine, pick: int, value: int) -> None:
    """The table behind a full slot in use names another slot of the window's pool, or none at all."""
    for group in engine.luts:
        slots = [s for r in engine.running for s in engine.pages.slots(r.pages[engine.first_read(r, group) :])]
        if slots:
            group.lookup[slots[pick % len(slots)]] = to_signed(value)


def _kv_byte(engine: Engine, pick: int, value: int) -> None:
    """A bit of K or V flips in a slot in use."""
    for group in engine.groups:
        for request in _picked(engine, pick):
            slots = [int(s) for s in group.table[request.row, : request.cached]]
            if group.lut is not None:
                slots = [int(group.lut[s]) for s in slots if 0 <= s < len(group.lut)]
            slots = [s for s in slots if 0 < s < group.config.num_slots]
            for source in group.sources if slots else ():
                flip_bit(
                    source,
                    slots[pick % len(slots)],
                    layer=value % len(source.layers),
                    byte=value % source.bytes_per_token,
                    bit=pick % 8,
                )


def _record(engine: Engine, pick: int, value: int) -> None:
    """A record changes: a bit, a word, all of it, or it is retired, or it is swapped with another."""
    name = engine.groups[pick % len(engine.groups)].name
    for memory in engine.memories:
        for records in memory.groups[name].records:
            slot, other = 1 + pick % (len(records) - 1), 1 + abs(value) % (len(records) - 1)
            match value % 5:
                case 0:
                    records[slot, pick % 4] ^= to_signed(1 << (value // 5 % 64))
                case 1:
                    records[slot, pick % 4] = to_signed(value)
                case 2:
                    records[slot] = 0
                case 3:
                    records[slot, 3] |= to_signed(1 << RETIRED_BIT)
                case _:
                    records[[slot, other]] = records[[other, slot]]


def _tail(engine: Engine, pick: int, value: int) -> None:
    """A tail that belongs to other tokens."""
    for memory in engine.memories:
        memory.tails[pick % len(memory.tails)] ^= to_signed(value | 1)


def _double_free(engine: Engine, pick: int, value: int) -> None:
    """A page in use is handed out again."""
    held = sorted(engine.pages.holders)
    if held and not engine.pages.is_free(held[pick % len(held)]):
        engine.pages.free_held(held[pick % len(held)])


def _position(engine: Engine, pick: int, value: int) -> None:
    """The model is given a wrong position."""
    engine.changes.append(Change(op="write", path="positions", pick=pick, value=value % 5 - 2, add=True))


def _out_slot(engine: Engine, pick: int, value: int) -> None:
    """A token is to be stored in another slot, or in none."""
    engine.changes.append(Change(op="write", path="out_slots", pick=pick, value=value))


def _token(engine: Engine, pick: int, value: int) -> None:
    """The model is given a wrong token."""
    engine.changes.append(Change(op="write", path="input_ids", pick=pick, value=1, add=True))


def _argument(engine: Engine, pick: int, value: int) -> None:
    """Any input of any call of a step holds anything."""
    finds = ("verify_prefixes", "verify_resolved") if engine.config.fused and pick % 3 else ("plan", "verify")
    op = (*finds, "write", "chain_tails", "scatter_token_ids")[pick % 5]
    engine.changes.append(Change(op=op, pick=pick // 5, value=value))


FAULTS: Mapping[str, Callable[[Engine, int, int], None]] = {
    "table_entry": _table_entry,
    "unmap": _unmap,
    "swap": _swap,
    "lut_entry": _lut_entry,
    "kv_byte": _kv_byte,
    "record": _record,
    "tail": _tail,
    "double_free": _double_free,
    "position": _position,
    "out_slot": _out_slot,
    "token": _token,
    "argument": _argument,
}


def _picked(engine: Engine, pick: int) -> list[Any]:
    return [engine.running[pick % len(engine.running)]] if engine.running else []


def _can_change(leaf: Leaf) -> bool:
    return leaf.role == "in" and leaf.spec is not None and leaf.tensor.numel() > 0 and leaf.tensor.device.type == "cpu"
