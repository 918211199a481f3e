"""A difference between two results, as what it means: which record, which field, both values, who wrote it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kv_canary.cases.casefile import CaseFile
from kv_canary.cases.comparison import elements_apart, place_in_span, place_of, violation_logs
from kv_canary.constants import BAD_SLOT, HEAD_OF_CHAIN, OWNER_MASK, UNCHECKED, Reason
from kv_canary.difftest.trace import writes_to
from kv_canary.specs.interface import KernelSpec, Leaf, TensorSpec
from kv_canary.specs.structures import RECORDS
from kv_canary.specs.violation_row import VIOLATION_WORDS, ViolationRow

MOST = 20
# Words of a violation row that are words of a record, and which of RECORD_FIELDS.
_RECORD_WORDS = {
    "identity": "IDENTITY",
    "chain": "CHAIN",
    "expected_chain": "CHAIN",
    "kv": "KV",
    "observed_kv": "KV",
    "writer": "WRITER",
}

RECORD_FIELDS = RECORDS.columns
SLOT_CODES = {HEAD_OF_CHAIN: "HEAD_OF_CHAIN", UNCHECKED: "UNCHECKED", BAD_SLOT: "BAD_SLOT"}
# What stands at an index along a size.
_NOUNS = {
    "verify_cap": "entry",
    "entry_cap": "entry",
    "write_cap": "request",
    "bs": "request",
    "num_rows": "row",
    "num_slots": "slot",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """One element that differs.

    Args:
        path: the tensor, as `argument.field`.
        where: the element, in the words of the op.
        byte: its first byte that differs, from the tensor's first on.
        expected, got: both values, decoded.
        writers: programs that wrote it, in order; None where that is not known.
    """

    path: str
    where: str
    byte: int
    expected: str
    got: str
    writers: tuple[str, ...] | None = None


def differences(spec: KernelSpec, file: CaseFile, *, most: int = MOST, trace: bool = True) -> list[Difference]:
    """Return the first `most` elements that differ in a failed case, outputs in the op's order.

    Args:
        trace: also find who wrote each, by running the case in Triton's interpreter.
    """
    found: list[Difference] = []
    rings = {f"{name}.ring" for name in violation_logs(spec)}
    for leaf in spec.leaves(file.arguments):
        if leaf.path not in file.expected or leaf.path not in file.got:
            continue
        expected, got = file.expected[leaf.path], file.got[leaf.path]
        if torch.equal(expected, got):
            continue
        if leaf.path in rings:
            found += _ring_differences(leaf, expected, got)
        else:
            found += _element_differences(leaf, expected, got, most=most)
        if len(found) >= most:
            break
    found = found[:most]
    return _with_writers(spec, file.arguments, found) if trace and found else found


def _element_differences(leaf: Leaf, expected: torch.Tensor, got: torch.Tensor, *, most: int) -> list[Difference]:
    like, item = leaf.tensor, leaf.tensor.element_size()
    width = like.shape[1] if like.dim() == 2 else 1
    packed = len(expected) == like.numel() * item
    stride = like.stride(0) if like.dim() == 2 and not packed else width
    where, say = _meaning(leaf)
    found = []
    for index in elements_apart(leaf, expected, got).tolist()[:most]:
        values = [t[index * item : (index + 1) * item].clone().view(like.dtype)[0].item() for t in (expected, got)]
        row, column = divmod(index, max(stride, 1))
        place = where(row, column) if column < width else f"in the gap after {where(row, width - 1)}"
        if like.dim() > 2:
            place = place_of(like, index) if packed else place_in_span(like, index)
        # Where rows were packed, the byte is that of the tensor as it lies in memory.
        in_memory = (row * like.stride(0) + column) * item if like.dim() == 2 else index * item
        found.append(
            Difference(
                path=leaf.path,
                where=place,
                byte=in_memory,
                expected=say(row, column, values[0]),
                got=say(row, column, values[1]),
            )
        )
    return found


def _ring_differences(leaf: Leaf, expected: torch.Tensor, got: torch.Tensor) -> list[Difference]:
    """Rows of a violation ring that only one side has; a row that both have, but for some words, is one difference."""
    rows = [_rows(expected), _rows(got)]
    missing = list((Counter(rows[0]) - Counter(rows[1])).elements())
    extra = list((Counter(rows[1]) - Counter(rows[0])).elements())
    found = []
    while missing or extra:
        want = missing.pop(0) if missing else None
        have = None
        if extra:
            nearest = max(extra, key=lambda row: _alike(row, want)) if want is not None else extra[0]
            have = nearest
            extra.remove(nearest)
        at = rows[1].index(have) if have is not None else rows[0].index(want) if want is not None else 0
        words = [i for i in range(VIOLATION_WORDS) if want is None or have is None or want[i] != have[i]]
        for word in words if want is not None and have is not None else words[:1]:
            found.append(
                Difference(
                    path=leaf.path,
                    where=f"violation {at}, {ViolationRow._fields[word].replace('_', ' ')}",
                    byte=(at * VIOLATION_WORDS + word) * 8,
                    expected="no such row" if want is None else _say_violation(word, want, whole=have is None),
                    got="no such row" if have is None else _say_violation(word, have, whole=want is None),
                )
            )
    return found


def _rows(ring: torch.Tensor) -> list[ViolationRow]:
    return [ViolationRow._make(words) for words in ring.view(torch.int64).view(-1, VIOLATION_WORDS).tolist()]


def _alike(row: ViolationRow, other: ViolationRow) -> int:
    return sum(a == b for a, b in zip(row, other, strict=True))


def _say_violation(word: int, row: ViolationRow, *, whole: bool) -> str:
    if whole:
        return f"{_reasons(row.reasons)} at slot {row.slot}, row {row.row}, position {row.position}"
    name = ViolationRow._fields[word]
    if name == "reasons":
        return _reasons(row.reasons)
    if name in _RECORD_WORDS:
        return say_record_word(_RECORD_WORDS[name], row[word])
    return str(row[word])


def _reasons(bits: int) -> str:
    return " + ".join(r.name or "" for r in Reason if bits & r) or str(bits)


def say_record_word(name: str, value: int) -> str:
    """Say what a word of a slot record holds; `value` as int64."""
    bits = value & 0xFFFFFFFFFFFFFFFF
    if name == "IDENTITY":
        return f"token {bits & 0xFFFFFFFF}, position {bits >> 32}"
    if name == "KV":
        return f"K {bits & 0xFFFFFFFF:08x}, V {bits >> 32:08x}"
    if name == "WRITER":
        retired = "retired, " if bits >> 63 else ""
        return f"{retired}step {bits >> 24 & ((1 << 39) - 1)}, owner {bits & OWNER_MASK}"
    return f"{bits:016x}"


def say_slot(value: int) -> str:
    """Say which slot, or which slot code, a plan names."""
    return SLOT_CODES.get(value, f"slot {value}")


Where = Callable[[int, int], str]
Say = Callable[[int, int, Any], str]


def _meaning(leaf: Leaf) -> tuple[Where, Say]:
    """Return how to name an element of this tensor, and how to say its value."""
    spec = leaf.spec
    if spec is None:
        return lambda row, column: f"[{row}]", lambda row, column, value: str(value)
    noun = _noun(leaf, spec)

    def where(row: int, column: int) -> str:
        if len(spec.shape) < 2:
            return noun if spec.shape in ((), (1,)) else f"{noun} {row}"
        line = spec.lines[row] if spec.lines else f"{noun} {row}"
        return f"{line}, {spec.columns[column] if spec.columns else column}"

    def say(row: int, column: int, value: int) -> str:
        name = spec.columns[column] if spec.columns else ""
        if name in RECORD_FIELDS:
            return say_record_word(name, value)
        if spec.flags is not None:
            return " + ".join(bit.name or "" for bit in spec.flags if value & bit) or str(value)
        if spec.index_of.get("num_slots", -1) in (None, column):
            return say_slot(value)
        return f"~{~value}, where a run begins" if name == "position" and value < 0 else str(value)

    return where, say


def _noun(leaf: Leaf, spec: TensorSpec) -> str:
    """Return what a row of the tensor stands for."""
    if spec.columns == RECORD_FIELDS:
        return "record of slot"
    first = spec.shape[0] if spec.shape else 1
    if not isinstance(first, str):
        return leaf.path.split(".")[-1].split("[")[0]
    return _NOUNS.get(first.split("+")[0], first.split("+")[0])


def _with_writers(spec: KernelSpec, bound: Mapping[str, Any], found: list[Difference]) -> list[Difference]:
    try:
        writers = writes_to(spec, bound, [(d.path, d.byte) for d in found])
    except (RuntimeError, ModuleNotFoundError):
        return found
    told = []
    for difference in found:
        writes = [str(w) for w in writers[difference.path, difference.byte]]
        told.append(dataclasses.replace(difference, writers=tuple(dict.fromkeys(writes))))
    return told
