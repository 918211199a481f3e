"""Outcomes of a call, compared byte by byte: what can be wrong with a backend, and where two results differ."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import torch

from kv_canary.specs.interface import KernelSpec, Leaf, StructSpec
from kv_canary.specs.tolerance import distance
from kv_canary.specs.violation_row import VIOLATION_WORDS

Bytes = Mapping[str, torch.Tensor]


class Outcome(StrEnum):
    """Ways in which a backend can be wrong, in the order in which they are looked for."""

    CRASHED = "the process that ran the call died"
    HUNG = "the call did not return in time"
    RAISED = "the call raised an exception"
    GUARD_TOUCHED = "a guard zone around a tensor was written"
    INPUT_CHANGED = "an input was written"
    BYTES_DIFFER = "an output differs from the reference's"
    NOT_REPEATABLE = "the same launch gave another result the second time"
    GRAPH_DIFFERS = "a captured CUDA graph of the launch replays to another result"
    MISUSE_ACCEPTED = "a call that should be refused was not, or not clearly"
    FILE_DIFFERS = "a call that was saved and loaded is another one"


class Mismatch(Exception):  # noqa: N818 - it is what the check is for, not an error of the check
    """A backend failed the differential check.

    Args:
        outcome: what was wrong.
        op: name of the op.
        backend: which backend was wrong.
        path: the tensor, as `argument.field`; "" where no single one is at fault.
        detail: where, and both values.
        expected: the bytes of every output as they should be, by path, where they are known.
        got: the bytes of every output as that backend left them.
    """

    def __init__(
        self,
        outcome: Outcome,
        *,
        op: str,
        backend: str,
        path: str = "",
        detail: str = "",
        expected: Bytes | None = None,
        got: Bytes | None = None,
    ) -> None:
        where = f"{path}: " if path else ""
        super().__init__(f"{op} on {backend}: {where}{outcome}{': ' + detail if detail else ''}")
        self.outcome, self.op, self.backend, self.path, self.detail = outcome, op, backend, path, detail
        self.expected, self.got = dict(expected or {}), dict(got or {})

    @property
    def signature(self) -> tuple[str, str, str, str]:
        """The key that tells one failure from another: op, backend, outcome and tensor."""
        return self.op, self.backend, self.outcome.name, self.path


def violation_logs(spec: KernelSpec) -> list[str]:
    """Return the arguments of an op that are violation logs, in which the order of rows is free."""
    return [n for n, s in spec.arguments.items() if isinstance(s, StructSpec) and s.compare == "violations"]


def differing(
    spec: KernelSpec,
    bound: Mapping[str, Any],
    expected: Bytes,
    got: Bytes,
    *,
    relaunch: Callable[[Mapping[str, Any]], Bytes] | None = None,
    repeated: bool = False,
) -> tuple[str, str] | None:
    """Return the first output that differs, by more than its spec allows, as (path, detail), or None.

    Args:
        bound: the call, as it was before the launch.
        relaunch: runs a call on the reference; the rows of a ring that overflowed are compared only where it is given.
        repeated: whether both are of the same launch: its bits must be equal where the spec asks no less of repeating.
    """
    logs = violation_logs(spec)
    rings = {f"{name}.ring" for name in logs}
    for path, data in expected.items():
        if path not in rings and not torch.equal(data, got[path]):
            leaf = next(leaf for leaf in spec.leaves(bound) if leaf.path == path)
            detail = _difference(leaf, data, got[path], repeated=repeated)
            if detail:
                return path, detail
    for name in logs:
        detail = _compare_rings(bound, name, expected, got, relaunch=relaunch)
        if detail:
            return f"{name}.ring", detail
    return None


def elements_apart(leaf: Leaf, expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the elements that differ by more than the spec of an output allows.

    Args:
        leaf: the output, before the launch.
        expected, got: its bytes, those of the gaps between its rows included where they are there.
    """
    like = leaf.tensor
    item = like.element_size()
    apart: torch.Tensor = ((expected != got).nonzero().flatten() // item).unique()
    if leaf.spec is None or leaf.spec.tolerance is None or not len(apart):
        return apart
    agree = leaf.spec.tolerance.agree(*(_laid_out(like, data.clone().view(like.dtype)) for data in (expected, got)))
    # What lies in a gap is no value, and has no tolerance.
    told = torch.zeros(len(expected) // item, dtype=torch.bool)
    _laid_out(like, told).copy_(agree)
    beyond: torch.Tensor = apart[~told[apart]]
    return beyond


def _laid_out(like: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """Return a view of flat elements, those of gaps included where they are there, in the shape of `like`."""
    is_packed = elements.numel() == like.numel()
    return elements.view(like.shape) if is_packed else elements.as_strided(like.shape, like.stride())


def _difference(leaf: Leaf, expected: torch.Tensor, got: torch.Tensor, *, repeated: bool) -> str:
    """Say where and how far an output differs; "" where that is no further than its spec allows."""
    tolerance = None if leaf.spec is None else leaf.spec.tolerance
    if tolerance is None or (repeated and tolerance.repeatable):
        return first_difference(leaf.tensor, expected, got)
    apart = elements_apart(leaf, expected, got)
    if not len(apart):
        return ""
    values, came = (data.clone().view(leaf.tensor.dtype)[apart] for data in (expected, got))
    first = _values_at(leaf.tensor, expected, got, int(apart[0]))
    told = f"{len(apart)} of {leaf.tensor.numel()} elements lie beyond {tolerance}; the first at {first}"
    if values.dtype.is_complex:
        return told
    far = (came.double() - values.double()).abs()
    worst = int(torch.where(far.isnan(), torch.inf, far).argmax())
    farthest = _values_at(leaf.tensor, expected, got, int(apart[worst]))
    steps = int(distance(values, came)[worst])
    told += f"; the farthest at {farthest}"
    return told if not bool(far[worst].isfinite()) else f"{told}, {float(far[worst]):.6g} apart ({steps} ulp)"


def _compare_rings(
    bound: Mapping[str, Any],
    name: str,
    expected: Bytes,
    got: Bytes,
    *,
    relaunch: Callable[[Mapping[str, Any]], Bytes] | None,
) -> str:
    """Compare two violation rings as multisets, since the order of atomics is free; return what differs, or ""."""
    ring = bound[name].ring
    capacity = ring.shape[0]
    first = min(max(int(bound[name].count), 0), capacity)
    count = int(expected[f"{name}.count"].view(torch.int64))
    rows, rows_got = (_rows(result[f"{name}.ring"]) for result in (expected, got))
    last = min(max(count, first), capacity)
    if rows[:first] != rows_got[:first] or rows[last:] != rows_got[last:]:
        return "rows outside [count before, count after) were touched"
    new = Counter(map(tuple, rows_got[first:last]))
    if count <= capacity and int(bound[name].count) >= 0:
        wanted = Counter(map(tuple, rows[first:last]))
        if new == wanted:
            return ""
        missing, extra = list((wanted - new).elements()), list((new - wanted).elements())
        return f"reference has {missing[:1]}, got {extra[:1]}"
    if relaunch is None:
        return ""
    # Overflowed, or counted from below 0: which rows made it is free, but each must be one that the reference finds.
    found = count - int(bound[name].count)
    ring = torch.zeros(found, VIOLATION_WORDS, dtype=torch.int64)
    roomy = {**bound, name: dataclasses.replace(bound[name], ring=ring, count=torch.zeros(1, dtype=torch.int64))}
    whole = _rows(relaunch(roomy)[f"{name}.ring"])
    extra = list((new - Counter(map(tuple, whole))).elements())
    return f"not all rows have room, and {extra[0]} is none of the reference's rows" if extra else ""


def _rows(data: torch.Tensor) -> list[list[int]]:
    rows: list[list[int]] = data.view(torch.int64).view(-1, VIOLATION_WORDS).tolist()
    return rows


def first_difference(like: torch.Tensor, expected: torch.Tensor, got: torch.Tensor) -> str:
    """Say where the first differing element of two byte strings, laid out as `like`, is, and both values."""
    index = int((expected != got).nonzero()[0]) // like.element_size()
    return f"first at {_values_at(like, expected, got, index)}"


def place_of(like: torch.Tensor, index: int) -> str:
    """Return an element's indices, of a tensor without gaps, as text."""
    return str([int(i) for i in torch.unravel_index(torch.tensor(index), like.shape)])


def place_in_span(like: torch.Tensor, index: int) -> str:
    """Return the indices of an element of a tensor's span, in which rows may lie apart, as text."""
    place, left = [0] * like.dim(), index
    for axis in sorted(range(like.dim()), key=like.stride, reverse=True):
        if like.shape[axis] > 1:
            place[axis], left = divmod(left, like.stride(axis))
    inside = not left and all(i < extent for i, extent in zip(place, like.shape, strict=True))
    return str(place) if inside else f"in a gap, element {index}"


def _values_at(like: torch.Tensor, expected: torch.Tensor, got: torch.Tensor, index: int) -> str:
    """Say where an element of two byte strings, laid out as `like`, is, and both values."""
    item = like.element_size()
    values = [t[index * item : (index + 1) * item].clone().view(like.dtype).tolist()[0] for t in (expected, got)]
    where = f"[{index}]"
    if like.dim() == 2 and like.shape[1]:
        # The bytes are those of the span, gaps included, or of the packed rows where the gaps are too large to keep.
        packed = len(expected) == like.numel() * item
        width = like.shape[1] if packed else like.stride(0)
        where = f"[{index // width}, {index % width}]"
    elif like.dim() > 2:
        where = place_of(like, index) if len(expected) == like.numel() * item else place_in_span(like, index)
    return f"{where}: expected {values[0]}, got {values[1]}"
